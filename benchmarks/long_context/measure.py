"""What a point of the long-context benchmark does, in a process of its own.

Each function takes a point (see `command.grid`) and returns what JSON can hold.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import memory
from adjoint.engine.chunk_size import default_chunk_size
from adjoint.kernels import dispatch
from adjoint.tools.sweep.compare import Gradients, compare, gradient
from adjoint.train.config import TrainingConfig
from adjoint.train.machine import autocast
from adjoint.train.optimizer import make_optimizer
from benchmarks.common import Point
from benchmarks.timing import matmul_flops, synchronize

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
WARM_UP = 2048  # tokens of Backprop's first step; `Exact` takes its chunk and its last chunk
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
OPERATIONS = ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm")


def measure(point: Point) -> dict[str, Any]:
    """The point's result, or {"out_of_memory": why}."""
    kinds: dict[str, Callable[[Point], dict[str, Any]]] = {
        "roof": matmul_rate,
        "step": training_step,
        "gradient": gradient_check,
        "chunks": chunk_check,
    }
    try:
        return kinds[point["kind"]](point)
    except RuntimeError as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        return {"out_of_memory": reason}


def out_of_memory(error: Exception) -> str | None:
    """One line, if that is what the error says; some allocators have no exception of their own for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return " ".join(str(error).split(". ")[:2])
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return str(error).splitlines()[0] if told else None


def matmul_rate(point: Point) -> dict[str, Any]:
    """FLOPs a second of a large square matrix product in the run's precision."""
    return {"matmul_flops": matmul_flops(point["device"], DTYPES[point["precision"]])}


