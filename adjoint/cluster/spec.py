"""What a worker has to know to become what it is, plain values sent to its process; and the rules by which it
goes about a batch, which `adjoint plan` follows too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.engine.grid import Grid, Scheme, make_grid
from adjoint.engine.program import BUFFERS, CAPACITY, Owners, Plan, plan, shared
from adjoint.errors import UserError
from adjoint.layers import StackConfig
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


def owners_of(model: Any, spans: Sequence[range], sequence: int) -> Owners:
    """Who has which stages."""
    if not isinstance(model, StackConfig):  # a pretrained model's stages are its shards
        return Owners(tuple(range(len(spans))), sequence)
    return Owners.of(spans, sequence)


def chunk_size_of(method: Any, seqlen: int, default: int, sequence: int = 1) -> int:
    """Tokens of a chunk; where the method does not say, so few that every worker of a sequence has two."""
    return method.scheme(seqlen, two_each(default, seqlen, sequence)).chunk_size


def two_each(chunk_size: int, seqlen: int, sequence: int) -> int:
    """Tokens of a chunk, fewer where else some worker of a sequence would not have two of them."""
    return min(chunk_size, -(-seqlen // (2 * sequence))) if sequence > 1 else chunk_size


def check_chunks(method: Any, seqlen: int, chunk_size: int | None, sequence: int) -> None:
    """Raises a UserError where some worker of a sequence would have nothing to do.

    Args:
        chunk_size: tokens; None where it is not known yet, and the shortest there may be counts.
    """
    size = chunk_size or chunk_size_of(method, seqlen, seqlen, sequence)
    chunks = -(-seqlen // size)
    if chunks < sequence:
        raise UserError(
            f"cluster.sequence: {sequence} workers, and {chunks} chunks of {size} tokens to deal out; lower "
            f"--method.chunk_size to {max(1, seqlen // sequence)} or less, or take at most {chunks} workers"
        )


def grid_of(
    model: Any,
    scheme: Scheme,
    seqlen: int,
    owners: Owners,
    helpers: Sequence[int] = (),
    costs: Sequence[float] = (),
    windows: Sequence[int] | None = None,
) -> Grid:
    """Tiles and arrows of a batch; `costs` and `windows` as `make_grid`'s.

    Where helpers share tasks, each layer is recomputed from its own inputs, since a task has one layer.
    """
    if not isinstance(model, StackConfig):
        return make_grid(scheme, seqlen, [True] * len(owners.shards), 0, owners.shards, costs=costs)
    stateful = [False, *[True] * model.n_layer, False]
    segments = range(model.n_layer + 2) if helpers else owners.shards
    return make_grid(scheme, seqlen, stateful, model.d_conv - 1, tuple(segments), windows, costs)


def forward_plan(grid: Grid, owners: Owners) -> Plan:
    """Programs of the loss alone, and of the forward by which windows are picked."""
    return plan(grid, owners, backward=False, tapes=0)


def step_plan(scheme: Scheme, grid: Grid, owners: Owners, helpers: Sequence[int] = ()) -> Plan:
    """Programs of forward and backward; where windows were picked after a `forward_plan`, of the backward."""
    # Windowed tiles' cotangents come in small pieces: more messages are under way.
    buffers = BUFFERS if scheme.window is None else CAPACITY
    if scheme.window == "auto":
        return plan(grid, owners, forward=False, tapes=0, buffers=buffers)
    if helpers:
        return shared(plan(grid, owners, tapes=0, buffers=buffers), owners.shards, helpers)
    # With dL/dy_K for every layer a chunk is done with soon after the head, and to begin early is to hold
    # less; else it would only make others wait.
    stream = scheme.window is not None and scheme.dy_from == "head"
    return plan(grid, owners, tapes=scheme.tapes, stream=stream, buffers=buffers)
