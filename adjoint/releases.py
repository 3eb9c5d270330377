"""Releases of the packages that we build on: which are tested, and what is said of others.

The bounds of pyproject.toml are these; a test compares them. `make test-versions` runs the tests under the
oldest and the newest, `make test-versions ROWS=newest` under whatever the package index has.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from importlib import metadata
from typing import NamedTuple


class Tested(NamedTuple):
    """The oldest and the newest release of a package that the tests have passed under, as (major, minor)."""

    oldest: tuple[int, int]
    newest: tuple[int, int]


TESTED = {
    "torch": Tested((2, 11), (2, 15)),
    "transformers": Tested((5, 6), (5, 24)),
    "trl": Tested((1, 3), (1, 16)),
    "peft": Tested((0, 18), (0, 21)),
    "accelerate": Tested((1, 10), (1, 15)),
    "datasets": Tested((4, 0), (5, 2)),
    "ray": Tested((2, 50), (2, 60)),
    "triton": Tested((3, 6), (3, 9)),
}
_warned: set[str] = set()


def parse(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version."""
    major, minor, *_ = (*map(int, re.findall(r"\d+", version)[:2]), 0, 0)
    return major, minor


@functools.cache
def installed(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def status(package: str) -> str:
    """Say of an installed package that it is "tested", "untested" (newer) or "too old"."""
    version, tested = installed(package), TESTED[package]
    if version is None or tested.oldest <= parse(version) <= tested.newest:
        return "tested"
    return "too old" if parse(version) < tested.oldest else "untested"


def oldest(package: str) -> str:
    """Return the oldest tested release of a package, such as 5.6."""
    return ".".join(map(str, TESTED[package].oldest))


def newest(package: str) -> str:
    """Return the newest tested release of a package, such as 5.24."""
    return ".".join(map(str, TESTED[package].newest))


def requirement(package: str) -> str:
    """Return the tested releases of a package as pip takes them, such as transformers>=5.6,<5.25."""
    (old_major, old_minor), (major, minor) = TESTED[package]
    return f"{package}>={old_major}.{old_minor},<{major}.{minor + 1}"


def untested(package: str) -> str:
    """Return the beginning of an error message under a release newer than the tested ones, else ""."""
    if status(package) != "untested":
        return ""
    return f"{package} {installed(package)} is newer than {newest(package)}, the newest tested; "


def untested_now() -> str:
    """Return the beginning of an error about a model: untested releases among torch and transformers."""
    return "".join(untested(package) for package in ("torch", "transformers") if package in sys.modules)


def warn_if_untested(package: str) -> None:
    """Warn, once in a process, that a package is newer than the releases tested."""
    if package not in _warned and (words := untested(package)):
        _warned.add(package)
        warnings.warn(
            f"{words}results are compared on first use as always. If something is refused: "
            f"pip install '{requirement(package)}'",
            stacklevel=3,
        )
