"""Checkpoints on disk: their format; finding, verifying, removing and reading them.

    checkpoints/step-00000100/model.safetensors       weights, by parameter name
                              optimizer.safetensors   optimizer state, "<parameter name>|<state key>"
                              state.safetensors       states that the next batch goes on from, if any
                              rng.pt                  random number generators
                              trainer.json            step, data cursor, configuration
                              MANIFEST.json           SHA-256 and size of each file above; written last

A run over several shards writes model-00001-of-00004.safetensors and so on, a file a shard, and likewise for
the optimizer; the names inside are the same, so that any number of shards, or one process, reads either.

A checkpoint is complete or absent: the manifest is written last (`adjoint.train.checkpoint`); at an address
such as s3://bucket/run, a folder without it is no checkpoint. State is stored by parameter name, never by
position, so it can be read back by another grouping of the same parameters. Nothing is unpickled: `rng.pt` is
read with ``weights_only=True``.

A folder that `torch.distributed.checkpoint` wrote is read as a checkpoint too, wherever the user names one.
That of another training loop has no trainer.json, and is of step 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import torch

from adjoint.errors import UserError
from adjoint.files import LOCK, is_utf8
from adjoint.files.distributed_checkpoint import DistributedTensors, NamedTensor, is_distributed_checkpoint
from adjoint.files.remote import Place, RemoteError, RemotePath, place_of

FORMAT = 1
MANIFEST = "MANIFEST.json"
RNG, TRAINER = "rng.pt", "trainer.json"
_NOISE = "dropout and other noise are drawn again from training.seed"
REMOVING = ".removing-"  # a folder that a kill may leave; the next save deletes it
_NAME = re.compile(r"step-(\d{8,})")
T = TypeVar("T")


class FileEntry(TypedDict):
    """A file's entry in the manifest."""

    sha256: str
    bytes: int


