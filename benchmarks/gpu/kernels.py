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
from adjoint.memory import PeakMemory
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.measure import LIMITS
from benchmarks.kernels.operations import EPS, OPS, Normal, Op, Size, Tensors, draw
from benchmarks.process import Point
from benchmarks.timing import phases

# The operation of `adjoint.kernels` behind each of the kernel benchmark's; the head's loss has none.
OPERATION = {
    "selective_scan": "selective_scan",
    "ssd_scan": "ssd_scan",
    "causal_conv1d": "causal_conv1d",
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "head_loss": None,
}
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
        op: whose inputs are drawn.
        operation: of `adjoint.kernels`; None: it has no kernels.
        sizes: on "cuda" and, tiny, on "cpu".
        call: gives the outputs, of the inputs and `backend` by name.
        outputs: their names.
        slices: inputs that are slices of wider tensors.
    """

    op: Op
    operation: str | None
    sizes: dict[str, Size]
    call: Callable[..., Any]
    outputs: tuple[str, ...] = ("y",)
    slices: tuple[str, ...] = ()


def _op(name: str, wide: tuple[str, ...] = (), **more: Callable[[Size, Normal], Tensor]) -> Op:
    """An operation of the kernel benchmark with more inputs; those of `wide` stay float32."""
    op = OPS[name]

    def inputs(size: Size, normal: Normal) -> Tensors:
        return op.inputs(size, normal) | {key: drawn(size, normal) for key, drawn in more.items()}

    return replace(op, inputs=inputs, wide=(*op.wide, *wide))


def _sized(names: str, large: tuple[int, ...], small: tuple[int, ...]) -> dict[str, Size]:
    return {kind: dict(zip(names.split(), n, strict=True)) for kind, n in (("cuda", large), ("cpu", small))}


def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, backend: str | None) -> Tensor:
    return rms_norm(x, weight, EPS, gate, backend=backend)


def _head(hidden: Tensor, weight: Tensor, targets: Tensor, backend: str | None) -> Tensor:
    """The loss by slices; of float64, whose answer is wanted, by PyTorch's own function."""
    if backend != "reference":
        return linear_cross_entropy(hidden, weight, targets)
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")


_STATE: dict[str, Callable[[Size, Normal], Tensor]] = {
    "selective_scan": lambda s, normal: normal(s["batch"], s["d_inner"], s["d_state"]),
    "ssd_scan": lambda s, normal: normal(s["batch"], s["nheads"], s["headdim"], s["d_state"]),
    "causal_conv1d": lambda s, normal: normal(s["batch"], s["channels"], s["d_conv"] - 1),
    "linear_scan": lambda s, normal: normal(s["batch"], s["d_state"]),
}


def _selective(large: tuple[int, ...], small: tuple[int, ...], window: int | None = None) -> Case:
    return Case(
        _op("selective_scan", ("initial_state",), initial_state=_STATE["selective_scan"]),
        "selective_scan",
        _sized("batch seqlen d_inner d_state", large, small),
        call=functools.partial(adjoint.selective_scan, delta_softplus=True, window=window),
        outputs=("y", "final_state"),
        slices=("B", "C", "z"),
    )


def _ssd(large: tuple[int, ...], small: tuple[int, ...], window: int | None = None) -> Case:
    return Case(
        _op("ssd_scan", ("initial_state",), initial_state=_STATE["ssd_scan"]),
        "ssd_scan",
        _sized("batch seqlen nheads headdim d_state", large, small),
        call=functools.partial(adjoint.ssd_scan, dt_softplus=True, window=window),
        outputs=("y", "final_state"),
        slices=("x", "dt", "B", "C"),
    )


def _linear(kind: str) -> Case:
    return Case(
        _op(f"linear_scan_{kind}", initial_state=_STATE["linear_scan"]),
        "linear_scan",
        _sized("batch seqlen d_state", (1, 1792, 4096), (1, 96, 32)),
        call=adjoint.linear_scan,
    )


