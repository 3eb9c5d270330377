"""What a point of the long-context benchmark does, in a process of its own.

Each function takes a point (see `benchmarks.long_context`) and returns what JSON can hold.
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
from adjoint.kernels import dispatch
from adjoint.methods import default_chunk_size
from adjoint.train import machine as meter
from adjoint.train.config import TrainingConfig
from adjoint.train.machine import autocast
from adjoint.train.optimizer import make_optimizer

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
WARM_UP = 2048  # tokens of Backprop's first step; `Exact` takes its chunk and its last chunk
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
OPERATIONS = ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm")
Gradient = dict[str, Tensor]


def run(point: dict[str, Any]) -> dict[str, Any]:
    """The point's result, or {"out_of_memory": why}."""
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "roof": matmul_rate,
        "step": training_step,
        "gradient": gradient_check,
        "chunks": chunk_check,
    }
    try:
        return kinds[point["kind"]](point)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": " ".join(str(error).split(". ")[:2])}
    except RuntimeError as error:  # of allocators that have no exception of their own
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        return {"out_of_memory": str(error).splitlines()[0]}


def matmul_rate(point: dict[str, Any]) -> dict[str, Any]:
    """FLOPs a second of a large square matrix product in the run's precision: the fastest of several."""
    device, dtype = torch.device(point["device"]), DTYPES[point["precision"]]
    n = 8192 if device.type == "cuda" else 1024
    x = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(x)
    times: list[float] = []
    torch.mm(x, x, out=out)
    while sum(times) < 0.5 or len(times) < 3:
        synchronize(device)
        began = time.perf_counter()
        torch.mm(x, x, out=out)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return {"matmul_flops": 2 * n**3 / min(times)}


def training_step(point: dict[str, Any]) -> dict[str, Any]:
    """Whole steps of AdamW at `length` tokens: seconds by phase, peak memory in bytes, loss, gradient norm.

    memory_bytes: on a GPU what tensors held at most, weights and optimizer included; on a CPU the peak of the
    resident set above what the libraries took. held_bytes: the same before the step.
    """
    device, length, settings = torch.device(point["device"]), point["length"], TrainingConfig()
    if device.type == "cpu":  # load every library before what they take is taken note of
        tiny = build(point | {"model": point["model"] | {"d_model": 16, "n_layer": 1, "mixer": "mamba"}})
        _step(tiny, make_optimizer(tiny, settings), tokens(point, 8), adjoint.Backprop(), point)
    base = meter.rss_bytes()[0]
    model = build(point)
    optimizer = make_optimizer(model, settings)
    ids = tokens(point, length)
    chunk_size = chunk_size_of(point, model, ids)
    method = make_method(point, chunk_size)
    # Two chunks, as long as the first and as the last, compile whatever the length's chunks will need.
    short = WARM_UP if chunk_size is None else chunk_size + (length % chunk_size or chunk_size)
    for group in optimizer.param_groups:  # the weights stay what they are for every method
        group["lr"] = 0.0
    _step(model, optimizer, ids[:, :short], method, point)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    gc.collect()
    meter.reset_peak_rss()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    else:
        held = meter.rss_bytes()[0] - base
    steps = [_step(model, optimizer, ids, method, point) for _ in range(point["steps"])]
    peak_rss = meter.rss_bytes()[1]
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
    model: adjoint.Stack, optimizer: torch.optim.Optimizer, ids: Tensor, method: Any, point: dict[str, Any]
) -> dict[str, Any]:
    """Forward, backward, then clipping and AdamW; as in `adjoint.train.trainer`, with the device waited
    for in between."""
    device = ids.device
    optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    marks = [time.perf_counter()]
    with autocast(point["precision"], device):
        loss = model(ids, labels=ids, method=method).loss
    synchronize(device)
    marks.append(time.perf_counter())
    loss.backward()
    synchronize(device)
    marks.append(time.perf_counter())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    synchronize(device)
    marks.append(time.perf_counter())
    phases = [after - before for before, after in itertools.pairwise(marks)]
    value, grad_norm = loss.item(), norm.item()
    if not (math.isfinite(value) and math.isfinite(grad_norm)):
        raise FloatingPointError(f"loss {value}, gradient norm {grad_norm}")
    return {
        "seconds": dict(zip(("forward", "backward", "optimizer"), phases, strict=True)),
        "loss": value,
        "grad_norm": grad_norm,
    }


