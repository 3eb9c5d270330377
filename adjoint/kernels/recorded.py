"""Results that recorded tiles (`engine.programs`) compute again in the backward.

A recording's launches cost little, and its tape is pulled back once. So the tape need not hold results that
are cheap for their size."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _CheapResult(NamedTuple):
    """The memory of a result, which may be gone, and what computes it again."""

    memory: weakref.ref[torch.UntypedStorage]
    compute: Callable[..., Tensor]
    inputs: Sequence[Tensor | _View | None]


class _View(NamedTuple):
    """A view of a cheap result, in the place of a saved tensor."""

    cheap: _CheapResult
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recording:
    """Cheap results of a recorded tile, which its forward notes and its backward asks for.

    Attributes:
        results: by the number of their memory, which other memory may get when it is freed.
        latest: the one that was computed again last: its views are mostly asked for in a row.
    """

    def __init__(self) -> None:
        self.results: dict[int, _CheapResult] = {}
        self.latest: tuple[_CheapResult, Tensor] | None = None

    def note_cheap_result(
        self, result: Tensor, compute: Callable[..., Tensor], *inputs: Tensor | None
    ) -> None:
        """Have the tape compute a contiguous result again where autograd would keep it.

        Args:
            compute: returns it once more, in memory of its own, from the inputs.
        """
        memory = result.untyped_storage()
        if result.is_contiguous() and memory.nbytes() == result.nbytes:
            packed = [None if t is None else self.pack(t.detach()) for t in inputs]
            self.results[memory._cdata] = _CheapResult(weakref.ref(memory), compute, packed)

    def pack(self, saved: Tensor) -> Tensor | _View:
        cheap = self.results.get(saved.untyped_storage()._cdata)
        if cheap is None or cheap.memory() is None:
            return saved
        return _View(cheap, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        cheap = packed.cheap
        if self.latest is None or self.latest[0] is not cheap:
            self.latest = None  # before as much is made once more
            inputs = [None if t is None else self.unpack(t) for t in cheap.inputs]
            with torch.no_grad():
                self.latest = cheap, cheap.compute(*inputs)
        result = self.latest[1]
        view = result.as_strided(packed.size, packed.stride, packed.offset)
        if view.numel() > result.numel() // 2:
            return view
        self.latest = None  # of which the part would keep all
        return view.clone()


class _Current(threading.local):
    """State of a thread.

    Attributes:
        recording: the cheap results of the forward that is being recorded; None if none is.
    """

    recording: _Recording | None = None


current = _Current()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Run the forward of a tile that is recorded: tapes hold no result that `current.recording` notes."""
    noted = current.recording = _Recording()
    try:
        with torch.autograd.graph.saved_tensors_hooks(noted.pack, noted.unpack):
            yield
    finally:
        current.recording = None
        noted.results = {}
