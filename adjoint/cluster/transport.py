"""Messages between workers: tensors, never pickled.

A transport is what a worker's program sends and receives with (`adjoint.engine.run.Transport`). The messages
of a channel, a sender and a receiver, arrive in the order they were sent; at most `buffers` of them are under
way at a time, so that one can be filled while another travels. Three of them:

    DistributedTransport   torch.distributed isend and irecv: gloo wherever an end is a CPU or a MIG slice,
                           NCCL between whole GPUs
    ObjectStoreTransport   arrays in Ray's object store; slower for small messages, but needs no process group
    LocalTransport         queues between the threads of one process

Besides messages there are two collectives, `all_reduce` and `all_gather`. All of `ranks` must call them, in
the same order, with tensors of the same shape and dtype."""

from __future__ import annotations

import collections
import datetime
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.engine import run
from adjoint.engine.program import CAPACITY
from adjoint.engine.run import Pending

Channel = tuple[int, int]  # sender, receiver


class Transport(run.Transport, Protocol):
    """Messages, and what else workers do together.

    Attributes:
        buffers: messages of a channel that a sender may have under way; `CAPACITY` at most.
    """

    buffers: int

    def connect(self, channels: Sequence[Channel]) -> None:
        """Connects channels before their first use, where that means to wait for the other end.

        Args:
            channels: all that any worker will use, in one order for all.
        """
        ...

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum over `ranks`, in place: the same bits on each of them and from run to run.

        Args:
            tensor: contiguous.
            ranks: of the workers that take part, this one among them, ascending.
        """
        ...

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """The tensors of all of `ranks`, in their order; copies that may be written to."""
        ...


class DistributedTransport:
    """Point-to-point messages and collectives of `torch.distributed`, whose default process group must be
    there.

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL runs the messages of
    a pair one after the other, so that a receive posted early would block the sends behind it: messages to
    higher ranks have one group, those to lower ranks another. Its communicators are made by the first message
    of a pair, for which both ends wait: hence `connect`, since receives are posted long before they are sent
    to.

    Args:
        groups: lists of ranks between which there will be collectives; the same, in the same order, in all
            processes, whether they are in them or not, since all of them must take part in making a group.
        timeout: after which a message that does not come is an error; None is PyTorch's own choice. The
            default group has its own.
    """

    def __init__(
        self,
        buffers: int = CAPACITY,
        groups: Sequence[Sequence[int]] = (),
        timeout: datetime.timedelta | None = None,
    ) -> None:
        import torch.distributed as dist

        self.dist, self.buffers = dist, buffers
        self.nccl, self.rank = dist.get_backend() == "nccl", dist.get_rank()
        new_group = functools.partial(dist.new_group, timeout=timeout)
        self.up, self.down = (new_group(backend="nccl") if self.nccl else None for _ in range(2))
        self.among = {tuple(ranks): new_group(list(ranks)) for ranks in groups if len(ranks) > 1}
        self.under_way: dict[int, collections.deque[tuple[Any, Tensor]]] = collections.defaultdict(
            collections.deque
        )
        self.connected: set[Channel] = set()

    def _group(self, sender: int, receiver: int) -> Any:
        return self.up if sender < receiver else self.down

    def connect(self, channels: Sequence[Channel]) -> None:
        if not self.nccl:
            return
        # All go through the channels in one order: the first that is not connected has both its ends waiting.
        for sender, receiver in channels:
            if self.rank in (sender, receiver) and (sender, receiver) not in self.connected:
                self.connected.add((sender, receiver))
                note, group = torch.zeros(1, device="cuda"), self._group(sender, receiver)
                if self.rank == sender:
                    self.dist.send(note, receiver, group)
                else:
                    self.dist.recv(note, sender, group)

    def post(self, source: int, out: Tensor) -> Pending:
        staged = out.is_cuda != self.nccl  # a GPU's over gloo; over NCCL an edge that lies in host memory
        room = self._room(out) if staged else out
        work = self.dist.irecv(room, source, self._group(source, self.rank))

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return out.copy_(room, non_blocking=True) if staged else out

        return wait

    def _room(self, like: Tensor) -> Tensor:
        """Room where the backend can write it."""
        where: dict[str, Any] = {"device": "cuda"} if self.nccl else {"pin_memory": True}
        return torch.empty(like.shape, dtype=like.dtype, **where)

    def send(self, to: int, tensor: Tensor) -> None:
        if tensor.is_cuda != self.nccl:
            tensor = self._room(tensor).copy_(tensor, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        under_way = self.under_way[to]
        # what has left is let go: a message may be a whole chunk
        while under_way and (len(under_way) >= self.buffers or under_way[0][0].is_completed()):
            under_way.popleft()[0].wait()
        work = self.dist.isend(tensor, to, self._group(self.rank, to))
        under_way.append((work, tensor))  # the tensor must live until it has left

    def flush(self) -> None:
        for under_way in self.under_way.values():
            while under_way:
                under_way.popleft()[0].wait()

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        if len(ranks) == 1:
            return tensor
        # Either backend reduces each element in one place and hands the result on: no two ranks can differ.
        host = self._staged(tensor)
        self.dist.all_reduce(host, group=self.among[tuple(ranks)])
        return tensor if host is tensor else tensor.copy_(host)

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        if len(ranks) == 1:
            return [tensor.clone()]
        host = self._staged(tensor)
        found = [torch.empty_like(host) for _ in ranks]
        self.dist.all_gather(found, host, group=self.among[tuple(ranks)])
        return [part.to(tensor.device) for part in found]

    def _staged(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can read it."""
        if not tensor.is_cuda or self.nccl:
            return tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach())


