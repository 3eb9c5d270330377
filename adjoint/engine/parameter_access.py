"""`ParameterAccess`: how stages get a model's weights, and how gradients are returned to them.

`parallel.access` picks the kind that a model needs; no other file asks how its weights are held."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from adjoint.batch import Batch, State
from adjoint.engine.custom_layers import verify_custom_layers
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, Grid
from adjoint.engine.layer_run import as_runs
from adjoint.engine.leaves import UnlistedLeaves
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.schedule import Action
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.engine.tile import Gradients

ContextFactory = Callable[[], contextlib.AbstractContextManager[object]]
REPLICA = (
    "nn.DataParallel calls replicas without parameters, in which chunks leave no gradients: start a process "
    "for each GPU (torchrun --nproc-per-node N train.py), or show one GPU alone (CUDA_VISIBLE_DEVICES=0)"
)
T = TypeVar("T")


class Runs(Protocol):
    """The part of a `step.ChunkedStep` that a `ParameterAccess` reads and calls."""

    executor: Executor
    grid: Grid
    stages: list[Stage | None]
    batch: Batch
    spec: EngineSpec
    width: int
    parameters: list[Tensor]
    has_backward: bool
    sums: Sequence[Sum]
    distribution: Distribution
    backward_actions: Collection[Action]

    @property
    def grad_inputs(self) -> Sequence[Tensor]: ...

    def drop_executor(self) -> None: ...

    def run_forward(self) -> tuple[Tensor, list[Tensor]]: ...

    def run_backward(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]: ...


class ParameterAccess:
    """Plain tensors, which are there whenever a module or a tile runs. Other kinds derive from it.

    An object is made for one call, and serves one step at most.

    Args:
        model: the model whose weights are accessed; without one, only a step can be asked for.
        root: the outermost module around it that holds weights, if that is another one.
        backward_context: makes the context in which the backward runs, which puts the model back as it was in
            the forward: a caller may have replaced its tensors for the forward alone.

    Attributes:
        name: what users call this kind, in messages.
        is_collective: whether processes must gather each weight at the same time, so that all run the same
            trials and the same number of chunks.
        runs_backward_in_forward: whether the backward of each chunk runs in the step's forward, before the
            gradient of the loss is known.
        is_on_device: whether all weights are on the device all the time, so that copies of them, cast for
            autocast, can be too.
        copies_from_host: whether a layer's weights are copied from host memory each time that it runs.
        hooks_modules: whether every module has hooks, which gather its weights and change no result.
        frozen_may_change: whether somebody may write to frozen parameters between forward and backward.
    """

    name: ClassVar[str] = "plain tensors"
    is_collective: ClassVar[bool] = False
    runs_backward_in_forward: ClassVar[bool] = False
    is_on_device: ClassVar[bool] = True
    copies_from_host: ClassVar[bool] = False
    hooks_modules: ClassVar[bool] = False
    frozen_may_change: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module | None = None,
        root: nn.Module | None = None,
        backward_context: ContextFactory = contextlib.nullcontext,
    ) -> None:
        self.model = nn.Module() if model is None else model
        self.root = self.model if root is None else root
        self.backward_context = backward_context

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether a model's weights are held in this way."""
        return True

    # ---------------------------------------------------------------------------- for any code of the model

    def rest(self) -> None:
        """Put what holds weights between calls back in their place; gradients accumulate there."""

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters with requires_grad, to whose `.grad` gradients are added."""
        self.rest()
        return [p for p in self.model.parameters() if p.requires_grad]

    def precisions(self) -> set[torch.dtype]:
        """Return the dtypes of floating-point weights while modules run."""
        return {p.dtype for p in self.model.parameters() if p.is_floating_point()}

    def shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape that a parameter has while modules run."""
        return parameter.shape

    def recompute(self, recompute: str) -> str:
        """Return how much of a layer's tape is recomputed at least: see `methods.Exact`."""
        return recompute

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which may run the model's modules one by one."""
        return call()

    def fetched(self, *modules: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which weights of some modules are on the device, outside of their forwards."""
        return contextlib.nullcontext()

    def begin_plain_call(self) -> None:
        """Prepare for a forward and a backward of the model itself."""

    def abandon_call(self) -> None:
        """Prepare for the next call of the model after one whose forward has raised an error."""

    def plain_weights(self) -> dict[Tensor, Tensor]:
        """Return what stands in the place of parameters while a plain call runs."""
        return {}

    def can_copy(self) -> bool:
        """Whether modules can be copied, for a trial."""
        return True

    def largest(self, *values: float) -> Sequence[float]:
        """Return the maximum of each value over the processes that hold parts of the weights."""
        return values

    def loss_and_gradients(
        self, parameters: Sequence[Tensor], compute_loss: Callable[[], Tensor]
    ) -> tuple[float, dict[Tensor, Tensor]]:
        """Return a loss of the model and the gradients of parameters by plain autograd.

        No hook on their accumulation runs, and `.grad` stays as it was."""
        leaves = {p: p.detach().requires_grad_() for p in parameters}
        with ModuleTensors(self.model).replaced(leaves):
            loss = compute_loss()
        if not loss.requires_grad:
            return float(loss.detach()), {}
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        by_parameter = {p: d for p, d in zip(parameters, gradients, strict=True) if d is not None}
        return float(loss.detach()), by_parameter

    def why_not_shared(self, group: object) -> str | None:
        """Return why the ranks of a group cannot share a sequence of the model; None if they can."""
        return None

    # ------------------------------------------------------------------------------------------ for a step

    def arrange(
        self,
        stages: Sequence[Stage | None],
        states: Sequence[State],
        runs: Sequence[int],
    ) -> tuple[list[Stage | None], Sequence[State]]:
        """Return the stages and their initial states, one tuple per stage, as the engine runs them.

        Args:
            runs: as `Distribution.runs` returns them.
        """
        return as_runs(stages, states, runs) if len(stages) > 1 else ([*stages], states)

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
        return Gradients(UnlistedLeaves(parameters, open=has_backward and is_alone))

    def autograd_inputs(self, leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the inputs of a step's node in autograd's graph, to which its backward returns gradients.

        Args:
            leaves: trainable tensors that the stages have read.
            device: of the step.
        """
        return [*leaves]

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


def is_replica(model: nn.Module) -> bool:
    """Whether `nn.DataParallel` made the model for one call."""
    return vars(model).get("_is_replica", False)
