"""`Sweep`: how one step runs forward and back through a model whose weights are held in some way.

With plain tensors the backward comes later, as autograd asks for it. Where weights are gathered
(`parallel.fsdp`), each chunk's backward runs at once, inside the step's forward. A step calls its sweep; a
sweep calls no step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from adjoint.batch import Batch, State
from adjoint.engine.custom_layers import verify_custom_layers
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec
from adjoint.engine.layer_run import as_runs
from adjoint.engine.leaves import UnlistedLeaves
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.engine.tile import Gradients

ContextFactory = Callable[[], contextlib.AbstractContextManager[object]]


class Sweep:
    """A forward, and a backward when autograd asks for it, with plain tensors as weights. Others derive.

    An object is made for one step.

    Attributes:
        backward_context: as in `Weights.sweep`.
        runs_back_in_forward: whether each chunk's backward runs inside the step's forward. A sweep that does
            has `collected`, `cotangents`, `keep` and `scaled`.
    """

    runs_back_in_forward: ClassVar[bool] = False

    def __init__(self, backward_context: ContextFactory = contextlib.nullcontext) -> None:
        self.backward_context = backward_context

    # ------------------------------------------------------------------------------------ before the forward

    def arrange(
        self,
        stages: Sequence[Stage | None],
        states: Sequence[State],
        runs: Sequence[int],
        segment_layers: int | None,
    ) -> tuple[list[Stage | None], Sequence[State]]:
        """Return the stages and their initial states, one tuple per stage, as the engine runs them.

        Args:
            runs: as `Distribution.runs` returns them.
            segment_layers: number of layers into which a stage is divided, if it can be; None: it stays.
        """
        arranged, states = as_runs(stages, states, runs) if len(stages) > 1 else ([*stages], states)
        if segment_layers is None:
            return arranged, states
        pairs = [
            pair
            for stage, state in zip(arranged, states, strict=True)
            for pair in ([(stage, state)] if stage is None else stage.divided(segment_layers, state))
        ]
        return [stage for stage, _ in pairs], [state for _, state in pairs]

    def verify(
        self,
        stages: Sequence[Stage | None],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        distribution: Distribution,
    ) -> None:
        """Refuse layers that are not ours if chunks compute something else than the whole; on first use."""
        if len(spec.cuts(batch.seqlen)) > 2:  # more than one chunk
            verify_custom_layers([*stages], batch.states, width, batch.ids.device)

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Prepare for a step; return the spec with the chunks that all processes can run.

        Raises:
            UserError: the weights cannot be had for such a batch or spec.
        """
        return spec

    def begin_in_turn(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Do what `begin` does, for one of the steps of a call on whose chunks processes have agreed.

        Each process has its own number of steps, so nothing here may wait for another one."""
        return self.begin(batch, spec, distribution)

    def check(self, executor: Executor, has_backward: bool) -> None:
        """Raise a UserError if an executor's precision does not go with these weights."""

    def gradients(self, parameters: Sequence[Tensor], has_backward: bool, is_alone: bool) -> Gradients:
        """Return empty sums of the gradients.

        Args:
            is_alone: as in `Distribution`.
        """
        return Gradients(UnlistedLeaves(parameters, open=has_backward and is_alone))

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the program of a forward or of a backward runs."""
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------- after the forward

    def autograd_inputs(self, leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the inputs of a step's node in autograd's graph, to which its backward returns gradients.

        They are made of the trainable tensors that the stages have read."""
        return [*leaves]

    def windows(self, widths: list[int]) -> list[int]:
        """Return the windows of all stateful stages, from those that this process's share of them needs."""
        return widths

    def finish(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        """Complete the sums of the gradients of a step's parameters after a backward."""

    # --------------------------------------------------------------- where chunks run back inside the forward

    def collected(
        self, parameters: Sequence[Tensor], has_work: bool
    ) -> contextlib.AbstractContextManager[dict[Tensor, Tensor]]:
        """Return a context that collects the parameters' gradients, which are in its dict at the end.

        Args:
            has_work: False if no process that has a part of the weights has a chunk.
        """
        raise NotImplementedError

    def cotangents(
        self, loss: Tensor, final: Sequence[Tensor], sums: Sequence[Sum], start_of_last: int | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the cotangents with which chunks run back: of the loss, of the final states and sums.

        Args:
            loss, final: results of the forward.
            start_of_last: first token of the chunk whose backward is this process's last of the call; None if
                another step has it.
        """
        raise NotImplementedError

    def keep(
        self,
        gradients: dict[Tensor, Tensor],
        others: Mapping[Tensor, Tensor],
        d_initial: list[Tensor | None],
        parameters: Sequence[Tensor],
        distribution: Distribution,
    ) -> None:
        """Keep the results of the chunks' backwards for the factor that the loss's backward brings.

        Args:
            gradients: collected. others: those of tensors that nobody gathers.
            parameters: the trained ones. d_initial: cotangents of the initial states.
        """
        raise NotImplementedError

    def scaled(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None], sums: Sequence[Sum]
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Return what is kept, times the factor of the loss, once.

        Raises:
            UserError: processes have different factors, or a final state has a cotangent.
        """
        raise NotImplementedError