def join(
    address: str,
    rank: int,
    workers: int,
    backend: str,
    timeout: float,
    groups: Sequence[Sequence[int]] = (),
) -> DistributedTransport:
    """Makes this process one of `workers` that send each other messages.

    Args:
        address: where they meet: "file:///path" on one machine, which opens no port, or "tcp://host:port".
        backend: "gloo", or "nccl" between whole GPUs.
        timeout: seconds after which a message that does not come is an error.
        groups: as `DistributedTransport`'s.
    """
    import torch.distributed as dist

    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=workers, timeout=wait)
    return DistributedTransport(groups=groups, timeout=wait)


class Mailbox:
    """What has been delivered to an actor and not yet been taken. Deliveries that wait for room overtake each
    other, so that a message is taken by its number in its channel.

    Args:
        buffers: messages a channel holds; whoever delivers one more waits. A sender may have as many on their
            way: then there is always room for the next one in order.
    """

    def __init__(self, buffers: int = CAPACITY) -> None:
        self.buffers, self.changed = buffers, threading.Condition()
        self.held: dict[int, dict[int, Any]] = collections.defaultdict(dict)

    def put(self, source: int, number: int, message: Any) -> None:
        """Takes a message in; waits while its channel is full."""
        with self.changed:
            held = self.held[source]
            self.changed.wait_for(lambda: len(held) < self.buffers and number not in held)
            held[number] = message
            self.changed.notify_all()

    def take(self, source: int, number: int) -> Any:
        """Waits for a message.

        Raises:
            RuntimeError: the channel is full of others, so that it cannot come.
        """
        with self.changed:
            held = self.held[source]
            self.changed.wait_for(lambda: number in held or len(held) == self.buffers)
            if number not in held:
                raise RuntimeError(f"message {number} from {source}: other messages came first")
            message = held.pop(number)
            self.changed.notify_all()
            return message


class _Exchange:
    """Collectives made of messages: everyone sends to everyone, and sums in the order of the ranks. Nothing
    has to be connected."""

    rank: int
    post: Callable[[int, Tensor], Pending]
    send: Callable[[int, Tensor], None]
    flush: Callable[[], None]

    def connect(self, channels: Sequence[Channel]) -> None:
        pass

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        own = tensor.detach()
        total = torch.zeros_like(own)
        for part in self._exchange(own, ranks):
            total += part
        own.copy_(total)
        return tensor

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        return [part.clone() for part in self._exchange(tensor.detach(), ranks)]

    def _exchange(self, own: Tensor, ranks: Sequence[int]) -> Iterator[Tensor]:
        """The tensors of all, one after the other in the same room but for the own one."""
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self.send(rank, own)
        room = torch.empty_like(own) if others else own
        for rank in ranks:
            yield own if rank == self.rank else self.post(rank, room)()
        self.flush()


