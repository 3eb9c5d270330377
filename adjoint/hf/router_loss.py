"""The loss of a mixture's routers, summed over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.engine.compare import alike, some_numbers
from adjoint.engine.sequence_sums import Sum
from adjoint.hf import check
from adjoint.hf.head import Output, own_output
from adjoint.kernels.checks import accumulate_dtype

COUNTED = "attention_mask"  # of a chunk's inputs, (batch, tokens): the tokens that count


class Balance(Sum):
    """What experts are given and how probable they are, (2, experts), summed over tokens and layers."""

    def __init__(self, model: Any, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.top_k: int = model.num_experts_per_tok
        self.experts, self.like = model.num_experts, next(model.parameters())

    def empty(self) -> Tensor:
        return self.like.new_zeros(2, self.experts, dtype=accumulate_dtype(self.like.dtype))

    def of(self, router_logits: Sequence[Tensor], counted: Tensor | None) -> Tensor:
        """The sums of a chunk, whose router logits are (tokens, experts) in each layer."""
        sums: Any = 0
        for logits in router_logits:
            p = F.softmax(logits.flatten(0, -2), dim=-1)
            picked = p.topk(self.top_k, dim=-1).indices.flatten()
            p = p.to(accumulate_dtype(p.dtype))
            weights = p.new_ones(len(p)) if counted is None else counted.flatten().to(p)
            given = p.new_zeros(p.shape[1]).index_add_(0, picked, weights.repeat_interleave(self.top_k))
            probable = (weights[:, None] * p).sum(0)  # autocast would round a product
            sums = sums + torch.stack([given, probable])
        return sums

    def loss(self, total: Tensor) -> Tensor:
        """What the whole's sums give."""
        given, p = total
        tokens = given.sum() / self.top_k
        return len(p) * (given.detach() * p).sum() / tokens.detach() ** 2


class Logits:
    """The logits of a backbone's routers, for whoever makes a loss of them: they go beside its hidden states.

    Attributes:
        parts: of the hidden states and of each router's logits, the width and the dtype.
    """

    parts: Sequence[tuple[int, torch.dtype]] = ()

    def attached(self, hidden: Tensor, router_logits: Sequence[Tensor], _: int) -> Tensor:
        """One tensor (batch, tokens, width) of a chunk's hidden states and its routers' logits."""
        tensors = [hidden, *(t.view(*hidden.shape[:2], -1) for t in router_logits)]
        self.parts = [(t.shape[-1], t.dtype) for t in tensors]
        return torch.cat(tensors, dim=-1)

    def taken_apart(self, both: Tensor) -> list[Tensor]:
        """Undoes `attached`."""
        pieces = both.split([width for width, _ in self.parts], dim=-1)
        return [piece.to(dtype) for piece, (_, dtype) in zip(pieces, self.parts, strict=True)]


@torch.no_grad()
def coefficient(model: Any) -> float:
    """What a model multiplies its routers' loss by. Seen by giving its forward some logits of routers, and no
    labels that count.

    Raises:
        Refused: it is another loss than this one.
    """
    weight = model.get_output_embeddings().weight
    hidden, mask = some_numbers(1, 5, weight.shape[1]).to(weight), weight.new_ones(1, 5, dtype=torch.int64)
    mask[:, 3:] = 0
    try:
        logits = some_numbers(2, 5, model.num_experts).to(weight)
        found = own_output(
            model,
            Output(last_hidden_state=hidden, router_logits=tuple(logits)),
            attention_mask=mask,
            labels=torch.full_like(mask, -100),
            num_items_in_batch=1,
            output_router_logits=True,
        )
        balance = Balance(model)
        expected = balance.loss(balance.of(tuple(logits), mask))
        same = alike(found.aux_loss, expected)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        check.refuse(
            model,
            "its routers' loss is not the usual load-balancing loss; set output_router_logits to False",
        )
    return float(found.loss / found.aux_loss)
