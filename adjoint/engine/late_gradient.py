"""Tensors that were computed without a graph, and whose gradient is computed, or refused, by the backward.

Values that most callers only look at then cost no graph, and yet no loss that is made of them lacks a part of
its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from adjoint.engine.step import input_gradients, uncompiled
from adjoint.engine.tile import Gradients
from adjoint.errors import UserError
from adjoint.kernels.checks import differentiable_once

# Takes the gradient of a tensor, and returns those of the inputs that it depends on.
LateBackward = Callable[[Tensor], Gradients]


class _LateContext(FunctionCtx):
    """The context of a `_Late` node."""

    compute: LateBackward
    inputs: tuple[Tensor, ...]
    saved_tensors: tuple[Tensor, ...]


class _Late(torch.autograd.Function):
    """The node between a tensor, computed before, and its inputs."""

    @staticmethod
    def forward(ctx: _LateContext, values: list[Tensor], compute: LateBackward, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.inputs = compute, inputs
        ctx.save_for_backward(*inputs)  # so that autograd refuses a backward after a change in place
        return values.pop()

    @staticmethod
    @uncompiled
    @differentiable_once("a tensor that was computed without a graph")
    def backward(ctx: _LateContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # the check happens on access
        return None, None, *input_gradients(ctx.inputs, ctx.compute(cotangent))


@uncompiled
def with_late_gradient(values: Tensor, inputs: Sequence[Tensor], compute: LateBackward) -> Tensor:
    """Return a tensor that requires a gradient, which `compute` turns into those of the inputs.

    Args:
        values: without a graph; it becomes the result.
        inputs: tensors of which one at least requires a gradient.
    """
    with torch.inference_mode(False), torch.enable_grad():
        result: Tensor = _Late.apply([values], compute, *inputs)
    return result


def refusing_gradient(values: Tensor, anchor: Tensor, message: str) -> Tensor:
    """Return a tensor whose backward raises a UserError with this message.

    Args:
        values: as in `with_late_gradient`.
        anchor: a tensor that requires a gradient, without which nothing would be lost.
    """

    def refuse(_: Tensor) -> NoReturn:
        raise UserError(message)

    return with_late_gradient(values, [anchor], refuse)
