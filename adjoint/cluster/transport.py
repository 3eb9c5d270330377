"""Messages between workers: tensors, never pickled.

A transport is what a worker's program sends and receives with (`adjoint.engine.run.Transport`). The messages
of a channel, a sender and a receiver, arrive in the order they were sent; at most `buffers` of them are under
way at a time, so that one can be filled while another travels.

Besides messages there are two collectives, `all_reduce` and `all_gather`. All of `ranks` must call them, in
the same order, with tensors of the same shape and dtype."""

from __future__ import annotations

import collections
import datetime
import functools
from collections.abc import Sequence
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
            channels: all that any worker of the replica will use, in one order for all.
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
    """Point-to-point messages and collectives of `torch.distributed`: gloo wherever an end is a CPU or a MIG
    slice, NCCL between whole GPUs. It makes this process's default process group.

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL runs the messages of
    a pair one after the other, so that a receive posted early would block the sends behind it: messages to
    higher ranks have one group, those to lower ranks another. Its communicators are made by the first message
    of a pair, for which both ends wait: hence `connect`, since receives are posted long before they are sent
    to.

    Args:
        meeting: where the processes meet: "file:///path" on one machine, which opens no port, or
            "tcp://host:port".
        rank: of this process. world: how many there are.
        backend: "gloo" or "nccl".
        timeout: seconds after which a message that does not come is an error.
        groups: lists of ranks between which there will be collectives; the same, in the same order, in all
            processes, whether they are in them or not, since all of them must take part in making a group.
    """

    def __init__(
        self,
        meeting: str,
        rank: int,
        world: int,
        backend: str,
        timeout: float,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        import torch.distributed as dist

        wait = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, timeout=wait)
        self.dist, self.nccl, self.rank, self.buffers = dist, backend == "nccl", rank, CAPACITY
        new_group = functools.partial(dist.new_group, timeout=wait)
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
        staged = out.is_cuda != self.nccl  # a GPU's over gloo; over NCCL an edge in host memory
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
        own = tensor.detach()
        host = self._staged(own)
        self.dist.all_reduce(host, group=self.among[tuple(ranks)])
        if host is not own:
            own.copy_(host)
        return tensor

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        if len(ranks) == 1:
            return [tensor.clone()]
        host = self._staged(tensor.detach())
        found = [torch.empty_like(host) for _ in ranks]
        self.dist.all_gather(found, host, group=self.among[tuple(ranks)])
        return [part.to(tensor.device) for part in found]

    def _staged(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can read it."""
        return tensor if tensor.is_cuda == self.nccl else self._room(tensor).copy_(tensor)


class ReplicaTransport:
    """The messages of one replica among several: its workers, whom programs number from 0, are those from
    `first` on."""

    def __init__(self, transport: Transport, first: int) -> None:
        self.transport, self.first, self.flush = transport, first, transport.flush

    def connect(self, channels: Sequence[Channel], buffers: int) -> None:
        """Connects the channels of a program whose senders have at most `buffers` messages under way."""
        self.transport.buffers = buffers
        self.transport.connect([(self.first + a, self.first + b) for a, b in channels])

    def post(self, source: int, out: Tensor) -> Pending:
        return self.transport.post(self.first + source, out)

    def send(self, to: int, tensor: Tensor) -> None:
        self.transport.send(self.first + to, tensor)
