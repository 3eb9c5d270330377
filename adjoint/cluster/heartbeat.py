"""Processes without a driver that hear of one another: each sends a beat per second to each.

torch.distributed waits for a lost host in silence, for as long as the longest message may take. Here a thread
of each process notes when it last heard of each other one. After `NOTICE` seconds it says so; after
``cluster.hang_timeout`` it ends the process, whose main thread waits inside of a collective and cannot. A
process that computes or compiles for an hour is alive: its thread beats. One that fails says why, so that
all name the same cause.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import selectors
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from adjoint.cluster.recovery import is_collateral
from adjoint.errors import UserError
from adjoint.parallel.network import Endpoint, exchange, table

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


BEAT = 1.0  # seconds between beats
NOTICE = 30.0  # seconds of silence before a line says so
GRACE = 5.0  # seconds that the main thread gets to end by itself, once another process is lost
SEARCH = 20.0  # seconds to find out which process is lost, once a connection has broken
CONNECT_TIMEOUT = 30.0
CONFIRMATION_TIMEOUT = 10.0  # seconds; a process on a busy machine may need some
LARGEST_MESSAGE = 1 << 16  # bytes


@dataclass
class Peer:
    """State of another process, as this one knows it.

    Attributes:
        heard: when it was last heard of, by `time.monotonic`. doing: what it said it was at.
        is_done: whether it has said that it is through, and is not waited for any more.
        is_reported: whether a line has told of its silence.
        has_seen: whether it has confirmed this process's last message, or cannot any more.
        received: the start of a message. unsent: what the connection did not take yet.
    """

    endpoint: Endpoint
    socket: socket.socket
    heard: float
    doing: str = ""
    is_done: bool = False
    is_reported: bool = False
    has_seen: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    def __str__(self) -> str:
        end = self.endpoint
        return f"rank {end.rank} on {end.host} ({end.address})"

    @property
    def last(self) -> str:
        """Name what it was at when it was last heard of."""
        return f"rank {self.endpoint.rank} was last at: {self.doing or 'set-up'}"


class Heartbeat:
    """Watches the other processes of a run for as long as it is entered; all of them enter it.

    Leaving it by an error tells the others, which then end with the same line. An error that only says that a
    connection broke is replaced by what broke it.

    Attributes:
        doing: what this process is at, in words: set by whoever does it.
        name: what lines begin with, such as the run's folder; may be set later.
        resume: the command that goes on with the run; "" while that is not known.
        temporary: folders to remove where the thread ends the process.
        writing: held by the main thread while it writes what should be complete: the thread waits for it.

    Args:
        store: what the processes share. endpoints: of all. rank: of this one.
        hang_timeout: seconds of silence after which the run ends.
    """

    def __init__(self, store: Store, endpoints: Sequence[Endpoint], rank: int, hang_timeout: float) -> None:
        self.own, self.hang_timeout = endpoints[rank], hang_timeout
        self.doing, self.name, self.resume = "set-up", "", ""
        self.temporary: list[Path] = []
        self.writing = threading.Lock()
        self.failure: str | None = None  # why the run cannot go on, once that is known
        self._leaving = False  # whether the main thread is on its way out
        self._deadline = math.inf  # when the thread ends the process, once the run has failed
        self._failed, self._closed, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._selector = selectors.DefaultSelector()
        self.peers = self._connect(store, endpoints)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    # ------------------------------------------------------------------------------------ the main thread's

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        try:
            if error is None:
                self._tell({"done": True})
                return
            lost = isinstance(error, Exception) and is_collateral(error)
            if lost and self._failed.wait(SEARCH):
                assert self.failure is not None
                raise UserError(self._last_line(self.failure)) from None
            line = " ".join(str(error).split())[:1000] or type(error).__name__
            if isinstance(error, UserError | OSError):
                self._tell({"failed": f"rank {self.own.rank} on {self.own.host}: {line}"})
            else:
                named = f"{type(error).__name__}: {line}"
                self._tell({"failed": f"rank {self.own.rank} on {self.own.host} failed: {named}"})
            if lost and isinstance(error, RuntimeError):
                raise ConnectionError(self._last_line(f"{line}; {self._whereabouts()}")) from error
        finally:
            self._await_confirmation()
            self._closed.set()
            self._thread.join()
            self._selector.close()
            for peer in self.peers:
                peer.socket.close()

    def _await_confirmation(self) -> None:
        """Waits until those that are heard have the last message: closing a connection drops what is under
        way, where something has come that was not read yet."""
        began = time.monotonic()
        heard = [peer for peer in self.peers if began - peer.heard < CONFIRMATION_TIMEOUT]
        while not all(peer.has_seen for peer in heard) and time.monotonic() - began < CONFIRMATION_TIMEOUT:
            time.sleep(0.01)

    def _whereabouts(self) -> str:
        """Name what every process is at."""
        others = (f"{peer}: {peer.doing}" for peer in self.peers if not peer.is_done)
        return "; ".join([f"rank {self.own.rank} on {self.own.host}: {self.doing}", *others])

    # ---------------------------------------------------------------------------------------- the thread's

    def _watch(self) -> None:
        began = time.monotonic()
        for peer in self.peers:
            peer.heard = began
        beat = began
        while not self._closed.is_set():
            if (time_now := time.monotonic()) >= beat:
                self._tell({"doing": self.doing})
                beat = time_now + BEAT
            for key, _ in self._selector.select(max(0.0, beat - time_now)):
                self._receive(key.data)
            if self.failure is not None:
                if time.monotonic() > self._deadline and not self._leaving:
                    self._end()
                continue
            late = time.monotonic() - beat
            if late > BEAT:  # this process was stopped, and has not listened
                for peer in self.peers:
                    peer.heard = min(time.monotonic(), peer.heard + late)
            self._judge()

    def _judge(self) -> None:
        """Tells of those that are silent, and fails where one is for too long."""
        time_now = time.monotonic()
        waits = f"rank {self.own.rank} on {self.own.host} is at: {self.doing}"
        for peer in self.peers:
            silence = time_now - peer.heard
            if peer.is_done:
                continue
            if silence > self.hang_timeout:
                since = f"silent for {silence:.0f} s (cluster.hang_timeout is {self.hang_timeout:g})"
                self._fail(f"{peer} is {since}; {waits}; {peer.last}")
                return
            if silence > min(NOTICE, self.hang_timeout / 2) and not peer.is_reported:
                peer.is_reported = True
                left = f"the run ends after {self.hang_timeout:g} s of silence (cluster.hang_timeout)"
                self._say(f"{peer} is silent for {silence:.0f} s; {waits}; {left}")

    def _receive(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(LARGEST_MESSAGE)
        except BlockingIOError:
            return
        except OSError as error:  # of the network, where it is not the process: that is silence
            self._close(peer, is_lost=error.errno in (errno.ECONNRESET, errno.EPIPE))
            return
        if not data:
            self._close(peer, is_lost=True)
            return
        if peer.is_reported:
            self._say(f"{peer} is heard again after {time.monotonic() - peer.heard:.0f} s")
        peer.heard, peer.is_reported = time.monotonic(), False
        peer.received += data
        *lines, rest = bytes(peer.received).split(b"\n")
        peer.received = bytearray(rest)
        for line in lines:
            said = json.loads(line)
            peer.doing = said.get("doing", peer.doing)
            peer.has_seen = peer.has_seen or "seen" in said
            if "done" in said or "failed" in said:
                peer.is_done = True
                self._send(peer, {"seen": True})
            if "failed" in said:
                self._fail(said["failed"])

    def _close(self, peer: Peer, is_lost: bool) -> None:
        """Listens no more to a process; one that is through has said so before its connection closed."""
        self._selector.unregister(peer.socket)
        peer.has_seen = True
        if is_lost and not peer.is_done:
            peer.is_done = True
            self._fail(f"{peer} has ended without a word, killed or crashed; {peer.last}")

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure, self._deadline = why, time.monotonic() + GRACE
            self._tell({"failed": why})
            self._failed.set()

    def _end(self) -> None:
        """Ends the process in the main thread's place."""
        assert self.failure is not None
        with self.writing:
            self._say(f"error: {self._last_line(self.failure)}")
            for folder in self.temporary:
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(2)

    def _last_line(self, why: str) -> str:
        again = f"; continue with: {self.resume}" if self.resume else ""
        return f"{f'{self.name}: ' if self.name else ''}{why}{again}"

    def _say(self, line: str) -> None:
        # not sys.stderr, whose lock the main thread may hold
        with contextlib.suppress(OSError):
            sys.stderr.flush()
            os.write(2, f"{line}\n".encode())

    # ------------------------------------------------------------------------------------------ connections

    def _tell(self, message: dict[str, object]) -> None:
        """Sends to all."""
        for peer in self.peers:
            self._send(peer, message)

    def _send(self, peer: Peer, message: dict[str, object]) -> None:
        """Sends to one. Where a cut connection has not taken the last message, beats are left out."""
        with self._lock, contextlib.suppress(OSError):
            if not (peer.unsent and "doing" in message):
                peer.unsent += json.dumps(message).encode() + b"\n"
            del peer.unsent[: peer.socket.send(peer.unsent)]

    def _connect(self, store: Store, endpoints: Sequence[Endpoint]) -> list[Peer]:
        """Connect to each other process.

        Raises:
            ConnectionError: one of them cannot be reached; names the address of each.
        """
        try:
            connections = self._connections(store, endpoints)
        except OSError as error:
            raise ConnectionError(
                f"rank {self.own.rank} on {self.own.host} does not connect to all others ({error}): "
                + table(endpoints)
            ) from None
        peers = []
        for rank, line in sorted(connections.items()):
            line.setblocking(False)
            peer = Peer(endpoints[rank], line, time.monotonic())
            self._selector.register(line, selectors.EVENT_READ, peer)
            peers.append(peer)
        return peers

    def _connections(self, store: Store, endpoints: Sequence[Endpoint]) -> dict[int, socket.socket]:
        """A connection to each other process, by its rank; that of the higher rank calls."""
        local, world = self.own, len(endpoints)
        family = socket.AF_INET6 if ":" in local.address else socket.AF_INET
        connections: dict[int, socket.socket] = {}
        with socket.socket(family) as listener:
            with contextlib.suppress(OSError):
                listener.bind((local.address, 0))
            listener.listen(world)
            listener.settimeout(CONNECT_TIMEOUT)
            listening = listener.getsockname()[1], uuid.uuid4().hex
            listeners = exchange(store, "heartbeat", local.rank, world, listening)
            for other in endpoints[: local.rank]:
                port, word = listeners[other.rank]
                line = socket.create_connection((other.address, port), CONNECT_TIMEOUT)
                line.sendall(json.dumps([local.rank, word]).encode() + b"\n")
                connections[other.rank] = line
            while len(connections) < world - 1:
                line, _ = listener.accept()
                line.settimeout(CONNECT_TIMEOUT)
                with contextlib.suppress(OSError, ValueError), line.makefile("rb") as file:
                    rank, word = json.loads(file.readline(200))
                    if word == listening[1] and rank not in connections:
                        connections[rank] = line
                        continue
                line.close()  # a stranger
        return connections
