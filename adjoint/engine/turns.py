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
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.model import CallT, ChunkedModel, SharedRows
from adjoint.engine.shared_prefix import (
    Beginning,
    End,
    Segment,
    run_segments,
    states_in_batch_order,
)
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
    """Return the trees of a call's segments, of so many chunks each, those with most chunks first."""
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

    Turn i has as many chunks as any process's i-th tree, those with most chunks being first. A tree goes to
    the first turn that has room for it: of the turns up to its own number, one is empty."""
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
        d_states: cotangents of its final states; None where there is none yet.
        hidden: its hidden states, if they are asked for.
    """

    step: ChunkedStep
    loss: Tensor
    final: list[Tensor]
    parent: Node | None
    parent_rows: Sequence[int]
    d_states: list[Tensor | None]
    hidden: Tensor | None = None

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
            total = self.d_states[place] = torch.zeros_like(state) if total is None else total
            total.index_add_(0, torch.tensor(rows, device=d.device), d.to(total.dtype))

    def run_back(self, is_last: bool) -> tuple[dict[Tensor, Tensor], list[Tensor | None]]:
        """Run the step back; arguments and results as `ChunkedStep.run_back` has them.

        States from which no step has gone on get zeros: DeepSpeed counts the outputs of modules that have a
        cotangent, and compares the numbers of all processes."""
        pairs = zip(self.d_states, self.final, strict=True)
        d_states = [torch.zeros_like(state) if d is None else d for d, state in pairs]
        return self.step.run_back(self.loss, self.final, d_states, is_last)


