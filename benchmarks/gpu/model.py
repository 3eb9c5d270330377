"""mamba-1.27b on one GPU: a tile, the methods' gradients, and a step at a million tokens."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import adjoint
from adjoint import memory
from adjoint.batch import Batch
from adjoint.engine.first_use import TOKENS
from adjoint.engine.tile import Gradients
from adjoint.tools.sweep.compare import compare
from adjoint.tools.sweep.compare import gradient as gradient_of
from benchmarks.common import Point
from benchmarks.gpu.kernels import required
from benchmarks.long_context import measure as long_context
from benchmarks.long_context.command import check_rows
from benchmarks.timing import Mark, phases, synchronize

REPEAT_S = 0.3
TOP_KERNELS = 15  # those that take most of a tile's time are named
SPEAK_S = 5.0  # seconds between two lines on a long step
# ‖difference‖ / ‖gradient‖ of two orders of rounding; half precision has no limit that would not be a guess.
DISTANCES = {"float64": 1e-10, "float32": 1e-4}
ATOMICS = 1e-3  # the same launches in half precision: only sums by atomics come in another order
# A chunk's backward in its forwards, until it has been measured: at least, and usually.
AT_LEAST, USUALLY = 2.0, 3.5


def no_fallback(point: Point) -> None:
    """Raises RuntimeError if plain PyTorch would run one of a Mamba layer's operations."""
    for operation in ("selective_scan", "causal_conv1d", "rms_norm"):
        required(operation, point["device"], getattr(torch, point["precision"]))


# ------------------------------------------------------------------------------------------------------- tile


def tile(point: Point) -> dict[str, Any]:
    """One layer on one chunk as `Exact` runs it: the forward, and the backward (linearize and pullback).

    device_ms: the GPU's own time, by events. wall_ms: a tile of many in a row. host_ms: what queueing one
    takes. Where wall is well above device, the GPU waits for the host. launches: of kernels, by the profiler.
    """
    no_fallback(point)
    device, chunk_size = torch.device(point["device"]), point["chunk_size"]
    model = long_context.build({**point, "model": {**point["model"], "n_layer": 1}})
    layer: Any = model.stages()[1]
    x, dy = (torch.randn(1, chunk_size, model.config.d_model, device=device) for _ in range(2))
    (state,) = model.initial_state(1)
    d_state = tuple(torch.ones_like(s) for s in state)
    ids = long_context.tokens(point, chunk_size)
    chunk = Batch(ids, ids)
    gradients = Gradients()

    def forward(mark: Mark) -> None:
        with torch.no_grad():
            layer.forward(x, state, chunk)

    def backward(mark: Mark) -> None:
        _, _, pullback = layer.linearize(x, state, chunk, gradients)
        mark()
        pullback(dy, d_state)

    half = point["precision"] == "bfloat16"
    with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        result = {"forward": _timed(forward, device), "backward": _timed(backward, device)}
    both = sum(result[name]["device_ms"] for name in result)
    config = adjoint.StackConfig(**point["model"])
    tiles = config.n_layer * math.ceil(point["step_tokens"] / chunk_size)
    wall = sum(result[name]["wall_ms"] for name in result)
    return {**result, "device_us_per_token": 1e3 * both / chunk_size, "step_s": tiles * wall / 1e3}


def _timed(run: Callable[[Mark], object], device: torch.device) -> dict[str, Any]:
    parts = phases(run, str(device), REPEAT_S)
    device_s = statistics.median(map(sum, parts))
    hosts = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        run(lambda: None)
        hosts.append(time.perf_counter() - began)
    synchronize(device)
    repeats = max(3, min(50, int(REPEAT_S / max(device_s, *hosts))))
    began = time.perf_counter()
    for _ in range(repeats):
        run(lambda: None)
    synchronize(device)
    wall_s = (time.perf_counter() - began) / repeats
    return {
        "device_ms": 1e3 * device_s,
        "phases_ms": [1e3 * statistics.median(part) for part in zip(*parts, strict=True)],
        "wall_ms": 1e3 * wall_s,
        "host_ms": 1e3 * statistics.median(hosts),
        **profiled(lambda: run(lambda: None), device),
    }


def profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """launches: kernels that the GPU was given; copies: its copies and fills; kernels: those that took most,
    each with its calls and milliseconds. All None if the profiler says nothing, and on a CPU."""
    nothing = {"launches": None, "copies": None, "kernels": None}
    if device.type != "cuda":
        return nothing
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize(device)
    return counted(profiler.key_averages()) or nothing


