"""Steps that hang together: one begins with the final states that an earlier one has returned.

A backward through the later step goes on into the earlier one, whose executor holds what that needs. A state
whose graph leads to nothing that can still get a gradient is a value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from adjoint.kernels.checks import differentiable_once

# Attribute of the node of a step's results: the step, or None once a backward has freed its graph.
STEP = "chunked_step"
# Attribute of the node of a `ReturnedState`: an alias of the copy, and its version when it was made.
COPY = "returned_copy"


class ReturnedState(torch.autograd.Function):
    """A copy of a step's final state, for users to hold.

    Others may change it in place without gradients, as generation does. It is then a value, which
    `goes_on_from` sees by the version of an alias: the tensor's own graph would lead to the old state."""

    @staticmethod
    def forward(ctx: FunctionCtx, state: Tensor) -> Tensor:
        copy = state.clone()
        setattr(ctx, COPY, (copy.detach(), copy._version))
        return copy

    @staticmethod
    @differentiable_once("a state by chunks")
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> Tensor:
        if frees_graph():
            setattr(ctx, COPY, None)
        return cotangent


def frees_graph() -> bool:
    """Whether the backward that runs now frees the graph, as it does without `retain_graph`."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return not keeps


def goes_on_from(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a state for a step to begin with; its tensors are detached where no gradient can go on.

    That is where backwards have freed all steps that a tensor comes from, or where it was changed in place
    without gradients. Steps that can still be reached drop the tapes of their last chunks: their backwards
    come after this step's, and until then a tape of each would add up."""
    return tuple(tensor if _can_get_gradient(tensor) else tensor.detach() for tensor in state)


def _can_get_gradient(tensor: Tensor) -> bool:
    """Whether a tensor's graph leads to a leaf, or to a step whose backward can still run."""
    if tensor.grad_fn is None:
        return tensor.requires_grad
    nodes: list[Node] = [tensor.grad_fn]
    visited = set[Node]()
    while nodes:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.name().endswith("AccumulateGrad"):
            return True
        marks = getattr(node, "__dict__", {})  # those that our autograd functions have set
        if STEP in marks:
            if marks[STEP] is not None:
                marks[STEP].drop_tapes()
                return True
        elif (copy := marks.get(COPY)) is None or copy[0]._version == copy[1]:
            nodes += [before for before, _ in node.next_functions if before is not None]
    return False
