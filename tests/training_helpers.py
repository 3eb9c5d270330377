"""A training run small enough for tests: two narrow layers on a few kilobytes of text, one thread."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import StoredTensors, list_checkpoints
from adjoint.cli import main
from adjoint.train.checkpoint import model_files, save_checkpoint
from tests.model_helpers import assert_same

SENTENCE = "the state of a chunk is all that next needs to know about every token"


def write_text(path: Path, words: int = 3000) -> Path:
    """A text file with some structure to learn, the same on every machine."""
    path.write_text(" ".join(random.Random(1).choices(SENTENCE.split(), k=words)))
    return path


def write_words(path: Path) -> Path:
    """The words of `write_text` as documents, for each of which a separator of " " may stand."""
    words = write_text(path).read_text().split()
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
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


def run(argv: list[str]) -> int:
    """A command's exit code; what it sets for its process, threads and determinism, is as before again."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        return main(argv)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def train_tiny(folder: Path, **flags: Any) -> int:
    """Run it in this process and return the exit code."""
    return run(tiny(folder, **flags))


def forked(work: Callable[[], int], *outputs: int) -> int:
    """The number of a copy of this process that does some work and ends with the exit code it returns.

    Args:
        outputs: file descriptors that become its stdout and stderr.
    """
    child = os.fork()
    if child:
        return child
    code = 70
    try:  # whatever is raised: another pytest must not run on here
        for number, (descriptor, name) in enumerate(zip(outputs, ("stdout", "stderr"), strict=False), 1):
            os.dup2(descriptor, number)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = work()
    finally:
        os._exit(code)


def exit_code(child: int, seconds: float = 60) -> int:
    """Of a forked process, which is killed where it takes longer; -9 after a SIGKILL."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (found := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"a forked process did not end in {seconds:g} s")


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
    mine, whole = (
        StoredTensors(list_checkpoints(path / "checkpoints")[-1], "model") for path in (run, expected)
    )
    assert_same(
        {name: mine[name] for name in whole.files_by_name},
        {name: whole[name] for name in whole.files_by_name},
        1e-9,
    )
    assert (run / "sample.txt").read_text() == (expected / "sample.txt").read_text()


def checkpoint_of(model: Any, folder: Path, base: Path, lora: Any = None, tokenizer: str = "byte") -> Path:
    """The checkpoint of a run that began with a folder of transformers, without the training."""
    settings = {"from_pretrained": str(base), "lora": lora}
    trainer: Any = {"config": {"model": settings, "data": {"tokenizer": tokenizer}}}
    return save_checkpoint(folder, 1, model_files(model), trainer)
