"""Gradients that leave the device for sums in host memory, while the device goes on to compute.

A gradient is copied to pinned memory on a stream of its own. Worker threads wait for the copy's event and add
it. Each worker has the same part of every tensor, so each element is added to in the order in which gradients
leave: results are the same bits, whatever the number of workers."""

from __future__ import annotations

import concurrent.futures
import functools
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from adjoint.engine.threads import share_of_cores

WORKER_NAME = "adjoint-adder"
MIN_ELEMENTS_OF_PART = 1 << 16  # below it, handing a part to a worker takes longer than adding it


class ArrivingGradient:
    """A gradient's copy in host memory, which may still be on its way.

    Args:
        values: the copy, contiguous; dropped once the workers have it, who free its memory.
        copied: the event of the copy's end.

    Attributes:
        nbytes: bytes of the copy.
    """

    def __init__(self, values: Tensor, copied: torch.cuda.Event) -> None:
        self.values, self.copied, self.nbytes = values, copied, values.nbytes
        self.additions: list[Future[None]] = []

    def start_adding(self, total: Tensor, overwrites: bool) -> None:
        """Have the workers add the gradient to its sum, after what they have been given for it before.

        Args:
            overwrites: whether `total` has no values yet.
        """
        terms, workers = self.values, _workers()
        del self.values
        parts = min(len(workers), max(1, terms.numel() // MIN_ELEMENTS_OF_PART))
        if not total.is_contiguous():
            parts = 1
        elif parts > 1:
            terms, total = terms.view(-1), total.view(-1)
        pieces = zip(terms.tensor_split(parts), total.tensor_split(parts), workers, strict=False)
        self.additions = [worker.submit(self._add, term, piece, overwrites) for term, piece, worker in pieces]

    def _add(self, term: Tensor, total: Tensor, overwrites: bool) -> None:
        self.copied.synchronize()
        with torch.no_grad():
            total.copy_(term) if overwrites else total.add_(term)

    def is_added(self) -> bool:
        """Whether all workers have ended, with an error or without."""
        return all(future.done() for future in self.additions)

    def wait(self) -> None:
        """Wait until all workers have ended, with an error or without."""
        concurrent.futures.wait(self.additions)

    def finish(self) -> None:
        """Wait until the gradient has been added; raise a worker's error."""
        self.wait()
        for future in self.additions:
            future.result()


@functools.cache
def _workers() -> list[ThreadPoolExecutor]:
    """Return single threads that use this process's share of the cores together.

    Each adds with as many threads as PyTorch's operators have, of which torchrun leaves one."""
    count = max(1, share_of_cores() // torch.get_num_threads())
    return [ThreadPoolExecutor(1, WORKER_NAME) for _ in range(count)]
