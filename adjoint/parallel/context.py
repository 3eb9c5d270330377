"""Context parallelism: the processes of a `torch.distributed` group share one sequence.

Chunks are dealt to the group's ranks in turn; states and their cotangents cross chunk edges as messages, in
programs that are fixed beforehand (`engine.schedule`). Each rank runs one autograd function, calls with the
same rows and gets the loss of all tokens. Gradients are summed over the group at the end of the backward, so
that hooks, clipping, optimizers and DistributedDataParallel around it see the complete gradient."""

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
from adjoint.engine.step import ChunkedStep, ContextFactory
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
SINGLE_RANK: Any = object()  # in a group's place: this process alone, running the code of a group
_compared: Any = WeakTensorKeyDictionary()  # a model's first parameter: groups that have compared weights


def group_of(group: Any) -> Any:
    """Return the process group of a `sequence_group`.

    Args:
        group: a `ProcessGroup`, or a `DeviceMesh` of one dimension.

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
    if isinstance(group, mesh):
        if group.ndim != 1:
            raise UserError(
                f"sequence_group: a DeviceMesh of {group.ndim} dimensions; give the one of the sequence, "
                'such as mesh["sequence"]'
            )
        inside = group.get_coordinate() is not None
        group = group.get_group() if inside else None
    elif isinstance(group, dist.ProcessGroup):
        inside = dist.get_rank(group) >= 0
    elif group == dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, bool):
        inside = False
    else:
        raise UserError(
            "sequence_group must be a process group of torch.distributed or a DeviceMesh of one dimension; "
            f"got {group!r}"
        )
    if not inside:
        raise UserError(
            f"sequence_group: rank {dist.get_rank()} is not in the group; only its members may call with it"
        )
    return group


def ranks_of(group: Any) -> int:
    """Return the number of processes of a group that `group_of` has returned."""
    import torch.distributed as dist

    return dist.get_world_size(group)


class ContextParallelExecutor(Executor):
    """The executor of one rank, in whose tiles states, keys and values cross chunk edges (`handoff`, `kv`).

    Args:
        owners: owners of the chunks, in rounds (`Owners.in_rounds`).
        place: this worker.
        executor_arguments: as in `Executor`.
    """

    transport: Messages

    def __init__(self, owners: Owners, place: int, *executor_arguments: Any) -> None:
        self.owners, self.place = owners, place
        super().__init__(*executor_arguments)
        self.initial_tokens = self._initial_tokens()
        # not a method: the worker would hold itself, and keep keys and values alive after the step
        span = functools.partial(_span, self.chunks, self.documents, self.initial_tokens)
        self.distributed_kv = DistributedKV(self.grid, owners, place, self.transport, span)
        self.states: dict[tuple[int, int], State] = {}  # recurrent states before this rank's chunks
        self.handoffs: dict[tuple[int, int], list[StateHandoff]] = {}
        self.under_way: dict[int, list[StateHandoff]] = collections.defaultdict(list)  # by stage
        self.first_tags = list(
            itertools.accumulate((len(packing.shapes) for packing in self.packing), initial=STATES)
        )
        own_chunks = [c for c in range(self.grid.chunks) if self._owner(c) == place]
        self.last = own_chunks[-1] if own_chunks else -1
        for edges in self.edges:
            edges.rows = sum(self.grid.reads_state(c) for c in own_chunks)

    def _owner(self, c: int) -> int:
        return self.owners.peer(self.place, c)

    def slab(self, initial: Tensor, dim: int) -> Slab:
        if self._owner(0) != self.place:  # who has the first chunk has what is before it, too
            initial = initial.narrow(dim, 0, 0)
        grid = self.grid
        tokens = sum(grid.tokens(c) for c in range(grid.chunks) if self._owner(c) == self.place)
        return Slab(initial, dim, tokens, self.host)

    def count_edges(self, actions: Sequence[Action]) -> None:
        """Do nothing: this worker knows its edges from the beginning."""

    # ------------------------------------------------------------------------------------------------ states

    def _initial_tokens(self) -> int:
        """Return the number of tokens before the sequence in states that grow.

        Raises:
            UserError: layers have different numbers of them.
        """
        past_lengths = {
            s.shape[dim]
            for k in self.slabs
            for s, dim in zip(self.batch.states[k], self.grows[k], strict=True)
            if dim is not None
        }
        if len(past_lengths) > 1:
            raise UserError(
                f"sequence_group: initial states have keys of {sorted(past_lengths)} tokens; give all layers "
                "the same number"
            )
        return max(past_lengths, default=0)

    def past(self, slab: Slab, c: int, fetches: bool = False) -> DistributedPast:
        chunk, initial_tokens = self.chunks[c], self.initial_tokens
        anchor = torch.zeros((), requires_grad=True)
        begin = chunk.document or -initial_tokens
        arguments = self.distributed_kv, slab, c, chunk.start, begin, anchor, fetches
        return DistributedPast(*arguments, *self.documents(chunk, initial_tokens))

    def state(self, k: int, c: int) -> Any:
        initial, grows, grid = self.batch.states[k], self.grows[k], self.grid
        first, before_chunk = (k, c) not in self.states, recurrent(initial, grows)
        arrives = first and grid.reads_state(c) and bool(before_chunk)
        if first:
            if c in grid.document_starts:
                before_chunk = tuple(torch.zeros_like(s) for s in before_chunk)
            elif arrives:
                before_chunk = self.packing[k].unpack(self.edges[k].at(self.edges[k].row()))
            self.states[k, c] = before_chunk
        before_chunk = self.states[k, c]
        if first:  # their receivers have come this far, or will do so without this rank: waiting is safe
            self._wait(k)
        next_rank = self._owner(c + 1) if grid.reads_state(c + 1) else None
        previous_rank = self._owner(c - 1) if grid.carries(c) else None
        gradient_source = self._owner(c + 1) if grid.carries(c + 1) else None
        handoffs = self.handoffs[k, c] = [
            StateHandoff(
                self.transport,
                tag,
                s,
                self.accumulate_dtype,
                next_rank if first else None,
                previous_rank,
                gradient_source,
            )
            for tag, s in enumerate(before_chunk, self.first_tags[k])
        ]
        for handoff in handoffs if arrives else ():
            handoff.post_receive(self._owner(c - 1))
        with torch.no_grad():
            handed = tuple(handoff if self._takes_handoff(k) else handoff.receive() for handoff in handoffs)
        fetches = getattr(self.stages[k], "fetches", False)
        return joined(handed, (self.past(slab, c, fetches) for slab in self.slabs.get(k, ())), grows)

    def _takes_handoff(self, k: int) -> bool:
        return getattr(self.stages[k], "takes_state_handoff", False)

    def keep_state(self, k: int, c: int, state: State) -> None:
        handoffs = self.handoffs[k, c]
        if not self._takes_handoff(k):
            with torch.no_grad():
                for handoff, s in zip(handoffs, recurrent(state, self.grows[k]), strict=True):
                    handoff.send(s)
        self._close(k, c)
        self.under_way[k] += handoffs
        if c + 1 == self.grid.chunks:
            after_chunk = map(by_itself, recurrent(state, self.grows[k]))
            self.final[k] = joined(
                after_chunk, (slab.between(0, 0) for slab in self.slabs.get(k, ())), self.grows[k]
            )

    def forward(self, t: Tile) -> None:
        with self._check_attended():
            super().forward(t)

    def recompute(self, t: Tile) -> None:
        with self._check_attended():
            super().recompute(t)
        self._close(t.stage, t.chunk)

    def _close(self, k: int, c: int) -> None:
        """End the forward of a chunk for handoffs that a layer has used itself: its states have been sent."""
        for handoff in self.handoffs.get((k, c), ()) if self._takes_handoff(k) else ():
            handoff.end_forward()

    @contextlib.contextmanager
    def _check_attended(self) -> Iterator[None]:
        """Raise NotAttended if keys and values were joined to other ranks' but `attend` was not called.

        Then a model's own attention code has used the chunk's own keys as if they were all, whether it failed
        by that or not."""
        cause: Exception | None = None
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not self.distributed_kv.unattended:
                raise
            cause = error
        if self.distributed_kv.unattended:
            self.distributed_kv.unattended.clear()
            raise NotAttended(
                "sequence_group: this model's attention is its own code, which knows no keys and values of "
                'other ranks: give it attn_implementation="sdpa", or leave sequence_group out'
            ) from cause

    def backward(self, t: Tile) -> None:
        """Pull a tape back, exchanging the states' cotangents."""
        k, c, grows, grid = t.stage, t.chunk, self.grows[t.stage], self.grid
        start, stop = grid.cuts[c : c + 2]
        last, slabs, takes_handoff = c + 1 == grid.chunks, self.slabs.get(k, []), self._takes_handoff(k)
        if c == self.last:
            for slab, d in zip(slabs, growing(self.d_final[k], grows), strict=True):
                slab.begin(None if d is None else self._own_tokens(d, slab.dim))
        self._wait(k)
        handoffs = self.handoffs.pop((k, c), [])
        for handoff in handoffs:
            handoff.begin_backward()
        if last:
            carried: Cotangents = recurrent(self.d_final[k], grows)
        elif takes_handoff:  # their values come while the tile runs
            carried = tuple(
                None
                if x.gradient_source is None
                else x.initial_state.new_zeros(()).expand(x.initial_state.shape)
                for x in handoffs
            )
        else:
            carried = tuple(x.receive_cotangent() for x in handoffs)
        d_state = joined(carried, (None for _ in slabs), grows)
        dx, d_state = self.store.pop(("tape", k, c))(self._cotangent(k, start, stop), d_state)
        if ("dy", k - 1, c) in grid.writes(t):
            self.store["dy", k - 1, c] = dx
        self._add_to_ids(k, start, dx)
        for handoff, d in zip(handoffs, recurrent(d_state, grows), strict=True):
            if not takes_handoff:
                handoff.send_cotangent(d)
            handoff.end_backward()
        self.under_way[k] += handoffs
        if c == 0:
            d_recurrent = tuple(by_itself(x.grad_initial_state) for x in handoffs)
            past = (slab.initial().to(slab.initially.dtype) for slab in slabs)
            self.d_initial[k] = joined(d_recurrent, past, grows)

    def _wait(self, k: int) -> None:
        """Wait until the stage's states and cotangents have left."""
        for handoff in self.under_way.pop(k, ()):
            handoff.wait()

    def finish(self) -> None:
        """Wait until everything has left."""
        for k in [*self.under_way]:
            self._wait(k)

    # ------------------------------------------------------------------------------------ states that grow

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield this rank's runs of tokens: (first token in the sequence, length, index among its own)."""
        initial_tokens = self.initial_tokens
        if initial_tokens and self._owner(0) == self.place:
            yield -initial_tokens, initial_tokens, -initial_tokens
        for c in range(self.grid.chunks):
            if self._owner(c) == self.place:
                yield self.grid.cuts[c], self.grid.tokens(c), self.distributed_kv.own_tokens(c)

    def _own_tokens(self, all_tokens: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor with all tokens, those before the sequence included."""
        pieces = [all_tokens.narrow(dim, self.initial_tokens + start, n) for start, n, _ in self._pieces()]
        return torch.cat(pieces, dim=dim) if pieces else all_tokens.narrow(dim, 0, 0)

    def gather_slab(self, slab: Slab) -> Tensor:
        """Return the slab's tensor with all tokens; those of other ranks are zero."""
        shape = [*slab.initially.shape]
        shape[slab.dim] = self.initial_tokens + self.grid.cuts[-1]
        out = slab.initially.new_zeros(shape)
        for start, n, own_start in self._pieces():
            out.narrow(slab.dim, self.initial_tokens + start, n).copy_(slab.between(own_start, own_start + n))
        return out


def _span(
    chunks: Sequence[Batch], documents: Documents, initial_tokens: int, c: int, row: int | None
) -> tuple[int, int]:
    """Return the `kv.TokenRange` of a chunk, in a sequence that `initial_tokens` tokens precede."""
    chunk = chunks[c]
    if row is None:
        return chunk.seqlen, chunk.document or -initial_tokens
    boundaries = documents(chunk, initial_tokens)
    assert boundaries, "only documents make rows differ"
    return min([*boundaries[1][row], chunk.seqlen]), chunk.start - boundaries[0][row]


class ContextParallelStep(ChunkedStep):
    """`ChunkedStep` of one rank of a group.

    Args:
        group: a process group of two ranks or more (`group_of`), or `SINGLE_RANK`.
        stages, batch, spec, width, backward_context, sums: as in `ChunkedStep`.

    Raises:
        UserError: the ranks' arguments differ, or ranks cannot share such a spec or stage.
    """

    transport: GroupTransport

    def __init__(
        self,
        group: Any,
        stages: Sequence[Stage],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        backward_context: ContextFactory = contextlib.nullcontext,
        sums: Sequence[Sum] = (),
    ) -> None:
        import torch.distributed as dist

        self.group = group
        self.workers, self.place = (1, 0) if group is SINGLE_RANK else (ranks_of(group), dist.get_rank(group))
        super().__init__(stages, batch, spec, width, backward_context, sums)

    def _begin(self) -> None:
        _check(self.stages, self.spec)
        alone, device = self.group is SINGLE_RANK, self.batch.ids.device
        self.transport = Alone() if alone else GroupTransport(self.group, device)
        super()._begin()
        if isinstance(self.worker, ContextParallelExecutor):
            self.owners = self.worker.owners
        if not alone:
            self._check_agreement()

    def _grid(self, spec: EngineSpec) -> Grid:
        # Where a layer is a stage, states cross between tiles: then no rank waits for another inside of one.
        # Keys and values are asked for inside, and so are the states of a stage that is many layers.
        inside = any(
            any(dim is not None for dim in stage.grows)
            or (getattr(stage, "takes_state_handoff", False) and not isinstance(stage, Layer))
            for stage in self.stages
        )
        return dataclasses.replace(
            super()._grid(spec), costs=costs_of(self.stages), exchanges_within_tiles=inside
        )

    def _make_worker(self, grid: Grid, batch: Batch, spec: EngineSpec) -> Executor:
        if not grid.exchanges_within_tiles:
            return super()._make_worker(grid, batch, spec)
        owners = Owners((0,) * len(self.stages), self.workers).in_rounds(grid)
        arguments = self.stages, grid, batch, spec, self.width, self._new_gradients()
        return ContextParallelExecutor(owners, self.place, *arguments, Connections(self.transport))

    # ------------------------------------------------------------------------------------------ agreement

    def _check_agreement(self) -> None:
        """Raise a UserError that says what differs between the ranks; use rank 0's random cuts on all."""
        fingerprint = self._fingerprint()
        own_numbers = torch.tensor([number % (1 << 63) for number in fingerprint.values()], dtype=torch.int64)
        numbers_by_rank = [
            rank_numbers.tolist()
            for rank_numbers in self.transport.all_gather(own_numbers, self.transport.ranks)
        ]
        for i, name in enumerate(fingerprint):
            rank_numbers = [numbers[i] for numbers in numbers_by_rank]
            if name == WEIGHTS_NAME and 0 in rank_numbers:  # compared before
                continue
            rank = next((r for r, number in enumerate(rank_numbers) if number != rank_numbers[0]), None)
            if rank is not None:
                counts = f": {rank_numbers[rank]} and {rank_numbers[0]}" if name in COUNTED else ""
                raise UserError(
                    "sequence_group: every rank must call with the same rows and method, but rank "
                    f"{rank} and rank 0 of the group differ in {name}{counts}"
                )
        grid = self.grid
        if grid.adjoint_scale:
            own_scale = torch.tensor(grid.adjoint_scale, dtype=torch.float64, device=self.batch.ids.device)
            scale_of_rank_0 = self.transport.all_gather(own_scale, self.transport.ranks)[0]
            self.worker = self._worker(self.spec, tuple(map(tuple, scale_of_rank_0.tolist())))
            self.grid = self.worker.grid

    def _fingerprint(self) -> dict[str, int]:
        """Return all that must be the same on all ranks, as numbers, by the users' names for it."""
        batch, spec, worker = self.batch, self.spec, self.worker
        settings = {
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
        fingerprint = settings | {name: _digest(values) for name, values in tensors.items()}
        compared_groups, group = (
            _compared.setdefault(self.parameters[0], set()),
            self.transport.group.group_name,
        )
        local_parameters = (local(p.detach()) for p in self.parameters)
        weights = () if group in compared_groups else [p.reshape(-1)[:WEIGHTS] for p in local_parameters]
        compared_groups.add(group)
        return fingerprint | {WEIGHTS_NAME: _digest(weights)}

    # ------------------------------------------------------------------------------------------- programs

    def _programs(self) -> tuple[Sequence[Action], Sequence[Action]]:
        grid = self.grid
        if any(grid.window(k) is not None for k in range(grid.stages)):
            # inputs of other ranks' windows travel in the backward alone: there may be none
            later = self._backward_program() if self.has_backward else ()
            return self._make_actions(backward=False, tapes=0), later
        actions = self._make_actions(backward=self.has_backward, tapes=self.tapes)
        return [a for a in actions if _in_forward(a)], [a for a in actions if not _in_forward(a)]

    def _make_actions(self, **options: Any) -> Sequence[Action]:
        # windowed tiles' cotangents come in small pieces: more messages are under way
        buffers = BUFFERS if self.spec.backward.window is None else CAPACITY
        self.transport.buffers = buffers
        return make_schedule(self.grid, self.owners, buffers=buffers, **options).programs[self.place]

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
        has_last_chunk = self.owners(0, grid.chunks - 1) == self.place
        for sequence_sum in self.sums:
            sequence_sum.share(lambda total: self.transport.all_reduce(total, self.transport.ranks))
        own_loss, states = worker.results()
        if isinstance(worker, ContextParallelExecutor) and worker.return_final_kv:
            states = self._gather_growing(worker, states)
        total = torch.zeros((), dtype=dtype, device=device) if own_loss is None else own_loss
        states_and_dims = zip(states, worker.grows, strict=True)
        final = (
            [s for state, grows in states_and_dims for s in recurrent(state, grows)]
            if worker.return_final_kv
            else []
        )
        pieces = [s.to(dtype) if has_last_chunk else torch.zeros_like(s, dtype=dtype) for s in final]
        flat = torch.cat([total.to(dtype).reshape(1), *(piece.reshape(-1) for piece in pieces)])
        first, *rest = self.transport.all_reduce(flat, self.transport.ranks).split(
            [1, *(piece.numel() for piece in pieces)]
        )
        if worker.return_final_kv:
            tensors = (r.view_as(s).to(s.dtype) for r, s in zip(rest, final, strict=True))
            states_and_dims = zip(states, worker.grows, strict=True)
            states = [
                joined((next(tensors) for _ in recurrent(state, grows)), growing(state, grows), grows)
                for state, grows in states_and_dims
            ]
        return first[0].clone(), states

    def _gather_growing(self, worker: ContextParallelExecutor, states: Sequence[State]) -> list[State]:
        """Return the final states, with all ranks' tokens in those that grow."""
        gathered = list(states)
        for k, slabs in worker.slabs.items():
            past = (
                self.transport.all_reduce(worker.gather_slab(slab), self.transport.ranks) for slab in slabs
            )
            gathered[k] = joined(recurrent(gathered[k], worker.grows[k]), past, worker.grows[k])
        return gathered

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        self._check_same_scale(d_loss)
        gradients, d_initial = super().backward(d_loss, d_final)
        listed = self.parameters

        def zeros(i: int) -> Tensor:
            if i < len(listed):
                return torch.zeros_like(listed[i], dtype=accumulate_dtype(listed[i].dtype))
            return torch.zeros_like(self.initial[i - len(listed)])

        terms = [*(gradients.sums.get(p) for p in listed), *d_initial]
        totals = summed(terms, zeros, self.transport, self.transport.ranks)
        gradients.sums = {p: total for p, total in zip(listed, totals, strict=False) if total is not None}
        return gradients, totals[len(listed) :]

    def _check_same_scale(self, d_loss: Tensor | None) -> None:
        """Raise a UserError if the ranks' losses are multiplied by different factors."""
        own_scale = torch.tensor([0.0 if d_loss is None else float(d_loss)], dtype=torch.float64)
        scales = torch.cat(self.transport.all_gather(own_scale, self.transport.ranks)).tolist()
        for rank, scale in enumerate(scales):
            if scale != scales[0] and not (scale != scale and scales[0] != scales[0]):
                raise UserError(
                    f"sequence_group: the loss is multiplied by {scales[0]:g} on rank 0 and by {scale:g} on "
                    f"rank {rank} of the group: multiply it by the same number on every rank"
                )


def local(tensor: Tensor) -> Tensor:
    """Return the tensor, or this process's shard of a DTensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _in_forward(action: Action) -> bool:
    """Whether an action without windows is the forward's: its messages are states."""
    assert not isinstance(action, HelperTasks)
    return action.tile.is_forward if isinstance(action, Run) else action.key[0] == "S"


def _digest(tensors: Sequence[Tensor | None]) -> int:
    """Return a number that depends on every bit and on its position."""
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
    """Raise a UserError for a spec that a group's ranks cannot share."""
    if spec.backward.window == "auto":
        raise UserError('sequence_group: window "auto" needs the whole sequence in one place; give a number')
    if spec.storage.memory is not None:
        raise UserError(
            "sequence_group: memory= fits chunks to what one process has left, but all ranks must run the "
            "same chunks: give chunk_size instead"
        )
