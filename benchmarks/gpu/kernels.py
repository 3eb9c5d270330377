"""Kernels on one GPU: values of those that training runs, and times beside other libraries'.

No operation may fall back to plain PyTorch here: `required` raises where a user would be warned.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.kernels import dispatch
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.rms_norm import rms_norm
from adjoint.loss import linear_cross_entropy
from adjoint.tools.points.process import Point
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.measure import LIMITS, time_contender
from benchmarks.kernels.operations import EPS, OPS, Normal, Op, Size, Tensors, draw

WIDENED = ("linear_scan", "dense_scan")  # their inputs are float32 at least, whatever the model's
REPEAT_S = 0.2  # how long a pass is repeated


def fast_backend(device: str) -> str:
    """Whose code is to run on a device: Triton's on a GPU, on a CPU the compiled one where there is a
    compiler."""
    if device.startswith("cuda"):
        return "triton"
    return "cpu" if "cpu" in dispatch.backends() else "reference"


def required(operation: str, device: str, dtype: torch.dtype) -> str:
    """The backend that runs an operation where none is asked for, as it must be the fast one or a library.

    Raises:
        RuntimeError: it is another one; with what a user is warned of.
    """
    where = torch.device(device)
    expected = dispatch.implementation(operation, fast_backend(device), where, dtype)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = dispatch.implementation(operation, None, where, dtype)
    if found not in (expected, *LIBRARIES):
        said = "; ".join(str(warning.message) for warning in told) or "this process was warned of it before"
        raise RuntimeError(f"{operation} in {dtype} fell back from {expected} to {found}: {said}")
    return found


# ----------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Case:
    """A kernel as a layer calls it on a chunk: no resets, sizes that 16 divides, a state handed in and one
    handed on, inputs that are slices of a projection's output.

    Attributes:
        name: of the kernel benchmark's operation whose inputs are drawn.
        call: gives the outputs, of the inputs and `backend` by name.
        large, small: numbers of its sizes, on a GPU and on a CPU.
        outputs: their names.
        slices: inputs that are slices of wider tensors.
        state: of an initial state, the names of its dimensions.
        float32: inputs that stay float32, besides the operation's own.
    """

    name: str
    call: Callable[..., Any]
    large: tuple[int, ...]
    small: tuple[int, ...]
    outputs: tuple[str, ...] = ("y",)
    slices: tuple[str, ...] = ()
    state: str = ""
    float32: tuple[str, ...] = ()

    @property
    def operation(self) -> str | None:
        """Of `adjoint.kernels`; None: it has no kernels."""
        return operation_of(self.name)

    def size(self, device: str) -> Size:
        """The sizes by name."""
        numbers = self.large if device.startswith("cuda") else self.small
        return dict(zip(OPS[self.name].sizes["cpu"]["small"], numbers, strict=True))

    def op(self) -> Op:
        """The operation with the inputs that a layer adds: an initial state, a gate."""
        op = OPS[self.name]

        def inputs(size: Size, normal: Normal) -> Tensors:
            drawn = op.inputs(size, normal)
            if self.state:
                widths = size | {"taps before": size.get("d_conv", 0) - 1}
                drawn["initial_state"] = normal(*(widths[name] for name in self.state.split(", ")))
            if "gate" in self.slices:
                drawn["gate"] = normal(size["tokens"], size["d_model"])
            return drawn

        return replace(op, inputs=inputs, float32=(*op.float32, *self.float32))


def operation_of(name: str) -> str | None:
    """The operation of `adjoint.kernels` behind one of the kernel benchmark's; the head's loss has none."""
    if name.startswith("linear_scan"):
        return "linear_scan"
    return {"add_rms_norm": "rms_norm", "head_loss": None}.get(name, name)


def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, backend: str | None) -> Tensor:
    return rms_norm(x, weight, EPS, gate, backend=backend)


def _head(hidden: Tensor, weight: Tensor, targets: Tensor, backend: str | None) -> Tensor:
    """The loss by slices; of float64, whose answer is wanted, by PyTorch's own function."""
    if backend != "reference":
        return linear_cross_entropy(hidden, weight, targets)
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")


_SCANNED, _WIDE = ("y", "final_state"), ("initial_state",)
_selective = functools.partial(adjoint.selective_scan, delta_softplus=True)
_ssd = functools.partial(adjoint.ssd_scan, dt_softplus=True)
_norm = functools.partial(rms_norm, eps=EPS)
_S6 = Case("selective_scan", _selective, (1, 1792, 4096, 16), (1, 96, 32, 16), _SCANNED, ("B", "C", "z"),
           "batch, d_inner, d_state", _WIDE)  # fmt: skip
_SSD = Case("ssd_scan", _ssd, (1, 1792, 16, 64, 128), (1, 96, 2, 16, 16), _SCANNED, ("x", "dt", "B", "C"),
            "batch, nheads, headdim, d_state", _WIDE)  # fmt: skip
_CONV = Case("causal_conv1d", functools.partial(causal_conv1d, silu=True), (1, 4, 1792, 4096), (1, 4, 96, 32),
             _SCANNED, ("x",), "batch, channels, taps before")  # fmt: skip
