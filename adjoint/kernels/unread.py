"""A linear map whose result nobody reads: a layer that is computed again for its backward ends with one.

Its product, a fifth to a third of a layer's, is left out; gradients are the linear map's. (Gradient
checkpointing stops early for the same reason.)"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from adjoint.kernels import dispatch
from adjoint.kernels.checks import differentiable_once, is_untouched

_local = threading.local()


@contextlib.contextmanager
def nan_for_zeros() -> Iterator[None]:
    """Let this thread's `unread` modules return nan, in a trial of whether anybody reads what they return.

    Zeros would hide that where the map itself returns zeros, as a new adapter does."""
    _local.value = math.nan
    try:
        yield
    finally:
        _local.value = 0.0


class _UnreadForward:
    """The forward of a linear module in `unread`; for other threads it is the module's own."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.thread = linear, threading.get_ident()

    def __call__(self, x: Tensor) -> Tensor:
        if self.thread != threading.get_ident():
            return nn.Linear.forward(self.linear, x)
        return unread_linear(x, self.linear.weight, self.linear.bias)


@contextlib.contextmanager
def unread(linear: nn.Module | None) -> Iterator[None]:
    """Let a plain `nn.Linear` return zeros to this thread, with its own gradients; any other module stays."""
    if not isinstance(linear, nn.Linear) or not is_untouched(linear, nn.Linear):
        yield
        return
    vars(linear)["forward"] = _UnreadForward(linear)
    try:
        yield
    finally:
        vars(linear).pop("forward", None)  # which another thread may have done


def is_unread(linear: nn.Module) -> bool:
    """Whether a module is in `unread` now, in this thread."""
    forward = vars(linear).get("forward")
    return isinstance(forward, _UnreadForward) and forward.thread == threading.get_ident()


def unread_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return zeros in the place of F.linear(x, weight, bias), with its gradients.

    Modes of torch functions see it as they see F.linear."""
    if has_torch_function((x, weight)):
        zeros: Tensor = handle_torch_function(unread_linear, (x, weight), x, weight, bias)
        return zeros
    if (dtype := dispatch.autocast_dtype(x.device)) is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _UnreadLinear.apply(x, weight, bias)


def unread_result(x: Tensor, weight: Tensor) -> Tensor:
    """Return the zeros, (…, d_out): a layer's code may look for numbers that are not finite."""
    return x.new_full((*x.shape[:-1], weight.shape[0]), getattr(_local, "value", 0.0))


class _LinearContext(Protocol):
    """The values that `_UnreadLinear` keeps from its forward for its backward."""

    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, bool, bool]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _UnreadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return unread_result(x, weight)

    @staticmethod
    @differentiable_once("a linear map of a recomputed layer")
    def backward(ctx: _LinearContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (needs_x, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        d_weight = rows.t() @ x.flatten(0, -2) if needs_weight else None
        return dy @ weight if needs_x else None, d_weight, rows.sum(0) if needs_bias else None
