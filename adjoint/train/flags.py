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
from adjoint.files.remote import is_remote
from adjoint.settings import read_value
from adjoint.train.other_trainers import FOREIGN_KEYS

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
            if is_like_a_flag(flag, self._flags()):
                raise self.unknown(word)
        return arguments, rest

    def _flags(self) -> list[str]:
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def unknown(self, word: str) -> UserError:
        """Return an error for a word that is no flag of the command, with the flag that may be meant."""
        return unknown_flag(word, self._flags(), self.prog)

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
    if is_remote(text):
        raise ValueError(f"{text}: results are written to this machine; name a folder here")
    if Path(text).is_file():
        raise ValueError(f"{text}: is a file; name a folder")
    if not is_utf8(text):
        raise ValueError(f"{text}: its name is not UTF-8, which safetensors needs; name another folder")
    return Path(text)


def is_like_a_flag(word: str, flags: Collection[str]) -> bool:
    """Whether a word that is no flag of a command is more probably one of these misspelled than a key."""
    return word.startswith("--") and "." not in word and nearest(word, flags, cutoff=0.8) is not None


def unknown_flag(word: str, flags: Collection[str], prog: str) -> UserError:
    """Return an error for a word that is no flag of a command, with the flag that may be meant."""
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return UserError(f"{word!r}: {prog} has no such argument; see {prog} --help")
    suggestion = nearest(flag, flags, cutoff=0.6)
    hint = f"did you mean {suggestion}?" if suggestion else f"see {prog} --help"
    return UserError(f"{flag}: {prog} has no such flag; {hint}")


def unknown_key(name: str, origin: str, keys: Collection[str]) -> UserError:
    """Return an error for a key, of a flag, file or variable, that no configuration has, with the key that
    may be meant."""
    sections = {key.partition(".")[0] for key in keys} if not origin.startswith("-") else set[str]()
    section = difflib.get_close_matches(name, sections, n=1, cutoff=0.8)  # in a file, `trainingg:`
    guess = section[0] if section else FOREIGN_KEYS.get(name.rpartition(".")[2]) or nearest(name, keys)
    suggestion = f"; did you mean {guess}?" if guess in {*keys, *sections} else f"; {guess}" * bool(guess)
    return UserError(f"{origin}: unknown key {name}{suggestion} (--help-all lists all keys)")


def nearest(key: str, candidates: Collection[str], cutoff: float = 0.65) -> str | None:
    """Return the known name most similar to ``key``, with or without its section; None if none is similar."""
    short = {name.rpartition(".")[2]: name for name in candidates}
    matches = difflib.get_close_matches(key, [*candidates, *short], n=1, cutoff=cutoff)
    return short.get(matches[0], matches[0]) if matches else None
