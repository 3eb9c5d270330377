"""Messages between workers, and sums over them: tensors, never pickled.

The messages of a channel, a sender and a receiver, arrive in the order they were sent; at most `buffers` of
them are under way at a time, so that one can be filled while another travels."""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.program import CAPACITY
from adjoint.engine.run import Pending

Channel = tuple[int, int]  # sender, receiver
BUCKET = 1 << 20  # elements: small gradients travel together


class DistributedTransport:
    """Point-to-point messages and collectives of `torch.distributed`: gloo wherever an end is a CPU or a MIG
    slice, NCCL between whole GPUs. It makes this process's default process group.

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL runs the messages of
    a pair one after the other, so that a receive posted early would block the sends behind it: messages to
    higher ranks have one group, those to lower ranks another. Its communicators are made by the first message
    of a pair, for which both ends wait: hence `connect`, since receives are posted long before they are sent
    to.

    Besides messages there are two collectives. All of `ranks`, ascending, must call them, in the same order,
    with tensors of the same shape and dtype.

    Attributes:
        first: the rank of the replica's first worker: programs number the workers of a replica from 0.
        buffers: messages of a channel that may be under way.
        on_device: see `Transport`.

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
        self.dist, self.nccl, self.rank, self.first = dist, backend == "nccl", rank, 0
        self.on_device = self.nccl
        self.buffers = CAPACITY
        new_group = functools.partial(dist.new_group, timeout=wait)
        self.up, self.down = (new_group(backend="nccl") if self.nccl else None for _ in range(2))
        self.among = {tuple(ranks): new_group(list(ranks)) for ranks in groups if len(ranks) > 1}
        self.under_way: dict[int, collections.deque[tuple[Any, Tensor]]] = collections.defaultdict(
            collections.deque
        )
        self.connected: set[Channel] = set()

    def _group(self, sender: int, receiver: int) -> Any:
        return self.up if sender < receiver else self.down

    def connect(self, channels: Sequence[Channel], buffers: int) -> None:
        """Gets ready for a program, whose channels are given in one order to all workers of the replica."""
        self.buffers = buffers
        # The first channel that is not connected has both its ends waiting.
        for a, b in channels if self.nccl else ():
            sender, receiver = self.first + a, self.first + b
            if self.rank in (sender, receiver) and (sender, receiver) not in self.connected:
                self.connected.add((sender, receiver))
                note, group = torch.zeros(1, device="cuda"), self._group(sender, receiver)
                if self.rank == sender:
                    self.dist.send(note, receiver, group)
                else:
                    self.dist.recv(note, sender, group)

    def post(self, source: int, out: Tensor) -> Pending:
        """Gets ready to receive into `out`."""
        source += self.first
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
        """Starts sending; waits while the channel is full. The tensor stays as it is until `flush`."""
        to += self.first
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
        """Waits until everything sent has left."""
        for under_way in self.under_way.values():
            while under_way:
                under_way.popleft()[0].wait()

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        """The sum over `ranks` of a contiguous tensor, in place: the same bits on each and in every run."""
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
        """Copies of the tensors of all of `ranks`, in their order."""
        if len(ranks) == 1:
            return [tensor.clone()]
        host = self._staged(tensor.detach())
        found = [torch.empty_like(host) for _ in ranks]
        self.dist.all_gather(found, host, group=self.among[tuple(ranks)])
        return [part.to(tensor.device) for part in found]

    def _staged(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can read it."""
        return tensor if tensor.is_cuda == self.nccl else self._room(tensor).copy_(tensor)


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[Tensor], transport: DistributedTransport, ranks: Sequence[int]
) -> None:
    """Sums gradients over `ranks` in place, once per optimizer step: with chunks, a gradient is complete only
    when the backward has come to the first of them, and there is nothing to overlap the sum with. A parameter
    that has a gradient on no rank is left without, as in one process.

    Args:
        parameters: the same on every rank, in the same order.
    """
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    small: dict[torch.dtype, list[Tensor]] = collections.defaultdict(list)
    for parameter, count in zip(parameters, transport.all_reduce(has, ranks).tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.numel() >= BUCKET:  # in place: a copy would be as large
            parameter.grad = transport.all_reduce(parameter.grad.contiguous(), ranks)
        else:
            small[parameter.grad.dtype].append(parameter.grad)
    for gradients in small.values():
        ends = itertools.accumulate(gradient.numel() for gradient in gradients)
        for _, pairs in itertools.groupby(zip(ends, gradients, strict=True), lambda pair: pair[0] // BUCKET):
            bucket = [gradient for _, gradient in pairs]
            total = transport.all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), ranks)
            for gradient, piece in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))
