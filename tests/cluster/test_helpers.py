"""Helpers: the same bits whoever takes what and however slow anyone is; new weights after a step; errors."""

from __future__ import annotations

import collections
import random
import threading
import time
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import torch

from adjoint import LayerLocal, StackConfig
from adjoint.cluster import helpers
from adjoint.cluster.helpers import HelperShard
from adjoint.cluster.shard import PipelineWorker
from adjoint.engine import tile
from adjoint.engine.executor import Executor
from adjoint.engine.grid import Tile
from adjoint.engine.schedule import HelperTasks, Owners, Run
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.layout import Layout
from tests.cluster.threads import (
    TRAINING,
    ThreadHelper,
    disturbed_shards,
    disturbed_stack,
    split,
    together,
    train_shards,
    train_stack,
)
from tests.model_helpers import SIZES, assert_same, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = StackConfig(**{**SIZES, "n_layer": 5, "mixer": ["mamba", "mamba2", "dense", "mamba", "scalar"]})
BATCHES = [make_ids(2, 45, seed=step) for step in range(2)]
CHUNKS = 6  # of 8 tokens
SHARED = (CONFIG.n_layer - 1) * CHUNKS  # a layer's chunks, of a batch; the first layer's are not shared


def trained(
    workers: list[PipelineWorker], batches: list[torch.Tensor] = BATCHES
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the first step's gradients."""
    return train_shards(workers, TRAINING, batches)


def helpers_of(workers: list[PipelineWorker]) -> list[ThreadHelper]:
    return [helper for shard in workers for helper in shard.helpers if isinstance(helper, ThreadHelper)]


def taken(helpers: list[ThreadHelper]) -> int:
    """Chunks of layers that helpers have pulled back."""
    tiles_of_all = [t for helper in helpers for tiles, _ in helper.taken for t in tiles]
    return sum(t.count for t in tiles_of_all if t.kind in ("backward", "windowed"))


def same_bits(first: Any, other: Any) -> bool:
    return first[0] == other[0] and all(torch.equal(first[1][name], other[1][name]) for name in first[1])


# ----------------------------------------------------------------------------------------------- who is free


class ByChance(ThreadHelper):
    """Takes any time."""

    chance = random.Random(0)

    def carry_out(self, task: helpers.Task) -> list[np.ndarray]:
        time.sleep(self.chance.choice([0, 0, 0.02]))
        return super().carry_out(task)


class OneSlow(ThreadHelper):
    """The last helper is not through with its first task before all units are taken."""

    none_left: threading.Event

    def carry_out(self, task: helpers.Task) -> list[np.ndarray]:
        if self.helper.spec.rank + 1 == self.helper.spec.layout.world:
            assert self.none_left.wait(60)
        return super().carry_out(task)


@pytest.fixture(autouse=True)
def none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that waits for a helper has no unit left."""
    OneSlow.none_left, wait = threading.Event(), futures.wait

    def noting(under_way: Any, timeout: float | None, **keywords: Any) -> Any:
        if timeout is None:
            OneSlow.none_left.set()
        return wait(under_way, timeout, **keywords)

    monkeypatch.setattr(helpers.futures, "wait", noting)


OWNER_ALONE, HELPERS_ALONE = 0, 1000  # units that a helper may hold


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    "window, shards, count",
    [
        (None, 1, 1),
        pytest.param(7, 1, 3, marks=pytest.mark.slow),
        pytest.param(None, 2, 3, marks=pytest.mark.slow),
        (7, 2, 3),
        (45, 1, 2),
    ],
)
def test_whoever_takes_what_the_result_is_the_same(
    window: int | None, shards: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = LayerLocal(window, 8)
    losses, expected = train_stack(disturbed_stack(CONFIG), method, TRAINING, BATCHES)
    runs = []
    ways = (ThreadHelper, OWNER_ALONE), (ThreadHelper, HELPERS_ALONE), (OneSlow, 2), (ByChance, 2)
    for kind, units in ways:
        OneSlow.none_left.clear()
        monkeypatch.setattr("tests.cluster.threads.ThreadHelper", kind)
        monkeypatch.setattr(helpers, "UNITS_PER_HELPER", units)
        workers = disturbed_shards(CONFIG, Layout(shards, helpers=count), method, TRAINING)
        runs.append(trained(workers))
        thread_helpers = helpers_of(workers)
        least = 0 if units == OWNER_ALONE else len(BATCHES) * (SHARED if units == HELPERS_ALONE else 1)
        assert least <= taken(thread_helpers) <= min(least * SHARED, len(BATCHES) * SHARED)
        stages = {t.stage for helper in thread_helpers for tiles, _ in helper.taken for t in tiles}
        assert stages <= set(range(2, CONFIG.n_layer + 1)), "the first layer's tiles stay with their shard"
        for helper in thread_helpers:  # a layer's weights come with its first task after a step
            came = collections.Counter(tiles[0].stage for tiles, new in helper.taken if new)
            assert max(came.values(), default=0) <= len(BATCHES)
    assert runs[0][0] == pytest.approx(losses, rel=1e-12)
    assert_same(runs[0][1], expected, 1e-12)
    assert all(same_bits(runs[0], other) for other in runs)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [None, 7])
def test_owner_and_helpers_round_alike(
    window: int | None, batch: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low-precision sums of products have the same bits, whoever carries out a task."""
    runs = []
    for ahead in (OWNER_ALONE, HELPERS_ALONE):
        monkeypatch.setattr(helpers, "UNITS_PER_HELPER", ahead)
        workers = disturbed_shards(CONFIG, Layout(helpers=2), LayerLocal(window, 8), TRAINING, precision)
        runs.append(trained(workers, [make_ids(batch, 61)]))
        assert bool(taken(helpers_of(workers))) == bool(ahead)
    assert same_bits(*runs)


def test_tasks_read_memory_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of views that begin anywhere may round otherwise than those of whole tensors (BLAS picks its
    kernels by alignment), too seldom at these sizes to be seen in the results."""
    windowed, vjp, local = Executor.windowed, tile.windowed_vjp, threading.local()
    layouts: list[dict[Tile, Any]] = []

    def noting_tile(worker: Executor, t: Tile) -> None:
        local.tile = t
        windowed(worker, t)

    def noting_layout(block: Any, replaced: Any, inputs: tile.Windowed, gradients: Any) -> Any:
        read = (inputs.x, *inputs.state, inputs.dy, *block.parameters())
        layouts[-1][local.tile] = [(tensor.stride(), tensor.data_ptr() % 64) for tensor in read]
        return vjp(block, replaced, inputs, gradients)

    monkeypatch.setattr(Executor, "windowed", noting_tile)
    monkeypatch.setattr(tile, "windowed_vjp", noting_layout)
    for ahead in (OWNER_ALONE, HELPERS_ALONE):
        monkeypatch.setattr(helpers, "UNITS_PER_HELPER", ahead)
        layouts.append({})
        trained(
            disturbed_shards(CONFIG, Layout(helpers=1), LayerLocal(7, 9), TRAINING, "float32"), BATCHES[:1]
        )
    assert layouts[0] == layouts[1] and len(layouts[0]) == 5 * 5


def test_a_slow_helper_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow helper gets the units that it was handed at the start, and no more."""
    monkeypatch.setattr("tests.cluster.threads.ThreadHelper", OneSlow)
    workers = disturbed_shards(CONFIG, Layout(helpers=2), LayerLocal(7, 8), TRAINING)
    trained(workers, BATCHES[:1])
    assert 0 < len(helpers_of(workers)[1].taken) <= 2 < len(helpers_of(workers)[0].taken)


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "who, name",
    [(HelperShard, "task"), (helpers, "carry_out"), (ThreadHelper, "__call__"), (helpers, "as_tensors")],
    ids=["a helper", "anyone", "sending", "receiving"],
)
def test_who_fails_leaves_nobody_waiting(who: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper, the owner, or the way between them, as when a helper's process is gone: the owner's call ends
    with the error, and so do those of the other shards."""
    count, function = iter(range(1000)), getattr(who, name)

    def failing(*arguments: Any) -> Any:
        if next(count):
            raise ConnectionError("closed by peer")
        return function(*arguments)

    monkeypatch.setattr(who, name, failing)
    workers = disturbed_shards(CONFIG, Layout(2, helpers=2), LayerLocal(7, 8), TRAINING)
    with pytest.raises(ConnectionError, match="closed by peer"):
        together(workers, lambda shard: shard.accumulate(BATCHES[0]))


# -------------------------------------------------------------------------------------------------- programs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("window", [None, 4, 20])
@pytest.mark.parametrize("chunks", [1, 3, 40])
@pytest.mark.parametrize(
    "n_layer, shards, owned", [(4, 1, (0,)), (5, 1, (0,) * 4), (5, 2, (1, 0, 1)), (3, 3, (2,)), (2, 2, (0,))]
)
def test_units_are_all_shared_tiles_once(
    n_layer: int, shards: int, owned: tuple[int, ...], chunks: int, window: int | None
) -> None:
    """Units cover each backward tile above the first layer once, in order.

    A unit belongs to one layer, and reads only its own results and what the forward and the head have left.
    """
    owners, seqlen = Owners.from_spans(split(n_layer, shards)), 8 * chunks
    spec = LayerLocal(window, 8).engine_spec(seqlen, 8)
    config = StackConfig(vocab_size=17, d_model=12, n_layer=n_layer)
    grid = grid_of(ShardedStack(config), spec, seqlen, owners, owned)
    for shard, program in enumerate(step_plan(spec, grid, owners, owned).programs):
        workers = 1 + owned.count(shard)
        layers = [k for k in range(2, n_layer + 1) if owners.shards[k] == shard] if workers > 1 else []
        units = [unit for a in program if isinstance(a, HelperTasks) for unit in a.units]
        shared = [t for unit in units for t in unit]
        tiles = [a.tile for a in program if isinstance(a, Run) and not a.tile.is_forward] + shared
        assert sorted({t.stage for t in shared}) == layers
        for k in {t.stage for t in tiles}:
            assert [t for t in tiles if t.stage == k] == [t for t in grid.backward_tiles() if t.stage == k]
        for unit in units:
            assert len({t.stage for t in unit}) == 1
            written = {key for t in unit for key in grid.writes(t)}
            assert {key[0] for t in unit for key in grid.reads(t) if key not in written} <= {"y", "S", "dy"}
        if grid.window(1) is None:  # a layer's adjoint state goes through all its chunks
            assert len(units) == len(layers)
        elif layers:
            assert min(len(shared), 4 * workers) <= len(units) < 4 * workers + len(layers)
