"""One sequence over the processes of a `torch.distributed` group, as one autograd function in each of them.

Chunks are dealt to the group's ranks in turn; states and their cotangents cross chunk edges as messages, in
programs that are fixed beforehand (`program`). Every rank calls with the same rows and has the whole's loss;
gradients are summed over the group at the end of the backward, so that hooks, clipping, optimizers and
DistributedDataParallel around it see the whole's."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adjoint.batch import Batch
from adjoint.engine.executor import Connections, Documents, Executor
from adjoint.engine.grid import EngineSpec, Grid, Tile
from adjoint.engine.schedule import BUFFERS, CAPACITY, Action, HelperTasks, Owners, Run, make_schedule
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Layer, Stage, costs_of
from adjoint.engine.step import Around, ChunkedStep
from adjoint.engine.storage import Slab, by_itself, growing, joined, recurrent
from adjoint.engine.tile import Cotangents, Gradients
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State
from adjoint.parallel.handoff import StateHandoff
from adjoint.parallel.kv import STATES, DistributedKV, DistributedPast, NotAttended
from adjoint.parallel.transport import Alone, GroupTransport, Messages, summed

WEIGHTS = 1 << 14  # elements of each parameter that are compared between ranks on first use
WEIGHTS_NAME = "the model's weights"
COUNTED = ("the number of rows", "the number of tokens", "the chunk size", "the number of chunks")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
SINGLE_RANK: Any = object()  # in a group's place: this process by itself, by the code that a group runs
_compared: Any = WeakTensorKeyDictionary()  # a model's first parameter: groups that have compared weights


def group_of(given: Any) -> Any:
    """The process group of a `sequence_group`: a `ProcessGroup`, or a `DeviceMesh` of one dimension.

    Raises:
        UserError: it is neither, this process is not in it, or torch.distributed is not initialised.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "sequence_group: torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() in every process first, under torchrun"
        )
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    if isinstance(given, mesh):
        if given.ndim != 1:
            raise UserError(
                f"sequence_group: a DeviceMesh of {given.ndim} dimensions; give the one of the sequence, "
                'such as mesh["sequence"]'
            )
        inside = given.get_coordinate() is not None
        given = given.get_group() if inside else None
    elif isinstance(given, dist.ProcessGroup):
        inside = dist.get_rank(given) >= 0
    elif given == dist.GroupMember.NON_GROUP_MEMBER and not isinstance(given, bool):
        inside = False
    else:
        raise UserError(
            "sequence_group must be a process group of torch.distributed or a DeviceMesh of one dimension; "
            f"got {given!r}"
        )
    if not inside:
        raise UserError(
            f"sequence_group: rank {dist.get_rank()} is not in the group; only its members may call with it"
        )
    return given


def ranks_of(group: Any) -> int:
    """The number of processes of a `group_of`."""
    import torch.distributed as dist

    return dist.get_world_size(group)


