"""Terms of a loss beside the labels' cross-entropy: the load-balancing loss of a mixture's routers, summed
over chunks, and the penalty of each token's largest logit of flash-linear-attention's models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.engine.host_weights import device_of
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.verification import alike, some_numbers
from adjoint.engine.weights import whole_shape
from adjoint.hf import check
from adjoint.hf.call import Call
from adjoint.hf.head import Output, head_output
from adjoint.hf.model_parts import current_weights
from adjoint.kernels.checks import accumulate_dtype

PENALTY_COEFFICIENT = 1e-4  # fla calls its function with the default


class RouterLoss(Sum):
    """The load-balancing loss of a mixture of experts.

    The total is (2, experts): how many tokens each expert is assigned, and the sum of its probabilities,
    over all tokens and layers."""

    def __init__(self, model: PreTrainedModel, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.top_k: int = model.num_experts_per_tok
        self.num_experts, parameter = model.num_experts, next(model.parameters())
        self.dtype, self.device = accumulate_dtype(parameter.dtype), device_of(model)

    def empty(self) -> Tensor:
        return torch.zeros(2, self.num_experts, dtype=self.dtype, device=self.device)

    def chunk_sums(self, router_logits: Sequence[Tensor], counted: Tensor | None) -> Tensor:
        """Return a chunk's part of the total.

        Args:
            router_logits: (tokens, experts) of each layer.
            counted: (batch, tokens), nonzero for tokens that count; None if all do.
        """
        sums: list[Tensor] = []
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
            # Not as a matrix product, which autocast would round.
            summed_probabilities = (weights[:, None] * probabilities).sum(0)
            sums.append(torch.stack([assigned_tokens, summed_probabilities]))
        return functools.reduce(torch.add, sums)

    def loss(self, total: Tensor) -> Tensor:
        """Return the loss made of the total: experts · Σ (assigned share · mean probability)."""
        assigned_tokens, summed_probabilities = total
        tokens = assigned_tokens.sum() / self.top_k
        return (
            len(summed_probabilities)
            * (assigned_tokens.detach() * summed_probabilities).sum()
            / tokens.detach() ** 2
        )


class RouterLogits:
    """The logits of a backbone's routers, carried beside its hidden states to a loss outside the model.

    Attributes:
        layout: width and dtype of the hidden states and of each router's logits.
    """

    layout: Sequence[tuple[int, torch.dtype]] = ()

    def append_to(self, hidden: Tensor, router_logits: Sequence[Tensor], _: int) -> Tensor:
        """Return a chunk's hidden states and its routers' logits as one tensor (batch, tokens, width)."""
        tensors = [hidden, *(t.view(*hidden.shape[:2], -1) for t in router_logits)]
        self.layout = [(t.shape[-1], t.dtype) for t in tensors]
        return torch.cat(tensors, dim=-1)

    def split_from(self, combined: Tensor) -> list[Tensor]:
        """Split a tensor of `append_to` into the hidden states and each router's logits."""
        pieces = combined.split([width for width, _ in self.layout], dim=-1)
        return [piece.to(dtype) for piece, (_, dtype) in zip(pieces, self.layout, strict=True)]


@torch.no_grad()
def router_loss_coefficient(model: PreTrainedModel) -> float:
    """Return the factor by which a model multiplies its routers' loss.

    It is measured by giving the model's forward some logits of routers, and no labels that count.

    Raises:
        Refused: the model has another loss than `RouterLoss`.
    """
    weight = model.get_output_embeddings().weight
    device, dtype = device_of(model), weight.dtype  # not new tensors like it: these would be sharded as it is
    hidden = some_numbers(1, 5, whole_shape(weight)[1]).to(device, dtype)
    mask = torch.tensor([[1, 1, 1, 0, 0]], device=device)
    try:
        logits = some_numbers(2, 5, model.num_experts).to(device, dtype)
        inputs = {
            "attention_mask": mask,
            "labels": torch.full_like(mask, -100),
            "num_items_in_batch": 1,
            "output_router_logits": True,
        }
        hidden_output = Output(last_hidden_state=hidden, router_logits=tuple(logits))
        output = current_weights(model).run(lambda: head_output(model, hidden_output, **inputs))
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


class LogitPenalty(NamedTuple):
    """Gradient that a call's tokens add to that of their logits (`use_l2warp`, RWKV-LM's L2Wrap).

    The value of the loss stays as it is.

    Attributes:
        factor: the gradient of a token's largest logit is that logit times `factor`.
        is_of_mean: whether it belongs to the loss that is divided by the number of labels; with
            `num_items_in_batch` fla adds it to the sum, before the division.
    """

    factor: float
    is_of_mean: bool

    @staticmethod
    def from_call(call: Call, padded: bool) -> LogitPenalty:
        """Return the penalty of a call of a model that has one (`check.has_logit_penalty`).

        Args:
            padded: whether there is padding.

        Raises:
            Refused: it would count padding.
        """
        if padded:
            check.refuse(
                call.model,
                f"{check.LOGIT_PENALTY} is on, and counts logits of padding, where a chunk's differ from the "
                f"model's: give rows without padding, or set config.{check.LOGIT_PENALTY} to False",
            )
        is_of_mean = call.arguments.get("num_items_in_batch") is None
        return LogitPenalty(PENALTY_COEFFICIENT / call.ids.numel(), is_of_mean)

    def of_sum(self, divisor: Tensor | float) -> Tensor:
        """Return the factor in a sum of losses that is divided by `divisor` later."""
        return self.factor * torch.as_tensor(divisor if self.is_of_mean else 1.0, dtype=torch.float64)
