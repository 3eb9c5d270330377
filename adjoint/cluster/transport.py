"""Messages between shards: tensors, never pickled.

A transport is what a shard's resident loop sends and receives with. Messages of a channel (sender, receiver,
what) arrive in the order they were sent; at most `buffers` of them are under way at a time, so that one can
be filled while another travels. Three of them:

    DistributedTransport   torch.distributed isend and irecv: gloo wherever an end is a CPU or a MIG slice,
                           NCCL between whole GPUs
    ObjectStoreTransport   arrays in Ray's object store; slower for small messages, but needs no process group
    LocalTransport         queues between the threads of one process

Besides messages there are two collectives, `all_reduce` and `all_gather`. All of `ranks` must call them, in
the same order, with tensors of the same shape and dtype.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.cluster.schedule import Channel, Recv, Send

WHATS = (
    "y",
    "dy",
    "d_head",
    "table_gradient",
    "ask",
    "unit",
    "weights",
    "task",
    "gradients",
    "table",
    "token",
    "share",
    "state",
    "d_state",
)
# Numbers that threads wait for, in host memory: a GPU's queue that waited for them would hold up its tiles.
QUESTIONS = ("ask", "unit")
Pending = Callable[[], Tensor]  # waits for a message and gives it


class Transport(Protocol):
    """What a shard sends and receives with. Several threads may use it, each its own channels; `flush` is for
    when only one is left."""

    def meet(self, channels: Sequence[Channel]) -> None:
        """Connects channels before their first use, where that means to wait for the other end.

        Args:
            channels: all that this worker will use, in `Schedule.channels`'s order.
        """
        ...

    def post(self, action: Recv, out: Tensor) -> Pending:
        """Gets ready to receive into `out`; posts of a channel must be in the order of its messages."""
        ...

    def send(self, action: Send, tensor: Tensor) -> None:
        """Starts sending; waits while the channel is full. The tensor must stay as it is until `flush`."""
        ...

    def flush(self) -> None:
        """Waits until everything sent has left."""
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

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL has no tags and runs
    the messages of a pair one after the other, so that each kind of message gets a group of its own: a
    receive posted early would else block the sends behind it. Its communicators are made by the first message
    of a pair, for which both ends wait: hence `meet`, since receives are posted long before they are sent to.

    Args:
        groups: lists of ranks between which there will be collectives; the same, in the same order, in all
            processes, whether they are in them or not, since all of them must take part in making a group.
        timeout: after which a message that does not come is an error; None is PyTorch's own choice. The
            default group has its own.
    """

    def __init__(
        self,
        buffers: int = 2,
        groups: Sequence[Sequence[int]] = (),
        timeout: datetime.timedelta | None = None,
    ) -> None:
        import torch.distributed as dist

        self.dist, self.buffers = dist, buffers
        self.nccl = dist.get_backend() == "nccl"
        new_group = functools.partial(dist.new_group, timeout=timeout)
        self.groups: dict[str, Any] = dict.fromkeys(WHATS)
        if self.nccl:
            self.groups = {what: new_group(backend="gloo" if what in QUESTIONS else "nccl") for what in WHATS}
        self.among = {tuple(ranks): new_group(list(ranks)) for ranks in groups if len(ranks) > 1}
        self.under_way: dict[tuple[int, str], collections.deque[tuple[Any, Tensor]]] = {}
        self.met: set[Channel] = set()

    def meet(self, channels: Sequence[Channel]) -> None:
        if not self.nccl:
            return
        rank = self.dist.get_rank()
        # All go through their channels in one order: the first that is not connected has both its ends waiting.
        for sender, receiver, what in channels:
            if what not in QUESTIONS and (sender, receiver, what) not in self.met:
                self.met.add((sender, receiver, what))
                note = torch.zeros(1, device="cuda")
                if rank == sender:
                    self.dist.send(note, receiver, self.groups[what])
                else:
                    self.dist.recv(note, sender, self.groups[what])

    def post(self, action: Recv, out: Tensor) -> Pending:
        staged = out.is_cuda and not self.nccl
        room = torch.empty(out.shape, dtype=out.dtype, pin_memory=True) if staged else out
        work = self.dist.irecv(room, action.source, self.groups[action.what], tag_of(action))

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return out.copy_(room, non_blocking=True) if staged else out

        return wait

    def send(self, action: Send, tensor: Tensor) -> None:
        if tensor.is_cuda and not self.nccl:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        under_way = self.under_way.setdefault((action.to, action.what), collections.deque())
        if len(under_way) == self.buffers:
            under_way.popleft()[0].wait()
        work = self.dist.isend(tensor, action.to, self.groups[action.what], tag_of(action))
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
    other, so that a message is taken by its tag.

    Args:
        buffers: messages a channel holds; whoever delivers one more waits. A sender may have as many on their
            way: then there is always room for the next one in order.
    """

    def __init__(self, buffers: int = 2) -> None:
        self.buffers, self.changed = buffers, threading.Condition()
        self.held: dict[tuple[int, str], dict[int, Any]] = collections.defaultdict(dict)

    def put(self, source: int, what: str, tag: int, message: Any) -> None:
        """Takes a message in; waits while its channel is full."""
        with self.changed:
            held = self.held[source, what]
            self.changed.wait_for(lambda: len(held) < self.buffers and tag not in held)
            held[tag] = message
            self.changed.notify_all()

    def take(self, source: int, what: str, tag: int) -> Any:
        """Waits for a message.

        Raises:
            RuntimeError: the channel is full of others, so that it cannot come.
        """
        with self.changed:
            held = self.held[source, what]
            self.changed.wait_for(lambda: tag in held or len(held) == self.buffers)
            if tag not in held:
                raise RuntimeError(f"{what} from {source}: other messages came first")
            message = held.pop(tag)
            self.changed.notify_all()
            return message


class _Exchange(Transport):
    """Collectives made of messages: everyone sends to everyone, and sums in the order of the ranks. Nothing has
    to be connected."""

    rank: int

    def meet(self, channels: Sequence[Channel]) -> None:
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
            self.send(Send(rank, "share", 0), own)
        room = torch.empty_like(own) if others else own
        for rank in ranks:
            yield own if rank == self.rank else self.post(Recv(rank, "share", 0), room)()
        self.flush()


class ObjectStoreTransport(_Exchange):
    """Arrays in Ray's object store, whose references are delivered by calls from actor to actor.

    Bytes are copied into the store and out of it, never pickled; what lies there is read-only and shared, so
    nothing of it is handed out.

    Args:
        rank: whose messages these are.
        peers: handles of all shards' actors, with a method `deliver` in a concurrency group "mail".
        mailbox: what `deliver` fills here.
    """

    def __init__(self, rank: int, peers: Sequence[Any], mailbox: Mailbox) -> None:
        self.rank, self.peers, self.mailbox = rank, peers, mailbox
        self.under_way: dict[tuple[int, str], collections.deque[Any]] = {}

    def post(self, action: Recv, out: Tensor) -> Pending:
        def wait() -> Tensor:
            import numpy as np
            import ray

            array = ray.get(self.mailbox.take(action.source, action.what, tag_of(action)))
            if out.is_cuda:
                return out.copy_(torch.from_numpy(array.copy()).view(out.dtype), non_blocking=True)
            np.copyto(out.detach().view(torch.uint8).numpy(), array)
            return out

        return wait

    def send(self, action: Send, tensor: Tensor) -> None:
        import ray

        # as bytes: NumPy knows no bfloat16
        reference = ray.put(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        under_way = self.under_way.setdefault((action.to, action.what), collections.deque())
        if len(under_way) == self.mailbox.buffers:
            ray.get(under_way.popleft())
        deliver = self.peers[action.to].deliver.options(concurrency_group="mail")
        # in a list, so that Ray hands over the reference and not the array
        under_way.append(deliver.remote(self.rank, action.what, tag_of(action), [reference]))

    def flush(self) -> None:
        import ray

        for under_way in self.under_way.values():
            ray.get(list(under_way))
            under_way.clear()


class LocalTransport(_Exchange):
    """Queues between threads, for shards in one process.

    Args:
        rank: whose messages these are.
        queues: shared by all: one bounded queue a channel, made by `local_transports`.
        broken: set when a thread has failed, so that the others do not wait for it for ever.
    """

    def __init__(self, rank: int, queues: Mapping[Any, queue.Queue[Any]], broken: threading.Event) -> None:
        self.rank, self.queues, self.broken = rank, queues, broken

    def _insist(self, attempt: Callable[[], Any]) -> Any:
        while not self.broken.is_set():
            try:
                return attempt()
            except (queue.Empty, queue.Full):
                continue
        raise RuntimeError("another shard has failed")

    def post(self, action: Recv, out: Tensor) -> Pending:
        channel = self.queues[action.source, self.rank, action.what]

        def wait() -> Tensor:
            tag, tensor = self._insist(lambda: channel.get(timeout=0.5))
            if tag != tag_of(action):
                raise RuntimeError(f"{action}: another message came first")
            return out.copy_(tensor)

        return wait

    def send(self, action: Send, tensor: Tensor) -> None:
        channel = self.queues[self.rank, action.to, action.what]
        message = tag_of(action), tensor.clone()
        self._insist(lambda: channel.put(message, timeout=0.5))

    def flush(self) -> None:
        pass


def local_transports(workers: int, buffers: int = 2) -> list[LocalTransport]:
    """A transport for each of `workers` threads of this process."""
    pairs = [(a, b, what) for a in range(workers) for b in range(workers) for what in WHATS if a != b]
    queues: dict[Any, queue.Queue[Any]] = {pair: queue.Queue(buffers) for pair in pairs}
    broken = threading.Event()
    return [LocalTransport(rank, queues, broken) for rank in range(workers)]


class PipelineTransport:
    """The transport of one pipeline among several: its workers, whom schedules number from 0, are those from
    `first` on. Collectives keep to the numbers of all workers."""

    def __init__(self, transport: Transport, first: int) -> None:
        self.transport, self.first = transport, first
        self.flush, self.all_reduce = transport.flush, transport.all_reduce
        self.all_gather = transport.all_gather

    def meet(self, channels: Sequence[Channel]) -> None:
        first = self.first
        self.transport.meet([(first + sender, first + receiver, what) for sender, receiver, what in channels])

    def post(self, action: Recv, out: Tensor) -> Pending:
        return self.transport.post(dataclasses.replace(action, source=self.first + action.source), out)

    def send(self, action: Send, tensor: Tensor) -> None:
        self.transport.send(dataclasses.replace(action, to=self.first + action.to), tensor)


def tag_of(action: Send | Recv) -> int:
    """A number that tells the messages between two workers apart; fits gloo's 32 bits."""
    layer = 0 if action.layer is None else action.layer + 1
    if action.chunk >= 1 << 17 or layer >= 1 << 10:
        raise ValueError(
            f"{action}: at most 131,072 chunks and 1,023 layers can be told apart; use larger chunks"
        )
    return (WHATS.index(action.what) << 27) + (layer << 17) + action.chunk
