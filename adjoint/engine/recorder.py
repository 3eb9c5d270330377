"""Recordings of what a function asks of the device, to be asked again (`engine.programs`)."""

from __future__ import annotations

import abc
import contextlib
import gc
import weakref
from collections.abc import Callable

import torch

Replay = Callable[[], None]


class Recorder(abc.ABC):
    """A way to record what a function asks of the device."""

    @abc.abstractmethod
    def record(self, function: Callable[[], None]) -> Replay:
        """Return a function that asks the device for the same again, on the same memory.

        Whether the device has carried out the function's own requests is not defined."""


class CUDAGraphs(Recorder):
    """Recordings as CUDA graphs, which share the memory between their inputs and results."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = list[torch.cuda.CUDAGraph]()  # which torch's allocators may still ask
        self._open_pool()

    def record(self, function: Callable[[], None]) -> Replay:
        # as torch.cuda.graph does: no memory that is still in use or to be freed may get into a recording
        torch.cuda.synchronize(self.device)
        gc.collect()
        if not self.graphs:  # torch records nothing more into a pool whose recordings are all gone
            self._open_pool()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            try:
                self._begin()
                function()
                return self._end()
            except BaseException:
                self._abandon()
                raise

    def _open_pool(self) -> None:
        self.pool, self.graphs = torch.cuda.graph_pool_handle(), weakref.WeakSet[torch.cuda.CUDAGraph]()

    def _begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # threads of a backward or of a data loader may go on calling CUDA
        self.graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")

    def _end(self) -> Replay:
        """Return the replay, as long as which the recording lives."""
        graph = self.graph
        assert graph is not None
        graph.capture_end()
        self.graphs.add(graph)
        self.graph = None
        return graph.replay

    def _abandon(self) -> None:
        """End a recording that an error has interrupted.

        If CUDA has given it up, `capture_end` fails before it has told torch's allocator and generators."""
        graph, self.graph = self.graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            self.failed.append(graph)
            with contextlib.suppress(RuntimeError):  # not even begun
                torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
                torch._C._cuda_releasePool(self.device.index, self.pool)
            self._open_pool()
            # a generator that has not heard of the end refuses numbers; another recording's end tells it
            self._begin()
            torch.zeros((), device=self.device)
            self._end()


# Makes the recorder of a device, by its type.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CUDAGraphs}
