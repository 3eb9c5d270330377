"""Programs: each worker's tiles, sends and receives, in a fixed order. They are plain data, made once by
`make_schedule`, and leave no choice at run time.

A distribution is an owner for each tile (`Owners`): layer shards, chunks dealt out in turn, or both. Messages
follow from it: a value goes to every other worker that reads it, from reader to reader in a chain, so that
nobody sends it more than once. A worker's tiles are in list-schedule order: the order in which they would
start if each free worker took the first of its tiles whose inputs are there. Sends and receives are placed by
simulating that order once with channels of `buffers` messages, so a program cannot deadlock, however long
its tiles take."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

from adjoint.engine import binomial
from adjoint.engine.grid import Grid, Key, Tile, TileKind

# A tile's time per token, relative to its stage's forward; used for the list schedule alone.
TIMES = {"forward": 1.0, "linearize": 1.0, "recompute": 1.0, "backward": 2.0, "windowed": 3.0}
BUFFERS = 2  # messages in a channel: one can be filled while another travels
# Messages in a channel for windowed tiles, which send many small pieces; every transport holds as many.
CAPACITY = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Compute a tile."""

    tile: Tile
    frees: tuple[Key, ...] = ()  # keys that this worker no longer needs after the action

    def __str__(self) -> str:
        return str(self.tile)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send a value to worker `to`; waits while the channel is full."""

    key: Key
    to: int
    frees: tuple[Key, ...] = ()

    def __str__(self) -> str:
        return f"send {format_key(self.key)} to {self.to}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a value from worker `source`."""

    key: Key
    source: int
    frees: tuple[Key, ...] = ()

    def __str__(self) -> str:
        return f"receive {format_key(self.key)} from {self.source}"


@dataclasses.dataclass(frozen=True, slots=True)
class HelperTasks:
    """Compute `units` together with helpers: whoever is free takes the next one.

    A unit is some tiles of one layer with gradient sums of its own; these are added in the units' order, so
    that results do not depend on who computed them."""

    units: tuple[tuple[Tile, ...], ...]
    frees: tuple[Key, ...] = ()

    def __str__(self) -> str:
        return f"share {'; '.join(' '.join(map(str, unit)) for unit in self.units)}"


Action = Run | Send | Recv | HelperTasks


def format_key(key: Key) -> str:
    """Return the key as text, such as y[3,7]."""
    return f"{key[0]}[{','.join(map(str, key[1:]))}]"


@dataclasses.dataclass(frozen=True)
class Owners:
    """The worker that owns each tile: `owners(stage, chunk)`.

    Attributes:
        shards: per stage, the number of its layer shard; rising.
        in_turn: workers per shard, each with all the shard's stages; chunks are dealt out to them in turn.
        first: the worker, of these, that has the first chunk.
    """

    shards: tuple[int, ...]
    in_turn: int = 1
    first: int = 0

    @property
    def workers(self) -> int:
        return (self.shards[-1] + 1) * self.in_turn

    def __call__(self, stage: int, chunk: int) -> int:
        return self.shards[stage] * self.in_turn + (chunk + self.first) % self.in_turn

    def peer(self, worker: int, chunk: int) -> int:
        """Return the worker that has a chunk, of those with the same stages as `worker`."""
        return worker - worker % self.in_turn + (chunk + self.first) % self.in_turn

    def fitted_to(self, grid: Grid) -> Owners:
        """Return these owners for a grid, whose stages may be shards, and whose states may cross in rounds.

        A round is one chunk for each worker. Where states cross inside of tiles, no worker may be without a
        chunk in the last one, so the first may be incomplete."""
        are_shards = grid.stages < len(self.shards)
        shards = tuple(range(self.shards[-1] + 1)) if are_shards else self.shards
        first = -grid.chunks % self.in_turn if grid.exchanges_within_tiles else self.first
        return dataclasses.replace(self, shards=shards, first=first)

    @staticmethod
    def from_spans(spans: Sequence[range], in_turn: int = 1) -> Owners:
        """Return owners for layer shards with the layers `spans`.

        The first shard has the embedding, the last one the head."""
        layers = [shard for shard, span in enumerate(spans) for _ in span]
        return Owners((0, *layers, len(spans) - 1), in_turn)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The programs of all workers; equal to itself alone, so that what is made of it can be cached.

    Attributes:
        buffers: number of messages that the channel from one worker to another holds.
    """

    grid: Grid
    programs: tuple[Collection[Action], ...]
    buffers: int = BUFFERS

    def __str__(self) -> str:
        lines = []
        for worker, program in enumerate(self.programs):
            lines += [f"worker {worker}", *(f"  {action}" for action in program)]
        return "\n".join(lines)

    def channels(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of all channels, sorted: all workers open them in this order."""
        return sorted(
            {(w, a.to) for w, program in enumerate(self.programs) for a in program if isinstance(a, Send)}
        )


