"""Simulate programs: how long they take, without computing anything, and whether they end.

One function gives the time of a tile, another the time for which a message keeps its sender's port busy.
Workers that share cores slow each other down: with `slots`, n tiles under way go at min(1, slots / n) of
their speed each (processor sharing, as an operating system does it)."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adjoint.engine.grid import Key, Tile
from adjoint.engine.schedule import HelperTasks, Run, Schedule, Send, format_key

TileTime = Callable[[int, Tile], float]
MessageTime = Callable[[Key], float]


@dataclass(frozen=True)
class Span:
    """A tile on the time axis: worker `worker` ran it from `start` to `stop`, in seconds."""

    worker: int
    start: float
    stop: float
    tile: Tile


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation, times in seconds from the start.

    Attributes:
        seconds: when the last worker was done.
        busy: each worker's sum of its tiles' times (on shared slots: of the time they took there).
        spans: every tile, in the order of their starts.
    """

    seconds: float
    busy: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def idle_share(self) -> float:
        """The part of all workers' time in which they wait."""
        worker_seconds = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / worker_seconds if worker_seconds else 0.0

    def followed_by(self, next_timeline: Timeline) -> Timeline:
        """Return this timeline followed by another, which begins when all workers are done."""
        first = self.seconds
        later = [Span(s.worker, first + s.start, first + s.stop, s.tile) for s in next_timeline.spans]
        busy = tuple(a + b for a, b in zip(self.busy, next_timeline.busy, strict=True))
        return Timeline(first + next_timeline.seconds, busy, (*self.spans, *later))


def simulate(
    schedule: Schedule,
    tile: TileTime,
    message: MessageTime = lambda key: 0.0,
    *,
    latency: float = 0.0,
    slots: float | None = None,
    helpers: Sequence[int] = (),
) -> Timeline:
    """Simulate the programs of a schedule.

    Args:
        tile: seconds of a tile: (worker, tile) → seconds; helpers have the numbers after the workers.
        message: seconds for which a message keeps its sender's port busy.
        latency: seconds from the end of a transfer until it can be received.
        slots: tiles that run at full speed at a time, such as a machine's cores by the threads of a worker;
            None for no limit.
        helpers: for each helper, the worker whose units it shares.

    Raises:
        ValueError: a program never ends, a message comes out of turn or is never received, or a time is
            negative.
    """
    host = None if slots is None else _Host(slots)
    return _Simulation(schedule, tile, message, latency, host, helpers).run()


@dataclass(slots=True)
class _Channel:
    """The messages of one channel: when each can be received, and when each was."""

    arrivals: list[tuple[float, Key]] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    asleep: int | None = None  # the worker that waits for the other end; both cannot


@dataclass(slots=True)
class _Host:
    """Processor sharing.

    `done` is the work, in seconds, that each running tile has got since the start. It grows at the same rate
    for all, so tiles end in the order of their `done` at the end."""

    slots: float
    done: float = 0.0
    since: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # a heap of (done at its end, worker)

    def rate(self) -> float:
        return min(1.0, self.slots / len(self.running))

    def advance(self, time: float) -> None:
        if self.running:
            self.done += (time - self.since) * self.rate()
        self.since = time

    def next_end(self) -> float:
        return self.since + max(0.0, self.running[0][0] - self.done) / self.rate()


