"""The rules by which workers run a batch: the owner of each tile, and the programs.

Workers follow them, and so does everything that plans for workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from adjoint.engine.distribution import layers_are_stages
from adjoint.engine.grid import EngineSpec, Grid, make_grid
from adjoint.engine.schedule import BUFFERS, CAPACITY, Owners, Schedule, add_helper_tasks, make_schedule
from adjoint.layers import MIXERS, StackConfig
from adjoint.layers.mixer import make_mixer, reach_of


class CutModel(Protocol):
    """A pretrained model that is cut into spans of layers: `hf.split.Pretrained`, without importing it."""

    @property
    def n_layer(self) -> int: ...
    @property
    def costs(self) -> tuple[float, ...]: ...


def owners_of(model: StackConfig | CutModel, spans: Sequence[range], sequence: int) -> Owners:
    """Return the owners of a model's stages, for shards with the layers `spans`.

    Where a shard is one stage, these are the owners of what it is made of: see `Owners.fitted_to`."""
    if not isinstance(model, StackConfig):  # a pretrained model's stages are its shards
        return Owners(tuple(range(len(spans))), sequence)
    return Owners.from_spans(spans, sequence)


def grid_of(
    model: StackConfig | CutModel,
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
        owners: of the model's stages, as `owners_of` returns them.
        costs: as in `make_grid`, of the model's stages.
    """
    inside = exchanges_within_tiles(model, owners.in_turn)
    if not isinstance(model, StackConfig):
        grid = make_grid(spec, seqlen, [True] * len(owners.shards), 0, owners.shards, costs=costs)
        return dataclasses.replace(grid, exchanges_within_tiles=inside)
    stateful = [False, *(_has_state(model, k) for k in range(model.n_layer)), False]
    segments: Sequence[int] = range(model.n_layer + 2) if helpers else owners.shards
    if not stages_are_layers(model, spec, owners.in_turn):
        runs = _runs(owners.shards)
        stateful = [any(stateful[k] for k in run) for run in runs]
        costs = [sum(costs[k] for k in run) for run in runs] if costs else ()
        segments = range(len(runs))
    grid = make_grid(spec, seqlen, stateful, reach_of(model), tuple(segments), windows, costs)
    return dataclasses.replace(grid, exchanges_within_tiles=inside)


def stages_are_layers(model: StackConfig | CutModel, spec: EngineSpec, sequence: int) -> bool:
    """Whether each layer of a model in shards is a stage; else a shard is (`layers_are_stages`)."""
    if not isinstance(model, StackConfig):
        return False
    return layers_are_stages(spec, sequence > 1, exchanges_within_tiles(model, sequence))


def _runs(shards: Sequence[int]) -> list[list[int]]:
    """Return the stages of each shard."""
    return [[k for k, shard in enumerate(shards) if shard == s] for s in range(shards[-1] + 1)]


def exchanges_within_tiles(model: StackConfig | CutModel, sequence: int) -> bool:
    """Whether workers that share sequences exchange within tiles (`Grid.exchanges_within_tiles`).

    They do for keys and values, and if a stage is many layers, whose states cross one after the other."""
    if sequence == 1 or not isinstance(model, StackConfig):
        return sequence > 1
    return any(_grows(model, k) for k in range(model.n_layer))


def _grows(config: StackConfig, layer: int) -> bool:
    """Whether a layer's state grows with the sequence."""
    kind = MIXERS.get(config.mixers[layer])
    if kind is not None:
        return kind.attended_channels(config) > 0
    with torch.device("meta"):
        mixer = make_mixer(config, layer)
    dims: tuple[int | None, ...] = getattr(mixer, "grows", ())
    return any(dim is not None for dim in dims)


def _has_state(config: StackConfig, layer: int) -> bool:
    """Whether a layer has a state: a user's layer may have none."""
    if config.mixers[layer] in MIXERS:
        return True
    with torch.device("meta"):
        return bool(make_mixer(config, layer).grows)


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
