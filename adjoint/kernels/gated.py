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
from torch.autograd.function import once_differentiable


def gated(gate: Tensor, value: Tensor) -> Tensor:
    """silu(gate) * value, of one shape and dtype; keeps both and nothing else for the backward."""
    return _Gated.apply(gate, value)


def gated_linear(gate: Tensor, value: Tensor, linear: nn.Module) -> Tensor:
    """linear(gated(gate, value)): (…, d_in) → (…, d_out). Of a plain `nn.Linear` in the inputs' dtype the
    product is not kept either; any other module, one with hooks say, is called as it is."""
    if not _is_plain(linear, gate) or getattr(_local, "kept", False):
        return linear(gated(gate, value))
    return _GatedLinear.apply(gate, value, linear.weight, linear.bias)


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


def _is_plain(linear: nn.Module, x: Tensor) -> bool:
    return (
        type(linear) is nn.Linear
        and linear.weight.dtype == x.dtype
        and linear.weight.device == x.device
        and not torch.is_autocast_enabled(x.device.type)
        and not (linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks)
        and not linear._backward_pre_hooks
        and "forward" not in linear.__dict__
    )


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Any:
        gate, value = ctx.saved_tensors
        return torch.ops.aten.silu_backward(d * value, gate), F.silu(gate).mul_(d)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, value, weight)
        return F.linear(F.silu(gate).mul_(value), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, value, weight = ctx.saved_tensors
        _, _, needs_weight, needs_bias = ctx.needs_input_grad
        rows, silu, d_weight = dy.flatten(0, -2), F.silu(gate), None
        if needs_weight:
            d_weight = rows.t() @ (silu * value).flatten(0, -2)
        d = dy @ weight
        d_value = silu.mul_(d)
        d_gate = torch.ops.aten.silu_backward(d.mul_(value), gate)
        return d_gate, d_value, d_weight, rows.sum(0) if needs_bias else None
