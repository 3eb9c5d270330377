"""Hidden states of a sequence that runs by chunks: stored, and differentiable as the last stage's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep, grouped
from adjoint.engine.storage import Slab
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State


class HiddenStates:
    """Storage for the hidden states of a sequence's last `tokens` tokens, the first being `first_token`.

    Attributes:
        hidden: (batch, tokens, hidden_size) after the forward.
    """

    def __init__(self, tokens: int, first_token: int = 0) -> None:
        self.tokens, self.first_token = tokens, first_token
        self.hidden: Tensor | None = None

    def add(self, hidden: Tensor, start: int) -> None:
        """Store the part of a chunk's hidden states that is among the last tokens."""
        if self.hidden is None:
            self.hidden = hidden.new_empty(hidden.shape[0], self.tokens, hidden.shape[2])
        y = hidden[:, max(0, self.first_token - start) :]
        at = max(0, start - self.first_token)
        self.hidden[:, at : at + y.shape[1]] = y


class CollectHiddenStates(HiddenStates, Stage):
    """A stage above a backbone that stores the hidden states instead of computing a loss.

    If not all of them are stored, no backward may follow.

    Attributes:
        cotangent: gradient of the hidden states, to be set before the backward.
    """

    def __init__(self, tokens: int, first_token: int = 0) -> None:
        super().__init__(tokens, first_token)
        self.cotangent: Tensor | None = None

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        self.add(x, chunk.start)
        return _hidden_norm(x), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        if self.cotangent is None:  # the last chunk is linearised in the forward
            self.forward(x, state, chunk)

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            if self.cotangent is None:  # the measurement of a chunk comes before the backward
                return torch.zeros_like(x), ()
            return self.cotangent[:, chunk.start : chunk.start + x.shape[1]], ()

        return _hidden_norm(x), (), pullback


def _hidden_norm(hidden: Tensor) -> Tensor:
    """Return the norm of the hidden states, in the place of a chunk's loss.

    A recomputed chunk is compared with the first run by its loss; this chunk has none."""
    return torch.linalg.vector_norm(hidden.detach(), dtype=accumulate_dtype(hidden.dtype))


class HiddenResult(NamedTuple):
    """Hidden states of a call, differentiable.

    Attributes:
        hidden: (rows, seqlen, width), of all tokens.
        states, slabs: as in `step.Result`.
    """

    hidden: Tensor
    states: list[State]
    slabs: Mapping[int, Sequence[Slab]] = {}


def hidden_by_chunks(
    step: ChunkedStep, collect: CollectHiddenStates, return_final_kv: bool = False
) -> HiddenResult:
    """Run a step's forward; return all hidden states and the final states, differentiable.

    Args:
        step: whose last stage is `collect`; if workers share its sequence, one that begins with zeros.
        collect: stores the hidden states of all tokens.
        return_final_kv: as in `ChunkedStep.forward`.
    """
    _, final = step.forward(return_final_kv=return_final_kv)
    assert collect.hidden is not None
    collected = step.distribution.joined(collect.hidden)
    shape, zero = collected.shape, collected.new_zeros(())

    def backward(
        cotangent: Tensor | None, *d_final: Tensor | None
    ) -> tuple[Gradients, Sequence[Tensor | None]]:
        # without one, a later step has gone on from the final states, and nobody has used the hidden states
        collect.cotangent = zero.expand(shape) if cotangent is None else cotangent
        return step.backward(None, d_final)

    hidden, *state = step.differentiable([collected.detach(), *final], backward)
    return HiddenResult(hidden, grouped(step.model_states, state), step.slabs)