class TrainerState(TypedDict, total=False):
    """The content of trainer.json; older ones lack keys.

    Attributes:
        tokens: trained on so far. data: the cursor of the text. torch: PyTorch's version.
        config: of the run, as plain values by section and key.
        dependencies: digests of what a run needs besides its own files, by kind.
    """

    step: int
    tokens: int
    data: dict[str, Any]
    unigram_entropy: float | None
    torch: str
    config: dict[str, dict[str, Any]]
    dependencies: dict[str, str]


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are missing, cut short or changed."""


class MissingManifest(DamagedCheckpoint):
    """A checkpoint without the list of its files."""


class NoWholeCheckpoint(UserError):
    """A run all of whose checkpoints are damaged."""


def list_checkpoints(directory: str | Place) -> list[Place]:
    """Return the checkpoints of a folder by step, oldest first; unverified."""
    directory = place_of(directory)
    if not directory.is_dir():
        return []
    checkpoints = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and _is_written(p)]
    return sorted(checkpoints, key=step_of)


def _is_written(checkpoint: Place) -> bool:
    """Whether a checkpoint was written to its end; one that lost its manifest later is damaged."""
    if isinstance(checkpoint, RemotePath):
        return (checkpoint / MANIFEST).is_file()
    return checkpoint.is_dir()


def step_of(checkpoint: Place) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def newest_checkpoint(directory: str | Place) -> Place | None:
    """Return the newest checkpoint whose checksums hold, None if there is no checkpoint; warn of damaged ones
    on stderr.

    Raises:
        NoWholeCheckpoint: all are damaged. A run must not begin again over what may be restored.
    """
    checkpoints, refusals = list_checkpoints(directory), list[DamagedCheckpoint]()
    for path in reversed(checkpoints):
        try:
            verify_checkpoint(path)
        except RemoteError:
            raise
        except (UserError, FileNotFoundError) as error:
            if not _is_written(path):  # deleted meanwhile, by a run that goes on
                return newest_checkpoint(directory)
            if not isinstance(error, DamagedCheckpoint):
                raise
            refusals.append(error)
            continue
        for refusal in refusals:
            print(f"warning: {refusal}; using the one before it", file=sys.stderr, flush=True)
        return path
    if refusals:
        more = ", and all earlier ones are damaged too" if len(refusals) > 1 else ""
        raise NoWholeCheckpoint(f"{refusals[0]}{more}; {_restoring(checkpoints)}")
    return None


def _restoring(checkpoints: list[Place]) -> str:
    """Say what can be restored of checkpoints none of which is whole, and how."""
    for path in reversed(checkpoints):
        try:
            verify_trained_state(path)
        except UserError:
            continue
        return (
            "nothing was changed; copy the missing files back, or go on with the weights, optimizer and "
            f"place in the data of this one: --resume {path}"
        )
    return "nothing was changed; copy the files back, or begin again in another folder"


def checkpoint_at(path: Place, called: str) -> Place:
    """Return a run's newest good checkpoint, or the checkpoint at the path itself.

    Args:
        path: a run's folder or a checkpoint. called: the user's words for the path, with which errors begin.

    Raises:
        UserError: there is no good checkpoint.
    """
    if not (path / "checkpoints").is_dir() and not (path / LOCK).is_file():  # which a run makes first
        try:
            warn_of_lost_files(path)
        except UserError as error:
            raise UserError(
                f"{called}: not a run and not a good checkpoint ({error}); name a run's folder"
            ) from None
        if not (path / TRAINER).is_file():
            raise UserError(
                f"{called}: {path} has no {TRAINER}, which says what model it is of; begin a run with it, "
                "--run.resume, and name that"
            )
        return path.absolute()
    try:
        newest = newest_checkpoint(path / "checkpoints")
    except NoWholeCheckpoint as error:
        raise NoWholeCheckpoint(f"{called}: {error}") from None
    if newest is None:
        raise UserError(f"{called}: the run has no checkpoint yet; train on, or name another run")
    return newest.absolute()


def read_checkpoint(path: Place, called: str, read: Callable[[Place], T]) -> T:
    """Return what a function makes of the checkpoint that `checkpoint_at` returns for the same arguments.

    A run that goes on deletes old checkpoints. If it deletes the one that is being read, the function is
    called again with the newest one.

    Args:
        read: reads all that it needs of a checkpoint before it returns.

    Raises:
        UserError: there is no good checkpoint; or as `read` does.
    """
    while True:
        checkpoint = checkpoint_at(path, called)
        try:
            return read(checkpoint)
        except (UserError, FileNotFoundError):
            if _is_written(checkpoint) or not (path / "checkpoints").is_dir():
                raise


def verify_checkpoint(path: str | Place) -> None:
    """Check that every file of the manifest is there, has its size and its SHA-256.

    Raises:
        DamagedCheckpoint: naming the file that is not as it was written.
        UserError: there is no checkpoint of that name.
    """
    path = place_of(path)
    if path.is_dir() and is_distributed_checkpoint(path):  # whose tensors have no checksums
        DistributedTensors(path).verify()
        return
    for file, entry in _read_manifest(path).items():
        _verify_file(path, file, entry)


def verify_trained_state(path: str | Place) -> list[str]:
    """Check all of a checkpoint that a run cannot go on without; return a line for each file that it lacks.

    The manifest and the states of random number generators may be missing, as after a copy that left files
    out. Without the manifest, files are complete if their names and their own headers say so.

    Raises:
        DamagedCheckpoint: naming the file that is not as it was written.
        UserError: there is no checkpoint of that name.
    """
    path, lost = place_of(path), list[str]()
    if path.is_dir() and is_distributed_checkpoint(path):
        DistributedTensors(path).verify()
        if not (path / TRAINER).is_file():
            return [f"{path}: has no {TRAINER}; its weights and optimizer state go on, all else begins again"]
        return [] if (path / RNG).exists() else [f"{path}: {RNG} is missing; {_NOISE}"]
    try:
        entries = _read_manifest(path)
    except MissingManifest:
        _verify_without_manifest(path)
        lost.append(f"{path}: {MANIFEST} is missing, so that no checksum was compared")
    else:
        for file, entry in entries.items():
            if file != RNG or (path / RNG).exists():
                _verify_file(path, file, entry)
    if not (path / RNG).exists():
        lost.append(f"{path}: {RNG} is missing; {_NOISE}")
    return lost


def warn_of_lost_files(path: Place) -> None:
    """Check a checkpoint that the user has named, and warn of what it lacks.

    Raises:
        UserError: as `verify_trained_state` does.
    """
    for line in verify_trained_state(path):
        warnings.warn(line, stacklevel=2)


def _damaged(path: Place, problem: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"damaged checkpoint {path}: {problem}")


def _read_manifest(path: Place) -> dict[str, FileEntry]:
    """Return the entries of a checkpoint's files."""
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; name a folder like RUN/checkpoints/step-00000100")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
        entries: dict[str, FileEntry] = {
            name: {"sha256": entry["sha256"], "bytes": entry["bytes"]} for name, entry in files.items()
        }
    except FileNotFoundError:
        if (path / "checkpoints").is_dir():
            raise UserError(
                f"{path}: is a run, not a checkpoint; continue it with --run.dir {path} --resume auto"
            ) from None
        raise MissingManifest(f"damaged checkpoint {path}: {MANIFEST} is missing") from None
    except RemoteError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, f"{MANIFEST} cannot be read") from None
    if version != FORMAT:
        raise UserError(
            f"{path}: has checkpoint format {version}, this version reads {FORMAT}; use the version that "
            "wrote it"
        )
    stems = {name.partition(".")[0].partition("-")[0] for name in entries}
    if missing := {"model", "rng", "trainer"} - stems:
        raise _damaged(path, f"{MANIFEST} does not list {min(missing)}")
    if _NAME.fullmatch(path.name) and manifest.get("step") != step_of(path):
        raise _damaged(path, f"it is the one of step {manifest.get('step')}")
    return entries


