"""The folder of a run: which one it is, who may write to it, and its log of metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

from adjoint.checkpoint import newest_checkpoint, read_checkpoint, warn_of_lost_files
from adjoint.errors import UserError
from adjoint.files import LOCK, disk_errors, is_utf8, lock_folder, remove_unfinished, write_atomically
from adjoint.files.remote import Place, RemoteError, RemotePath, place_of
from adjoint.train.config import RunConfig
from adjoint.train.metrics import MetricsRow
from adjoint.train.places import RUNS, run_at
from adjoint.train.remote_run import RemoteRun

T = TypeVar("T")
_CONTENTS = ("config.yaml", "metrics.jsonl", "checkpoints")


def open_run(run: RunConfig) -> tuple[RunFolder, Place | None]:
    """Return the folder to write to, locked, and the checkpoint to continue from (None: from the beginning).

    Raises:
        UserError: the folder holds another run and ``run.resume`` does not say to go on with it, another
            process writes to it, or the checkpoint named is missing or damaged, or all that there were are.
    """
    if run.resume == "auto":
        folder = RunFolder(place_of(run.dir) if run.dir else _numbered(run.name or "default")[0])
        try:
            newest = newest_checkpoint(folder.path / "checkpoints")
            if newest is None:
                _check_for_lost_checkpoints(folder.path)
        except BaseException:
            folder.close()
            raise
        return folder, newest
    checkpoint = None
    if run.resume != "never":
        checkpoint = place_of(run.resume)
        warn_of_lost_files(checkpoint)
        run_folder = checkpoint.absolute().parent
        if run_folder.name == "checkpoints" and (
            not run.dir or place_of(run.dir).resolve() == run_folder.parent.resolve()
        ):
            return RunFolder(place_of(run.dir) if run.dir else _relative(run_folder.parent)), checkpoint
    if not run.dir:
        return _new_folder(run.name or "default"), checkpoint
    if any((place_of(run.dir) / name).exists() for name in _CONTENTS):
        raise UserError(
            f"run.dir {run.dir}: holds another run; continue it with --resume auto, or name another --run.dir"
        )
    return RunFolder(place_of(run.dir)), checkpoint


def _relative(place: Place) -> Place:
    """Return a path as seen from the current folder; an address as it is."""
    return place if isinstance(place, RemotePath) else Path(os.path.relpath(place))


def _check_for_lost_checkpoints(path: Place) -> None:
    """Raise UserError if a run without checkpoints has done steps of which it had saved one.

    A run that was killed before its first checkpoint begins again; one whose checkpoints were not copied with
    the rest of its folder must not, as it would replace the metrics.
    """
    import yaml

    try:
        settings = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))["training"]
        every = settings["save_every"] * (2 if settings["save_async"] else 1)  # a thread may still be writing
    except RemoteError:
        raise
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return
    rows = _read_rows(path / "metrics.jsonl", sys.maxsize)
    if every and rows and rows[-1]["step"] > every:
        raise UserError(
            f"{path}: has metrics of {rows[-1]['step']} steps and no checkpoint; nothing was changed; copy "
            f"{path}/checkpoints back, or begin again in another --run.dir"
        )


def resume_command(path: Place, launcher: str = "") -> str:
    """Return the command that goes on with a run. Data paths and the like are in its config.yaml; only where
    the run is has to be said again.

    Args:
        launcher: torchrun with its arguments, in place of Python.
    """
    is_script = Path(sys.argv[0]).name == "train.py"
    if launcher:
        started = f"{launcher} {'train.py' if is_script else '-m adjoint train'}"
    else:
        started = "python train.py" if is_script else "adjoint train"
    run = f"--config {shlex.quote(f'{path}/config.yaml')} --run.dir {shlex.quote(str(path))}"
    return f"{started} {run} --resume auto"


def read_named_checkpoint(name: str, read: Callable[[Place], T], flag: str = "") -> T:
    """Return what a function makes of the checkpoint that a command line names, as `read_checkpoint` does.

    Args:
        name: a run, whose newest good checkpoint is read, or a checkpoint; `runs/` may be left out.
        flag: the one that names it.

    Raises:
        UserError: there is no such checkpoint.
    """
    return read_checkpoint(run_at(name, flag), f"{flag} {name}".strip(), read)


def _numbered(name: str) -> tuple[Path, Path]:
    """Return the latest of runs/NAME, runs/NAME-2, … (the first, where there is none yet), and the one after
    it."""
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    matches = [pattern.fullmatch(p.name) for p in RUNS.iterdir()] if RUNS.is_dir() else []
    last = max((int(match[1] or 1) for match in matches if match), default=0)
    paths = [RUNS / (name if number <= 1 else f"{name}-{number}") for number in (last, last + 1)]
    return paths[0], paths[1]


def _new_folder(name: str) -> RunFolder:
    """Making the folder reserves it, so that no two runs share one.

    Raises:
        FileExistsError: the file system takes another entry's name for this one, as in other case.
    """
    RUNS.mkdir(exist_ok=True)
    refused = None
    while True:
        path = _numbered(name)[1]
        try:
            path.mkdir()
        except FileExistsError:  # another run was quicker, whose number is then passed over
            if path == refused:
                raise
            refused = path
            continue
        return RunFolder(path)


class RunFolder:
    """A run's folder, held by this process: a lock, and `rows`, the metrics so far, a dictionary a step. As a
    context it is closed at its end; after an error it is as if it had never been there, if no step was done.

    Attributes:
        path: the folder or its address. local: where its files are written: there, or a folder of the cache.
        remote: uploads them; None unless `path` is an address.
    """

    def __init__(self, path: Place) -> None:
        """Make ``path`` if need be and lock it; a UserError where it is a file, or another process writes to
        it."""
        self.path = path
        self.rows: list[MetricsRow] = []
        self._metrics: IO[str] | None = None
        self.remote: RemoteRun | None = None
        if isinstance(path, RemotePath):
            if path.is_file():
                raise UserError(f"run.dir {path}: is a file; name a folder")
            self.remote = RemoteRun(path)
            self.local = self.remote.folder
            return
        if path.exists() and not path.is_dir():
            raise UserError(f"run.dir {path}: is a file; name a folder")
        if not is_utf8(path):
            raise UserError(f"run.dir {path}: its name is not UTF-8, which safetensors needs; name another")
        path.mkdir(parents=True, exist_ok=True)
        self.local = path
        self._lock = lock_folder(path, str(path))

    def start(self, step: int) -> None:
        """Open the metrics, without those of steps after ``step``, which will be done again."""
        file = self.local / "metrics.jsonl"
        self.rows = _read_rows(file, step)
        remove_unfinished(self.local)
        write_atomically(file, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.remote is not None:
            if kind is None:
                self.remote.upload()
            elif self.rows:
                with contextlib.suppress(UserError, OSError):  # the error is told already
                    self.remote.upload()
        elif kind is not None and self._metrics is not None and not self.rows:
            checkpoints = self.local / "checkpoints"
            if not (
                checkpoints.is_dir() and any(checkpoints.iterdir())
            ):  # of a run that has been here before
                for name in ("config.yaml", "metrics.jsonl"):
                    (self.local / name).unlink(missing_ok=True)
        self.close(failed=kind is not None)

    def check(self) -> None:
        """Raise a UserError where the folder is no longer there: what is written to it would be lost."""
        assert self._metrics is not None, "start() comes first"
        opened_file = os.fstat(self._metrics.fileno())
        try:
            is_same_file = os.path.samestat(opened_file, (self.local / "metrics.jsonl").stat())
        except OSError:
            is_same_file = False
        if not is_same_file:
            raise UserError(
                f"{self.local}: the run's folder was removed or replaced, and what was in it is lost; "
                "start the run again"
            )

    def append(self, row: MetricsRow) -> None:
        """Add one step's metrics; they are handed to the operating system when this returns. A UserError if
        the folder is gone."""
        self.check()
        assert self._metrics is not None
        self.rows.append(row)
        with disk_errors(self.local / "metrics.jsonl"):
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        if self.remote is not None:
            self.remote.upload_now_and_then()

    def upload(self) -> None:
        """Upload what has changed, checkpoints apart, if the run is at an address."""
        if self.remote is not None:
            self.remote.upload()

    def close(self, failed: bool = False) -> None:
        """Give the folder free; one in which nothing was written disappears."""
        if self._metrics is not None:
            self._metrics.close()
        if self.remote is not None:
            self.remote.close(keep_files=failed)
            return
        with contextlib.suppress(OSError):  # it has been removed
            if [p.name for p in self.local.iterdir()] == [LOCK]:
                (self.local / LOCK).unlink()
                self.local.rmdir()
        os.close(self._lock)


def _read_rows(file: Place, last_step: int) -> list[MetricsRow]:
    """Return the rows up to a step. A kill may have cut the last line short: what does not parse is left
    out."""
    rows = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["step"] <= last_step:
                    rows.append(row)
            except (ValueError, KeyError, TypeError):
                continue
    return rows
