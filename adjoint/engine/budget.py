"""How many chunks a forward may leave linearised within a memory budget.

What a chunk's tape takes, and what its backward takes beside it, is not estimated: the first chunk is run
forward and back once, and the storages that operators make are noted while they live."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from adjoint.memory import memory_left

# What a process takes beside what tensors hold, where resident memory is what counts: bytes of libraries, and
# what the allocator leaves unused, as a share. Measured.
RESERVED_CPU = (32e6, 0.2)
AUTO = 0.8  # of the memory that is left, what "auto" takes: the optimizer's moments need some, too


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes of a chunk.

    Attributes:
        tape: what stays of a linearised forward.
        beside: what the backward takes on top of the tape at its peak, gradient sums included.
    """

    tape: int
    beside: int


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still alive: `live` now, `peak` at most since
    `begin`. What is made and freed inside an operator is not seen. (torch.distributed._tools has one for
    modules; it is private and needs hooks on them.)"""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it the first operator would import the compiler: seconds, and 146 MB

    def begin(self) -> int:
        """Lets the peak begin at what is alive now, and gives it."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self.known.pop(key, 0)


_measured: Any = WeakTensorKeyDictionary()


def of_model(parameters: list[Tensor]) -> dict[Hashable, Measured]:
    """What has been measured of the model with these parameters, by kind of batch."""
    return _measured.setdefault(parameters[0], {})


def room_for_tapes(memory: float | str, kept: int, device: torch.device) -> float:
    """Bytes that tapes and the backward may take.

    Args:
        memory: bytes that forward and backward may take beside what is there before them; "auto" for most of
            what is left.
        kept: bytes that are kept of the whole sequence, whatever is linearised.
    """
    budget = AUTO * memory_left(device) if isinstance(memory, str) else memory
    if device.type == "cpu":
        fixed, share = RESERVED_CPU
        budget = (budget - fixed) / (1 + share)
    return budget - kept


def tapes_within(room: float, measured: Measured, sizes: list[int]) -> int:
    """How many chunks, of the last ones, may stay linearised; 1 at least, as the last one always does.

    Args:
        sizes: tokens of the chunks; `measured` is one as long as the first.
    """
    left, tapes = room - measured.beside, 0
    for size in reversed(sizes):
        left -= measured.tape * size / sizes[0]
        if left < 0:
            break
        tapes += 1
    return max(tapes, 1)
