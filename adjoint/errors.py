"""The error a user can mend, and checks that raise it."""

from __future__ import annotations

import math


class UserError(ValueError):
    """What the user asked for cannot be done: one line that says what is wrong, where, and how to mend it."""


def check_whole(name: str, value: object, least: int) -> None:
    """Raises UserError unless ``value``, called ``name`` in the message, is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}: must be a whole number, got {value!r}")
    if value < least:
        raise UserError(f"{name}: must be at least {least}, got {value}")


def check_finite(name: str, value: float, positive: bool = True) -> None:
    """Raises UserError unless ``value`` is finite and above zero, or zero where ``positive`` is False."""
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        word = "positive" if positive else "zero or positive"
        raise UserError(f"{name}: must be a {word} finite number, got {value}")
