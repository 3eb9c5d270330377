"""Fit the tapes and states that a forward keeps to a memory budget (`Exact(memory=…)`).

The memory of a chunk's tape and of its backward is measured, not estimated: the first chunk is run forward
and back once, and `LiveBytes` counts the storages that operators make while they live."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from adjoint.engine import binomial
from adjoint.errors import UserError
from adjoint.memory import memory_left

# On a CPU resident memory counts, which is more than tensors hold: bytes of libraries, and the share that the
# allocator leaves unused. Measured.
RESERVED_CPU = (32e6, 0.2)
MIN_STATES = 8  # at chunk edges: of fewer, those in between would be computed again too often
AUTO = 0.8  # the share of the memory left that "auto" takes: the optimizer's moments need some, too


@dataclasses.dataclass(frozen=True)
class ChunkMemory:
    """A chunk's memory in bytes.

    Attributes:
        tape: held after a forward that keeps its tape.
        backward_peak: the backward's peak on top of the tape, gradient sums included. With segments of layers
            it is on top of the tape of one of them, and of their inputs.
        inputs: of segments of layers, stored by the forward.
        columns: the tapes of segments of layers, in the order of the backward; () if all are one segment.
    """

    tape: int
    backward_peak: int
    inputs: int = 0
    columns: tuple[int, ...] = ()


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of living storages that operators make while the mode is on.

    `live` is the count now, `peak` the largest since `begin`. Memory made and freed inside an operator is not
    seen. (torch.distributed._tools has such a mode for modules; it is private and needs hooks on them.)"""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.bytes_of: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would have the first operator import the compiler: seconds, and 146 MB

    def begin(self) -> int:
        """Set `peak` to `live` and return it, in bytes."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":  # a shape alone
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.bytes_of:
            self.bytes_of[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self.bytes_of.pop(key, 0)


_measured: Any = WeakTensorKeyDictionary()


def measurements_of(parameters: list[Tensor]) -> dict[Hashable, ChunkMemory]:
    """Return the measurements of a model by kind of batch; the caller adds to them."""
    return _measured.setdefault(parameters[0], {})


def refuse_budget(memory: float | str | None, processes: str, setting: str = "") -> None:
    """Raise a UserError if there is a memory budget, where `processes` must run the same chunks.

    Args:
        setting: begins the message, such as "sequence_group: ".
    """
    if memory is not None:
        raise UserError(
            f"{setting}memory= fits chunks to what one process has left, but {processes} must run the same "
            "chunks: give chunk_size instead"
        )


def room_for_chunks(memory: float | str, stored_bytes: int, device: torch.device) -> float:
    """Return the bytes left for tapes, states at chunk edges and the backward.

    Args:
        memory: budget in bytes, on top of memory already allocated; "auto" for most of what is left.
        stored_bytes: bytes stored for the whole sequence besides these (`Executor.slab_bytes`).
    """
    budget = budget_bytes(memory, device)
    if device.type == "cpu":
        fixed, share = RESERVED_CPU
        budget = (budget - fixed) / (1 + share)
    return budget - stored_bytes


def budget_bytes(memory: float | str, device: torch.device) -> float:
    """Return a budget in bytes; of "auto" it is most of the memory that is left."""
    return AUTO * memory_left(device) if isinstance(memory, str) else memory


def tapes_of_segments(room: float, measured: ChunkMemory, chunks: int, state: int) -> int:
    """Return how many tapes of a segment of layers on a chunk the forward keeps in `room` bytes, 1 at least.

    The backward takes each segment through all chunks, the top one first; each tape that it finds saves
    computing the segment on that chunk again. Segments' inputs and states at all edges are stored anyway.

    Args:
        measured: as in `tapes_and_states`. chunks: their number. state: bytes of a state.
    """
    left, tapes = room - chunks * (measured.inputs + state) - measured.backward_peak, 0
    for column in measured.columns:
        fitting = min(chunks, max(0, int(left / max(column, 1))))  # an embedding's takes nothing
        tapes, left = tapes + fitting, left - fitting * column
        if fitting < chunks:
            break
    return max(1, tapes)


def tapes_and_states(
    room: float, measured: ChunkMemory, sizes: list[int], state: int, checkpoints: int | None = None
) -> tuple[int, int]:
    """Return how many tapes and how many states at chunk edges to store in `room` bytes.

    A tape saves computing its chunk again; so does a state, for the chunks up to it. Of all pairs that fit,
    these leave the fewest chunks to be computed again (`binomial`); of equals, those with most states.
    Whatever the room, there is one tape, as the last chunk always keeps its own, and as many states as take
    the memory of a tape, or `MIN_STATES`: fewer would save little beside it, and cost a time that grows fast.

    Args:
        measured: the memory of a chunk of sizes[0] tokens. sizes: tokens of each chunk.
        state: bytes of a state. checkpoints: the number of states if it is given, else it is chosen.
    """
    left, chunks = room - measured.backward_peak, len(sizes)
    least = MIN_STATES if state == 0 else max(MIN_STATES, int(measured.tape / state))
    best: tuple[int, int, int] | None = None
    for tapes, size in enumerate(reversed(sizes), start=1):
        left -= measured.tape * size / sizes[0]
        edges = max(1, chunks - tapes)  # besides those of the later tapes, which take a place each
        places = edges if state == 0 else int(max(left, 0) / state) - (tapes - 1)
        states = min(edges, max(least, places)) if checkpoints is None else checkpoints
        if best is not None and (left < 0 or places < min(states, edges)):
            break
        again = binomial.recomputed_chunks(chunks - tapes + 1, states)
        if best is None or again < best[0]:
            best = again, tapes, states
    assert best is not None
    return best[1:]
