"""Peak memory and time of forward + backward passes, and what they will be at other lengths."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint import memory
from adjoint.tools.points.process import Point


class Passes(NamedTuple):
    """A model, and its loss of ids (batch, seqlen)."""

    model: Any
    loss: Callable[[Tensor], Tensor]


def measured(
    prepare: Callable[[], Passes],
    ids: Tensor,
    first: int,
    repeat: Callable[[Callable[[], object]], list[float]],
    above: str = "imports",
) -> Point:
    """Bytes at the peak, above what the process held before and in all (imports included), seconds of each
    forward + backward, and the loss.

    Args:
        prepare: makes the model. ids: (batch, seqlen).
        first: tokens of a pass before, which loads libraries and starts threads: its peak and time do not
            count.
        repeat: runs a pass several times, as `repeated` does.
        above: what memory is counted above: what the process holds after "imports", or after the first
            "step".
    """
    cuda, value = ids.is_cuda, 0.0
    baseline = memory.rss_bytes()[0]
    model, loss_of = prepare()

    def step(ids: Tensor = ids) -> None:
        nonlocal value
        model.zero_grad(set_to_none=True)
        loss = loss_of(ids)
        loss.backward()
        value = loss.item()

    step(ids[:, :first])
    memory.reset_peak_rss()
    if cuda:
        torch.cuda.reset_peak_memory_stats(ids.device)
    if above == "step":
        baseline = memory.rss_bytes()[0]
    seconds = repeat(step)
    resident = memory.rss_bytes()[1]
    peak = torch.cuda.max_memory_allocated(ids.device) if cuda else resident - baseline
    return {"memory_bytes": peak, "resident_bytes": resident, "seconds": seconds, "loss": value}


def synchronize(device: str | torch.device) -> None:
    """Wait for the device's queue."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def repeated(
    run: Callable[[], object], device: str, repeat_s: float, least: int = 3, most: int = 200
) -> list[float]:
    """Seconds of each of several runs, the device waited for.

    They go on until they have taken `repeat_s` together and are `least`; they are never more than `most`, and
    fewer than `least` if those took five times as long.
    """
    times: list[float] = []
    while not times or (
        (sum(times) < repeat_s or len(times) < least) and len(times) < most and sum(times) <= 5 * repeat_s
    ):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times


def typical(seconds: Sequence[float]) -> float:
    """The median pass; the first of several also paid for touching memory for the first time."""
    return statistics.median(seconds[1:] or seconds)


def predicted_bytes(sizes: Sequence[tuple[int, int]], length: int) -> int | None:
    """Memory at `length` by a line through the last two (length, bytes) before it, or through one and the
    origin; of several at one length the highest counts."""
    shorter = [(n, size) for n, size in sizes if n < length]
    if not shorter:
        return None
    n, size, slope = _line(shorter)
    return int(size + slope * (length - n))


def longest(sizes: Sequence[tuple[int, int]], limit: float) -> float:
    """The length at which that line comes to `limit` bytes; infinite where it does not rise."""
    n, size, slope = _line(sizes)
    return n + (limit - size) / slope if slope else math.inf


def _line(sizes: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """The last length, its bytes, and bytes a token beyond it; noise never makes it fall."""
    last = list(dict(sorted(sizes)).items())[-2:]
    (a, low), (b, high) = last if len(last) == 2 else [(0, 0), *last]
    return b, high, max((high - low) / (b - a), 0.0)
