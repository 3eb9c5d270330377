"""Checks of a command line before its command imports torch and transformers, which takes seconds.

Flags, keys and paths are checked. Errors are those that the command itself would raise; what passes here, the
command checks again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from adjoint.data.sources import find_sources
from adjoint.files.remote import is_remote
from adjoint.tools.command_flags import FLAGS
from adjoint.train.config import check_values, flags_of_keys, known_keys
from adjoint.train.flags import is_like_a_flag, unknown_flag, unknown_key
from adjoint.train.places import (
    RUNS,
    check_hub_name,
    file_values,
    is_local_model,
    no_configuration,
    run_at,
)

# The beginning of the keys that a command takes as flags, besides its own.
KEY_PREFIXES = {"train": "", "sweep": "", "plan": "", "compare": "method."}


def check(command: str, argv: list[str]) -> None:
    """Check the arguments after a command's name.

    In a process of torchrun nothing is checked: the command tells the other processes of an error. A sweep
    and a comparison decide by themselves which values of keys they take.

    Raises:
        UserError: the command has no such flag or key, a value does not fit its key, or a file is missing.
    """
    if command not in FLAGS or "RANK" in os.environ or {"-h", "--help", "--help-all"} & {*argv}:
        return
    arguments = [*_arguments(command, argv)]  # all flags before any path
    if command == "train":
        check_values(argv, "adjoint train")
    elif command == "plan":
        keys = [(flag, value) for flag, value in arguments if flag not in FLAGS[command]]
        words = [flag if value is None else f"{flag}={value}" if flag else value for flag, value in keys]
        check_values(words, "adjoint plan")
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
    if prefix is not None:
        flags = {k: n for k, n in flags_of_keys().items() if k.startswith(f"--{prefix}")} | flags
    words = iter(enumerate(argv))
    for place, word in words:
        flag, has_value, value = word.partition("=")
        if not word.startswith("-"):
            yield "", word
            continue
        if flag not in flags:
            _refuse(command, word)
            return  # the command decides
        takes_value = flags[flag] != 0
        following = argv[place + 1] if place + 1 < len(argv) else "-"
        if not has_value and takes_value and not following.startswith("-"):
            has_value, value = "=", following
            next(words)
        yield flag, value if has_value and takes_value else None


def _refuse(command: str, word: str) -> None:
    """Raise the command's error for a flag that it does not have."""
    flag, prog, prefix = word.partition("=")[0], f"adjoint {command}", KEY_PREFIXES.get(command)
    if not flag.startswith("--") or flag == "--" or command == "train":
        return
    flags = [name for name in FLAGS[command] if name.startswith("--")]
    is_key = prefix is not None and (flag[2:].startswith(prefix) if prefix else True)
    if not is_key or is_like_a_flag(flag, flags):
        raise unknown_flag(word, flags, prog)
    raise unknown_key(flag[2:], flag, known_keys())


def _check_path(command: str, flag: str, value: str) -> None:
    """Raise the command's error for a path that is not there."""
    is_run = flag == "" and command in ("eval", "export")
    if flag == "--config" and value:
        for name, _ in file_values(value, known_keys()):
            if name not in known_keys():
                raise unknown_key(name, value, known_keys())
    elif flag in ("--data.path", "--data.validation_path", "--path"):
        key = "data.path" if flag == "--path" else flag[2:]
        if value.startswith(("hf:", "[")) or value == "null":
            return
        if is_remote(value) or not Path(value).exists():
            find_sources(value, key)  # raises, but for a pattern that has matches
    elif flag == "--model.from_pretrained" and command in ("train", "plan"):
        _check_model(value, "model.from_pretrained")
    elif flag == "" and command == "compare":
        _check_model(value if is_remote(value) else str(Path(value)), "adjoint compare")
    elif is_run or (flag == "--model" and command == "sweep"):
        could_be_on_hub = command != "export" and value.count("/") == 1 and Path(value).parent != RUNS
        if not could_be_on_hub:
            run_at(value, flag)


def _check_model(place: str, key: str) -> None:
    if place == "null" or Path(place).expanduser().exists():
        return
    if is_local_model(place):
        raise no_configuration(place, key)
    check_hub_name(place, key)
