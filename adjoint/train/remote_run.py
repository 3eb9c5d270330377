"""A run whose folder is an address such as s3://bucket/run.

Its files are written to a folder of the cache on this machine, as those of any run, and uploaded from there:
a checkpoint as soon as it is written, its manifest last; metrics and pictures then too, and every minute.
Shards, which may be on other machines, upload their own files of a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from adjoint.checkpoint import MANIFEST, FileEntry, TrainerState, list_checkpoints, remove_checkpoint, step_of
from adjoint.errors import UserError
from adjoint.files import LOCK, cache_folder, lock_folder
from adjoint.files.remote import RemoteError, RemotePath
from adjoint.train.checkpoint import save_checkpoint

UPLOAD_EVERY_SECONDS = 60.0
_UPLOADED_OTHERWISE = ("checkpoints", "pretrained", "wandb")


class RemoteRun:
    """A run at an address, held by this process.

    Of two processes that write to one address the later one goes on, as after a machine was lost; the earlier
    one stops when it notices. On one machine the later one is refused.

    Args:
        place: the address.

    Attributes:
        folder: of the cache, for the run's files.

    Raises:
        UserError: another process of this machine writes to it, or the store refuses.
    """

    def __init__(self, place: RemotePath) -> None:
        self.place = place
        base = cache_folder() / "runs" / hashlib.blake2b(place.url.encode(), digest_size=8).hexdigest()
        base.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(base, str(place))
        try:
            for leftover in base.iterdir():  # of a process that was killed
                if leftover.is_dir():
                    shutil.rmtree(leftover)
            self.folder = base / place.name
            self.folder.mkdir()
            self._owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
            (place / LOCK).write_text(self._owner)
            with contextlib.suppress(FileNotFoundError):
                (self.folder / "metrics.jsonl").write_text(
                    (place / "metrics.jsonl").read_text(errors="replace")
                )
        except BaseException:
            os.close(self._lock)
            raise
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and time of change of each file
        self._last_upload = time.monotonic()

    def check(self) -> None:
        """Raise a UserError where another process has begun to write to the address."""
        try:
            owner = (self.place / LOCK).read_text()
        except FileNotFoundError:
            raise UserError(
                f"{self.place}: the run was removed or moved; start it again where it is now"
            ) from None
        if owner != self._owner:
            raise UserError(
                f"run.dir {self.place}: a process on {owner.split()[0]} has begun to write to it, and this "
                "one stops; name another --run.dir for a second run"
            )

    def upload(self) -> None:
        """Upload the run's files that have changed, checkpoints apart."""
        self._last_upload = time.monotonic()
        self.check()
        for file in sorted(self.folder.rglob("*")):
            name = file.relative_to(self.folder)
            if not file.is_file() or name.parts[0] in _UPLOADED_OTHERWISE or name.name.startswith("."):
                continue
            stat = file.stat()
            if self._uploaded.get(name) != (stat.st_size, stat.st_mtime_ns):
                (self.place / name.as_posix()).upload(file)
                self._uploaded[name] = stat.st_size, stat.st_mtime_ns

    def upload_now_and_then(self) -> None:
        """Upload as `upload` does, once a minute; a store that does not answer is asked again later."""
        if time.monotonic() - self._last_upload >= UPLOAD_EVERY_SECONDS:
            with contextlib.suppress(RemoteError):
                self.upload()

    def save_checkpoint(
        self,
        directory: RemotePath,
        step: int,
        write: Callable[[Path], Mapping[str, FileEntry]],
        trainer: TrainerState,
        rng: Mapping[str, object] | None = None,
        keep: int | None = None,
        spared: int | None = None,
    ) -> RemotePath:
        """Write a checkpoint as `adjoint.train.checkpoint.save_checkpoint` does, and upload it."""
        self.check()
        for path in directory.iterdir():  # what a kill has left half-way
            if not (path / MANIFEST).is_file():
                path.remove_folder(MANIFEST)
        target = directory / f"step-{step:08d}"
        if target.exists():  # only a damaged one: a resume sets later ones aside
            remove_checkpoint(target)
        local = save_checkpoint(self.folder / "checkpoints", step, write, trainer, rng)
        try:
            self.check()
            target.upload_folder(local, MANIFEST)
        except RemoteError as error:
            raise RemoteError(
                f"{error}; until the run is started again, the checkpoint is in {local}"
            ) from None
        shutil.rmtree(local)
        if keep is not None:
            for old in list_checkpoints(directory)[:-keep]:
                if step_of(old) != spared:
                    remove_checkpoint(old)
        return target

    def close(self, keep_files: bool) -> None:
        """Give the address free.

        Args:
            keep_files: whether a checkpoint that could not be uploaded stays on this machine.
        """
        with contextlib.suppress(UserError, OSError):
            self.check()
            (self.place / LOCK).unlink()
        checkpoints = self.folder / "checkpoints"
        if not (keep_files and checkpoints.is_dir() and any(checkpoints.iterdir())):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
