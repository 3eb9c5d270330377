"""A model on one GPU: a tile of it, and the methods' gradients."""

from __future__ import annotations

import math
import statistics
import time
import warnings
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
from adjoint.tools.points.passes import synchronize
from adjoint.tools.points.process import Point
from adjoint.tools.sweep.compare import compare
from adjoint.tools.sweep.compare import gradient as gradient_of
from adjoint.train.machine import autocast
from benchmarks.gpu.kernels import required
from benchmarks.timing import Mark, phases

REPEAT_S = 0.3
TOP_KERNELS = 15  # those that take most of a tile's time are named
# ‖difference‖ / ‖gradient‖ of two orders of rounding; half precision has no limit that would not be a guess.
DISTANCES = {"float64": 1e-10, "float32": 1e-4}
AS_GOOD_AS_BACKPROP = 1.5  # how much farther from the float64 gradient Exact may be


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


def chunk_size_of(point: Point, model: adjoint.Stack, ids: Tensor) -> int:
    """Tokens a chunk of `Exact`: the point's, else what it picks in this precision; at most the sequence."""
    with autocast(point["precision"], ids.device):
        return min(point["chunk_size"] or default_chunk_size(model, ids), ids.shape[1])


def no_fallback(point: Point) -> None:
    """Raises RuntimeError if plain PyTorch would run one of a Mamba layer's operations."""
    for operation in ("selective_scan", "causal_conv1d", "rms_norm"):
        required(operation, point["device"], getattr(torch, point["precision"]))


def prepared(point: Point) -> tuple[adjoint.Stack, Tensor, int]:
    """The model, its ids, and the chunk size of `Exact`; raises as `no_fallback` does."""
    no_fallback(point)
    model, ids = build(point), tokens(point, point["length"])
    return model, ids, chunk_size_of(point, model, ids)


# ------------------------------------------------------------------------------------------------------- tile


def tile(point: Point) -> Point:
    """One layer on one chunk as `Exact` runs it: the forward, and the backward (linearize and pullback).

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
    device_ms, wall_ms = (sum(part[key] for part in parts.values()) for key in ("device_ms", "wall_ms"))
    tiles = point["model"]["n_layer"] * math.ceil(point["step_tokens"] / chunk_size)
    return {**parts, "device_us_per_token": 1e3 * device_ms / chunk_size, "step_s": tiles * wall_ms / 1e3}


def _timed(run: Callable[[Mark], object], device: torch.device) -> Point:
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


def profiled(run: Callable[[], object], device: torch.device) -> Point:
    """launches: kernels that the GPU was given; copies: its copies and fills; kernels: those that took most,
    each with its calls and milliseconds. All None if the profiler says nothing, and on a CPU."""
    nothing = {"launches": None, "copies": None, "kernels": None}
    if device.type != "cuda":
        return nothing
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize(device)
    return counted(profiler.key_averages()) or nothing


def counted(averages: Any) -> Point | None:
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


def compared(point: Point) -> Point:
    """Gradients of one model by the point's methods, {name: options of `Exact`, or None for `Backprop`}.

    Of each, as name_…, the seconds of forward and backward, of a second pass, as the first one compiles, and
    the memory beyond what was held before. Of the second beside the first, ‖difference‖ / ‖gradient‖ and
    the ratio of their times. That chunks cannot be recorded as CUDA graphs is an error.
    """
    model, ids, chunk_size = prepared(point)
    found: Point = {"chunk_size": chunk_size}
    gradients = []
    for name, options in point["methods"].items():
        method = (
            adjoint.Backprop() if options is None else adjoint.Exact(**{"chunk_size": chunk_size, **options})
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "chunks cannot be recorded")
            gradient_of(model, ids, method, point["precision"])
            with memory.PeakMemory(ids.device) as peak:
                synchronize(ids.device)
                began = time.perf_counter()
                gradients.append(gradient_of(model, ids, method, point["precision"])[0])
                synchronize(ids.device)
                seconds = time.perf_counter() - began
        found |= {f"{name}_seconds": seconds, f"{name}_peak_bytes": peak.bytes}
    found["memory_bytes"] = memory.peak_memory_bytes(ids.device)
    found["tokens_per_second"] = point["length"] / seconds
    found["finite"] = all(bool(torch.isfinite(g).all()) for by in gradients for g in by.values())
    found["passed"] = found["finite"]
    if len(gradients) > 1:
        agreement = compare(*gradients)
        overall = agreement["overall"]["overall"]
        off = math.inf if overall.relative_error is None else overall.relative_error
        limit = DISTANCES.get(point["precision"], point.get("limit"))
        layers = {name: a.relative_error or 0.0 for name, a in agreement["layer"].items()}
        worst = max(layers, key=layers.__getitem__, default=None)
        first, second = (found[f"{name}_seconds"] for name in point["methods"])
        found |= {
            "distance": off,
            "limit": limit,
            "cosine": overall.cosine,
            "worst_layer": worst,
            "worst_layer_distance": None if worst is None else layers[worst],
            "time_ratio": second / first,
            "passed": found["finite"] and off <= (math.inf if limit is None else limit),
        }
    return found


def gradient(point: Point) -> Point:
    """Exact's and Backprop's gradients against Backprop's in float64, of the same parameters: a check for
    each of the point's precisions.

    A check has ‖g − g64‖ / ‖g64‖ over all parameters together, of both methods, and the largest of a single
    parameter of `Exact`; `between` is Exact's distance from Backprop.
    """
    no_fallback(point)
    model, ids, _ = prepared(point | {"precision": "float32"})
    ours, plain = adjoint.Exact(point["chunk_size"]), adjoint.Backprop()
    reference, _ = gradient_of(model.double(), ids, plain, "float64")
    checks = []
    for precision in point["precisions"]:
        model.to(torch.float64 if precision == "float64" else torch.float32)  # exact both ways
        theirs = reference if precision == "float64" else gradient_of(model, ids, plain, precision)[0]
        found, _ = gradient_of(model, ids, ours, precision)
        off, rounding = distance(found, reference), distance(theirs, reference)
        limit = DISTANCES["float64"] if precision == "float64" else AS_GOOD_AS_BACKPROP * rounding
        checks.append({
            "precision": precision,
            "exact": off,
            "backprop": rounding,
            "between": distance(found, theirs),
            "worst_parameter": max(distance({k: found[k]}, {k: reference[k]}) for k in reference),
            "limit": limit,
            "passed": off <= limit,
        })  # fmt: skip
        del theirs, found
    return {"checks": checks, "passed": all(check["passed"] for check in checks)}


def chunks(point: Point) -> Point:
    """Exact's gradient with two chunk sizes that share no edge: their relative distance."""
    model, ids, size = prepared(point)
    other = max(1, size * 5 // 7)
    while math.gcd(size, other) > 1:  # else every multiple of both would be an edge of both
        other -= 1
    first, second = (gradient_of(model, ids, adjoint.Exact(n), point["precision"])[0] for n in (size, other))
    off, limit = distance(second, first), DISTANCES[point["precision"]]
    return {"distance": off, "chunk_sizes": [size, other], "limit": limit, "passed": off <= limit}


def distance(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """‖found − reference‖ / ‖reference‖ over all parameters, in float64; inf where it is not finite."""
    error = compare(reference, found)["overall"]["overall"].relative_error
    return math.inf if error is None else error
