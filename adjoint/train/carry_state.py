"""States carried from batch to batch (`training.carry_state`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.checkpoint import StoredTensors
from adjoint.engine.tile import reset_rows
from adjoint.layers import State
from adjoint.layers.init import seed_of

STEM = "state"  # of the state files in a checkpoint


class Carried:
    """The final states of the last batch, a tuple for each layer of `span`; None before the first batch.
    `carry_state` is the setting of that name."""

    def __init__(self, carry_state: str, span: Sequence[int]) -> None:
        self.how, self.span = carry_state, span
        self.states: list[State] | None = None

    def start(self, goes_on: bool, seed: int) -> list[State] | None:
        """Return the states that the next batch starts from; None for zeros, as when it does not continue the
        last. Each layer has its own noise generator, so that a shard draws the same noise as the whole
        model."""
        if self.states is None or not goes_on:
            return None
        if self.how == "other":  # the states of another row, too
            return [tuple(s.roll(1, 0) for s in state) for state in self.states]
        if self.how == "noise":
            return [_noise(state, seed, k) for k, state in zip(self.span, self.states, strict=True)]
        return self.states

    def end(self, states: Sequence[State], ended: Tensor) -> None:
        """Keep the final states of a batch; zeros in rows, (batch,) bool, whose document `ended` with it."""
        self.states = [reset_rows(tuple(s.detach() for s in state), ended) for state in states]

    def tensors(self) -> dict[str, Tensor]:
        """Return the states by layer name, for a checkpoint."""
        states = zip(self.span, self.states or [()] * len(self.span), strict=True)
        return {f"layers.{k}|{i}": s for k, state in states for i, s in enumerate(state)}

    def load(self, stored: StoredTensors, device: torch.device) -> None:
        """Load the states from a checkpoint's `STEM` files; they stay None if it has none."""
        if self.how != "none" and stored.files_by_name:
            states = [sorted(stored.read_entries(f"layers.{k}").items()) for k in self.span]
            self.states = [tuple(s.to(device) for _, s in state) for state in states]


def _noise(state: State, seed: int, layer: int) -> State:
    """Random numbers with the mean and standard deviation of a state's tensors."""
    if not state:
        return ()
    generator = torch.Generator(state[0].device).manual_seed(seed_of(seed, layer))
    return tuple(
        torch.empty_like(s).normal_(generator=generator) * s.std(correction=0) + s.mean() for s in state
    )
