"""Ctrl-C while the `adjoint` command is still importing: one quiet line and exit code 130, as later on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside, Ctrl-C ends the command at once: nothing has begun, and modules half imported say nothing
    useful. Programs that import the package themselves keep their own way with Ctrl-C."""
    mine = _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not mine:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does meanwhile: no exception, which an import might take for its own."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _is_command() -> bool:
    """Whether this process is `adjoint …`, `python -m adjoint …` or `python train.py …`."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # so while Python looks for the module
        return sys.orig_argv[sys.orig_argv.index("-m") + 1].partition(".")[0] == "adjoint"
    train = Path(__file__).parent.parent / "train.py"
    return Path(program).stem == "adjoint" or Path(program).absolute() == train
