"""Leaves of a tile's graph that no stage lists.

Stages list their parameters, but users' code reaches other tensors: a hook's own parameter, modules in a
plain list, an attribute that another network has made. The graph of the tile shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from adjoint.errors import UserError

T = TypeVar("T")
TILE_LEAF_MARK = "_adjoint_leaf"  # name of the attribute by which leaves made for one tile are recognised
# attribute of a tile's leaf: a function that takes a part of its gradient, still on its way to host memory,
# around autograd, which would read the values at once
TAKE_ARRIVING = "_adjoint_take_arriving"


class ChunkChangedError(RuntimeError):
    """A chunk that depends on more than its input and its state.

    Recomputed for the backward it has another loss, or its graph goes on into another chunk's."""


class UnlistedLeaves:
    """Trainable tensors that the tiles of one call read although no stage lists them.

    They are found in the graph of the forward's last chunk, whose tape is kept, and become inputs of the
    call's autograd function like parameters. Every later tile's graph must begin at these or at listed ones.

    Not every leaf of a tile's graph is such an input. A tile may make leaves itself, such as an embedding's
    output under `enable_input_require_grads`; their gradients go nowhere, as in plain autograd. To tell them
    apart a tile that has unknown leaves runs twice (`run_tile`): an input is the same tensor both times.

    Args:
        listed: tensors whose gradients are asked for anyway.
        left_to_autograd: leaves that are no concern here: autograd itself adds to their `.grad`.
        open: whether unlisted tensors are still accepted; else they are refused.

    Attributes:
        leaves: unlisted leaves. Their gradients are asked for directly.
        precomputed: unlisted tensors that have a graph of their own, made before the call. Tiles see leaves
            in their place: the first tile's backward through that graph would free it for the others.
        nodes: the graph nodes that made the precomputed tensors, by which these are recognised.
        first_run: while `run_tile` runs a tile again, the leaves of its first run; None during the first.
        runs_again: whether `run_tile` runs a tile again.
    """

    def __init__(
        self, listed: Iterable[Tensor] = (), left_to_autograd: Collection[Tensor] = (), open: bool = False
    ) -> None:
        self.listed, self.left_to_autograd, self.open = set(listed), left_to_autograd, open
        self.leaves: dict[Tensor, None] = {}
        self.precomputed: dict[Tensor, None] = {}
        self.nodes: set[Any] = set()
        self.first_run: Collection[Tensor] | None = None
        self.runs_again = False

    def close(self) -> list[Tensor]:
        """Accept no more tensors, and return those that were found and are not listed."""
        self.open = False
        self.nodes.clear()
        return [t for t in (*self.leaves, *self.precomputed) if t not in self.listed]

    def make_stand_ins(self) -> StandIns | None:
        """Return the mode for a tile's forward that replaces `precomputed` by leaves; None if it is empty."""
        return StandIns(self) if self.nodes or self.precomputed else None

    def collect(self, outputs: Sequence[Tensor], tile_inputs: Collection[Tensor], begin: int) -> list[Tensor]:
        """Return the leaves of a tile's graph, other than its inputs, whose gradients must be asked for too.

        Args:
            outputs: the tile's outputs. tile_inputs: leaves whose gradients are asked for anyway.
            begin: sequence number of the tile's first node (`next_node`); older nodes are from before it.

        Raises:
            RunAgain: the tile must run again before this can be told; `run_tile` does it.
            ChunkChangedError: the graph begins at another tile's leaf.
            UserError: a tensor is found too late, or in a call that may have none.
        """
        leaves = [t for t in leaves_of(outputs) if t not in tile_inputs and t not in self.left_to_autograd]
        if not leaves:
            return leaves
        if [t for t in leaves if TILE_LEAF_MARK in vars(t)]:
            raise ChunkChangedError(
                "a chunk reads a tensor that a module kept from another chunk, with its graph: detach what "
                "is kept"
            )
        if self.open:
            nodes = nodes_made_before(outputs, begin)
            # These nodes are known from an earlier run, so `StandIns` should have hidden them. It could not:
            # arguments of an autograd.Function do not pass through __torch_function__.
            if nodes and nodes <= self.nodes:
                names = ", ".join(sorted(node.name() for node in nodes))
                raise UserError(
                    "an autograd function gets a tensor t that was computed, with a graph, before the call "
                    f"({names}); chunks cannot separate the two graphs: give the function t * 1"
                )
            if nodes:
                raise RunAgain(nodes=nodes)
        unlisted = [t for t in leaves if t not in self.listed and t not in self.leaves]
        if not unlisted:
            return leaves
        if self.first_run is None:
            raise RunAgain(leaves=unlisted)
        inputs = [t for t in unlisted if t in self.first_run]
        if inputs and not self.open:
            raise UserError(
                f"chunks read a tensor of shape {tuple(inputs[0].shape)} that requires a gradient and is no "
                "parameter of a module. It gets one only in a single process, and if the last chunk "
                "reads it: register it as a parameter"
            )
        self.leaves |= dict.fromkeys(inputs)
        return [t for t in leaves if t in self.listed or t in self.leaves]

    def run_tile(self, run: Callable[[], T]) -> T:
        """Return run(), which is called again each time that it raises RunAgain.

        The first run finds unknown leaves, the second tells inputs from leaves that the tile makes; graphs
        from before the call take another run, with `StandIns` for them."""
        try:
            while True:
                try:
                    return run()
                except RunAgain as again:
                    self.nodes |= again.nodes
                    self.first_run, self.runs_again = again.leaves or self.first_run, True
        finally:
            self.first_run, self.runs_again = None, False


