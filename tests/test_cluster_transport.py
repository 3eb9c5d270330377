"""Collectives: the same sums on every rank, over threads, processes and Ray's object store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.cluster import sequence
from adjoint.cluster.schedule import Recv, Send, exact, layer_local, truncated
from adjoint.cluster.transport import (
    QUESTIONS,
    WHATS,
    DistributedTransport,
    LocalTransport,
    Mailbox,
    ObjectStoreTransport,
    PipelineTransport,
    Transport,
    join,
    local_transports,
)
from adjoint.windowed import tasks as windowed_tasks

WORKERS = 4
GROUPS = [[0, 2], [1, 3], [0, 1, 2, 3], [3]]


def drawn(rank: int, turn: int, size: int = 1000) -> torch.Tensor:
    """Numbers of very different sizes, so that the order of a sum can be seen in its last bits."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    exponents = torch.randint(-20, 20, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 2.0**exponents


def collectives(transport: Transport, rank: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
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


def in_threads(call: Callable[[int, LocalTransport], Any]) -> list[Any]:
    def guarded(rank: int, transport: LocalTransport) -> Any:
        try:
            return call(rank, transport)
        except BaseException:
            transport.broken.set()
            raise

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(guarded, range(WORKERS), local_transports(WORKERS)))


def test_collectives_between_threads() -> None:
    runs = [in_threads(lambda rank, transport: collectives(transport, rank)) for _ in range(3)]
    check(runs[0])
    for again in runs[1:]:
        for one, two in zip(runs[0], again, strict=True):
            assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


def test_a_pipeline_counts_its_workers_from_zero() -> None:
    """Of two pipelines of two workers each: messages stay inside, sums go across."""

    def call(rank: int, transport: LocalTransport) -> tuple[float, float]:
        own = PipelineTransport(transport, rank - rank % 2)
        worker, other = rank % 2, 1 - rank % 2
        own.send(Send(other, "y", 3), torch.tensor([float(rank)]))
        own.flush()
        message = own.post(Recv(other, "y", 3), torch.empty(1))()
        total = own.all_reduce(torch.tensor([float(rank)]), [worker, worker + 2])
        return message.item(), total.item()

    assert in_threads(call) == [(1, 2), (0, 4), (3, 2), (2, 4)]


def over_gloo(rank: int, meeting: str, folder: str) -> None:
    transport = join(f"file://{meeting}", rank, WORKERS, "gloo", 60.0, GROUPS)
    for group in transport.among.values():
        if isinstance(group, torch.distributed.ProcessGroup):  # this rank is in it
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 60, "PyTorch's own would be half an hour"
    runs = [collectives(transport, rank) for _ in range(2)]
    torch.save(runs, Path(folder) / f"{rank}.pt")


def test_collectives_between_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(over_gloo, (str(tmp_path / "meeting"), str(tmp_path)), WORKERS)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORKERS)]
    check([runs[0] for runs in found])
    for one, two in found:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


def test_a_mailbox_gives_messages_in_order_though_deliveries_overtake_each_other() -> None:
    """A sender with two messages under way, of which the second is delivered first."""
    mailbox, buffers, count = Mailbox(2), 2, 8
    delivered = [threading.Event() for _ in range(count)]

    def deliver(tag: int) -> None:
        mailbox.put(0, "y", tag, f"message {tag}")
        delivered[tag].set()

    def send() -> None:
        for first in range(0, count, buffers):  # the later of each pair first
            overtaken, quick = (
                threading.Thread(target=deliver, args=(tag,), daemon=True) for tag in (first, first + 1)
            )
            quick.start()
            assert delivered[first + 1].wait(60)
            overtaken.start()
            assert delivered[first].wait(60) and delivered[first + 1].wait(60)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for tag in range(count):
        assert mailbox.take(0, "y", tag) == f"message {tag}"
    sender.join(60)
    assert not sender.is_alive()
    assert not any(mailbox.held.values())


