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
    """Let Ctrl-C end the process at once: nothing has begun, and a traceback of imports helps nobody.

    In another thread than the main one, or if Ctrl-C has another handler than Python's, nothing changes."""
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
    """End the process, as the handler of Ctrl-C; an import might catch an exception."""
    os.write(2, b"interrupted\n")
    os._exit(130)