class ContextParallelExecutor(Executor):
    """The worker of a rank in whose tiles states, keys and values cross chunk edges (`crossing`, `spread`).

    Args:
        owners, place: of chunks, in rounds (`Owners.in_rounds`), and this worker. given: as in `Executor`.
    """

    transport: Messages

    def __init__(self, owners: Owners, place: int, *given: Any) -> None:
        self.owners, self.place = owners, place
        super().__init__(*given)
        self.before = self._before()
        # without this worker, which would hold itself, and with it keys and values after the step
        span = functools.partial(_span, self.chunks, self.documents, self.before)
        self.spread = DistributedKV(self.grid, owners, place, self.transport, span)
        self.states: dict[tuple[int, int], State] = {}  # recurrent, before each of this rank's chunks
        self.crossings: dict[tuple[int, int], list[StateHandoff]] = {}
        self.under_way: dict[int, list[StateHandoff]] = collections.defaultdict(list)  # by stage
        self.first_tags = list(
            itertools.accumulate((len(packing.shapes) for packing in self.packing), initial=STATES)
        )
        mine = [c for c in range(self.grid.chunks) if self._owner(c) == place]
        self.last = mine[-1] if mine else -1
        for edges in self.edges:
            edges.rows = sum(self.grid.reads_state(c) for c in mine)

    def _owner(self, c: int) -> int:
        return self.owners.peer(self.place, c)

    def slab(self, initial: Tensor, dim: int) -> Slab:
        if self._owner(0) != self.place:  # who has the first chunk has what is before it, too
            initial = initial.narrow(dim, 0, 0)
        grid = self.grid
        tokens = sum(grid.tokens(c) for c in range(grid.chunks) if self._owner(c) == self.place)
        return Slab(initial, dim, tokens, self.host)

    def count_edges(self, actions: Sequence[Action]) -> None:
        """They are known from the beginning."""

    # ------------------------------------------------------------------------------------------------ states

    def _before(self) -> int:
        """Tokens before the sequence, in states that grow."""
        found = {
            s.shape[dim]
            for k in self.slabs
            for s, dim in zip(self.batch.states[k], self.grows[k], strict=True)
            if dim is not None
        }
        if len(found) > 1:
            raise UserError(
                f"sequence_group: initial states hold keys of {sorted(found)} tokens; give all layers as many"
            )
        return max(found, default=0)

    def past(self, slab: Slab, c: int, fetches: bool = False) -> DistributedPast:
        chunk, before = self.chunks[c], self.before
        anchor = torch.zeros((), requires_grad=True)
        begin = chunk.document or -before
        given = self.spread, slab, c, chunk.start, begin, anchor, fetches
        return DistributedPast(*given, *self.documents(chunk, before))

    def state(self, k: int, c: int) -> Any:
        initial, grows, grid = self.batch.states[k], self.grows[k], self.grid
        first, here = (k, c) not in self.states, recurrent(initial, grows)
        arrives = first and grid.reads_state(c) and bool(here)
        if first:
            if c in grid.document_starts:
                here = tuple(torch.zeros_like(s) for s in here)
            elif arrives:
                here = self.packing[k].unpack(self.edges[k].at(self.edges[k].row()))
            self.states[k, c] = here
        here = self.states[k, c]
        if first:  # the ranks that they are for have come so far, or will without this one
            self._wait(k)
        onward = self._owner(c + 1) if grid.reads_state(c + 1) else None
        back = self._owner(c - 1) if grid.carries(c) else None
        ahead = self._owner(c + 1) if grid.carries(c + 1) else None
        crossings = self.crossings[k, c] = [
            StateHandoff(
                self.transport, tag, s, self.accumulate_dtype, onward if first else None, back, ahead
            )
            for tag, s in enumerate(here, self.first_tags[k])
        ]
        for crossing in crossings if arrives else ():
            crossing.expect(self._owner(c - 1))
        with torch.no_grad():
            given = tuple(crossing if self._lazy(k) else crossing.arrive() for crossing in crossings)
        fetches = getattr(self.stages[k], "fetches", False)
        return joined(given, (self.past(slab, c, fetches) for slab in self.slabs.get(k, ())), grows)

    def _lazy(self, k: int) -> bool:
        return getattr(self.stages[k], "lazy", False)

    def keep_state(self, k: int, c: int, state: State) -> None:
        crossings = self.crossings[k, c]
        if not self._lazy(k):
            with torch.no_grad():
                for crossing, s in zip(crossings, recurrent(state, self.grows[k]), strict=True):
                    crossing.leave(s)
        self._close(k, c)
        self.under_way[k] += crossings
        if c + 1 == self.grid.chunks:
            here = map(by_itself, recurrent(state, self.grows[k]))
            self.final[k] = joined(
                here, (slab.between(0, 0) for slab in self.slabs.get(k, ())), self.grows[k]
            )

    def forward(self, t: Tile) -> None:
        with self._attending():
            super().forward(t)

    def recompute(self, t: Tile) -> None:
        with self._attending():
            super().recompute(t)
        self._close(t.stage, t.chunk)

    def _close(self, k: int, c: int) -> None:
        """The forward of a chunk has come to its end: its states have left."""
        for crossing in self.crossings.get((k, c), ()) if self._lazy(k) else ():
            crossing.close()

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        """Raises NotAttended where keys and values were joined to those of other ranks, and never attended
        to: other code took the chunk's own for all that there are, whether it failed by it or not."""
        cause: Exception | None = None
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not self.spread.open:
                raise
            cause = error
        if self.spread.open:
            self.spread.open.clear()
            raise NotAttended(
                "sequence_group: this model's attention is its own code, which knows no keys and values of "
                'other ranks: give it attn_implementation="sdpa", or leave sequence_group out'
            ) from cause

    def backward(self, t: Tile) -> None:
        """Pulls a tape back, while cotangents of states cross."""
        k, c, grows, grid = t.stage, t.chunk, self.grows[t.stage], self.grid
        start, stop = grid.cuts[c : c + 2]
        last, slabs, lazy = c + 1 == grid.chunks, self.slabs.get(k, []), self._lazy(k)
        if c == self.last:
            for slab, d in zip(slabs, growing(self.d_final[k], grows), strict=True):
                slab.begin(None if d is None else self._own(d, slab.dim))
        self._wait(k)
        crossings = self.crossings.pop((k, c), [])
        for crossing in crossings:
            crossing.begin_backward()
        if last:
            carried: Cotangents = recurrent(self.d_final[k], grows)
        elif lazy:  # their values come while the tile runs
            carried = tuple(
                None if x.ahead is None else x.value.new_zeros(()).expand(x.value.shape) for x in crossings
            )
        else:
            carried = tuple(x.cotangent() for x in crossings)
        d_state = joined(carried, (None for _ in slabs), grows)
        dx, d_state = self.store.pop(("tape", k, c))(self._cotangent(k, start, stop), d_state)
        if ("dy", k - 1, c) in grid.writes(t):
            self.store["dy", k - 1, c] = dx
        self._add_to_ids(k, start, dx)
        for crossing, d in zip(crossings, recurrent(d_state, grows), strict=True):
            if not lazy:
                crossing.hand_back(d)
            crossing.end_backward()
        self.under_way[k] += crossings
        if c == 0:
            here = tuple(by_itself(x.d) for x in crossings)
            past = (slab.initial().to(slab.initially.dtype) for slab in slabs)
            self.d_initial[k] = joined(here, past, grows)

    def _wait(self, k: int) -> None:
        """Waits until the stage's states and cotangents have left."""
        for crossing in self.under_way.pop(k, ()):
            crossing.wait()

    def finish(self) -> None:
        """Waits until everything has left."""
        for k in [*self.under_way]:
            self._wait(k)

    # ----------------------------------------------------------------------------- states that grow, whole

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """This rank's tokens as the sequence's: (first token, how many, number among its own)."""
        before = self.before
        if before and self._owner(0) == self.place:
            yield -before, before, -before
        for c in range(self.grid.chunks):
            if self._owner(c) == self.place:
                yield self.grid.cuts[c], self.grid.tokens(c), self.spread.own_tokens(c)

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor of all, those before the sequence included."""
        pieces = [whole.narrow(dim, self.before + start, n) for start, n, _ in self._pieces()]
        return torch.cat(pieces, dim=dim) if pieces else whole.narrow(dim, 0, 0)

    def whole(self, slab: Slab) -> Tensor:
        """The tensor after the sequence, zero where other ranks have it."""
        shape = [*slab.initially.shape]
        shape[slab.dim] = self.before + self.grid.cuts[-1]
        out = slab.initially.new_zeros(shape)
        for start, n, own in self._pieces():
            out.narrow(slab.dim, self.before + start, n).copy_(slab.between(own, own + n))
        return out


def _span(
    chunks: Sequence[Batch], documents: Documents, before: int, c: int, row: int | None
) -> tuple[int, int]:
    """`spread.TokenRange`, of a sequence with `before` tokens in front of it."""
    chunk = chunks[c]
    if row is None:
        return chunk.seqlen, chunk.document or -before
    known = documents(chunk, before)
    assert known, "rows are told apart by their documents"
    return min([*known[1][row], chunk.seqlen]), chunk.start - known[0][row]


class ContextParallelStep(ChunkedStep):
    """`ChunkedStep` of one rank of a group.

    Args:
        group: of `group_of`, of two ranks or more; or `SINGLE_RANK`.
        stages, batch, spec, width, around, sums: as in `ChunkedStep`.

    Raises:
        UserError: the ranks do not call with the same, or a spec or stage cannot be shared so.
    """

    transport: GroupTransport

    def __init__(
        self,
        group: Any,
        stages: Sequence[Stage],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        around: Around = contextlib.nullcontext,
        sums: Sequence[Sum] = (),
    ) -> None:
        import torch.distributed as dist

        self.group = group
        self.workers, self.place = (1, 0) if group is SINGLE_RANK else (ranks_of(group), dist.get_rank(group))
        super().__init__(stages, batch, spec, width, around, sums)

    def _begin(self) -> None:
        _check(self.stages, self.spec)
        alone, device = self.group is SINGLE_RANK, self.batch.ids.device
        self.transport = Alone() if alone else GroupTransport(self.group, device)
        super()._begin()
        if isinstance(self.worker, ContextParallelExecutor):
            self.owners = self.worker.owners
        if not alone:
            self._agree()

    def _grid(self, spec: EngineSpec) -> Grid:
        # Where a layer is a stage, states cross between tiles: then no rank waits for another inside of one.
        # Keys and values are asked for inside, and so are the states of a stage that is many layers.
        inside = any(
            any(dim is not None for dim in stage.grows)
            or (getattr(stage, "lazy", False) and not isinstance(stage, Layer))
            for stage in self.stages
        )
        return dataclasses.replace(super()._grid(spec), costs=costs_of(self.stages), inside=inside)

    def _make_worker(self, grid: Grid, batch: Batch, spec: EngineSpec) -> Executor:
        if not grid.inside:
            return super()._make_worker(grid, batch, spec)
        owners = Owners((0,) * len(self.stages), self.workers).in_rounds(grid)
        given = self.stages, grid, batch, spec, self.width, self._new_gradients()
        return ContextParallelExecutor(owners, self.place, *given, Connections(self.transport))

    # ------------------------------------------------------------------------------------------ agreement

    def _agree(self) -> None:
        """Raises a UserError that says what differs between the ranks; takes rank 0's random cuts."""
        told = self._fingerprint()
        own = torch.tensor([number % (1 << 63) for number in told.values()], dtype=torch.int64)
        found = [each.tolist() for each in self.transport.all_gather(own, self.transport.ranks)]
        for i, name in enumerate(told):
            each = [numbers[i] for numbers in found]
            if name == WEIGHTS_NAME and 0 in each:  # compared before
                continue
            rank = next((r for r, number in enumerate(each) if number != each[0]), None)
            if rank is not None:
                counts = f": {each[rank]} and {each[0]}" if name in COUNTED else ""
                raise UserError(
                    "sequence_group: every rank must call with the same rows and method, but rank "
                    f"{rank} and rank 0 of the group differ in {name}{counts}"
                )
        grid = self.grid
        if grid.adjoint_scale:
            drawn = torch.tensor(grid.adjoint_scale, dtype=torch.float64, device=self.batch.ids.device)
            first = self.transport.all_gather(drawn, self.transport.ranks)[0]
            self.worker = self._worker(self.spec, tuple(map(tuple, first.tolist())))
            self.grid = self.worker.grid

    def _fingerprint(self) -> dict[str, int]:
        """What must be the same on all ranks, as numbers, by the names that users know it by."""
        batch, spec, worker = self.batch, self.spec, self.worker
        given = {
            "the number of rows": batch.rows,
            "the number of tokens": batch.seqlen,
            "the chunk size": spec.chunk_size,
            "the number of chunks": worker.grid.chunks,
            "the method": zlib.crc32(repr(spec).encode()),
            "whether gradients are on": self.has_backward,
            "what is trained": zlib.crc32(repr([p.requires_grad for p in self.parameters]).encode()),
            "the number of labels (num_items_in_batch)": zlib.crc32(repr(float(batch.divisor)).encode()),
            "precision": zlib.crc32(repr((worker.autocast, worker.lowest_precision)).encode()),
        }
        tensors: dict[str, Sequence[Tensor | None]] = {
            "input_ids": [batch.ids],
            "documents": [batch.seq_idx],
            "labels": [batch.targets],
            "further inputs": list(batch.inputs.values()),
            "the initial state": [s for state in batch.states for s in state],
        }
        found = given | {name: _digest(each) for name, each in tensors.items()}
        known, group = _compared.setdefault(self.parameters[0], set()), self.transport.group.group_name
        own = (local(p.detach()) for p in self.parameters)
        weights = () if group in known else [p.reshape(-1)[:WEIGHTS] for p in own]
        known.add(group)
        return found | {WEIGHTS_NAME: _digest(weights)}

    # ------------------------------------------------------------------------------------------- programs

    def _programs(self) -> tuple[Sequence[Action], Sequence[Action]]:
        grid = self.grid
        if any(grid.window(k) is not None for k in range(grid.stages)):
            # inputs of other ranks' windows travel in the backward alone: there may be none
            later = self._backward_program() if self.has_backward else ()
            return self._planned(backward=False, tapes=0), later
        made = self._planned(backward=self.has_backward, tapes=self.tapes)
        return [a for a in made if _in_forward(a)], [a for a in made if not _in_forward(a)]

    def _planned(self, **which: Any) -> Sequence[Action]:
        # windowed tiles' cotangents come in small pieces: more messages are under way
        buffers = BUFFERS if self.spec.backward.window is None else CAPACITY
        self.transport.buffers = buffers
        return make_schedule(self.grid, self.owners, buffers=buffers, **which).programs[self.place]

    def _run(self, actions: Sequence[Action]) -> None:
        super()._run(actions)
        self.transport.flush()
        if isinstance(self.worker, ContextParallelExecutor):
            self.worker.finish()

    # -------------------------------------------------------------------------------------------- results

    def _results(self) -> tuple[Tensor, list[State]]:
        # final states come from the rank with the last chunk, if they are asked for
        worker, grid = self.worker, self.grid
        dtype, device = worker.accumulate_dtype, worker.device
        ends = self.owners(0, grid.chunks - 1) == self.place
        for one in self.sums:
            one.share(lambda total: self.transport.all_reduce(total, self.transport.ranks))
        mine, states = worker.results()
        if isinstance(worker, ContextParallelExecutor) and worker.return_final_kv:
            states = self._gathered(worker, states)
        total = torch.zeros((), dtype=dtype, device=device) if mine is None else mine
        given = zip(states, worker.grows, strict=True)
        final = (
            [s for state, grows in given for s in recurrent(state, grows)] if worker.return_final_kv else []
        )
        pieces = [s.to(dtype) if ends else torch.zeros_like(s, dtype=dtype) for s in final]
        flat = torch.cat([total.to(dtype).reshape(1), *(piece.reshape(-1) for piece in pieces)])
        first, *rest = self.transport.all_reduce(flat, self.transport.ranks).split(
            [1, *(piece.numel() for piece in pieces)]
        )
        if worker.return_final_kv:
            whole = (r.view_as(s).to(s.dtype) for r, s in zip(rest, final, strict=True))
            given = zip(states, worker.grows, strict=True)
            states = [
                joined((next(whole) for _ in recurrent(state, grows)), growing(state, grows), grows)
                for state, grows in given
            ]
        return first[0].clone(), states

    def _gathered(self, worker: ContextParallelExecutor, states: Sequence[State]) -> list[State]:
        """The final states with what all ranks have of those that grow."""
        found = list(states)
        for k, slabs in worker.slabs.items():
            past = (self.transport.all_reduce(worker.whole(slab), self.transport.ranks) for slab in slabs)
            found[k] = joined(recurrent(found[k], worker.grows[k]), past, worker.grows[k])
        return found

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        self._same_scale(d_loss)
        gradients, d_initial = super().backward(d_loss, d_final)
        listed = self.parameters

        def zeros(i: int) -> Tensor:
            if i < len(listed):
                return torch.zeros_like(listed[i], dtype=accumulate_dtype(listed[i].dtype))
            return torch.zeros_like(self.initial[i - len(listed)])

        terms = [*(gradients.sums.get(p) for p in listed), *d_initial]
        found = summed(terms, zeros, self.transport, self.transport.ranks)
        gradients.sums = {p: total for p, total in zip(listed, found, strict=False) if total is not None}
        return gradients, found[len(listed) :]

    def _same_scale(self, d_loss: Tensor | None) -> None:
        """Raises a UserError if the ranks' losses are multiplied by different factors."""
        own = torch.tensor([0.0 if d_loss is None else float(d_loss)], dtype=torch.float64)
        found = torch.cat(self.transport.all_gather(own, self.transport.ranks)).tolist()
        for rank, scale in enumerate(found):
            if scale != found[0] and not (scale != scale and found[0] != found[0]):
                raise UserError(
                    f"sequence_group: the loss is multiplied by {found[0]:g} on rank 0 and by {scale:g} on "
                    f"rank {rank} of the group; it is the whole's on every rank, and so must its factor be"
                )


