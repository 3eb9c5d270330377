"""Losses that are a function of a sum over the whole sequence: a router's load-balancing loss, for one,
depends on how many tokens of the sequence each expert gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Sum:
    """A tensor that a stage sums over chunks, and the loss made of the total.

    The total's cotangent is known after the whole forward; each chunk's backward then passes it to its part.

    Args:
        factor: weight of `loss` in the model's loss.

    Attributes:
        parts: each chunk's part, by its first token.
        cotangent: the total's; set it before the backward.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.parts = factor, dict[int, Tensor]()
        self.cotangent: Tensor | None = None
        self.all: Tensor | None = None

    def add(self, chunk_part: Tensor, start: int) -> Tensor:
        """Add the part of the chunk that begins at token `start`; return a 0 to be added to the chunk's loss.

        The backward of this 0 passes the total's cotangent to the chunk's part."""
        self.parts[start] = chunk_part.detach()
        return _Zero.apply(chunk_part, self)

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.parts.values())).sum(0) if self.all is None else self.all

    def empty(self) -> Tensor:
        """Return the sum of no parts; a subclass defines it."""
        raise NotImplementedError

    def share(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Sum the total over several processes; `reduce` sums a tensor over them."""
        self.all = reduce(self.total if self.parts else self.empty())

    def loss(self, total: Tensor) -> Tensor:
        """Return the loss made of the total; a subclass defines it."""
        raise NotImplementedError

    def cotangent_of(self, total: Tensor) -> Tensor:
        """Return the total's cotangent if the model's loss has the cotangent 1."""
        total = total.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.factor * self.loss(total)
        return torch.autograd.grad(loss, total)[0]


class _Zero(torch.autograd.Function):
    """(a chunk's part, its `Sum`) → 0, whose backward gives the part the total's cotangent."""

    @staticmethod
    def forward(ctx: Any, chunk_part: Tensor, sequence_sum: Sum) -> Tensor:
        ctx.sequence_sum = sequence_sum
        return chunk_part.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.sequence_sum.cotangent, None
