"""What a worker has to know to become what it is: plain values, sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adjoint.train.config import TrainingConfig
from adjoint.layers import StackConfig


@dataclass(frozen=True)
class ShardSpec:
    """What a shard has to know, plain values only.

    Args:
        model: the whole stack.
        training: optimizer and seed.
        method: Exact, Truncated or LayerLocal.
        spans: every shard's layers, bottom up.
        rank: which worker this is: the shards of replica 0 come first, then its helpers, then replica 1.
        helpers: for each helper of a replica the shard whose layer-local tasks it shares.
        replicas: pipelines with the same layers, each of which takes rows of every batch.
        sequence: workers that share a replica's one shard, each with all layers and a stretch of the tokens;
            there are no helpers then. exchange: how they carry states, see `adjoint.cluster.sequence`.
        device: a torch device. precision: float32, bfloat16 (autocast) or float64.
        threads: CPU threads; None leaves PyTorch's choice.
    """

    model: StackConfig
    training: TrainingConfig
    method: Any
    spans: tuple[range, ...]
    rank: int
    helpers: tuple[int, ...] = ()
    replicas: int = 1
    sequence: int = 1
    exchange: str = "affine"
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None

    @property
    def workers(self) -> int:
        """Those of one replica: shards and helpers, or those that share a sequence."""
        return (len(self.spans) + len(self.helpers)) * self.sequence

    @property
    def world(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas

    @property
    def worker(self) -> int:
        """Which of its replica's workers this is, the number that schedules know."""
        return self.rank % self.workers

    @property
    def shard(self) -> int:
        """Which shard this is; from the number of shards on, a helper."""
        return self.worker // self.sequence

    @property
    def replica(self) -> int:
        """Which replica this is of."""
        return self.rank // self.workers

    @property
    def groups(self) -> list[list[int]]:
        """For each shard the ranks that have its layers, `sequence` of them in every replica."""
        shards = [range(s * self.sequence, (s + 1) * self.sequence) for s in range(len(self.spans))]
        return [[self.workers * r + w for r in range(self.replicas) for w in own] for own in shards]
