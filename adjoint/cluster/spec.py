"""Specification of a worker, sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from adjoint.cluster.devices import Device
from adjoint.engine.schedule import Owners
from adjoint.engine.sharded_model import ShardedModel
from adjoint.methods import Method
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout


class ProcessDescription(TypedDict):
    """The node, device, precision, cores and memory of a worker's process.

    Attributes:
        node: Ray's name of it. address, port: of the node, and a free port there.
        gpu: None if it computes on the CPU.
        memory: bytes of the node.
    """

    node: str
    address: str
    port: int
    device: str
    gpu: Device | None
    precision: str
    cores: int
    memory: int


@dataclass(frozen=True)
class ShardSpec:
    """The specification of one worker, in plain values that can be sent to its process.

    Args:
        model: the complete one.
        layout: all workers. spans: every shard's layers, bottom up. rank: which worker this is.
        device: a torch device. precision: float32, bfloat16 (autocast) or float64.
        threads: CPU threads; None leaves PyTorch's choice.
    """

    model: ShardedModel
    training: TrainingConfig
    method: Method
    layout: Layout
    spans: tuple[range, ...]
    rank: int
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None

    @property
    def owners(self) -> Owners:
        """Return the owners of embedding, layers and head within a replica."""
        return Owners.from_spans(self.spans, self.layout.sequence)

    @property
    def worker(self) -> int:
        """Return this worker's number in programs, where the ranks that split its weights have the same."""
        return self.layout.worker(self.rank) // self.layout.tensor

    @property
    def shard(self) -> int:
        """Return the number of the shard whose layers this worker has."""
        return self.layout.shard(self.rank)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return torch.float64 if self.precision == "float64" else torch.float32