@functools.lru_cache(64)
def make_schedule(
    grid: Grid,
    owners: Owners,
    *,
    forward: bool = True,
    backward: bool = True,
    tapes: int = 1,
    stream: bool = False,
    buffers: int = BUFFERS,
) -> Schedule:
    """Return the workers' programs for a grid. It takes about 0.1 ms per action; schedules are cached.

    Args:
        forward, backward: which tiles to include. Without the forward, its results count as there already.
        tapes: how many tapes of a segment on a chunk a worker may hold: the forward keeps the first so many
            that the backward uses (linearize in place of forward and recompute), and recompute may run so
            far ahead.
        stream: backward tiles begin before the forward ends, where the arrows allow it.
    """
    if grid.checkpoints is not None and owners.workers == 1 and len(set(grid.segments)) == 1:
        program = ColumnProgram(grid, tapes, forward, backward, stores=forward and backward)
        return Schedule(grid, (program,), buffers)
    is_alone = owners.workers == 1 and grid.dy_from == "above" and not grid.has_windows
    all_tiles = grid.order_by_segments() if is_alone else grid.order(stream)
    order = [
        t for t in all_tiles if (forward and (backward or t.is_forward) if _in_forward(grid, t) else backward)
    ]
    columns = _columns(grid, order, owners)
    if forward and backward:
        taped = {name for worker_columns in columns.values() for name in worker_columns[:tapes]}
        # the head is pulled back as soon as it has run
        if grid.head_in_forward or (stream and not grid.carried):
            taped |= {(grid.segments[-1], c) for c in range(grid.chunks)}
        order = [
            _linearized(grid, t, taped) for t in order if not _is_in_columns(grid, t, "recompute", taped)
        ]
    if owners.workers > 1:
        order = _list_schedule(grid, order, columns, owners, max(tapes, 1))
    tiles_run = [] if forward else [*grid.forward_tiles(), *grid.head_tiles()]
    return Schedule(grid, _with_messages(grid, order, owners, buffers, tiles_run), buffers)


def _is_in_columns(grid: Grid, t: Tile, kind: str, columns: set[tuple[int, int]]) -> bool:
    """Whether a tile is of `kind` and in one of `columns`, (segment, chunk) pairs; never if windowed."""
    return t.kind == kind and (grid.segments[t.stage], t.chunk) in columns and grid.window(t.stage) is None


def _linearized(grid: Grid, t: Tile, taped: set[tuple[int, int]]) -> Tile:
    return dataclasses.replace(t, kind="linearize") if _is_in_columns(grid, t, "forward", taped) else t


def _columns(grid: Grid, order: Iterable[Tile], owners: Owners) -> dict[int, list[tuple[int, int]]]:
    """Return each worker's columns, (segment, chunk) pairs, in the order in which it recomputes them."""
    columns: dict[int, dict[tuple[int, int], None]] = collections.defaultdict(dict)
    for t in order:
        if t.kind == "recompute":
            columns[owners(t.stage, t.chunk)][grid.segments[t.stage], t.chunk] = None
    return {worker: list(worker_columns) for worker, worker_columns in columns.items()}


