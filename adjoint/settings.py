"""Settings: dataclasses whose annotations say which values they take, in YAML, as flags and from Python.

@documented
@dataclass(frozen=True)
class Config:
    steps: Positive = option(200, "optimizer steps of the whole run.")

    def __post_init__(self) -> None:
        check_fields("training", self)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from adjoint.errors import UserError

T = TypeVar("T")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True)
class Must:
    """A condition on a value besides its type, as in ``Annotated[int, Must("an even number", is_even)]``.

    Attributes:
        words: the condition in words a user can act on, type included.
        holds: whether a value fulfils it.
    """

    words: str
    holds: Callable[[Any], bool]


Positive = Annotated[int, Must("a whole number (1 or more)", lambda n: 0 < n < 2**63)]
NotNegative = Annotated[int, Must("a whole number (0 or more)", lambda n: 0 <= n < 2**63)]
SeqLen = Annotated[int, Must("a whole number (2 or more)", lambda n: 1 < n < 2**63)]
PositiveNumber = Annotated[float, Must("a finite number above 0", lambda x: 0 < x < math.inf)]
NotNegativeNumber = Annotated[float, Must("a finite number (0 or more)", lambda x: 0 <= x < math.inf)]
Text = Annotated[str, Must("a text that is not empty", bool)]


def is_path(text: str) -> bool:
    """Whether a text may be a path: not empty, as that of a shell's unset variable, and without a byte 0."""
    return bool(text) and "\0" not in text


PathText = Annotated[str, Must("a path", is_path)]


def option(default: T, help: str) -> T:
    """Return a dataclass's field with its default and its help, for `--help` and the class's docstring."""
    return dataclasses.field(default=default, metadata={"help": help})


def documented(cls: type[T]) -> type[T]:
    """Add the help of a dataclass's fields to its docstring, before `Raises:`; return the class."""
    about, raises, errors = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:\n")
    lines = [about, "", "Args:"]
    for name, text in helps_of(cls).items():
        lines += textwrap.wrap(f"{name}: {text}", 106, initial_indent="    ", subsequent_indent=" " * 8)
    cls.__doc__ = "\n".join(lines) + raises + errors
    return cls


def helps_of(cls: type) -> dict[str, str]:
    """Return the help of a dataclass's fields, for those that have one."""
    fields = dataclasses.fields(cls)
    return {field.name: field.metadata["help"] for field in fields if "help" in field.metadata}


def whole_number(value: object) -> int:
    """Read ``16384``, ``"16K"``, ``"1.5M"`` or ``"16_384"``, with K, M and G for 2¹⁰, 2²⁰ and 2³⁰.

    Raises:
        ValueError: the value is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?)([KMG]?)", str(value).strip(), re.IGNORECASE)
    if match and not isinstance(value, float):
        number = Fraction(match[1].replace("_", "")) * 1024 ** " KMG".index(match[2].upper() or " ")
        if number.denominator == 1:
            return int(number)
    raise ValueError(f"{value!r} is not a whole number")


class Size(float):
    """Bytes that a user has written.

    Attributes:
        decimal: whether in powers of ten, as 40GB.
    """

    decimal: bool


def size_bytes(text: str) -> Size:
    """Return the bytes of ``40GB`` (10⁹ each) or ``40GiB`` (2³⁰ each). Raise ValueError for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT])(i?)B?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(f"expected a size such as 40GB or 512MiB; got {text!r}")
    size = Size(float(match[1]) * (1024.0 if match[3] else 1000.0) ** ("KMGT".index(match[2].upper()) + 1))
    size.decimal = not match[3]
    return size


