"""Files written completely or not at all, and the folder for caches."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
        yield unfinished
        publish(unfinished, Path(path))
    finally:
        unfinished.unlink(missing_ok=True)


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
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format=Path(path).suffix.removeprefix(".") or "png")


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
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path, older_than: float = 0.0) -> None:
    """Remove the unfinished files of killed processes that are older than some seconds."""
    for file in folder.glob("*.tmp-*"):
        with suppress(OSError):  # another process was quicker
            if _UNFINISHED.fullmatch(file.name) and time.time() - file.stat().st_mtime >= older_than:
                file.unlink()


def cache_folder() -> Path:
    """Return the folder for caches: $ADJOINT_CACHE, else adjoint/ in $XDG_CACHE_HOME, else in ~/.cache."""
    adjoint_cache, user_cache = os.environ.get("ADJOINT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(adjoint_cache or f"{user_cache or '~/.cache'}/adjoint").expanduser()