def _seconds(grid: Grid, t: Tile) -> float:
    tokens = grid.tokens(t.chunk, t.count)
    if t.kind == "windowed":
        left, _, _, halo_stop = grid.extent(t)
        tokens = halo_stop - left
    return TIMES[t.kind] * tokens * (grid.costs[t.stage] if grid.costs else 1.0)


def _list_schedule(
    grid: Grid, order: Sequence[Tile], columns: dict[int, list[tuple[int, int]]], owners: Owners, tapes: int
) -> list[Tile]:
    """Return all tiles in the order in which a list schedule starts them.

    A worker holds the tapes of at most `tapes` of its columns at a time, and recomputes them in the order of
    `columns`."""
    worker_of = {t: owners(t.stage, t.chunk) for t in order}
    written = {key for t in order for key in grid.writes(t)}
    missing = {t: sum(key in written for key in grid.reads(t)) for t in order}  # keys it waits for
    readers: dict[Key, list[Tile]] = collections.defaultdict(list)
    for t in order:
        for key in grid.reads(t):
            readers[key].append(t)
    column_index = {
        (w, *name): i for w, worker_columns in columns.items() for i, name in enumerate(worker_columns)
    }
    # per (worker, column)
    backward_tiles_left: dict[tuple[int, int], int] = collections.Counter()
    for t in order:
        i = column_index.get((worker_of[t], grid.segments[t.stage], t.chunk), 0)
        if t.kind == "recompute" and i >= tapes:
            missing[t] += 1
            # a key that no tile writes: the worker may recompute its column i
            readers["open", worker_of[t], i].append(t)
        backward_tiles_left[worker_of[t], i] += t.kind == "backward"
    rank = {t: i for i, t in enumerate(order)}
    ready: list[list[tuple[int, Tile]]] = [[] for _ in range(owners.workers)]  # heaps by rank
    finished_columns, busy = [0] * owners.workers, [False] * owners.workers
    events: list[tuple[float, int, Tile]] = []
    started: list[Tile] = []

    def begin(w: int, time: float) -> None:
        if ready[w] and not busy[w]:
            i, t = heapq.heappop(ready[w])
            started.append(t)
            busy[w] = True
            heapq.heappush(events, (time + _seconds(grid, t), i, t))

    for t in order:
        if not missing[t]:
            heapq.heappush(ready[worker_of[t]], (rank[t], t))
    for w in range(owners.workers):
        begin(w, 0.0)
    while events:
        time, _, t = heapq.heappop(events)
        w, keys = worker_of[t], grid.writes(t)
        busy[w] = False
        if t.kind == "backward":
            backward_tiles_left[w, column_index.get((w, grid.segments[t.stage], t.chunk), 0)] -= 1
            while finished_columns[w] < len(columns[w]) and not backward_tiles_left[w, finished_columns[w]]:
                finished_columns[w] += 1
                keys.append(("open", w, finished_columns[w] + tapes - 1))
        woken = {w}
        for key in keys:
            for reader in readers[key]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready[worker_of[reader]], (rank[reader], reader))
                    woken.add(worker_of[reader])
        for w in sorted(woken):
            begin(w, time)
    if len(started) < len(order):
        raise AssertionError("an arrow goes round in a circle")
    return started


