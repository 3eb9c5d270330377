"""The arena: one block of memory, from which all recordings of tiles read and to which they write.

A kind of tile has its places in it (`Slots`), from both ends on: only the last replay's values are there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.engine.tile import MAX_COMPENSATED_NUMEL

ALIGNMENT = 256  # bytes, as of a tensor that torch allocates on a GPU
WORD = 4  # bytes that copies of any dtype are counted in


class Spec(NamedTuple):
    """A tensor's shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def specs_of(tensors: Iterable[Tensor | None]) -> tuple[Spec | None, ...]:
    return tuple([None if t is None else Spec(t.shape, t.dtype) for t in tensors])


class Places:
    """Consecutive places in an `Arena` from byte `start` on, one per tensor; None for one that is absent."""

    def __init__(self, specs: Sequence[Spec | None], start: int) -> None:
        self.specs, self.start, self.stop = specs, start, start
        self.offsets = list[int]()
        for spec in specs:
            self.offsets.append(self.stop)
            if spec is not None:
                self.stop += math.ceil(spec.nbytes / ALIGNMENT) * ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor | None]:
        """Return the tensors in an arena's `memory` (bytes,), with version counters of their own."""
        pairs = zip(self.specs, self.offsets, strict=True)
        return [
            None if spec is None else memory[a : a + spec.nbytes].view(spec.dtype).view(spec.shape).data
            for spec, a in pairs
        ]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes of all that a kind of tile reads and writes, as the first ones have shown.

    Attributes:
        weights: of the tensors of the stage that it reads, if these are copied into the arena.
        inputs: x, the recurrent state, keys and values before the chunk, and what it reads of the chunk.
        outputs: y and the state after the chunk.
        cotangents: of y and of the state after the chunk.
        sums: of the parameters' gradients.
    """

    weights: tuple[Spec | None, ...]
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    cotangents: tuple[Spec | None, ...] = ()
    sums: tuple[Spec | None, ...] = ()


class Slots:
    """A kind's places in the arena, and the tensors there: the attributes of `Shapes`, and `excess`.

    `excess` is what rounding has added to the sums that are compensated (`tile.Gradients`). What a pullback
    alone needs is at the arena's end, so that a head's sums stay while other tiles run forward. Weights and
    sums are at the ends themselves: other kinds of tiles of the same stage find them there. Two values of
    which one is read before the other is written share a place: y with its cotangent, and the inputs with
    theirs (`results`).

    Attributes:
        front: bytes from the arena's first on. back: bytes up to its last one. nbytes: both.
    """

    def __init__(self, shapes: Shapes, memory: Tensor | None = None) -> None:
        excess = tuple([s if s is not None and is_compensated(s) else None for s in shapes.sums])
        dy, d_after = shapes.cotangents[:1], shapes.cotangents[1:]
        weights = Places(shapes.weights, 0)
        inputs = Places(shapes.inputs, weights.stop)
        y, dy_place = (Places(s, inputs.stop) for s in (shapes.outputs[:1], dy))
        after = Places(shapes.outputs[1:], max(y.stop, dy_place.stop))
        self.back = Places((*d_after, *shapes.sums, *excess), 0).stop
        self.shapes, self.front = shapes, after.stop
        self.nbytes = self.front + self.back
        if memory is not None:
            self.memory, self.back_start = memory, memory.numel() - self.back
            later = Places(d_after, self.back_start)
            sums = Places(shapes.sums, later.stop)
            self.sums_start, last = sums.start, Places(excess, sums.stop)
            self.weights, self.inputs, self.after = (
                without_nones(places.views(memory)) for places in (weights, inputs, after)
            )
            self.outputs = [*without_nones(y.views(memory)), *self.after]
            self.cotangents = [*dy_place.views(memory), *later.views(memory)]
            self.sums, self.excess = (places.views(memory) for places in (sums, last))
            self.results = without_nones(inputs.views(memory))  # with version counters of their own

    def shares_ends(self, other: Slots | None) -> bool:
        """Whether weights and sums are in the same places as those of another kind of tile."""
        if other is None or self.memory is not other.memory:
            return False
        a, b = self.shapes, other.shapes
        return (a.weights, a.sums, a.cotangents[1:]) == (b.weights, b.sums, b.cotangents[1:])


def copies_by_one_launch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made by one launch."""
    copies = [torch.empty_like(t) for t in tensors]
    copy_all(copies, tensors)
    return copies


def without_nones(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def is_compensated(spec: Spec) -> bool:
    """Whether `Gradients` compensates a sum for rounding from the first chunks on."""
    return len(spec.shape) < 2 and math.prod(spec.shape) <= MAX_COMPENSATED_NUMEL


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors by one launch for all that keep their dtypes, and one for all that change it alike.

    The others are copied one by one: those that are not contiguous."""
    pairs: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        dtypes = target.dtype, source.dtype
        if not target.numel():
            continue
        if not source.is_contiguous():
            target.copy_(source, non_blocking=True)
        elif dtypes[0] == dtypes[1] and _has_words(source):
            group = pairs.setdefault(None, ([], []))
            group[0].append(_words(target))
            group[1].append(_words(source))
        else:
            group = pairs.setdefault(dtypes, ([], []))
            group[0].append(target)
            group[1].append(source)
    for group in pairs.values():
        torch._foreach_copy_(*group)


def copy_pairs(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> None:
    """Copy to the first of each pair from the second, as a part of a recording."""
    targets, sources = list[Tensor](), list[Tensor]()
    for target, source in pairs:
        assert target is not None and source is not None
        targets.append(target)
        sources.append(source)
    if targets:
        torch._foreach_copy_(targets, sources)


def _has_words(tensor: Tensor) -> bool:
    size = tensor.dtype.itemsize
    return tensor.numel() > 0 and tensor.nbytes % WORD == 0 and tensor.storage_offset() * size % WORD == 0


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.int32)