def local(tensor: Tensor) -> Tensor:
    """A tensor; of a DTensor this process's shard, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _in_forward(action: Action) -> bool:
    """Whether an action without windows is the forward's: its messages are states."""
    assert not isinstance(action, HelperTasks)
    return action.tile.is_forward if isinstance(action, Run) else action.key[0] == "S"


def _digest(tensors: Sequence[Tensor | None]) -> int:
    """A number that depends on every bit and on its place."""
    total = 0
    for t in tensors:
        if t is None:
            continue
        flat = (torch.view_as_real(t) if t.is_complex() else t).detach().reshape(-1)
        bits = flat.view(INTEGERS[flat.element_size()]).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device) * 0x5851F42D4C957F2D
        total = (total * 31 + int((bits * (places ^ (places >> 29))).sum()) + len(bits)) % (1 << 62)
    return total


def _check(stages: Sequence[Stage], spec: EngineSpec) -> None:
    """Raises a UserError for what a group's ranks cannot share."""
    if spec.backward.window == "auto":
        raise UserError('sequence_group: window "auto" needs the whole sequence in one place; give a number')
    if spec.storage.memory is not None:
        raise UserError(
            "sequence_group: memory= fits chunks to what one process has left, but all ranks must run the "
            "same chunks: give chunk_size instead"
        )