def _with_messages(
    grid: Grid, order: Sequence[Tile], owners: Owners, buffers: int, tiles_run: Sequence[Tile] = ()
) -> tuple[tuple[Action, ...], ...]:
    """Return each worker's program: its tiles of `order`, with the messages they need.

    If a send meets a full channel, the receiver's program gets a receive before its next tile, so that the
    send cannot block it.

    Args:
        tiles_run: tiles that have run already; their owners still store the values these read and wrote.
    """
    producer = {key: owners(t.stage, t.chunk) for t in (*tiles_run, *order) for key in grid.writes(t)}
    stored_keys: list[set[Key]] = [set() for _ in range(owners.workers)]
    for t in tiles_run:
        stored_keys[owners(t.stage, t.chunk)].update(grid.reads(t), grid.writes(t))
    readers: dict[Key, list[int]] = collections.defaultdict(list)
    for t in order:
        worker = owners(t.stage, t.chunk)
        for key in grid.reads(t):
            if worker != producer[key] and worker not in readers[key] and key not in stored_keys[worker]:
                readers[key].append(worker)
    source, onward = dict[tuple[Key, int], int](), dict[tuple[Key, int], int]()
    for key, chain in readers.items():
        for a, b in zip([producer[key], *chain], chain, strict=False):
            source[key, b], onward[key, a] = a, b
    programs: list[list[Action]] = [[] for _ in range(owners.workers)]
    channels: dict[tuple[int, int], collections.deque[Key]] = collections.defaultdict(collections.deque)

    def hand_on(key: Key, worker: int) -> None:
        if (key, worker) in onward:
            to = onward[key, worker]
            while len(channels[worker, to]) >= buffers:
                take_in(worker, to)
            programs[worker].append(Send(key, to))
            channels[worker, to].append(key)

    def take_in(sender: int, worker: int) -> None:
        key = channels[sender, worker].popleft()
        programs[worker].append(Recv(key, sender))
        stored_keys[worker].add(key)
        hand_on(key, worker)

    for t in tiles_run:
        for key in grid.writes(t):
            hand_on(key, owners(t.stage, t.chunk))
    for t in order:
        worker = owners(t.stage, t.chunk)
        for key in grid.reads(t):
            while key not in stored_keys[worker]:
                take_in(source[key, worker], worker)
        programs[worker].append(Run(t))
        for key in grid.writes(t):
            stored_keys[worker].add(key)
            hand_on(key, worker)
    return tuple(_with_frees(grid, _with_advances(grid, program)) for program in programs)


def _with_advances(grid: Grid, program: Sequence[Action]) -> Sequence[Action]:
    """Return the program of a grid with checkpoints: before a chunk is recomputed, its state is, from the
    nearest one that is stored.

    The stages are those of this worker, which computes each state again from its own inputs."""
    tiles = [action.tile for action in program if isinstance(action, Run)]
    recomputed = [t for t in tiles if t.kind == "recompute"]
    if grid.checkpoints is None or not recomputed:
        return program
    stages = sorted({t.stage for t in recomputed})
    stages = stages[: 1 + max((i for i, k in enumerate(stages) if grid.stateful[k]), default=-1)]
    taped = None
    if any(t.is_forward for t in tiles):
        taped = min((t.chunk for t in tiles if t.kind == "linearize"), default=grid.chunks)
    runs = dict(_reversal(grid, taped))
    out: list[Action] = []
    for action in program:
        if isinstance(action, Run) and action.tile.kind == "recompute":
            again = runs.pop(action.tile.chunk, ())  # with the first stage that is recomputed
            out += [Run(Tile("advance", k, c)) for run in again for c in run for k in stages]
        out.append(action)
    return out


def _reversal(grid: Grid, taped: int | None) -> binomial.Reversal:
    assert grid.checkpoints is not None
    return binomial.Reversal([0, *sorted(grid.document_starts)], grid.chunks, grid.checkpoints, taped)


