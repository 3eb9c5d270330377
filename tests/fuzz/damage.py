"""Damaged run folders, checkpoints, caches and models: a command ends with the same bits as without the
damage, or with one line that says what is wrong; no traceback, and nothing else is lost.

A file is cut, emptied, changed by a bit, removed, exchanged with another one, or replaced by the same file of
another run; or all files of its name or kind are left out, as by `rsync --exclude`. Each process makes the
undamaged folders once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adjoint.checkpoint import list_checkpoints, step_of
from adjoint.kernels.cpu import build as cpu_build
from tests.fuzz.oracle import Case, Deviation, Refusal, Vacuous
from tests.training_helpers import run, tiny

DAMAGES = ("cut", "emptied", "changed", "removed", "excluded", "exchanged", "foreign", "folder", "rubbish")
COMMANDS = ("resume", "go on", "eval", "export", "train", "kernels")
STEPS = 4
NOT_KEPT = (".lock", "loss.png")  # written by each command anew
# What a command says where it goes on without what was damaged, or with settings that were.
TOLD = ("damaged checkpoint", "changed since the checkpoint:")


def draw(rng: random.Random) -> Case:
    return {
        "kind": "damage",
        "model": rng.choice(("stack", "lora")),
        "command": rng.choice(COMMANDS),
        "damage": rng.choice(DAMAGES),
        "file": rng.randrange(1000),  # of those there are, modulo their number
        "other": rng.randrange(1000),
        "place": rng.random(),  # of a cut or a changed bit in the file
        "twice": rng.random() < 0.2,  # another file too
    }


def prepare() -> None:
    """Make the undamaged folders, and what commands find in them."""
    for model in ("stack", "lora"):
        _undamaged(model, 1)
        for command in COMMANDS:
            if command != "kernels":
                _expected(model, command)


def check(case: Case) -> None:
    model, command = case.get("model", "stack"), case.get("command", "resume")
    expected = None if command == "kernels" else _expected(model, command)
    with tempfile.TemporaryDirectory(prefix="adjoint-damage-") as place:
        folder = Path(place) / "work"
        shutil.copytree(_undamaged(model, 0), folder)
        # absolute paths in files are those of the place where all were made
        with _at(_home(model, 0), folder) as home:
            if command == "kernels":
                _check_kernels(case)
                return
            if command == "train":
                shutil.rmtree(home / "run")
            damaged = _damage(case, home, _undamaged(model, 1), command)
            before = _contents(home)
            code, out, error = _run(_argv(command, model, home))
            _judge(command, expected, home, (code, out, error), before, damaged)


def _judge(
    command: str,
    expected: Any,
    home: Path,
    said: tuple[int, str, str],
    before: dict[str, bytes],
    damaged: list[str],
) -> None:
    code, out, error = said
    if code == 2:
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or "Traceback" in error:
            raise Deviation(f"not one line: {error[-300:]}")
        after = _contents(home)
        changed = [name for name in before if after.get(name) != before[name] and _is_kept(name)]
        if "set aside: " in out:  # with the rows of their steps, which would have run again
            still_there = set(after.values())
            changed = [n for n in changed if before[n] not in still_there and n != "run/metrics.jsonl"]
        lost = changed
        if lost and not all(name.startswith("cache/") for name in lost):
            raise Deviation(f"lost by a command that is refused: {lost}")
        raise Refusal(re.sub(r"/\S+/|[0-9.]+", "…", lines[0])[:90])
    if code != 0:
        raise Deviation(f"exit code {code}: {error[-300:]}")
    _check_kept(command, _contents(home), before, damaged)
    results = _results(command, home)
    if results == expected["newest"]:
        return
    if command == "train" and "base/model.safetensors" in damaged:
        raise Vacuous("a run that begins knows no other base")
    told = any(words in out + error for words in TOLD)
    if not told:
        raise Deviation(f"other bits without a word; damaged: {', '.join(damaged)}")
    if "changed since the checkpoint:" not in out and results not in expected.values():
        raise Deviation(f"bits of no checkpoint; damaged: {', '.join(damaged)}")


def _check_kept(command: str, after: dict[str, bytes], before: dict[str, bytes], damaged: list[str]) -> None:
    """Raise a Deviation where a command that went on has lost what it was not to touch."""
    inputs = [name for name in before if name.startswith(("base/", "text.txt"))]
    if lost := [name for name in inputs if after.get(name) != before[name]]:
        raise Deviation(f"inputs changed: {lost}")
    if command in ("eval", "export"):
        own = [name for name in before if name.startswith("run/") and _is_kept(name)]
        if lost := [name for name in own if after.get(name) != before[name]]:
            raise Deviation(f"a run changed that was only read: {lost}")
    elif not {"run/metrics.jsonl", "run/config.yaml"} & {*damaged}:
        steps = [json.loads(line)["step"] for line in after["run/metrics.jsonl"].splitlines()]
        if steps != list(range(1, STEPS + 1)):
            raise Deviation(f"rows of steps {steps}")


# ---------------------------------------------------------------------------------------------- the commands


def _flags(model: str, home: Path) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "training__steps": STEPS,
        "training__save_every": 2,
        "training__eval_every": 2,
        "training__sample_tokens": 0,
        "data__eval_tokens": 128,
        "data__seqlen": 32,
    }
    if model == "lora":
        base = {"model__from_pretrained": home / "base", "model__lora__rank": 2, "training__lr": 1e-2}
        flags |= base
    return flags


def _argv(command: str, model: str, home: Path) -> list[str]:
    if command == "resume":
        return tiny(home, **_flags(model, home), run__resume="auto")
    if command == "go on":
        config = ["--config", str(home / "run" / "config.yaml")]
        return ["train", *config, "--run.dir", str(home / "run"), "--run.resume", "auto"]
    if command == "eval":
        return ["eval", str(home / "run"), "--lengths", "32", "--out", str(home / "eval")]
    if command == "export":
        return ["export", str(home / "run"), "--to", str(home / "exported")]
    return tiny(home, **_flags(model, home))


def _run(argv: list[str]) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run(argv)
    return code, out.getvalue(), error.getvalue()


def _results(command: str, home: Path) -> dict[str, Any]:
    """What a command has computed, without times."""
    if command == "eval":
        text = (home / "eval" / "eval.json").read_text()
        return {"rows": re.sub(r'"seconds[^,}]*', "", text.partition('"rows"')[2])}
    if command == "export":
        return dict(_contents(home / "exported"))
    newest = list_checkpoints(home / "run" / "checkpoints")[-1]
    files = ("model.safetensors", "optimizer.safetensors")
    return {"step": step_of(newest), **{name: (newest / name).read_bytes() for name in files}}


@functools.cache
def _expected(model: str, command: str) -> dict[str, dict[str, Any]]:
    """Results without damage, of the newest checkpoint and of the one before it."""
    results = {}
    for which in ("newest", "earlier"):
        with tempfile.TemporaryDirectory(prefix="adjoint-damage-") as place:
            shutil.copytree(_undamaged(model, 0), folder := Path(place) / "work")
            with _at(_home(model, 0), folder) as home:
                if command == "train":
                    shutil.rmtree(home / "run")
                elif which == "earlier" and len(saved := list_checkpoints(home / "run" / "checkpoints")) > 1:
                    shutil.rmtree(saved[-1])
                code, _, error = _run(_argv(command, model, home))
                assert code == 0, error
                results[which] = _results(command, home)
    return results


# ----------------------------------------------------------------------------------------------- the folders


def _home(model: str, number: int) -> Path:
    """Where a run is while a command works on it: files name each other by absolute paths."""
    return Path(tempfile.gettempdir()) / f"adjoint-damage-{os.getpid()}-{model}-{number}"


@contextlib.contextmanager
def _at(home: Path, folder: Path) -> Any:
    """A link from `home` to a folder."""
    home.unlink(missing_ok=True)
    home.symlink_to(folder, target_is_directory=True)
    try:
        yield home
    finally:
        home.unlink()


_PLACES: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _undamaged(model: str, number: int) -> Path:
    """A folder with a run in progress, its text and token cache, and its model; removed with the process."""
    _PLACES.append(tempfile.TemporaryDirectory(prefix="adjoint-damage-"))
    folder = Path(_PLACES[-1].name) / "work"
    folder.mkdir()
    with _at(_home(model, number), folder) as home:
        flags = _flags(model, home)
        if model == "lora":
            _save_base(home / "base", seed=number)
        # three steps of four: the newest checkpoint is of step 3, the one before it of step 2
        argv = tiny(home, **flags | {"training__seed": number})
        code, _, error = _run([*argv, "--training.steps", "3"])
        assert code == 0, error
        if number == 0:  # for commands that set the default
            text = (folder / "run" / "config.yaml").read_text()
            (folder / "run" / "config.yaml").write_text(text.replace("steps: 3", f"steps: {STEPS}"))
    return folder


def _save_base(folder: Path, seed: int) -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(seed)
    config = Mamba2Config(
        vocab_size=256,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=16,
    )
    Mamba2ForCausalLM(config).save_pretrained(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _is_kept(name: str) -> bool:
    return not name.endswith(NOT_KEPT) and ".tmp-" not in name


# ------------------------------------------------------------------------------------------------ the damage


def _damage(case: Case, home: Path, foreign: Path, command: str) -> list[str]:
    """Damage one file, or two; their names."""
    damaged = []
    for number in range(1 + case.get("twice", False)):
        names = [name for name in _contents(home) if _may_change(name, case["damage"], command)]
        name = case.get("name") or names[(case.get("file", 0) + 7 * number) % len(names)]
        other = names[case.get("other", 0) % len(names)]
        _change(case, home, name, other, foreign)
        damaged += [name, other] if case["damage"] == "exchanged" else [name]
    return damaged


def _may_change(name: str, damage: str, command: str) -> bool:
    """The text is the user's, and a changed letter in settings or notes is an edit like any other. What of
    another run is a whole file by itself is none of this one's: it is the user who put it there."""
    if name == "text.txt" or name.endswith((".lock", ".png", ".writing")):
        return False
    if name == "run/config.yaml" and damage not in (
        *("cut", "emptied", "removed", "excluded", "folder", "rubbish"),
    ):
        return False
    return not (name == "run/metrics.jsonl" and damage == "folder") or command != "train"


