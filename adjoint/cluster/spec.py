"""What a worker has to know to become what it is: plain values sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adjoint.engine.schedule import Owners
from adjoint.plan.schedule import owners_of
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout


@dataclass(frozen=True)
class ShardSpec:
    """What a worker has to know, plain values only.

    Args:
        model: of the whole stack; or a `Pretrained`.
        layout: all workers. spans: every shard's layers, bottom up. rank: which worker this is.
        device: a torch device. precision: float32, bfloat16 (autocast) or float64.
        threads: CPU threads; None leaves PyTorch's choice.
    """

    model: Any
    training: TrainingConfig
    method: Any
    layout: Layout
    spans: tuple[range, ...]
    rank: int
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None

    @property
    def owners(self) -> Owners:
        """Who has which tile, in a replica."""
        return owners_of(self.model, self.spans, self.layout.sequence)

    @property
    def worker(self) -> int:
        """Which of its replica's workers this is, the number that programs know."""
        return self.layout.worker(self.rank)

    @property
    def shard(self) -> int:
        """Which shard's layers this worker has."""
        return self.layout.shard(self.rank)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float64 if self.precision == "float64" else torch.float32
