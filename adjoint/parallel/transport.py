"""Transport between workers: messages, and sums over them. Tensors are never pickled.

The messages of a channel, a sender and a receiver, arrive in the order they were sent; at most `buffers` of
them are under way at a time, so that one can be filled while another travels."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from adjoint.engine.executor import Pending
from adjoint.engine.host_weights import HOST
from adjoint.engine.schedule import CAPACITY
from adjoint.engine.storage import allocate
from adjoint.errors import UserError
from adjoint.parallel.network import bind, named_store
from adjoint.parallel.split_tensors import local

Channel = tuple[int, int]  # sender, receiver
BUCKET = 1 << 20  # elements: small gradients travel together


class Message(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Wait until it has left."""
        ...

    def is_completed(self) -> bool: ...


class _SoonSent:
    """A message that a thread will send."""

    def __init__(self, future: Future[Message]) -> None:
        self.future = future

    def wait(self) -> object:
        return self.future.result().wait()

    def is_completed(self) -> bool:
        return self.future.done() and self.future.result().is_completed()


class Messages:
    """Point-to-point messages and collectives of `torch.distributed`.

    They use gloo if an end is a CPU or a MIG slice, and NCCL between whole GPUs.

    gloo carries CPU tensors: those of a GPU are staged through pinned host memory. NCCL runs the messages of
    a pair one after the other, so that a receive posted early would block the sends behind it: messages to
    higher ranks have one group, those to lower ranks another. Its communicators are made by the first message
    of a pair, for which both ends wait: hence `connect`, since receives are posted long before they are sent
    to.

    Besides messages there are two collectives. All of `ranks`, ascending, must call them, in the same order,
    with tensors of the same shape and dtype.

    Attributes:
        first, stride: the rank of the first worker, and from one worker to the next: programs number workers
            from 0.
        buffers: messages of a channel that may be under way.
        on_device: see `executor.Transport`.

    Args:
        rank: this process's rank among all.
        nccl: whether messages go by NCCL.
        up, down: the groups for messages to higher and to lower ranks.
        among: the groups for collectives, by their ranks.
        reduces_on_gpu: whether collectives go by NCCL; None: as messages.
        device: this process's, on which buffers of NCCL are.
    """

    def __init__(
        self,
        rank: int,
        nccl: bool,
        up: dist.ProcessGroup | None,
        down: dist.ProcessGroup | None,
        among: Mapping[tuple[int, ...], dist.ProcessGroup],
        reduces_on_gpu: bool | None = None,
        device: torch.device = HOST,
    ) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self.dist, self.nccl, self.rank, self.first, self.stride = dist, nccl, rank, 0, 1
        self.on_device, self.buffers = nccl, CAPACITY
        self.up, self.down, self.among = up, down, among
        self.reduces_on_gpu = nccl if reduces_on_gpu is None else reduces_on_gpu
        self.under_way: dict[int, collections.deque[tuple[Message, Tensor]]] = collections.defaultdict(
            collections.deque
        )
        self.sender: ThreadPoolExecutor | None = None
        self.connected: set[Channel] = set()

    def _rank_of(self, worker: int) -> int:
        """Return a worker's rank among all processes."""
        return self.first + worker * self.stride

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        return self.up if sender < receiver else self.down

    def connect(self, channels: Sequence[Channel], buffers: int) -> None:
        """Get ready for a program. All workers of the replica pass its channels in the same order."""
        self.buffers = buffers
        # The first channel that is not connected has both its ends waiting.
        for a, b in channels if self.nccl else ():
            sender, receiver = self._rank_of(a), self._rank_of(b)
            if self.rank in (sender, receiver) and (sender, receiver) not in self.connected:
                self.connected.add((sender, receiver))
                note, group = torch.zeros(1, device=self.device), self._group(sender, receiver)
                if self.rank == sender:
                    self.dist.send(note, receiver, group)
                else:
                    self.dist.recv(note, sender, group)

    def post(self, source: int, out: Tensor, tag: int = 0) -> Pending:
        """Start to receive into `out`; with gloo, messages of other tags may overtake this one."""
        source = self._rank_of(source)
        staged = out.is_cuda != self.nccl  # a GPU's over gloo; over NCCL an edge in host memory
        room = self._buffer_like(out, self.nccl) if staged else out
        work = self.dist.irecv(room, source, self._group(source, self.rank), tag)

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return out.copy_(room, non_blocking=True) if staged else out

        return wait

    def send(self, to: int, tensor: Tensor) -> None:
        """Start to send; wait while the channel is full. The tensor must not change until `flush`."""
        under_way = self.under_way[to]
        # sent messages are freed at once: one may be as large as a chunk
        while under_way and (len(under_way) >= self.buffers or under_way[0][0].is_completed()):
            under_way.popleft()[0].wait()
        under_way.append(self._started(to, tensor))

    def _started(self, to: int, tensor: Tensor, tag: int = 0) -> tuple[Message, Tensor]:
        """Start a message; return its handle, and the tensor that must live until it has left."""
        destination, group = self._rank_of(to), self._group(self.rank, self._rank_of(to))

        def start(message: Tensor) -> Message:
            work = self.dist.isend(message, destination, group, tag)
            assert work is not None, "this process is in the group"
            return work

        is_staged = tensor.is_cuda != self.nccl
        message = (
            self._buffer_like(tensor, self.nccl).copy_(tensor, non_blocking=True) if is_staged else tensor
        )
        if self.nccl or (self.sender is None and not tensor.is_cuda):
            return start(message), message
        # gloo reads host memory at once: a thread waits for the copy, while this one goes on to queue kernels
        copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            copied = torch.cuda.Event(blocking=True)
            copied.record(torch.cuda.current_stream(tensor.device))

        def start_when_copied() -> Message:
            if copied is not None:
                copied.synchronize()
            return start(message)

        # one thread, which all messages take from the first such one on: none overtakes another
        self.sender = self.sender or ThreadPoolExecutor(1, "adjoint-sender")
        return _SoonSent(self.sender.submit(start_when_copied)), message

    def start(self, to: int, tensor: Tensor, tag: int) -> Callable[[], None]:
        """Start to send a contiguous tensor, whatever else is under way.

        Returns:
            A function that waits until it has left, which must be called.
        """
        work, message = self._started(to, tensor, tag)

        def wait(_: Tensor = message) -> None:
            work.wait()

        return wait

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for under_way in self.under_way.values():
            while under_way:
                under_way.popleft()[0].wait()

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        """Sum a contiguous tensor over `ranks`, in place: the same bits on each rank and in every run."""
        if len(ranks) == 1:
            return tensor
        # Either backend reduces each element on one rank and distributes the result: no two ranks can differ.
        values = tensor.detach()
        host = self._staged(values)
        self.dist.all_reduce(host, group=self.among[tuple(ranks)])
        if host is not values:
            values.copy_(host)
        return tensor

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return copies of the tensors of all of `ranks`, in their order."""
        if len(ranks) == 1:
            return [tensor.clone()]
        host = self._staged(tensor.detach())
        copies = [torch.empty_like(host) for _ in ranks]
        self.dist.all_gather(copies, host, group=self.among[tuple(ranks)])
        return [copy.to(tensor.device) for copy in copies]

    def _staged(self, tensor: Tensor) -> Tensor:
        """Return the tensor in memory that the backend of collectives can read."""
        nccl = self.reduces_on_gpu
        return tensor if tensor.is_cuda == nccl else self._buffer_like(tensor, nccl).copy_(tensor)

    def _buffer_like(self, like: Tensor, nccl: bool) -> Tensor:
        """Return an empty tensor of this shape and dtype in memory that the backend can write."""
        return allocate(like.shape, like.dtype, self.device, host=not nccl)


class GroupTransport(Messages):
    """Messages and collectives among the processes of a group that a user has made; workers are numbered as
    the group's ranks. Messages go by gloo, also those of GPUs: they are states at chunk edges, small, and
    then nothing waits on a device. Collectives go by the group's own backend.

    Args:
        group: a process group that this process is in. device: of the tensors.

    Raises:
        UserError: the group's backend does not carry tensors of this device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        config = dist.get_backend_config(group)
        by_nccl, by_gloo = device.type == "cuda" and "cuda:nccl" in config, "gloo" in config
        if not (by_nccl or by_gloo):
            raise UserError(
                f"sequence_group: a group of backend {config} does not carry tensors of {device.type}; make "
                'it with backend "gloo", or "nccl" for GPUs'
            )
        self.group, self.ranks = group, tuple(range(dist.get_world_size(group)))
        messages = group if by_gloo else _gloo_group_of(group, device)
        super().__init__(dist.get_rank(), False, messages, messages, {self.ranks: group}, by_nccl, device)

    def _rank_of(self, worker: int) -> int:
        return self.dist.get_global_rank(self.group, worker)

    def post(self, source: int, out: Tensor, tag: int = 0) -> Pending:
        with self._naming_peer(f"rank {source} of the group"):
            wait = super().post(source, out, tag)

        def wait_naming_peer() -> Tensor:
            with self._naming_peer(f"rank {source} of the group"):
                return wait()

        return wait_naming_peer

    def send(self, to: int, tensor: Tensor) -> None:
        with self._naming_peer(f"rank {to} of the group"):
            super().send(to, tensor)

    def start(self, to: int, tensor: Tensor, tag: int) -> Callable[[], None]:
        with self._naming_peer(f"rank {to} of the group"):
            wait_until_sent = super().start(to, tensor, tag)

        def wait() -> None:
            with self._naming_peer(f"rank {to} of the group"):
                wait_until_sent()

        return wait

    def flush(self) -> None:
        with self._naming_peer("a rank of the group"):
            super().flush()

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Tensor:
        with self._naming_peer("a rank of the group"):
            return super().all_reduce(tensor, ranks)

    def all_gather(self, tensor: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        with self._naming_peer("a rank of the group"):
            return super().all_gather(tensor, ranks)

    @contextlib.contextmanager
    def _naming_peer(self, who: str) -> Iterator[None]:
        """Name the rank that did not answer in errors of torch.distributed, which do not."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise RuntimeError(
                f"sequence_group: {who} has ended, failed or did not come within the group's timeout: {why}"
            ) from None


class Alone(GroupTransport):
    """Messages of a process to itself, which is its whole group."""

    def __init__(self) -> None:
        Messages.__init__(self, 0, False, None, None, {})
        self.ranks = (0,)
        self.sent: dict[int, collections.deque[Tensor]] = collections.defaultdict(collections.deque)

    def post(self, source: int, out: Tensor, tag: int = 0) -> Pending:
        return lambda: out.copy_(self.sent[tag].popleft(), non_blocking=True)

    def start(self, to: int, tensor: Tensor, tag: int) -> Callable[[], None]:
        self.sent[tag].append(tensor)
        return lambda: None


_GLOO_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _gloo_group_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a gloo group of the same processes, which must all call this; it is made once."""
    if group not in _GLOO_GROUPS:
        timeout = group._get_backend(device).options._timeout
        ranks = dist.get_process_group_ranks(group)
        store = dist.distributed_c10d._get_default_store()
        bind(named_store(store, f"adjoint/{group.group_name}"), dist.get_rank(group), len(ranks))
        _GLOO_GROUPS[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return _GLOO_GROUPS[group]


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], transport: Messages, ranks: Sequence[int]) -> None:
    """Sum gradients over `ranks` in place, once per optimizer step.

    With chunks, a gradient is complete only when the backward has reached the first of them: there is nothing
    to overlap the sum with. A parameter that has a gradient on no rank stays without one, as in one process.

    Args:
        parameters: the same on every rank, in the same order.
    """
    totals = summed([p.grad for p in parameters], lambda i: torch.zeros_like(parameters[i]), transport, ranks)
    for parameter, gradient in zip(parameters, totals, strict=True):
        parameter.grad = gradient


