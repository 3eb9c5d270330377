"""Messages in order and sums of the same bits on every rank, between processes."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, LayerLocal, StackConfig, Truncated
from adjoint.cluster.process_group import DistributedTransport, meet
from adjoint.engine.schedule import Owners, Recv, Send
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.stack.sharded_stack import ShardedStack
from tests.cluster.threads import split

WORKERS = 4
GROUPS = [[0, 2], [1, 3], [0, 1, 2, 3], [3]]


def drawn(rank: int, turn: int, size: int = 1000) -> torch.Tensor:
    """Numbers of very different sizes, so that the order of a sum can be seen in its last bits."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    exponents = torch.randint(-20, 20, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 2.0**exponents


def messages(transport: Any, rank: int, count: int = 20) -> None:
    """Every rank to every other, more than a channel holds: those of a channel arrive in the order they were
    sent, in receives posted ahead."""

    def message(sender: int, receiver: int, i: int) -> torch.Tensor:
        return torch.full((1 + i % 3, 5), 100 * sender + 10 * receiver + i / 32, dtype=torch.bfloat16)

    others = [other for other in range(WORKERS) if other != rank]
    transport.connect(list(itertools.permutations(range(WORKERS), 2)), 2)
    posted = collections.deque[tuple[torch.Tensor, Callable[[], torch.Tensor]]]()
    for i in range(count):
        for other in others:
            expected = message(other, rank, i)
            posted.append((expected, transport.post(other, torch.zeros_like(expected))))
        for other in others:
            transport.send(other, message(rank, other, i))
        while len(posted) > (len(others) if i + 1 < count else 0):
            expected, wait = posted.popleft()
            assert torch.equal(wait(), expected)
    transport.flush()


def collectives(transport: Any, rank: int) -> list[torch.Tensor]:
    """Sums among several groups, in place and one behind the other; gathered is what is summed."""
    sums = []
    for turn, ranks in itertools.product(range(5), GROUPS):
        if rank in ranks:
            tensor = drawn(rank, turn).view(10, 100)
            gathered = transport.all_gather(tensor, ranks)
            for source, tensor_of_source in zip(ranks, gathered, strict=True):
                assert torch.equal(tensor_of_source.flatten(), drawn(source, turn))
            gathered[0] += 1  # its own memory
            assert transport.all_reduce(tensor, ranks).data_ptr() == tensor.data_ptr()
            sums.append(tensor)
    return sums


def over_gloo(rank: int, meeting: str, folder: str) -> None:
    transport = DistributedTransport(
        *meet(f"file://{meeting}", rank, WORKERS, 60.0), rank, "gloo", 60.0, GROUPS
    )
    for group in transport.among.values():
        if isinstance(group, torch.distributed.ProcessGroup):  # this rank is in it
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 60, "PyTorch's own would be half an hour"
    messages(transport, rank)
    transport.sender = ThreadPoolExecutor(1)  # as where messages come from a GPU
    messages(transport, rank)
    runs = [collectives(transport, rank) for _ in range(2)]
    transport.first, other = rank - rank % 2, 1 - rank % 2  # of two replicas of two workers each
    transport.send(other, torch.tensor([rank]))
    assert transport.post(other, torch.tensor([-1]))() == transport.first + other
    transport.flush()
    torch.save(runs, Path(folder) / f"{rank}.pt")


def test_messages_and_collectives_between_processes(tmp_path: Path) -> None:
    """Sums have the same bits on every rank and in every run."""
    meeting = str(tmp_path / "meeting"), str(tmp_path)
    torch.multiprocessing.start_processes(over_gloo, meeting, WORKERS, start_method="fork")
    runs_by_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORKERS)]
    at = [iter(zip(*runs, strict=True)) for runs in runs_by_rank]
    for turn, ranks in itertools.product(range(5), GROUPS):
        sums = [total for rank in ranks for total in next(at[rank])]
        assert all(torch.equal(total, sums[0]) for total in sums), "ranks or runs disagree in the last bits"
        summands = torch.stack([drawn(rank, turn).double() for rank in ranks])
        assert ((sums[0].flatten() - summands.sum(0)).abs() <= 1e-6 * summands.abs().sum(0)).all()


# ------------------------------------------------------------------------------------- connections made ahead


class Rendezvous:
    """A stand-in for NCCL's first message of a pair, for which both ends wait for each other."""

    def __init__(self, rank: int, barriers: dict[Any, threading.Barrier]) -> None:
        self.rank, self.barriers, self.made = rank, barriers, list[Any]()

    def _both(self, sender: int, receiver: int, group: str) -> None:
        pair = sender, receiver, group
        self.barriers.setdefault(pair, threading.Barrier(2)).wait(timeout=5)
        self.made.append(pair)

    def send(self, note: torch.Tensor, to: int, group: str) -> None:
        self._both(self.rank, to, group)

    def recv(self, note: torch.Tensor, source: int, group: str) -> None:
        self._both(source, self.rank, group)


WAYS = {
    "exact": (Exact(10), 3, 1, ()),
    "truncated": (Truncated(5, 10), 3, 1, ()),
    "layer-local": (LayerLocal(5, 10), 3, 1, (2, 0, 0)),
    "in turn": (Exact(10), 1, 4, ()),
    "both": (Truncated(5, 10), 2, 2, ()),
}


@pytest.mark.parametrize("name", WAYS)
def test_all_connections_come_about(name: str) -> None:
    """Two replicas connect at once, upwards and downwards in separate groups; a second time adds nothing."""
    method, shards, in_turn, helpers = WAYS[name]
    owners, config = (
        Owners.from_spans(split(6, shards), in_turn),
        StackConfig(vocab_size=17, d_model=12, n_layer=6),
    )
    spec = method.engine_spec(40, 10)
    schedule = step_plan(spec, grid_of(ShardedStack(config), spec, 40, owners, helpers), owners, helpers)
    workers = owners.workers
    barriers: dict[Any, threading.Barrier] = {}
    ends = []
    for rank in range(2 * workers):
        transport = DistributedTransport.__new__(DistributedTransport)
        transport.dist, transport.nccl, transport.rank = Rendezvous(rank, barriers), True, rank
        transport.device = torch.device("cpu")
        transport.connected, transport.up, transport.down = set(), "up", "down"
        transport.first, transport.stride = rank - rank % workers, 1
        ends.append(transport)

    def connect(transport: DistributedTransport) -> None:
        for _ in range(2):
            transport.connect(schedule.channels(), schedule.buffers)

    with ThreadPoolExecutor(len(ends)) as pool:
        for future in [pool.submit(connect, end) for end in ends]:
            future.result(timeout=20)
    for rank, end in enumerate(ends):
        first, program = rank - rank % workers, schedule.programs[rank % workers]
        sent = {(rank, first + a.to) for a in program if isinstance(a, Send)}
        received = {(first + a.source, rank) for a in program if isinstance(a, Recv)}
        assert {(*pair, "up" if pair[0] < pair[1] else "down") for pair in sent | received} == set(
            end.dist.made
        )
        assert len(end.dist.made) == len(sent | received)
