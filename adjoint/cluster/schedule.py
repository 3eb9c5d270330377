"""Who does which tile when, and what is sent: plain data, without Ray and without tensors.

A schedule is one program a worker: a sequence of `Run`, `Send` and `Recv`, carried out in order, and of
`Pool` and `Steal`, within which whoever is free takes the next tasks. A channel is (sender, receiver, what is
sent); it holds at most `buffers` messages that were sent and not yet received, so that memory is bounded: a
`Send` to a full channel waits. `Shard` carries programs out, `check` proves that they end, and whoever wants
times or drawings walks over the same data.

    kind of Run   what is done                                     one for
    forward       y → y', states at the edge kept; on the last     every shard and chunk
                  shard also the head's loss
    backward      the shard's layers, recomputed and pulled back;  every shard and chunk (`exact`)
                  on the last shard the head first
    head          the head's pullback                              every chunk, last shard (the two below)
    task          the vjp of one layer on one chunk                every layer and chunk (the two below)
    embedding     the embedding's gradient                         every chunk, first shard (the two below)

Messages: "y" up and "dy" or "d_head", which is dL/dy_K, down between neighbours, (batch, chunk, d_model)
each; "table_gradient", the embedding's part of a tied table's gradient, to the head's shard, which owns the
table. Between a shard and its helpers, in a pool: "ask", for a unit of work, and "unit", which one; "weights"
of a layer, once; "task", the inputs of one; and back "gradients" of the layer, summed over the unit.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from adjoint.cluster.pool import Pool, Steal, Unit, in_turn, units_of


class Task(Protocol):
    """What `adjoint.windowed.Task` is: the vjp of a layer on the tokens [start, stop), which reads cotangents
    on [start, halo_stop) and writes those of [left, stop)."""

    @property
    def layer(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def halo_stop(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One tile: all layers of the shard on a chunk, or one layer of it."""

    kind: str
    chunk: int
    layer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {'' if self.layer is None else f'layer {self.layer} '}chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a message over to worker `to`; waits while the channel is full."""

    to: int
    what: str
    chunk: int
    layer: int | None = None

    def __str__(self) -> str:
        of = "" if self.layer is None else f"({self.layer})"
        return f"send {self.what}{of}[{self.chunk}] to {self.to}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a message of worker `source`."""

    source: int
    what: str
    chunk: int
    layer: int | None = None

    def __str__(self) -> str:
        of = "" if self.layer is None else f"({self.layer})"
        return f"receive {self.what}{of}[{self.chunk}] from {self.source}"


Action = Run | Send | Recv | Pool | Steal
Channel = tuple[int, int, str]  # sender, receiver, what


@dataclass(frozen=True)
class Schedule:
    """Programs of all workers.

    Attributes:
        name: the method.
        shards: workers that own layers: 0 … shards - 1. Those after them are helpers.
        chunks: chunks of the sequence.
        buffers: messages a channel holds.
        programs: a worker's actions, in order.
    """

    name: str
    shards: int
    chunks: int
    buffers: int
    programs: tuple[tuple[Action, ...], ...]

    @property
    def workers(self) -> int:
        return len(self.programs)

    def runs(self, worker: int) -> list[Run]:
        """The tiles of a worker, in order, without those of pools, which are anyone's."""
        return [action for action in self.programs[worker] if isinstance(action, Run)]

    def channels(self, worker: int) -> list[Channel]:
        """Those that a worker sends to or receives from, in an order that is the same for all workers."""
        found: set[Channel] = set()
        for action in self.programs[worker]:
            if isinstance(action, Send):
                found.add((worker, action.to, action.what))
            elif isinstance(action, Recv):
                found.add((action.source, worker, action.what))
            elif isinstance(action, Pool):
                found |= {channel for helper in action.helpers for channel in _stolen_over(worker, helper)}
            elif isinstance(action, Steal):
                found |= set(_stolen_over(action.owner, worker))
        return sorted(found)

    def pool(self, owner: int) -> Pool:
        """The pool of a worker."""
        return next(action for action in self.programs[owner] if isinstance(action, Pool))

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.shards} shards, {self.chunks} chunks, {self.buffers} messages a channel"
        ]
        for worker, program in enumerate(self.programs):
            lines.append(f"{'shard' if worker < self.shards else 'helper'} {worker}")
            lines += [f"  {action}" for action in program]
        return "\n".join(lines)


@dataclass(frozen=True)
class Execution:
    """What carrying a schedule out showed.

    Attributes:
        order: the tiles in one order that keeps every wait: (worker, tile).
        fullest: the most messages each channel has held.
    """

    order: list[tuple[int, Run]]
    fullest: dict[Channel, int]


# -------------------------------------------------------------------------------------------------- exact


