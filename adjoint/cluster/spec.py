"""What a worker has to know to become what it is: plain values sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adjoint.engine.program import Owners
from adjoint.plan.schedule import owners_of
from adjoint.train.config import TrainingConfig


@dataclass(frozen=True)
class ShardSpec:
    """What a worker has to know, plain values only.

    Args:
        model: the whole stack; or a `Pretrained`.
        training: optimizer and seed.
        method: how the gradient is computed.
        spans: every shard's layers, bottom up.
        rank: which worker this is: those of replica 0 come first, of a replica the workers of its first
            shard, its helpers last.
        helpers: for each helper of a replica the shard whose layer-local tasks it shares.
        replicas: each with the same layers, each of which takes rows of every batch.
        sequence: workers of a shard, each with all of its layers, to whom the chunks are dealt out in turn.
        device: a torch device. precision: float32, bfloat16 (autocast) or float64.
        threads: CPU threads; None leaves PyTorch's choice.
    """

    model: Any
    training: TrainingConfig
    method: Any
    spans: tuple[range, ...]
    rank: int
    helpers: tuple[int, ...] = ()
    replicas: int = 1
    sequence: int = 1
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None

    @property
    def owners(self) -> Owners:
        """Who has which tile, in a replica."""
        return owners_of(self.model, self.spans, self.sequence)

    @property
    def workers(self) -> int:
        """Those of one replica, helpers among them."""
        return len(self.spans) * self.sequence + len(self.helpers)

    @property
    def world(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas

    @property
    def worker(self) -> int:
        """Which of its replica's workers this is, the number that programs know."""
        return self.rank % self.workers

    @property
    def shard(self) -> int:
        """Which shard's layers this worker has."""
        owned = len(self.spans) * self.sequence
        return self.helpers[self.worker - owned] if self.helps else self.worker // self.sequence

    @property
    def helps(self) -> bool:
        """Whether this is a helper: it shares a shard's tasks and owns nothing."""
        return self.worker >= len(self.spans) * self.sequence

    @property
    def replica(self) -> int:
        """Which replica this is of."""
        return self.rank // self.workers

    @property
    def groups(self) -> list[list[int]]:
        """Ranks that have something in common: for each shard those that have its layers; those that have a
        tied table; all but the helpers."""
        n, turns = len(self.spans), self.sequence
        replicas = [self.workers * r for r in range(self.replicas)]
        shards = [[r + s * turns + t for r in replicas for t in range(turns)] for s in range(n)]
        table = sorted({*shards[0], *shards[-1]})
        return [*shards, table, [r + w for r in replicas for w in range(n * turns)]]

    @property
    def peers(self) -> list[int]:
        """The ranks that have the same layers as this one."""
        return self.groups[self.shard]

    @property
    def table_peers(self) -> list[int]:
        """The ranks that have a tied table."""
        return self.groups[-2]

    @property
    def everyone(self) -> list[int]:
        """The ranks of all workers but the helpers."""
        return self.groups[-1]
