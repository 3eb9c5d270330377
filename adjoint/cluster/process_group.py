"""The transport of processes that meet for this: they are the whole of their default process group."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from adjoint.engine.host_weights import HOST
from adjoint.parallel import network
from adjoint.parallel.network import Endpoint
from adjoint.parallel.transport import Messages

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


DECLINE_TIMEOUT = 30.0  # seconds that a process which cannot take part waits for the others, to tell them


def meet(
    meeting: str, rank: int, world: int, timeout: float, address: str | None = None
) -> tuple[Store, list[Endpoint]]:
    """Meet the other processes, and pick the interface for all process groups to come.

    Args:
        meeting: where: "file:///path" on one machine, which opens no port, "tcp://host:port", or "env://",
            as torchrun says in the environment.
        timeout: seconds within which all must come.
        address: of this host as the cluster knows it; see `network.bind`.

    Returns:
        The store of torch.distributed that they share, and the endpoints of all ranks.

    Raises:
        ConnectionError: some did not come in time, or do not reach one another.
        UserError: see `network.bind`.
    """
    shared = _store(meeting, rank, world, timeout)
    endpoints = network.bind(shared, rank, world, address)
    network.probe(shared, rank, endpoints)
    return shared, endpoints


def decline(meeting: str, rank: int, world: int, why: str) -> None:
    """Come to the meeting only to say why this process does not take part; the others then end with that."""
    with contextlib.suppress(ConnectionError):
        store = _store(meeting, rank, world, DECLINE_TIMEOUT)
        network.decline(store, rank, world, why)


def _store(meeting: str, rank: int, world: int, timeout: float) -> Store:
    """The store that all processes of a meeting share."""
    from torch.distributed.rendezvous import rendezvous

    wait = datetime.timedelta(seconds=timeout)
    try:
        store, *_ = next(iter(rendezvous(meeting, rank, world, timeout=wait)))
    except RuntimeError as error:  # DistError; the first line names the address
        raise ConnectionError(
            f"rank {rank} of {world} did not meet the others at {meeting} within {timeout:.0f} s "
            f"({str(error).splitlines()[0][:300]}); check the address and that the first rank runs there"
        ) from None
    store.set_timeout(wait)
    return network.named_store(store, "adjoint")


class DistributedTransport(Messages):
    """Makes this process's default process group, and goes by it.

    Args:
        store: what `meet` gave. endpoints: of all ranks, from the same.
        rank: of this process.
        backend: "gloo" or "nccl".
        timeout: seconds after which a message that does not come is an error.
        groups: lists of ranks between which there will be collectives; the same, in the same order, in all
            processes, whether they are in them or not, since all of them must take part in making a group.
        device: this process's.

    Raises:
        ConnectionError: the processes do not reach one another; names the address of each.
    """

    def __init__(
        self,
        store: Store,
        endpoints: Sequence[Endpoint],
        rank: int,
        backend: str,
        timeout: float,
        groups: Sequence[Sequence[int]] = (),
        device: torch.device = HOST,
    ) -> None:
        import torch.distributed as dist

        wait, world = datetime.timedelta(seconds=timeout), len(endpoints)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
            new_group, nccl = functools.partial(dist.new_group, timeout=wait), backend == "nccl"
            up, down = (new_group(backend="nccl") if nccl else None for _ in range(2))
            among = {tuple(ranks): new_group(list(ranks)) for ranks in groups if len(ranks) > 1}
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {rank} does not reach all others over {backend} ({str(error).splitlines()[0][:200]}); "
                f"every port must be open between them, or {network.GLOO} name another interface: "
                + network.table(endpoints)
            ) from None
        super().__init__(rank, nccl, up, down, among, device=device)
