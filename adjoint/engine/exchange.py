"""`Exchange`: where a chunk's state comes from and where it goes, forward and backward.

An executor asks its `Exchange` for the state before each chunk and gives it the state after; in the backward
it asks for the state's cotangent after the chunk and gives it the one before. `BetweenTiles` stores them at
chunk edges, from where the program's messages take them to other workers. `parallel.context.WithinTiles` has
them cross while tiles run."""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.grid import Tile
from adjoint.engine.schedule import Action, Recv, Run, Send, stored_states
from adjoint.engine.storage import (
    Past,
    Prefix,
    Slab,
    append_only_part,
    clone_views_of,
    compact,
    merge_parts,
    recurrent_part,
)
from adjoint.engine.tile import Cotangents
from adjoint.engine.tile_values import TileValues
from adjoint.engine.verification import NotAttended
from adjoint.errors import UserError
from adjoint.kernels import checks
from adjoint.layers import State


@contextlib.contextmanager
def refuse_unread(unread: set[int], reason: str) -> Iterator[None]:
    """Raise NotAttended if keys were joined without their values and attention has not read them elsewhere.

    Then a model's own attention code has used what stands in their place, whether it failed by that or not.

    Args:
        unread: ids of such keys, while the context runs.
        reason: of the error.
    """
    unread.clear()
    cause: Exception | None = None
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not unread:
            raise
        cause = error
    if unread:
        unread.clear()
        raise NotAttended(reason) from cause


class Exchange(abc.ABC):
    """Rule by which states, keys and values, and their cotangents cross chunk edges, for one executor.

    It holds no reference to the executor's values, which would then outlive the step in a circle.
    """

    @abc.abstractmethod
    def slab(self, values: TileValues, initial: Tensor, dim: int, k: int) -> Slab:
        """Return storage for the next append-only tensor of stage k's state, which grows along `dim`."""

    def begin(self, values: TileValues) -> None:
        """Prepare for an executor, which is complete otherwise: make its slabs."""
        for k, stage in enumerate(values.stages):
            if stage is None:
                continue
            for s, dim in zip(values.batch.states[k], stage.grows, strict=True):
                if dim is not None:
                    checks.shapes(initial_state=(s, values.batch.rows, *s.shape[1:]))
                    values.slabs.setdefault(k, []).append(self.slab(values, s, dim, k))

    @abc.abstractmethod
    def count_edges(self, values: TileValues, actions: Collection[Action]) -> None:
        """Reserve edges for the states that this worker's own tiles read (`TileValues.reserve_edges`)."""

    def tile_context(self, values: TileValues, t: Tile) -> contextlib.AbstractContextManager[None]:
        """Return a context for a tile that runs a stage's forward."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def state(self, values: TileValues, k: int, c: int) -> tuple[Any, ...]:
        """Return stage k's state before chunk c: tensors, and a `Past` for each append-only one."""

    @abc.abstractmethod
    def put_state(self, values: TileValues, k: int, c: int, state: State) -> None:
        """Take stage k's state after chunk c."""

    @abc.abstractmethod
    def cotangents(self, values: TileValues, k: int, c: int) -> Cotangents:
        """Return the cotangents of stage k's state after chunk c."""

    @abc.abstractmethod
    def put_cotangents(self, values: TileValues, k: int, c: int, d_state: Cotangents) -> None:
        """Take the cotangents of stage k's state before chunk c."""

    def finish(self) -> None:  # noqa: B027 - only some exchanges have anything under way
        """Wait until everything has left."""

    def final_slabs(self, values: TileValues, k: int) -> list[Tensor]:
        """Return stage k's append-only tensors after the sequence; empty if they are not asked for."""
        slabs = values.slabs.get(k, ())
        return [slab.final_values() if values.return_final_kv else slab.read(0, 0) for slab in slabs]