def _change(case: Case, home: Path, name: str, other: str, foreign: Path) -> None:
    path, damage = home / name, case["damage"]
    content = path.read_bytes()
    at = int(case.get("place", 0.5) * len(content))
    alike = f"*{path.suffix}" if path.suffix and at % 2 else path.name
    simple: dict[str, Callable[[], object]] = {
        "cut": lambda: path.write_bytes(content[:at]),
        "emptied": lambda: path.write_bytes(b""),
        "changed": lambda: path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]),
        "removed": lambda: path.unlink(),
        "excluded": lambda: [f.unlink() for f in home.rglob(alike)],
        "rubbish": lambda: path.write_bytes(random.Random(at).randbytes(len(content))),
    }
    if damage in ("changed",) and not content:
        return
    if damage in simple:
        simple[damage]()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "exchanged":
        path.write_bytes((home / other).read_bytes())
        (home / other).write_bytes(content)
    elif (twin := _twin(foreign, name)) is not None:
        path.write_bytes(twin.read_bytes())


def _twin(foreign: Path, name: str) -> Path | None:
    """The same file of another run; caches have names of their own."""
    if (foreign / name).is_file():
        return foreign / name
    return next(iter(sorted((foreign / Path(name).parent).glob(f"*{Path(name).suffix}"))), None)


def _check_kernels(case: Case) -> None:
    """A damaged library is never taken for a whole one."""
    with tempfile.TemporaryDirectory(prefix="adjoint-damage-") as place:
        built, stem = Path(place) / "built", Path(place) / "kernels"
        content = random.Random(case.get("file", 0)).randbytes(5000)
        built.write_bytes(content)
        cpu_build._publish(built, stem)
        library = cpu_build.intact(stem)
        assert library is not None
        other = {**case, "damage": "cut" if case["damage"] in ("exchanged", "foreign") else case["damage"]}
        _change(other, Path(place), library.name, library.name, Path(place))
        if (taken := cpu_build.intact(stem)) is not None and taken.read_bytes() != content:
            raise Deviation("a damaged library is taken")
