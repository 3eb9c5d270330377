"""Values without a graph whose gradients take a second pass, where a forward's backward cannot wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from adjoint.engine.executor import RECOMPUTE_RTOL
from adjoint.engine.leaves import ChunkChangedError
from adjoint.kernels.checks import differentiable_once


def two_passes(values: Tensor, second_pass: Callable[[Tensor], None]) -> Tensor:
    """Return values whose gradient takes a second pass, when their cotangents are known.

    Args:
        second_pass: gets the cotangents and adds gradients to parameters. It runs at the end of the backward,
            as FSDP's hooks do not work inside of one.
    """
    kind, anchor = values.device.type, torch.zeros((), requires_grad=True)
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def run(cotangents: Tensor) -> None:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            second_pass(cotangents)

    result: Tensor = _TwoPasses.apply(values, anchor, run)
    return result


class _TwoPassesContext(Protocol):
    """The values that `_TwoPasses` keeps from its forward for its backward."""

    second_pass: Callable[[Tensor], None]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _TwoPasses(torch.autograd.Function):
    """The node of `two_passes`."""

    @staticmethod
    def forward(
        ctx: _TwoPassesContext, values: Tensor, anchor: Tensor, second_pass: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.second_pass = second_pass
        ctx.save_for_backward(anchor)  # so that torch refuses a second backward through a graph that is freed
        return values.clone()

    @staticmethod
    @differentiable_once("token_logprobs")
    def backward(ctx: _TwoPassesContext, cotangents: Tensor) -> tuple[None, None, None]:
        _, second_pass = ctx.saved_tensors, ctx.second_pass
        torch.autograd.Variable._execution_engine.queue_callback(lambda: second_pass(cotangents))
        return None, None, None


def refuse_other_values(loss: Tensor, terms: Tensor) -> None:
    """Raise ChunkChangedError unless the second pass's loss is the sum of the first one's terms."""
    dtype = torch.bfloat16 if torch.is_autocast_enabled(terms.device.type) else terms.dtype
    size = terms.abs().sum()
    if bool((loss - terms.sum()).abs() > max(RECOMPUTE_RTOL[dtype], 1e-4) * size):
        raise ChunkChangedError(
            f"the weighted log-probabilities summed to {float(terms.sum()):.6g} in the forward and to "
            f"{float(loss):.6g} when they were computed again for the backward: weights or settings of the "
            "model have changed in between"
        )
