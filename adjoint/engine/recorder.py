"""Recordings of what a function asks of the device, to be asked again (`engine.programs`)."""

from __future__ import annotations

import abc
import gc
from collections.abc import Callable

import torch

Replay = Callable[[], None]


class Recorder(abc.ABC):
    """A way to record what a function asks of the device."""

    @abc.abstractmethod
    def record(self, function: Callable[[], None]) -> Replay:
        """Return a function that asks the device for the same again, on the same memory.

        Whether the device has carried out the function's own requests is not defined."""

    @abc.abstractmethod
    def run_between(self, run: Callable[[], None]) -> None:
        """Have each replay call `run` here; only inside of a function that is recorded."""


class CUDAGraphs(Recorder):
    """Recordings as CUDA graphs, which share the memory between their inputs and results.

    Args:
        device: the GPU that they are of.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.parts = list[Replay]()
        self.graph: torch.cuda.CUDAGraph | None = None

    def record(self, function: Callable[[], None]) -> Replay:
        # as torch.cuda.graph does: no memory that is still in use or to be freed may get into a recording
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        parts = self.parts = list[Replay]()
        with torch.cuda.stream(self.stream):
            self._begin()
            try:
                function()
            finally:
                self._end()
        if len(parts) == 1:
            return parts[0]

        def replay() -> None:
            for run in parts:
                run()

        return replay

    def run_between(self, run: Callable[[], None]) -> None:
        self._end()
        self.parts.append(run)
        self._begin()

    def _begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # a backward's threads begin and end parts, too; others, of a data loader, may go on calling CUDA
        self.graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")

    def _end(self) -> None:
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.capture_end()
            self.parts.append(graph.replay)


# Makes the recorder of a device, by its type.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CUDAGraphs}