def _verify_file(path: Place, name: str, entry: FileEntry) -> None:
    file = path / name
    if not file.is_file():
        raise _damaged(path, f"{name} is missing")
    if file.stat().st_size != entry["bytes"]:
        raise _damaged(path, f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}")
    if sha256(file) != entry["sha256"]:
        raise _damaged(path, f"the checksum of {name} does not match")


def _verify_without_manifest(path: Place) -> None:
    """Check that weights, optimizer and trainer.json are there, and complete by their own headers."""
    try:
        step = read_trainer(path)["step"]
    except FileNotFoundError:
        raise _damaged(path, f"{MANIFEST} and trainer.json are missing") from None
    except RemoteError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        raise _damaged(path, f"{MANIFEST} is missing, and trainer.json cannot be read") from None
    if _NAME.fullmatch(path.name) and step != step_of(path):
        raise _damaged(path, f"it is the one of step {step}")
    parts = {stem: sorted(path.glob(f"{stem}*.safetensors")) for stem in ("model", "optimizer")}
    if not all(parts.values()):
        lacking = next(stem for stem, files in parts.items() if not files)
        raise _damaged(path, f"{MANIFEST} is missing, and {lacking}.safetensors too")
    files = [file for stem in parts.values() for file in stem] + list(path.glob("state*.safetensors"))
    for file in files:
        numbered = re.fullmatch(r"([a-z]+)-\d+-of-(\d+)\.safetensors", file.name)
        if numbered and len(list(path.glob(f"{numbered[1]}-*-of-{numbered[2]}.safetensors"))) != int(
            numbered[2]
        ):
            raise _damaged(path, f"{MANIFEST} is missing, and a file of {numbered[1]} too")
    for stem in parts:
        try:
            StoredTensors(path, stem)
        except RemoteError:
            raise
        except UserError as error:
            raise _damaged(path, str(error)) from None


def read_rng(path: Place) -> dict[str, object]:
    """Return the states of random number generators in a checkpoint; empty if it lacks them."""
    file = path / RNG
    if not file.exists():
        return {}
    with file.open("rb") as stream:
        return torch.load(stream, weights_only=True, map_location="cpu")


def read_trainer(path: Place) -> TrainerState:
    """Return a checkpoint's step, data cursor, configuration, …"""
    if is_foreign(path):
        return {"step": 0, "tokens": 0, "unigram_entropy": None}
    state: TrainerState = json.loads((path / TRAINER).read_text(encoding="utf-8"))
    return state


def is_foreign(path: Place) -> bool:
    """Whether a checkpoint is one of another training loop, by `torch.distributed.checkpoint`."""
    return not (path / TRAINER).is_file() and is_distributed_checkpoint(path)


def set_aside_after(directory: str | Place, step: int) -> list[Place]:
    """Rename the checkpoints beyond ``step`` so that none of an abandoned future is picked up later."""
    moved = list[Place]()
    for path in list_checkpoints(directory):
        if step_of(path) > step:
            target = path.with_name(f"{path.name}.set-aside")
            if target.exists():
                remove_checkpoint(target)
            if isinstance(path, RemotePath):
                path.copy_folder(path.with_name(target.name), MANIFEST)
                remove_checkpoint(path)
            else:
                os.replace(path, path.with_name(target.name))
            moved.append(target)
    return moved