def exact(
    shards: int, chunks: int, *, tied: bool = False, backward: bool = True, buffers: int = 2
) -> Schedule:
    """The wavefront of `Exact`: chunks flow up through the shards, and back down in reverse.

    Shard s runs chunk c forward once it has y[c] from below and its own states after c - 1; backward once it
    has dy[c] from above and its own adjoint state of c + 1. Either way (shards - 1) / (chunks + shards - 1)
    of the time is spent waiting for the front to pass, if all tiles take as long.

    Args:
        tied: the head's weight is the embedding's: its gradient's two parts are put together at the end.
        backward: False for the loss alone.
    """
    _at_least_one(shards=shards, chunks=chunks, buffers=buffers)
    programs = []
    for shard in range(shards):
        program = list(_forward(shard, shards, chunks))
        for chunk in reversed(range(chunks)) if backward else ():
            if shard < shards - 1:
                program.append(Recv(shard + 1, "dy", chunk))
            program.append(Run("backward", chunk))
            if shard:
                program.append(Send(shard - 1, "dy", chunk))
        if tied and backward:
            program += _table_gradient(shard, shards)
        programs.append(tuple(program))
    return Schedule("exact" if backward else "forward", shards, chunks, buffers, tuple(programs))


def _forward(shard: int, shards: int, chunks: int) -> Iterator[Action]:
    for chunk in range(chunks):
        if shard:
            yield Recv(shard - 1, "y", chunk)
        yield Run("forward", chunk)
        if shard < shards - 1:
            yield Send(shard + 1, "y", chunk)


def _table_gradient(shard: int, shards: int) -> list[Action]:
    if shards == 1:
        return []
    if shard == 0:
        return [Send(shards - 1, "table_gradient", 0)]
    return [Recv(0, "table_gradient", 0)] if shard == shards - 1 else []


# ---------------------------------------------------------------------------------------------- truncated


def truncated(
    layers: Sequence[range], tasks: Sequence[Task], *, tied: bool = False, buffers: int = 2
) -> Schedule:
    """The wavefront forward; then, from the top, each layer's chunks as independent tasks.

    A task needs the cotangents of its layer's outputs on its own tokens and on the window's halo, so the
    layer above must be done that far. Tasks are taken in ascending order of chunks, the lowest layer that can
    go on first, and a chunk's cotangent is handed down as soon as nothing more is added to it: all shards
    are at work after a few chunks.

    Args:
        layers: the layers of each shard, bottom up.
        tasks: as `adjoint.windowed.tasks` gives them.
    """
    by_layer = _by_layer(layers, tasks)
    shards, chunks = len(layers), len(by_layer[0])
    _at_least_one(buffers=buffers)
    programs = []
    for shard in range(shards):
        program = list(_forward(shard, shards, chunks))
        if shard == shards - 1:
            program += [Run("head", chunk) for chunk in range(chunks)]
        program += _windowed_backward(shard, layers[shard], by_layer, shards)
        programs.append(tuple(program + (_table_gradient(shard, shards) if tied else [])))
    return Schedule("truncated", shards, chunks, buffers, tuple(programs))


def _windowed_backward(
    shard: int, own: range, by_layer: dict[int, list[Task]], shards: int
) -> Iterator[Action]:
    geometry = by_layer[own.start]
    chunks, seqlen = len(geometry), geometry[-1].stop
    # tokens below which a layer's output cotangents are whole; the layer below the shard is kept track of too
    whole = dict.fromkeys([own.start - 1, *own], 0)
    if shard == shards - 1:
        whole[own.stop - 1] = seqlen
    done = dict.fromkeys(own, 0)
    received = handed = 0
    while done[own.start] < chunks:
        for layer in own:  # the lowest first
            at = done[layer]
            if at < chunks and by_layer[layer][at].halo_stop <= whole[layer]:
                break
        else:
            yield Recv(shard + 1, "dy", received)
            whole[own.stop - 1] = geometry[received].stop
            received += 1
            continue
        yield Run("task", at, layer)
        done[layer] += 1
        # what the next task still writes to starts at its `left`
        whole[layer - 1] = seqlen if at + 1 == chunks else by_layer[layer][at + 1].left
        while layer == own.start and handed < chunks and geometry[handed].stop <= whole[layer - 1]:
            yield Run("embedding", handed) if shard == 0 else Send(shard - 1, "dy", handed)
            handed += 1


# -------------------------------------------------------------------------------------------- layer-local


