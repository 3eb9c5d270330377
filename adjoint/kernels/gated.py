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

from adjoint.kernels.checks import is_untouched
from adjoint.kernels.recorded import is_recording
from adjoint.kernels.unread import is_unread, unread_result

SLICES = 8  # of a recorded backward, which so needs little memory of its own


def gated(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value, of one shape and dtype; keeps both and nothing else for the backward."""
    return _Gated.apply(gate, value)


def gated_linear(gate: Tensor, value: Tensor, linear: nn.Module) -> Tensor:
    """linear(gated(gate, value)): (…, d_in) → (…, d_out). Of a plain `nn.Linear` in the inputs' dtype the
    product is not kept either; any other module, one with hooks say, is called as it is."""
    unread = is_unread(linear)
    if not (unread or is_untouched(linear, nn.Linear)) or not _has_plain_weight(linear, gate):
        return linear(gated(gate, value))
    if getattr(_local, "kept", False):
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


def _has_plain_weight(linear: nn.Module, x: Tensor) -> bool:
    """Whether a linear module's weight is a plain tensor of the input's dtype."""
    return (
        type(linear.weight) in (Tensor, nn.Parameter)  # and not quantised
        and linear.weight.dtype == x.dtype
        and linear.weight.device == x.device
        and not torch.is_autocast_enabled(x.device.type)
    )


class _Gated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, value: Tensor) -> Tensor:
        return F.silu(gate) * value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return _backward(d, *ctx.saved_tensors)


class _GatedLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, unread: bool) -> Tensor:
        if unread:
            return unread_result(gate, weight)
        return F.linear(F.silu(gate) * value, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.is_recorded = is_recording()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, value, weight = ctx.saved_tensors
        _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, d_weight = dy.flatten(0, -2), None
        if needs_weight:
            d_weight = rows.t() @ (F.silu(gate) * value).flatten(0, -2)
        d_bias = rows.sum(0) if needs_bias else None
        if ctx.is_recorded:
            return *_backward_in_slices(dy @ weight, gate, value), d_weight, d_bias, None
        return *_backward(dy @ weight, gate, value, is_ours=True), d_weight, d_bias, None


def _backward_in_slices(d: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cotangents of gate and value in the memory of d and value, which nobody else will read."""
    # on a CPU the ends of slices would be rounded in another way
    slices = (t.chunk(SLICES if d.is_cuda else 1, dim=-2) for t in (d, gate, value))
    for d_slice, gate_slice, value_slice in zip(*slices, strict=True):
        d_value = F.silu(gate_slice).mul_(d_slice)
        d_slice.mul_(value_slice)
        torch.ops.aten.silu_backward.grad_input(d_slice, gate_slice, grad_input=d_slice)
        value_slice.copy_(d_value)
    return d, value


def _backward(d: Tensor, gate: Tensor, value: Tensor, is_ours: bool = False) -> tuple[Tensor, Tensor]:
    """Return the cotangents of gate and value; with `is_ours`, one of them in d's memory.

    They are what a chunk's backward holds most of, so nothing else as large is made."""
    if torch._C._functorch.is_batchedtensor(d):  # others of them may have no batch
        return torch.ops.aten.silu_backward(d * value, gate), F.silu(gate) * d
    d_value = F.silu(gate).mul_(d)
    d_gate = d.mul_(value) if is_ours else d * value
    return torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate), d_value