@dataclasses.dataclass(frozen=True)
class ColumnProgram(Collection[Action]):
    """The program of one worker of a grid with checkpoints, all of whose stages are one segment.

    It goes from column to column, all stages of a chunk. Its actions are made while it is iterated over: if
    they were stored, they would take more memory than the states do.

    Attributes:
        tapes: number of tapes that the forward keeps.
        forward, backward: which tiles it has.
        stores: whether the forward stores tapes and states, or has stored them, for the backward.
    """

    grid: Grid
    tapes: int
    forward: bool = True
    backward: bool = True
    stores: bool = True

    def halves(self) -> tuple[ColumnProgram, ColumnProgram]:
        """Return the forward's part and the backward's."""
        return dataclasses.replace(self, backward=False), dataclasses.replace(self, forward=False)

    def __iter__(self) -> Iterator[Action]:
        return itertools.chain.from_iterable(_column(self.grid, *column) for column in self._columns())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, action: object) -> bool:
        return any(action == each for each in self)

    def _columns(self) -> Iterator[tuple[TileKind, int, bool]]:
        """Yield (kind, chunk, whether the state before the chunk stays stored)."""
        chunks = self.grid.chunks
        taped = max(0, chunks - self.tapes) if self.stores else chunks
        reversal = _reversal(self.grid, taped if self.stores else None)
        if self.forward:
            stored = reversal.stored() if self.stores else ()
            for c in range(chunks):
                yield "forward" if c < taped else "linearize", c, c >= taped or c in stored
        if self.backward:
            for c in reversed(range(taped + 1, chunks)):
                yield "backward", c, False
            for c, runs in reversal:
                for run in runs:
                    yield from (("advance", j, j == run[0]) for j in run)
                if c < taped:
                    yield "recompute", c, True
                yield "backward", c, False


def _column(grid: Grid, kind: TileKind, c: int, state_stays: bool) -> Sequence[Action]:
    """Return the actions of all stages on chunk c, each with its `frees`."""
    stages = range(grid.stages)
    if kind == "advance":
        stages = range(1 + max((k for k in stages if grid.stateful[k]), default=-1))
    later = {("S", k, c) for k in stages if grid.reads_state(c + 1)} if kind != "backward" else set()
    later |= {("S", k, c - 1) for k in stages} if state_stays else set()
    later |= {("tape", k, c) for k in stages} if kind in ("linearize", "recompute") else set()
    later |= {("dS", k, c - 1) for k in stages} if kind == "backward" else set()
    order = reversed(stages) if kind == "backward" else stages
    return _with_frees(grid, [Run(Tile(kind, k, c)) for k in order], later)


def cut_before_backward(
    grid: Grid, program: Collection[Action]
) -> tuple[Collection[Action], Collection[Action]]:
    """Return the forward's actions of a program without windows, and the backward's."""
    if isinstance(program, ColumnProgram):
        return program.halves()
    halves: tuple[list[Action], list[Action]] = ([], [])
    for action in program:
        if isinstance(action, Run):
            halves[0 if _in_forward(grid, action.tile) else 1].append(action)
        else:  # of a program without windows: messages of the forward are states
            assert not isinstance(action, HelperTasks)
            halves[0 if action.key[0] == "S" else 1].append(action)
    return halves


@functools.lru_cache(64)
def forward_and_backward(
    schedule: Schedule, worker: int, again: Schedule | None
) -> tuple[Collection[Action], Collection[Action]]:
    """Return a worker's actions of the forward, in a schedule without windows, and of the backward.

    Args:
        again: of a second backward, which finds its tapes used and recomputes them: what that reads stays
            stored. None if nothing has to stay.
    """
    forward_actions, backward_actions = cut_before_backward(schedule.grid, schedule.programs[worker])
    if again is not None:
        forward_actions = keep_for(schedule.grid, forward_actions, again.programs[worker])
    return forward_actions, backward_actions


def keep_for(grid: Grid, actions: Iterable[Action], later: Iterable[Action]) -> list[Action]:
    """Return the actions, freeing no value that actions of a later program read."""
    stays = {key for action in later for key in keys_of(grid, action)[0]}
    return [
        dataclasses.replace(action, frees=tuple([key for key in action.frees if key not in stays]))
        for action in actions
    ]


def _in_forward(grid: Grid, t: Tile) -> bool:
    """Whether a tile runs in the forward."""
    return t.is_forward or (grid.head_in_forward and t.stage == grid.stages - 1)