@torch.no_grad()
def summed(
    terms: Sequence[Tensor | None],
    zeros: Callable[[int], Tensor],
    transport: Messages,
    ranks: Sequence[int],
) -> list[Tensor | None]:
    """Sum several tensors over `ranks`, in place; return None for those that no rank has.

    Of a tensor that is split over other ranks, this rank's part is summed, and it stays split.

    Args:
        terms: as many on every rank, in the same order; None for those that this rank does not have.
        zeros: makes zeros for term i, which this rank adds if it has none but another rank does.
    """
    has = torch.tensor([term is not None for term in terms], dtype=torch.int32)
    sums = list(terms)
    small: dict[torch.dtype, list[Tensor]] = collections.defaultdict(list)
    for i, count in enumerate(transport.all_reduce(has, ranks).tolist()):
        if not count:
            continue
        term = sums[i] = zeros(i) if terms[i] is None else terms[i]
        assert term is not None
        shard = local(term)
        if shard.numel() < BUCKET:
            small[shard.dtype].append(shard)
        elif shard is term:  # in place: a copy would be as large
            sums[i] = transport.all_reduce(term.contiguous(), ranks)
        else:
            shard.copy_(transport.all_reduce(shard.contiguous(), ranks))
    for tensors in small.values():
        ends = itertools.accumulate(term.numel() for term in tensors)
        for _, pairs in itertools.groupby(zip(ends, tensors, strict=True), lambda pair: pair[0] // BUCKET):
            bucket = [term for _, term in pairs]
            total = transport.all_reduce(torch.cat([term.reshape(-1) for term in bucket]), ranks)
            for term, piece in zip(bucket, total.split([t.numel() for t in bucket]), strict=True):
                term.copy_(piece.view_as(term))
    return sums
