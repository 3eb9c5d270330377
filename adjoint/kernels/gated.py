"""silu(gate) * value, as in gated MLPs (SwiGLU, Shazeer 2020), and a linear map of it: autograd would keep
silu(gate), and the product for the map's own gradient; here both are made again from gate and value."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import dispatch, recorded
from adjoint.kernels.checks import differentiable_once, is_untouched, refusal_of_transforms
from adjoint.kernels.swiglu import swiglu, swiglu_backward_
from adjoint.kernels.swiglu.reference import swiglu_backward
from adjoint.kernels.unread import is_unread, unread_result

MIN_ELEMENTS_ON_CPU = 1 << 15  # of fewer one pass saves less than a call of the operator costs
SLICES = 8  # of a recorded backward, which so needs little memory of its own


def gated(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value; of many of one shape it keeps both and nothing else for the backward."""
    if _is_small(gate) or gate.shape != value.shape or _in_a_transform():
        return F.silu(gate) * value
    return swiglu(gate, value)


def gated_linear(gate: Tensor, value: Tensor, linear: nn.Module) -> Tensor:
    """linear(gated(gate, value)): (…, d_in) → (…, d_out). Of a plain `nn.Linear` in the inputs' dtype the
    product is not kept either; any other module, one with hooks say, is called as it is."""
    unread = is_unread(linear)
    if not (unread or is_untouched(linear, nn.Linear)) or not _has_plain_weight(linear, gate):
        return linear(gated(gate, value))
    if getattr(_local, "kept", False) or gate.shape != value.shape or _in_a_transform():
        return linear(gated(gate, value))
    inputs: tuple[Any, ...] = gate, value, linear.weight, linear.bias, unread
    return _GatedLinear.apply(*inputs) if torch.is_grad_enabled() else _GatedLinear.forward(*inputs)


_local = threading.local()


@contextlib.contextmanager
def products_kept() -> Iterator[None]:
    """Meanwhile `gated_linear` keeps its product: where the backward runs all of this again, it need not run
    the linear map for it."""
    before, _local.kept = getattr(_local, "kept", False), True
    try:
        yield
    finally:
        _local.kept = before


def _is_small(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() < MIN_ELEMENTS_ON_CPU and not dispatch.is_as_on_cuda()


def _in_a_transform() -> bool:
    """Whether what runs now is transformed in a way in which operators of ours cannot be."""
    return not torch.compiler.is_compiling() and refusal_of_transforms() is not None


def _has_plain_weight(linear: nn.Module, x: Tensor) -> bool:
    """Whether a linear module's weight is a plain tensor of the input's dtype."""
    return (
        type(linear.weight) in (Tensor, nn.Parameter)  # and not quantised
        and linear.weight.dtype == x.dtype
        and linear.weight.device == x.device
        and not torch.is_autocast_enabled(x.device.type)
    )


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(gate: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, unread: bool) -> Tensor:
        if unread:
            return unread_result(gate, weight)
        return F.linear(gated(gate, value), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.is_recorded = recorded.current.recording is not None

    @staticmethod
    @differentiable_once("a gated linear map")
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, value, weight = ctx.saved_tensors
        _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, d_weight = _rows(dy), None
        if needs_weight:
            d_weight = rows.t() @ _rows(gated(gate, value))
        d_bias = rows.sum(0) if needs_bias else None
        d = (dy @ weight).to(gate.dtype)  # in an autocast that was not the forward's, the product is narrower
        d_value = _backward_in_slices(d, gate, value) if ctx.is_recorded else _backward(d, gate, value)
        return d, d_value, d_weight, d_bias, None


def _backward(d: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """Return the cotangent of value; that of gate takes d's memory."""
    if _is_small(gate):
        return swiglu_backward(d, gate, value, in_place=True)[1]
    return swiglu_backward_(d, gate, value)


def _backward_in_slices(d: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """Return the cotangent of value in value's memory, which nobody else will read."""
    rows = [_rows(t) for t in (d, gate, value)]
    # on a CPU the ends of slices would be rounded in another way
    for d_slice, gate_slice, value_slice in zip(
        *(t.chunk(SLICES if t.is_cuda else 1) for t in rows), strict=True
    ):
        value_slice.copy_(_backward(d_slice, gate_slice, value_slice))
    return rows[2].view(value.shape)


def _rows(t: Tensor) -> Tensor:
    """(…, width) → (rows, width)."""
    return torch.atleast_2d(t).flatten(0, -2)
