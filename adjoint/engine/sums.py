"""What a loss may be made of besides its own sum over tokens: any function of other sums over the whole
sequence, such as a router's load-balancing loss is of the tokens that each expert is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sum:
    """A tensor that a stage adds up chunk by chunk.

    What is made of the total, and so its cotangent, is known when the whole forward is over. The backward of
    each chunk, recomputed or not, hands it to the chunk's part.

    Args:
        factor: of `loss` in the whole loss.

    Attributes:
        parts: by the chunks' first tokens. cotangent: of the total, to be set before the backward.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.parts = factor, dict[int, Tensor]()
        self.cotangent: Tensor | None = None

    def add(self, part: Tensor, start: int) -> Tensor:
        """Notes the part of the chunk that begins at token `start`; gives a 0 to be added to the chunk's
        loss."""
        self.parts[start] = part.detach()
        return _Zero.apply(part, self)

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.parts.values())).sum(0)

    def loss(self, total: Tensor) -> Tensor:
        """What is made of the total."""
        raise NotImplementedError

    def cotangent_of(self, total: Tensor) -> Tensor:
        """Of the total, where the whole loss has the cotangent 1."""
        total = total.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.factor * self.loss(total)
        return torch.autograd.grad(loss, total)[0]


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Sum) -> Tensor:
        ctx.whole = whole
        return part.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.whole.cotangent, None
