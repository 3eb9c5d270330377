"""`Distribution`: which worker runs each tile of a batch, and what workers sum. One class for each way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adjoint.engine.executor import Connections, Executor
from adjoint.engine.grid import EngineSpec, Grid, Storage, make_grid, segments_of
from adjoint.engine.schedule import BUFFERS, CAPACITY, Owners, Schedule, make_schedule
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.layers import State


class Distribution:
    """A single process with all stages and the whole sequence; others derive from it.

    A step asks it for the grid and the programs, for what connects its executor to other workers, and for the
    sums over workers. Objects are made for one step.

    Attributes:
        worker: this worker's number in programs.
        ranks: the number of workers that share each sequence.
        shares_sequence: whether workers share it, be it with one rank, as in a trial of such a group.
        is_alone: whether no other worker runs tiles of the batch, so that a tile may reach any tensor
            (`leaves.UnlistedLeaves`).
    """

    worker = 0
    ranks = 1
    shares_sequence = False
    is_alone = True

    def begin(self, stages: Sequence[Stage | None], spec: EngineSpec, device: torch.device) -> None:
        """Prepare for a step.

        Raises:
            UserError: the workers cannot share such a spec or stage.
        """

    def runs(self, spec: EngineSpec, stages: Sequence[Stage | None]) -> Sequence[int]:
        """Return, per stage of a model, the number of its run: a run is one stage here (`layer_run`)."""
        return runs_of(stages, spec.storage) if layers_are_stages(spec, False, False) else [0] * len(stages)

    def grid(
        self,
        spec: EngineSpec,
        seqlen: int,
        stages: Sequence[Stage | None],
        windows: Sequence[int] | None = None,
    ) -> Grid:
        """Return the tiles of a batch and their arrows; `windows` as in `make_grid`."""
        local_stages = [stage for stage in stages if stage is not None]
        reach = max([stage.reach for stage in local_stages])
        if spec.storage.checkpoints is not None and not any(
            None in stage.grows for stage in local_stages
        ):  # nothing has to be stored at edges
            spec = dataclasses.replace(spec, storage=dataclasses.replace(spec.storage, checkpoints=None))
        # stages are segments already
        spec = dataclasses.replace(spec, storage=dataclasses.replace(spec.storage, segment_layers=1))
        grid = make_grid(spec, seqlen, [stage.stateful for stage in local_stages], reach, windows=windows)
        one_process = self.is_alone and grid.stores_inputs and local_stages[-1].is_loss
        if one_process and grid.carried and spec.backward.window is None and grid.dy_from == "above":
            return dataclasses.replace(grid, head_in_forward=True)
        return grid

    def owners(self, grid: Grid) -> Owners:
        """Return the owner of each tile."""
        return Owners((0,) * grid.stages)

    def has_chunk(self, grid: Grid) -> bool:
        """Whether this worker, and those at its place of other groups, have a chunk."""
        return True

    def schedule(
        self, spec: EngineSpec, grid: Grid, *, forward: bool = True, backward: bool = True, tapes: int = 1
    ) -> Schedule:
        """Return the programs of all workers; arguments as in `make_schedule`."""
        # windowed tiles' cotangents come in small pieces: more messages are under way
        buffers = BUFFERS if spec.backward.window is None else CAPACITY
        owners = self.owners(grid)
        return make_schedule(grid, owners, forward=forward, backward=backward, tapes=tapes, buffers=buffers)

    def connections(self, grid: Grid) -> Connections:
        """Return what connects this worker's executor to other processes."""
        return Connections()

    def agree(
        self, executor: Executor, spec: EngineSpec, parameters: Sequence[Tensor], has_backward: bool
    ) -> Grid:
        """Check that all workers run the same step; return its grid, with the same random cuts on all.

        Raises:
            UserError: the workers' arguments differ.
        """
        return executor.grid

    def adjoint_scale(self, spec: EngineSpec, grid: Grid) -> tuple[tuple[float, ...], ...]:
        """Return `Grid.adjoint_scale` for a spec that drops the adjoint state by chance."""
        return draw_adjoint_scale(sum(grid.stateful), grid.chunks, spec.backward.drop_probability)

    def running(
        self, schedule: Schedule, make_executor: Callable[[], Executor]
    ) -> contextlib.AbstractContextManager[None]:
        """Get ready for a schedule's messages; return the context in which this worker runs its program.

        Args:
            make_executor: makes an executor like the one that will run, for a trial of its tiles.
        """
        return contextlib.nullcontext()

    def windows(self, windows: list[int]) -> list[int]:
        """Return the windows of all stateful stages, from those that this worker's rows and stages need."""
        return windows

    def results(self, executor: Executor, sums: Sequence[Sum]) -> tuple[Tensor, list[State]]:
        """Return the summed loss and the final states, of all workers; drop the executor's.

        Args:
            sums: the totals of these become those of all workers, too.
        """
        total, final = executor.results()
        assert total is not None
        return total, final

    def joined(self, values: Tensor) -> Tensor:
        """Return a tensor with a value per token, (batch, seqlen, …), with the values of all workers' chunks.

        Args:
            values: those of this worker's; 0 where it has no chunk.
        """
        return values

    def check_same_scale(self, d_loss: Tensor | None) -> None:
        """Raise a UserError if the workers' losses are multiplied by different factors."""

    def summed(
        self, terms: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> Sequence[Tensor | None]:
        """Return tensors summed over the workers that have the same stages.

        Args:
            terms: as many on every worker; None for those that this worker does not have.
            zeros: makes zeros for term i, for a worker that has none where another has.
        """
        return terms


def layers_are_stages(spec: EngineSpec, shares_sequence: bool, exchanges_within_tiles: bool) -> bool:
    """Whether each layer is a stage; else a worker's run of layers is one (`layer_run`).

    Layers are where a method's tasks are layers, and where workers that share sequences exchange between
    tiles: states then cross there, so no worker waits for another inside of a tile, and messages can go by
    NCCL, which has no tags."""
    return spec.tasks_are_layers or (shares_sequence and not exchanges_within_tiles)


def runs_of(stages: Sequence[Stage | None], storage: Storage) -> Sequence[int]:
    """Return, per stage of a model, the number of its run, where a run is a segment's layers.

    The embedding goes with the first layers, as token ids take less memory than its output. Stages of many
    layers are segments as they are, and so are all if each layer's input is stored."""
    layers, length = len(stages) - 2, storage.segment_layers or 1
    if length == 1 or any(stage is not None and stage.is_many_layers for stage in stages):
        return range(len(stages))
    if length >= layers:
        return [0] * len(stages)
    return segments_of((0,) * len(stages), length)


def draw_adjoint_scale(stateful: int, chunks: int, drop: float) -> tuple[tuple[float, ...], ...]:
    """Draw `Grid.adjoint_scale`: 0 with probability `drop`, else 1 / (1 - drop); () if nothing is dropped.

    The numbers come from PyTorch's CPU generator."""
    if not drop:
        return ()
    drawn = (torch.rand(stateful, chunks) >= drop).double() / (1 - drop)
    return tuple(map(tuple, drawn.tolist()))
