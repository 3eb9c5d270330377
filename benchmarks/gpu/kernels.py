"""Kernels on one GPU: the values of those that training runs.

No operation may fall back to plain PyTorch here: `required` raises where a user would be warned.
"""

from __future__ import annotations

import functools
import time
import warnings

import torch

from adjoint.kernels import dispatch, trial
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.operation import registered
from adjoint.tools.measure.process import Point
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.measure import LIMITS, checked
from benchmarks.kernels.operations import OPS, answer

WIDENED = ("linear_scan", "dense_scan")  # their inputs are float32 at least, whatever the model's


def fast_backend(device: str) -> str:
    """Return the backend that should run on a device: Triton on a GPU, compiled C++ on a CPU if possible."""
    if device.startswith("cuda"):
        return "triton"
    return "cpu" if "cpu" in dispatch.backends() else "reference"


def required(operation: str, device: str, dtype: torch.dtype) -> str:
    """The backend that runs an operation where none is asked for, as it must be the fast one or a library.

    Raises:
        RuntimeError: it is another one; with what a user is warned of.
    """
    torch_device = torch.device(device)
    expected = dispatch.implementation(operation, fast_backend(device), torch_device, dtype)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = dispatch.implementation(operation, None, torch_device, dtype)
    if code not in (expected, *LIBRARIES):
        said = "; ".join(str(warning.message) for warning in warned) or "this process was warned of it before"
        raise RuntimeError(f"{operation} in {dtype} fell back from {expected} to {code}: {said}")
    return code


def operation_of(op: str) -> str | None:
    """The operation of `adjoint.kernels` behind one of the kernel benchmark's, if it has backends."""
    if op.startswith("linear_scan"):
        return "dense_scan" if op.endswith("dense") else "linear_scan"
    return {"add_rms_norm": "rms_norm", "head_loss": None, "past_attention": None}.get(op, op)


def runs_in(operation: str | None, dtype: str) -> bool:
    """Whether training runs an operation in this dtype."""
    return operation not in WIDENED or dtype in ("float32", "float64")


def tried(point: Point) -> Point:
    """The errors of an operation's trial, with windows and resets where it has them, then whose code runs it.
    The fast backend is asked for by name: of one that has failed its trial this says where it is off."""
    operation, device, dtype = point["operation"], point["device"], getattr(torch, point["dtype"])
    record = registered(operation)
    code = dispatch.choose(operation, fast_backend(device), torch.device(device), dtype)
    kinds = {"": {}, ", window": {"windowed": True}, ", resets": {"resets": True}}
    if not record.takes_windows:
        del kinds[", window"]
    if not record.takes_documents:
        del kinds[", resets"]
    began, errors = time.perf_counter(), dict[str, float]()
    for kind, options in kinds.items():
        deviations = trial.errors(code, operation, torch.device(device), dtype, **options)
        errors |= {f"{name}{kind}": error for name, error in deviations.items()}
    result = _worst(errors, trial.TOLERANCE[dtype]) | {"trial_s": time.perf_counter() - began}
    return result | ({"backend": required(operation, device, dtype)} if result["passed"] else {})


def values(point: Point) -> Point:
    """Outputs and gradients of an operation at a layer's size against float64 in plain PyTorch, of the same
    rounded inputs; the fast backend by name, as in `tried`."""
    op, contender = OPS[point["op"]], CONTENDERS[point["op"]]["adjoint"]
    dtype = getattr(torch, point["dtype"])
    function = op.ours
    if operation_of(point["op"]) is not None:
        function = functools.partial(op.ours, backend=fast_backend(point["device"]))
    want = answer(op, point["size"], point["device"], dtype)
    return _worst(checked(point, contender, function, want), LIMITS[point["dtype"]])


def _worst(errors: dict[str, float], limit: float) -> Point:
    worst = max(errors, key=errors.__getitem__)
    return {"worst": worst, "worst_error": errors[worst], "limit": limit, "passed": errors[worst] <= limit,
            "errors": errors}  # fmt: skip