def layer_local(
    layers: Sequence[range],
    chunks: int,
    tasks: Sequence[Task] | None = None,
    *,
    helpers: Sequence[int] = (),
    tied: bool = False,
    buffers: int = 2,
) -> Schedule:
    """The wavefront forward; then every layer takes dL/dy_K for its cotangent, so that no layer waits for
    another.

    With a window (`tasks`) all tasks are independent. Without one a layer's chunks follow each other, last
    first, since the adjoint state is carried across their edges; layers are still independent.

    Args:
        layers: the layers of each shard, bottom up.
        tasks: as `adjoint.windowed.tasks` gives them; None without a window.
        helpers: for each helper the shard whose tasks it shares, in a `Pool`: groups of consecutive chunks
            with a window, whole layers without. The first layer's stay with their shard: the embedding needs
            what they hand down.
    """
    _at_least_one(shards=len(layers), chunks=chunks, buffers=buffers)
    shards = len(layers)
    for helper, shard in enumerate(helpers):
        if not 0 <= shard < shards:
            raise ValueError(f"helper {helper} helps shard {shard}, but shards are 0 to {shards - 1}")
    if tasks is not None:
        _by_layer(layers, tasks)  # refuses layers and tasks that do not belong together
    programs: list[list[Action]] = [[] for _ in range(shards)]
    for shard, own in enumerate(layers):
        program = programs[shard]
        program += _forward(shard, shards, chunks)
        order = range(chunks) if tasks is not None else range(chunks - 1, -1, -1)
        for chunk in order:
            # handed from shard to shard, so that no port carries more than one copy
            last = shard == shards - 1
            program.append(Run("head", chunk) if last else Recv(shard + 1, "d_head", chunk))
            if shard:
                program.append(Send(shard - 1, "d_head", chunk))
        mine = tuple(shards + i for i, helped in enumerate(helpers) if helped == shard)
        units = units_of(own, chunks, 1 + len(mine), windowed=tasks is not None)
        program += [Pool(units, mine)] if mine else [run for unit in units for run in runs_of(unit)]
        if shard == 0:
            program += [Run("embedding", chunk) for chunk in order]
        if tied:
            program += _table_gradient(shard, shards)
    programs += [[Steal(shard)] for shard in helpers]
    return Schedule("layer-local", shards, chunks, buffers, tuple(map(tuple, programs)))


def runs_of(unit: Unit) -> list[Run]:
    """The tiles of a unit, in order."""
    return [Run("task", chunk, unit.layer) for chunk in unit.chunks]


# ------------------------------------------------------------------------------------------------- common


def _stolen_over(owner: int, helper: int) -> list[Channel]:
    """The channels of work stealing."""
    return [
        *((helper, owner, what) for what in ("ask", "gradients")),
        *((owner, helper, what) for what in ("unit", "weights", "task")),
    ]


def check(schedule: Schedule) -> Execution:
    """Carries the programs out, without the tiles: every message is received once, where and in the order in
    which it was sent, no worker waits for ever, and no channel is fuller than allowed. The workers of a pool
    take its units in turn.

    Raises:
        ValueError: it is not so; the first worker that is stuck is named, with what it waits for.
    """
    held: dict[Channel, collections.deque[tuple[int, int | None]]] = {}
    fullest: dict[Channel, int] = {}
    at = [0] * schedule.workers
    order: list[tuple[int, Run]] = []
    waiting = collections.deque(range(schedule.workers))
    asleep: dict[Channel, int] = {}  # a channel has one sender and one receiver, and only one can wait
    while waiting:
        worker = waiting.popleft()
        while at[worker] < len(schedule.programs[worker]):
            action = schedule.programs[worker][at[worker]]
            if isinstance(action, Run):
                order.append((worker, action))
                at[worker] += 1
                continue
            if isinstance(action, Pool | Steal):
                owner = worker if isinstance(action, Pool) else action.owner
                pool = (
                    schedule.programs[owner][at[owner]] if at[owner] < len(schedule.programs[owner]) else None
                )
                if not isinstance(pool, Pool) or not all(
                    Steal(owner) in schedule.programs[h][at[h] : at[h] + 1] for h in pool.helpers
                ):
                    break  # whoever comes last goes on
                order += [(member, run) for member, unit in in_turn(owner, pool) for run in runs_of(unit)]
                for member in (owner, *pool.helpers):
                    at[member] += 1
                waiting.extend({owner, *pool.helpers} - {worker})
                continue
            sending = isinstance(action, Send)
            channel = (worker, action.to, action.what) if sending else (action.source, worker, action.what)  # type: ignore[union-attr]
            queue = held.setdefault(channel, collections.deque())
            if len(queue) == (schedule.buffers if sending else 0):
                asleep[channel] = worker
                break
            if sending:
                queue.append((action.chunk, action.layer))
                fullest[channel] = max(fullest.get(channel, 0), len(queue))
            else:
                found = queue.popleft()
                if found != (action.chunk, action.layer):
                    raise ValueError(f"worker {worker}: {action}, but chunk {found[0]} comes first")
            if channel in asleep:
                waiting.append(asleep.pop(channel))
            at[worker] += 1
    for worker, program in enumerate(schedule.programs):
        if at[worker] < len(program):
            raise ValueError(f"worker {worker} waits for ever: {program[at[worker]]}")
    for (sender, receiver, what), queue in held.items():
        if queue:
            raise ValueError(f"{what}[{queue[0][0]}] from {sender} to {receiver} is never received")
    return Execution(order, fullest)


def _by_layer(layers: Sequence[range], tasks: Sequence[Task]) -> dict[int, list[Task]]:
    found: dict[int, list[Task]] = collections.defaultdict(list)
    for task in sorted(tasks, key=lambda task: task.chunk):
        found[task.layer].append(task)
    owned = [layer for own in layers for layer in own]
    if not owned or owned != list(range(len(owned))) or set(found) != set(owned) or not all(layers):
        raise ValueError(
            "layers must be one range a shard, bottom up, that together are the layers of the tasks"
        )
    return found


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be 1 or more, got {count}")