def test_a_mailbox_holds_no_more_than_it_may() -> None:
    mailbox = Mailbox(2)
    mailbox.put(0, "y", 5, "five")
    mailbox.put(0, "y", 6, "six")
    mailbox.put(1, "y", 7, "another channel's")
    third = threading.Thread(target=mailbox.put, args=(0, "y", 7, "seven"), daemon=True)
    third.start()
    with pytest.raises(RuntimeError, match="y from 0: other messages came first"):
        mailbox.take(0, "y", 4)
    third.join(0.2)
    assert third.is_alive() and 7 not in mailbox.held[0, "y"]
    assert mailbox.take(0, "y", 6) == "six"
    third.join(60)
    assert mailbox.take(0, "y", 7) == "seven"


class Actor:
    """A worker that has nothing but a mailbox."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    def deliver(self, source: int, what: str, tag: int, message: list[Any]) -> None:
        self.mailbox.put(source, what, tag, message[0])

    def call(self, rank: int, peers: list[Any]) -> Any:
        found = collectives(ObjectStoreTransport(rank, peers, self.mailbox), rank)
        return [(total.numpy(), [part.numpy() for part in gathered]) for total, gathered in found]


@pytest.mark.slow
def test_collectives_through_the_object_store(ray_on_loopback: None) -> None:
    import ray

    actors = [ray.remote(concurrency_groups={"mail": 4})(Actor).remote() for _ in range(WORKERS)]
    try:
        found = ray.get([actor.call.remote(rank, actors) for rank, actor in enumerate(actors)])
    finally:
        for actor in actors:
            ray.kill(actor)
    check([[(torch.tensor(t), [torch.tensor(p) for p in parts]) for t, parts in part] for part in found])


def test_a_failed_thread_ends_the_wait_of_the_others() -> None:
    transports = local_transports(2)
    timer = threading.Timer(0.2, transports[0].broken.set)
    timer.start()
    with pytest.raises(RuntimeError, match="another shard has failed"):
        transports[0].all_reduce(torch.ones(3), [0, 1])
    timer.join()


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


LAYERS = [range(0, 2), range(2, 4), range(4, 6)]
SCHEDULES = {
    "exact": exact(3, 4, tied=True),
    "truncated": truncated(LAYERS, windowed_tasks(6, 40, 8, 5, 4), tied=True),
    "layer-local": layer_local(LAYERS, 5, windowed_tasks(6, 40, 8, 5, 4), helpers=(2, 0, 0), tied=True),
    "sequence": sequence.schedule([3] * 4, [2, 2, 2, 1], 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_connections_come_about(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two pipelines at once; twice, which connects nothing anew."""
    made = SCHEDULES[name]
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    barriers: dict[Any, threading.Barrier] = {}
    lock, ends = threading.Lock(), []
    for rank in range(2 * made.workers):
        transport = DistributedTransport.__new__(DistributedTransport)
        transport.dist, transport.nccl, transport.met = Rendezvous(rank, barriers, lock), True, set()
        transport.groups = {what: what for what in WHATS}
        ends.append(transport)

    def meet(rank: int) -> None:
        worker = rank % made.workers
        pipeline = PipelineTransport(ends[rank], rank - worker)
        for _ in range(2):
            pipeline.meet(made.channels(worker))

    with ThreadPoolExecutor(len(ends)) as pool:
        for future in [pool.submit(meet, rank) for rank in range(len(ends))]:
            future.result(timeout=20)
    sent = {
        (worker, action.to, action.what)
        for worker, program in enumerate(made.programs)
        for action in program
        if isinstance(action, Send)
    }
    connected = {channel for end in ends[: made.workers] for channel in end.dist.made}
    assert sent <= connected
    assert not {what for _, _, what in connected} & set(QUESTIONS)
    for helper, owner in enumerate([2, 0, 0] if name == "layer-local" else []):
        assert {(owner, 3 + helper, "task"), (3 + helper, owner, "gradients")} <= connected
