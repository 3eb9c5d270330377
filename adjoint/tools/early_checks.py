"""Checks of a command line before its command imports torch and transformers, which takes seconds.

Flags, keys and paths are checked. Errors are those that the command itself would raise; what passes here, the
command checks again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from adjoint.data.sources import find_sources
from adjoint.tools.command_flags import FLAGS, KEY_PREFIXES, KEYS
from adjoint.train.flags import is_like_a_flag, unknown_flag, unknown_key
from adjoint.train.places import RUNS, file_values, is_local_model, no_configuration, run_at


def check(command: str, argv: list[str]) -> None:
    """Check the arguments after a command's name.

    In a process of torchrun nothing is checked: the command tells the other processes of an error.

    Raises:
        UserError: the command has no such flag or key, or a file is missing.
    """
    if command not in FLAGS or "RANK" in os.environ or {"-h", "--help", "--help-all"} & {*argv}:
        return
    arguments = [*_arguments(command, argv)]  # all flags before any path
    names_model_twice = {"--model", "--model.from_pretrained"} <= {flag for flag, _ in arguments}
    for flag, value in arguments:
        if value is not None and not names_model_twice:  # which the command refuses, whatever is there
            _check_path(command, flag, value)


def _arguments(command: str, argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each flag with its value, and each other word with "" in the place of the flag.

    Raises:
        UserError: the command has no such flag.
    """
    flags, prefix = FLAGS[command], KEY_PREFIXES.get(command)
    keys = {f"--{key}": "1" for key in KEYS if prefix is not None and key.startswith(prefix)}
    words = iter(enumerate(argv))
    for place, word in words:
        flag, has_value, value = word.partition("=")
        if not word.startswith("-"):
            yield "", word
            continue
        number = flags.get(flag, keys.get(flag))
        if number is None:
            _refuse(command, word)
            return  # the command decides
        following = argv[place + 1] if place + 1 < len(argv) else "-"
        if not has_value and number and not following.startswith("-"):
            value = following
            next(words)
        yield flag, value if number else None


def _refuse(command: str, word: str) -> None:
    """Raise the command's error for a flag that it does not have."""
    flag, prog, prefix = word.partition("=")[0], f"adjoint {command}", KEY_PREFIXES.get(command)
    if not flag.startswith("--") or flag == "--":
        return
    flags = [name for name in FLAGS[command] if name.startswith("--")]
    is_key = prefix is not None and (flag[2:].startswith(prefix) if prefix else True)
    if not is_key or (command != "train" and is_like_a_flag(flag, flags)):
        raise unknown_flag(word, flags, prog)
    raise unknown_key(flag[2:], flag, KEYS)


def _check_path(command: str, flag: str, value: str) -> None:
    """Raise the command's error for a path that is not there."""
    is_run = flag == "" and command in ("eval", "export")
    if flag == "--config" and value:
        for name, _ in file_values(value, KEYS):
            if name not in KEYS:
                raise unknown_key(name, value, KEYS)
    elif flag in ("--data.path", "--data.validation_path", "--path"):
        key = "data.path" if flag == "--path" else flag[2:]
        if not value.startswith(("hf:", "[")) and value != "null" and not Path(value).exists():
            find_sources(value, key)  # raises, but for a pattern that has matches
    elif flag == "--model.from_pretrained" and command in ("train", "plan"):
        _check_model(value, "model.from_pretrained")
    elif flag == "" and command == "compare":
        _check_model(str(Path(value)), "adjoint compare")
    elif is_run or (flag == "--model" and command == "sweep"):
        could_be_on_hub = command != "export" and value.count("/") == 1 and Path(value).parent != RUNS
        if not could_be_on_hub:
            run_at(value, flag)


def _check_model(place: str, key: str) -> None:
    if place != "null" and is_local_model(place) and not Path(place).expanduser().exists():
        raise no_configuration(place, key)
