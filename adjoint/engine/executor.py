"""`Executor`: runs one worker's program on a batch, tile by tile. Training in one process is one worker."""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine import warm_up
from adjoint.engine.decay import Decays
from adjoint.engine.grid import EngineSpec, Grid, Key, Tile
from adjoint.engine.leaves import ChunkChangedError
from adjoint.engine.schedule import BUFFERS, Action, HelperTasks, Recv, Run, Send
from adjoint.engine.stage import Stage
from adjoint.engine.storage import (
    Edges,
    Packing,
    Past,
    PerChunk,
    Slab,
    by_itself,
    growing,
    joined,
    recurrent,
    stores_on_host,
    to_host,
)
from adjoint.engine.threads import sleep_while_waiting
from adjoint.engine.tile import Cotangents, Gradients, Windowed
from adjoint.errors import UserError
from adjoint.kernels import checks
from adjoint.layers import State

Pending = Callable[[], Tensor]  # waits for a message and returns it
# Largest relative change of a chunk's loss when it is recomputed for the backward: room for the rounding of
# operations whose order is not fixed. Another dropout mask changes more.
RECOMPUTE_RTOL = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
RECEIVES_POSTED_AHEAD = 4  # actions: a receive is posted once one of the next so many needs it
RECOMPUTE_RTOL_CUDA_FACTOR = 10  # on a GPU, where more orders are not fixed, times this
MIN_LOSS_PER_TOKEN = 0.1  # the change is relative to the loss, or to this much per token if that is more


class Transport(Protocol):
    """Messages of a worker. Those from one worker to another arrive in the order sent.

    Attributes:
        on_device: whether messages are kernels that wait on the device (NCCL): while one is posted, nothing
            may wait for the whole device.
    """

    on_device: bool

    def post(self, source: int, out: Tensor) -> Pending:
        """Start to receive from worker `source` into `out`."""
        ...

    def send(self, to: int, tensor: Tensor) -> None:
        """Start to send; wait while the channel is full. The tensor must not change until `flush`."""
        ...

    def flush(self) -> None:
        """Wait until everything sent has left."""
        ...


