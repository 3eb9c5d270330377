"""Checkpoints that are whole or not there.

    checkpoints/step-00000100/model.safetensors       weights, by parameter name
                              optimizer.safetensors   optimizer state, "<parameter name>|<state key>"
                              rng.pt                  random number generators
                              trainer.json            step, data cursor, configuration
                              MANIFEST.json           SHA-256 and size of each file above; written last

A checkpoint is written to a hidden folder beside its place, every file is flushed to the disk, the manifest
goes in last, and one rename makes it appear. Whoever is killed at any moment therefore leaves the old
checkpoints untouched and at most a hidden folder, which the next save removes. State is stored by parameter
name, never by position, so it can be read back by another grouping of the same parameters. Nothing is
unpickled: `rng.pt` is read with ``weights_only=True``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adjoint.errors import UserError

FORMAT = 1
MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are missing, cut short or changed."""


def save_checkpoint(
    directory: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    trainer: dict[str, Any],
    rng: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write ``directory/step-XXXXXXXX`` and return its path.

    Args:
        directory: the run's folder of checkpoints; made if missing.
        step: optimizer steps done.
        model: its ``state_dict`` is saved; tensors that are shared (a tied head) once.
        optimizer: its per-parameter state is saved by the parameter's name; None saves none.
        trainer: what JSON can hold: data cursor, configuration, …
        rng: random generator states, tensors and plain values only.
        keep: afterwards, delete all but the newest ``keep`` checkpoints; None keeps all.

    Raises:
        OSError: the disk refused; earlier checkpoints are as they were.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    final = directory / f"step-{step:08d}"
    work = directory / f".writing-{final.name}"
    work.mkdir()
    try:
        _write_files(work, model, optimizer, {"step": step, **trainer}, rng or {})
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # a full disk needs the room back
        raise
    if final.exists():  # only a damaged one, or one of a future that a resume went back behind
        _remove(final)
    os.replace(work, final)
    _fsync(directory)
    if keep is not None:
        for old in list_checkpoints(directory)[:-keep]:
            _remove(old)
    return final


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: dict[str, Any] | None = None,
    verify: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill ``model`` and ``optimizer`` from a checkpoint; return its (trainer, rng) dictionaries.

    Args:
        config: nested configuration of the run that loads; its "model" section must equal the checkpoint's.
        verify: compare the checksums first.

    Raises:
        UserError: the checkpoint is damaged, or is of another model: the first differing key is named.
    """
    from safetensors.torch import load_file, load_model

    path = Path(path)
    if verify:
        verify_checkpoint(path)
    trainer = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    if config is not None:
        _same_model(path, trainer.get("config", {}).get("model", {}), config["model"])
    device = next(model.parameters()).device
    try:
        load_model(model, str(path / "model.safetensors"), device=str(device))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: its weights do not fit this model ({reason}); resume with its own config"
        ) from None
    if optimizer is not None:
        _load_optimizer(path, model, optimizer, load_file(str(path / "optimizer.safetensors"), device="cpu"))
    rng = torch.load(path / "rng.pt", weights_only=True, map_location="cpu")
    return trainer, rng


def list_checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints of a folder by step, oldest first; unverified."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def newest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint whose checksums hold, or None. A damaged one is passed with a line on stderr."""
    for path in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(path)
            return path
        except DamagedCheckpoint as error:
            print(f"warning: {error}; using the one before it", file=sys.stderr, flush=True)
    return None


def verify_checkpoint(path: str | Path) -> None:
    """Check that every file of the manifest is there, has its size and its SHA-256.

    Raises:
        DamagedCheckpoint: naming the file that is not as it was written.
        UserError: there is no checkpoint of that name.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; name a folder like RUN/checkpoints/step-00000100")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
        entries = [(name, entry["sha256"], entry["bytes"]) for name, entry in files.items()]
    except FileNotFoundError:
        if (path / "checkpoints").is_dir():
            raise UserError(
                f"{path}: is a run, not a checkpoint; continue it with --run.dir {path} --resume auto"
            ) from None
        raise DamagedCheckpoint(f"damaged checkpoint {path}: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedCheckpoint(f"damaged checkpoint {path}: {MANIFEST} cannot be read") from None
    if version != FORMAT:
        raise UserError(
            f"{path}: written in checkpoint format {version}, this version reads {FORMAT}; use another one"
        )
    if "model.safetensors" not in files or "trainer.json" not in files:
        raise DamagedCheckpoint(f"damaged checkpoint {path}: {MANIFEST} is incomplete")
    for name, sha256, size in entries:
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(f"damaged checkpoint {path}: {name} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(
                f"damaged checkpoint {path}: {name} has {file.stat().st_size} bytes, not {size}"
            )
        if _sha256(file) != sha256:
            raise DamagedCheckpoint(f"damaged checkpoint {path}: the checksum of {name} does not match")


def set_aside_after(directory: str | Path, step: int) -> list[Path]:
    """Rename the checkpoints beyond ``step`` so that none of an abandoned future is picked up later."""
    moved = []
    for path in list_checkpoints(directory):
        if int(path.name.removeprefix("step-")) > step:
            target = path.with_name(f"{path.name}.set-aside")
            if target.exists():
                _remove(target)
            os.replace(path, target)
            moved.append(target)
    return moved


def _write_files(
    work: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    trainer: dict[str, Any],
    rng: dict[str, Any],
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file, save_model

    try:
        save_model(model, str(work / "model.safetensors"))
        save_file(_optimizer_tensors(model, optimizer), str(work / "optimizer.safetensors"))
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(None, str(error), str(work)) from error
    torch.save(rng, work / "rng.pt")
    (work / "trainer.json").write_text(json.dumps(trainer, indent=1), encoding="utf-8")
    files = {}
    mode = (work / "trainer.json").stat().st_mode
    for file in sorted(work.iterdir()):
        file.chmod(mode)  # safetensors makes its files private; the run's other files follow the umask
        _fsync(file)
        files[file.name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
    manifest = {"format": FORMAT, "step": trainer["step"], "files": files}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _fsync(work / MANIFEST)
    _fsync(work)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def _load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("|")
        by_name.setdefault(parameter, {})[key] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    unknown = set(by_name) - set(names.values())
    if unknown:
        raise UserError(f"{path}: has optimizer state of {min(unknown)}, which this model has not")
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: by_name[name] for index, name in enumerate(ordered) if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _same_model(path: Path, saved: dict[str, Any], here: dict[str, Any]) -> None:
    for key in [*here, *(key for key in saved if key not in here)]:
        if saved.get(key) != here.get(key):
            raise UserError(
                f"{path}: has model.{key} {saved.get(key)}, this run has {here.get(key)}; "
                f"set --model.{key} {saved.get(key)} or start another run"
            )


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill half-way leaves no half checkpoint behind."""
    doomed = path.with_name(f".removing-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def _remove_leftovers(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name.startswith((".writing-", ".removing-")):
            shutil.rmtree(path)