def backends(point: dict[str, Any]) -> dict[str, str]:
    """Whose code runs each operation: plain PyTorch ("reference") would explain a slow step."""
    device, dtype = torch.device(point["device"]), DTYPES[point["precision"]]
    if device.type == "cpu" and dtype == torch.bfloat16:  # widened before, see `adjoint.kernels.dispatch`
        dtype = torch.float32
    return {name: dispatch.implementation(name, None, device, dtype) for name in OPERATIONS}


def gradient_check(point: dict[str, Any]) -> dict[str, Any]:
    """Exact's and Backprop's gradients against Backprop's in float64, of the same parameters.

    For each of the point's precisions: the error, ‖g − g64‖ / ‖g64‖ over all parameters together, of both
    methods, and the largest of a single parameter of `Exact`; `between` is Exact's distance from Backprop.
    """
    model, ids = build(point | {"precision": "float32"}), tokens(point, point["length"])
    exact, backprop = adjoint.Exact(point["chunk_size"], point["keep"]), adjoint.Backprop()
    reference = gradients(model.double(), ids, backprop, "float64")
    errors: dict[str, Any] = {}
    for precision in point["precisions"]:
        model.to(torch.float64 if precision == "float64" else torch.float32)  # exact both ways
        plain = reference if precision == "float64" else gradients(model, ids, backprop, precision)
        ours = gradients(model, ids, exact, precision)
        errors[precision] = {
            "exact": distance(ours, reference),
            "backprop": distance(plain, reference),
            "between": distance(ours, plain),
            "worst_parameter": max(distance({k: ours[k]}, {k: reference[k]}) for k in reference),
        }
        del plain, ours
    return {"errors": errors, "chunk_size": point["chunk_size"], "parameters": model.num_parameters()}


def chunk_check(point: dict[str, Any]) -> dict[str, Any]:
    """Exact's gradient at a long length with two chunk sizes that share no edge: their relative distance."""
    model, ids = build(point), tokens(point, point["length"])
    size = chunk_size_of(point | {"method": "exact"}, model, ids)
    assert size is not None
    size = min(size, point["length"])
    sizes = [size, max(1, size * 5 // 7)]
    first, second = (
        gradients(model, ids, adjoint.Exact(s, point["keep"]), point["precision"]) for s in sizes
    )
    return {"distance": distance(second, first), "chunk_sizes": sizes}


def build(point: dict[str, Any]) -> adjoint.Stack:
    """The model, made on its device; the same parameters for a seed and device."""
    torch.manual_seed(0)
    with torch.device(point["device"]):
        model = adjoint.Stack(adjoint.StackConfig(**point["model"]))
    return model.double() if point["precision"] == "float64" else model


def tokens(point: dict[str, Any], length: int) -> Tensor:
    """(1, length) random token ids, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(adjoint.StackConfig(**point["model"]).vocab_size, (1, length), generator=generator)
    return ids.to(point["device"])


def make_method(point: dict[str, Any], chunk_size: int | None) -> Any:
    """The point's method; its chunk size is known by now."""
    if point["method"] == "exact":
        return adjoint.Exact(chunk_size, point["keep"])
    return adjoint.Backprop(checkpoint=point["method"] == "backprop-checkpoint")


def chunk_size_of(point: dict[str, Any], model: adjoint.Stack, ids: Tensor) -> int | None:
    """Tokens a chunk: the point's, else what `Exact` picks in this precision; None for Backprop."""
    if point["method"] != "exact":
        return None
    with autocast(point["precision"], ids.device):
        return point["chunk_size"] or default_chunk_size(model, ids)


def gradients(model: adjoint.Stack, ids: Tensor, method: Any, precision: str) -> Gradient:
    """Every parameter's gradient by name; the model is left without any."""
    with autocast(precision, ids.device):
        loss = model(ids, labels=ids, method=method).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def distance(a: Gradient, b: Gradient) -> float:
    """‖a − b‖ / ‖b‖ over all of b's parameters, in float64."""
    if a.keys() != b.keys():
        raise ValueError(f"gradients of different parameters: {sorted(a.keys() ^ b.keys())}")
    apart = sum(float((a[k].double() - b[k].double()).square().sum()) for k in b)
    return math.sqrt(apart / sum(float(b[k].double().square().sum()) for k in b))


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
