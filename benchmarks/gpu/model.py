"""A model on one GPU: a tile of it, and the methods' gradients."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import adjoint
from adjoint import memory
from adjoint.batch import Batch
from adjoint.engine.chunk_size import default_chunk_size
from adjoint.engine.tile import Gradients
from adjoint.tools.measure.passes import synchronize
from adjoint.tools.measure.process import Point
from adjoint.tools.sweep.compare import compare
from adjoint.tools.sweep.compare import gradient as gradient_of
from adjoint.train.machine import autocast
from benchmarks.gpu.kernels import required
from benchmarks.timing import Mark, phases

REPEAT_S = 0.3
TOP_KERNELS = 15  # those that take most of a tile's time are named
SCANS = {
    "mamba": "selective_scan",
    "gated_deltanet": "gated_delta_rule",
    "kda": "kda",
    "rwkv7": "dplr_delta_rule",
}  # of the others ssd_scan
AS_GOOD = 1.5  # how much farther from the float64 gradient a run may be than the one it stands beside


def build(point: Point) -> adjoint.Stack:
    """The point's model, made on its device; the same parameters for a seed and device."""
    torch.manual_seed(0)
    with torch.device(point["device"]):
        model = adjoint.Stack(adjoint.StackConfig(**point["model"]))
    return model.double() if point["precision"] == "float64" else model


def tokens(point: Point, length: int) -> Tensor:
    """(1, length) random token ids, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(adjoint.StackConfig(**point["model"]).vocab_size, (1, length), generator=generator)
    return ids.to(point["device"])


def prepared(point: Point) -> tuple[adjoint.Stack, Tensor, int]:
    """The model, its ids, and tokens per chunk of `Exact`: the point's, else what it picks in this precision,
    at most the sequence. Raises RuntimeError if plain PyTorch would run one of the layers' operations."""
    for operation in (SCANS.get(point["model"]["mixer"], "ssd_scan"), "causal_conv1d", "rms_norm"):
        required(operation, point["device"], getattr(torch, point["precision"]))
    model, ids = build(point), tokens(point, point["length"])
    with autocast(point["precision"], ids.device):
        chunk_size = point["chunk_size"] or default_chunk_size(model, ids)
    return model, ids, min(chunk_size, ids.shape[1])


# ------------------------------------------------------------------------------------------------------- tile


def tile(point: Point) -> Point:
    """Time a layer on a chunk as `Exact` runs it: the forward, and the backward (linearize and pullback).

    device_ms: the GPU's own time, by events. wall_ms: a tile of many in a row. host_ms: what queueing one
    takes. Where wall is well above device, the GPU waits for the host. launches: of kernels, by the profiler.
    """
    chunk_size = point["chunk_size"]
    one_layer = {**point["model"], "n_layer": 1}
    model, ids, _ = prepared({**point, "model": one_layer, "length": chunk_size})
    layer: Any = model.stages()[1]
    x, dy = (torch.randn(1, chunk_size, model.config.d_model, device=ids.device) for _ in range(2))
    (state,) = model.initial_state(1)
    d_state = tuple(torch.ones_like(s) for s in state)
    chunk, gradients = Batch(ids, ids), Gradients()

    def forward(mark: Mark) -> None:
        with torch.no_grad():
            layer.forward(x, state, chunk)

    def backward(mark: Mark) -> None:
        _, _, pullback = layer.linearize(x, state, chunk, gradients)
        mark()
        pullback(dy, d_state)

    half = point["precision"] == "bfloat16"
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        parts = {"forward": _timed(forward, ids.device), "backward": _timed(backward, ids.device)}
    device_ms, wall_ms = (sum(timings[key] for timings in parts.values()) for key in ("device_ms", "wall_ms"))
    tiles = point["model"]["n_layer"] * math.ceil(point["step_tokens"] / chunk_size)
    return {"parts": parts, "device_us_per_token": 1e3 * device_ms / chunk_size,
            "step_s": tiles * wall_ms / 1e3}  # fmt: skip


