"""What a recorded tile does in other ways (`engine.programs`): its launches cost little, and its tape is pulled
back once. So results that are cheap for their size are not kept, but computed again in the backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_local = threading.local()


class _CheapResult(NamedTuple):
    """A result, which may be gone, and what computes it again."""

    result: weakref.ref[Tensor]
    compute: Callable[[], Tensor]


class _View(NamedTuple):
    """A view of a cheap result, in the place of a saved tensor."""

    cheap: _CheapResult
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recording:
    """What is noted during the forward of a recorded tile, and asked for in its backward.

    Attributes:
        results: by the number of their memory.
        latest: the one that was computed again last: its views are mostly asked for in a row.
    """

    def __init__(self) -> None:
        self.results: dict[int, _CheapResult] = {}
        self.latest: tuple[_CheapResult, Tensor] | None = None

    def pack(self, saved: Tensor) -> Tensor | _View:
        cheap = self.results.get(_storage_of(saved))
        result = None if cheap is None else cheap.result()
        if cheap is None or result is None or _storage_of(result) != _storage_of(saved):
            return saved
        return _View(cheap, saved.size(), saved.stride(), saved.storage_offset())

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        cheap = packed.cheap
        if self.latest is None or self.latest[0] is not cheap:
            self.latest = None  # before as much is made once more
            with torch.no_grad():
                self.latest = cheap, cheap.compute()
        return self.latest[1].as_strided(packed.size, packed.stride, packed.offset)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Run the forward of a tile that is recorded: tapes hold no result that `note_cheap_result` names."""
    noted = _local.recording = _Recording()
    try:
        with torch.autograd.graph.saved_tensors_hooks(noted.pack, noted.unpack):
            yield
    finally:
        _local.recording = None
        noted.results = {}


def is_recording() -> bool:
    """Whether the forward that runs in this thread is recorded."""
    return getattr(_local, "recording", None) is not None


def note_cheap_result(result: Tensor, compute: Callable[[], Tensor]) -> None:
    """Have a recording's tape compute a contiguous result again where autograd would keep it.

    Args:
        compute: returns it once more, in memory of its own; it must not keep the result.
    """
    is_alone = result.untyped_storage().nbytes() == result.nbytes
    if is_recording() and result.is_contiguous() and is_alone:
        _local.recording.results[_storage_of(result)] = _CheapResult(weakref.ref(result), compute)


def _storage_of(tensor: Tensor) -> int:
    """Return a number of the tensor's memory, which other memory may get when it is freed."""
    return tensor.untyped_storage()._cdata
