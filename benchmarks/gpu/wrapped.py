"""A step of a hybrid of transformers: wrapped, or with checkpointing and other libraries' kernels."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from adjoint.tools.measure.passes import Passes, typical
from adjoint.tools.measure.process import Point
from benchmarks import steps
from benchmarks.gpu.kernels import required
from benchmarks.gpu.points import SIMULATED

REPEAT_S = 6.0  # how long steps are repeated,
LEAST = 3  # and how many there are at least, unless they take more than five times as long
LONGEST_PLAIN = 1 << 15  # tokens of a hybrid whose library is missing: PyTorch's code is slow, or large
HUB = "transformers.integrations.hub_kernels"  # that says where it has no kernel
# What transformers calls in training where it is installed: package, module, function. The first of a model
# is its scan.
LIBRARIES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "BambaForCausalLM": (
        ("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
        ("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
    ),
    "Qwen3_5ForCausalLM": (
        ("flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        ("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"),
    ),
    "LlamaForCausalLM": (),
}
# Operations of this package that stand in for them in a wrapped model; or of a `Stack`, by its mixer.
OPERATIONS = {
    "BambaForCausalLM": ("ssd_scan", "causal_conv1d"),
    "Qwen3_5ForCausalLM": ("gated_delta_rule", "causal_conv1d"),
    "LlamaForCausalLM": (),
    "mamba": ("selective_scan", "causal_conv1d", "rms_norm"),
}


class Complaints(logging.Handler):
    """Collector of what transformers says of functions that run in plain PyTorch for lack of a package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "reference PyTorch implementation" in message:
            self.messages.append(message.replace("_", "-"))  # some packages by the name that Python imports

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collect inside the context, whatever the verbosity of transformers is."""
        logger = logging.getLogger(HUB)
        level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(self)


def lacking(model: Point) -> dict[str, str]:
    """Return the packages whose kernels a model of transformers cannot call here, each with the reason."""
    reasons = {}
    for package, module, function in LIBRARIES[model["class"]]:
        try:
            getattr(importlib.import_module(module), function)
        except Exception as error:  # compiled modules fail in many ways against another torch
            absent = importlib.util.find_spec(module.partition(".")[0]) is None
            said = " ".join(str(error).split())[:200]
            reasons[package] = "not installed" if absent else f"import {module} fails ({said})"
    return reasons


def kernels_of(point: Point) -> Point:
    """Return whose `kernels` run, and the packages that are `lacking`; or what is `missing`, without which so
    many tokens are too many.

    Raises:
        RuntimeError: plain PyTorch would run one of our operations in the wrapped model.
    """
    is_stack = "class" not in point["model"]
    kind = point["model"]["mixer" if is_stack else "class"]
    if is_stack or "method" in point["way"]:
        dtype = getattr(torch, point.get("autocast") or point["dtype"])
        backends = {op: required(op, point["device"], dtype) for op in OPERATIONS[kind]}
        return {"kernels": ", ".join(f"{op}: {backend}" for op, backend in backends.items())}
    packages, reasons = [package for package, _, _ in LIBRARIES[kind]], lacking(point["model"])
    absent = "; ".join(f"{package}: {reason}" for package, reason in reasons.items())
    if packages and packages[0] in reasons and point["length"] > LONGEST_PLAIN:
        return {
            "missing": f"{absent}; the PyTorch code of transformers runs to {LONGEST_PLAIN:,} tokens only"
        }
    kernels = ", ".join(package for package in packages if package not in reasons) or "PyTorch"
    return {"kernels": kernels} | ({"lacking": absent} if reasons else {})


def wrapped(point: Point) -> Point:
    """Measure a step, forward and backward: seconds, bytes at the peak, loss and norm of the gradient, and on
    a GPU what it does in a step.

    Raises:
        RuntimeError: a package imports and transformers does not use it, or one of our operations runs in
            plain PyTorch.
    """
    if importlib.util.find_spec("transformers") is None:
        return {"missing": "transformers is not installed"}
    if point["device"] == SIMULATED:
        from benchmarks.gpu import simulated

        return simulated.measure(point)
    used = kernels_of(point)
    if "missing" in used:
        return used
    complaints = Complaints()
    with complaints.listening():
        measurement = steps.measure(
            {**point, "above": "imports", "repeat_s": REPEAT_S, "least": LEAST}, work_of_the_gpu
        )
    is_plain = "class" in point["model"] and "method" not in point["way"]
    for package in used["kernels"].split(", ") if is_plain else ():
        if any(f"`{package}`" in message for message in complaints.messages):
            raise RuntimeError(f"{package} imports, but transformers does not call its kernels")
    seconds = measurement["seconds"]
    step_s = typical(seconds)
    rates = {"step_s": step_s, "steps": len(seconds), "tokens_per_second": point["length"] / step_s}
    return used | measurement | rates


def work_of_the_gpu(passes: Passes, ids: torch.Tensor) -> Point:
    """Return the seconds that a GPU computes in a step, and its operations: kernels, copies and fills.

    A step that takes much longer than the GPU computes waits for the host, which queues each operation on its
    own and takes the same time for a chunk of any length.
    """
    if not ids.is_cuda:
        return {}
    passes.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        passes.loss(ids).backward()
        torch.cuda.synchronize()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    # PyTorch's own summary makes an object of each of several ten thousand events
    events = record.profiler.kineto_results.events()
    nanoseconds = [event.duration_ns() for event in events if "CUDA" in str(event.device_type())]
    return {"gpu_s": sum(nanoseconds) / 1e9, "operations": len(nanoseconds)}
