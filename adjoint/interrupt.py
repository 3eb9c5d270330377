"""Ctrl-C while the `adjoint` command is still importing: one quiet line and exit code 130, as later on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once: nothing has begun, and modules half imported say nothing
    useful. Where Ctrl-C is not Python's own, or another thread's, it stays as it is."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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
