"""Attention of a recorded tile: it reads all keys before a chunk, so it runs between two recordings.

A tile that is recorded gets a `RecordedPast` in the place of each `Past`. Attention that finds one puts its
queries, keys and values where a replay's call of attention reads them, and goes on with what that call will
write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from adjoint.engine.arena import Spec
from adjoint.engine.tile import vjp
from adjoint.kernels.attention import Joined, Past, causal_attention, join
from adjoint.layers import State

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RecordedTile:
    """The recorder and the memory that attention in a recording needs, and the tile that is replayed.

    Args:
        run_between: as in `recorder.Recorder`.
        allocate: returns memory that no other value of the tile has, for tensors of these shapes.

    Attributes:
        state: of the tile that is replayed, with a `Past` for each append-only entry.
    """

    def __init__(
        self,
        run_between: Callable[[Callable[[], None]], None],
        allocate: Callable[[Sequence[Spec]], list[Tensor]],
    ) -> None:
        self.run_between, self.allocate = run_between, allocate
        self.state: State = ()
        self.calls = list[_AttentionCall]()

    def drop_graphs(self) -> None:
        """Free what calls of attention have kept for a pullback that will not come."""
        for call in self.calls:
            call.graph = None

    def pasts(
        self, grows: Sequence[int | None], tensors: Sequence[Tensor], places: Tensor | None, is_first: bool
    ) -> State:
        """Return a recorded tile's state: tensors where it is recurrent, else what stands for a `Past`.

        Args:
            is_first: whether there is nothing before the chunk, so that attention is recorded like the rest.
        """
        rest = iter(tensors)
        return tuple(
            [
                next(rest)  # type: ignore[misc]
                if dim is None
                else (RecordedPiece(places) if is_first else RecordedPast(self, i, places))
                for i, dim in enumerate(grows)
            ]
        )


class RecordedPiece:
    """The place of the first chunk's keys or values, in a tile that is recorded: none are before it.

    Args:
        places: (tokens,) float64, the chunk's positions, for layers that would count them; None if the tile
            gets them by itself.
    """

    fetches = False
    anchor = visible = starts = None

    def __init__(self, places: Tensor | None) -> None:
        self.places = places

    def anchored(self, piece: Tensor) -> Tensor:
        return piece

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """Return the piece, in the place of the joined keys."""
        if reach is not None:
            raise RuntimeError("attention with a window")
        return piece.view_as(piece)


class RecordedPast(RecordedPiece):
    """Keys or values before a chunk, in a tile that is recorded.

    To `kernels.attention` its keys are elsewhere, as those of other ranks are: `attend` alone reads them.

    Args:
        entry: its number in the tile's state.
        places: as in `RecordedPiece`.
    """

    def __init__(self, tile: RecordedTile, entry: int, places: Tensor | None) -> None:
        super().__init__(places)
        self.tile, self.entry = tile, entry

    def attend(self, q: Tensor, keys: Joined, values: Joined, scale: float | None) -> Tensor:
        """Attention of queries to all keys up to their own places, (batch, heads, tokens, dim)."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v, scale=scale).transpose(1, 2)

        return self.attend_by(attend, q, keys, values).transpose(1, 2)

    def attend_by(self, attend: Attend, q: Tensor, keys: Joined, values: Joined) -> Tensor:
        """Attention by a function of queries, and of keys and values joined to those before the chunk, which
        returns (batch, tokens, heads, dim)."""
        value_past = values.past
        assert isinstance(value_past, RecordedPast)
        call = _AttentionCall(self.tile, (self.entry, value_past.entry), attend)
        attended: Tensor = _Between.apply(q, keys.piece, values.piece, call)
        return attended


class _AttentionCall:
    """A call of attention between two recordings, in each replay.

    Args:
        entries: numbers of keys and values in the tile's state.
        attend: as in `RecordedPast.attend_by`.

    Attributes:
        inputs: queries, keys and values of the chunk; after the backward, their cotangents.
        out, d_out: the result and its cotangent.
        graph: of the replay's call: its leaves and its result.
    """

    inputs: list[Tensor]
    out: Tensor
    d_out: Tensor

    def __init__(self, tile: RecordedTile, entries: tuple[int, int], attend: Attend) -> None:
        self.tile, self.entries, self.attend, self.has_backward = tile, entries, attend, False
        self.graph: tuple[list[Tensor], Tensor] | None = None

    def forward(self) -> None:
        """Attend, from what the recording before has written, and write what the one after it reads."""
        leaves = [t.detach().requires_grad_(self.has_backward) for t in self.inputs]
        q, *pieces = leaves
        pasts: list[Past] = [self.tile.state[entry] for entry in self.entries]  # type: ignore[misc]
        with torch.set_grad_enabled(self.has_backward):
            keys, values = (join(past, piece) for past, piece in zip(pasts, pieces, strict=True))
            out = self.attend(q, keys, values)
        self.out.copy_(out.detach())
        self.graph = (leaves, out) if self.has_backward else None

    def backward(self) -> None:
        """Pull the result's cotangent back."""
        assert self.graph is not None
        (leaves, out), self.graph = self.graph, None
        grads = [d for d in vjp([(out, self.d_out)], leaves) if d is not None]
        torch._foreach_copy_(self.inputs, grads)


class _BetweenContext(Protocol):
    """The values that `_Between` keeps from its forward for its backward."""

    call: _AttentionCall


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _BetweenContext, q: Tensor, k: Tensor, v: Tensor, call: _AttentionCall) -> Tensor:
        batch, heads, tokens, _ = q.shape
        result = Spec(torch.Size([batch, tokens, heads, v.shape[3]]), q.dtype)
        specs = [Spec(t.shape, t.dtype) for t in (q, k, v)]
        *call.inputs, call.out = call.tile.allocate([*specs, result])
        torch._foreach_copy_(call.inputs, [q, k, v])
        call.tile.run_between(call.forward)
        ctx.call = call
        call.tile.calls.append(call)
        return call.out.view_as(call.out)

    @staticmethod
    def backward(ctx: _BetweenContext, d: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        call.has_backward = True
        (call.d_out,) = call.tile.allocate([Spec(call.out.shape, call.out.dtype)])
        call.d_out.copy_(d)
        call.tile.run_between(call.backward)
        return *[t.view_as(t) for t in call.inputs], None


def recorded_past(keys: Tensor) -> RecordedPiece | None:
    """Return what stands for the keys before these in a tile that is recorded; None in any other."""
    past = getattr(getattr(keys, "joined", None), "past", None)
    return past if isinstance(past, RecordedPiece) else None
