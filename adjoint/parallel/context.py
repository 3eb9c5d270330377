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
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.engine.budget import refuse_budget
from adjoint.engine.distribution import Distribution, layers_are_stages
from adjoint.engine.exchange import BetweenTiles, Exchange, refuse_unread
from adjoint.engine.executor import Connections, Executor
from adjoint.engine.grid import EngineSpec, Grid, Tile
from adjoint.engine.layer_run import named_modules
from adjoint.engine.schedule import Action, Owners, Schedule
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.shared_prefix import AfterPrefix
from adjoint.engine.stage import Stage, costs_of
from adjoint.engine.storage import Prefix, Slab, append_only_part, compact, merge_parts, recurrent_part
from adjoint.engine.tile import Cotangents
from adjoint.engine.tile_values import Documents, TileValues
from adjoint.errors import UserError
from adjoint.layers import State
from adjoint.parallel.agreement import (
    COMPARED_ELEMENTS,
    describe_settings,
    describe_tensors,
    different_calls,
    different_models,
    digest,
    first_difference_among,
    number_of,
)
from adjoint.parallel.handoff import StateHandoff
from adjoint.parallel.kv import STATES, DistributedKV, DistributedPast
from adjoint.parallel.split_tensors import local
from adjoint.parallel.transport import Alone, GroupTransport, Messages, summed

WEIGHTS_NAME = "the model's weights"
MODEL_NAME = "what the model has besides trained weights"
COUNTED = ("the number of rows", "the number of tokens", "the chunk size", "the number of chunks")


FINGERPRINTS = 16  # numbers by which ranks compare their calls
REFUSED = -1  # in the place of each, of a rank whose call has ended with an error


class SingleRank:
    """Stand-in for a group: this process alone, running the code of a group."""


