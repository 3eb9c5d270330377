"""A model's folder, whatever its format, as a stack's sizes and weights."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from adjoint.checkpoint import MANIFEST, StoredTensors, checkpoint_at, read_trainer
from adjoint.errors import UserError
from adjoint.formats import FORMATS
from adjoint.formats.names import Weights, by_our_names, tied
from adjoint.layers import StackConfig


def from_pretrained(folder: Path, layout: str | None = None) -> tuple[StackConfig, Weights]:
    """The configuration and the weights, on the CPU in the dtypes they are stored in, of a model in a folder.

    Args:
        folder: of a format of `FORMATS`; of a run, whose newest good checkpoint is read; or a checkpoint of
            one.
        layout: the one of `FORMATS` that it must be of.

    Raises:
        UserError: it is none of these, a file is missing or damaged, or the model has what a stack has not.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; download a model's with huggingface_hub.snapshot_download"
        )
    if (folder / "checkpoints").is_dir() or (folder / MANIFEST).is_file():
        _check_layout(folder, "a run", None, layout)
        return from_checkpoint(checkpoint_at(folder, str(folder)))
    if not (folder / "config.json").is_file():
        refuse_adapter(folder, str(folder))
        raise UserError(
            f"{folder}: neither a model (it has no config.json) nor a run; name the folder of one"
        )
    given = _read_json(folder / "config.json")
    found = "transformers" if "model_type" in given else "mamba-ssm"
    if found == "transformers":
        _check_layout(folder, f"a model of transformers, of type {given['model_type']!r}", found, layout)
    try:
        config = FORMATS[found].read_config(given)
    except KeyError as error:
        raise UserError(f"{folder}: its config.json has no {error.args[0]}; take the model's own") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {error}") from None
    weights = _read_weights(folder)
    try:
        return by_our_names(weights, config)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None


def refuse_adapter(folder: Path, called: str) -> None:
    """Raise a UserError if a folder holds an adapter of PEFT, and no model.

    Args:
        called: the user's words for the folder, or the key that names it.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    base = base or "its base model"
    raise UserError(
        f"{called}: {folder} holds an adapter of PEFT, for {base}; merge it (PeftModel.from_pretrained, then "
        f"merge_and_unload and save_pretrained) and name that folder, or name {base}"
    )


def _check_layout(folder: Path, what: str, found: str | None, layout: str | None) -> None:
    if layout not in (None, found):
        raise UserError(f"{folder}: is {what}, not a model of {layout}; use Stack.from_pretrained")


def from_checkpoint(checkpoint: Path) -> tuple[StackConfig, Weights]:
    """The configuration and the weights of a run's checkpoint, which the caller has verified."""
    config, stored = checkpoint_config(checkpoint), StoredTensors(checkpoint, "model")
    return tied({name: stored[name].clone() for name in stored.where}, config)


def checkpoint_config(checkpoint: Path) -> StackConfig:
    """The model of a run's checkpoint.

    Raises:
        UserError: its trainer.json describes none that this version knows.
    """
    try:
        given = dict(read_trainer(checkpoint)["config"]["model"])
        if given.pop("from_pretrained", None) is not None:
            raise ValueError("it is of a Hugging Face model")
        for key in ("lora", "trust_remote_code"):
            given.pop(key, None)
        return StackConfig(**given)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint}: its trainer.json describes no model that this version knows ({error!r})"
        ) from None


def _read_weights(folder: Path) -> Weights:
    """All tensors of a model's folder, in one file or in the shards of an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        files, index = [folder / name], folder / f"{name}.index.json"
        if index.is_file() and not files[0].is_file():
            files = [folder / shard for shard in sorted(set(_read_json(index)["weight_map"].values()))]
        elif not files[0].is_file():
            continue
        return {key: tensor for file in files for key, tensor in _read_tensors(file).items()}
    raise UserError(f"{folder}: has neither model.safetensors nor pytorch_model.bin; download all its files")


def _read_tensors(file: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise UserError(f"{file}: no such file, but the index beside it lists it; download all files")
    try:
        if file.suffix == ".safetensors":  # parts of a mapped file: copied, to be the model's own
            return {name: tensor.clone() for name, tensor in load_file(str(file)).items()}
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be read ({reason}); download it again") from None


def _read_json(file: Path) -> dict[str, Any]:
    def special(value: dict[str, Any]) -> Any:  # transformers 5 writes {"__float__": "Infinity"}
        return float(value["__float__"]) if set(value) == {"__float__"} else value

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=special)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no keys; download it again")
    return content
