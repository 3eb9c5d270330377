"""One run of the convergence benchmark: a task learned with a method from a seed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import torch

import adjoint
from adjoint.tools.measure.process import Point
from adjoint.train.config import TrainingConfig
from adjoint.train.optimizer import learning_rate, make_optimizer
from benchmarks.convergence.tasks import TASKS, open_lessons, open_task

MODEL: dict[str, Any] = {"d_model": 64, "n_layer": 2, "d_state": 16, "expand": 2, "mixer": "mamba"}
BATCH, SEQLEN, WARMUP = 4, 512, 20
CHUNK = 128  # Exact's and LayerLocal's: several chunks a sequence, or there would be nothing to compare
METHOD_NAMES = (
    "backprop, exact, truncated-WINDOW, truncated-auto, unbiased-WINDOW, layer-local, layer-local-WINDOW"
)


def make_method(name: str) -> Any:
    """The method that `name` stands for, such as "truncated-16" or "layer-local".

    Raises:
        ValueError: no such method, or a window that it does not take.
    """
    plain = {
        "backprop": adjoint.Backprop(),
        "exact": adjoint.Exact(chunk_size=CHUNK),
        "layer-local": adjoint.LayerLocal(chunk_size=CHUNK),
        "truncated-auto": adjoint.Truncated("auto", tolerance=1e-3),
    }
    if name in plain:
        return plain[name]
    match = re.fullmatch(r"(truncated|unbiased|layer-local)-(\d+)", name)
    if not match:
        raise ValueError(f"unknown method {name!r}: choose among {METHOD_NAMES}")
    if match[1] == "layer-local":
        return adjoint.LayerLocal(int(match[2]))
    return adjoint.Truncated(int(match[2]), unbiased=match[1] == "unbiased")


def measure(point: Point) -> Point:
    """Train one run.

    point: task, method, seed, steps, seqlen; model, batch and dtype ("float64") on request. The result holds
    the training loss of every step, the windows that the method picked (a row a step, or None), what the
    task's `evaluate` gives, the processor's time for all this as "core_seconds", and, where there were
    lessons before, the accuracy after them as "before".
    """
    began = time.process_time()
    task, sizes = TASKS[point["task"]], (point["seqlen"], point.get("batch", BATCH), point["seed"])
    data, lessons = open_task(point["task"], *sizes), open_lessons(point["task"], *sizes)
    torch.manual_seed(point["seed"])
    shape = MODEL | point.get("model", {})
    config = adjoint.StackConfig(
        vocab_size=data.vocab_size, dt_min=task.dt_min, dt_max=task.dt_max, tie_embeddings=True, **shape
    )
    model = adjoint.Stack(config).to(getattr(torch, point.get("dtype", "float32")))
    result: Point = {}
    if lessons is not None:
        for _ in _optimise(model, lessons, adjoint.Backprop(), task.lesson_steps, task.lesson_lr):
            pass
        result["before"] = data.evaluate(model).get("accuracy")
    torch.manual_seed(point["seed"])  # unbiased draws from here on
    losses: list[float] = []
    windows: list[list[int]] = []
    for out in _optimise(model, data, make_method(point["method"]), point["steps"], task.lr):
        losses.append(out.loss.item())
        if out.windows is not None:
            windows.append([int(w) for w in out.windows])
    result |= {"losses": losses, "windows": windows or None} | data.evaluate(model)
    return result | {"core_seconds": time.process_time() - began}


def _optimise(model: Any, data: Any, method: Any, steps: int, lr: float) -> Iterator[Any]:
    """Take so many optimizer steps; yields the model's output of each."""
    config = TrainingConfig(steps=steps, lr=lr, warmup_steps=WARMUP)
    optimizer = make_optimizer(model, config)
    for step, (ids, labels) in zip(range(1, steps + 1), data.train(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.zero_grad(set_to_none=True)
        out = model(ids, labels=labels, method=method)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        yield out
