"""How long a schedule takes: events of thousands of workers, without running any of them.

Rules, those of `schedule` with times put to them. A worker carries its program out in order. A tile takes
`tile(worker, run)` seconds. A message is handed over at once, unless its channel already holds `buffers`
messages that were not received; it leaves when the sender's outgoing port is free, keeps the port busy for
`message(send, worker)` seconds and can be received `latency` later. So transfers overlap with computing, and
messages of one sender wait for each other.

Within a pool units are taken as `adjoint.cluster.stealing` does it, in the order of time: the owner takes one
whenever it is free; a helper asks for the next while it has one more task to do, and a process of the owner's
for each helper hands it what it needs. Questions and answers take the latency alone, sums are added in no
time.

Workers on a machine with fewer cores than workers slow each other down: with `slots`, n tiles under way on a
host of s slots go at min(1, s / n) of their speed each (processor sharing, as an operating system does it).
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from adjoint.cluster.pool import Bag, Pool, Steal, Unit
from adjoint.cluster.schedule import Action, Recv, Run, Schedule, Send, runs_of

TileTime = Callable[[int, Run], float]
MessageTime = Callable[[Send, int], float]
Take = Callable[[], Unit | None]  # what the owner or a helper's process does when it needs a unit


@dataclass(frozen=True)
class Span:
    """One tile on the time axis: worker `worker` ran `run` from `start` to `stop`, in seconds."""

    worker: int
    start: float
    stop: float
    run: Run


@dataclass(frozen=True)
class Timeline:
    """What a simulation found. Times are in seconds from the start.

    Attributes:
        seconds: when the last worker was done.
        busy: of each worker, the sum of its tiles' times (on shared slots: of the time they took there).
        spans: every tile, in the order of their starts; empty unless they were asked for.
    """

    seconds: float
    busy: tuple[float, ...]
    spans: tuple[Span, ...] = ()

    @property
    def idle_share(self) -> float:
        """The part of all workers' time in which they wait: (Υ−1)/(C+Υ−1) for Υ shards, C chunks and
        uniform tiles in `exact`."""
        whole = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    tile: TileTime,
    message: MessageTime | None = None,
    *,
    latency: float = 0.0,
    slots: float | None = None,
    hosts: Sequence[int] | None = None,
    spans: bool = False,
) -> Timeline:
    """Runs a schedule through its times.

    Args:
        tile: seconds of a tile: (worker, run) → seconds.
        message: seconds a message keeps its sender's port busy: (send, sender) → seconds; none where None.
        latency: seconds from the end of a transfer to when it can be received.
        slots: tiles a host runs at full speed at a time, such as its cores by the threads of a shard; a
            fraction where others use a part of a core; no limit where None.
        hosts: of each worker, the number of its host; all on one where None.
        spans: whether to record every tile, for a drawing.

    Raises:
        ValueError: the schedule never ends (`schedule.check` says where), or a time is negative.
    """
    if slots is not None and not slots > 0:
        raise ValueError(f"slots must be more than 0, got {slots}")
    if hosts is not None and len(hosts) != schedule.workers:
        raise ValueError(f"hosts: {schedule.workers} workers, but {len(hosts)} values")
    return _Simulation(schedule, tile, message, latency, slots, hosts, spans).timeline()


@dataclass(slots=True)
class _Channel:
    """Times of one channel's messages: when each can be received, when each was."""

    arrivals: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    asleep: int | None = None  # the process that waits for the other end; both cannot


@dataclass(slots=True)
class _Host:
    """Processor sharing. `done` is the work, in seconds, that each tile under way has got since the start of
    the simulation; it grows at the same rate for all, so they end in the order of `done` at their ends."""

    slots: float
    done: float = 0.0
    since: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # a heap of (done at its end, process)

    def rate(self) -> float:
        return min(1.0, self.slots / len(self.running))

    def advance(self, now: float) -> None:
        if self.running:
            self.done += (now - self.since) * self.rate()
        self.since = now

    def next_end(self) -> float:
        return self.since + max(0.0, self.running[0][0] - self.done) / self.rate()


@dataclass(slots=True)
class _Open:
    """Begin further processes of this worker."""

    programs: list[Program]


Program = Generator[Action | Take | _Open, Unit | None, None]