class _Simulation:
    """The state of a simulation.

    A worker goes on alone until it must wait for another; only tiles on shared slots and shared units have to
    begin in the order of time."""

    def __init__(
        self,
        schedule: Schedule,
        tile: TileTime,
        message: MessageTime,
        latency: float,
        host: _Host | None,
        helpers: Sequence[int],
    ) -> None:
        self.schedule, self.tile, self.message, self.latency = schedule, tile, message, latency
        self.programs = [list(program) for program in schedule.programs]
        self.host, self.helpers = host, helpers
        n = len(self.programs) + len(helpers)
        self.at, self.clock, self.busy, self.port = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n
        self.began = [0.0] * n
        self.channels: dict[tuple[int, int], _Channel] = collections.defaultdict(_Channel)
        self.spans: list[Span] = []
        # of a worker that shares: its units, those not taken, and the tiles of the units under way
        self.left: dict[int, collections.deque[tuple[Tile, ...]]] = {}
        self.unit: dict[int, collections.deque[Tile]] = {}
        self.owner: dict[int, int] = {}  # of each worker under way in a Share, whose units it takes
        self.ready = [(0.0, w) for w in range(len(self.programs))]

    def run(self) -> Timeline:
        while True:
            host = self.host if self.host is not None and self.host.running else None
            if host is not None and (not self.ready or host.next_end() <= self.ready[0][0]):
                self._finish(host)
            elif self.ready:
                self._go_on(*heapq.heappop(self.ready))
            else:
                break
        for w, program in enumerate(self.programs):
            if self.at[w] < len(program):
                raise ValueError(f"worker {w} waits for ever: {program[self.at[w]]}")
        for (sender, receiver), channel in self.channels.items():
            if len(channel.arrivals) > len(channel.received):
                key = channel.arrivals[len(channel.received)][1]
                raise ValueError(f"{format_key(key)} from {sender} to {receiver} is never received")
        spans = sorted(self.spans, key=lambda span: (span.start, span.worker))
        return Timeline(max(self.clock, default=0.0), tuple(self.busy), tuple(spans))

    def _go_on(self, time: float, w: int) -> None:
        """Run the worker's program until it has to wait."""
        self.clock[w] = max(time, self.clock[w])
        while True:
            if w in self.owner:
                if not self._share(w, time):
                    return
                continue
            program = self.programs[w] if w < len(self.programs) else ()
            if self.at[w] == len(program):
                return
            action = program[self.at[w]]
            if isinstance(action, Run):
                if not self._tile(w, action.tile, time):
                    return
            elif isinstance(action, HelperTasks):
                self.left[w] = collections.deque(action.units)
                self.owner[w] = w
                for helper, helped in enumerate(self.helpers, start=len(self.programs)):
                    if helped == w:
                        self.owner[helper] = w
                        self.clock[helper] = max(self.clock[helper], self.clock[w])
                        heapq.heappush(self.ready, (self.clock[w], helper))
            elif isinstance(action, Send):
                if not self._send(w, action):
                    return
            elif not self._receive(w, action.source, action.key):
                return
            self.at[w] += not isinstance(action, HelperTasks)

    def _tile(self, w: int, tile: Tile, time: float) -> bool:
        """Run a tile; return False if the worker waits until it has ended."""
        seconds = self.tile(w, tile)
        if seconds < 0:
            raise ValueError(f"worker {w}, {tile}: a time of {seconds} s")
        if self.host is None:
            self._record(w, tile, self.clock[w], self.clock[w] + seconds)
            return True
        if self.clock[w] > time:  # it may join the tiles under way only when that time has come
            heapq.heappush(self.ready, (self.clock[w], w))
            return False
        self.host.advance(time)
        heapq.heappush(self.host.running, (self.host.done + seconds, w))
        self.began[w] = time
        return False

    def _finish(self, host: _Host) -> None:
        """End the tile that is done next on the shared slots; its worker goes on."""
        time = host.next_end()
        host.advance(time)
        _, w = heapq.heappop(host.running)
        if self.unit.get(w):
            tile = self.unit[w].popleft()
        else:
            action = self.programs[w][self.at[w]]
            assert isinstance(action, Run)
            tile = action.tile
            self.at[w] += 1
        self._record(w, tile, self.began[w], time)
        self._go_on(time, w)

    def _share(self, w: int, time: float) -> bool:
        """Run the next tile of the units that a worker and its helpers share; return False to wait."""
        owner = self.owner[w]
        if not self.unit.get(w):
            if self.clock[w] > time:  # others may take a unit before
                heapq.heappush(self.ready, (self.clock[w], w))
                return False
            units = self.left[owner]
            if not units:  # this one is done; the owner goes on when all are
                del self.owner[w]
                if owner in self.owner.values():
                    return False
                self.at[owner] += 1
                heapq.heappush(self.ready, (max(self.clock[owner], self.clock[w]), owner))
                return False
            self.unit[w] = collections.deque(units.popleft() if w == owner else units.pop())
        if not self._tile(w, self.unit[w][0], time):
            return False
        self.unit[w].popleft()
        return True

    def _send(self, w: int, send: Send) -> bool:
        channel = self.channels[w, send.to]
        full = len(channel.arrivals) - self.schedule.buffers
        if full >= len(channel.received):
            channel.asleep = w
            return False
        if full >= 0:
            self.clock[w] = max(self.clock[w], channel.received[full])
        self.port[w] = max(self.clock[w], self.port[w]) + self.message(send.key)
        channel.arrivals.append((self.port[w] + self.latency, send.key))
        self._wake(channel, channel.arrivals[-1][0])
        return True

    def _receive(self, w: int, source: int, key: Key) -> bool:
        channel = self.channels[source, w]
        count = len(channel.received)
        if count == len(channel.arrivals):
            channel.asleep = w
            return False
        arrival, next_key = channel.arrivals[count]
        if next_key != key:
            raise ValueError(
                f"worker {w}: receive {format_key(key)} from {source}, but {format_key(next_key)} comes first"
            )
        self.clock[w] = max(self.clock[w], arrival)
        channel.received.append(self.clock[w])
        self._wake(channel, self.clock[w])
        return True

    def _wake(self, channel: _Channel, when: float) -> None:
        if channel.asleep is not None:
            heapq.heappush(self.ready, (max(when, self.clock[channel.asleep]), channel.asleep))
            channel.asleep = None

    def _record(self, w: int, tile: Tile, start: float, stop: float) -> None:
        self.clock[w] = stop
        self.busy[w] += stop - start
        self.spans.append(Span(w, start, stop, tile))