@dataclass(frozen=True)
class Connections:
    """A worker's links to its process and to the other workers.

    Attributes:
        transport: to the other workers; None if there are none.
        traced: makes a context from an action or a tile; entered around each action and each tile of
            `HelperTasks`.
        share: runs `HelperTasks`.
        warmed_up: where messages are kernels of the device, the kinds of work that have run (`warm_up`): all
            of a program's must have run before its first message.
    """

    transport: Transport | None = None
    traced: Callable[[Any], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    share: Callable[[Executor, HelperTasks], None] | None = None
    warmed_up: Set[Hashable] = frozenset()


class Documents:
    """Document boundaries of a batch, in the form that a chunk's `Past` takes them.

    Args:
        seq_idx: as in `Batch`.
    """

    def __init__(self, seq_idx: Tensor | None) -> None:
        self.seq_idx = seq_idx

    def __call__(self, chunk: Batch, before: int) -> tuple[list[int], list[list[int]]] | tuple[()]:
        """Return `Past.visible` and `Past.starts` of a chunk; () if the batch has no `seq_idx`.

        The initial state's `before` tokens belong to each row's first document."""
        if chunk.seq_idx is None:
            return ()
        start, stop = chunk.start, chunk.start + chunk.seqlen
        visible, starts = [], []
        for row in self._starts_by_row:
            last = row[bisect.bisect_right(row, start) - 1]
            visible.append(start - last + (before if last == 0 else 0))
            starts.append([at - start for at in row if start < at < stop])
        return visible, starts

    @functools.cached_property
    def _starts_by_row(self) -> list[list[int]]:
        """First tokens of each row's documents, on the host."""
        assert self.seq_idx is not None
        return checks.starts_in(self.seq_idx)


class Executor:
    """The runner of one worker's program on a batch: `run` its actions, then read the attributes.

    Args:
        stages: all of the model's stages; None for those that other workers have.
        batch: with a state for each stage, also for others' stages (zeros of the right sizes).
        spec: read for host memory and `window="auto"` (then the forward notes decays).
        width: last dimension of the tensors between stages, (batch, tokens, width); only used with a
            transport.
        gradients: sums of parameters' gradients, to which this worker adds.
        connections: the worker's links to other processes; by default none.

    Raises:
        UserError: a state of complex numbers.

    Attributes:
        accumulate_dtype: dtype of sums and messages: float64 in a float64 model, else float32.
        lowest_precision: the least precise dtype of parameters and computations.
        total, losses: the summed loss of all chunks whose head this worker has, and that of each chunk.
        final, d_initial: final states, and cotangents of the initial states, one tuple per stage.
        d_ids: the cotangent of the batch's embeddings, if it has them in place of ids.
        gradients: sums of parameters' gradients.
        store: values that tiles and messages have written and later actions read, by their keys (`value`).
    """

    def __init__(
        self,
        stages: Sequence[Stage | None],
        grid: Grid,
        batch: Batch,
        spec: EngineSpec,
        width: int = 0,
        gradients: Gradients | None = None,
        connections: Connections | None = None,
    ) -> None:
        local_stages = [stage for stage in stages if stage is not None]
        parameter_dtypes = {p.dtype for stage in local_stages for p in stage.parameters()}
        state_dtypes = {s.dtype for state in batch.states for s in state}  # where all parameters are frozen
        if any(dtype.is_complex for dtype in state_dtypes):
            raise UserError(
                "a layer's state has complex numbers; keep it as real numbers (torch.view_as_real)"
            )
        self.accumulate_dtype = (
            torch.float64 if torch.float64 in parameter_dtypes | state_dtypes else torch.float32
        )
        used = (
            parameter_dtypes.union(*(getattr(stage, "precisions", ()) for stage in local_stages))
            & RECOMPUTE_RTOL.keys()
        )
        self.lowest_precision = max(used, key=RECOMPUTE_RTOL.__getitem__, default=self.accumulate_dtype)
        self.stages, self.grid, self.batch = stages, grid, batch
        self.connections = connections or Connections()
        self.transport = transport = self.connections.transport
        self.width, self.device, initial = width, batch.ids.device, batch.states
        self.host = stores_on_host(spec, self.device)
        self.waits = transport is not None and transport.on_device
        self.chunks = [
            batch.chunk(a, b, grid.document(c)) for c, (a, b) in enumerate(itertools.pairwise(grid.cuts))
        ]
        self.documents = Documents(batch.seq_idx)
        self.total: Tensor | None = None
        self.losses = PerChunk(grid.chunks)
        self.recomputed_losses = PerChunk(grid.chunks)  # the same of recomputed chunks, to be compared
        self.final: list[State] = list(initial)
        self.d_final, self.d_initial = list[Cotangents](), list[Cotangents]()
        self.d_ids: Tensor | None = None
        self.gradients = Gradients() if gradients is None else gradients
        self.decays = [Decays() for _ in stages] if spec.backward.window == "auto" else None
        self.store: dict[Key, Any] = {}
        self.passed_on: set[Key] = set()
        self.return_final_kv = True
        self.begin_backward(None)
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        grows = [
            (None,) * len(s) if stage is None else stage.grows
            for s, stage in zip(initial, stages, strict=True)
        ]
        self.grows: list[tuple[int | None, ...]] = grows
        self.packing = [
            Packing(recurrent(s, g), self.accumulate_dtype) for s, g in zip(initial, grows, strict=True)
        ]
        self.edges = [Edges(packing, grid.chunks, self.host) for packing in self.packing]
        self.slabs: dict[int, list[Slab]] = {}
        for k, stage in enumerate(stages):
            if stage is None:
                continue
            for s, dim in zip(initial[k], grows[k], strict=True):
                if dim is not None:
                    checks.shape("initial_state", s, batch.rows, *s.shape[1:])
                    self.slabs.setdefault(k, []).append(self.slab(s, dim))

    def slab(self, initial: Tensor, dim: int) -> Slab:
        """Make the storage of an append-only tensor of a state."""
        return Slab(initial, dim, self.grid.cuts[-1], self.host)

    def kept_bytes(self) -> int:
        """Return the bytes on the device stored for the whole sequence, tapes excluded.

        These are states at chunk edges, and append-only states with their cotangents."""
        if self.host:
            return 0
        at_edges = sum(p.size for p in self.packing) * self.grid.chunks * self.accumulate_dtype.itemsize
        return at_edges + sum(slab.most_bytes() for slabs in self.slabs.values() for slab in slabs)

    def begin_forward(self, return_final_kv: bool) -> None:
        """Set whether append-only final states are returned; else they are empty in `final`."""
        self.return_final_kv = return_final_kv

    def begin_backward(
        self, scale: Tensor | None, d_final: Sequence[Cotangents] | None = None, grid: Grid | None = None
    ) -> None:
        """Set the cotangents and the grid with which the backward begins.

        If its actions are mixed with the forward's, call this before both.

        Args:
            scale: cotangent of the summed loss: the mean loss's cotangent divided by the divisor.
            d_final: cotangents of the final states, one tuple per stage; None if no final state has one.
            grid: grid of the backward's program, if it differs from the forward's: its windows may be picked
                after the forward.
        """
        none: list[Cotangents] = [(None,) * len(state) for state in self.batch.states]
        self.scale, self.grid = scale, grid or self.grid
        self.d_final, self.d_initial = none if d_final is None else list(d_final), list(none)

    def results(self) -> tuple[Tensor | None, list[State]]:
        """Return the summed loss, if any, and the final states, which are dropped: no backward needs them."""
        final, self.final = self.final, []
        return self.total, final

    def begin_again(self, store: dict[Key, Any]) -> None:
        """Forget the sums of a backward, so that another one can begin from the values in `store`."""
        self.gradients, self.d_ids, self.store = Gradients(self.gradients.unlisted_leaves), None, store

    @contextlib.contextmanager
    def separate_gradients(self) -> Iterator[Gradients]:
        """Sum the gradients of the tiles that run inside separately from the worker's."""
        before, self.gradients = self.gradients, Gradients()
        try:
            yield self.gradients
        finally:
            self.gradients = before

    def run(self, actions: Sequence[Action]) -> None:
        """Run actions in order.

        Receives are posted a few actions ahead, so that messages travel during computation.

        Raises:
            ValueError: an append-only state would have to be received.
            ChunkChangedError: a chunk had another loss when it was recomputed.
        """
        if self.device.type == "cpu":
            sleep_while_waiting()
        receives = collections.deque((i, a) for i, a in enumerate(actions) if isinstance(a, Recv))
        posted: collections.deque[tuple[int | Tensor, Pending]] = collections.deque()
        self.count_edges(actions)
        assert not self.waits or warm_up.kinds_of(self, actions).keys() <= self.connections.warmed_up, (
            "a kernel would be used for the first time while messages wait on the device"
        )
        with self.precision():
            for place, action in enumerate(actions):
                soon = place + RECEIVES_POSTED_AHEAD
                with self.connections.traced(action):
                    while receives and len(posted) < BUFFERS and receives[0][0] <= soon:
                        assert self.transport is not None
                        _, recv = receives.popleft()
                        slot, out = self.destination(recv.key)
                        posted.append((slot, self.transport.post(recv.source, out)))
                    if isinstance(action, Run):
                        self.tile(action.tile)
                    elif isinstance(action, Send):
                        assert self.transport is not None
                        self.transport.send(action.to, self.message(action.key))
                    elif isinstance(action, Recv):
                        self.store[action.key], arrive = posted.popleft()
                        arrive()
                    else:
                        assert self.connections.share is not None
                        self.connections.share(self, action)
                self.free(action)
        self._check_recomputed_losses()

    def _check_recomputed_losses(self) -> None:
        """Raise ChunkChangedError if a recomputed chunk's loss is not the forward's."""
        recomputed, self.recomputed_losses = self.recomputed_losses, PerChunk(self.grid.chunks)
        chunks = sorted(recomputed.written)
        if not chunks or type(self.total) is not Tensor:  # a fake tensor has no values to compare
            return
        first, second = (losses.select(chunks).double() for losses in (self.losses, recomputed))
        enabled, dtype = self.autocast
        limit = RECOMPUTE_RTOL[dtype if enabled else self.lowest_precision] * (
            RECOMPUTE_RTOL_CUDA_FACTOR if first.is_cuda else 1
        )
        # the loss of a sequence learnt by heart is mostly rounding itself
        floors = [MIN_LOSS_PER_TOKEN * self.batch.rows * self.grid.tokens(c) for c in chunks]
        scale = torch.maximum(first.abs(), first.new_tensor(floors))
        exceeds = ((second - first).abs() > limit * scale).tolist()  # False for nan
        for c, forward_loss, recomputed_loss, differs in zip(
            chunks, first.tolist(), second.tolist(), exceeds, strict=True
        ):
            if differs:
                start, stop = self.grid.cuts[c : c + 2]
                raise ChunkChangedError(
                    f"tokens {start} to {stop - 1} had the loss {forward_loss:.6g} in the forward and "
                    f"{recomputed_loss:.6g} when they were computed again for the backward: "
                    "something that the model depends on has changed in between, or it draws random "
                    "numbers from a generator that is not found"
                )

    def free(self, action: Action) -> None:
        """Drop the values that no later action of this worker reads."""
        for key in action.frees:
            self.store.pop(key, None)

    def tile(self, t: Tile) -> None:
        """Compute one tile."""
        run = {"recompute": self.recompute, "backward": self.backward, "windowed": self.windowed}
        run.get(t.kind, self.forward)(t)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Enter the autocast of the forward's caller, also for the backward.

        Its weight cache is off: casts made without gradients must not be reused with them."""
        enabled, dtype = self.autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield

    def count_edges(self, actions: Sequence[Action]) -> None:
        """Set the number of rows of each stage's `Edges`: the states that this worker's own tiles read."""
        self.passed_on = {a.key for a in actions if isinstance(a, Send) and a.key in a.frees}
        rows: collections.Counter[int] = collections.Counter()
        for action in actions:
            if isinstance(action, Run) and action.tile.is_forward:
                k, c = action.tile.stage, action.tile.chunk
                rows[k] += self.grid.reads_state(c + 1) and ("S", k, c) not in self.passed_on
            elif isinstance(action, Recv) and action.key[0] == "S":
                if action.key[1] in self.slabs:
                    raise ValueError(
                        f"stage {action.key[1]}: a state that grows with the sequence stays with one worker; "
                        "deal out layers instead of chunks"
                    )
                rows[action.key[1]] += 1
        for k, count in rows.items():
            if self.edges[k].memory is None:
                self.edges[k].rows = count

    # ------------------------------------------------------------------------------------------- messages

    def value(self, key: Key) -> Any:
        """Return a value of the store; for a state stored as a row's number, that row of `Edges`."""
        value = self.store[key]
        return self.edges[key[1]].at(value) if isinstance(value, int) else value

    def destination(self, key: Key) -> tuple[int | Tensor, Tensor]:
        """Return the store's entry for a value that will be written, and the tensor to write to.

        They are the same tensor, except for a state that stays here: its entry is the number of a row of
        `Edges`."""
        name, k = key[:2]
        if name != "S" or key in self.passed_on:
            out = self.room(key)
            return out, out
        row = self.edges[k].row()
        return row, self.edges[k].at(row)

    def room(self, key: Key) -> Tensor:
        """Return an empty tensor for a message."""
        name, k, c = key[:3]
        if name in ("S", "dS"):
            return self.packing[k].empty()
        start, stop = self.grid.cuts[c : c + 2]
        if name == "spill":
            start = max(start, self.grid.cuts[key[3]] - self.grid.reach)
        shape = self.batch.rows, stop - start, self.width
        return torch.empty(shape, dtype=self.accumulate_dtype, device=self.device)

    def message(self, key: Key) -> Tensor:
        """Return a value of the store as one tensor, as a message carries it."""
        value = self.value(key)
        if isinstance(value, tuple):
            return self.packing[key[1]].pack(value, self.room(key))
        if value is None:  # no cotangent
            return self.room(key).zero_()
        return value.to(self.accumulate_dtype).contiguous()

    # ---------------------------------------------------------------------------------------------- tiles

    def _input(self, name: str, k: int, c: int) -> Tensor:
        """Return stage k's input on chunk c, on the device: ids, or key `name` of the stage below."""
        return self.store[name, k - 1, c].to(self.device, non_blocking=True) if k else self.chunks[c].ids

    def state(self, k: int, c: int) -> Any:
        """Return stage k's state before chunk c; each append-only entry is a `Past`."""
        initial, grows = self.batch.states[k], self.grows[k]
        if not initial:
            return ()
        recurrent_state = recurrent(initial, grows)
        if c in self.grid.document_starts:
            recurrent_state = tuple(torch.zeros_like(s) for s in recurrent_state)
        elif c and recurrent_state:
            recurrent_state = self.packing[k].unpack(
                self.value(("S", k, c - 1)).to(self.device, non_blocking=True)
            )
        if k not in self.slabs:
            return recurrent_state
        return joined(recurrent_state, (self.past(slab, c) for slab in self.slabs[k]), grows)

    def past(self, slab: Slab, c: int) -> Any:
        """Return the `Past` of a slab before chunk c, which a stage gets in the tensor's place."""
        chunk = self.chunks[c]
        begin = chunk.document or -slab.before  # what was there before belongs to the first document
        first_grad_token = begin if not self.grid.dropped else self.grid.first_grad_token(c)
        return Past(slab, chunk.start, begin, first_grad_token, *self.documents(chunk, slab.before))

    def forward(self, t: Tile) -> None:
        """Compute a stage's output and state; linearize keeps the tape."""
        k, c, stage = t.stage, t.chunk, self.stages[t.stage]
        assert stage is not None
        x, state, chunk = self._input("y", k, c), self.state(k, c), self.chunks[c]
        unlisted, y = self.gradients.unlisted_leaves, None
        if t.kind == "linearize" or (unlisted.open and c + 1 == self.grid.chunks):
            inputs = x, state, chunk, self.gradients
            y, after, tape = unlisted.run_tile(lambda: stage.linearize(*inputs))
            if t.kind == "linearize":
                self.store["tape", k, c] = tape
            del tape
        if self.decays is not None and stage.stateful:
            with torch.no_grad():
                y, after = stage.forward_noting_decay(x, state, chunk, self.decays[k])  # type: ignore[attr-defined]
        elif y is None:
            with torch.no_grad():
                y, after = stage.forward(x, state, chunk)
        if self.host and k and self.grid.first_of_segment(k):
            self.store["y", k - 1, c] = to_host(x)
        if k == self.grid.stages - 1:
            self.add_loss(c, y)
        else:
            self.store["y", k, c] = y
        if stage.stateful:
            self.keep_state(k, c, after)

    def add_loss(self, c: int, loss: Tensor) -> None:
        """Add the summed loss of chunk c."""
        self.total = loss if self.total is None else self.total + loss
        self.losses[c] = loss

    def keep_state(self, k: int, c: int, state: State) -> None:
        recurrent_state = recurrent(state, self.grows[k])
        if c + 1 < self.grid.chunks:
            if not self.grid.reads_state(c + 1):
                return
            self.store["S", k, c], out = self.destination(("S", k, c))
            self.packing[k].pack(recurrent_state, out)
            return
        slabs = self.slabs.get(k, ())
        past = (slab.final() if self.return_final_kv else slab.between(0, 0) for slab in slabs)
        self.final[k] = joined(map(by_itself, recurrent_state), past, self.grows[k])

    def recompute(self, t: Tile) -> None:
        """Make a tape that the forward has not kept."""
        k, c, stage = t.stage, t.chunk, self.stages[t.stage]
        assert stage is not None
        x = self._input("y" if self.grid.first_of_segment(k) else "z", k, c)
        inputs = x, self.state(k, c), self.chunks[c], self.gradients
        y, _, tape = self.gradients.unlisted_leaves.run_tile(lambda: stage.linearize(*inputs))
        self.store["tape", k, c] = tape
        if k == self.grid.stages - 1 and c in self.losses.written:
            self.recomputed_losses[c] = y
        if ("z", k, c) in self.grid.writes(t):
            self.store["z", k, c] = y

    def _cotangent(self, k: int, start: int, stop: int) -> Tensor | None:
        """Return the cotangent of stage k's outputs on the tokens [start, stop), or None if there is none.

        Its shape is (batch, stop - start, width); the head's is `scale`, a scalar."""
        if k == self.grid.stages - 1:
            return self.scale
        pieces: list[Tensor] = []
        for key in self.grid.cotangents(k, start, stop):
            piece = self.store[key]
            if piece is None:
                continue
            if key[0] == "spill":  # belongs to the last tokens of the piece before
                pieces[-1] = pieces[-1].clone()
                pieces[-1][:, -piece.shape[1] :] += piece
            else:
                pieces.append(piece)
        if not pieces:
            return None
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))[:, : stop - start]

    def backward(self, t: Tile) -> None:
        """Pulls a tape back."""
        k, c, grows = t.stage, t.chunk, self.grows[t.stage]
        start, stop = self.grid.cuts[c : c + 2]
        last = c + 1 == self.grid.chunks
        slabs = self.slabs.get(k, [])
        if last:
            for slab, d in zip(slabs, growing(self.d_final[k], grows), strict=True):
                slab.begin(d)
        carried: Cotangents = recurrent(self.d_final[k], grows)
        if not last and carried:
            d_edge = self.store["dS", k, c] if self.grid.carries(c + 1) else (None,) * len(carried)
            carried = d_edge if isinstance(d_edge, tuple) else self.packing[k].unpack(d_edge)
        d_state = joined(carried, (slab.gathered(start, stop) for slab in slabs), grows)
        dx, d_state = self.store.pop(("tape", k, c))(self._cotangent(k, start, stop), d_state)
        if ("dy", k - 1, c) in self.grid.writes(t):
            self.store["dy", k - 1, c] = dx
        self._add_to_ids(k, start, dx)
        d_recurrent = tuple(by_itself(d) for d in recurrent(d_state, grows))
        if d_recurrent and self.grid.carries(c):
            self.store["dS", k, c - 1] = self._passed(k, c, d_recurrent)
        elif c == 0:
            self.d_initial[k] = joined(d_recurrent, (slab.initial() for slab in slabs), grows)

    def _passed(self, k: int, c: int, d_state: Cotangents) -> Cotangents:
        """Return the adjoint state as it leaves chunk c, multiplied by `Grid.passes`.

        The conv tail's, before it in the tuple, is not: the convolution's short paths are not cut."""
        if not self.grid.adjoint_scale:
            return d_state
        *tail, d = d_state
        multiplier = self.grid.passes(k, c)
        return (*tail, None if d is None or multiplier == 0 else d * multiplier)

    def windowed(self, t: Tile) -> None:
        """Compute a vjp cut to a window."""
        grid, k, stage = self.grid, t.stage, self.stages[t.stage]
        left, start, stop, halo_stop = grid.extent(t)
        chunks_read, window = grid.covering(left, halo_stop), grid.window(k)
        assert stage is not None and window is not None
        pieces = [self._input("y", k, j) for j in chunks_read]
        first = grid.cuts[chunks_read[0]]
        x = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))[:, left - first : halo_stop - first]
        dy = self._cotangent(k, start, halo_stop)
        if dy is None:
            dy = x.new_zeros(x.shape[0], halo_stop - start, x.shape[2])
        at_end = halo_stop == grid.cuts[-1]
        d_final = self.d_final[k] if at_end else (None,) * len(self.d_final[k])
        seq_idx = self.batch.chunk(left, halo_stop).seq_idx
        begins = self.chunks[t.chunk].starts_document
        inputs = Windowed(left, start, stop, window, x, self.state(k, t.chunk), dy, d_final, seq_idx, begins)
        vjp = stage.windowed_vjp  # type: ignore[attr-defined]
        dx, d_state = self.gradients.unlisted_leaves.run_tile(lambda: vjp(inputs, self.gradients))
        for key in grid.writes(t):
            a, b = grid.cuts[key[2]], grid.cuts[key[2] + 1]
            piece = dx[:, max(a, left) - left : min(b, stop) - left]
            self.store[key] = piece.clone() if key[0] == "spill" else piece
        self._add_initial(k, start, d_state)
        self._add_to_ids(k, left, dx)

    def _add_to_ids(self, k: int, start: int, dx: Tensor | None) -> None:
        """Add the first stage's input cotangent from token `start` on to `d_ids`, if it has one."""
        if k or dx is None:
            return
        self.d_ids = torch.zeros_like(self.batch.ids) if self.d_ids is None else self.d_ids
        self.d_ids[:, start : start + dx.shape[1]] += dx

    def _add_initial(self, k: int, start: int, d_state: Cotangents) -> None:
        """Add a windowed tile's part of the initial state's cotangent.

        The first tile has all of it; others that reach before the sequence have the conv tail's, moved by
        `start` tokens."""
        if start:
            d_tail = d_state[0] if len(d_state) > 1 else None
            if d_tail is None or start >= d_tail.shape[2]:
                return
            moved = torch.nn.functional.pad(d_tail[:, :, : d_tail.shape[2] - start], (start, 0))
            d_state = (moved, *(None,) * (len(d_state) - 1))
        pairs = zip(self.d_initial[k], d_state, strict=True)
        self.d_initial[k] = tuple(a if b is None else b if a is None else a + b for a, b in pairs)