class RunAgain(Exception):
    """Request to run a tile again.

    Its graph goes on beyond the tile into `nodes`, or begins at `leaves` that the tile itself may have
    made."""

    def __init__(self, nodes: Collection[Any] = (), leaves: Collection[Tensor] = ()) -> None:
        super().__init__("a tile outside of UnlistedLeaves.run_tile reads tensors that no stage lists")
        self.nodes, self.leaves = set(nodes), set(leaves)


class StandIns(TorchFunctionMode):
    """Mode that replaces tensors with a graph from before the call by leaves in all torch functions.

    Attributes:
        leaves: the leaf of each tensor replaced so far.
    """

    def __init__(self, unlisted: UnlistedLeaves) -> None:
        super().__init__()
        self.unlisted, self.leaves = unlisted, dict[Tensor, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, t: Tensor) -> Tensor:
        unlisted = self.unlisted
        if t not in unlisted.precomputed:
            if not (unlisted.nodes and t.grad_fn in unlisted.nodes):
                return t
            unlisted.precomputed[t] = None
        if t not in self.leaves:
            (self.leaves[t],) = aliases([t], [True])
        return self.leaves[t]


def aliases(tensors: Iterable[Tensor], trained: Iterable[bool]) -> list[Tensor]:
    """Return leaves of one tile that share the tensors' memory, with these values of `requires_grad`.

    Autograd runs users' hooks on a tensor whenever it computes its gradient; with leaves per tile, the hooks
    see the complete gradient once, not each tile's part."""
    leaves = []
    for tensor, requires_grad in zip(tensors, trained, strict=True):
        leaf = tensor.detach().requires_grad_(requires_grad)
        vars(leaf)[TILE_LEAF_MARK] = True
        leaves.append(leaf)
    return leaves


def next_node() -> int:
    """Return the sequence number that the next node will have. Autograd counts nodes per thread."""
    return torch._C._autograd._get_sequence_nr()


with torch.inference_mode(False), torch.enable_grad():  # the package may be imported where gradients are off
    _AccumulateGrad: Any = type(torch.ones((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that these tensors' gradients would reach."""
    nodes: list[Any] = list(dict.fromkeys([t.grad_fn for t in outputs if t.grad_fn is not None]))
    visited = set(nodes)
    for node in nodes:  # breadth first: the list grows while the loop runs
        for input_node, _ in node.next_functions:
            if input_node is not None and input_node not in visited:
                visited.add(input_node)
                nodes.append(input_node)
    return [node.variable for node in nodes if type(node) is _AccumulateGrad]


def nodes_made_before(outputs: Iterable[Tensor], begin: int) -> set[Any]:
    """Return the nodes older than number `begin` that newer ones lead to directly, without leaves."""
    nodes: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    visited, older_nodes = set(nodes), set[Any]()
    for node in nodes:
        for input_node, _ in node.next_functions:
            if input_node is None or input_node in visited or type(input_node) is _AccumulateGrad:
                continue
            if input_node._sequence_nr() < begin:
                older_nodes.add(input_node)
            else:
                visited.add(input_node)
                nodes.append(input_node)
    return older_nodes


@contextlib.contextmanager
def suspend_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Suspend the hooks of these leaves, and restore their `.grad` at the end.

    A tile computes a part of their gradients; the hooks must get the complete gradient once."""
    before: list[tuple[Any, Any, Any, dict[Any, Any]]] = []
    try:
        for t in leaves:
            hooks: Any = t._backward_hooks or {}  # the dictionary that autograd itself reads
            before.append((t, t.grad, t._post_accumulate_grad_hooks, dict(hooks)))
            t.grad, t._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]
            hooks.clear()
        yield
    finally:
        for t, gradient, post_accumulate_hooks, hooks in before:
            t.grad, t._post_accumulate_grad_hooks = gradient, post_accumulate_hooks
            if hooks:
                t._backward_hooks.update(hooks)
