"""Streams of a GPU emulated on the CPU: copies on a stream other than the computing one are made when
something waits for them, as late as a GPU may make them. What is read without a wait has other values."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


class LateStreams:
    """The streams of one emulated GPU, in the place of those of `torch.cuda`.

    Args:
        patch: undoes it at the end.
        before_copy: called with the source before a copy is made.

    Attributes:
        copies: number of copies on other streams than the computing one.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, before_copy: Callable[[Tensor], object] = lambda source: None
    ) -> None:
        self.local, self.copies = threading.local(), 0
        streams = self

        class Stream:
            """A stream: the copies that have been queued on it."""

            def __init__(self, device: object = None) -> None:
                self.queue: list[Callable[[], object]] = []
                self.running = threading.Lock()

            def record_event(self) -> Event:
                event = Event()
                event.record(self)
                return event

            def wait_event(self, event: Event) -> None:
                event.run()

            def wait_stream(self, other: Stream) -> None:
                self.wait_event(other.record_event())

        class Event:
            """A place in a stream's queue."""

            def __init__(self, blocking: bool = False) -> None:
                self.stream, self.place = Stream(), 0

            def record(self, stream: Stream) -> None:
                self.stream, self.place = stream, len(stream.queue)

            def run(self) -> None:
                """Make the copies that were queued before the event."""
                with self.stream.running:
                    for i in range(self.place):
                        self.stream.queue[i]()
                        self.stream.queue[i] = int

            synchronize = run

        copy = Tensor.copy_

        def copy_or_queue(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            stream = streams.current()
            if stream is streams.computing:
                return copy(target, source, non_blocking)

            def run() -> None:
                before_copy(source)
                with torch.no_grad():
                    copy(target, source)

            streams.copies += 1
            stream.queue.append(run)
            return target

        self.Stream, self.computing = Stream, Stream()
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", self.current)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(Tensor, "copy_", copy_or_queue)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)

    def current(self, device: object = None) -> Any:
        """Return the stream on which this thread queues."""
        return getattr(self.local, "stream", self.computing)

    @contextlib.contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Queue on a stream."""
        before, self.local.stream = self.current(), stream
        try:
            yield
        finally:
            self.local.stream = before