def counted(averages: Any) -> dict[str, Any] | None:
    """The numbers of `profiled`, from the profiler's averages; None without any of a kernel."""
    on_gpu = [
        e for e in averages if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
    ]
    copies = [e for e in on_gpu if e.key.startswith(("Memcpy", "Memset"))]
    kernels = sorted((e for e in on_gpu if e not in copies), key=lambda e: -e.self_device_time_total)
    if not kernels:
        return None
    return {
        "launches": sum(e.count for e in kernels),
        "copies": sum(e.count for e in copies),
        "kernels": [
            {"name": e.key[:120], "calls": e.count, "ms": e.self_device_time_total / 1e3}
            for e in kernels[:TOP_KERNELS]
        ],
    }


# -------------------------------------------------------------------------------------------------- gradients


def compare_methods(point: Point) -> dict[str, Any]:
    """`Exact` beside `Backprop`: ‖difference‖ / ‖gradient‖, seconds of forward and backward, memory beyond
    what was held before."""
    no_fallback(point)
    model, ids = long_context.build(point), long_context.tokens(point, point["length"])
    chunk_size = min(long_context.chunk_size_of(point, model, ids), point["length"])
    reference, backprop = _timed_gradient(model, ids, adjoint.Backprop(), point)
    found, exact = _timed_gradient(model, ids, adjoint.Exact(chunk_size), point)
    finite = all(bool(torch.isfinite(g).all()) for g in (*reference.values(), *found.values()))
    agreement = compare(reference, found)
    layers = {
        name: a.relative_error for name, a in agreement["layer"].items() if a.relative_error is not None
    }
    worst = max(layers, key=layers.__getitem__, default=None)
    overall, limit = agreement["overall"]["overall"], DISTANCES.get(point["precision"])
    within = overall.relative_error is not None and overall.relative_error <= (limit or math.inf)
    return {
        "chunk_size": chunk_size,
        "distance": overall.relative_error,
        "cosine": overall.cosine,
        "limit": limit,
        "worst_layer": worst,
        "worst_layer_distance": None if worst is None else layers[worst],
        "finite": finite,
        "passed": finite and within,
        "time_ratio": exact["seconds"] / backprop["seconds"],
        **{f"exact_{key}": value for key, value in exact.items()},
        **{f"backprop_{key}": value for key, value in backprop.items()},
    }