class Turns(Generic[CallT]):
    """The segments of one call in turns, which run when a result is asked for, once.

    Args:
        model: whose weights are gathered. call: of the model.
        shared: the call's segments, or none: then it runs as it is, beside those of other processes.
        returns_states: whether the final states are asked for, with keys and values.

    Attributes:
        states: the final states of the call's rows, with `returns_states`; else there are none.
    """

    def __init__(
        self, model: ChunkedModel[CallT], call: CallT, shared: SharedRows, returns_states: bool
    ) -> None:
        self.model, self.call, self.segments = model, call, shared.segments
        self.returns_states = returns_states
        self.states: list[State] = []
        self._lead: ChunkedStep | None = None  # to whose node in autograd's graph all gradients belong
        self._nodes: list[Node] = []  # of this turn
        self._losses: list[Tensor] = []
        self._hidden: dict[int, Tensor] = {}  # by number of the segment
        self._gradients: dict[Tensor, Tensor] = {}
        self._others: dict[Tensor, Tensor] = {}  # gradients of tensors that nobody gathers
        self._d_initial: list[Tensor | None] = []  # of the lead

    def loss(self) -> tuple[Tensor, list[State]]:
        """Return the mean loss and the final states, differentiable."""
        lead = self._run(collects=False)
        total = torch.stack(self._losses).sum()
        if not lead.has_backward:
            return total, self.states
        listed = {id(t) for t in lead.grad_inputs}
        unlisted = [t for t in self._others if id(t) not in listed]  # that later steps alone have reached

        def back(
            d_loss: Tensor | None, *d_states: Tensor | None
        ) -> tuple[Gradients, Sequence[Tensor | None]]:
            gradients, d_initial = lead.backward(d_loss, d_states)
            return gradients, [*d_initial, *map(gradients.get, unlisted)]

        results = [total, *(s for state in self.states for s in state)]
        loss, *states = lead.differentiable(results, back, unlisted)
        return loss, grouped(self.states, states)

    def hidden_states(self) -> list[Tensor]:
        """Return the hidden states of each segment, or of the call, without gradients."""
        self._run(collects=True)
        return [self._hidden[number] for number in sorted(self._hidden)]

    def _trees(self) -> list[Tree]:
        """Return the trees of the call's segments; without segments, one that stands for the call."""
        if self.segments:
            chunks = [self.model.chunks_of(self.call, segment) for segment in self.segments]
            return trees_of(self.segments, chunks)
        batch, spec = self.model.cut(self.call)
        return [Tree([Segment(0, batch.seqlen, [])], [0], len(spec.cuts(batch.seqlen)) - 1)]

    def _run(self, collects: bool) -> ChunkedStep:
        """Run all turns; return the lead.

        Args:
            collects: whether hidden states are asked for, in place of the loss.
        """
        weights, final = self.model.weights(), dict[int, list[State]]()
        turns = agree_on_turns(weights, self._trees())
        weights.rest()
        with contextlib.ExitStack() as contexts:
            for turn in turns:
                for tree in turn.trees:
                    is_last = tree is turn.trees[-1] and not turn.idle_chunks
                    final |= self._run_tree(tree, contexts, collects, is_last)
                for rest in reversed(range(turn.idle_chunks)):
                    self._forward(self.model.idle_call(self.call), contexts, collects, is_last=rest == 0)
                self._run_back(is_last=turn is turns[-1])
        lead = self._lead
        assert lead is not None
        if lead.has_backward:
            lead.sweep.keep(self._gradients, self._others, self._d_initial, _trained(lead), lead.distribution)
        if self.returns_states:
            self.states = states_in_batch_order(self.segments, final) if self.segments else final[0]
        return lead

    def _run_tree(
        self, tree: Tree, contexts: contextlib.ExitStack, collects: bool, is_last: bool
    ) -> dict[int, list[State]]:
        """Run a tree forward; return the final states of segments without branches, by number in the call.

        Args:
            contexts, collects, is_last: as in `_forward`; the last one of its last segment.
        """
        nodes = list[Node]()

        def run(number: int, segment: Segment, beginning: Beginning | None) -> End:
            inner, is_end = self.call, is_last and number == len(tree.segments) - 1
            if self.segments:
                inner = self.model.segment_call(self.call, segment, beginning)
            parent = None if segment.parent is None else nodes[segment.parent]
            node = self._forward(inner, contexts, collects, is_end, parent, segment.parent_rows)
            nodes.append(node)
            if node.hidden is not None:
                self._hidden[tree.numbers[number]] = node.hidden
            return End(node.states, node.step.slabs)

        ends = run_segments(tree.segments, run, self.returns_states)
        chunks = sum(node.step.grid.chunks for node in nodes)
        assert chunks == tree.chunks, "processes have agreed on another number of chunks"
        return {tree.numbers[number]: states for number, states in ends.items()}

    def _forward(
        self,
        inner: CallT,
        contexts: contextlib.ExitStack,
        collects: bool,
        is_last: bool,
        parent: Node | None = None,
        parent_rows: Sequence[int] = (),
    ) -> Node:
        """Run a call forward.

        Args:
            contexts: of all turns, which the first step enters.
            collects: as in `_run`.
            is_last: whether no other step of the turn follows: its backward is the first one.
            parent, parent_rows: as in `Node`.
        """
        batch, spec = self.model.cut(inner)
        collect = CollectHiddenStates(batch.seqlen) if collects else None
        spec = spec if is_last else spec.without_tapes()
        step = self.model.step(inner, batch, spec, collect=collect)
        if self._lead is None:
            self._lead = step
            if step.has_backward:
                self._gradients = contexts.enter_context(step.sweep.collected(_trained(step), True))
        loss, results = step.forward_in_turn(self.returns_states)
        states = results[: len(results) - len(step.sums)]
        hidden = None if collect is None else collect.hidden
        node = Node(step, loss, states, parent, parent_rows, [None] * len(states), hidden)
        self._nodes.append(node)
        self._losses.append(loss)
        return node

    def _run_back(self, is_last: bool) -> None:
        """Run the turn's steps back, the last one first; `is_last`: no other turn follows."""
        nodes, self._nodes = self._nodes, []
        while nodes:
            node = nodes.pop()
            if not node.step.has_backward:
                continue
            others, d_initial = node.run_back(is_last=is_last and not nodes)
            for tensor, gradient in others.items():
                total = self._others.setdefault(tensor, gradient)
                if total is not gradient:
                    total += gradient
            if node.step is self._lead:
                self._d_initial = d_initial
            if node.parent is not None:
                node.parent.add_cotangents(d_initial, node.parent_rows)


def _trained(step: ChunkedStep) -> list[Tensor]:
    return [p for p in step.parameters if p.requires_grad]
