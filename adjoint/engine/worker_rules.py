"""The rules by which workers run a batch: the owner of each tile, and the programs.

Workers follow them, and so does everything that plans for workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from adjoint.engine.distribution import layers_are_stages
from adjoint.engine.grid import EngineSpec, Grid, make_grid
from adjoint.engine.schedule import BUFFERS, CAPACITY, Owners, Schedule, add_helper_tasks, make_schedule
from adjoint.engine.sharded_model import ShardedModel


def grid_of(
    model: ShardedModel,
    spec: EngineSpec,
    seqlen: int,
    owners: Owners,
    helpers: Sequence[int] = (),
    costs: Sequence[float] = (),
    windows: Sequence[int] | None = None,
) -> Grid:
    """Return the tiles and arrows of a batch; `windows` as in `make_grid`.

    If helpers share tasks, each layer is recomputed from its own inputs, since a task has one layer.

    Args:
        owners: of embedding, layers and head, as `Owners.from_spans` returns them.
        costs: as in `make_grid`, of embedding, layers and head.
    """
    stateful = [False, *model.stateful, False]
    segments: Sequence[int] = range(model.n_layer + 2) if helpers else owners.shards
    if not stages_are_layers(model, spec, owners.in_turn):
        runs = _runs(owners.shards)
        stateful = [any(stateful[k] for k in run) for run in runs]
        costs = [sum(costs[k] for k in run) for run in runs] if costs else ()
        segments = range(len(runs))
    grid = make_grid(spec, seqlen, stateful, model.reach, tuple(segments), windows, costs)
    return dataclasses.replace(grid, exchanges_within_tiles=exchanges_within_tiles(model, owners.in_turn))


def stages_are_layers(model: ShardedModel, spec: EngineSpec, sequence: int) -> bool:
    """Whether each layer of a model in shards is a stage; else a shard is (`layers_are_stages`)."""
    exchanges = exchanges_within_tiles(model, sequence)
    return model.has_layer_stages and layers_are_stages(spec, sequence > 1, exchanges)


def _runs(shards: Sequence[int]) -> list[list[int]]:
    """Return the stages of each shard."""
    return [[k for k, shard in enumerate(shards) if shard == s] for s in range(shards[-1] + 1)]


def exchanges_within_tiles(model: ShardedModel, sequence: int) -> bool:
    """Whether so many workers that share sequences exchange within tiles (`Grid.exchanges_within_tiles`)."""
    return sequence > 1 and model.exchanges_within_tiles


def forward_plan(grid: Grid, owners: Owners) -> Schedule:
    """Return the programs of the loss alone, or of the forward by which windows are picked."""
    return make_schedule(grid, owners.fitted_to(grid), backward=False, tapes=0)


def step_plan(spec: EngineSpec, grid: Grid, owners: Owners, helpers: Sequence[int] = ()) -> Schedule:
    """Return the programs of forward and backward; if a `forward_plan` picked windows, of the backward."""
    # Windowed tiles' cotangents come in small pieces: more messages are under way.
    buffers, owners = BUFFERS if spec.backward.window is None else CAPACITY, owners.fitted_to(grid)
    if spec.backward.window == "auto":
        return make_schedule(grid, owners, forward=False, tapes=0, buffers=buffers)
    if helpers:
        return add_helper_tasks(make_schedule(grid, owners, tapes=0, buffers=buffers), owners.shards, helpers)
    # With dL/dy_K for every layer a chunk is done with soon after the head, and to begin early is to hold
    # less; else it would only make others wait.
    stream = spec.backward.window is not None and spec.backward.dy_from == "head"
    return make_schedule(grid, owners, tapes=spec.storage.tapes, stream=stream, buffers=buffers)
