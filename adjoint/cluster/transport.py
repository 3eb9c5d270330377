"""The transport of processes that meet for this: they are the whole of their default process group."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence

from adjoint.parallel.transport import Messages


class DistributedTransport(Messages):
    """Makes this process's default process group, and goes by it.

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
        new_group, nccl = functools.partial(dist.new_group, timeout=wait), backend == "nccl"
        up, down = (new_group(backend="nccl") if nccl else None for _ in range(2))
        among = {tuple(ranks): new_group(list(ranks)) for ranks in groups if len(ranks) > 1}
        super().__init__(rank, nccl, up, down, among)
