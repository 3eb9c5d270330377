"""The steps of one call in turns that all processes take together, where they gather weights per chunk.

Each chunk then gathers weights, and reduces gradients in its backward, in all processes at once, and its
backward runs inside the forward. A call of several segments (`shared_prefix`, `short_documents`) is computed
in turns: in each, a process runs a tree of segments forward and, from the last one, back. Processes have
different numbers of segments, of different lengths. So they agree on the number of chunks of each turn, and
who has fewer runs idle ones, of tokens that do not count.

    rank 0   F F F B RB RB   F B   F B     F: forward; its last chunk keeps its tape
    rank 1   F i i B RB RB   F B   i B     RB: forward again, for the tape, and backward; i: idle

The gradients of all turns are one node of autograd's graph, whose backward multiplies them by the loss's
factor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.engine.shared_prefix import Segment
from adjoint.engine.step import ChunkedStep, grouped
from adjoint.engine.tile import Gradients
from adjoint.engine.weights import Weights
from adjoint.layers import State


class Tree(NamedTuple):
    """Segments that go on from each other, parents first.

    Attributes:
        segments: their parents are numbers in the tree.
        numbers: of the same segments in the call.
        chunks: of all of them together.
    """

    segments: list[Segment]
    numbers: list[int]
    chunks: int


def trees_of(segments: Sequence[Segment], chunks: Sequence[int]) -> list[Tree]:
    """Return the trees of a call's segments, those with most chunks first.

    Args:
        chunks: number of chunks of each segment.
    """
    roots: list[int] = []
    for number, segment in enumerate(segments):
        roots.append(number if segment.parent is None else roots[segment.parent])
    trees = list[Tree]()
    for root in dict.fromkeys(roots):
        numbers = [number for number, other in enumerate(roots) if other == root]
        places = {number: place for place, number in enumerate(numbers)}
        renumbered = list[Segment]()
        for number in numbers:
            parent = segments[number].parent
            renumbered.append(segments[number]._replace(parent=None if parent is None else places[parent]))
        trees.append(Tree(renumbered, numbers, sum(chunks[n] for n in numbers)))
    return sorted(trees, key=lambda tree: -tree.chunks)


class Turn(NamedTuple):
    """The trees that a process runs in one turn, of `chunks` chunks in all processes."""

    trees: list[Tree]
    chunks: int

    @property
    def idle_chunks(self) -> int:
        return self.chunks - sum(tree.chunks for tree in self.trees)


def agree_on_turns(weights: Weights, trees: Sequence[Tree]) -> list[Turn]:
    """Return the turns in which this process runs its trees, as many as each that gathers these weights.

    Turn i has as many chunks as any process's i-th tree. A tree goes to the first turn that has room for it:
    of the turns up to its own number, one is empty.

    Args:
        trees: those with most chunks first.
    """
    (most,) = weights.largest(len(trees))
    sizes = weights.largest(*[tree.chunks for tree in trees], *[0] * (int(most) - len(trees)))
    turns = [Turn([], int(chunks)) for chunks in sizes]
    for tree in trees:
        next(turn for turn in turns if turn.idle_chunks >= tree.chunks).trees.append(tree)
    (used,) = weights.largest(sum(bool(turn.trees) for turn in turns))
    return turns[: int(used)]


@dataclasses.dataclass
class Node:
    """A step that has run forward.

    Attributes:
        loss, final: its results.
        parent: the step from whose final states it began, or None.
        parent_rows: for each row, the row of that step.
        d_states: cotangents of its final states.
    """

    step: ChunkedStep
    loss: Tensor
    final: list[Tensor]
    parent: Node | None
    parent_rows: Sequence[int]
    d_states: list[Tensor | None]

    @property
    def states(self) -> list[State]:
        """The final states, one tuple per stage of the model."""
        return grouped(self.step.model_states, self.final)

    def add_cotangents(self, d_initial: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        """Add the cotangents of states that a step has begun with, each row to the one it is a copy of."""
        for place, (state, d) in enumerate(zip(self.final, d_initial, strict=False)):
            if d is None or not d.numel():  # keys and values stay in the slabs, which have their cotangents
                continue
            total = self.d_states[place]
            total = torch.zeros_like(state) if total is None else total
            self.d_states[place] = total.index_add_(0, torch.tensor(rows, device=d.device), d.to(total.dtype))


class StepsInTurns:
    """A context in which the steps of one call run, and back in turns.

    Attributes:
        total: the sum of their losses.
        lead: the first step, to whose node in autograd's graph the gradients of all belong.
    """

    total: Tensor
    lead: ChunkedStep | None = None

    def __init__(self) -> None:
        self._contexts = contextlib.ExitStack()
        self._nodes: list[Node] = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._others: dict[Tensor, Tensor] = {}
        self._d_initial: list[Tensor | None] = []

    def __enter__(self) -> StepsInTurns:
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.__exit__(*error)  # type: ignore[arg-type]
        if self.lead is not None and self.lead.has_backward and error[0] is None:
            lead, trained = self.lead, _trained(self.lead)
            lead.sweep.keep(self._gradients, self._others, self._d_initial, trained, lead.distribution)

    def forward(
        self,
        step: ChunkedStep,
        returns_states: bool = False,
        parent: Node | None = None,
        parent_rows: Sequence[int] = (),
    ) -> Node:
        """Run a step forward.

        Args:
            returns_states: whether keys and values are among its final states.
            parent, parent_rows: the step of this turn from whose states it begins, and the row of each row.
        """
        if self.lead is None:
            self.lead = step
            if step.has_backward:
                self._gradients = self._contexts.enter_context(step.sweep.collected(_trained(step), True))
        loss, final = step.forward_in_turn(returns_states)
        self.total = self.total + loss if hasattr(self, "total") else loss
        final = final[: len(final) - len(step.sums)]
        node = Node(step, loss, final, parent, parent_rows, [None] * len(final))
        self._nodes.append(node)
        return node

    def run_back(self, is_last: bool) -> None:
        """Run this turn's steps back, the last one first; `is_last`: no other turn follows."""
        nodes, self._nodes = self._nodes, []
        while nodes:
            node = nodes.pop()
            if not node.step.has_backward:
                continue
            step, is_end = node.step, is_last and not nodes
            others, d_initial = step.run_back(node.loss, node.final, node.d_states, is_end)
            for tensor, gradient in others.items():
                total = self._others.setdefault(tensor, gradient)
                if total is not gradient:
                    total += gradient
            if step is self.lead:
                self._d_initial = d_initial
            if node.parent is not None:
                node.parent.add_cotangents(d_initial, node.parent_rows)

    def differentiable(self, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """Return the summed loss and the call's final states, differentiable; the turns must have ended."""
        lead = self.lead
        assert lead is not None
        if not lead.has_backward:
            return self.total, list(states)
        listed = {id(t) for t in lead.grad_inputs}
        more = [t for t in self._others if id(t) not in listed]

        def back(
            d_loss: Tensor | None, *d_states: Tensor | None
        ) -> tuple[Gradients, Sequence[Tensor | None]]:
            gradients, d_initial = lead.backward(d_loss, d_states)
            return gradients, [*d_initial, *map(gradients.get, more)]

        results = [self.total, *(s for state in states for s in state)]
        loss, *flat = lead.differentiable(results, back, more)
        return loss, grouped(states, flat)


def _trained(step: ChunkedStep) -> list[Tensor]:
    return [p for p in step.parameters if p.requires_grad]
