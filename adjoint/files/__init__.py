"""Files written completely or not at all, and the folder for caches."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adjoint.errors import UserError

LOCK = ".lock"

# In errors of safetensors and of torch.save, where a disk is full.
_DISK_REFUSES = ("Error while serializing", "I/O error", "inline_container", "StreamWriter", "iostream error")
_UNFINISHED = re.compile(r".+\.tmp-\d+-[0-9a-f]+")  # the names of `unfinished_path`, and no user's


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Write a file in one piece: a reader, or a kill, finds the old file or the new one.

        with atomic_file("table.csv") as unfinished:
            unfinished.write_text(...)

    The block writes to the path that it gets; if it ends without an error, that file replaces ``path``.
    """
    unfinished = unfinished_path(Path(path))
    try:
        with disk_errors(path):
            yield unfinished
            publish(unfinished, Path(path))
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Raise an error of a disk that refuses as an OSError that names the path.

    Python's own lacks the name once a file is open. PyTorch and safetensors raise errors of other types,
    whose messages alone tell that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        text = " ".join(str(error).split())
        if not any(words in text for words in _DISK_REFUSES):
            raise
        if f"os error {errno.ENOSPC}" in text or _is_full(Path(path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(None, text[:200], str(path)) from error


def _is_full(path: Path) -> bool:
    """Whether the disk of a path has less than a megabyte left."""
    folder = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    return shutil.disk_usage(folder).free < 1 << 20


def write_atomically(path: Path, text: str) -> None:
    """Write a text file in one piece."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def new_figure(width: float, height: float) -> Any:
    """Return a Matplotlib figure to draw on, sizes in inches; without pyplot: nothing global, no display."""
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=130, layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a Matplotlib figure in one piece; the path's suffix gives the format, PNG if it has none."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # a file's name that is no UTF-8 cannot be drawn
        text.set_text(text.get_text().encode("utf-8", "backslashreplace").decode())
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format=Path(path).suffix.removeprefix(".") or "png")


def is_utf8(path: str | Path) -> bool:
    """Whether a path is UTF-8: safetensors reads no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def unfinished_path(path: Path) -> Path:
    """Return a hidden path beside ``path`` that no other process on any machine writes to."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def publish(unfinished: Path, path: Path) -> None:
    """Put a written and closed file in the place of ``path``; flushed first, lest a crash leave it empty."""
    flush(unfinished)
    os.replace(unfinished, path)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with disk_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path, older_than: float = 0.0) -> None:
    """Remove the unfinished files of killed processes that are older than some seconds."""
    for file in folder.glob("*.tmp-*"):
        with suppress(OSError):  # another process was quicker
            if _UNFINISHED.fullmatch(file.name) and time.time() - file.stat().st_mtime >= older_than:
                file.unlink()


def lock_folder(path: Path, called: str) -> int:
    """Lock a folder against other processes of this machine; return the lock, a descriptor to close.

    Args:
        called: the run's folder in the user's words.

    Raises:
        UserError: another process holds it.
    """
    descriptor = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"run.dir {called}: another process is writing to it; name another --run.dir"
        ) from None
    except (ImportError, OSError):  # no such locks on this system or file system: go on without
        pass
    return descriptor


@contextmanager
def folder_in_cache() -> Iterator[Path]:
    """Make a folder for what is uploaded or was downloaded, beside the caches; it is removed at the end."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="transfer-") as folder:
        yield Path(folder)


def cache_folder() -> Path:
    """Return the folder for caches: $ADJOINT_CACHE, else adjoint/ in $XDG_CACHE_HOME, else in ~/.cache."""
    adjoint_cache, user_cache = os.environ.get("ADJOINT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(adjoint_cache or f"{user_cache or '~/.cache'}/adjoint").expanduser()
