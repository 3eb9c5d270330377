"""`Executor`: runs one worker's program on a batch, tile by tile. Training in one process is one worker."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine import warm_up
from adjoint.engine.decay import Decays
from adjoint.engine.exchange import BetweenTiles, Exchange
from adjoint.engine.grid import EngineSpec, Grid, Key, Tile, TileKind
from adjoint.engine.leaves import ChunkChangedError
from adjoint.engine.schedule import BUFFERS, Action, HelperTasks, Recv, Run, Send
from adjoint.engine.stage import Stage
from adjoint.engine.storage import ChunkLosses, Increment, compact
from adjoint.engine.threads import sleep_while_waiting, subnormals_are_zero
from adjoint.engine.tile import Cotangents, Gradients, Windowed
from adjoint.engine.tile_values import TileValues
from adjoint.layers import State

Pending = Callable[[], Tensor]  # waits for a message and returns it
# Largest relative change of a chunk's loss when it is recomputed for the backward: room for the rounding of
# operations whose order is not fixed. Another dropout mask changes more.
RECOMPUTE_RTOL = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
RECEIVES_POSTED_AHEAD = 4  # actions: a receive is posted once one of the next so many needs it
RECOMPUTE_RTOL_CUDA_FACTOR = 10  # on a GPU, where more orders are not fixed, times this
# The method of an executor that computes a kind of tile.
TILE_METHODS: dict[TileKind, str] = {
    "forward": "forward",
    "linearize": "forward",
    "recompute": "recompute",
    "advance": "advance",
    "backward": "backward",
    "windowed": "windowed",
}
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


@dataclasses.dataclass(frozen=True)
class Connections:
    """A worker's links to its process and to the other workers.

    Attributes:
        transport: to the other workers; None if there are none.
        exchange: how states cross chunk edges; by default between tiles.
        traced: makes a context from an action or a tile; entered around each action and each tile of
            `HelperTasks`.
        share: runs `HelperTasks`.
        token_ranks: ranks that split the tokens of what travels between stages, each of which has a share.
        warmed_up: where messages are kernels of the device, the kinds of work that have run (`warm_up`): all
            of a program's must have run before its first message.
    """

    transport: Transport | None = None
    exchange: Exchange = dataclasses.field(default_factory=BetweenTiles)
    traced: Callable[[Any], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    share: Callable[[Executor, HelperTasks], None] | None = None
    token_ranks: int = 1
    warmed_up: Set[Hashable] = frozenset()


def _runs(actions: Iterable[Action]) -> Iterator[Run]:
    return (action for action in actions if isinstance(action, Run))


class Executor(TileValues):
    """The runner of one worker's program on a batch: `run` its actions, then read the attributes.

    Args:
        stages, grid, batch, spec, width: as in `TileValues`; with `window="auto"` the forward notes decays.
        gradients: sums of parameters' gradients, to which this worker adds.
        connections: the worker's links to other processes; by default none.

    Attributes:
        lowest_precision: the least precise dtype of parameters and computations.
        losses: the summed loss of each chunk whose head this worker has.
        gradients: sums of parameters' gradients.
        head_gradients: sums of the head's gradients for a loss whose cotangent is not known yet, as if it
            were 1; None if there are none.
        head_is_unscaled: whether the cotangents that the head has written are of such a loss, too.
        is_last_backward: whether no other backward will follow.
        rounds_finished_sums: whether a parameter's sum gets the parameter's dtype once its last tile has run.
        decays: of each stage, if windows are picked by them.
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
        super().__init__(stages, grid, batch, spec, width)
        dtypes = self.parameter_dtypes().union(*(s.precisions for s in stages if s is not None))
        used = dtypes & RECOMPUTE_RTOL.keys()
        self.lowest_precision = max(used, key=RECOMPUTE_RTOL.__getitem__, default=self.accumulate_dtype)
        self.connections = connections or Connections()
        self.exchange, self.token_ranks = self.connections.exchange, self.connections.token_ranks
        self.transport = transport = self.connections.transport
        self.waits = transport is not None and transport.on_device
        self._total: Tensor | None = None  # of several chunks' losses in float64
        self._loss_dtype = torch.float32
        self.losses = ChunkLosses(grid.chunks)
        self.recomputed_losses = ChunkLosses(grid.chunks)  # the same of recomputed chunks, to be compared
        # of each segment's output and state, which have no loss, in the last chunk that all recompute
        self.norms, self.recomputed_norms = ChunkLosses(2 * grid.stages), ChunkLosses(2 * grid.stages)
        self.compared_chunk = max(0, grid.chunks - 2)
        self.late_states: dict[int, State] = {}  # of that chunk, by stage, until it has been pulled back
        self.increments = 0 if self.host or self.transport is not None else spec.storage.increments
        self.gradients = Gradients() if gradients is None else gradients
        self.head_gradients: Gradients | None = None
        self.head_is_unscaled = False
        self.decays = [Decays() for _ in stages] if spec.backward.window == "auto" else None
        self.begin_backward(None)
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.exchange.begin(self)

    def begin_forward(self, return_final_kv: bool) -> None:
        """Set whether append-only final states are returned; else they are empty in `final`."""
        self.return_final_kv = return_final_kv

    def begin_backward(
        self,
        scale: Tensor | None,
        d_final: Sequence[Cotangents] | None = None,
        grid: Grid | None = None,
        is_last: bool = False,
        rounds_sums: bool = False,
        graph_task: int | None = None,
    ) -> None:
        """Set the cotangents and the grid with which the backward begins.

        If its actions are mixed with the forward's, call this before both.

        Args:
            scale: cotangent of the summed loss: the mean loss's cotangent divided by the divisor.
            d_final: cotangents of the final states, one tuple per stage; None if no final state has one.
            grid: grid of the backward's program, if it differs from the forward's: its windows may be picked
                after the forward.
            is_last: whether no other backward will follow.
            rounds_sums: whether a parameter's sum may get the parameter's dtype as soon as it is complete:
                nobody else adds to it.
            graph_task: number of the backward of autograd that this one is a part of; by default of the one
                that is running.
        """
        task = torch._C._current_graph_task_id() if graph_task is None else graph_task
        for slab in itertools.chain.from_iterable(self.slabs.values()):
            slab.begin_graph_task(task)
        none: list[Cotangents] = [(None,) * len(state) for state in self.batch.states]
        self.scale, self.grid, self.is_last_backward = scale, grid or self.grid, is_last
        self.gradients.begin_backward(scale)
        unlisted = self.gradients.unlisted_leaves
        self.rounds_finished_sums = rounds_sums and not (unlisted.leaves or unlisted.precomputed)
        if self.head_gradients is not None and scale is not None:
            self._scale_head_gradients(scale, is_last)
        self.d_final, self.d_initial = none if d_final is None else list(d_final), list(none)

    @property
    def total(self) -> Tensor | None:
        """The summed loss of all chunks whose head this worker has."""
        return None if self._total is None else self._total.to(self._loss_dtype)

    def results(self) -> tuple[Tensor | None, list[State]]:
        """Return the summed loss, if any, and the final states, which are dropped: no backward needs them."""
        final, self.final = self.final, []
        return self.total, final

    def begin_again(self, store: dict[Key, Any]) -> None:
        """Forget the sums of a backward, so that another one can begin from the values in `store`."""
        self.gradients, self.d_ids, self.store = Gradients(self.gradients.unlisted_leaves), None, store
        if self.grid.checkpoints is not None:  # the program begins with the state before the sequence
            self.clear()
            self.store = {key: value for key, value in store.items() if key[0] != "S"}

    @contextlib.contextmanager
    def separate_gradients(self) -> Iterator[Gradients]:
        """Sum the gradients of the tiles that run inside separately from the worker's."""
        before, self.gradients = self.gradients, Gradients()
        try:
            yield self.gradients
        finally:
            self.gradients = before

    def run(self, actions: Collection[Action]) -> None:
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
        self.exchange.count_edges(self, actions)
        following_tiles = (a.tile for a in itertools.islice(_runs(actions), 1, None))
        assert not self.waits or warm_up.kinds_of(self, actions).keys() <= self.connections.warmed_up, (
            "a kernel would be used for the first time while messages wait on the device"
        )
        with self.running():
            for place, action in enumerate(actions):
                soon = place + RECEIVES_POSTED_AHEAD
                with self.connections.traced(action):
                    while receives and len(posted) < BUFFERS and receives[0][0] <= soon:
                        assert self.transport is not None
                        _, recv = receives.popleft()
                        slot, out = self.destination(recv.key)
                        posted.append((slot, self.transport.post(recv.source, out)))
                    if isinstance(action, Run):
                        self.freed_by_tile = action.frees
                        if self.host_copies is not None:
                            self.fetch_inputs(action.tile, next(following_tiles, None))
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
                for key in action.frees:  # no later action of this worker reads them
                    self.drop(key)
        if self.transport is not None:
            self.transport.flush()
        self.exchange.finish()
        self.gradients.finish()
        if self.host_copies is not None:
            self.host_copies.finish()
        self._check_recomputed_losses()

    def _check_recomputed_losses(self) -> None:
        """Raise ChunkChangedError if a recomputed chunk's loss is not the forward's."""
        recomputed, self.recomputed_losses = self.recomputed_losses, ChunkLosses(self.grid.chunks)
        recomputed_norms, self.recomputed_norms = self.recomputed_norms, ChunkLosses(2 * self.grid.stages)
        if type(self.total) is not Tensor:  # a fake tensor has no values to compare
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # nor can the host wait
            return
        chunks = sorted(recomputed.written)
        # the loss of a sequence learnt by heart is mostly rounding itself
        floors = [MIN_LOSS_PER_TOKEN * self.batch.rows * self.grid.tokens(c) for c in chunks]
        self._compare(self.losses, recomputed, chunks, chunks, floors, "loss")
        indices = sorted(recomputed_norms.written)
        compared_chunks = [self.compared_chunk] * len(indices)
        self._compare(self.norms, recomputed_norms, indices, compared_chunks, [0.0] * len(indices), "norm")

    def _compare(
        self,
        forward: ChunkLosses,
        recomputed: ChunkLosses,
        indices: list[int],
        chunks: list[int],
        floors: list[float],
        name: str,
    ) -> None:
        """Raise ChunkChangedError if recomputed values are not the forward's.

        Args:
            indices: of the values. chunks, floors: the chunk of each, and the least that a change is relative
                to. name: of the values, for the message.
        """
        if not indices:
            return
        first, second = (values.select(indices).double() for values in (forward, recomputed))
        enabled, dtype = self.autocast
        limit = RECOMPUTE_RTOL[dtype if enabled else self.lowest_precision] * (
            RECOMPUTE_RTOL_CUDA_FACTOR if first.is_cuda else 1
        )
        scale = torch.maximum(first.abs(), first.new_tensor(floors))
        exceeds = ((second - first).abs() > limit * scale).tolist()  # False for nan
        for c, forward_value, recomputed_value, differs in zip(
            chunks, first.tolist(), second.tolist(), exceeds, strict=True
        ):
            if differs:
                start, stop = self.grid.cuts[c : c + 2]
                raise ChunkChangedError(
                    f"tokens {start} to {stop - 1} had the {name} {forward_value:.6g} in the forward and "
                    f"{recomputed_value:.6g} when they were computed again for the backward: "
                    "something that the model depends on has changed in between, or it draws random "
                    "numbers from a generator that is not found"
                )

    def tile(self, t: Tile) -> None:
        """Compute one tile."""
        if self.attention_outputs is not None:
            self.attention_outputs.begin_tile(t.kind)
        getattr(self, TILE_METHODS[t.kind])(t)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Enter what tiles run in: the autocast of the forward's caller, also for the backward, and the
        contexts of stages. On a CPU, subnormals are zero.

        The autocast's weight cache is off: casts made without gradients must not be reused with them."""
        enabled, dtype = self.autocast
        on_cpu = self.device.type == "cpu"
        with (
            torch.autocast(self.device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            subnormals_are_zero() if on_cpu else contextlib.nullcontext(),
            contextlib.ExitStack() as stack,
        ):
            for stage in self.stages:
                if stage is not None:
                    stack.enter_context(stage.running())
            yield

    # ---------------------------------------------------------------------------------------------- tiles

    def forward(self, t: Tile) -> None:
        """Compute a stage's output and state; linearize keeps the tape."""
        k, c, stage = t.stage, t.chunk, self.stage(t.stage)
        with self.exchange.tile_context(self, t):
            (x, chunk), state = self.stage_input("y", k, c), self.exchange.state(self, k, c)
            y, after = self._run_forward(t, stage, x, state, chunk)
            if stage.stateful:
                self.exchange.put_state(self, k, c, after)
        if self.host and k and self.grid.first_of_segment(k):
            self.store["y", k - 1, c] = self.put_on_host(x)
        if k == self.grid.stages - 1:
            assert isinstance(y, Tensor)
            self.add_loss(c, y)
        else:
            self.store["y", k, c] = y
            if self._has_norms(k, c):
                self._note_output(self.norms, k, y)
                self._note_state(self.norms, k, after)
        is_stored = self.grid.stores_inputs and self.transport is None and self.device.type == "cuda"
        if is_stored and c + 1 == self.grid.chunks:
            stage.end_forward()

    def _has_norms(self, k: int, c: int) -> bool:
        """Whether a tile is compared with its recomputation by norms, as no loss is computed again."""
        return c == self.compared_chunk and k < self.grid.stages - 1 and self.grid.head_in_forward

    def _note_output(self, norms: ChunkLosses, k: int, y: Tensor | Increment) -> None:
        """Note the norm of a segment's output."""
        self._note_norm(norms, 2 * k, y.total if isinstance(y, Increment) else y)

    def _note_state(self, norms: ChunkLosses, k: int, after: State) -> None:
        """Note the norm of the last layer's state in a segment."""
        self._note_norm(norms, 2 * k + 1, after[-1] if after else None)

    def _note_norm(self, norms: ChunkLosses, index: int, values: Tensor | None) -> None:
        """Note the norm of these values, if there are any."""
        if values is not None:
            out = norms.place(index, self.accumulate_dtype, values.device)
            torch.linalg.vector_norm(values.detach(), dtype=self.accumulate_dtype, out=out)

    def _run_forward(
        self, t: Tile, stage: Stage, x: Tensor, state: State, chunk: Batch
    ) -> tuple[Tensor | Increment, State]:
        """Return the stage's output and new state; store the tape of a linearize tile."""
        k, c, unlisted = t.stage, t.chunk, self.gradients.unlisted_leaves
        y: Tensor | None = None
        after: State = ()
        if t.kind == "linearize" or (
            unlisted.open and c + 1 == self.grid.chunks and not stage.reads_only_listed
        ):
            # a tape that is dropped adds nothing
            sums = self._sums_of(t) if t.kind == "linearize" else Gradients(unlisted)
            inputs = x, state, chunk, sums
            y, after, tape = unlisted.run_tile(lambda: stage.linearize(*inputs))
            if t.kind == "linearize":
                self.store["tape", k, c] = tape
            del tape
        if self.decays is not None and stage.stateful:
            with torch.no_grad():
                return stage.forward_noting_decay(x, state, chunk, self.decays[k])
        if y is not None:
            return y, after
        with torch.no_grad():
            if not (self.increments and k and stage.adds_to_input):
                return stage.forward(x, state, chunk)
            below = self.store["y", k - 1, c]
            added, after = stage.forward_increment(x, state, chunk)
            total, added = x + added, compact(added)
            is_narrower = added.nbytes < total.nbytes and added.shape == x.shape
            is_whole = isinstance(below, Increment) and below.in_a_row >= self.increments
            return (Increment(below, added, total) if is_narrower and not is_whole else total), after

    def _sums_of(self, t: Tile) -> Gradients:
        """Return the sums to which a tile's backward adds."""
        if not (self.grid.head_in_forward and t.stage == self.grid.stages - 1 and self.scale is None):
            return self.gradients
        if self.head_gradients is None:
            self.head_is_unscaled = True
            unit = torch.ones((), dtype=self.accumulate_dtype, device=self.device)
            self.head_gradients = Gradients(self.gradients.unlisted_leaves, loss_cotangent=unit)
        return self.head_gradients

    def _scale_head_gradients(self, scale: Tensor, frees: bool) -> None:
        """Begin the gradients' sums with the head's, times the loss's cotangent."""
        head, top = self.head_gradients, self.grid.stages - 1
        assert head is not None
        if frees:
            head.scale(scale, self.rounds_finished_sums)
        else:
            head.finish()
        for parameter, total in head.sums.items():
            self.gradients.room.pop(parameter, None)
            self.gradients.sums[parameter] = total if frees else total * scale
        if self.rounds_finished_sums:
            self.gradients.round([p for p in head.sums if self._lowest_stage.get(p) == top])
        if frees:
            self.head_gradients = None

    def add_loss(self, c: int, loss: Tensor) -> None:
        """Add the summed loss of chunk c."""
        self._total = loss if self._total is None else self._total.double() + loss
        self._loss_dtype = loss.dtype
        self.losses[c] = loss

    def recompute(self, t: Tile) -> None:
        """Make a tape that the forward has not kept."""
        k, c, stage = t.stage, t.chunk, self.stage(t.stage)
        x, chunk = self.stage_input("y" if self.grid.first_of_segment(k) else "z", k, c)
        with self.exchange.tile_context(self, t):
            inputs = x, self.exchange.state(self, k, c), chunk, self.gradients
            is_read = k == self.grid.stages - 1 or ("z", k, c) in self.grid.writes(t)
            linearize = stage.linearize if is_read else stage.linearize_again
            y, after, tape = self.gradients.unlisted_leaves.run_tile(lambda: linearize(*inputs))
        self.store["tape", k, c] = tape
        if k == self.grid.stages - 1 and c in self.losses.written:
            self.recomputed_losses[c] = y
        if self._has_norms(k, c):
            if is_read or not stage.skips_output:
                self._note_output(self.recomputed_norms, k, y)
            if is_read:
                self._note_state(self.recomputed_norms, k, after)
            else:  # it may be computed with the pullback
                self.late_states[k] = after
        if ("z", k, c) in self.grid.writes(t):
            self.store["z", k, c] = y

    def advance(self, t: Tile) -> None:
        """Compute a state that the forward has not stored, and nothing else."""
        k, c, stage = t.stage, t.chunk, self.stage(t.stage)
        x, chunk = self.stage_input("y" if self.grid.first_of_segment(k) else "z", k, c)
        with torch.no_grad(), self.exchange.tile_context(self, t):
            y, after = stage.advance(x, self.exchange.state(self, k, c), chunk)
        if ("z", k, c) in self.grid.writes(t):
            self.store["z", k, c] = y
        if stage.stateful:
            self.exchange.put_state(self, k, c, after)

    def _cotangent(self, k: int, start: int, stop: int) -> Tensor | None:
        """Return the cotangent of stage k's outputs on the tokens [start, stop), or None if there is none.

        Its shape is (batch, stop - start, width); the head's is `scale`, a scalar."""
        top = self.grid.stages - 1
        if k == top:
            if self.scale is None and self.grid.head_in_forward:
                return torch.ones((), dtype=self.accumulate_dtype, device=self.device)
            return self.scale
        factor = None
        if self.head_is_unscaled and k == top - 1:
            if self.scale is None:
                return None
            factor = self.scale
        pieces, keys = list[Tensor](), self.grid.cotangents(k, start, stop)
        are_freed = set(keys).issubset(self.freed_by_tile)
        for key in keys:
            piece = self.store.pop(key) if are_freed else self.store[key]
            if piece is None:
                continue
            if key[0] == "spill":  # belongs to the last tokens of the piece before
                pieces[-1] = pieces[-1].clone()
                pieces[-1][:, -piece.shape[1] :].add_(piece)
            else:
                pieces.append(piece)
        if not pieces:
            return None
        dy = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))[:, : stop - start]
        if factor is None:
            return dy
        return dy.mul_(factor) if are_freed and self.is_last_backward else dy * factor

    def backward(self, t: Tile) -> None:
        """Pull a tape back."""
        k, c = t.stage, t.chunk
        start, stop = self.grid.cuts[c : c + 2]
        d_after = self.exchange.cotangents(self, k, c)
        dx, d_before = self.store.pop(("tape", k, c))(self._cotangent(k, start, stop), d_after)
        del d_after
        if k in self.late_states:
            self._note_state(self.recomputed_norms, k, self.late_states.pop(k))
        if ("dy", k - 1, c) in self.grid.writes(t):
            self.store["dy", k - 1, c] = dx
        self._add_to_ids(k, start, dx)
        self.exchange.put_cotangents(self, k, c, d_before)
        is_alone = self.transport is None and self.grid.stores_inputs
        if c == 0 and is_alone and self.grid.carried:  # the stage's last tile
            self._end_stage(k)

    def _end_stage(self, k: int) -> None:
        """Drop what stage k's backward needed, when all of its tiles have run."""
        self.stage(k).end_backward()
        for slab in self.slabs.get(k, ()):
            slab.end_backward()
            if self.attention_outputs is not None:
                self.attention_outputs.drop(slab)
        if self.rounds_finished_sums:
            self.gradients.round([p for p in self.stage(k).parameters() if self._lowest_stage[p] == k])

    @functools.cached_property
    def _lowest_stage(self) -> dict[Tensor, int]:
        """The lowest stage that lists each parameter: the last one to add to its gradient."""
        stages = [(k, stage) for k, stage in enumerate(self.stages) if stage is not None]
        return {p: k for k, stage in reversed(stages) for p in stage.parameters()}

    def windowed(self, t: Tile) -> None:
        """Compute a vjp cut to a window."""
        grid, k, stage = self.grid, t.stage, self.stages[t.stage]
        left, start, stop, halo_stop = grid.extent(t)
        chunks_read, window = grid.covering(left, halo_stop), grid.window(k)
        assert stage is not None and window is not None
        pieces = [self.stage_input("y", k, j)[0] for j in chunks_read]
        first = grid.cuts[chunks_read[0]]
        x = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))[:, left - first : halo_stop - first]
        dy = self._cotangent(k, start, halo_stop)
        if dy is None:
            dy = x.new_zeros(x.shape[0], halo_stop - start, x.shape[2])
        at_end = halo_stop == grid.cuts[-1]
        d_final = self.d_final[k] if at_end else (None,) * len(self.d_final[k])
        seq_idx = self.batch.chunk(left, halo_stop).seq_idx
        begins = self.chunks[t.chunk].starts_document
        inputs = Windowed(
            left, start, stop, window, x, self.exchange.state(self, k, t.chunk), dy, d_final, seq_idx, begins
        )
        vjp = stage.windowed_vjp
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
        self.d_ids[:, start : start + dx.shape[1]].add_(dx)

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