def _timed(run: Callable[[Mark], object], device: torch.device) -> Point:
    def once() -> None:
        run(lambda: None)

    def seconds(times: int) -> tuple[float, float]:
        """Return seconds per run of several in a row: until it was queued, and until all are done."""
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            once()
        queued = time.perf_counter()
        synchronize(device)
        return (queued - began) / times, (time.perf_counter() - began) / times

    parts = phases(run, str(device), REPEAT_S)
    device_s, host_s = statistics.median(map(sum, parts)), statistics.median(seconds(1)[0] for _ in range(5))
    wall_s = seconds(max(3, min(50, int(REPEAT_S / max(device_s, host_s)))))[1]
    return {
        "device_ms": 1e3 * device_s,
        "phases_ms": [1e3 * statistics.median(phase) for phase in zip(*parts, strict=True)],
        "wall_ms": 1e3 * wall_s,
        "host_ms": 1e3 * host_s,
        **launched(once, device),
    }


def launched(run: Callable[[], object], device: torch.device) -> Point:
    """launches: kernels that the GPU was given; kernels: those that took most, each with its calls and
    milliseconds. None if the profiler says nothing, and on a CPU."""
    averages: Any = ()
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            synchronize(device)
        averages = profiler.key_averages()
    return counted(averages)


def counted(averages: Any) -> Point:
    """The numbers of `launched`, from the profiler's averages."""
    kernels = [
        e for e in averages
        if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False)
        and not e.key.startswith(("Memcpy", "Memset"))
    ]  # fmt: skip
    kernels.sort(key=lambda e: -e.self_device_time_total)
    kernel_counts = [
        {"name": e.key[:120], "calls": e.count, "ms": e.self_device_time_total / 1e3} for e in kernels
    ]
    return {"launches": sum(e.count for e in kernels) or None, "kernels": kernel_counts[:TOP_KERNELS] or None}


# -------------------------------------------------------------------------------------------------- gradients


def compared(point: Point) -> Point:
    """Gradients of one model by the point's runs, each beside the first one's.

    A run is {"method": name in `adjoint`, its arguments}, and if it is to have them its "precision" and the
    "limit" of its distance, or "beside", the run of which it may be `AS_GOOD` times as far. Of each: seconds
    of forward and backward and memory beyond what was held before, with "warm" of a second pass, as the first
    one compiles; ‖difference‖ / ‖gradient‖ over all parameters, and the layer where that is largest.
    """
    model, ids, chunk_size = prepared(point)
    parts: dict[str, Point] = {}
    first: dict[str, Tensor] = {}
    for name, run in point["runs"].items():
        options = {"precision": point["precision"], "limit": None, "beside": None, **run}
        precision, limit, reference_name = (options.pop(key) for key in ("precision", "limit", "beside"))
        cls = getattr(adjoint, options.pop("method"))
        method = cls(**({"chunk_size": chunk_size} if cls is adjoint.Exact else {}) | options)
        model.to(torch.float64 if precision == "float64" else torch.float32)  # exact both ways
        for _ in range(1 + point["warm"]):
            with memory.PeakMemory(ids.device) as peak:
                synchronize(ids.device)
                began = time.perf_counter()
                gradient = gradient_of(model, ids, method, precision)[0]
                synchronize(ids.device)
                seconds = time.perf_counter() - began
        row: Point = {"seconds": seconds, "tokens_per_second": ids.shape[1] / seconds,
                       "peak_bytes": peak.bytes}  # fmt: skip
        row["finite"] = all(bool(torch.isfinite(g).all()) for g in gradient.values())
        if parts:
            agreement = compare(first, gradient)
            row["distance"] = _error(agreement["overall"]["overall"])
            row["worst_layer"] = max(agreement["layer"], key=lambda one: _error(agreement["layer"][one]))
            row["limit"] = limit if reference_name is None else AS_GOOD * parts[reference_name]["distance"]
            row["time_ratio"] = seconds / next(iter(parts.values()))["seconds"]
        first, parts[name] = first or gradient, row
    passed = all(p["finite"] and p.get("distance", 0) <= (p.get("limit") or math.inf) for p in parts.values())
    peak_bytes = memory.peak_memory_bytes(ids.device)
    return {"chunk_size": chunk_size, "parts": parts, "memory_bytes": peak_bytes, "passed": passed}


def _error(agreement: Any) -> float:
    """Infinite where the gradients are not finite."""
    return math.inf if agreement.relative_error is None else float(agreement.relative_error)