def remove_checkpoint(path: Place) -> None:
    """Delete a checkpoint. It is renamed first (at an address, its manifest goes first), so that a kill
    half-way leaves no half checkpoint behind."""
    if isinstance(path, RemotePath):
        path.remove_folder(MANIFEST)
        return
    doomed = path.with_name(f"{REMOVING}{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


class StoredTensors:
    """The tensors of a checkpoint's files, or of a folder of transformers, read one at a time by name.

    Args:
        path: the folder, or its address. stem: "model", "optimizer" or "state".

    Raises:
        UserError: a file is damaged, or an index of weights is none.
    """

    def __init__(self, path: Place, stem: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self.files_by_name = path, dict[str, Any]()
        files = sorted(list[Place](path.glob(f"{stem}*.safetensors")), key=str)
        if not files and is_distributed_checkpoint(path):
            tensors = DistributedTensors(path)
            keys = tensors.by_stem[stem]
            self.files_by_name = {name: NamedTensor(tensors, key) for name, key in keys.items()}
            return
        index = path / f"{stem}.safetensors.index.json"
        if path / f"{stem}.safetensors" not in files and index.is_file():  # a folder of transformers
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{index}: is not an index of weights; download it again") from None
            files = [path / name for name in sorted(set(names))]
        for file in files:
            try:
                stored: safe_open | _RemoteSafetensors
                if isinstance(file, RemotePath):
                    stored = _RemoteSafetensors(file)
                else:
                    stored = safe_open(str(file), "pt")
            except SafetensorError as error:
                reason = " ".join(str(error).split())
                if not is_utf8(str(file)):
                    raise UserError(
                        f"{file}: its name is not UTF-8, which safetensors needs; rename"
                    ) from None
                raise UserError(f"{file}: is damaged ({reason}); download or write it again") from None
            self.files_by_name |= dict.fromkeys(stored.keys(), stored)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor by name, a tied table by either of its names.

        Raises:
            UserError: there is no such tensor.
        """
        tied = {"embedding.weight": "lm_head.weight", "lm_head.weight": "embedding.weight"}
        stored_name = name if name in self.files_by_name else tied.get(name, name)
        if stored_name not in self.files_by_name:
            raise UserError(f"{self.path}: has no {name}; resume with the run's own configuration")
        return self.files_by_name[stored_name].get_tensor(stored_name)

    def read_entries(self, owner: str) -> dict[str, torch.Tensor]:
        """Return the tensors stored as "owner|key", by key: of a parameter, its optimizer state."""
        names = [name for name in self.files_by_name if name.rpartition("|")[0] == owner]
        return {name.rpartition("|")[2]: self[name] for name in names}


def model_tensors(checkpoint: Place) -> StoredTensors:
    """Return the tensors of a checkpoint's model.

    Raises:
        UserError: there are none, or a file is damaged.
    """
    stored = StoredTensors(checkpoint, "model")
    if not stored.files_by_name:
        raise UserError(f"{checkpoint}: has no weights; name another checkpoint, or copy its files back")
    return stored


class _TensorEntry(TypedDict):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _RemoteSafetensors:
    """The tensors of a safetensors file at an address, each fetched by itself.

    Raises:
        SafetensorError: the file is damaged.
    """

    def __init__(self, file: RemotePath) -> None:
        from safetensors import SafetensorError

        length = int.from_bytes(file.read_span(0, 8), "little")
        self.file, self.start, size = file, 8 + length, file.stat().st_size
        try:
            if self.start > size:
                raise ValueError("its header is cut short")
            header = json.loads(file.read_span(8, self.start))
            header.pop("__metadata__", None)
            self.entries: dict[str, _TensorEntry] = header
            if self.start + max((e["data_offsets"][1] for e in self.entries.values()), default=0) != size:
                raise ValueError("it is cut short")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorError(str(error)) from None

    def keys(self) -> list[str]:
        return list(self.entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        from safetensors.torch import load

        entry = self.entries[name]
        # the dtype that its name stands for: of a file with the tensor's entry and no elements
        header = json.dumps({name: {**entry, "shape": [0], "data_offsets": [0, 0]}}).encode()
        dtype = load(len(header).to_bytes(8, "little") + header)[name].dtype
        first, end = entry["data_offsets"]
        if first == end:
            return torch.empty(entry["shape"], dtype=dtype)
        data = bytearray(self.file.read_span(self.start + first, self.start + end))
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(entry["shape"])


def sha256(file: Place) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