def read_value(value: Any, hint: Any) -> Any:
    """Convert a value of a YAML file, a flag's text or a value from Python to the annotation ``hint``.

    Raises:
        ValueError: "expected …, got …": the value does not fit.
    """
    origin, members = typing.get_origin(hint) or hint, typing.get_args(hint)
    with suppress(ValueError):
        if origin is Annotated:
            converted = read_value(value, members[0])
            if members[1].holds(converted):
                return converted
        elif origin in _UNIONS:
            # Text last, as null and [a, b] are texts too. Beside text only digits are a whole number: 18G of
            # memory is a size.
            for member in sorted(members, key=_is_text):
                if member is int and str in members and isinstance(value, str) and not value.isdigit():
                    continue
                with suppress(ValueError):
                    return read_value(value, member)
        elif origin in (list, tuple):
            items = _from_yaml(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else value
            if isinstance(items, list | tuple) and (origin is list or len(items) == len(members)):
                hints = members * len(items) if origin is list else members
                return origin(read_value(item, member) for item, member in zip(items, hints, strict=True))
        elif origin is int:
            return whole_number(value)
        elif origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(str(value).replace(".inf", "inf"))  # .inf is how YAML writes it
        elif origin is bool and str(value).lower() in _TRUTH:
            return _TRUTH[str(value).lower()]
        elif origin is Literal and (choice := _choice(value, members)) is not None:
            return choice
        elif origin is str and isinstance(value, str):
            return value
        elif origin is types.NoneType and value in (None, "null"):
            return None
        elif isinstance(origin, type) and dataclasses.is_dataclass(origin):
            if isinstance(value, origin):
                return value
            if isinstance(value, dict):
                return origin(**value)
    shown = "null" if value is None else repr(value)
    raise ValueError(f"expected {in_words(hint)}, got {shown}{_hint(value, in_words(hint))}")


def _is_text(hint: object) -> bool:
    """Whether an annotation is of texts, with a condition or without."""
    return hint is str or (typing.get_origin(hint) is Annotated and typing.get_args(hint)[0] is str)


# Other names of the choices that a setting may have.
_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "float": "float32", "double": "float64"}
_NO_FLOAT16 = "; float16 would need loss scaling, which there is not: take bfloat16, or float32"


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    """Return the choice that a value names, also by another usual spelling; None if there is none."""
    if value in choices:
        return value
    if not isinstance(value, str):
        return None
    spellings = (_ALIASES.get(value.lower()), value.replace("_", "-"), value.replace("-", "_"))
    return next((spelling for spelling in spellings if spelling in choices), None)


def _hint(value: Any, expected: str) -> str:
    """Return advice on how to write the probable meaning of a refused value; "" if there is none."""
    text = str(value).strip()
    if value in ("fp16", "float16", "half") and "float32" in expected:
        return _NO_FLOAT16
    if "whole number" not in expected:
        return ""
    if size := re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG])i?B?", text, re.IGNORECASE):
        return f"; write {size[1]}{size[2].upper()}"
    if re.fullmatch(r"\d+(\.\d+)?e\+?\d{1,2}", text, re.IGNORECASE) and (number := float(text)).is_integer():
        thousands = f" or {int(number) // 1000}K" if number % 1000 == 0 and number < 1e6 else ""
        millions = f" or {int(number) // 10**6}M" if number % 1e6 == 0 else ""
        return f"; write {int(number)}{thousands}{millions}"
    return ""


def in_words(hint: Any) -> str:
    """Return an annotation in words a user can act on."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Annotated:
        return members[1].words
    if origin is Literal:
        choices = [str(choice) for choice in members]
        return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"
    if origin in _UNIONS:
        return " or ".join(map(in_words, members))
    if float in members:
        return "a list such as [0.9, 0.95]"
    conditions = [member for member in members if typing.get_origin(member) is Annotated]
    return f"a list, each {in_words(conditions[0])}" if conditions else "a list"


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_fields(section: str, config: Any) -> None:
    """Convert every field of a dataclass to the type that its annotation says.

    Raises:
        UserError: a value does not fit; the message begins with ``section`` and the field's name.
    """
    for name, hint in hints_of(config.__class__).items():
        try:
            object.__setattr__(config, name, read_value(getattr(config, name), hint))
        except ValueError as error:
            raise UserError(f"{section}.{name}: {error}") from None


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} is not YAML") from error
