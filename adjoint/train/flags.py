"""The parser of a training run's configuration: YAML files and ``--section.key value`` flags → `Config`.

Parsing, type checks, the merging of YAML and flags and the help texts are jsonargparse's: a maintained
library that treats a YAML file and dotted command-line flags as the same thing, checks both against type
annotations (unions, literals, lists) and needs no decorators in the dataclasses. What it does not do is
name the nearest key, or say in one line which file or flag a bad value came from; that is done here.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Never

from adjoint.errors import UserError
from adjoint.methods import METHODS
from adjoint.train.config import Config, MethodConfig, plain

# What other trainers call some of the keys.
_ELSEWHERE = {
    "learning_rate": "training.lr",
    "max_steps": "training.steps",
    "batch_size": "data.batch",
    "seq_len": "data.seqlen",
    "context_length": "data.seqlen",
    "output_dir": "run.dir",
    "hidden_size": "model.d_model",
}


class Count(int):
    """A whole number that may be written with a binary suffix: ``16K`` is 16,384 and ``1M`` is 1,048,576."""

    @classmethod
    def parse(cls, value: Any) -> int:
        """Read ``16384``, ``"16K"``, ``"1.5M"`` or ``"16_384"``. Raises ValueError for anything else."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        match = re.fullmatch(r"([+-]?\d[\d_]*(?:\.\d+)?)([KMG]?)", str(value).strip(), re.IGNORECASE)
        number = (
            float(match[1].replace("_", "")) * 1024 ** " KMG".index(match[2].upper() or " ") if match else 0.5
        )
        if isinstance(value, (bool, float)) or not number.is_integer():
            raise ValueError(f"{value!r} is not a whole number")
        return int(number)


class Flags(argparse.ArgumentParser):
    """The flags of a command beside the configuration's; what it refuses is a UserError."""

    def error(self, message: str) -> Never:
        raise UserError(message.removeprefix("argument "))


def count(flag: str, text: str, least: int) -> int:
    """The whole number given to a flag, as `Count.parse` reads it.

    Raises:
        UserError: it is none, or below ``least``.
    """
    try:
        number = Count.parse(text)
    except ValueError:
        number = least - 1
    if not least <= number < 2**63:
        raise UserError(f"{flag}: expected a whole number, {least} or more, such as 16 or 4K; got {text!r}")
    return number


def parse(argv: list[str], prog: str) -> Config:
    """`adjoint.train.config.load_config`."""
    parser = _parser(prog)
    files, flags = _split(argv)
    origin: dict[str, str] = {}
    from_files: list[str] = []
    for path in files:
        origin.update({key: f"{path}: {key}" for key in _file_keys(path, parser)})
        from_files += ["--config", path]
        _parse(
            parser, from_files, origin
        )  # by itself first: what is wrong now is the file's fault, not a flag's
    origin.update(_flag_keys(flags, parser))
    values = _parse(parser, from_files + flags, origin)
    if values["run"]["name"] is None:
        values["run"]["name"] = Path(files[-1]).stem if files else "default"
    return _build(values)


def nearest(key: str, known: Iterable[str]) -> str:
    """The known dotted key most like ``key``, compared whole and by its last part."""
    last = key.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * tail + 0.1 * whole)

    return max(known, key=likeness)


def _sections() -> dict[str, list[tuple[str, Any, Any, str]]]:
    """Section → (key, annotation, default, help). ``method`` has the keys of all methods together."""
    sections = {}
    for section in dataclasses.fields(Config):
        assert section.default_factory is not dataclasses.MISSING
        value = section.default_factory()
        if section.name == "method":
            sections["method"] = _method_fields()
        else:
            sections[section.name] = [
                (key, hint, getattr(value, key), text) for key, hint, text in _documented_fields(type(value))
            ]
    return sections


def _method_fields() -> list[tuple[str, Any, Any, str]]:
    hints: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for name, cls in METHODS.items():
        for key, hint, text in _documented_fields(cls):
            hints[key] = hints[key] | hint if key in hints else hint
            texts[key] = f"{texts[key]}; {name}" if key in texts else f"{text} Taken by {name}".lstrip()
    name_field = ("name", Literal[tuple(METHODS)], MethodConfig().name, "how the gradient is computed")
    return [name_field, *((key, hints[key] | None, None, texts[key]) for key in hints)]


def _documented_fields(cls: type) -> list[tuple[str, Any, str]]:
    """(key, annotation, help text from the class's docstring) of a dataclass's fields."""
    import docstring_parser

    texts = {
        name: p.description or ""
        for p in docstring_parser.parse_from_object(cls).params
        for name in p.arg_name.split(", ")  # several keys may share one line
    }
    hints = typing.get_type_hints(cls)
    return [
        (f.name, hints[f.name], " ".join(texts.get(f.name, "").split()))
        for f in dataclasses.fields(cls)
        if f.init
    ]


def _counted(hint: Any) -> Any:
    """``int`` replaced by ``Count`` inside a union, so that 16K and 1M are read as numbers."""
    if hint is int:
        return Count
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, (_counted(part) for part in typing.get_args(hint)))
    return hint


