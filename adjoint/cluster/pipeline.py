"""`PipelineRank`: the distribution of a batch over layer shards, as one of their workers sees it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from adjoint.cluster.helpers import share
from adjoint.engine.distribution import Distribution
from adjoint.engine.exchange import Exchange
from adjoint.engine.executor import Connections, Executor
from adjoint.engine.grid import EngineSpec, Grid
from adjoint.engine.schedule import Owners, Schedule
from adjoint.engine.stage import Stage
from adjoint.engine.warm_up import kinds_of, warm_up
from adjoint.parallel.context import WithinTiles
from adjoint.plan.schedule import forward_plan, grid_of, step_plan

if TYPE_CHECKING:
    from adjoint.cluster.shard import Microbatch, PipelineWorker


class PipelineRank(Distribution):
    """The workers of a replica: layers dealt out to shards, chunks in turn to a shard's workers, and helpers.

    Args:
        worker: whose program it is.
        microbatch: of the step; None for an evaluation.
    """

    is_alone = False

    def __init__(self, worker: PipelineWorker, microbatch: Microbatch | None) -> None:
        self.pipeline, self.spec, self.microbatch = worker, worker.spec, microbatch
        self.worker, self.transport = worker.spec.worker, worker.transport

    def begin(self, stages: Sequence[Stage | None], spec: EngineSpec, device: torch.device) -> None:
        self.pipeline.trace = []

    def grid(
        self,
        spec: EngineSpec,
        seqlen: int,
        stages: Sequence[Stage | None],
        windows: Sequence[int] | None = None,
    ) -> Grid:
        helped, costs = self.spec.layout.helped, self.pipeline.costs
        return grid_of(self.spec.model, spec, seqlen, self.spec.owners, helped, costs, windows)

    def owners(self, grid: Grid) -> Owners:
        return self.spec.owners.in_rounds(grid)

    def schedule(
        self, spec: EngineSpec, grid: Grid, *, forward: bool = True, backward: bool = True, tapes: int = 1
    ) -> Schedule:
        if not backward:
            return forward_plan(grid, self.owners(grid))
        return step_plan(spec, grid, self.owners(grid), self.spec.layout.helped)

    def connections(self) -> Connections:
        worker = self.pipeline
        shared = functools.partial(share, helpers=worker.helpers, known=worker.known)
        return Connections(self.transport, worker.traced, shared, worker.warmed_up)

    def exchange(self, grid: Grid) -> Exchange:
        if not grid.exchanges_within_tiles:
            return super().exchange(grid)
        assert self.transport is not None
        return WithinTiles(self.owners(grid), self.worker, self.transport)

    def adjoint_scale(self, spec: EngineSpec, grid: Grid) -> tuple[tuple[float, ...], ...]:
        assert self.microbatch is not None
        return self.microbatch.adjoint_scale  # the same on all workers

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which random numbers are those of the step."""
        if self.microbatch is None:
            return contextlib.nullcontext()
        return self.pipeline.drawing(self.microbatch.number)

    def running(
        self, schedule: Schedule, make_executor: Callable[[], Executor]
    ) -> contextlib.AbstractContextManager[None]:
        if self.transport is not None:
            with self._drawing():
                self._warm_up(schedule, make_executor)
            self.transport.connect(schedule.channels(), schedule.buffers)
        return self._drawing()

    def _warm_up(self, schedule: Schedule, make_executor: Callable[[], Executor]) -> None:
        """Run each kind of this worker's tiles once before the program, if the transport is on the GPU."""
        assert self.transport is not None
        if not self.transport.on_device:
            return
        program, executor, warmed_up = (
            schedule.programs[self.worker],
            make_executor(),
            self.pipeline.warmed_up,
        )
        if not kinds_of(executor, program).keys() <= warmed_up:
            self.pipeline.at = "first use of the kernels", False
            warm_up(executor, program, warmed_up)

    def windows(self, windows: list[int]) -> list[int]:
        """Return the widest windows of all replicas."""
        if self.transport is None:
            return windows
        self.pipeline.at = "windows of all", True
        device = self.pipeline.device
        by_worker = self.transport.all_gather(torch.tensor(windows, device=device), self.spec.layout.everyone)
        return torch.stack(by_worker).amax(0).tolist()
