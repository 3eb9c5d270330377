"""Losses that are a function of a sum over the whole sequence: a router's load-balancing loss, for one,
depends on how many tokens of the sequence each expert gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Sum:
    """A tensor that a stage sums over chunks, and the loss made of the total.

    The total's cotangent is known after the whole forward; each chunk's backward then hands it to its part.

    Args:
        factor: of `loss` in the whole loss.

    Attributes:
        parts: each chunk's part, by its first token.
        cotangent: the total's; set it before the backward.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.parts = factor, dict[int, Tensor]()
        self.cotangent: Tensor | None = None
        self.all: Tensor | None = None

    def add(self, part: Tensor, start: int) -> Tensor:
        """Adds the part of the chunk that begins at token `start`. Gives a 0 to be added to the chunk's loss:
        its backward hands the total's cotangent to `part`."""
        self.parts[start] = part.detach()
        return _Zero.apply(part, self)

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.parts.values())).sum(0) if self.all is None else self.all

    def empty(self) -> Tensor:
        """The sum of no parts; a subclass defines it."""
        raise NotImplementedError

    def share(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Makes the total that of several processes, by what sums a tensor over them."""
        self.all = reduce(self.total if self.parts else self.empty())

    def loss(self, total: Tensor) -> Tensor:
        """The loss made of the total; a subclass defines it."""
        raise NotImplementedError

    def cotangent_of(self, total: Tensor) -> Tensor:
        """The total's cotangent if that of the whole loss is 1."""
        total = total.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.factor * self.loss(total)
        return torch.autograd.grad(loss, total)[0]


class _Zero(torch.autograd.Function):
    """(part, sum) → 0, whose backward gives `part` the sum's cotangent."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Sum) -> Tensor:
        ctx.whole = whole
        return part.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.whole.cotangent, None