class _Simulation:
    """The clocks of processes: one a worker, and in pools one more of the owner for each helper. A process
    goes on alone until it must wait for another; only tiles on shared slots, units taken and messages through
    a port that several processes share have to be begun in the order of time."""

    def __init__(
        self,
        schedule: Schedule,
        tile: TileTime,
        message: MessageTime | None,
        latency: float,
        slots: float | None,
        hosts: Sequence[int] | None,
        spans: bool,
    ) -> None:
        self.schedule, self.tile, self.message, self.latency = schedule, tile, message, latency
        workers = schedule.workers
        self.busy = [0.0] * workers
        self.port = [0.0] * workers
        # of each process
        self.worker: list[int] = []
        self.clock: list[float] = []
        self.began: list[float] = []
        self.programs: list[Program] = []
        self.current: list[Action | Take | _Open | None] = []
        self.ready: list[tuple[float, int]] = []
        self.answers: dict[tuple[int, int], collections.deque[Unit | None]] = collections.defaultdict(
            collections.deque
        )
        self.channels: dict[tuple[int, int, str], _Channel] = {}
        self.spans: list[Span] | None = [] if spans else None
        self.host_of: list[_Host] | None = None
        if slots is not None:
            numbers = [0] * workers if hosts is None else list(hosts)
            by_number = {number: _Host(slots) for number in numbers}
            self.host_of = [by_number[number] for number in numbers]
            self.hosts = list(by_number.values())
        for worker in range(workers):
            self._begin(worker, self._program(worker), 0.0)

    def _begin(self, worker: int, program: Program, now: float) -> None:
        """A new process of a worker."""
        self.worker.append(worker)
        self.clock.append(now)
        self.began.append(now)
        self.programs.append(program)
        self.current.append(next(program, None))
        heapq.heappush(self.ready, (now, len(self.worker) - 1))

    # ---------------------------------------------------------------------------------------------- programs

    def _program(self, worker: int) -> Program:
        for action in self.schedule.programs[worker]:
            if isinstance(action, Pool):
                yield from self._own(worker, action)
            elif isinstance(action, Steal):
                yield from self._steal(worker, action.owner)
            else:
                yield action

    def _own(self, owner: int, pool: Pool) -> Program:
        bag = Bag(pool.units)
        yield _Open([self._serve(owner, helper, bag) for helper in pool.helpers])
        while (unit := (yield bag.take)) is not None:
            yield from runs_of(unit)
        for helper in pool.helpers:
            yield Recv(owner, _served(helper), 0)

    def _serve(self, owner: int, helper: int, bag: Bag) -> Program:
        weights: set[int] = set()
        before: Unit | None = None
        for number in itertools.count():
            yield Recv(helper, "ask", number)
            unit = yield bag.steal
            self.answers[owner, helper].append(unit)
            yield Send(helper, "unit", number)
            if unit is not None:
                if unit.layer not in weights:
                    yield Send(helper, "weights", 0, unit.layer)
                    weights.add(unit.layer)
                for run in runs_of(unit):
                    yield Send(helper, "task", run.chunk, run.layer)
            if before is not None:
                yield Recv(helper, "gradients", before.chunks[0], before.layer)
            if unit is None:
                break
            before = unit
        yield Send(owner, _served(helper), 0)

    def _steal(self, helper: int, owner: int) -> Program:
        known, numbers = set[int](), itertools.count()
        yield Send(owner, "ask", next(numbers))
        yield Recv(owner, "unit", 0)
        unit = self.answers[owner, helper].popleft()
        while unit is not None:
            runs, following = runs_of(unit), None
            for left, run in zip(reversed(range(len(runs))), runs, strict=True):
                if unit.layer not in known:
                    yield Recv(owner, "weights", 0, unit.layer)
                    known.add(unit.layer)
                yield Recv(owner, "task", run.chunk, run.layer)
                if left == min(1, len(runs) - 1):
                    number = next(numbers)
                    yield Send(owner, "ask", number)
                if not left:
                    yield Recv(owner, "unit", number)
                    following = self.answers[owner, helper].popleft()
                yield run
            yield Send(owner, "gradients", unit.chunks[0], unit.layer)
            unit = following

    # ------------------------------------------------------------------------------------------------ clocks

    def timeline(self) -> Timeline:
        while True:
            crowded = [host for host in self.hosts if host.running] if self.host_of is not None else []
            first = min(crowded, key=_Host.next_end, default=None)
            if first is not None and (not self.ready or first.next_end() <= self.ready[0][0]):
                self._finish(first)
            elif self.ready:
                self._go_on(*heapq.heappop(self.ready))
            else:
                break
        for worker, action in zip(self.worker, self.current, strict=True):
            if action is not None:
                raise ValueError(f"worker {worker} waits for ever: {action}")
        if self.spans is not None:
            self.spans.sort(key=lambda span: (span.start, span.worker))
        return Timeline(max(self.clock, default=0.0), tuple(self.busy), tuple(self.spans or ()))

    def _advance(self, process: int, unit: Unit | None = None) -> None:
        try:
            self.current[process] = self.programs[process].send(unit)
        except StopIteration:
            self.current[process] = None

    def _go_on(self, now: float, process: int) -> None:
        """Carries out the process's program until it has to wait."""
        worker, clock = self.worker[process], max(now, self.clock[process])
        while (action := self.current[process]) is not None:
            unit: Unit | None = None
            if isinstance(action, Run):
                if self.host_of is None:
                    seconds = self._tile(worker, action)
                    self._record(worker, action, clock, clock + seconds)
                    clock += seconds
                elif clock > now:  # it may join its host's tiles only when that time has come
                    heapq.heappush(self.ready, (clock, process))
                    break
                else:
                    host = self.host_of[worker]
                    host.advance(now)
                    heapq.heappush(host.running, (host.done + self._tile(worker, action), process))
                    self.began[process] = now
                    break
            elif isinstance(action, Send):
                channel = self._channel(worker, action.to, action.what)
                full = len(channel.arrivals) - self.schedule.buffers
                if full >= len(channel.received):
                    channel.asleep = process
                    break
                if full >= 0:
                    clock = max(clock, channel.received[full])
                if process >= self.schedule.workers and clock > now:  # others may use the port before
                    heapq.heappush(self.ready, (clock, process))
                    break
                channel.arrivals.append(self._arrival(worker, action, clock))
                self._wake(channel, channel.arrivals[-1])
            elif isinstance(action, Recv):
                channel = self._channel(action.source, worker, action.what)
                taken = len(channel.received)
                if taken == len(channel.arrivals):
                    channel.asleep = process
                    break
                clock = max(clock, channel.arrivals[taken])
                channel.received.append(clock)
                self._wake(channel, clock)
            elif isinstance(action, _Open):
                for program in action.programs:
                    self._begin(worker, program, clock)
            else:
                assert callable(action)
                if clock > now:  # others may take a unit before
                    heapq.heappush(self.ready, (clock, process))
                    break
                unit = action()
            self._advance(process, unit)
        self.clock[process] = clock

    def _finish(self, host: _Host) -> None:
        """Ends the tile that is done next on a host with few slots; its worker goes on."""
        now = host.next_end()
        host.advance(now)
        _, process = heapq.heappop(host.running)
        action = self.current[process]
        assert isinstance(action, Run)
        self._record(self.worker[process], action, self.began[process], now)
        self._advance(process)
        self._go_on(now, process)

    def _arrival(self, worker: int, send: Send, clock: float) -> float:
        """When a message can be received."""
        if send.to == worker:  # between processes of one worker
            return clock
        if send.what in ("ask", "unit"):
            return clock + self.latency
        seconds = 0.0 if self.message is None else self.message(send, worker)
        self.port[worker] = max(clock, self.port[worker]) + seconds
        return self.port[worker] + self.latency

    def _wake(self, channel: _Channel, when: float) -> None:
        if channel.asleep is not None:
            heapq.heappush(self.ready, (max(when, self.clock[channel.asleep]), channel.asleep))
            channel.asleep = None

    def _channel(self, sender: int, receiver: int, what: str) -> _Channel:
        key = sender, receiver, what
        if key not in self.channels:
            self.channels[key] = _Channel()
        return self.channels[key]

    def _tile(self, worker: int, run: Run) -> float:
        seconds = self.tile(worker, run)
        if seconds < 0:
            raise ValueError(f"worker {worker}, {run}: a time of {seconds} s")
        return seconds

    def _record(self, worker: int, run: Run, start: float, stop: float) -> None:
        self.busy[worker] += stop - start
        if self.spans is not None:
            self.spans.append(Span(worker, start, stop, run))


def _served(helper: int) -> str:
    """The channel by which a helper's process tells its owner that it is done."""
    return f"served {helper}"