SINGLE_RANK = SingleRank()
# a model's first module: groups that have compared weights; names of settings that its own forward changes
_compared: MutableMapping[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_changed_by_forward: MutableMapping[nn.Module, set[str]] = weakref.WeakKeyDictionary()
# number of calls that a group's ranks have compared
_agreements: MutableMapping[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def group_of(group: object, setting: str = "sequence_group") -> dist.ProcessGroup:
    """Return the process group of a `sequence_group`, or of another setting.

    Args:
        group: a `ProcessGroup`, or a `DeviceMesh` of one dimension.
        setting: its name in error messages.

    Raises:
        UserError: it is neither, this process is not in it, or torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            f"{setting}: torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() in every process first, under torchrun"
        )
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    if isinstance(group, mesh):
        if group.ndim != 1:
            raise UserError(
                f"{setting}: a DeviceMesh of {group.ndim} dimensions; give one of them, such as "
                f'mesh["{setting.removesuffix("_group")}"]'
            )
        inside = group.get_coordinate() is not None
        group = group.get_group() if inside else None
    elif isinstance(group, dist.ProcessGroup):
        inside = dist.get_rank(group) >= 0
    elif group == dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, bool):
        inside = False
    else:
        raise UserError(
            f"{setting} must be a process group of torch.distributed or a DeviceMesh of one dimension; "
            f"got {group!r}"
        )
    if not inside or not isinstance(group, dist.ProcessGroup):
        raise UserError(
            f"{setting}: rank {dist.get_rank()} is not in the group; only its members may call with it"
        )
    return group


@contextlib.contextmanager
def telling_ranks(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Tell the ranks of a group if this one's call ends with an error before they have agreed on it.

    They would wait for it until the group's timeout. The others' error says which rank it is."""
    agreements = _agreements.get(group, 0)
    try:
        yield
    except Exception:
        if _agreements.get(group, 0) == agreements:
            with contextlib.suppress(UserError, RuntimeError):  # the call's own error matters more
                transport = GroupTransport(group, device)
                transport.all_gather(torch.full((FINGERPRINTS,), REFUSED), transport.ranks)
        raise


def ranks_of(group: dist.ProcessGroup) -> int:
    """Return the number of processes of a group that `group_of` has returned."""
    return dist.get_world_size(group)


class WithinTiles(Exchange):
    """States, keys and values cross chunk edges while tiles run (`handoff`, `kv`).

    Args:
        owners: owners of the chunks, in rounds (`Owners.fitted_to`).
        rank: the worker that this is.
        transport: to the other workers.

    Attributes:
        states: recurrent states before this rank's chunks, by stage and chunk.
        handoffs: of the tapes that have not been pulled back, by stage and chunk.
        under_way: handoffs whose messages have not left, by stage.
        initial_tokens: tokens before the sequence in states that grow.
    """

    def __init__(self, owners: Owners, rank: int, transport: Messages) -> None:
        self.owners, self.rank, self.transport = owners, rank, transport
        self.states: dict[tuple[int, int], State] = {}
        self.handoffs: dict[tuple[int, int], list[StateHandoff]] = {}
        self.under_way: dict[int, list[StateHandoff]] = collections.defaultdict(list)

    def _owner(self, c: int) -> int:
        return self.owners.peer(self.rank, c)

    def slab(self, values: TileValues, initial: Tensor, dim: int, k: int) -> Slab:
        if self._owner(0) != self.rank:  # who has the first chunk has what is before it, too
            initial = initial.narrow(dim, 0, 0)
        grid = values.grid
        tokens = sum(grid.tokens(c) for c in range(grid.chunks) if self._owner(c) == self.rank)
        return Slab(initial, dim, tokens, values.host)

    def begin(self, values: TileValues) -> None:
        super().begin(values)
        grid, self.initial_tokens = values.grid, _initial_tokens(values)
        span = functools.partial(_span, grid, values.documents, self.initial_tokens)
        self.distributed_kv = DistributedKV(grid, self.owners, self.rank, self.transport, span)
        self.first_tags = list(
            itertools.accumulate((len(packing.shapes) for packing in values.packing), initial=STATES)
        )
        own_chunks = [c for c in range(grid.chunks) if self._owner(c) == self.rank]
        self.last = own_chunks[-1] if own_chunks else -1
        stored = sum(grid.reads_state(c) for c in own_chunks)
        values.reserve_edges(dict.fromkeys(range(len(values.edges)), stored))

    def count_edges(self, values: TileValues, actions: Collection[Action]) -> None:
        """Do nothing: edges are known from the beginning."""

    # ------------------------------------------------------------------------------------------------ states

    def _past(self, values: TileValues, slab: Slab, c: int, fetches: bool, anchor: Tensor) -> DistributedPast:
        grid, initial_tokens = values.grid, self.initial_tokens
        start, stop = grid.cuts[c : c + 2]
        begin = grid.document(c) or -initial_tokens
        arguments = self.distributed_kv, slab, c, start, begin, anchor, fetches
        return DistributedPast(*arguments, *values.documents(start, stop, initial_tokens))

    def state(self, values: TileValues, k: int, c: int) -> tuple[Any, ...]:
        initial, grows, grid = values.batch.states[k], values.grows[k], values.grid
        first, before_chunk = (k, c) not in self.states, recurrent_part(initial, grows)
        arrives = first and grid.reads_state(c) and bool(before_chunk)
        if first:
            if c in grid.document_starts:
                before_chunk = tuple(torch.zeros_like(s) for s in before_chunk)
            elif arrives:
                edges = values.edges[k]
                before_chunk = values.packing[k].unpack(edges.view(edges.take_row()))
            self.states[k, c] = before_chunk
        before_chunk = self.states[k, c]
        if first:  # their receivers have come this far, or will do so without this rank: waiting is safe
            self._wait(k)
        next_rank = self._owner(c + 1) if grid.reads_state(c + 1) else None
        previous_rank = self._owner(c - 1) if grid.carries(c) else None
        gradient_source = self._owner(c + 1) if grid.carries(c + 1) else None
        empty_message = torch.empty(0, dtype=values.accumulate_dtype, device=values.device)
        handoffs = self.handoffs[k, c] = [
            StateHandoff(
                self.transport,
                tag,
                s,
                empty_message,
                next_rank if first else None,
                previous_rank,
                gradient_source,
            )
            for tag, s in enumerate(before_chunk, self.first_tags[k])
        ]
        for handoff in handoffs if arrives else ():
            handoff.post_receive(self._owner(c - 1))
        stage = values.stage(k)
        with torch.no_grad():
            handed = tuple(
                handoff if stage.takes_state_handoff else handoff.receive() for handoff in handoffs
            )
        pasts = (
            self._past(values, slab, c, stage.fetches, torch.zeros((), requires_grad=True))
            for slab in values.slabs.get(k, ())
        )
        return merge_parts(handed, pasts, grows)

    def put_state(self, values: TileValues, k: int, c: int, state: State) -> None:
        handoffs, grows = self.handoffs[k, c], values.grows[k]
        if not values.stage(k).takes_state_handoff:
            with torch.no_grad():
                for handoff, s in zip(handoffs, recurrent_part(state, grows), strict=True):
                    handoff.send(s)
        self._end_forward(values, k, c)
        self.under_way[k] += handoffs
        if c + 1 == values.grid.chunks:
            after_chunk = map(compact, recurrent_part(state, grows))
            slabs = (slab.read(0, 0) for slab in values.slabs.get(k, ()))
            values.final[k] = merge_parts(after_chunk, slabs, grows)

    @contextlib.contextmanager
    def tile_context(self, values: TileValues, t: Tile) -> Iterator[None]:
        """Raise NotAttended if keys and values were joined to other ranks' but `attend` was not called."""
        with refuse_unread(
            self.distributed_kv.unattended,
            "sequence_group: this model's attention is its own code, which knows no keys and values of "
            'other ranks: give it attn_implementation="sdpa", or leave sequence_group out',
        ):
            yield
        if t.kind == "recompute":
            self._end_forward(values, t.stage, t.chunk)

    def _end_forward(self, values: TileValues, k: int, c: int) -> None:
        """End the forward of a chunk for handoffs that a layer has used itself: its states have been sent."""
        for handoff in self.handoffs.get((k, c), ()) if values.stage(k).takes_state_handoff else ():
            handoff.end_forward()

    # -------------------------------------------------------------------------------------------- cotangents

    def cotangents(self, values: TileValues, k: int, c: int) -> Cotangents:
        grows, grid, slabs = values.grows[k], values.grid, values.slabs.get(k, [])
        if c == self.last:
            for slab, d in zip(slabs, append_only_part(values.d_final[k], grows), strict=True):
                slab.begin_backward(None if d is None else self._own_tokens(grid, d, slab.dim))
        self._wait(k)
        handoffs = self.handoffs.get((k, c), [])
        for handoff in handoffs:
            handoff.begin_backward()
        if c + 1 == grid.chunks:
            carried: Cotangents = recurrent_part(values.d_final[k], grows)
        elif values.stage(k).takes_state_handoff:  # their values come while the tile runs
            carried = tuple(
                None
                if x.gradient_source is None
                else torch.zeros((), dtype=x.initial_state.dtype, device=x.device).expand(
                    x.initial_state.shape
                )
                for x in handoffs
            )
        else:
            carried = tuple(x.receive_cotangent() for x in handoffs)
        return merge_parts(carried, (None for _ in slabs), grows)

    def put_cotangents(self, values: TileValues, k: int, c: int, d_state: Cotangents) -> None:
        grows, handoffs = values.grows[k], self.handoffs.pop((k, c), [])
        for handoff, d in zip(handoffs, recurrent_part(d_state, grows), strict=True):
            if not values.stage(k).takes_state_handoff:
                handoff.send_cotangent(d)
            handoff.end_backward()
        self.under_way[k] += handoffs
        if c == 0:
            d_recurrent = tuple(compact(x.grad_initial_state) for x in handoffs)
            past = (slab.initial_cotangent().to(slab.initial.dtype) for slab in values.slabs.get(k, []))
            values.d_initial[k] = merge_parts(d_recurrent, past, grows)

    def _wait(self, k: int) -> None:
        """Wait until the stage's states and cotangents have left."""
        for handoff in self.under_way.pop(k, ()):
            handoff.wait()

    def finish(self) -> None:
        for k in [*self.under_way]:
            self._wait(k)

    # ------------------------------------------------------------------------------------ states that grow

    def _pieces(self, grid: Grid) -> Iterator[tuple[int, int, int]]:
        """Yield this rank's runs of tokens: (first token in the sequence, length, index among its own)."""
        initial_tokens = self.initial_tokens
        if initial_tokens and self._owner(0) == self.rank:
            yield -initial_tokens, initial_tokens, -initial_tokens
        for c in range(grid.chunks):
            if self._owner(c) == self.rank:
                yield grid.cuts[c], grid.tokens(c), self.distributed_kv.own_tokens(c)

    def _own_tokens(self, grid: Grid, all_tokens: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor with all tokens, those before the sequence included."""
        pieces = [
            all_tokens.narrow(dim, self.initial_tokens + start, n) for start, n, _ in self._pieces(grid)
        ]
        return torch.cat(pieces, dim=dim) if pieces else all_tokens.narrow(dim, 0, 0)

    def gather_slab(self, grid: Grid, slab: Slab) -> Tensor:
        """Return the slab's tensor with all tokens; those of other ranks are zero."""
        shape = [*slab.initial.shape]
        shape[slab.dim] = self.initial_tokens + grid.cuts[-1]
        out = slab.initial.new_zeros(shape)
        for start, n, own_start in self._pieces(grid):
            out.narrow(slab.dim, self.initial_tokens + start, n).copy_(slab.read(own_start, own_start + n))
        return out


def _initial_tokens(values: TileValues) -> int:
    """Return the number of tokens before the sequence in states that grow.

    Raises:
        UserError: layers have different numbers of them.
    """
    past_lengths = {
        s.shape[dim]
        for k in values.slabs
        for s, dim in zip(values.batch.states[k], values.grows[k], strict=True)
        if dim is not None
    }
    if len(past_lengths) > 1:
        raise UserError(
            f"sequence_group: initial states have keys of {sorted(past_lengths)} tokens; give all layers the "
            "same number"
        )
    return max(past_lengths, default=0)


def _span(grid: Grid, documents: Documents, initial_tokens: int, c: int, row: int | None) -> tuple[int, int]:
    """Return the `kv.TokenRange` of a chunk, in a sequence that `initial_tokens` tokens precede.

    It computes nothing on tensors: attention calls it while activation checkpointing records operators."""
    start, stop = grid.cuts[c : c + 2]
    if row is None:
        return stop - start, grid.document(c) or -initial_tokens
    boundaries = documents(start, stop, initial_tokens)
    assert boundaries, "only documents make rows differ"
    return min([*boundaries[1][row], stop - start]), start - boundaries[0][row]


def exchange_of(grid: Grid, owners: Owners, worker: int, transport: Messages | None) -> Exchange:
    """Return how states cross to a worker's peers: where the grid says, or nowhere without a transport."""
    if transport is None or not grid.exchanges_within_tiles:
        return BetweenTiles()
    return WithinTiles(owners, worker, transport)


def _meet_within_tiles(stages: Sequence[Stage | None]) -> bool:
    """Whether ranks exchange within tiles (`Grid.exchanges_within_tiles`).

    Keys and values are asked for there, and so are the states of a stage that is many layers."""
    return any(
        stage.is_many_layers or any(dim is not None for dim in stage.grows)
        for stage in stages
        if stage is not None
    )


def distribution_of(
    group: dist.ProcessGroup | SingleRank | None, prefix: Prefix | None = None
) -> Distribution:
    """Return how a batch is distributed.

    Args:
        group: whose ranks share its sequences, `SINGLE_RANK`, or None.
        prefix: tokens before the batch's that an earlier step has stored, without a group; or None.
    """
    if prefix is not None:
        assert group is None
        return AfterPrefix(prefix)
    return Distribution() if group is None else SequenceGroup(group)


class SequenceGroup(Distribution):
    """The ranks of a group, each with all stages, to whom the chunks of a sequence are dealt in turn.

    Attributes:
        transport: to the other ranks; set by `begin`.
    """

    shares_sequence = True
    is_alone = False

    def __init__(self, group: dist.ProcessGroup | SingleRank) -> None:
        self.group = group
        if isinstance(group, SingleRank):
            self.ranks, self.worker = 1, 0
        else:
            self.ranks, self.worker = ranks_of(group), dist.get_rank(group)

    def begin(self, stages: Sequence[Stage | None], spec: EngineSpec, device: torch.device) -> None:
        if spec.backward.window == "auto":
            raise UserError(
                'sequence_group: window "auto" needs the whole sequence in one place; give a number'
            )
        refuse_budget(spec.storage.memory, "all ranks", "sequence_group: ")
        if spec.storage.checkpoints is not None:
            raise UserError(
                "sequence_group: checkpoints= computes states again from chunks before them, which other "
                "ranks have: leave it out; each rank stores the states before its own chunks alone"
            )
        if isinstance(self.group, SingleRank):
            self.transport: GroupTransport = Alone()
        else:
            self.transport = GroupTransport(self.group, device)

    def runs(self, spec: EngineSpec, stages: Sequence[Stage | None]) -> Sequence[int]:
        is_each = layers_are_stages(spec, True, _meet_within_tiles(stages))
        return range(len(stages)) if is_each else [0] * len(stages)

    def grid(
        self,
        spec: EngineSpec,
        seqlen: int,
        stages: Sequence[Stage | None],
        windows: Sequence[int] | None = None,
    ) -> Grid:
        local_stages, inside = [stage for stage in stages if stage is not None], _meet_within_tiles(stages)
        grid = super().grid(spec, seqlen, stages, windows)
        return dataclasses.replace(grid, costs=costs_of(local_stages), exchanges_within_tiles=inside)

    def owners(self, grid: Grid) -> Owners:
        return Owners((0,) * grid.stages, self.ranks).fitted_to(grid)

    def has_chunk(self, grid: Grid) -> bool:
        owners = self.owners(grid)
        return any(owners(0, c) == self.worker for c in range(grid.chunks))

    def connections(self, grid: Grid) -> Connections:
        return Connections(self.transport, exchange_of(grid, self.owners(grid), self.worker, self.transport))

    def running(
        self, schedule: Schedule, make_executor: Callable[[], Executor]
    ) -> contextlib.AbstractContextManager[None]:
        self.transport.connect((), schedule.buffers)  # the group's ranks are connected
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------ agreement

    def agree(
        self, executor: Executor, spec: EngineSpec, parameters: Sequence[Tensor], has_backward: bool
    ) -> Grid:
        grid = executor.grid
        if isinstance(self.group, SingleRank):
            return grid
        fingerprint = self._fingerprint(executor, spec, parameters, has_backward)
        own_numbers = torch.tensor([number % (1 << 63) for number in fingerprint.values()], dtype=torch.int64)
        assert len(own_numbers) == FINGERPRINTS
        _agreements[self.group] = _agreements.get(self.group, 0) + 1
        numbers_by_rank = [
            rank_numbers.tolist()
            for rank_numbers in self.transport.all_gather(own_numbers, self.transport.ranks)
        ]
        for rank, numbers in enumerate(numbers_by_rank):
            if numbers[0] == REFUSED:
                raise UserError(
                    f"sequence_group: rank {rank} of the group has ended its call with an error of its own: "
                    "mend that one, which it prints"
                )
        for i, name in enumerate(fingerprint):
            rank_numbers = [numbers[i] for numbers in numbers_by_rank]
            if name == WEIGHTS_NAME and 0 in rank_numbers:  # compared before
                continue
            other = next((r for r, number in enumerate(rank_numbers) if number != rank_numbers[0]), None)
            if other is not None and name == MODEL_NAME:
                if (difference := self._first_difference()) is None:
                    continue
                raise UserError(different_models("sequence_group", *difference))
            if other is not None:
                counts = f": {rank_numbers[other]} and {rank_numbers[0]}" if name in COUNTED else ""
                raise UserError(different_calls("sequence_group", other, f"{name}{counts}"))
        if not grid.adjoint_scale:
            return grid
        own_scale = torch.tensor(grid.adjoint_scale, dtype=torch.float64, device=executor.device)
        scale_of_rank_0 = self.transport.all_gather(own_scale, self.transport.ranks)[0]
        return dataclasses.replace(grid, adjoint_scale=tuple(map(tuple, scale_of_rank_0.tolist())))

    def _fingerprint(
        self, executor: Executor, spec: EngineSpec, parameters: Sequence[Tensor], has_backward: bool
    ) -> dict[str, int]:
        """Return all that must be the same on all ranks, as numbers, by the users' names for it."""
        batch = executor.batch
        settings = {
            "the number of rows": batch.rows,
            "the number of tokens": batch.seqlen,
            "the chunk size": spec.chunk_size,
            "the number of chunks": executor.grid.chunks,
            "the method": zlib.crc32(repr(spec).encode()),
            "whether gradients are on": has_backward,
            "what is trained": zlib.crc32(repr([p.requires_grad for p in parameters]).encode()),
            "the number of labels (num_items_in_batch)": zlib.crc32(repr(float(batch.divisor)).encode()),
            "precision": zlib.crc32(repr((executor.autocast, executor.lowest_precision)).encode()),
        }
        tensors: dict[str, Sequence[Tensor | None]] = {
            "input_ids": [batch.ids],
            "documents": [batch.seq_idx],
            "labels": [batch.targets],
            "further inputs": list(batch.inputs.values()),
            "the initial state": [s for state in batch.states for s in state],
        }
        fingerprint = settings | {name: digest(values) for name, values in tensors.items()}
        self.modules = named_modules(executor.stages)
        self.settings = list(describe_settings(self.modules))
        first_module = self.modules[0][1] if self.modules else nn.Module()
        self.ignored = _changed_by_forward.setdefault(first_module, set())
        description = [*describe_tensors(self.modules), *self.settings]
        compared_groups, group = _compared.setdefault(first_module, set()), self.transport.group.group_name
        weights = [] if group in compared_groups else [local(p.detach()) for p in parameters]
        compared_groups.add(group)
        weights_digest = digest([p.reshape(-1)[:COMPARED_ELEMENTS] for p in weights])
        return fingerprint | {
            MODEL_NAME: number_of(description, self.ignored),
            WEIGHTS_NAME: weights_digest,
        }

    def _first_difference(self) -> tuple[int, str] | None:
        """Return the first rank whose model differs from rank 0's, and the name of what differs."""
        description = [*describe_tensors(self.modules), *describe_settings(self.modules)]
        return first_difference_among(
            description, lambda tensor: self.transport.all_gather(tensor, self.transport.ranks), self.ignored
        )

    def _note_changes(self) -> None:
        """Note the settings that the forward has changed, such as the length of a table that grows.

        They follow from this rank's chunks, so later calls do not compare them."""
        before = dict(self.settings)
        for name, description in describe_settings(self.modules):
            if name not in before or before[name] != description:
                self.ignored.add(name)

    # -------------------------------------------------------------------------------------------- results

    def results(self, executor: Executor, sums: Sequence[Sum]) -> tuple[Tensor, list[State]]:
        if not isinstance(self.group, SingleRank):
            self._note_changes()
        # final states come from the rank with the last chunk, if they are asked for
        grid, dtype, device = executor.grid, executor.accumulate_dtype, executor.device
        has_last_chunk = self.owners(grid)(0, grid.chunks - 1) == self.worker
        for sequence_sum in sums:
            sequence_sum.share(lambda total: self.transport.all_reduce(total, self.transport.ranks))
        own_loss, states = executor.results()
        if isinstance(executor.exchange, WithinTiles) and executor.return_final_kv:
            states = self._gather_growing(executor, executor.exchange, states)
        total = torch.zeros((), dtype=dtype, device=device) if own_loss is None else own_loss
        states_and_dims = zip(states, executor.grows, strict=True)
        final = (
            [s for state, grows in states_and_dims for s in recurrent_part(state, grows)]
            if executor.return_final_kv
            else []
        )
        pieces = [s.to(dtype) if has_last_chunk else torch.zeros_like(s, dtype=dtype) for s in final]
        flat = torch.cat([total.to(dtype).reshape(1), *(piece.reshape(-1) for piece in pieces)])
        first, *rest = self.transport.all_reduce(flat, self.transport.ranks).split(
            [1, *(piece.numel() for piece in pieces)]
        )
        if executor.return_final_kv:
            tensors = (r.view_as(s).to(s.dtype) for r, s in zip(rest, final, strict=True))
            states_and_dims = zip(states, executor.grows, strict=True)
            states = [
                merge_parts(
                    (next(tensors) for _ in recurrent_part(state, grows)),
                    append_only_part(state, grows),
                    grows,
                )
                for state, grows in states_and_dims
            ]
        return first[0].clone(), states

    def _gather_growing(
        self, executor: Executor, exchange: WithinTiles, states: Sequence[State]
    ) -> list[State]:
        """Return the final states, with all ranks' tokens in those that grow."""
        gathered, grid = list(states), executor.grid
        for k, slabs in executor.slabs.items():
            past = (
                self.transport.all_reduce(exchange.gather_slab(grid, slab), self.transport.ranks)
                for slab in slabs
            )
            gathered[k] = merge_parts(recurrent_part(gathered[k], executor.grows[k]), past, executor.grows[k])
        return gathered

    def summed(
        self, terms: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> Sequence[Tensor | None]:
        return summed(terms, zeros, self.transport, self.transport.ranks)

    def joined(self, values: Tensor) -> Tensor:
        return self.transport.all_reduce(values, self.transport.ranks)

    def check_same_scale(self, d_loss: Tensor | None) -> None:
        own_scale = torch.tensor([0.0 if d_loss is None else float(d_loss)], dtype=torch.float64)
        scales = torch.cat(self.transport.all_gather(own_scale, self.transport.ranks)).tolist()
        for rank, scale in enumerate(scales):
            if scale != scales[0] and not (scale != scale and scales[0] != scales[0]):
                raise UserError(
                    f"sequence_group: the loss is multiplied by {scales[0]:g} on rank 0 and by {scale:g} on "
                    f"rank {rank} of the group: multiply it by the same number on every rank"
                )
