"""A training run small enough for tests: two narrow layers on a few kilobytes of text, one thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adjoint.checkpoint import Tensors, list_checkpoints
from adjoint.cli import main
from tests.model_helpers import assert_same

SENTENCE = "the state of a chunk is all that next needs to know about every token"


def write_text(path: Path, words: int = 3000) -> Path:
    """A text file with some structure to learn, the same on every machine."""
    vocabulary = SENTENCE.split()
    state, picked = 1, []
    for _ in range(words):
        state = (1103515245 * state + 12345) % 2**31
        picked.append(vocabulary[(state >> 16) % len(vocabulary)])
    path.write_text(" ".join(picked))
    return path


def tiny(folder: Path, **flags: Any) -> list[str]:
    """Arguments of ``adjoint`` for a run in ``folder/run``; keywords add flags, with __ for the dot."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    values: dict[str, Any] = {
        "model.d_model": 16,
        "model.n_layer": 2,
        "data.path": text,
        "data.seqlen": 64,
        "data.eval_tokens": 192,
        "data.cache_dir": folder / "cache",
        "training.steps": 8,
        "training.warmup_steps": 2,
        "training.eval_every": 4,
        "training.save_every": 3,
        "training.sample_tokens": 8,
        "training.threads": 1,
        "run.dir": folder / "run",
    }
    values |= {key.replace("__", "."): value for key, value in flags.items()}
    return ["train", *(word for key, value in values.items() for word in (f"--{key}", str(value)))]


def train_tiny(folder: Path, **flags: Any) -> int:
    """Run it in this process and return the exit code."""
    return main(tiny(folder, **flags))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int) -> bytes:
    """The weights' file of one checkpoint."""
    return (run / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def same_training(run: Path, expected: Path) -> None:
    """Two float64 runs have trained alike: losses, norms, last weights and sample, to rounding."""
    rows, others = metrics(run), metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for key in ("loss", "grad_norm", "eval_loss", "tokens"):
        theirs = [row[key] for row in others if key in row]
        assert [row[key] for row in rows if key in row] == pytest.approx(theirs, rel=1e-10), key
    mine, whole = (Tensors(list_checkpoints(path / "checkpoints")[-1], "model") for path in (run, expected))
    assert_same({name: mine[name] for name in whole.where}, {name: whole[name] for name in whole.where}, 1e-9)
    assert (run / "sample.txt").read_text() == (expected / "sample.txt").read_text()
