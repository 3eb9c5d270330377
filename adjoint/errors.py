"""Messages to the user: the error that can be mended, and lines by Python's logging."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("adjoint")
VERBOSITY = "ADJOINT_VERBOSITY"
LEVELS = ("debug", "info", "warning", "error", "critical")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the checkout, as no index has the package."""
    isolation = "--no-build-isolation " if extra == "gpu" else ""  # its packages are built against this torch
    return f"pip install {isolation}-e '.[{extra}]' in the checkout"


def why_not_imported(error: ImportError, package: str, command: str | None = None) -> str:
    """Return what is needed and why it could not be imported: it is not there, or its own import fails.

    Args:
        error: of the import.
        package: its name, as Python and pip know it.
        command: that installs it; by default pip's.
    """
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
        return f"needs {package}: {command or f'pip install {package}'}"
    return f"needs {package}, which is installed but cannot be imported: {' '.join(str(error).split())}"


class UserError(ValueError):
    """An error that the user can mend: one line that says what is wrong, where, and how to fix it."""


def is_from_user_code(error: BaseException) -> bool:
    """Whether an error comes from code that no package brings: the user's own hook, head, layer or loss.

    Functions of Python and torch are left out: what they raise is their caller's. Code that comes with a
    folder of transformers (`transformers_modules`) is a package's."""
    callers = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed(callers):
        package, file = str(module.get("__name__")).partition(".")[0], str(module.get("__file__"))
        if package != "torch" and package not in sys.stdlib_module_names - {"__main__"}:
            is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
            return package not in ("adjoint", "transformers_modules") and not is_installed
    return False


def is_heard() -> bool:
    """Whether INFO is logged. If the user has set nothing up, it goes to stderr, as transformers' does.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if LOGGER.level == logging.NOTSET:
        level = os.environ.get(VERBOSITY, "info").lower()
        if level not in LEVELS:
            raise UserError(f"{VERBOSITY}: expected one of {', '.join(LEVELS)}; got {level!r}")
        LOGGER.setLevel(level.upper())
    if not LOGGER.hasHandlers():
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[adjoint] %(message)s"))
        LOGGER.addHandler(handler)
    return LOGGER.isEnabledFor(logging.INFO)


class _Stderr(logging.StreamHandler):
    """Handler that writes to the sys.stderr of the moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr
