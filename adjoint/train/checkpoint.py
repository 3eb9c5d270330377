"""Checkpoints that are whole or not there.

    checkpoints/step-00000100/model.safetensors       weights, by parameter name
                              optimizer.safetensors   optimizer state, "<parameter name>|<state key>"
                              rng.pt                  random number generators
                              trainer.json            step, data cursor, configuration
                              MANIFEST.json           SHA-256 and size of each file above; written last

A run over several shards writes model-00001-of-00004.safetensors and so on, a file a shard, and likewise for
the optimizer; the names inside are the same, so that any number of shards, or one process, reads either.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adjoint.errors import UserError
from adjoint.files import flush

FORMAT = 1
MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
_WRITING, _REMOVING = ".writing-", ".removing-"  # folders that a kill may leave; the next save deletes them


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
    own = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(own.items())}
    weights = {name: own[name] for name in first_names.values()}
    work = begin_checkpoint(directory, step)
    try:
        state = optimizer_tensors(optimizer, dict(model.named_parameters()))
        contents = {"model.safetensors": weights, "optimizer.safetensors": state}
        files = {name: write_file(work / name, tensors) for name, tensors in contents.items()}
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)  # a full disk needs the room back
        raise
    return commit_checkpoint(work, files, {"step": step, **trainer}, rng or {}, keep)


def begin_checkpoint(directory: str | Path, step: int) -> Path:
    """Make the hidden folder that a checkpoint's files are written to before `commit_checkpoint`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path)
    work = directory / f"{_WRITING}step-{step:08d}"
    work.mkdir()
    return work


def commit_checkpoint(
    work: Path,
    files: dict[str, dict[str, Any]],
    trainer: dict[str, Any],
    rng: dict[str, Any],
    keep: int | None = None,
) -> Path:
    """Add what is not tensors to the folder of `begin_checkpoint`, then the manifest; make it appear.

    Args:
        files: name → entry of the manifest, of files that others have written and flushed (`write_file`).
    """
    final = work.with_name(work.name.removeprefix(_WRITING))
    try:
        torch.save(rng, work / "rng.pt")
        (work / "trainer.json").write_text(json.dumps(trainer, indent=1), encoding="utf-8")
        files = files | {name: _flushed(work / name) for name in ("rng.pt", "trainer.json")}
        manifest = {"format": FORMAT, "step": trainer["step"], "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        flush(work / MANIFEST)
        flush(work)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if final.exists():  # only a damaged one, or one of a future that a resume went back behind
        _remove(final)
    os.replace(work, final)
    flush(final.parent)
    if keep is not None:
        for old in list_checkpoints(final.parent)[:-keep]:
            _remove(old)
    return final


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors by name, flushed to the disk; return the file's entry for the manifest."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, str(path))
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(None, str(error), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # as the umask says: safetensors makes its files private
    return _flushed(path)


class Tensors:
    """The tensors of a checkpoint's model or optimizer files, read one at a time by name.

    Args:
        path: the checkpoint. stem: "model" or "optimizer".
    """

    def __init__(self, path: Path, stem: str) -> None:
        from safetensors import safe_open

        self.path, self.where = path, dict[str, Any]()
        for file in sorted(path.glob(f"{stem}*.safetensors")):
            stored = safe_open(str(file), "pt")
            self.where |= dict.fromkeys(stored.keys(), stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor by name; a tied table under either of its names.

        Raises:
            UserError: the checkpoint has none of that name.
        """
        tied = {"embedding.weight": "lm_head.weight", "lm_head.weight": "embedding.weight"}
        found = name if name in self.where else tied.get(name, name)
        if found not in self.where:
            raise UserError(f"{self.path}: has no {name}; resume with its own config")
        return self.where[found].get_tensor(found)

    def of(self, parameter: str) -> dict[str, torch.Tensor]:
        """A parameter's optimizer state."""
        names = [name for name in self.where if name.rpartition("|")[0] == parameter]
        return {name.rpartition("|")[2]: self[name] for name in names}


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
    path = Path(path)
    if verify:
        verify_checkpoint(path)
    trainer = read_trainer(path)
    if config is not None:
        check_config(path, config)
    _load_weights(path, model)
    if optimizer is not None:
        stored = Tensors(path, "optimizer")
        names = [name for name, _ in model.named_parameters()]
        unknown = {name.rpartition("|")[0] for name in stored.where} - set(names)
        if unknown:
            raise UserError(f"{path}: has optimizer state of {min(unknown)}, which this model has not")
        load_optimizer(optimizer, {name: stored.of(name) for name in names}, dict(model.named_parameters()))
    rng = torch.load(path / "rng.pt", weights_only=True, map_location="cpu")
    return trainer, rng


def read_trainer(path: Path) -> dict[str, Any]:
    """A checkpoint's step, data cursor, configuration, …"""
    return json.loads((path / "trainer.json").read_text(encoding="utf-8"))


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Raises UserError, naming the first differing key, where the checkpoint is of another model."""
    saved, here = read_trainer(path).get("config", {}).get("model", {}), config["model"]
    for key in [*here, *(key for key in saved if key not in here)]:
        if saved.get(key) != here.get(key):
            raise UserError(
                f"{path}: has model.{key} {saved.get(key)}, this run has {here.get(key)}; "
                f"set --model.{key} {saved.get(key)} or start another run"
            )


def list_checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoints of a folder by step, oldest first; unverified."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


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

    def damaged(what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"damaged checkpoint {path}: {what}")

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
        raise damaged(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(f"{MANIFEST} cannot be read") from None
    if version != FORMAT:
        raise UserError(
            f"{path}: written in checkpoint format {version}, this version reads {FORMAT}; use another one"
        )
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    all_shards = bool(shards) and len(shards) == int(shards[0][1])
    if not ("model.safetensors" in files or all_shards) or "trainer.json" not in files:
        raise damaged(f"{MANIFEST} is incomplete")
    for name, sha256, size in entries:
        file = path / name
        if not file.is_file():
            raise damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(f"{name} has {file.stat().st_size} bytes, not {size}")
        if _sha256(file) != sha256:
            raise damaged(f"the checksum of {name} does not match")


def set_aside_after(directory: str | Path, step: int) -> list[Path]:
    """Rename the checkpoints beyond ``step`` so that none of an abandoned future is picked up later."""
    moved = []
    for path in list_checkpoints(directory):
        if step_of(path) > step:
            target = path.with_name(f"{path.name}.set-aside")
            if target.exists():
                _remove(target)
            os.replace(path, target)
            moved.append(target)
    return moved


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, named: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state of named parameters as "<name>|<state key>"."""
    tensors: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        for name, parameter in named.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, dict[str, torch.Tensor]],
    named: Mapping[str, torch.Tensor],
) -> None:
    """Fill an optimizer with the state of its parameters, whatever groups they are in."""
    names = {parameter: name for name, parameter in named.items()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    by_index = {index: state[name] for index, name in enumerate(ordered) if state.get(name)}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})


def _flushed(file: Path) -> dict[str, Any]:
    """Wait until a file is on the disk; its entry for the manifest."""
    flush(file)
    return {"sha256": _sha256(file), "bytes": file.stat().st_size}


def _load_weights(path: Path, model: nn.Module) -> None:
    """Fill a model. Of a tensor with several names, as a tied table has, the checkpoint needs only one."""
    stored, own = Tensors(path, "model"), model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in own if name in stored.where}
    missing = {name for name, tensor in own.items() if id(tensor) not in given}
    differing = sorted(missing | (stored.where.keys() - own.keys()))
    try:
        if differing:
            raise RuntimeError(f"differing: {', '.join(differing[:3])}")
        model.load_state_dict({name: stored[name] for name in stored.where}, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: its weights do not fit this model ({reason}); resume with its own config"
        ) from None


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill half-way leaves no half checkpoint behind."""
    doomed = path.with_name(f"{_REMOVING}{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)