def _timed_gradient(
    model: adjoint.Stack, ids: Tensor, method: Any, point: Point
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The gradient of a second pass; the first one compiles."""
    gradient_of(model, ids, method, point["precision"])
    with memory.PeakMemory(ids.device) as peak:
        synchronize(ids.device)
        began = time.perf_counter()
        gradient, _ = gradient_of(model, ids, method, point["precision"])
        synchronize(ids.device)
        seconds = time.perf_counter() - began
    return gradient, {"seconds": seconds, "peak_bytes": peak.bytes}


def exact(point: Point) -> dict[str, Any]:
    """Forward and backward by `Exact` where `Backprop` no longer fits."""
    no_fallback(point)
    model, ids = long_context.build(point), long_context.tokens(point, point["length"])
    chunk_size = min(long_context.chunk_size_of(point, model, ids), point["length"])
    gradient, found = _timed_gradient(model, ids, adjoint.Exact(chunk_size), point)
    finite = all(bool(torch.isfinite(g).all()) for g in gradient.values())
    return {
        "chunk_size": chunk_size,
        **found,
        "tokens_per_second": point["length"] / found["seconds"],
        "memory_bytes": memory.peak_memory_bytes(ids.device),
        "finite": finite,
        "passed": finite,
    }


def graphs(point: Point) -> dict[str, Any]:
    """`Exact` with its chunks recorded as CUDA graphs beside `Exact` without; that they cannot be is an
    error."""
    no_fallback(point)
    model, ids = long_context.build(point), long_context.tokens(point, point["length"])
    eager = adjoint.Exact(point["chunk_size"])
    expected, launched = _timed_gradient(model, ids, eager, point)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "chunks cannot be recorded")
        replayed = dataclasses.replace(eager, cuda_graphs=True)
        found, graphs = _timed_gradient(model, ids, replayed, point)
    distance = compare(expected, found)["overall"]["overall"].relative_error
    limit = DISTANCES.get(point["precision"], ATOMICS)
    return {
        "distance": distance,
        "limit": limit,
        "passed": distance is not None and distance <= limit,
        "time_ratio": graphs["seconds"] / launched["seconds"],
        **{f"graphs_{key}": value for key, value in graphs.items()},
        **{f"launched_{key}": value for key, value in launched.items()},
    }


def gradient(point: Point) -> dict[str, Any]:
    """`Exact` and `Backprop` against `Backprop` in float64: the check of `benchmarks.long_context`."""
    no_fallback(point)
    rows = check_rows([(point, long_context.gradient_check(point))])
    return {"checks": rows, "passed": all(row["passed"] for row in rows)}


def chunks(point: Point) -> dict[str, Any]:
    """`Exact` against itself with chunks that share no edge."""
    no_fallback(point)
    found, limit = long_context.chunk_check(point), DISTANCES[point["precision"]]
    return {**found, "limit": limit, "passed": found["distance"] <= limit}


# ------------------------------------------------------------------------------------------------ a long step


class TooSlow(Exception):
    """A step would not end in time."""


class Watch:
    """Follows a step of `Exact` chunk by chunk, on the first layer, and ends it if it would not end in time.

    The host runs ahead of a GPU by less than a chunk, whose launches are more than its queue holds.

    Args:
        chunks: of the sequence. deadline: of `time.monotonic()`.
        told: is called with what has been found so far, every `SPEAK_S` seconds.

    Attributes:
        found: chunks done forward and backward, seconds a chunk each way, the projected seconds of the step.
    """

    def __init__(self, chunks: int, deadline: float, told: Callable[[Point], object]) -> None:
        self.chunks, self.deadline, self.told = chunks, deadline, told
        self.began = self.turned = self.spoken = 0.0
        self.passes = 0
        self.found: Point = {}

    def begin(self, model: adjoint.Stack) -> None:
        """Follow the model's next passes."""
        self.passes, self.began = 0, time.monotonic()

        def follow(module: nn.Module, inputs: Any) -> None:
            if inputs[0].shape[1] > TOKENS:  # else a layer with a hook is being compared on first use
                self._first_layer(module, inputs)

        model.layers[0].register_forward_pre_hook(follow)

    def _first_layer(self, module: nn.Module, inputs: Any) -> None:
        """A chunk's forward begins, or its recomputation: as many chunks before it are done."""
        now = time.monotonic()
        forward = min(self.passes, self.chunks)
        backward = max(0, self.passes - self.chunks + 1)  # the last one was linearised in its forward
        self.passes += 1
        if forward == 0:
            return
        if not backward:
            self.turned = now
            each = (now - self.began) / forward
            lowest, projected = (self.chunks * each * (1 + ratio) for ratio in (AT_LEAST, USUALLY))
            rates = {"forward_chunk_s": each, "backward_chunk_s": None}
        else:
            each = self.found["forward_chunk_s"]
            back = (now - self.turned - each) / backward
            lowest = projected = self.chunks * (each + back)
            rates = {"forward_chunk_s": each, "backward_chunk_s": back}
        self.found = {"chunks": self.chunks, "chunks_forward": forward, "chunks_backward": backward, **rates,
                      "projected_s": projected}  # fmt: skip
        if now - self.spoken > SPEAK_S:
            self.spoken = now
            where = f"{backward:,} backward" if backward else f"{forward:,} forward"
            print(
                f"    chunk {where} of {self.chunks:,}: {now - self.began:,.0f} s, the whole step "
                f"{projected:,.0f} s",
                file=sys.stderr,
                flush=True,
            )
            self.told(self.found)
        few = 3  # whose mean is not yet to be trusted
        if (backward or forward) > few and self.began + lowest > self.deadline:
            raise TooSlow(
                f"it would take {lowest:,.0f} s, of {self.deadline - self.began:,.0f} s that there were"
            )


def step(point: Point, deadline: float, partial: Callable[[Point], object]) -> dict[str, Any]:
    """A training step of `Exact` (forward, backward, clipping, AdamW) under a cap on the GPU's memory.

    Where it would not end in time it is stopped: {"stopped": why}, with what was found until then.
    """
    device = torch.device(point["device"])
    no_fallback(point)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, point["cap_bytes"] / total), device)
    count = math.ceil(point["length"] / point["chunk_size"])

    def so_far(found: Point) -> Point:
        return {**found, "memory_bytes": memory.peak_memory_bytes(device)}

    watch, held = Watch(count, deadline, lambda found: partial(so_far(found))), []

    def begin(model: adjoint.Stack) -> None:
        held.append(model)
        watch.begin(model)

    try:
        result = long_context.training_step(point, begin)
    except TooSlow as error:
        return {"stopped": str(error), **so_far(watch.found)}
    seconds = result.pop("seconds")[0]
    gradients = {name: p.grad for name, p in held[0].named_parameters()}
    finite = all(g is not None and bool(torch.isfinite(g).all()) for g in gradients.values())
    none = [name for name, g in gradients.items() if g is None or not bool(g.any())]
    whole = sum(seconds.values())
    return {
        **watch.found,
        **result,
        "cap_bytes": point["cap_bytes"],
        "reserved_bytes": result.get("reserved_bytes"),
        **{f"{phase}_s": value for phase, value in seconds.items()},
        "step_s": whole,
        "tokens_per_second": point["length"] / whole,
        "chance_loss": math.log(held[0].config.vocab_size),
        "finite": finite,
        "without_gradient": none,
        "passed": finite and not none,
    }
