"""`Weights`: how a model's weights are held, for any code that runs the model.

`parallel.access` picks the kind that a model needs; no other file asks how its weights are held. How a step's
backward reaches them is a `Sweep`, which the kind makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.sweep import ContextFactory, Sweep

REPLICA = (
    "nn.DataParallel calls replicas without parameters, in which chunks leave no gradients: start a process "
    "for each GPU (torchrun --nproc-per-node N train.py), or show one GPU alone (CUDA_VISIBLE_DEVICES=0)"
)
T = TypeVar("T")


class Weights:
    """Plain tensors, which are there whenever a module or a tile runs. Other kinds derive from it.

    An object is made for one call.

    Args:
        model: the model that has them; without one, only a sweep can be asked for.
        root: the outermost module around it that holds weights, if that is another one.

    Attributes:
        name: what users call this kind, in messages.
        is_gathered: whether processes gather each weight at the same time, while its layer runs, and reduce
            its gradient in that layer's backward. So all run the same trials and the same number of chunks,
            and the backward of a chunk runs inside the step's forward, before the gradient of the loss is
            known.
        copies_from_host: whether a layer's weights are copied from host memory each time that it runs.
        can_copy: whether modules can be copied, for a trial.
    """

    name: ClassVar[str] = "plain tensors"
    is_gathered: ClassVar[bool] = False
    copies_from_host: ClassVar[bool] = False
    can_copy: ClassVar[bool] = True

    def __init__(self, model: nn.Module | None = None, root: nn.Module | None = None) -> None:
        self.model = nn.Module() if model is None else model
        self.root = self.model if root is None else root

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        """Whether a model's weights are held in this way."""
        return True

    def rest(self) -> None:
        """Put what holds weights between calls back in their place; gradients accumulate there."""

    def running_parameters(self) -> set[Tensor]:
        """Return the parameters as modules see them while they run."""
        return set(self.model.parameters())

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which may run the model's modules one by one."""
        return call()

    def begin_plain_call(self) -> dict[Tensor, Tensor]:
        """Prepare for a forward and a backward of the model itself; return what stands in the place of
        parameters meanwhile."""
        return {}

    def abandon_call(self) -> None:
        """Prepare for the next call of the model after one whose forward has raised an error."""

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

    def sweep(self, backward_context: ContextFactory = contextlib.nullcontext) -> Sweep:
        """Return how a step runs forward and back with these weights.

        Args:
            backward_context: makes the context in which the backward runs, which puts the model back as it
                was in the forward: a caller may have replaced its tensors for the forward alone.
        """
        return Sweep(backward_context)


def trained_parameters(weights: Weights) -> list[Tensor]:
    """Return the parameters with requires_grad, to whose `.grad` gradients are added."""
    weights.rest()
    return [p for p in weights.model.parameters() if p.requires_grad]


def precisions(weights: Weights) -> set[torch.dtype]:
    """Return the dtypes of floating-point weights, between calls and while modules run."""
    parameters = {*weights.model.parameters(), *weights.running_parameters()}
    return {p.dtype for p in parameters if p.is_floating_point()}


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape that a parameter has while modules run: ZeRO-3 empties it between."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_replica(model: nn.Module) -> bool:
    """Whether `nn.DataParallel` made the model for one call."""
    return vars(model).get("_is_replica", False)
