"""Several streams of tokens, from which windows are taken in proportion to weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from adjoint.data.cache import entropy, frequencies
from adjoint.errors import UserError


class Mixture:
    """The endless, resumable sequence of batches whose rows come from several streams.

    The next row is of the stream that lags furthest behind its weight: nothing is drawn, and after any number
    of rows each stream has had its share, to one row or so. A stream that ends begins again.

    Args:
        parts: the streams, `Batches` of one row each. weights: above 0. batch: rows.

    Attributes:
        begins: whether the next batch's rows do not go on from those of the last one: they never do.
    """

    begins = True

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], batch: int) -> None:
        self.parts, self.weights, self.batch = list(parts), list(weights), batch
        self.taken = [0] * len(parts)

    def __iter__(self) -> Mixture:
        return self

    def __next__(self) -> torch.Tensor:
        """The next batch: (batch, seqlen) int64 on the CPU; see `adjoint.batch.labelled`."""
        rows = []
        for _ in range(self.batch):
            due = [(taken + 1) / weight for taken, weight in zip(self.taken, self.weights, strict=True)]
            part = due.index(min(due))
            self.taken[part] += 1
            rows.append(next(self.parts[part]))
        return torch.cat(rows)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, in what JSON can hold."""
        parts = [part.state_dict() for part in self.parts]
        return {"weights": self.weights, "taken": list(self.taken), "batch": self.batch, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor that `state_dict` gave.

        Raises:
            UserError: The cursor is of other data or settings.
        """
        if (state.get("weights"), state.get("batch")) != (self.weights, self.batch):
            raise UserError(
                f"the data cursor to resume from has weights {state.get('weights')} and batch "
                f"{state.get('batch')}, this run has {self.weights} and {self.batch}: resume with the same "
                "data.path, data.weights and data.batch"
            )
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)
        self.taken = list(state["taken"])


def mixed_entropy(streams: Sequence[np.ndarray], weights: Sequence[float]) -> float:
    """Entropy of the token frequencies of a mixture, in nats per token."""
    shares = [frequencies(stream) for stream in streams]
    mixed = np.zeros(max(map(len, shares)))
    for share, weight in zip(shares, weights, strict=True):
        mixed[: len(share)] += share * weight / sum(weights)
    return entropy(mixed)
