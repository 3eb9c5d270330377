"""Readers of a model's place, whatever its format: folders as stacks, and what commands ask of a place."""

import json
from pathlib import Path
from typing import Any

from adjoint.checkpoint import MANIFEST, model_tensors, read_checkpoint, read_trainer
from adjoint.errors import UserError
from adjoint.files.distributed_checkpoint import is_distributed_checkpoint
from adjoint.files.remote import Place, RemoteError, RemotePath
from adjoint.formats import FORMATS, file_format_of, format_of
from adjoint.formats.names import Values, Weights, with_tied_table
from adjoint.formats.tensor_files import read_tensors
from adjoint.layers import StackConfig


def from_pretrained(folder: Place, layout: str | None = None) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights of a model in a folder.

    The weights are on the CPU, in the dtypes they are stored in.

    Args:
        folder: a model in one of `FORMATS`; a run, whose newest good checkpoint is read; or a checkpoint of a
            run. A run may be at an address.
        layout: the only one of `FORMATS` that is accepted; None accepts all, and runs.

    Raises:
        UserError: it is none of these, a file is missing or damaged, or the model has parts that a stack
            lacks.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; download a model with huggingface_hub.snapshot_download")
    is_checkpoint = (folder / MANIFEST).is_file() or is_distributed_checkpoint(folder)
    if (folder / "checkpoints").is_dir() or is_checkpoint:
        _check_layout(folder, "a run", None, layout)
        return read_checkpoint(folder, str(folder), from_checkpoint)
    if isinstance(folder, RemotePath):
        raise UserError(
            f"{folder}: is no run, and models are read from folders of this machine; download it, then name "
            "that folder"
        )
    if not (folder / "config.json").is_file():
        refuse_adapter(folder, str(folder))
        raise UserError(
            f"{folder}: neither a model (it has no config.json) nor a run; name the folder of one"
        )
    config_json = read_json(folder / "config.json")
    format_name, model_type = format_of(config_json), config_json.get("model_type")
    _check_layout(folder, f"a model of transformers, of type {model_type!r}", format_name, layout)
    try:
        config = FORMATS[format_name].read_config(config_json)
    except KeyError as error:
        raise UserError(f"{folder}: its config.json has no {error.args[0]}; use the model's own") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {error}") from None
    weights = _read_weights(folder)
    try:
        return FORMATS[format_name].read_weights(config_json, config, weights)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None


def holds_model(place: Path) -> bool:
    """Whether a place is a folder with a config.json or a file of `FILE_FORMATS`; a run is neither."""
    return (place / "config.json").is_file() or file_format_of(place) is not None


def has_weights(place: Path) -> bool:
    """Whether a model's place has its weights, and not its config.json alone."""
    if place.is_file():
        return file_format_of(place) is not None
    return bool([*place.glob("*.safetensors"), *place.glob("*.bin")])


def described_sizes(place: Path) -> str:
    """Return text that differs between models of different sizes: a config.json, or a file's sizes."""
    if (file_format := file_format_of(place)) is not None:
        return json.dumps(file_format.sizes_of_file(place))
    return (place / "config.json" if place.is_dir() else place).read_text(encoding="utf-8")


def why_not_evaluated(place: Path) -> str | None:
    """Say what a model's place is, if it is of a format that `adjoint eval` cannot read; None if it can."""
    if file_format_of(place) is not None:
        return None
    try:
        config_json = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except ValueError:  # refused where it is read
        return None
    return FORMATS[format_of(config_json)].WHY_NOT_EVALUATED if isinstance(config_json, dict) else None


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
        f"{called}: {folder} holds an adapter of PEFT, for {base}, and no model; of a run of adjoint train, "
        "name the folder that adjoint export writes, with the adapter merged; merge another one first "
        "(merge_and_unload and save_pretrained; PEFT merges an adapter of a head that is tied to the "
        f"embeddings into both: untie these before), or name {base}"
    )


def _check_layout(folder: Place, description: str, format_name: str | None, layout: str | None) -> None:
    if layout not in (None, format_name):
        raise UserError(f"{folder}: is {description}, not a model of {layout}; use Stack.from_pretrained")


def from_checkpoint(checkpoint: Place) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights of a run's checkpoint, which the caller has verified."""
    config, stored = checkpoint_config(checkpoint), model_tensors(checkpoint)
    return with_tied_table({name: stored[name].clone() for name in stored.files_by_name}, config)


def checkpoint_config(checkpoint: Place) -> StackConfig:
    """Return the configuration of the model in a run's checkpoint.

    Raises:
        UserError: its trainer.json describes no model that this version knows.
    """
    try:
        model_settings = dict(read_trainer(checkpoint)["config"]["model"])
        if model_settings.pop("from_pretrained", None) is not None:
            raise ValueError("it is of a Hugging Face model")
        for key in ("lora", "offload", "quantization", "trust_remote_code"):
            model_settings.pop(key, None)
        return StackConfig(**model_settings)
    except RemoteError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint}: its trainer.json describes no model that this version knows ({error!r})"
        ) from None


def _read_weights(folder: Path) -> Weights:
    """Return all tensors of a model's folder, in one file or in the shards of an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        files, index = [folder / name], folder / f"{name}.index.json"
        if index.is_file() and not files[0].is_file():
            files = [folder / shard for shard in sorted(set(read_json(index)["weight_map"].values()))]
        elif not files[0].is_file():
            continue
        return {key: tensor for file in files for key, tensor in read_tensors(file).items()}
    raise UserError(f"{folder}: has neither model.safetensors nor pytorch_model.bin; download all its files")


def read_json(file: Path) -> Values:
    """Return the keys and values of a JSON file of a model.

    Raises:
        UserError: it holds something else.
    """

    def decode_special(value: Values) -> Any:  # transformers 5 writes {"__float__": "Infinity"}
        return float(value["__float__"]) if set(value) == {"__float__"} else value

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=decode_special)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: has no keys; download it again")
    return content