def stored_states(grid: Grid, program: Iterable[Action]) -> collections.Counter[int]:
    """Return the most states at chunk edges that a program of a grid with checkpoints stores at a time, by
    stage.

    A state that an action frees leaves its place to the one that it writes."""
    stored, most = collections.defaultdict[int, set[Key]](set), collections.Counter[int]()
    for action in program:
        for key in action.frees:
            if key[0] == "S":
                stored[key[1]].discard(key)
        for key in keys_of(grid, action)[1]:
            if key[0] == "S" and grid.reads_state(key[2] + 1):
                stored[key[1]].add(key)
                most[key[1]] = max(most[key[1]], len(stored[key[1]]))
    return most


def tiles_of(action: Action) -> Sequence[Tile]:
    """Return the tiles that an action computes."""
    if isinstance(action, HelperTasks):
        return [t for unit in action.units for t in unit]
    return [action.tile] if isinstance(action, Run) else []


def keys_of(grid: Grid, action: Action) -> tuple[list[Key], list[Key]]:
    """Return the keys that an action reads, and those that it writes, in its worker's store."""
    if isinstance(action, Send):
        return [action.key], []
    if isinstance(action, Recv):
        return [], [action.key]
    tiles = [action.tile] if isinstance(action, Run) else tiles_of(action)
    return [key for t in tiles for key in grid.reads(t)], [key for t in tiles for key in grid.writes(t)]


def _with_frees(
    grid: Grid, program: Sequence[Action], read_after: Set[Key] = frozenset()
) -> tuple[Action, ...]:
    """Return the program with each action's `frees`: the keys that no later action of this worker reads, or
    not before they are written again.

    Args:
        read_after: keys that are read after the program.
    """
    read_later = set(read_after)
    out = []
    for action in reversed(program):
        reads, writes = keys_of(grid, action)
        used = dict.fromkeys([*reads, *writes])
        out.append(dataclasses.replace(action, frees=tuple(key for key in used if key not in read_later)))
        read_later.difference_update(writes)
        read_later.update(reads)
    return tuple(reversed(out))


# --------------------------------------------------------------------------------------------- with helpers

UNITS_EACH = 4  # units per worker that shares them: more balance slow workers better, but send more sums


def add_helper_tasks(schedule: Schedule, shards: Sequence[int], helpers: Sequence[int]) -> Schedule:
    """Return the schedule in which each shard with helpers ends with a `HelperTasks` of its backward tiles.

    It is for `LayerLocal`: every layer's cotangent is dL/dy_K, so no layer's backward waits for another's,
    and these tiles can go last. The first layer's stay where they are: the embedding waits for their
    cotangents.

    Args:
        shards: per stage, the number of its shard.
        helpers: per helper, the shard that it helps.
    """
    grid, top = schedule.grid, schedule.grid.stages - 1
    programs = list(schedule.programs)
    for shard in set(helpers):
        workers, program = 1 + list(helpers).count(shard), programs[shard]
        layers = [k for k in range(2, top) if shards[k] == shard]
        backward_tiles, remaining = {k: list[Tile]() for k in layers}, list[Action]()
        for action in program:
            if isinstance(action, Run) and not action.tile.is_forward and action.tile.stage in backward_tiles:
                backward_tiles[action.tile.stage].append(action.tile)
            else:
                remaining.append(action)
        units = [
            unit
            for k, tiles in backward_tiles.items()
            for unit in _units(grid, k, tiles, -(-UNITS_EACH * workers // len(layers)))
        ]
        programs[shard] = _with_frees(grid, [*remaining, HelperTasks(tuple(units))] if units else remaining)
    return dataclasses.replace(schedule, programs=tuple(programs))


def _units(grid: Grid, k: int, tiles: list[Tile], groups: int) -> list[tuple[Tile, ...]]:
    """Return a layer's tiles as units: `groups` of them if windowed, else one."""
    if grid.window(k) is None:
        return [tuple(tiles)]
    groups = min(groups, len(tiles))
    cuts = [len(tiles) * i // groups for i in range(groups + 1)]
    return [tuple(tiles[a:b]) for a, b in itertools.pairwise(cuts)]
