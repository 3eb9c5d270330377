"""Command lines: flags whose values are converted while parsing, with one-line errors."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

from adjoint.errors import UserError
from adjoint.files import is_utf8
from adjoint.settings import read_value

T = TypeVar("T")


class Flags(argparse.ArgumentParser):
    """The flags of a command, without abbreviations; errors are raised as UserError."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def add(self, flag: str, text: str, read: Callable[[str], object] = str, **settings: Any) -> None:
        """Add a flag.

        Args:
            flag: its name. text: its help; the default is appended.
            read: converts the given text, or a default given as text, to a value; the message of its
                ValueError is shown as the error.
            settings: as for argparse's `add_argument`.
        """

        def value(word: str) -> object:
            try:
                return read(word)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        if settings.get("action", "append") == "append":
            settings["type"] = value
        default = "; default: %(default)s" if settings.get("default") else ""
        self.add_argument(flag, help=text + default, **settings)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line.

        Raises:
            UserError: it has a flag that there is not, with the one that may be meant, or a stray word.
        """
        arguments, rest = self.parse_known_args(args, namespace)
        if rest:
            raise self.unknown(rest[0])
        return arguments

    def parse_with_keys(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command's own flags; return them, and the words that may be keys of a configuration.

        Raises:
            UserError: one of these has no section, as no key has, and is like a flag of the command.
        """
        arguments, rest = self.parse_known_args(argv)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("--") and "." not in flag and nearest(flag, self._flags(), cutoff=0.8):
                raise self.unknown(word)
        return arguments, rest

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def unknown(self, word: str) -> UserError:
        """Return an error for a word that is no flag of the command, with the flag that may be meant."""
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return UserError(f"{word!r}: {self.prog} has no such argument; see {self.prog} --help")
        suggestion = nearest(flag, self._flags(), cutoff=0.6)
        hint = f"did you mean {suggestion}?" if suggestion else f"see {self.prog} --help"
        return UserError(f"{flag}: {self.prog} has no such flag; {hint}")

    def error(self, message: str) -> Never:
        bare = re.fullmatch(r"argument (?:\S+/)?(--\S+): expected one argument", message)
        if bare:
            raise UserError(f"{bare[1]}: needs a value, as in {bare[1]} VALUE")
        raise UserError(message.removeprefix("argument "))


def reads(hint: object) -> Callable[[str], object]:
    """Return a reader for `Flags.add` that takes the values of an annotation (`adjoint.settings`)."""
    return lambda text: read_value(text, hint)


def comma_list(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a reader for `Flags.add` of lists such as ``4K,64K``: one or more values, without duplicates."""

    def values(text: str) -> list[T]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ValueError("is empty; name one or more, with commas between them")
        return list(dict.fromkeys(map(read, words)))

    return values


def new_folder(text: str) -> Path:
    """Return the folder to write to that a flag names; a reader for `Flags.add`."""
    if Path(text).is_file():
        raise ValueError(f"{text}: is a file; name a folder")
    if not is_utf8(text):
        raise ValueError(f"{text}: its name is not UTF-8, which safetensors needs; name another folder")
    return Path(text)


def nearest(key: str, candidates: Collection[str], cutoff: float = 0.65) -> str | None:
    """Return the known name most similar to ``key``, with or without its section; None if none is similar."""
    short = {name.rpartition(".")[2]: name for name in candidates}
    matches = difflib.get_close_matches(key, [*candidates, *short], n=1, cutoff=cutoff)
    return short.get(matches[0], matches[0]) if matches else None
