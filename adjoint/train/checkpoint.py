"""Checkpoints are written, and loaded into a model and its optimizer; their format is that of
`adjoint.checkpoint`.

A checkpoint is written to a hidden folder beside its place, every file is flushed to the disk, the manifest
goes in last, and one rename makes it appear. Whoever is killed at any moment therefore leaves the old
checkpoints untouched and at most a hidden folder, which the next save removes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adjoint.checkpoint import (
    FORMAT,
    MANIFEST,
    REMOVING,
    RNG,
    FileEntry,
    StoredTensors,
    TrainerState,
    is_foreign,
    list_checkpoints,
    model_tensors,
    read_rng,
    read_trainer,
    remove_checkpoint,
    sha256,
    step_of,
    verify_checkpoint,
)
from adjoint.errors import UserError
from adjoint.files import disk_errors, flush
from adjoint.files.remote import Place, place_of
from adjoint.methods import Method
from adjoint.parallel.split_tensors import gather, is_split, split_like
from adjoint.train.carry_state import STEM
from adjoint.train.dependencies import ConfigDict, check_model, records_model
from adjoint.train.machine import weights_dtype
from adjoint.train.optimizer import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MAY_CHANGE = ("run.", "cluster.", "training.steps", "model.from_pretrained")
_SIZES_OF_FOLDER = ("model.vocab_size", "model.d_model", "model.n_layer")
_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_WRITING = ".writing-"  # a folder that a kill may leave, as `REMOVING`; the next save deletes them


def save_checkpoint(
    directory: str | Path,
    step: int,
    write: Callable[[Path], Mapping[str, FileEntry]],
    trainer: TrainerState,
    rng: Mapping[str, object] | None = None,
    keep: int | None = None,
    spared: int | None = None,
) -> Path:
    """Write ``directory/step-XXXXXXXX`` and return its path; if the disk refuses, earlier ones are as they
    were.

    Args:
        write: writes the tensors' files to the folder that it is given, flushed, and returns their entries of
            the manifest by name: `model_files` in one process.
        trainer: what JSON can hold: data cursor, configuration, …
        rng: random generator states, tensors and plain values only.
        keep: afterwards, delete all but the newest ``keep`` checkpoints and that of the step ``spared``.
    """
    final = Path(directory) / f"step-{step:08d}"
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in final.parent.iterdir():
        if path.name.startswith((_WRITING, REMOVING)):
            shutil.rmtree(path)
    work = final.with_name(f"{_WRITING}{final.name}")
    work.mkdir()
    try:
        files = dict(write(work))
        with disk_errors(final):
            torch.save(dict(rng or {}), work / RNG)
            text = json.dumps({"step": step, **trainer}, indent=1)
            (work / "trainer.json").write_text(text, encoding="utf-8")
            files |= {name: _flushed(work / name) for name in (RNG, "trainer.json")}
            manifest = {"format": FORMAT, "step": step, "files": files}
            (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        flush(work / MANIFEST)
        flush(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # a full disk needs the room back
        raise
    if final.exists():  # only a damaged one, or one of a future that a resume went back behind
        remove_checkpoint(final)
    os.replace(work, final)
    flush(final.parent)
    if keep is not None:
        for old in list_checkpoints(final.parent)[:-keep]:
            if step_of(old) != spared:
                remove_checkpoint(old)
    return final


def model_files(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    states: Mapping[str, torch.Tensor] | None = None,
    copied: bool = False,
    writes: bool = True,
) -> Callable[[Path], dict[str, FileEntry]]:
    """Return the function that writes a model's tensors into a folder, for `save_checkpoint`.

    Tensors that are split over ranks are put together, one by one: all ranks must call this.

    Args:
        model: its ``state_dict`` is saved; shared tensors (a tied head) once; with adapters, what is trained.
        optimizer: its per-parameter state is saved by the parameter's name; None saves none.
        states: recurrent states that the next batch goes on from, by name.
        copied: what is written is all this as it is now, copied to the CPU, and not as it is by then.
        writes: False on ranks that only give their parts: the function then writes nothing.
    """
    tensors_by_name = model.state_dict(keep_vars=True)
    tensors_by_name = {
        name: tensor for name, tensor in tensors_by_name.items() if not _is_the_folders(model, tensor)
    }
    first_names = {id(tensor): name for name, tensor in reversed(tensors_by_name.items())}
    parameters = dict(model.named_parameters())
    contents: dict[str, Mapping[str, torch.Tensor]] = {
        "model": {name: tensors_by_name[name] for name in first_names.values()},
        "optimizer": optimizer_tensors(optimizer, parameters),
    } | ({STEM: states} if states else {})
    files: dict[str, dict[str, torch.Tensor]] = {}
    for stem, tensors in contents.items():
        file = files[f"{stem}.safetensors"] = {}
        for name, tensor in tensors.items():
            parameter = parameters.get(name.partition("|")[0], tensor)
            complete = gather(tensor.detach(), parameter)
            if writes:
                in_memory = copied or is_split(
                    tensor, parameter
                )  # put together on a GPU, it must not stay there
                file[name] = complete.to("cpu", copy=copied) if in_memory else complete
    return lambda folder: {
        name: write_file(folder / name, tensors) for name, tensors in files.items() if writes
    }


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> FileEntry:
    """Write tensors by name, flushed to the disk; return the file's entry for the manifest."""
    from safetensors.torch import save_file

    with disk_errors(path):
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, str(path), metadata)
    path.chmod(path.parent.stat().st_mode & 0o666)  # as the umask says: safetensors makes its files private
    return _flushed(path)


