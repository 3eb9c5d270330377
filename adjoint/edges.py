"""What the chunked methods keep of a forward: the states at the chunks' edges."""

import torch
from torch import Tensor

from adjoint.engine.tile import State


class Edges:
    """The states before each chunk, in memory taken at once: small blocks that stay, put between large ones
    that go, would break up the heap.

    Args:
        chunks: how many there are.
        host: whether they lie in pinned host memory; copies run behind the computation, in stream order.
    """

    def __init__(self, chunks: int, host: bool) -> None:
        self.chunks, self.host = chunks, host
        self.first: list[State] = []  # the caller's own, maybe of other dtypes
        self.memory: list[State] = []

    def put(self, chunk: int, states: list[State]) -> None:
        """Keeps the states before a chunk."""
        if chunk == 0:
            self.first = list(states)
            return
        if not self.memory:
            device = "cpu" if self.host else states[0][0].device
            self.memory = [
                tuple(
                    s.new_empty(self.chunks - 1, *s.shape, device=device, pin_memory=self.host) for s in state
                )
                for state in states
            ]
        for room, state in zip(self.memory, states, strict=True):
            for r, s in zip(room, state, strict=True):
                r[chunk - 1].copy_(s, non_blocking=True)

    def get(self, chunk: int) -> list[State]:
        """The states before a chunk, where they are kept."""
        return self.first if chunk == 0 else [tuple(r[chunk - 1] for r in room) for room in self.memory]

    def stow(self, tensor: Tensor) -> Tensor:
        """A tensor where the edges are."""
        if not self.host:
            return tensor
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return room.copy_(tensor, non_blocking=True)

    @staticmethod
    def fetch(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, non_blocking=True)
