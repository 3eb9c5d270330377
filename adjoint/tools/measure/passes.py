"""Peak memory and time of forward + backward passes, and what they will be at other lengths."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint import memory
from adjoint.engine.verification import SHARE
from adjoint.kernels.precision import full_float32
from adjoint.tools.measure.process import Point

BEYOND = 64  # times the longest measured length: lines are not drawn further
LEAST_GROWTH = 0.25  # of memory between two lengths: less is as much noise as growth


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
    graph: bool = False,
) -> Point:
    """Return the bytes at the peak, above what the process held before and in all (imports included), seconds
    of each forward + backward, the loss, and the L2 norm of all gradients.

    On a GPU the bytes at the peak are those of tensors, weights included, and `reserved_bytes` those of
    PyTorch's allocator.

    Args:
        prepare: makes the model. ids: (batch, seqlen).
        first: tokens of a pass before, which loads libraries and starts threads: its peak and time do not
            count.
        repeat: runs a pass several times, as `repeated` does.
        above: what memory is counted above: what the process holds after "imports", or after the first
            "step".
        graph: whether passes on a GPU are replays of a CUDA graph, captured after two passes. Capturing it
            counts for the peak, whose tensors the graph keeps.
    """
    cuda, last = ids.is_cuda, torch.zeros(())
    baseline = memory.rss_bytes()[0]
    model, loss_of = prepare()

    def step(ids: Tensor = ids) -> None:
        nonlocal last
        model.zero_grad(set_to_none=True)
        loss = loss_of(ids)
        loss.backward()
        last = loss.detach()

    step(ids[:, :first])
    if graph and cuda:
        step()
    memory.reset_peak_rss()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ids.device)
    if above == "step":
        baseline = memory.rss_bytes()[0]
    seconds = repeat(captured(step) if graph and cuda else step)
    resident = memory.rss_bytes()[1]
    peak = torch.cuda.max_memory_allocated(ids.device) if cuda else resident - baseline
    result = {"memory_bytes": peak, "resident_bytes": resident, "seconds": seconds, "loss": last.item()}
    if cuda:
        result["reserved_bytes"] = torch.cuda.max_memory_reserved(ids.device)
    return result | {"gradient_norm": norm_of_gradients(model)}


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Capture a step in a CUDA graph, and return the function that replays it on the same tensors."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def norm_of_gradients(model: torch.nn.Module) -> float:
    """Return the L2 norm of all gradients of a model, summed in float64."""
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))


@full_float32()
def gradients_apart(ways: Iterable[tuple[str, Passes]], ids: Tensor) -> dict[str, Point]:
    """Compare the gradients of several ways to run one model with those of the first way.

    Ways run one after the other, without TF32. A distance is relative to the L2 norm of the parameter's
    gradient or, if that is smaller, to `SHARE` of the norm of all gradients: the norm of a gradient that is
    zero up to rounding, such as that of a bias of keys, is no scale.

    Returns:
        For each way: "loss", "difference" (the largest relative L2 distance of a parameter's gradient) and
        "parameter" (its name).
    """
    expected: dict[str, Tensor | None] = {}
    results: dict[str, Point] = {}
    for way, (model, loss_of) in ways:
        model.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        expected = expected or gradients
        least = SHARE * math.hypot(*(float(g.double().norm()) for g in expected.values() if g is not None))
        distance, worst = max((_apart(grad, expected[name], least), name) for name, grad in gradients.items())
        results[way] = {"difference": distance, "parameter": worst, "loss": loss.item()}
        del model, loss_of, loss, gradients  # before the next model is made
    return results


def _apart(got: Tensor | None, expected: Tensor | None, least: float) -> float:
    if got is None or expected is None:
        return 0.0 if got is expected else math.inf
    size = max(float(expected.double().norm()), least)
    distance = float((got.double() - expected.double()).norm()) / (size or 1.0)
    return distance if math.isfinite(distance) else math.inf


def synchronize(device: str | torch.device) -> None:
    """Wait for the device's queue."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def repeated(
    run: Callable[[], object], device: str, repeat_s: float, least: int = 3, most: int = 200
) -> list[float]:
    """Return the seconds of each of several runs, each ended by a device synchronization.

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
    """Return the median pass; the first of several also paid for touching memory for the first time."""
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
    """Return the length at which that line comes to `limit` bytes; infinite where it does not rise."""
    n, size, slope = _line(sizes)
    return n + (limit - size) / slope if slope else math.inf


def fits(sizes: Sequence[tuple[int, int]], limit: float, failed: int | None = None) -> Point:
    """Extrapolate the longest length that fits in `limit` bytes from the (length, bytes) measured and the
    shortest length that failed.

    Of the result: the longest length `measured` to fit; the shortest that did not (`failed`); the length at
    which a line comes to the limit (`extrapolated`), and the lengths it goes through (`through`): the last
    two measured, or the two on either side of the limit. `at_least`: it may be longer, as lines are not drawn
    beyond BEYOND times the longest measured, nor through two points whose bytes differ by less than a share
    LEAST_GROWTH: then `extrapolated` is the longest measured, and `through` has it alone.
    """
    sizes = sorted(sizes)
    within = [*itertools.takewhile(lambda size: size[1] <= limit, sizes)]
    if len(within) < len(sizes):
        above = sizes[len(within)][0]
        failed = above if failed is None else min(above, failed)
    if not within:
        return {"measured": None, "failed": failed, "extrapolated": None, "through": [], "at_least": False}
    line_points, last = sizes[: len(within) + 1], within[-1][0]
    if len(line_points) > 1 and line_points[-1][1] < (1 + LEAST_GROWTH) * line_points[-2][1]:
        return {"measured": last, "failed": failed, "extrapolated": last, "through": [last], "at_least": True}
    line = min(longest(line_points, limit), BEYOND * last, failed or math.inf)
    return {
        "measured": last,
        "failed": failed,
        "extrapolated": max(int(line), last),
        "through": [n for n, _ in line_points[-2:]],
        "at_least": line == BEYOND * last,
    }


def _line(sizes: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """Return the last length, its bytes, and bytes per token beyond it; noise never makes it fall."""
    last = list(dict(sorted(sizes)).items())[-2:]
    (a, low), (b, high) = last if len(last) == 2 else [(0, 0), *last]
    return b, high, max((high - low) / (b - a), 0.0)
