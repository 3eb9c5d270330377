"""Where a chunk's state comes from and where it goes, forward and backward.

An executor asks its `Exchange` for the state before each chunk and gives it the state after; in the backward
it asks for the state's cotangent after the chunk and gives it the one before. `BetweenTiles` stores them at
chunk edges, from where the program's messages take them to other workers. `parallel.context.WithinTiles` has
them cross while tiles run."""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.engine.grid import Tile
from adjoint.engine.schedule import Action, Recv, Run, Send, stored_states
from adjoint.engine.storage import Past, Slab, apart_from, by_itself, growing, joined, recurrent
from adjoint.engine.tile import Cotangents
from adjoint.layers import State

if TYPE_CHECKING:
    from adjoint.engine.executor import Executor


class Exchange(abc.ABC):
    """How states, keys and values, and their cotangents cross chunk edges, for one executor.

    It holds no reference to the executor, which would then keep keys and values alive after the step.
    """

    @abc.abstractmethod
    def slab(self, executor: Executor, initial: Tensor, dim: int) -> Slab:
        """Return storage for an append-only tensor of a state, which grows along `dim`."""

    def begin(self, executor: Executor) -> None:  # noqa: B027 - only some exchanges prepare anything
        """Prepare; the executor is complete otherwise."""

    @abc.abstractmethod
    def count_edges(self, executor: Executor, actions: Collection[Action]) -> None:
        """Set the number of rows of each stage's `Edges`: the states that this worker's own tiles read."""

    def around(self, executor: Executor, t: Tile) -> contextlib.AbstractContextManager[None]:
        """Return a context for a tile that runs a stage's forward."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def state(self, executor: Executor, k: int, c: int) -> tuple[Any, ...]:
        """Return stage k's state before chunk c: tensors, and a `Past` for each append-only one."""

    @abc.abstractmethod
    def put_state(self, executor: Executor, k: int, c: int, state: State) -> None:
        """Take stage k's state after chunk c."""

    @abc.abstractmethod
    def cotangents(self, executor: Executor, k: int, c: int) -> Cotangents:
        """Return the cotangents of stage k's state after chunk c."""

    @abc.abstractmethod
    def put_cotangents(self, executor: Executor, k: int, c: int, d_state: Cotangents) -> None:
        """Take the cotangents of stage k's state before chunk c."""

    def finish(self) -> None:  # noqa: B027 - only some exchanges have anything under way
        """Wait until everything has left."""

    def final_slabs(self, executor: Executor, k: int) -> list[Tensor]:
        """Return stage k's append-only tensors after the sequence; empty if they are not asked for."""
        slabs = executor.slabs.get(k, ())
        return [slab.final() if executor.return_final_kv else slab.between(0, 0) for slab in slabs]


class BetweenTiles(Exchange):
    """States cross between tiles: they are keys of the grid (S, dS), stored at edges and sent as messages."""

    def slab(self, executor: Executor, initial: Tensor, dim: int) -> Slab:
        return Slab(initial, dim, executor.grid.cuts[-1], executor.host)

    def count_edges(self, executor: Executor, actions: Collection[Action]) -> None:
        executor.passed_on = {a.key for a in actions if isinstance(a, Send) and a.key in a.frees}
        if executor.grid.checkpoints is not None:  # the forward stores as many as the backward, or more
            return self._set_rows(executor, stored_states(executor.grid, actions))
        rows: collections.Counter[int] = collections.Counter()
        for action in actions:
            if isinstance(action, Run) and action.tile.is_forward:
                k, c = action.tile.stage, action.tile.chunk
                rows[k] += executor.grid.reads_state(c + 1) and ("S", k, c) not in executor.passed_on
            elif isinstance(action, Recv) and action.key[0] == "S":
                if action.key[1] in executor.slabs:
                    raise ValueError(
                        f"stage {action.key[1]}: a state that grows with the sequence stays with one worker; "
                        "deal out layers instead of chunks"
                    )
                rows[action.key[1]] += 1
        self._set_rows(executor, rows)

    @staticmethod
    def _set_rows(executor: Executor, rows: Mapping[int, int]) -> None:
        for k, count in rows.items():
            if executor.edges[k].memory is None:
                executor.edges[k].rows = count

    def state(self, executor: Executor, k: int, c: int) -> tuple[Any, ...]:
        initial, grows = executor.batch.states[k], executor.grows[k]
        if not initial:
            return ()
        recurrent_state = recurrent(initial, grows)
        if c in executor.grid.document_starts:
            recurrent_state = tuple(torch.zeros_like(s) for s in recurrent_state)
        elif c and recurrent_state:
            stored = executor.value(("S", k, c - 1)).to(executor.device, non_blocking=True)
            recurrent_state = executor.packing[k].unpack(stored)
        if k not in executor.slabs:
            return recurrent_state
        return joined(recurrent_state, (self._past(executor, s, c) for s in executor.slabs[k]), grows)

    def _past(self, executor: Executor, slab: Slab, c: int) -> Past:
        """Return the `Past` of a slab before chunk c."""
        chunk, grid = executor.chunks[c], executor.grid
        begin = chunk.document or -slab.before  # what was there before belongs to the first document
        first_grad_token = begin if not grid.dropped else grid.first_grad_token(c)
        return Past(slab, chunk.start, begin, first_grad_token, *executor.documents(chunk, slab.before))

    def put_state(self, executor: Executor, k: int, c: int, state: State) -> None:
        recurrent_state = recurrent(state, executor.grows[k])
        if c + 1 == executor.grid.chunks:
            final = map(by_itself, recurrent_state)
            executor.final[k] = joined(final, self.final_slabs(executor, k), executor.grows[k])
        elif executor.grid.reads_state(c + 1):
            executor.make_place(k, c)
            executor.store["S", k, c], out = executor.destination(("S", k, c))
            executor.packing[k].pack(apart_from(out, recurrent_state), out)

    def cotangents(self, executor: Executor, k: int, c: int) -> Cotangents:
        grid, grows, slabs = executor.grid, executor.grows[k], executor.slabs.get(k, [])
        d_final = executor.d_final[k]
        carried: Cotangents = recurrent(d_final, grows)
        if c + 1 == grid.chunks:
            for slab, d in zip(slabs, growing(d_final, grows), strict=True):
                slab.begin(d)
        elif carried:
            d_edge = executor.store["dS", k, c] if grid.carries(c + 1) else (None,) * len(carried)
            carried = d_edge if isinstance(d_edge, tuple) else executor.packing[k].unpack(d_edge)
        return joined(carried, (slab.gathered(*grid.cuts[c : c + 2]) for slab in slabs), grows)

    def put_cotangents(self, executor: Executor, k: int, c: int, d_state: Cotangents) -> None:
        grows = executor.grows[k]
        d_recurrent = tuple(by_itself(d) for d in recurrent(d_state, grows))
        if d_recurrent and executor.grid.carries(c):
            executor.store["dS", k, c - 1] = self._scaled(executor, k, c, d_recurrent)
        elif c == 0:
            d_past = (slab.initial() for slab in executor.slabs.get(k, []))
            executor.d_initial[k] = joined(d_recurrent, d_past, grows)

    def _scaled(self, executor: Executor, k: int, c: int, d_state: Cotangents) -> Cotangents:
        """Return the adjoint state as it leaves chunk c, multiplied by `Grid.passes`.

        The conv tail's, before it in the tuple, is not: the convolution's short paths are not cut."""
        if not executor.grid.adjoint_scale:
            return d_state
        *tail, d = d_state
        multiplier = executor.grid.passes(k, c)
        return (*tail, None if d is None or multiplier == 0 else d * multiplier)