def training_step(
    point: Point, begin: Callable[[adjoint.Stack], object] = lambda model: None
) -> dict[str, Any]:
    """Whole steps of AdamW at `length` tokens: seconds by phase, peak memory in bytes, loss, gradient norm.

    memory_bytes: on a GPU what tensors held at most, weights and optimizer included; on a CPU the peak of the
    resident set above what the libraries took. held_bytes: the same before the step. `begin` is called with
    the model before the steps that count.
    """
    device, length, settings = torch.device(point["device"]), point["length"], TrainingConfig()
    if device.type == "cpu":  # load every library before what they take is taken note of
        tiny = build(point | {"model": point["model"] | {"d_model": 16, "n_layer": 1, "mixer": "mamba"}})
        _step(tiny, make_optimizer(tiny, settings), tokens(point, 8), adjoint.Backprop(), point)
    base = memory.rss_bytes()[0]
    model = build(point)
    optimizer = make_optimizer(model, settings)
    ids = tokens(point, length)
    chunk_size: int | None = None
    method: Any = adjoint.Backprop(checkpoint=point["method"] == "backprop-checkpoint")
    if point["method"] == "exact":
        chunk_size = chunk_size_of(point, model, ids)
        method = adjoint.Exact(chunk_size, point["keep"])
    # Two chunks, as long as the first and as the last, compile whatever the length's chunks will need.
    short = WARM_UP if chunk_size is None else chunk_size + (length % chunk_size or chunk_size)
    for group in optimizer.param_groups:  # the weights stay what they are for every method
        group["lr"] = 0.0
    _step(model, optimizer, ids[:, :short], method, point)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    gc.collect()
    memory.reset_peak_rss()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    else:
        held = memory.rss_bytes()[0] - base
    begin(model)
    steps = [_step(model, optimizer, ids, method, point) for _ in range(point["steps"])]
    peak_rss = memory.rss_bytes()[1]
    result = {
        "seconds": [s["seconds"] for s in steps],
        "loss": steps[0]["loss"],
        "grad_norm": steps[0]["grad_norm"],
        "chunk_size": chunk_size,
        "parameters": model.num_parameters(),
        "backends": backends(point),
        "held_bytes": held,
        "memory_bytes": peak_rss - base,
        "host_bytes": peak_rss,
    }
    if device.type == "cuda":
        result["memory_bytes"] = torch.cuda.max_memory_allocated(device)
        result["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return result


def _step(
    model: adjoint.Stack, optimizer: torch.optim.Optimizer, ids: Tensor, method: Any, point: Point
) -> dict[str, Any]:
    """Forward, backward, then clipping and AdamW; as in `adjoint.train.trainer`, with the device waited
    for in between."""
    device, marks = ids.device, list[float]()

    def mark() -> None:
        synchronize(device)
        marks.append(time.perf_counter())

    optimizer.zero_grad(set_to_none=True)
    mark()
    with autocast(point["precision"], device):
        loss = model(ids, labels=ids, method=method).loss
    mark()
    loss.backward()
    mark()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mark()
    phases = [after - before for before, after in itertools.pairwise(marks)]
    value, grad_norm = loss.item(), norm.item()
    if not (math.isfinite(value) and math.isfinite(grad_norm)):
        raise FloatingPointError(f"loss {value}, gradient norm {grad_norm}")
    return {
        "seconds": dict(zip(("forward", "backward", "optimizer"), phases, strict=True)),
        "loss": value,
        "grad_norm": grad_norm,
    }


def backends(point: Point) -> dict[str, str]:
    """Whose code runs each operation: plain PyTorch ("reference") would explain a slow step."""
    device, dtype = torch.device(point["device"]), DTYPES[point["precision"]]
    if device.type == "cpu" and dtype == torch.bfloat16:  # widened before, see `adjoint.kernels.dispatch`
        dtype = torch.float32
    return {name: dispatch.implementation(name, None, device, dtype) for name in OPERATIONS}


def gradient_check(point: Point) -> dict[str, Any]:
    """Exact's and Backprop's gradients against Backprop's in float64, of the same parameters.

    For each of the point's precisions: the error, ‖g − g64‖ / ‖g64‖ over all parameters together, of both
    methods, and the largest of a single parameter of `Exact`; `between` is Exact's distance from Backprop.
    """
    model, ids = build(point | {"precision": "float32"}), tokens(point, point["length"])
    exact, backprop = adjoint.Exact(point["chunk_size"], point["keep"]), adjoint.Backprop()
    reference, _ = gradient(model.double(), ids, backprop, "float64")
    errors: dict[str, Any] = {}
    for precision in point["precisions"]:
        model.to(torch.float64 if precision == "float64" else torch.float32)  # exact both ways
        plain = reference if precision == "float64" else gradient(model, ids, backprop, precision)[0]
        ours, _ = gradient(model, ids, exact, precision)
        errors[precision] = {
            "exact": distance(ours, reference),
            "backprop": distance(plain, reference),
            "between": distance(ours, plain),
            "worst_parameter": max(distance({k: ours[k]}, {k: reference[k]}) for k in reference),
        }
        del plain, ours
    return {"errors": errors, "chunk_size": point["chunk_size"], "parameters": model.num_parameters()}


def chunk_check(point: Point) -> dict[str, Any]:
    """Exact's gradient at a long length with two chunk sizes that share no edge: their relative distance."""
    model, ids = build(point), tokens(point, point["length"])
    size = min(chunk_size_of(point, model, ids), point["length"])
    other = max(1, size * 5 // 7)
    while math.gcd(size, other) > 1:  # else every multiple of both would be an edge of both
        other -= 1
    sizes = [size, other]
    methods = [adjoint.Exact(size, point["keep"]) for size in sizes]
    first, second = (gradient(model, ids, method, point["precision"])[0] for method in methods)
    return {"distance": distance(second, first), "chunk_sizes": sizes}


def distance(found: Gradients, reference: Gradients) -> float:
    """‖found − reference‖ / ‖reference‖ over all parameters, in float64; inf where it is not finite."""
    error = compare(reference, found)["overall"]["overall"].relative_error
    return math.inf if error is None else error


def build(point: Point) -> adjoint.Stack:
    """The model, made on its device; the same parameters for a seed and device."""
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
    """Tokens a chunk of `Exact`: the point's, else what it picks in this precision."""
    with autocast(point["precision"], ids.device):
        return point["chunk_size"] or default_chunk_size(model, ids)