def _parser(prog: str) -> Any:
    import jsonargparse
    from jsonargparse.typing import register_type

    register_type(Count, serializer=int, deserializer=Count.parse, fail_already_registered=False)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        exit_on_error=False,
        allow_abbrev=False,
        usage="%(prog)s [--config FILE] [--section.key VALUE ...] [--resume auto]",
        description="Train a state-space language model on long text.",
        epilog="Whole numbers may be written 16K (16,384) or 1M (1,048,576). YAML files have the same keys; "
        "flags win over them.",
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    for section, keys in _sections().items():
        group = parser.add_argument_group(section)
        for key, hint, default, text in keys:
            group.add_argument(
                f"--{section}.{key}", type=_counted(hint), default=default, help=text.replace("%", "%%")
            )
    return parser


def _known(parser: Any) -> list[str]:
    return [action.dest for action in parser._actions if "." in action.dest]


def _unknown(key: str, where: str, parser: Any) -> UserError:
    guess = _ELSEWHERE.get(key.rpartition(".")[2]) or nearest(key, _known(parser))
    return UserError(f"{where}: unknown key {key}; did you mean {guess}? (--help lists all keys)")


def _parse(parser: Any, arguments: list[str], origin: dict[str, str]) -> dict[str, Any]:
    import jsonargparse

    try:
        return parser.parse_args(arguments).as_dict()
    except jsonargparse.ArgumentError as error:
        raise UserError(_one_line(str(error), origin, parser)) from None


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """argv → (configuration files, the other arguments with ``--resume`` spelt out)."""
    files: list[str] = []
    flags: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--config":
            path = value if equals else next(rest, None)
            if not path:
                raise UserError(
                    "--config: needs the path of a YAML file, such as --config configs/default.yaml"
                )
            files.append(path)
        else:
            flags.append("--run.resume" + equals + value if name == "--resume" else word)
    return files, flags


def _flag_keys(flags: list[str], parser: Any) -> Iterator[tuple[str, str]]:
    """Each flag's key and spelling. Raises UserError for a key that there is not, or for a stray word."""
    known = set(_known(parser))
    takes_value = False
    for word in flags:
        name, equals, _ = word.partition("=")
        if name.startswith("--"):
            key = name[2:].removesuffix("+")
            if key not in known and key not in ("help", "print_config"):
                raise _unknown(key, name, parser)
            takes_value = not equals and key in known
            yield key, name
        elif word == "-h" or takes_value:
            takes_value = False
        else:
            raise UserError(f"{word!r}: not a flag; keys are given as --section.key value (see --help)")


def _file_keys(path: str, parser: Any) -> list[str]:
    """The dotted keys of a YAML file. Raises UserError for a missing or malformed file and unknown keys."""
    import yaml

    file = Path(path)
    if not file.is_file():
        beside = sorted(p.name for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        remedy = f"{file.parent} holds {', '.join(beside)}" if beside else "give the path of a YAML file"
        raise UserError(f"--config {path}: no such file; {remedy}")
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}; mend the file") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: holds no sections; write them as 'training:' and keys indented below it")
    sections = {key.partition(".")[0] for key in _known(parser)}
    for section, content in loaded.items():
        if section in sections and not isinstance(content, dict):
            raise UserError(
                f"{path}: {section} is a section; write its keys indented below it, or leave it out"
            )
    known = set(_known(parser))
    keys = list(_flatten(loaded, known))
    for key in keys:
        if key not in known:
            raise _unknown(key, path, parser)
    return keys


def _flatten(nested: dict[Any, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    for key, value in nested.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in known:
            yield from _flatten(value, known, dotted + ".")
        else:
            yield dotted


def _one_line(message: str, origin: dict[str, str], parser: Any) -> str:
    """jsonargparse's report, several lines long, as one: where, what was expected, what was found."""
    missing = re.match(r"argument (--\S+): expected", message)
    if missing:
        return f"{missing[1]}: needs a value, as in {missing[1]} VALUE"
    match = re.match(r'Parser key "([^"]+)"', message)
    if not match:
        return " ".join(message.split())
    key = match[1]
    action = next((a for a in parser._actions if a.dest == key), None)
    got = re.search(r"(?:Given value|Got value): (.*)", message) or re.search(
        r"literal.*?: (.*)|: ('[^']*')", message
    )
    found = f", got {next(g for g in got.groups() if g is not None).strip()}" if got else ""
    wanted = f"expected {_type_name(action._typehint)}" if action is not None else " ".join(message.split())
    example = "" if action is None or action.default is None else f"; its default is {plain(action.default)}"
    return f"{origin.get(key, key)}: {wanted}{found}{example}"


def _type_name(hint: Any) -> str:
    """An annotation in words a user can act on."""
    names = {
        Count: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if hint in names:
        return names[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return (
            " or ".join(map(str, arguments))
            if len(arguments) <= 2
            else f"one of {', '.join(map(str, arguments))}"
        )
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments)
    if typing.get_origin(hint) in (tuple, list):
        return "a list such as [0.9, 0.95]" if float in arguments else "a list"
    return getattr(hint, "__name__", str(hint))


def _build(values: dict[str, Any]) -> Config:
    method = values["method"]
    arguments = {key: value for key, value in method.items() if key != "name" and value is not None}
    built: dict[str, Any] = {"method": MethodConfig(method["name"], arguments)}
    for section in dataclasses.fields(Config):
        if section.name != "method":
            assert section.default_factory is not dataclasses.MISSING
            cls = type(section.default_factory())
            try:
                built[section.name] = cls(**values[section.name])
            except ValueError as error:
                text = str(error)
                raise UserError(
                    text if text.startswith(section.name + ".") else f"{section.name}: {text}"
                ) from error
    return Config(**built)
