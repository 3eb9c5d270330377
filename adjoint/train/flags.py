"""Reading command lines: numbers with suffixes, values as annotations want them, errors in one line."""

from __future__ import annotations

import argparse
import difflib
import re
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from typing import Any, Literal, Never

from adjoint.errors import UserError
from adjoint.memory import size_bytes

_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_UNIONS = (typing.Union, types.UnionType)


class Flags(argparse.ArgumentParser):
    """The flags of a command, written out in full; what it refuses is a UserError."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> Never:
        bare = re.fullmatch(r"argument (?:\S+/)?(--\S+): expected one argument", message)
        if bare:
            raise UserError(f"{bare[1]}: needs a value, as in {bare[1]} VALUE")
        raise UserError(message.removeprefix("argument "))


def whole_number(value: object) -> int:
    """Read ``16384``, ``"16K"``, ``"1.5M"`` or ``"16_384"``, with K, M and G for 2¹⁰, 2²⁰ and 2³⁰.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?)([KMG]?)", str(value).strip(), re.IGNORECASE)
    if match and not isinstance(value, float):
        number = Fraction(match[1].replace("_", "")) * 1024 ** " KMG".index(match[2].upper() or " ")
        if number.denominator == 1:
            return int(number)
    raise ValueError(f"{value!r} is not a whole number")


def count(flag: str, text: str, least: int) -> int:
    """The whole number given to a flag, as `whole_number` reads it.

    Raises:
        UserError: it is none, or below ``least``.
    """
    with suppress(ValueError):
        number = whole_number(text)
        if least <= number < 2**63:
            return number
    raise UserError(f"{flag}: expected a whole number, {least} or more, such as 16 or 4K; got {text!r}")


def size(flag: str, text: str) -> float:
    """Bytes of ``40GB`` (10⁹ each) or ``40GiB`` (2³⁰ each).

    Raises:
        UserError: it is neither.
    """
    try:
        return size_bytes(text)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None


def nearest(key: str, known: Iterable[str]) -> str:
    """The known dotted key most like ``key``, compared whole and by its last part."""
    last = key.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * tail + 0.1 * whole)

    return max(known, key=likeness)


def read_value(value: Any, hint: Any) -> Any:
    """A value out of a YAML file, or a flag's text, as the annotation ``hint`` wants it.

    Raises:
        ValueError: it does not fit.
    """
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in _UNIONS:
        for part in sorted(parts, key=lambda part: part is str):  # text last: null and [a, b] are texts too
            with suppress(ValueError):
                return read_value(value, part)
    elif origin in (list, tuple):
        items = _from_yaml(value) if isinstance(value, str) else value
        if isinstance(items, list) and (origin is list or len(items) == len(parts)):
            hints = parts * len(items) if origin is list else parts
            return origin(read_value(item, part) for item, part in zip(items, hints, strict=True))
    elif origin is int:
        return whole_number(value)
    elif origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return float(str(value).replace(".inf", "inf"))  # .inf is how YAML writes it
    elif origin is bool and str(value).lower() in _TRUTH:
        return _TRUTH[str(value).lower()]
    elif (origin is Literal and value in parts) or (origin is str and isinstance(value, str)):
        return value
    elif origin is types.NoneType and value in (None, "null"):
        return None
    raise ValueError(f"{value!r} is not {in_words(hint)}")


def in_words(hint: Any) -> str:
    """An annotation in words a user can act on."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        choices = [str(part) for part in parts]
        return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"
    if origin in _UNIONS:
        return " or ".join(map(in_words, parts))
    return "a list such as [0.9, 0.95]" if float in parts else "a list"


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML") from error