_NORM = _sized("tokens d_model", (1792, 2048), (64, 32))
CASES = {
    "selective scan": _selective((1, 1792, 4096, 16), (1, 96, 32, 16)),
    "SSD scan": _ssd((1, 1792, 16, 64, 128), (1, 96, 2, 16, 16)),
    "causal conv1d": Case(
        _op("causal_conv1d", ("initial_state",), initial_state=_STATE["causal_conv1d"]),
        "causal_conv1d",
        _sized("batch d_conv seqlen channels", (1, 4, 1792, 4096), (1, 4, 96, 32)),
        call=functools.partial(causal_conv1d, silu=True),
        outputs=("y", "final_state"),
        slices=("x",),
    ),
    "RMSNorm": Case(_op("rms_norm"), "rms_norm", _NORM, call=functools.partial(rms_norm, eps=EPS)),
    "residual sum + RMSNorm": Case(
        _op("add_rms_norm", ("residual",)),
        "rms_norm",
        _NORM,
        call=functools.partial(rms_norm, eps=EPS),
        outputs=("y", "sum"),
    ),
    "gated RMSNorm": Case(
        _op("rms_norm", gate=lambda s, normal: normal(s["tokens"], s["d_model"])),
        "rms_norm",
        _NORM,
        call=_gated_norm,
        slices=("gate",),
    ),
    "head loss": Case(
        _op("head_loss"),
        None,
        _sized("tokens d_model vocab_size", (1792, 2048, 50280), (64, 32, 64)),
        call=_head,
        outputs=("loss",),
    ),
    "selective scan, 65,536 tokens": _selective((1, 65536, 512, 16), (1, 512, 16, 16)),
    "SSD scan, 65,536 tokens": _ssd((1, 65536, 4, 64, 128), (1, 512, 2, 16, 16)),
    "selective scan, window 512": _selective((1, 1792, 512, 16), (1, 768, 8, 8), window=512),
    "SSD scan, window 512": _ssd((1, 1792, 4, 64, 128), (1, 768, 2, 8, 8), window=512),
    "linear scan, diagonal": _linear("diagonal"),
    "linear scan, scalar": _linear("scalar"),
}


def dtypes_of(operation: str | None, dtypes: tuple[str, ...]) -> list[str]:
    """Those of `dtypes` in which an operation is run."""
    return [dtype for dtype in dtypes if operation not in WIDENED or dtype in ("float32", "float64")]


def values(point: Point) -> Point:
    """Outputs and gradients of a case against float64 in plain PyTorch, of the same rounded inputs: ‖error‖ /
    ‖value‖ of each, and the largest beside what it may be. The fast backend is asked for by name: of one that
    has failed its trial this says where it is off."""
    case, dtype = CASES[point["case"]], getattr(torch, point["dtype"])
    inputs, _ = draw(case.op, point["size"], point["device"], dtype)
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
    device, dtype = point["device"], getattr(torch, point["dtype"])
    op, contender = OPS[point["op"]], CONTENDERS[point["op"]][point["contender"]]
    absent = contender.missing()
    if absent:
        return {"missing": f"{absent} is not installed"}
    if device.partition(":")[0] not in contender.devices:
        return {"missing": "it takes CUDA tensors only"}
    operation = OPERATION[point["op"]]
    function = contender.build()
    if contender.ours and operation is not None:
        required(operation, device, dtype)
        # our own kernels by name: where a library is installed, it would be timed in their place
        function = functools.partial(op.ours, backend=fast_backend(device))
    inputs, dy = draw(op, point["size"], device, dtype)
    leaves, dy = contender.enter(inputs), contender.cotangent(dy)
    del inputs
    wanted = [x for x in leaves.values() if x.requires_grad]

    def forward(mark: Callable[[], None]) -> None:
        with torch.no_grad():
            function(**leaves)

    def both(mark: Callable[[], None]) -> None:
        made = function(**leaves)
        mark()
        ys = made if isinstance(made, tuple) else (made,)
        torch.autograd.grad(ys, wanted, [dy.to(y.dtype) for y in ys])

    alone = [seconds for (seconds,) in phases(forward, device, REPEAT_S)]
    pairs = phases(both, device, REPEAT_S)
    with PeakMemory(torch.device(device)) as peak:
        both(lambda: None)
    return {
        "forward_ms": 1e3 * statistics.median(alone),
        "training_forward_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "backward_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "both_ms": 1e3 * statistics.median(map(sum, pairs)),
        "runs": len(pairs),
        "peak_bytes": peak.bytes,
    }
