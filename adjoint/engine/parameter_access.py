"""`ParameterAccess`: how stages get their weights, and how gradients are returned to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from torch import Tensor

from adjoint.batch import Batch, State
from adjoint.engine.custom_layers import verify_custom_layers
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, Grid
from adjoint.engine.leaves import UnlistedLeaves
from adjoint.engine.schedule import Action
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.engine.tile import Gradients

ContextFactory = Callable[[], contextlib.AbstractContextManager[object]]


class Runs(Protocol):
    """The part of a `step.ChunkedStep` that a `ParameterAccess` reads and calls."""

    executor: Executor
    grid: Grid
    stages: list[Stage | None]
    batch: Batch
    spec: EngineSpec
    width: int
    parameters: list[Tensor]
    grad_inputs: list[Tensor]
    has_backward: bool
    sums: Sequence[Sum]
    distribution: Distribution
    backward_actions: Collection[Action]

    def run_forward(self) -> tuple[Tensor, list[Tensor]]: ...

    def run_backward(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]: ...


class ParameterAccess:
    """Plain tensors, which are there whenever a tile runs. Other kinds derive from it.

    Objects are made for one step.

    Args:
        backward_context: makes the context in which the backward runs, which puts the model back as it was in
            the forward: a caller may have replaced its tensors for the forward alone.

    Attributes:
        frozen_may_change: whether somebody may write to frozen parameters between forward and backward.
    """

    frozen_may_change = True

    def __init__(self, backward_context: ContextFactory = contextlib.nullcontext) -> None:
        self.backward_context = backward_context

    def arrange(
        self, stages: Sequence[Stage | None], states: Sequence[State]
    ) -> tuple[list[Stage | None], Sequence[State]]:
        """Return the stages and their initial states, one tuple per stage, as the engine runs them."""
        return list(stages), states

    def verify(self, step: Runs) -> None:
        """Compare what chunks compute with what the whole computes, where layers are not ours; on first use.

        Raises:
            Refused: they differ.
        """
        if len(step.spec.cuts(step.batch.seqlen)) > 2:  # more than one chunk
            verify_custom_layers(step.stages, step.batch.states, step.width, step.batch.ids.device)

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Prepare for a step; return the spec with the chunks that all processes can run.

        Raises:
            UserError: the weights cannot be had for such a batch or spec.
        """
        return spec

    def gradients(self, parameters: Sequence[Tensor], has_backward: bool, is_alone: bool) -> Gradients:
        """Return empty sums of the gradients.

        Args:
            is_alone: as in `Distribution`.
        """
        unlisted = UnlistedLeaves(parameters, open=has_backward and is_alone)
        return Gradients(unlisted, parameters if has_backward else ())

    def check(self, executor: Executor, has_backward: bool) -> None:
        """Raise a UserError if an executor's precision does not go with these weights."""

    def windows(self, widths: list[int]) -> list[int]:
        """Return the windows of all stateful stages, from those that this process's share of them needs."""
        return widths

    def forward(self, step: Runs) -> tuple[Tensor, list[Tensor]]:
        """Run a step's forward, and whatever has to come at once: see `ChunkedStep.forward`."""
        return step.run_forward()

    def backward(
        self, step: Runs, d_loss: Tensor | None, d_final: Sequence[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Run a step's backward: see `ChunkedStep.backward`."""
        return step.run_backward(d_loss, d_final)
