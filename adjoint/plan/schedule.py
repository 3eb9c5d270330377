"""The rules by which workers go about a batch: who owns which tile, how long a chunk is, which programs run.

Workers follow them, and so does everything that plans for workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adjoint.engine.grid import Grid, Scheme, make_grid
from adjoint.engine.program import BUFFERS, CAPACITY, Owners, Plan, plan, shared
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.methods import Backprop, LayerLocal, Truncated


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


def check_method(method: Any, helper_count: int, sequence: int, model: Any) -> None:
    """Raises a UserError where a method cannot be distributed as asked."""
    if "attention" in getattr(model, "mixers", ()) and (helper_count or sequence > 1):
        raise UserError(
            f"cluster.{'helpers' if helper_count else 'sequence'}: keys and values stay with one worker, and "
            "this model's attention has some; give --cluster.shards instead"
        )
    if helper_count and not isinstance(method, LayerLocal):
        raise UserError(
            f"cluster.helpers: method {method.name} has no tasks to share; use layer-local, or "
            "--cluster.helpers 0"
        )
    if sequence == 1:
        return
    if helper_count:
        raise UserError("cluster.helpers: go without cluster.sequence; leave one of them out")
    if isinstance(method, Backprop):
        raise UserError(
            "cluster.sequence: backprop has one chunk, and there is nothing to deal out; use exact, or more "
            "--cluster.shards"
        )
    if isinstance(method, Truncated) and method.window == "auto":
        raise UserError(
            'cluster.sequence: window "auto" needs the decays of the whole sequence in one place; give a '
            "window in tokens, or use more --cluster.shards"
        )
