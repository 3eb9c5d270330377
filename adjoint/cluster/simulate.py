"""How long a schedule takes: events of thousands of workers, without running any of them.

Rules, those of `schedule` with times put to them. A worker carries its program out in order. A tile takes
`tile(worker, run)` seconds. A message is handed over at once, unless its channel already holds `buffers`
messages that were not received; it leaves when the sender's outgoing port is free, keeps the port busy for
`message(send, worker)` seconds and can be received `latency` later. So transfers overlap with computing, and
messages of one sender wait for each other.

Workers on a machine with fewer cores than workers slow each other down: with `slots`, n tiles under way on a
host of s slots go at min(1, s / n) of their speed each (processor sharing, as an operating system does it).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adjoint.cluster.schedule import Run, Schedule, Send

TileTime = Callable[[int, Run], float]
MessageTime = Callable[[Send, int], float]


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
    asleep: int | None = None  # the worker that waits for the other end; both cannot


@dataclass(slots=True)
class _Host:
    """Processor sharing. `done` is the work, in seconds, that each tile under way has got since the start of
    the simulation; it grows at the same rate for all, so they end in the order of `done` at their ends."""

    slots: float
    done: float = 0.0
    since: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # a heap of (done at its end, worker)

    def rate(self) -> float:
        return min(1.0, self.slots / len(self.running))

    def advance(self, now: float) -> None:
        if self.running:
            self.done += (now - self.since) * self.rate()
        self.since = now

    def next_end(self) -> float:
        return self.since + max(0.0, self.running[0][0] - self.done) / self.rate()


class _Simulation:
    """The workers' clocks. A worker goes on alone until it must wait for another; only tiles on shared slots
    have to be begun in the order of time."""

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
        self.clock = [0.0] * workers
        self.at = [0] * workers
        self.busy = [0.0] * workers
        self.port = [0.0] * workers
        self.began = [0.0] * workers
        self.channels: dict[tuple[int, int, str], _Channel] = {}
        self.ready = [(0.0, worker) for worker in range(workers)]
        self.spans: list[Span] | None = [] if spans else None
        self.host_of: list[_Host] | None = None
        if slots is not None:
            numbers = [0] * workers if hosts is None else list(hosts)
            by_number = {number: _Host(slots) for number in numbers}
            self.host_of = [by_number[number] for number in numbers]
            self.hosts = list(by_number.values())

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
        for worker, program in enumerate(self.schedule.programs):
            if self.at[worker] < len(program):
                raise ValueError(f"worker {worker} waits for ever: {program[self.at[worker]]}")
        if self.spans is not None:
            self.spans.sort(key=lambda span: (span.start, span.worker))
        return Timeline(max(self.clock, default=0.0), tuple(self.busy), tuple(self.spans or ()))

    def _go_on(self, now: float, worker: int) -> None:
        """Carries out the worker's program until it has to wait."""
        program, clock, at = self.schedule.programs[worker], max(now, self.clock[worker]), self.at[worker]
        while at < len(program):
            action = program[at]
            if isinstance(action, Run):
                if self.host_of is None:
                    seconds = self._tile(worker, action)
                    self._record(worker, action, clock, clock + seconds)
                    clock += seconds
                elif clock > now:  # it may join its host's tiles only when that time has come
                    heapq.heappush(self.ready, (clock, worker))
                    break
                else:
                    host = self.host_of[worker]
                    host.advance(now)
                    heapq.heappush(host.running, (host.done + self._tile(worker, action), worker))
                    self.began[worker] = now
                    break
            elif isinstance(action, Send):
                channel = self._channel(worker, action.to, action.what)
                full = len(channel.arrivals) - self.schedule.buffers
                if full >= len(channel.received):
                    channel.asleep = worker
                    break
                if full >= 0:
                    clock = max(clock, channel.received[full])
                seconds = 0.0 if self.message is None else self.message(action, worker)
                self.port[worker] = max(clock, self.port[worker]) + seconds
                channel.arrivals.append(self.port[worker] + self.latency)
                self._wake(channel, channel.arrivals[-1])
            else:
                channel = self._channel(action.source, worker, action.what)
                taken = len(channel.received)
                if taken == len(channel.arrivals):
                    channel.asleep = worker
                    break
                clock = max(clock, channel.arrivals[taken])
                channel.received.append(clock)
                self._wake(channel, clock)
            at += 1
        self.clock[worker], self.at[worker] = clock, at

    def _finish(self, host: _Host) -> None:
        """Ends the tile that is done next on a host with few slots; its worker goes on."""
        now = host.next_end()
        host.advance(now)
        _, worker = heapq.heappop(host.running)
        action = self.schedule.programs[worker][self.at[worker]]
        assert isinstance(action, Run)
        self._record(worker, action, self.began[worker], now)
        self.at[worker] += 1
        self._go_on(now, worker)

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
