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
from adjoint.hf.head import Output, head_output
from adjoint.kernels.checks import accumulate_dtype

TOKEN_MASK = "attention_mask"  # of a chunk's inputs, (batch, tokens): the tokens that count


class RouterLoss(Sum):
    """What experts are given and how probable they are, (2, experts), summed over tokens and layers."""

    def __init__(self, model: Any, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.top_k: int = model.num_experts_per_tok
        self.num_experts, self.example_parameter = model.num_experts, next(model.parameters())

    def empty(self) -> Tensor:
        return self.example_parameter.new_zeros(
            2, self.num_experts, dtype=accumulate_dtype(self.example_parameter.dtype)
        )

    def chunk_sums(self, router_logits: Sequence[Tensor], counted: Tensor | None) -> Tensor:
        """The sums of a chunk, whose router logits are (tokens, experts) in each layer."""
        sums: Any = 0
        for logits in router_logits:
            probabilities = F.softmax(logits.flatten(0, -2), dim=-1)
            picked_experts = probabilities.topk(self.top_k, dim=-1).indices.flatten()
            probabilities = probabilities.to(accumulate_dtype(probabilities.dtype))
            weights = (
                probabilities.new_ones(len(probabilities))
                if counted is None
                else counted.flatten().to(probabilities)
            )
            assigned_tokens = probabilities.new_zeros(probabilities.shape[1]).index_add_(
                0, picked_experts, weights.repeat_interleave(self.top_k)
            )
            summed_probabilities = (weights[:, None] * probabilities).sum(0)  # autocast would round a product
            sums = sums + torch.stack([assigned_tokens, summed_probabilities])
        return sums

    def loss(self, total: Tensor) -> Tensor:
        """What the whole's sums give."""
        assigned_tokens, summed_probabilities = total
        tokens = assigned_tokens.sum() / self.top_k
        return (
            len(summed_probabilities)
            * (assigned_tokens.detach() * summed_probabilities).sum()
            / tokens.detach() ** 2
        )


class RouterLogits:
    """The logits of a backbone's routers, for whoever makes a loss of them: they go beside its hidden states.

    Attributes:
        parts: of the hidden states and of each router's logits, the width and the dtype.
    """

    layout: Sequence[tuple[int, torch.dtype]] = ()

    def append_to(self, hidden: Tensor, router_logits: Sequence[Tensor], _: int) -> Tensor:
        """One tensor (batch, tokens, width) of a chunk's hidden states and its routers' logits."""
        tensors = [hidden, *(t.view(*hidden.shape[:2], -1) for t in router_logits)]
        self.layout = [(t.shape[-1], t.dtype) for t in tensors]
        return torch.cat(tensors, dim=-1)

    def split_from(self, combined: Tensor) -> list[Tensor]:
        """Undoes `attached`."""
        pieces = combined.split([width for width, _ in self.layout], dim=-1)
        return [piece.to(dtype) for piece, (_, dtype) in zip(pieces, self.layout, strict=True)]


@torch.no_grad()
def router_loss_coefficient(model: Any) -> float:
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
        output = head_output(
            model,
            Output(last_hidden_state=hidden, router_logits=tuple(logits)),
            attention_mask=mask,
            labels=torch.full_like(mask, -100),
            num_items_in_batch=1,
            output_router_logits=True,
        )
        router_loss = RouterLoss(model)
        expected = router_loss.loss(router_loss.chunk_sums(tuple(logits), mask))
        is_usual = alike(output.aux_loss, expected)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        is_usual = False
    if not is_usual:
        check.refuse(
            model,
            "its routers' loss is not the usual load-balancing loss; set output_router_logits to False",
        )
    return float(output.loss / output.aux_loss)
