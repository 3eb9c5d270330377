"""Where a tile's graph begins. Stages list their parameters, but users' code reaches other tensors: a hook's
own parameter, modules in a plain list, an attribute that another network has made. The graph shows them."""

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
OF_A_TILE = "_adjoint_leaf"  # the attribute of leaves that belong to one tile


class Changed(RuntimeError):
    """A chunk depends on more than its input and its state: computed again for the backward, it is not what
    it was, or its graph goes on into another chunk's."""


class UnlistedLeaves:
    """Trainable tensors that reach the tiles of one call without being listed by a stage.

    Those of the forward's last chunk, whose tape is kept, are found in its graph; they become inputs of the
    call's autograd function like parameters. Every later tile's graph must begin at these or at listed ones.
    A leaf that a tile makes itself, such as an embedding's output under `enable_input_require_grads`, is no
    input: its gradient goes nowhere, as in plain autograd. It shows by being another tensor when the same
    tile runs again.

    Args:
        listed: tensors whose gradients are asked for anyway.
        own: leaves to whose `.grad` autograd may add, as nobody asks for their gradients.
        open: whether tensors may still be found; otherwise they are refused.

    Attributes:
        leaves: found leaves. Their gradients are asked for directly.
        made: found tensors with a graph of their own, made before the call. Tiles see leaves in their place,
            as a graph can be walked back once only.
        nodes: the graph nodes that made these tensors, by which they are recognised.
        first_run: while `run_tile` runs a tile again, the leaves of its first run; None during the first.
    """

    def __init__(
        self, listed: Iterable[Tensor] = (), own: Collection[Tensor] = (), open: bool = False
    ) -> None:
        self.listed, self.own, self.open = set(listed), own, open
        self.leaves: dict[Tensor, None] = {}
        self.made: dict[Tensor, None] = {}
        self.nodes: set[Any] = set()
        self.first_run: Collection[Tensor] | None = None

    def close(self) -> list[Tensor]:
        """No more may be found; gives those that were found and are not listed."""
        self.open = False
        self.nodes.clear()
        return [t for t in (*self.leaves, *self.made) if t not in self.listed]

    def standing_in(self) -> StandIns | None:
        """What puts leaves in the places of `made`, to be entered around a tile's forward; None without."""
        return StandIns(self) if self.nodes or self.made else None

    def of(self, outputs: Sequence[Tensor], known: Collection[Tensor], begin: int) -> list[Tensor]:
        """The leaves of a tile's outputs that are not `known`, and whose gradients must be asked for, too.

        Args:
            begin: the number of the tile's first node (`next_node`).

        Raises:
            RunAgain: the tile must run again before this can be told; `run_tile` does it.
            Changed: of another tile's leaf.
            UserError: a tensor is found when it is too late, or where none may be found.
        """
        found = [t for t in leaves_of(outputs) if t not in known and t not in self.own]
        if not found:
            return found
        if any(OF_A_TILE in vars(t) for t in found):
            raise Changed("a chunk's graph goes on into another chunk's: its tensors are kept on a module")
        if self.open:
            nodes = made_before(outputs, begin)
            if nodes and nodes <= self.nodes:
                names = ", ".join(sorted(node.name() for node in nodes))
                raise UserError(
                    f"a tensor that was made before the call and has a graph of its own ({names}) is given "
                    "to an autograd function, where chunks cannot tell it apart: give it t * 1"
                )
            if nodes:
                raise RunAgain(nodes=nodes)
        unlisted = [t for t in found if t not in self.listed and t not in self.leaves]
        if not unlisted:
            return found
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
        return [t for t in found if t in self.listed or t in self.leaves]

    def run_tile(self, run: Callable[[], T]) -> T:
        """Return run(), which is called again where its leaves cannot be told apart by one run."""
        try:
            while True:
                try:
                    return run()
                except RunAgain as again:
                    self.nodes |= again.nodes
                    self.first_run = again.leaves or self.first_run
        finally:
            self.first_run = None


class RunAgain(Exception):
    """A tile has to run again: its graph goes on beyond the tile into `nodes`, or begins at `leaves` of which
    it is not known whether the tile has made them."""

    def __init__(self, nodes: Collection[Any] = (), leaves: Collection[Tensor] = ()) -> None:
        super().__init__("a tile outside of UnlistedLeaves.run_tile reads tensors that no stage lists")
        self.nodes, self.leaves = set(nodes), set(leaves)


class StandIns(TorchFunctionMode):
    """Puts leaves that share their memory in the places of tensors that have a graph of their own.

    Attributes:
        leaves: for each tensor that was met, the leaf.
    """

    def __init__(self, outside: UnlistedLeaves) -> None:
        super().__init__()
        self.outside, self.leaves = outside, dict[Tensor, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._instead, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _instead(self, t: Tensor) -> Tensor:
        outside = self.outside
        if t not in outside.made:
            if not (outside.nodes and t.grad_fn in outside.nodes):
                return t
            outside.made[t] = None
        if t not in self.leaves:
            self.leaves[t] = alias(t)
        return self.leaves[t]


def alias(t: Tensor, trained: bool = True) -> Tensor:
    """A leaf of one tile that shares the tensor's memory. Autograd runs users' hooks on a tensor whenever it
    computes its gradient; with leaves, the hooks see the whole gradient once, not each tile's part."""
    leaf = t.detach().requires_grad_(trained)
    vars(leaf)[OF_A_TILE] = True
    return leaf


def next_node() -> int:
    """The number that this thread's next node of a graph will have."""
    return torch._C._autograd._get_sequence_nr()


with torch.inference_mode(False), torch.enable_grad():  # the package may be imported where gradients are off
    _AccumulateGrad: Any = type(torch.ones((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that these tensors' gradients would reach."""
    nodes: list[Any] = list(dict.fromkeys(t.grad_fn for t in outputs if t.grad_fn is not None))
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                nodes.append(further)
    return [node.variable for node in nodes if type(node) is _AccumulateGrad]


def made_before(outputs: Iterable[Tensor], begin: int) -> set[Any]:
    """The nodes older than number `begin` that newer ones lead to directly, leaves apart."""
    nodes: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen, before = set(nodes), set[Any]()
    for node in nodes:
        for further, _ in node.next_functions:
            if further is None or further in seen or type(further) is _AccumulateGrad:
                continue
            if further._sequence_nr() < begin:
                before.add(further)
            else:
                seen.add(further)
                nodes.append(further)
    return before


@contextlib.contextmanager
def unseen(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a tile's part of these leaves' gradients calls none of their hooks, which get the whole
    gradient, and may be added to `.grad`, which is afterwards as it was."""
    before: list[tuple[Any, Any, Any, dict[Any, Any]]] = []
    try:
        for t in leaves:
            hooks: Any = t._backward_hooks or {}  # the dictionary that autograd itself reads
            before.append((t, t.grad, t._post_accumulate_grad_hooks, dict(hooks)))
            t.grad, t._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]
            hooks.clear()
        yield
    finally:
        for t, gradient, accumulated, hooks in before:
            t.grad, t._post_accumulate_grad_hooks = gradient, accumulated
            if hooks:
                t._backward_hooks.update(hooks)