class BetweenTiles(Exchange):
    """States cross between tiles: they are keys of the grid (S, dS), stored at edges and sent as messages.

    Args:
        prefix: the tokens before the batch's, where an earlier batch has stored them. They are then not in
            the states with which the batch begins.

    Attributes:
        unread: as in `Past`, of the running tile.
    """

    def __init__(self, prefix: Prefix | None = None) -> None:
        self.prefix, self.unread = prefix, set[int]()

    def slab(self, values: TileValues, initial: Tensor, dim: int, k: int) -> Slab:
        tokens, prefix = values.grid.cuts[-1], self.prefix
        if prefix is None:
            return Slab(initial, dim, tokens, values.host)
        before = prefix.slabs[k][len(values.slabs.get(k, ()))]
        return Slab(initial, dim, tokens, values.host, before, prefix.rows)

    def tile_context(self, values: TileValues, t: Tile) -> contextlib.AbstractContextManager[None]:
        if self.prefix is None:
            return contextlib.nullcontext()
        return refuse_unread(
            self.unread,
            "this model's attention is its own code, which knows no keys and values that rows share: "
            "Exact(share_prefixes=False) computes each row",
        )

    def count_edges(self, values: TileValues, actions: Collection[Action]) -> None:
        passed_on = {a.key for a in actions if isinstance(a, Send) and a.key in a.frees}
        if values.grid.checkpoints is not None:  # the forward stores as many as the backward, or more
            return values.reserve_edges(stored_states(values.grid, actions), passed_on)
        rows: collections.Counter[int] = collections.Counter()
        reading = values.grid.chunks_reading_state
        for action in actions:
            if isinstance(action, Run) and action.tile.is_forward:
                k, c = action.tile.stage, action.tile.chunk
                rows[k] += c + 1 in reading and ("S", k, c) not in passed_on
            elif isinstance(action, Recv) and action.key[0] == "S":
                if action.key[1] in values.slabs:
                    raise ValueError(
                        f"stage {action.key[1]}: a state that grows with the sequence stays with one worker; "
                        "deal out layers instead of chunks"
                    )
                rows[action.key[1]] += 1
        values.reserve_edges(rows, passed_on)

    def state(self, values: TileValues, k: int, c: int) -> tuple[Any, ...]:
        initial, grows = values.batch.states[k], values.grows[k]
        if not initial:
            return ()
        if c and c not in values.grid.document_starts:
            packing = values.packing[k]
            recurrent_state = packing.unpack(values.fetch(("S", k, c - 1))) if packing.shapes else ()
        else:
            recurrent_state = recurrent_part(initial, grows)
            if c:
                recurrent_state = tuple(torch.zeros_like(s) for s in recurrent_state)
        if k not in values.slabs:
            return recurrent_state
        return merge_parts(recurrent_state, (self._past(values, s, k, c) for s in values.slabs[k]), grows)

    def _past(self, values: TileValues, slab: Slab, k: int, c: int) -> Past:
        """Return the `Past` of a slab of stage k before chunk c."""
        grid = values.grid
        start, stop = grid.cuts[c : c + 2]
        begin = grid.document(c) or -slab.tokens_before  # the first document has the tokens before
        first_grad_token = grid.first_grad_token(c)
        if first_grad_token == grid.document(c):  # no edge before it drops cotangents
            first_grad_token = begin
        boundaries = values.documents(start, stop, slab.tokens_before)
        anchor = slab.initial.new_zeros(()).requires_grad_() if slab.is_initial_trained else None
        visible, starts = boundaries or (None, None)
        unread = None if values.stage(k).fetches else self.unread
        outputs = values.attention_outputs
        return Past(slab, start, begin, first_grad_token, visible, starts, anchor, unread, outputs)

    def put_state(self, values: TileValues, k: int, c: int, state: State) -> None:
        recurrent_state = recurrent_part(state, values.grows[k]) if k in values.slabs else state
        if c + 1 == values.grid.chunks:
            final = map(compact, recurrent_state)
            values.final[k] = merge_parts(final, self.final_slabs(values, k), values.grows[k])
        elif c + 1 in values.grid.chunks_reading_state:
            if values.grid.checkpoints is not None:
                values.make_place(k, c)
            values.store["S", k, c], out = values.destination(("S", k, c))
            packing = values.packing[k]
            if values.host_copies is not None and values.is_on_host(out):
                # the next chunk's tile may read it at once
                values.host_copies.store(
                    out, lambda buffer: packing.pack(recurrent_state, buffer), ("S", k, c)
                )
            else:
                packing.pack(clone_views_of(out, recurrent_state), out)

    def cotangents(self, values: TileValues, k: int, c: int) -> Cotangents:
        grid, grows, slabs = values.grid, values.grows[k], values.slabs.get(k, [])
        d_final = values.d_final[k]
        carried: Cotangents = recurrent_part(d_final, grows)
        if c + 1 == grid.chunks:
            for slab, d in zip(slabs, append_only_part(d_final, grows), strict=True):
                slab.begin_backward(d)
        elif carried:
            d_edge = values.store["dS", k, c] if grid.carries(c + 1) else (None,) * len(carried)
            carried = d_edge if isinstance(d_edge, tuple) else values.packing[k].unpack(d_edge)
        return merge_parts(carried, (slab.cotangent(*grid.cuts[c : c + 2]) for slab in slabs), grows)

    def put_cotangents(self, values: TileValues, k: int, c: int, d_state: Cotangents) -> None:
        grows = values.grows[k]
        d_recurrent = tuple(map(compact, recurrent_part(d_state, grows)))
        if d_recurrent and values.grid.carries(c):
            values.store["dS", k, c - 1] = self._scaled(values, k, c, d_recurrent)
        elif c == 0:
            d_past = (compact(slab.initial_cotangent()) for slab in values.slabs.get(k, []))
            values.d_initial[k] = merge_parts(d_recurrent, d_past, grows)

    def _scaled(self, values: TileValues, k: int, c: int, d_state: Cotangents) -> Cotangents:
        """Return the adjoint state as it leaves chunk c, multiplied by `Grid.passes`.

        The conv tail's, before it in the tuple, is not: the convolution's short paths are not cut."""
        if not values.grid.adjoint_scale:
            return d_state
        *tail, d = d_state
        multiplier = values.grid.passes(k, c)
        return (*tail, None if d is None or multiplier == 0 else d * multiplier)
