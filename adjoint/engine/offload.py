"""Copies of what is stored in host memory (`Exact(offload=True)`), which travel while kernels run."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class HostCopies:
    """Copies of one step between a GPU and host memory, on a stream of their own.

    They run in the order in which they are queued: what is stored is there when it is fetched, and has been
    fetched when its memory is written again. On the GPU, each direction has two buffers: one travels while
    kernels fill or read the other. Tensors that kernels use are thus never a copy's, and their memory may be
    freed as if there were one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.leaving, self.arriving = (
            tuple(_Buffer(device, self.stream) for _ in range(2)) for _ in range(2)
        )
        self.turn = 0  # of the leaving buffers
        self.fetches: dict[Hashable, _Buffer] = {}  # copies that have been started, by what was fetched
        self.last_stored: tuple[Hashable, Tensor] | None = None  # still in its buffer, until the next one is

    @property
    def computing(self) -> torch.cuda.Stream:
        """The stream on which kernels are queued now."""
        return torch.cuda.current_stream(self.device)

    def store(self, out: Tensor, fill: Callable[[Tensor], object], key: Hashable = None) -> Tensor:
        """Copy to pinned host memory what a function writes to a tensor of the device; return `out`.

        Args:
            key: by which `fetch` may ask for it at once, without a copy back.
        """
        buffer = self.leaving[self.turn]
        self.turn = 1 - self.turn
        buffer.wait_until_idle(self.computing)
        fill(room := buffer.room(out))
        self.last_stored = None if key is None else (key, room)
        buffer.free(self.computing)
        buffer.copy(room, out)
        return out

    def start_fetch(self, key: Hashable, stored: Tensor) -> None:
        """Start to copy a tensor of the host to a buffer, if one is free; `fetch` hands it out."""
        free = [buffer for buffer in self.arriving if buffer not in self.fetches.values()]
        if free and key not in self.fetches:
            self.fetches[key] = free[0]
            free[0].copy(stored, free[0].room(stored))

    def fetch(self, key: Hashable, stored: Tensor) -> Tensor:
        """Return a tensor of the host on the device."""
        if self.last_stored is not None and self.last_stored[0] == key:
            return self.last_stored[1].clone()
        self.start_fetch(key, stored)
        buffer = self.fetches.pop(key, None)
        if buffer is None:  # both buffers are on their way with something else
            self.computing.wait_stream(self.stream)
            return stored.to(self.device, non_blocking=True)
        buffer.wait_until_idle(self.computing)
        fetched = buffer.room(stored).clone()
        buffer.free(self.computing)
        return fetched

    def forget_fetches(self) -> None:
        """Drop copies that nobody has asked for."""
        self.fetches.clear()

    def wait_on_host(self) -> None:
        """Have the host wait until everything stored is there, to read it itself."""
        stored = torch.cuda.Event(blocking=True)
        stored.record(self.stream)
        stored.synchronize()

    def finish(self) -> None:
        """Have kernels that are queued from now on wait for all copies, whose buffers may then be freed."""
        self.forget_fetches()
        self.last_stored = None
        self.computing.wait_stream(self.stream)


class _Buffer:
    """Memory on the device that kernels, and copies on a stream of theirs, use in turn."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device, self.stream = device, stream
        self.memory: Tensor | None = None
        self.copied: torch.cuda.Event | None = None  # the end of its last copy
        self.read: torch.cuda.Event | None = None  # the end of what kernels have done with it

    def room(self, like: Tensor) -> Tensor:
        """Return the beginning of the buffer as a tensor of the same shape and dtype."""
        size = math.prod(like.shape) * like.dtype.itemsize
        if self.memory is None or self.memory.numel() < size:
            computing = torch.cuda.current_stream(self.device)
            self.wait_until_idle(computing)  # before its memory is freed
            self.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.free(computing)  # kernels that are queued may still use the new memory
        return self.memory[:size].view(like.dtype).view(like.shape)

    def wait_until_idle(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait until the last copy has ended."""
        if self.copied is not None:
            stream.wait_event(self.copied)

    def free(self, stream: torch.cuda.Stream) -> None:
        """Let the next copy begin after what is queued on a stream."""
        self.read = stream.record_event()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy to or from the buffer, after what kernels have done with it."""
        if self.read is not None:
            self.stream.wait_event(self.read)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self.copied = self.stream.record_event()
