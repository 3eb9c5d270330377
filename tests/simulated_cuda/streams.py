"""Streams and events of the simulated GPU: what may run at the same time, by vector clocks.

The host is one agent and each stream another. An agent's clock says up to which operation of each agent its
own next one comes after. Two operations that use the same memory, one of which writes it, must be ordered;
and memory may be freed only in the order of the stream that it belongs to, or with `record_stream`."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

Clock = collections.Counter  # operations of each agent, by the agent's name
HOST = "host"


class Memory:
    """Uses of one storage: the last write, and the reads since, each an agent with its operation's number."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.write: tuple[str, int] | None = None
        self.reads: dict[str, int] = {}
        self.others: dict[str, int] = {}  # last uses by other streams
        self.recorded: set[str] = set()  # of these streams the allocator knows


class Streams:
    """The agents of a simulated GPU.

    Args:
        describe_place: says where in the code something happens.
        is_noted: whether a wait of the host in this thread counts.

    Attributes:
        races: what is not ordered.
        waits, event_waits: the host's waits for streams and events, by place.
    """

    def __init__(self, describe_place: Callable[[], str], is_noted: Callable[[], bool]) -> None:
        self.describe_place, self.is_noted, self.races = describe_place, is_noted, list[str]()
        self.waits, self.event_waits = collections.Counter[str](), collections.Counter[str]()
        self.clocks: dict[str, Clock[str]] = collections.defaultdict(collections.Counter)
        self.memory: dict[int, Memory] = {}
        self.lock, self.local, self.count = threading.RLock(), threading.local(), 0
        streams = self

        class Stream:
            """A stream; copies of kernels that are queued on it run in order."""

            def __init__(self, device: Any = None) -> None:
                streams.count += 1
                self.device, self.name = device, f"stream {streams.count}"

            def synchronize(self) -> None:
                streams.waits[f"synchronize: {streams.describe_place()}"] += 1
                streams.join(HOST, streams.clock_of(self.name))

            def wait_stream(self, other: Stream) -> None:
                streams.join(self.name, streams.clock_of(other.name))

            def wait_event(self, event: Event) -> None:
                streams.join(self.name, event.clock)

            def record_event(self) -> Event:
                event = Event()
                event.record(self)
                return event

        class Event:
            """A place on a stream."""

            def __init__(self, **_: Any) -> None:
                self.clock: Clock[str] = collections.Counter()

            def record(self, stream: Stream | None = None) -> None:
                self.clock = streams.clock_of((stream or streams.current()).name)

            def synchronize(self) -> None:
                if streams.is_noted():
                    streams.event_waits[streams.describe_place()] += 1
                streams.join(HOST, self.clock)

        self.Stream, self.Event, self.default = Stream, Event, Stream()

    def current(self, device: Any = None) -> Any:
        """The stream that this thread queues on."""
        return getattr(self.local, "stream", self.default)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on a stream."""
        before, self.local.stream = self.current(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def clock_of(self, agent: str) -> Clock[str]:
        """Return the clock of what is queued on a stream, the host's operations before it included."""
        with self.lock:
            return self.clocks[agent] | self.clocks[HOST]

    def join(self, agent: str, clock: Clock[str]) -> None:
        """Have what an agent does next come after all that a clock knows."""
        with self.lock:
            self.clocks[agent] |= clock

    def operation(self, reads: Any, writes: Any, on_device: bool, waits: bool = False) -> None:
        """Note an operation of the current stream, or of the host; after one that waits the host goes on."""
        with self.lock:
            agent = self.current().name if on_device else HOST
            clock = self.clocks[agent] = self.clock_of(agent)
            clock[agent] += 1
            for tensor in reads:
                self._use(tensor, agent, clock, writes=False)
            for tensor in writes:
                self._use(tensor, agent, clock, writes=True)
            if waits:
                self.join(HOST, clock)

    def allocated(self, tensor: Any) -> Memory:
        """The uses of a tensor's memory, which belongs to the stream on which it is first seen."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(self.current().name if tensor.is_cuda else HOST)
            weakref.finalize(storage, self._freed, key)
        return self.memory[key]

    def recorded(self, tensor: Any, stream: Any) -> None:
        """`Tensor.record_stream`."""
        with self.lock:
            self.allocated(tensor).recorded.add(stream.name)

    def _use(self, tensor: Any, agent: str, clock: Clock[str], writes: bool) -> None:
        memory = self.allocated(tensor)
        before = list(memory.reads.items()) if writes else []
        for other, number in before + ([memory.write] if memory.write else []):
            if clock[other] < number:
                kind = "writes" if writes else "reads"
                self.races.append(f"{agent} {kind} what {other} still uses: {self.describe_place()}")
        if writes:
            memory.write, memory.reads = (agent, clock[agent]), {}
        else:
            memory.reads[agent] = clock[agent]
        if agent != memory.owner and tensor.is_cuda:
            memory.others[agent] = clock[agent]

    def _freed(self, key: int) -> None:
        with self.lock:
            memory = self.memory.pop(key, None)
            if memory is None:
                return
            clock = self.clock_of(memory.owner)
            for other, number in memory.others.items():
                if clock[other] < number and other not in memory.recorded:
                    self.races.append(f"memory of {memory.owner} is freed while {other} uses it")