class ObjectStoreTransport(_Exchange):
    """Arrays in Ray's object store, whose references are delivered by calls from actor to actor.

    Bytes are copied into the store and out of it, never pickled; what lies there is read-only and shared, so
    nothing of it is handed out.

    Args:
        rank: whose messages these are.
        peers: handles of all workers' actors, with a method `deliver` in a concurrency group "mail".
        mailbox: what `deliver` fills here.
    """

    def __init__(self, rank: int, peers: Sequence[Any], mailbox: Mailbox) -> None:
        self.rank, self.peers, self.mailbox, self.buffers = rank, peers, mailbox, mailbox.buffers
        self.sent, self.posted = collections.Counter[int](), collections.Counter[int]()
        self.under_way: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)

    def post(self, source: int, out: Tensor) -> Pending:
        number = self.posted[source]
        self.posted[source] += 1

        def wait() -> Tensor:
            import numpy as np
            import ray

            array = ray.get(self.mailbox.take(source, number))
            if out.is_cuda:
                return out.copy_(
                    torch.from_numpy(array.copy()).view(out.dtype).view(out.shape), non_blocking=True
                )
            np.copyto(out.detach().view(-1).view(torch.uint8).numpy(), array)
            return out

        return wait

    def send(self, to: int, tensor: Tensor) -> None:
        import ray

        # as bytes: NumPy knows no bfloat16
        reference = ray.put(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        under_way = self.under_way[to]
        while len(under_way) >= self.buffers:
            ray.get(under_way.popleft())
        deliver = self.peers[to].deliver.options(concurrency_group="mail")
        # in a list, so that Ray hands over the reference and not the array
        under_way.append(deliver.remote(self.rank, self.sent[to], [reference]))
        self.sent[to] += 1

    def flush(self) -> None:
        import ray

        for under_way in self.under_way.values():
            ray.get(list(under_way))
            under_way.clear()


class LocalTransport(_Exchange):
    """Queues between threads, for workers in one process.

    Args:
        rank: whose messages these are.
        queues: shared by all: one bounded queue a channel, made by `local_transports`.
        broken: set when a thread has failed, so that the others do not wait for it for ever.
    """

    def __init__(
        self, rank: int, queues: Mapping[Channel, queue.Queue[Tensor]], broken: threading.Event
    ) -> None:
        self.rank, self.queues, self.broken = rank, queues, broken
        self.buffers = CAPACITY  # the queues' own size holds

    def _insist(self, attempt: Callable[[], Any]) -> Any:
        while not self.broken.is_set():
            try:
                return attempt()
            except (queue.Empty, queue.Full):
                continue
        raise RuntimeError("another worker has failed")

    def post(self, source: int, out: Tensor) -> Pending:
        channel = self.queues[source, self.rank]
        return lambda: out.copy_(self._insist(lambda: channel.get(timeout=0.5)))

    def send(self, to: int, tensor: Tensor) -> None:
        message, channel = tensor.detach().clone(), self.queues[self.rank, to]
        self._insist(lambda: channel.put(message, timeout=0.5))

    def flush(self) -> None:
        pass


def local_transports(workers: int, buffers: int = CAPACITY) -> list[LocalTransport]:
    """A transport for each of `workers` threads of this process."""
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    queues = {pair: queue.Queue[Tensor](buffers) for pair in pairs}
    broken = threading.Event()
    return [LocalTransport(rank, queues, broken) for rank in range(workers)]


class ReplicaTransport:
    """The messages of one replica among several: its workers, whom programs number from 0, are those from
    `first` on."""

    def __init__(self, transport: Transport, first: int) -> None:
        self.transport, self.first, self.flush = transport, first, transport.flush

    def post(self, source: int, out: Tensor) -> Pending:
        return self.transport.post(self.first + source, out)

    def send(self, to: int, tensor: Tensor) -> None:
        self.transport.send(self.first + to, tensor)
