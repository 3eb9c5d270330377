"""Whole training steps at long context (forward, backward, clipping, AdamW), on one GPU or tiny on a CPU."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import adjoint
from adjoint import memory
from adjoint.engine.verification import TOKENS
from adjoint.tools.measure import process
from adjoint.tools.measure.passes import synchronize
from adjoint.tools.measure.process import Point
from adjoint.train.config import TrainingConfig
from adjoint.train.machine import autocast
from adjoint.train.optimizer import make_optimizer
from benchmarks.gpu import model as models

WARM_UP = 2048  # tokens of Backprop's first step; `Exact` takes its chunk and its last chunk
MARGIN_S = 3  # seconds before its deadline at which a step gives up
SPEAK_S = 5.0  # seconds between two lines on a long step
# A chunk's backward in its forwards, until it has been measured: at least, and usually.
AT_LEAST, USUALLY = 2.0, 3.5
PHASES = ("forward", "backward", "optimizer")


class TooSlow(Exception):
    """A step would not end in time."""


class Watch:
    """Follows a step of `Exact` chunk by chunk, on the first layer, and ends it if it would not end in time.

    The host runs ahead of a GPU by less than a chunk, whose launches are more than its queue holds.

    Args:
        chunks: of the sequence. deadline: of `time.monotonic()`.
        told: is called with what has been found so far, every `SPEAK_S` seconds.

    Attributes:
        found: chunks done forward and backward, seconds per chunk each way, the projected seconds of the
            step.
    """

    def __init__(self, chunks: int, deadline: float, report: Callable[[Point], object]) -> None:
        self.chunks, self.deadline, self.told = chunks, deadline, report
        self.passes, self.began, self.turned, self.spoken = 0, time.monotonic(), 0.0, 0.0
        self.found: Point = {}

    def follow(self, module: nn.Module, inputs: Any) -> None:
        """The first layer's hook: a chunk's forward begins, or its recomputation, and all before are done."""
        if inputs[0].shape[1] <= TOKENS:  # a layer with a hook is compared on first use
            return
        time_now, passes = time.monotonic(), self.passes
        self.passes += 1
        if not passes:
            self.began = time_now
            return
        forward = min(passes, self.chunks)
        backward = max(0, passes - self.chunks + 1)  # the last one was linearised in its forward
        if not backward:
            self.turned = time_now
        each = (self.turned - self.began) / min(passes, self.chunks - 1)
        back = (time_now - self.turned - each) / backward if backward else None
        lowest, projected = (
            self.chunks * (each + (ratio * each if back is None else back)) for ratio in (AT_LEAST, USUALLY)
        )
        self.found = {
            "chunks": self.chunks,
            "chunks_forward": forward,
            "chunks_backward": backward,
            "forward_chunk_s": each,
            "backward_chunk_s": back,
            "projected_s": projected,
        }
        if time_now - self.spoken > SPEAK_S:
            self.spoken = time_now
            position = f"{backward:,} backward" if backward else f"{forward:,} forward"
            so_far = f"chunk {position} of {self.chunks:,}: {time_now - self.began:,.0f} s"
            print(f"    {so_far}, the whole step {projected:,.0f} s", file=sys.stderr, flush=True)
            self.told(self.found)
        few = 3  # whose mean is not yet to be trusted
        if (backward or forward) > few and self.began + lowest > self.deadline:
            budget = self.deadline - self.began
            raise TooSlow(f"it would take {lowest:,.0f} s, of {budget:,.0f} s that there were")


def step(point: Point) -> Point:
    """A step by a method, on a GPU under a cap on the memory that PyTorch may take.

    memory_bytes: on a GPU what tensors held at most, weights and optimizer included; on a CPU the peak of the
    resident set. held_bytes: on a GPU the same before the step. One of `Exact` that would not end in time is
    stopped: {"stopped": why}, with what was found until then.
    """
    device, length, settings = torch.device(point["device"]), point["length"], TrainingConfig()
    cuda = device.type == "cuda"
    if cuda and point["cap_bytes"]:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, point["cap_bytes"] / total), device)
    model, ids, chunk_size = models.prepared(point)
    optimizer = make_optimizer(model, settings)
    exact = point["method"] == "exact"
    method: Any = (
        adjoint.Exact(chunk_size) if exact else adjoint.Backprop(checkpoint=point["method"] != "backprop")
    )
    # Two chunks, as long as the first and as the last, compile whatever the length's chunks will need.
    short = chunk_size + (length % chunk_size or chunk_size) if exact else WARM_UP
    for group in optimizer.param_groups:  # the weights stay what they are
        group["lr"] = 0.0
    _step(model, optimizer, ids[:, :short], method, point)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    gc.collect()
    memory.reset_peak_rss()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device) if cuda else None

    def peak() -> Point:
        reserved = torch.cuda.max_memory_reserved(device) if cuda else None
        return {"memory_bytes": memory.peak_memory_bytes(device), "reserved_bytes": reserved}

    deadline = process.deadline() - MARGIN_S
    watch = Watch(
        math.ceil(length / chunk_size),
        deadline,
        lambda measurement: process.report({**measurement, **peak()}),
    )
    if exact:
        model.layers[0].register_forward_pre_hook(watch.follow)
    try:
        measurement = _step(model, optimizer, ids, method, point)
    except TooSlow as error:
        return {"stopped": str(error), **watch.found, **peak()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    finite = all(g is not None and bool(torch.isfinite(g).all()) for g in gradients.values())
    none = [name for name, g in gradients.items() if g is None or not bool(g.any())]
    total_seconds = sum(measurement[f"{phase}_s"] for phase in PHASES)
    return {
        **watch.found,
        **measurement,
        **peak(),
        "chunk_size": chunk_size if exact else None,
        "parameters": model.num_parameters(),
        "held_bytes": allocated,
        "host_bytes": memory.rss_bytes()[1],
        "cap_bytes": point["cap_bytes"],
        "step_s": total_seconds,
        "tokens_per_second": length / total_seconds,
        "chance_loss": math.log(model.config.vocab_size),
        "finite": finite,
        "without_gradient": ", ".join(none),
        "passed": finite and not none,
    }


def _step(
    model: adjoint.Stack, optimizer: torch.optim.Optimizer, ids: Tensor, method: Any, point: Point
) -> Point:
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
    value, grad_norm = loss.item(), norm.item()
    if not (math.isfinite(value) and math.isfinite(grad_norm)):
        raise FloatingPointError(f"loss {value}, gradient norm {grad_norm}")
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    named = {f"{phase}_s": s for phase, s in zip(PHASES, seconds, strict=True)}
    return {**named, "loss": value, "grad_norm": grad_norm}