_RMS = Case("rms_norm", _norm, (1792, 2048), (64, 32))
_LINEAR = Case("linear_scan_diagonal", adjoint.linear_scan, (1, 1792, 4096), (1, 96, 32),
               state="batch, d_state")  # fmt: skip
_WINDOW = {"window": 512}
CASES = {
    "selective scan": _S6,
    "SSD scan": _SSD,
    "causal conv1d": _CONV,
    "RMSNorm": _RMS,
    "residual sum + RMSNorm": replace(_RMS, name="add_rms_norm", outputs=("y", "sum"), float32=("residual",)),
    "gated RMSNorm": replace(_RMS, call=_gated_norm, slices=("gate",)),
    "head loss": Case("head_loss", _head, (1792, 2048, 50280), (64, 32, 64), ("loss",)),
    "selective scan, 65,536 tokens": replace(_S6, large=(1, 65536, 512, 16), small=(1, 512, 16, 16)),
    "SSD scan, 65,536 tokens": replace(_SSD, large=(1, 65536, 4, 64, 128), small=(1, 512, 2, 16, 16)),
    "selective scan, window 512": replace(
        _S6, large=(1, 1792, 512, 16), small=(1, 768, 8, 8), call=functools.partial(_selective, **_WINDOW)
    ),
    "SSD scan, window 512": replace(
        _SSD, large=(1, 1792, 4, 64, 128), small=(1, 768, 2, 8, 8), call=functools.partial(_ssd, **_WINDOW)
    ),
    "linear scan, diagonal": _LINEAR,
    "linear scan, scalar": replace(_LINEAR, name="linear_scan_scalar"),
}


def dtypes_of(operation: str | None, dtypes: tuple[str, ...]) -> list[str]:
    """Those of `dtypes` in which an operation is run."""
    return [dtype for dtype in dtypes if operation not in WIDENED or dtype in ("float32", "float64")]


def values(point: Point) -> Point:
    """Outputs and gradients of a case against float64 in plain PyTorch, of the same rounded inputs: ‖error‖ /
    ‖value‖ of each, and the largest beside what it may be. The fast backend is asked for by name: of one that
    has failed its trial this says where it is off."""
    case, dtype = CASES[point["case"]], getattr(torch, point["dtype"])
    inputs, _ = draw(case.op(), case.size(point["device"]), point["device"], dtype)
    began = time.perf_counter()
    found = {
        name: x.double().cpu() for name, x in _results(case, fast_backend(point["device"]), inputs).items()
    }
    first = time.perf_counter() - began
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    wanted = {name: x.cpu() for name, x in _results(case, "reference", exact).items()}
    errors = {name: _relative(found[name], wanted[name]) for name in wanted}
    worst = max(errors, key=errors.__getitem__)
    limit = LIMITS[point["dtype"]]
    return {
        "errors": errors,
        "worst": worst,
        "worst_error": errors[worst],
        "limit": limit,
        "passed": errors[worst] <= limit,
        "first_s": first,
    }


def _results(case: Case, backend: str | None, inputs: Tensors) -> Tensors:
    """Outputs, and by "d" and its name the gradient of each input, for the same random cotangents always."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    given = {name: _sliced(x) if name in case.slices else x for name, x in leaves.items()}
    made = case.call(**given, backend=backend)
    made = made if isinstance(made, tuple) else (made,)
    generator = torch.Generator(made[0].device).manual_seed(1)
    # through bfloat16, so that every dtype holds them
    cotangents = [
        torch.randn(y.shape, generator=generator, device=y.device).bfloat16().to(y.dtype) for y in made
    ]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(made, list(wanted.values()), cotangents)
    outputs = dict(zip(case.outputs, (y.detach() for y in made), strict=True))
    return outputs | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


def _sliced(x: Tensor) -> Tensor:
    """x as a slice of a tensor twice as wide, as a projection's output is cut into a layer's inputs."""
    return torch.cat([x, torch.zeros_like(x)], dim=-1)[..., : x.shape[-1]]


def _relative(found: Tensor, wanted: Tensor) -> float:
    error = float((found - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf


# ------------------------------------------------------------------------------------------------------ times


def times(point: Point) -> Point:
    """Milliseconds of an operation by one contender, medians: forward as when nothing follows it, and forward
    and backward of a training step; and the most memory that they took besides the inputs. Values are not
    compared: ours are in `values`, others' in `benchmarks.kernels`."""
    device, op = point["device"], point["op"]
    contender, operation = CONTENDERS[op][point["contender"]], operation_of(op)
    absent = contender.missing()
    if absent:
        return {"missing": f"{absent} is not installed"}
    if device.partition(":")[0] not in contender.devices:
        return {"missing": "it takes CUDA tensors only"}
    backend = None
    if contender.ours and operation is not None:
        required(operation, device, getattr(torch, point["dtype"]))
        # our own kernels by name: where a library is installed, it would be timed in their place
        backend = fast_backend(device)
    taken = time_contender({**point, "file": None, "repeat_s": REPEAT_S, "backend": backend})
    medians = {f"{name}_ms": 1e3 * statistics.median(taken[name]) for name in ("forward", "backward", "both")}
    return {**medians, "runs": len(taken["both"]), "peak_bytes": taken["peak_bytes"]}
