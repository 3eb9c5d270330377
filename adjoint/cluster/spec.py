"""What a worker has to know to become what it is: plain values, sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adjoint.config import TrainingConfig
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
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None

    @property
    def workers(self) -> int:
        """Shards and helpers of one replica."""
        return len(self.spans) + len(self.helpers)

    @property
    def worker(self) -> int:
        """Which of its replica's workers this is, the number that schedules know."""
        return self.rank % self.workers

    @property
    def replica(self) -> int:
        """Which replica this is of."""
        return self.rank // self.workers

    @property
    def groups(self) -> list[list[int]]:
        """For each shard the ranks that have its layers, one in every replica."""
        return [[self.workers * r + s for r in range(self.replicas)] for s in range(len(self.spans))]