def load_checkpoint(
    path: str | Place,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ConfigDict | None = None,
    verify: bool = True,
) -> tuple[TrainerState, dict[str, Any]]:
    """Fill ``model`` and ``optimizer`` from a checkpoint; return its (trainer, rng) dictionaries.

    Raises:
        UserError: the checkpoint is damaged, or is of another model than `config` says, or ``model`` is.
    """
    path = place_of(path)
    if verify:
        verify_checkpoint(path)
    trainer = read_trainer(path)
    if config is not None:
        check_config(path, config)
    _load_weights(path, model)
    if optimizer is not None:
        stored = StoredTensors(path, "optimizer")
        names = [name for name, _ in model.named_parameters()]
        unknown = {name.rpartition("|")[0] for name in stored.files_by_name} - set(names)
        if unknown:
            raise UserError(f"{path}: has optimizer state of {min(unknown)}, which this model has not")
        load_optimizer(
            optimizer, {name: stored.read_entries(name) for name in names}, dict(model.named_parameters())
        )
    return trainer, read_rng(path)


def trained_model(
    checkpoint: Place, method: Method, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Return the transformers model of a run's checkpoint that is known to be whole, wrapped; adapters are
    merged into its weights, unless these are quantized."""
    from adjoint.hf.model_parts import base_of
    from adjoint.train.peft_adapters import merged
    from adjoint.train.pretrained import KEY, prepared, unwrapped
    from adjoint.train.quantization import described

    config = read_trainer(checkpoint)["config"]
    settings = config["model"]
    check_model(checkpoint, config)
    folder, lora = settings["from_pretrained"], settings.get("lora")
    trusted, kind = settings.get("trust_remote_code", False), settings.get("quantization")
    model = unwrapped(folder, _weights_dtype(config), trusted, KEY, kind, device)
    model = prepared(model, folder, method, lora)
    load_checkpoint(checkpoint, model, verify=False)
    if described(model.config) is None:
        return (merged(model) if lora else model).to(device)
    return base_of(model)


def merged_model(checkpoint: Place) -> PreTrainedModel:
    """Return `trained_model` on the CPU with floating-point weights.

    Adapters on quantized weights are merged into the weights that the folder has or, if it is saved
    quantized, into those that the quantized ones stand for."""
    from adjoint.train.peft_adapters import adapted, merged
    from adjoint.train.pretrained import KEY, dequantized, unwrapped
    from adjoint.train.quantization import described
    from adjoint.train.stored_dtypes import read_dtype

    config = read_trainer(checkpoint)["config"]
    settings = config["model"]
    check_model(checkpoint, config)
    folder, trusted = settings["from_pretrained"], settings.get("trust_remote_code", False)
    dtype = torch.promote_types(_weights_dtype(config), read_dtype(Path(folder)))
    model = unwrapped(folder, dtype, trusted, KEY)
    if described(model.config) is not None:
        model = dequantized(model, folder)
    if lora := settings.get("lora"):
        model = adapted(model, lora)
    load_checkpoint(checkpoint, model, verify=False)
    return merged(model) if lora else model


def _weights_dtype(config: ConfigDict) -> torch.dtype:
    """Return the dtype of the weights in a checkpoint, by the run's configuration."""
    return weights_dtype(config.get("training", {}).get("precision", "auto"))


def check_config(path: Place, config: ConfigDict) -> None:
    """Raise UserError, naming the first differing key, where the checkpoint is of another model, or of an
    optimizer with another state, or where the pretrained model's folder changed since."""
    if is_foreign(path):  # whose names and shapes tell
        return
    stored = read_trainer(path).get("config", {})
    ignored = {"trust_remote_code", "offload"}  # a permission, and where weights are
    if records_model(path) and config["model"].get("from_pretrained") is not None:
        ignored |= {"from_pretrained"}  # which may have moved: its content is compared
    saved, current = (
        _leaves({k: v for k, v in c.get("model", {}).items() if k not in ignored}, "model.")
        for c in (stored, config)
    )
    for differs, source in ((saved, stored), (current, config)):
        differs["training.optimizer"] = source.get("training", {}).get("optimizer", "adamw")
    for key in [*current, *(key for key in saved if key not in current)]:
        if (saved_value := saved.get(key)) == current.get(key):
            continue
        section = key.rpartition(".")[0]
        if section in saved and saved[section] is None:  # a section that is switched on by its keys
            raise UserError(
                f"{path}: has no {section}, this run has {key} {current[key]}; leave {section} out or start "
                "another run"
            )
        remedy = f"set {_as_flag(key, saved_value)}"
        if config["model"].get("from_pretrained") is not None and key in _SIZES_OF_FOLDER:
            remedy = "set --model.from_pretrained to the model that it is from"
        raise UserError(
            f"{path}: has {key} {saved_value}, this run has {current.get(key)}; {remedy} or start another run"
        )
    check_model(path, config)


def changed_keys(stored: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Say which settings of a run differ from those of its checkpoint, as "training.lr 0.1, was 0.2"; where a
    run is, how long and over what, is not among them."""
    saved_leaves, current_leaves = _leaves(stored), _leaves(current)
    keys = [key for key in current_leaves if key in saved_leaves and not key.startswith(_MAY_CHANGE)]
    return [
        f"{key} {current_leaves[key]}, was {saved_leaves[key]}"
        for key in keys
        if current_leaves[key] != saved_leaves[key]
    ]


def _leaves(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a configuration's values by their dotted keys."""
    leaves: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves |= _leaves(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves


def _as_flag(key: str, value: object) -> str:
    """Return the words of a command line that set a key."""
    return f"--{key} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}"


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the state of named parameters as "<name>|<state key>"."""
    state = {} if optimizer is None else optimizer.state
    return {
        f"{name}|{key}": value.detach().contiguous()
        for name, parameter in named.items()
        for key, value in _flattened(state.get(parameter, {})).items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, torch.Tensor]],
    named: Mapping[str, torch.Tensor],
) -> None:
    """Fill an optimizer with the state of its parameters, whatever groups they are in."""
    names = {parameter: name for name, parameter in named.items()}
    for each in parts_of(optimizer):
        ordered = [names[parameter] for group in each.param_groups for parameter in group["params"]]
        indexed_state = {
            i: _restored(state[name], named[name]) for i, name in enumerate(ordered) if state.get(name)
        }
        is_muons = isinstance(each, torch.optim.Muon)
        for i, entries in indexed_state.items():
            if ("momentum_buffer" in entries) != is_muons:
                raise UserError(
                    f"{ordered[i]}: the checkpoint has the state of {'AdamW' if is_muons else 'Muon'} for "
                    "it, from a version that divided parameters in another way; start another run"
                )
            if not is_muons and not {key.partition(".")[0] for key in entries} >= _ADAM:
                kinds = ", ".join(sorted(entries))
                raise UserError(
                    f"{ordered[i]}: the checkpoint has {kinds} for it, which is not the state of AdamW; "
                    "write the weights alone, and resume from these"
                )
        each.load_state_dict({"state": indexed_state, "param_groups": each.state_dict()["param_groups"]})


def _flattened(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return a parameter's optimizer state as plain tensors: of 8-bit moments codes, scales and what codes
    stand for, "exp_avg.codes" and so on."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value) and not hasattr(value, "placements"):
            flat |= {
                f"{key}.{attribute}": getattr(value, attribute) for attribute in value.__tensor_flatten__()[0]
            }
        else:
            flat[key] = torch.as_tensor(value)
    return flat


def _restored(flat: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rebuild a parameter's optimizer state, split as the parameter is: the reverse of `_flattened`."""
    state = {key: split_like(value, parameter) for key, value in flat.items() if "." not in key}
    for key in [key.removesuffix(".codes") for key in flat if key.endswith(".codes")]:
        from torchao.optim.subclass_8bit import OptimState8bit

        parts = [flat[f"{key}.{attribute}"] for attribute in OptimState8bit.tensor_attrs]
        signed = bool(flat[f"{key}.qmap"].min() < 0)
        state[key] = OptimState8bit(*parts, signed, parameter.dtype)
    return state


def _flushed(file: Path) -> FileEntry:
    """Wait until a file is on the disk; its entry for the manifest."""
    flush(file)
    return {"sha256": sha256(file), "bytes": file.stat().st_size}


def _load_weights(path: Place, model: nn.Module) -> None:
    """Fill a model. Of a tensor with several names, as a tied table has, the checkpoint needs only one."""
    stored, tensors = model_tensors(path), model.state_dict(keep_vars=True)
    restored_ids = {id(tensors[name]) for name in tensors if name in stored.files_by_name}
    missing = {n for n, t in tensors.items() if id(t) not in restored_ids and not _is_the_folders(model, t)}
    differing = sorted(missing | (stored.files_by_name.keys() - tensors.keys()))
    try:
        if differing:
            raise RuntimeError(f"differing: {', '.join(differing[:3])}")
        parts = {name: split_like(stored[name], tensors[name]) for name in stored.files_by_name}
        model.load_state_dict(parts, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: its weights do not fit this model ({reason})") from None


def _is_the_folders(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a model with adapters is as it was read from the model's folder."""
    return hasattr(model, "peft_config") and not tensor.requires_grad
