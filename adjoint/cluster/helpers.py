"""Helpers share a shard's layer-local tasks: whoever is free takes the next unit of them.

The owner takes units from the front; each helper holds up to two, fed from the back, so that inputs travel
while it computes. Sums of gradients are the same bit for bit whoever made them, given the same kind of device
and number of threads: a unit is summed from zero by one worker, from inputs laid out in memory as a message's
do, and units are added in their order. Sums that come early are held, each as large as its layer's gradients;
since a layer's units are taken in order from either end they are few, unless a helper is much slower than the
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adjoint.batch import Batch
from adjoint.cluster.spec import ShardSpec
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, Grid, Key, Tile
from adjoint.engine.schedule import HelperTasks
from adjoint.engine.stage import Stage
from adjoint.memory import peak_memory_bytes
from adjoint.train.machine import autocast

UNITS_PER_HELPER = 2  # units that a helper holds: one under way, one whose inputs are there
# grid, tiles, inputs, new weights; its tensors as NumPy arrays, which Ray ships without pickling them
Array = TypeVar("Array", np.ndarray, Tensor)
Task = tuple[Grid, tuple[Tile, ...], dict[Key, Array], list[Array] | None]
# Hands a task over; its result is the sums of the task's gradients, an array for each parameter of the layer.
Helper = Callable[[Task], futures.Future[list[np.ndarray]]]


def share(
    worker: Executor, action: HelperTasks, helpers: Sequence[Helper], known: set[tuple[int, int]]
) -> None:
    """Carry out a `HelperTasks` action as its owner, handing units to the helpers.

    Args:
        known: (helper, stage)s whose weights the helper has; others are sent along, and added here.
    """
    units = action.units
    stages = [unit[0].stage for unit in units]
    left = set(range(len(units)))
    in_order = {k: [i for i in left if stages[i] == k] for k in stages}
    early: dict[int, list[Tensor]] = {}
    under_way: dict[futures.Future[list[np.ndarray]], tuple[int, int]] = {}  # helper and unit

    def feed() -> None:
        for helper in [*range(len(helpers))] * UNITS_PER_HELPER:
            if left and sum(who == helper for who, _ in under_way.values()) < UNITS_PER_HELPER:
                i = min(left, key=lambda i: (-stages[i], i))
                left.remove(i)
                new = None if (helper, stages[i]) in known else weights_of(worker.stages[stages[i]])
                known.add((helper, stages[i]))
                task = as_arrays((worker.grid, units[i], inputs_of(worker, units[i]), new))
                under_way[helpers[helper](task)] = helper, i

    def take_in(i: int, sums: list[Tensor]) -> None:
        early[i] = sums
        stage, queue = worker.stages[stages[i]], in_order[stages[i]]
        assert stage is not None
        while queue and queue[0] in early:
            for parameter, gradient in zip(stage.parameters(), early.pop(queue.pop(0)), strict=True):
                worker.gradients.add(parameter, gradient.to(parameter.device))

    feed()
    while left or under_way:
        if left:
            i = min(left)
            left.remove(i)
            take_in(i, carry_out(worker, units[i]))
        timeout = 0 if left else None
        for future in futures.wait(under_way, timeout, return_when=futures.FIRST_COMPLETED).done:
            take_in(under_way.pop(future)[1], as_tensors(future.result()))
        feed()


def carry_out(worker: Executor, tiles: Sequence[Tile]) -> list[Tensor]:
    """Run a unit's tiles; return the sums of their gradients, one for each parameter of the layer."""
    with worker.separate_gradients() as gradients:
        for t in tiles:
            with worker.connections.traced(t):
                worker.tile(t)
    stage = worker.stages[tiles[0].stage]
    assert stage is not None
    return [
        gradients.sums.get(p, torch.zeros_like(p, dtype=worker.accumulate_dtype)) for p in stage.parameters()
    ]


SEQ_IDX: Key = ("seq_idx",)


def inputs_of(worker: Executor, tiles: Sequence[Tile]) -> dict[Key, Tensor]:
    """Return the values that a unit reads from other units, on the CPU."""
    written = {key for t in tiles for key in worker.grid.writes(t)}
    reads = {key for t in tiles for key in worker.grid.reads(t)} - written
    for key in reads:
        worker.wait_until_stored(key)
    inputs = {key: worker.value(key).cpu() for key in reads}
    seq_idx = worker.batch.seq_idx
    return inputs if seq_idx is None else {**inputs, SEQ_IDX: seq_idx.cpu()}


def weights_of(stage: Stage | None) -> list[Tensor]:
    assert stage is not None
    return [p.detach().cpu() for p in stage.parameters()]


class HelperShard:
    """A helper: a shard's layers without embedding, head and optimizer; their weights come with the tasks."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec, self.device = spec, torch.device(spec.device)
        self.span = spec.spans[spec.shard]
        self.part = spec.model.make_part(self.span, self.device, spec.dtype)
        self.stages = spec.model.stages(self.part, self.span, EngineSpec(1))
        self.progress, self.at = 0, ("", True)  # as a shard's

    def task(self, task: Task) -> list[np.ndarray]:
        """Run a task; return the sums of its gradients."""
        grid, tiles, inputs, weights = as_tensors(task)
        stage = self.stages[tiles[0].stage]
        assert stage is not None
        if weights is not None:
            with torch.no_grad():
                for parameter, weight in zip(stage.parameters(), weights, strict=True):
                    parameter.copy_(weight)
        rows = next(tensor.shape[0] for key, tensor in inputs.items() if key[0] == "y")
        states = self.spec.model.stage_states(self.part, self.span, rows)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device).expand(rows, grid.cuts[-1])
        batch = Batch(ids, ids, seq_idx=inputs.pop(SEQ_IDX, None), states=states)
        with autocast(self.spec.precision, self.device):
            worker = Executor(self.stages, grid, batch, EngineSpec(grid.tokens(0)))
            worker.store |= {key: tensor.to(self.device) for key, tensor in inputs.items()}
            with worker.running():
                sums = [gradient.cpu().numpy() for gradient in carry_out(worker, tiles)]
        self.progress, self.at = self.progress + 1, ("", True)
        return sums

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.device)


def as_arrays(task: Any) -> Any:
    """Tensors as NumPy arrays."""
    return tree_map_only(Tensor, Tensor.numpy, task)


def as_tensors(task: Any) -> Any:
    """The reverse; copies, since what Ray ships is read-only and shared, aligned as PyTorch's own memory."""
    return tree_map_only(np.ndarray, torch.tensor, task)
