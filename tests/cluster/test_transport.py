"""Messages in order and sums of the same bits on every rank, over threads and processes."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, LayerLocal, StackConfig, Truncated
from adjoint.cluster.transport import DistributedTransport
from adjoint.engine.program import Owners, Recv, Send
from adjoint.plan.schedule import grid_of, step_plan
from tests.cluster.threads import LocalTransport, in_threads, local_transports, split

WORKERS = 4
GROUPS = [[0, 2], [1, 3], [0, 1, 2, 3], [3]]


def drawn(rank: int, turn: int, size: int = 1000) -> torch.Tensor:
    """Numbers of very different sizes, so that the order of a sum can be seen in its last bits."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    exponents = torch.randint(-20, 20, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 2.0**exponents


def collectives(transport: Any, rank: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Sums and gathers among several groups, in place and one behind the other."""
    found = []
    for turn in range(5):
        for ranks in GROUPS:
            if rank not in ranks:
                continue
            tensor = drawn(rank, turn).view(10, 100)
            gathered = transport.all_gather(tensor, ranks)
            assert transport.all_reduce(tensor, ranks).data_ptr() == tensor.data_ptr()
            gathered[0] += 1  # its own memory, whatever the transport
            found.append((tensor, gathered))
    return found


def check(by_rank: list[list[tuple[torch.Tensor, list[torch.Tensor]]]]) -> None:
    at = [0] * WORKERS
    for turn in range(5):
        for ranks in GROUPS:
            whole = sum(drawn(rank, turn).double() for rank in ranks)
            sums = []
            for rank in ranks:
                total, gathered = by_rank[rank][at[rank]]
                at[rank] += 1
                sums.append(total)
                expected = [drawn(source, turn).view(10, 100) for source in ranks]
                expected[0] += 1
                assert all(torch.equal(a, b) for a, b in zip(gathered, expected, strict=True))
            assert all(torch.equal(total, sums[0]) for total in sums), "ranks disagree in the last bits"
            scale = sum(drawn(rank, turn).abs() for rank in ranks)
            assert ((sums[0].flatten() - whole).abs() <= 1e-6 * scale).all()


def between_threads(call: Callable[[LocalTransport, int], Any]) -> list[Any]:
    ends = local_transports(WORKERS)
    return in_threads([functools.partial(call, end, rank) for rank, end in enumerate(ends)], ends[0].broken)


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


def test_messages_and_collectives_between_threads() -> None:
    """Those of the tests themselves."""
    between_threads(messages)
    check(between_threads(collectives))


def test_a_replica_counts_its_workers_from_zero() -> None:
    """Of two replicas of two workers each: messages stay inside, sums go across."""

    def call(transport: LocalTransport, rank: int) -> tuple[float, float]:
        transport.first, other = rank - rank % 2, 1 - rank % 2
        transport.send(other, torch.tensor([float(rank)]))
        transport.flush()
        message = transport.post(other, torch.empty(1))()
        total = transport.all_reduce(torch.tensor([float(rank)]), [rank % 2, rank % 2 + 2])
        return message.item(), total.item()

    assert between_threads(call) == [(1, 2), (0, 4), (3, 2), (2, 4)]


def over_gloo(rank: int, meeting: str, folder: str) -> None:
    transport = DistributedTransport(f"file://{meeting}", rank, WORKERS, "gloo", 60.0, GROUPS)
    for group in transport.among.values():
        if isinstance(group, torch.distributed.ProcessGroup):  # this rank is in it
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 60, "PyTorch's own would be half an hour"
    messages(transport, rank)
    runs = [collectives(transport, rank) for _ in range(2)]
    torch.save(runs, Path(folder) / f"{rank}.pt")


def test_messages_and_collectives_between_processes(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting"), str(tmp_path)
    torch.multiprocessing.start_processes(over_gloo, meeting, WORKERS, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORKERS)]
    check([runs[0] for runs in found])
    for one, two in found:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


# ------------------------------------------------------------------------------------- connections made ahead


class Rendezvous:
    """What NCCL's first message of a pair is: both ends wait for each other."""

    def __init__(self, rank: int, barriers: dict[Any, threading.Barrier], lock: threading.Lock) -> None:
        self.rank, self.barriers, self.lock = rank, barriers, lock
        self.made: list[Any] = []

    def get_rank(self) -> int:
        return self.rank

    def _both(self, pair: tuple[int, int], group: str) -> None:
        with self.lock:
            barrier = self.barriers.setdefault((*pair, group), threading.Barrier(2))
        barrier.wait(timeout=5)
        self.made.append((*pair, group))

    def send(self, note: torch.Tensor, to: int, group: str) -> None:
        self._both((self.rank, to), group)

    def recv(self, note: torch.Tensor, source: int, group: str) -> None:
        self._both((source, self.rank), group)


WAYS = {
    "exact": (Exact(10), 3, 1, ()),
    "truncated": (Truncated(5, 10), 3, 1, ()),
    "layer-local": (LayerLocal(5, 10), 3, 1, (2, 0, 0)),
    "in turn": (Exact(10), 1, 4, ()),
    "both": (Truncated(5, 10), 2, 2, ()),
}


@pytest.mark.parametrize("name", WAYS)
def test_all_connections_come_about(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two replicas at once; twice, which connects nothing more. Upwards and downwards in groups apart."""
    method, shards, in_turn, helpers = WAYS[name]
    owners, config = Owners.of(split(6, shards), in_turn), StackConfig(vocab_size=17, d_model=12, n_layer=6)
    scheme = method.scheme(40, 10)
    made = step_plan(scheme, grid_of(config, scheme, 40, owners, helpers), owners, helpers)
    zeros, workers = torch.zeros, owners.workers
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    barriers: dict[Any, threading.Barrier] = {}
    lock, ends = threading.Lock(), []
    for rank in range(2 * workers):
        transport = DistributedTransport.__new__(DistributedTransport)
        transport.dist, transport.nccl, transport.rank = Rendezvous(rank, barriers, lock), True, rank
        transport.connected, transport.up, transport.down = set(), "up", "down"
        transport.first = rank - rank % workers
        ends.append(transport)

    def connect(transport: DistributedTransport) -> None:
        for _ in range(2):
            transport.connect(made.channels(), made.buffers)

    with ThreadPoolExecutor(len(ends)) as pool:
        for future in [pool.submit(connect, end) for end in ends]:
            future.result(timeout=20)
    for rank, end in enumerate(ends):
        first, program = rank - rank % workers, made.programs[rank % workers]
        sent = {(rank, first + a.to) for a in program if isinstance(a, Send)}
        received = {(first + a.source, rank) for a in program if isinstance(a, Recv)}
        assert {(*pair, "up" if pair[0] < pair[1] else "down") for pair in sent | received} == set(
            end.dist.made
        )
        assert len(end.dist.made) == len(sent | received)
