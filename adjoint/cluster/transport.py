"""Messages between shards: tensors, never pickled.

A transport is what a shard's resident loop sends and receives with. Messages of a channel (sender, receiver,
what) arrive in the order they were sent; at most `buffers` of them are under way at a time, so that one can
be filled while another travels. Three of them:

    DistributedTransport   torch.distributed isend and irecv: gloo wherever an end is a CPU or a MIG slice,
                           NCCL between whole GPUs
    ObjectStoreTransport   arrays in Ray's object store; slower for small messages, but needs no process group
    LocalTransport         queues between the threads of one process
"""

from __future__ import annotations

import collections
import datetime
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.cluster.schedule import Recv, Send

WHATS = ("y", "dy", "d_head", "table_gradient", "weights", "task", "gradients", "table", "token")
Pending = Callable[[], Tensor]  # waits for a message and gives it


class Transport(Protocol):
    """What a shard sends and receives with."""

    def post(self, action: Recv, out: Tensor) -> Pending:
        """Gets ready to receive into `out`; posts of a channel must be in the order of its messages."""
        ...

    def send(self, action: Send, tensor: Tensor) -> None:
        """Starts sending; waits while the channel is full. The tensor must stay as it is until `flush`."""
        ...

    def flush(self) -> None:
        """Waits until everything sent has left."""
        ...


class DistributedTransport:
    """Point-to-point messages of `torch.distributed`, whose default process group must be there.

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL has no tags and runs
    the messages of a pair one after the other, so that each kind of message gets a group of its own: a
    receive posted early would else block the sends behind it.
    """

    def __init__(self, buffers: int = 2) -> None:
        import torch.distributed as dist

        self.dist, self.buffers = dist, buffers
        self.nccl = dist.get_backend() == "nccl"
        self.groups: dict[str, Any] = {what: dist.new_group() if self.nccl else None for what in WHATS}
        self.under_way: dict[tuple[int, str], collections.deque[tuple[Any, Tensor]]] = {}

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


def join(address: str, rank: int, workers: int, backend: str, timeout: float) -> DistributedTransport:
    """Makes this process one of `workers` that send each other messages.

    Args:
        address: where they meet: "file:///path" on one machine, which opens no port, or "tcp://host:port".
        backend: "gloo", or "nccl" between whole GPUs.
        timeout: seconds after which a message that does not come is an error.
    """
    import torch.distributed as dist

    wait = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=workers, timeout=wait)
    return DistributedTransport()


class Mailbox:
    """What has been delivered to an actor and not yet been taken: a bounded queue a channel.

    Args:
        buffers: messages a channel holds; whoever delivers one more waits.
    """

    def __init__(self, buffers: int = 2) -> None:
        self.buffers, self.lock = buffers, threading.Lock()
        self.queues: dict[tuple[int, str], queue.Queue[tuple[int, Any]]] = {}

    def channel(self, source: int, what: str) -> queue.Queue[tuple[int, Any]]:
        """The queue of a channel; made by whoever asks first."""
        with self.lock:
            return self.queues.setdefault((source, what), queue.Queue(self.buffers))


class ObjectStoreTransport:
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

            tag, reference = self.mailbox.channel(action.source, action.what).get()
            if tag != tag_of(action):
                raise RuntimeError(f"{action}: another message came first")
            array = ray.get(reference)
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


class LocalTransport:
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


def tag_of(action: Send | Recv) -> int:
    """A number that tells the messages between two workers apart; fits gloo's 32 bits."""
    layer = 0 if action.layer is None else action.layer + 1
    if action.chunk >= 1 << 17 or layer >= 1 << 10:
        raise ValueError(
            f"{action}: at most 131,072 chunks and 1,023 layers can be told apart; use larger chunks"
        )
    return (WHATS.index(action.what) << 27) + (layer << 17) + action.chunk
