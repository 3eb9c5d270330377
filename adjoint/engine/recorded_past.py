"""Keys and values before a chunk, in a tile that is recorded (`engine.programs`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class RecordedPast:
    """A copy in the arena of keys or values before a chunk, in the place of a `storage.Past`.

    To `kernels.attention` it is a `PastInParts` with one part, which is this object itself: attention reads
    the keys there. Their cotangent takes their place, as each is read before its own cotangent is written.

    Attributes:
        tokens_done: number of tokens, from the first on, of which the recording writes the cotangent.
        is_unread: whether nobody has read the values since they were joined to a chunk's own.
    """

    rows: ClassVar[Sequence[int] | None] = None
    start: ClassVar[int] = 0
    visible: ClassVar[Sequence[int] | None] = None

    def __init__(self, values: Tensor, dim: int) -> None:
        self.values, self.dim, self.tokens_done, self.is_unread = values.data, dim, 0, False

    def __len__(self) -> int:
        return self.values.shape[self.dim]

    @property
    def in_parts(self) -> bool:
        return len(self) > 0

    @property
    def has_cotangent(self) -> bool:
        return self.tokens_done == len(self) > 0

    def parts(self) -> Sequence[RecordedPast]:
        return [self]

    def read(self) -> Tensor:
        self.is_unread = False
        return self.values

    def anchored(self, piece: Tensor) -> Tensor:
        return piece

    def kept_output(self, tokens: int) -> None:
        """Return None: a recording attends again."""

    def keep_output(self, out: Tensor, log: Tensor) -> None:
        """Keep nothing."""

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """Return the piece, if there is nothing before it."""
        if reach is not None or len(self):
            raise RuntimeError("attention with a window, or that is a model's own code")
        return piece.view_as(piece)

    def join_unread(self, piece: Tensor) -> Tensor:
        """Return a tensor like that of `storage.Past.join`, without the values."""
        self.is_unread = True
        shape = list(piece.shape)
        shape[self.dim] += len(self)
        return piece.new_full((), math.nan).expand(shape)

    def read_joined(self, piece: Tensor) -> Tensor:
        raise RuntimeError("attention with a mask, dropout or a bias")

    def add_cotangent(self, d: Tensor, start: int) -> None:
        """Write a cotangent of the tokens from `start` on, of which attention has read each once."""
        place = self.values.narrow(self.dim, start, d.shape[self.dim])
        if start != self.tokens_done or torch.promote_types(d.dtype, place.dtype) != place.dtype:
            raise RuntimeError("keys to which several layers attend, or with more digits than are stored")
        place.copy_(d)
        self.tokens_done += d.shape[self.dim]


def is_recorded(keys: Tensor) -> bool:
    """Whether these keys are joined to those before them in a tile that is recorded."""
    return isinstance(getattr(getattr(keys, "joined", None), "past", None), RecordedPast)
