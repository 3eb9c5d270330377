"""What the package says to its user: the error that can be mended, and lines by Python's logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

LOGGER = logging.getLogger("adjoint")
VERBOSITY = "ADJOINT_VERBOSITY"
LEVELS = ("debug", "info", "warning", "error", "critical")


def install_command(extra: str) -> str:
    """The command that installs an extra's packages: from the checkout, as no index has the distribution."""
    isolation = "--no-build-isolation " if extra == "gpu" else ""  # its packages are built against this torch
    return f"pip install {isolation}-e '.[{extra}]' in the checkout"


class UserError(ValueError):
    """What the user asked for cannot be done: one line that says what is wrong, where, and how to mend it."""


def is_heard() -> bool:
    """Whether INFO is heard. Where the user has set nothing up, it goes to stderr, as transformers' does.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if LOGGER.level == logging.NOTSET:
        wanted = os.environ.get(VERBOSITY, "info").lower()
        if wanted not in LEVELS:
            raise UserError(f"{VERBOSITY}: expected one of {', '.join(LEVELS)}; got {wanted!r}")
        LOGGER.setLevel(wanted.upper())
    if not LOGGER.hasHandlers():
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[adjoint] %(message)s"))
        LOGGER.addHandler(handler)
    return LOGGER.isEnabledFor(logging.INFO)


class _Stderr(logging.StreamHandler):
    """Writes to what sys.stderr is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr
