"""Work stealing, carried out: a shard and its helpers share the units of a pool.

The owner computes in the thread that called it; a thread for each helper waits for its questions, hands it
units and takes its sums in. A helper asks for its next unit before it is through with the one it has, so that
inputs travel while it computes. Per unit and helper the messages are

    helper → owner   ask
    owner → helper   unit, then the layer's weights if they are new to it, then the inputs of each task
    helper → owner   gradients, which its thread takes in once it has sent the next unit's inputs

Sums of gradients are the same bit for bit whoever did what, given the same kind of device and number of
threads: every unit is summed from zero, from copies of its inputs that lie in memory as a message's do, and
units are added in their order. What that costs: one more copy of a task's inputs; and sums that come early
are held, each as large as its layer's gradients, until those before them are in. Since a layer's units are
taken in order from either end, they are fewer than there are workers, unless one is slower than the others.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from adjoint.cluster.pool import Bag, Pool, Unit
from adjoint.cluster.schedule import Action, Recv, Schedule, Send, runs_of
from adjoint.cluster.tasks import HelperWork, TaskWork
from adjoint.cluster.transport import Pending, Transport
from adjoint.engine.tile import Gradients

Traced = Callable[[Action], AbstractContextManager[None]]  # notes when an action begins and ends
NONE_LEFT = -1
NUMBERS = 1 << 16  # questions are numbered within what a message's tag can hold


class Desk:
    """Where the owner's threads meet: units go out, sums come in. Safe for threads.

    Args:
        pool: the units.
        threads: that hand units to helpers.
        add: adds a unit's sums, one for each parameter of its layer, to the shard's gradients.
    """

    def __init__(self, pool: Pool, threads: int, add: Callable[[int, Sequence[Tensor]], None]) -> None:
        self.bag, self.add = Bag(pool.units), add
        self.order: dict[int, collections.deque[Unit]] = collections.defaultdict(collections.deque)
        for unit in pool.units:
            self.order[unit.layer].append(unit)
        self.early: dict[Unit, Sequence[Tensor]] = {}
        self.left, self.threads = len(pool.units), threads
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def take(self) -> Unit | None:
        """The owner's next unit."""
        with self.changed:
            self._raise()
            return self.bag.take()

    def steal(self) -> Unit | None:
        """A helper's next unit."""
        with self.changed:
            self._raise()
            return self.bag.steal()

    def hand_in(self, unit: Unit, sums: Sequence[Tensor]) -> None:
        """Adds a unit's sums when it is their turn: after those of all units of the layer before it."""
        with self.changed:
            self.early[unit] = sums
            order = self.order[unit.layer]
            while order and order[0] in self.early:
                self.add(unit.layer, self.early.pop(order.popleft()))
            self.left -= 1
            self.changed.notify_all()

    def leave(self, error: BaseException | None = None) -> None:
        """A thread is done, or has failed."""
        with self.changed:
            self.threads -= 1
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self) -> None:
        """Until all units are in and all helpers know that there are no more; raises a thread's error."""
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or not (self.left or self.threads))
            self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


def own(pool: Pool, transport: Transport, work: TaskWork, traced: Traced) -> None:
    """Carries a pool out as its owner.

    Raises:
        Exception: what a helper's thread failed with. Threads that still wait for a message are left to
            themselves: to join them could take for ever, and the group is made anew after a failure.
    """
    desk = Desk(pool, len(pool.helpers), work.add_sums)

    def serve(helper: int) -> None:
        try:
            _serve(pool, helper, transport, work, desk)
        except BaseException as error:
            desk.leave(error)
        else:
            desk.leave()

    for helper in pool.helpers:
        threading.Thread(target=serve, args=(helper,), name=f"for helper {helper}", daemon=True).start()
    while (unit := desk.take()) is not None:
        gradients = Gradients()
        for run in runs_of(unit):
            with traced(run):
                work.unit_tile(run, gradients)
        desk.hand_in(unit, work.unit_sums(unit.layer, gradients))
    desk.wait()


def _serve(pool: Pool, helper: int, transport: Transport, work: TaskWork, desk: Desk) -> None:
    """Hands units to a helper until none is left, and takes their sums in."""
    weights: set[int] = set()  # layers whose weights it has
    before: Unit | None = None
    for asked in itertools.count():
        number = asked % NUMBERS
        transport.post(Recv(helper, "ask", number), note())()
        unit = desk.steal()
        index = NONE_LEFT if unit is None else pool.units.index(unit)
        transport.send(Send(helper, "unit", number), note(index))
        if unit is not None:
            if unit.layer not in weights:
                send = Send(helper, "weights", 0, unit.layer)
                transport.send(send, work.outgoing(send))
                weights.add(unit.layer)
            for run in runs_of(unit):
                send = Send(helper, "task", run.chunk, run.layer)
                transport.send(send, work.outgoing(send))
        if before is not None:
            recv = Recv(helper, "gradients", before.chunks[0], before.layer)
            desk.hand_in(before, work.sums_in(before.layer, transport.post(recv, work.room(recv))()))
        if unit is None:
            return
        before = unit


def steal(made: Schedule, owner: int, transport: Transport, work: HelperWork, traced: Traced) -> None:
    """Carries units of a pool out until its owner has no more."""
    pool, known, asked = made.pool(owner), set[int](), itertools.count()

    def ask() -> Pending:
        number = next(asked) % NUMBERS
        transport.send(Send(owner, "ask", number), note())
        return transport.post(Recv(owner, "unit", number), note())

    def expect(answer: Pending) -> tuple[Unit | None, _Inbox]:
        index = int(answer())
        unit = None if index == NONE_LEFT else pool.units[index]
        receives: list[Recv] = []
        if unit is not None:
            receives = [Recv(owner, "task", run.chunk, run.layer) for run in runs_of(unit)]
            if unit.layer not in known:
                receives.insert(0, Recv(owner, "weights", 0, unit.layer))
                known.add(unit.layer)
        return unit, _Inbox(receives, transport, work, made.buffers)

    unit, inbox = expect(ask())
    while unit is not None:
        runs = runs_of(unit)
        for left, run in zip(reversed(range(len(runs))), runs, strict=True):
            for recv, pending in inbox.for_a_task():
                with traced(recv):
                    work.incoming(recv, pending())
            if left == min(1, len(runs) - 1):  # a task before the answer is needed
                answer = ask()
            if not left:
                following, inbox = expect(answer)
            with traced(run):
                work.run(run)
        send = Send(owner, "gradients", unit.chunks[0], unit.layer)
        with traced(send):
            transport.send(send, work.outgoing(send))
        unit = following


class _Inbox:
    """The messages of a unit, of which the next few are under way."""

    def __init__(self, receives: Sequence[Recv], transport: Transport, work: HelperWork, ahead: int) -> None:
        self.later, self.transport, self.work = collections.deque(receives), transport, work
        self.posted: collections.deque[tuple[Recv, Pending]] = collections.deque()
        for _ in range(ahead):
            self._post()

    def _post(self) -> None:
        if self.later:
            recv = self.later.popleft()
            self.posted.append((recv, self.transport.post(recv, self.work.room(recv))))

    def for_a_task(self) -> Iterator[tuple[Recv, Pending]]:
        """The inputs of the next task, and before them its layer's weights if they come."""
        found = ""
        while found != "task":
            recv, pending = self.posted.popleft()
            yield recv, pending
            found = recv.what
            self._post()


def note(value: int = 0) -> Tensor:
    """A message of one number, or room for one; in host memory, whatever the device (`transport.QUESTIONS`)."""
    return torch.tensor([value], dtype=torch.int64, device="cpu")
