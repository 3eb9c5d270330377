"""What is kept of a forward: states at the chunks' edges, what grows with the sequence, inputs on the
host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.grid import Scheme
from adjoint.engine.tile import Cotangents
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State

ALIGNED = 16  # elements: each tensor of a packed state begins on a multiple of it, as it would by itself


class Packing:
    """A state's tensors as one flat tensor: a message, or a row of the memory for edges.

    Args:
        like: a state of the sizes, dtypes and device to come.
        dtype: of the flat tensor.
    """

    def __init__(self, like: State, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = [s.shape for s in like], dtype
        sizes = [-(-s.numel() // ALIGNED) * ALIGNED for s in like]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = sum(sizes)
        self.device = like[0].device if like else torch.device("cpu")

    def empty(self) -> Tensor:
        """Room for a state."""
        return room((self.size,), self.dtype, self.device)

    def pack(self, state: Cotangents, out: Tensor) -> Tensor:
        """Writes a state, or its cotangents with zeros in the place of absent ones."""
        for place, s in zip(self.unpack(out), state, strict=True):
            place.zero_() if s is None else place.copy_(s, non_blocking=True)
        return out

    def unpack(self, flat: Tensor) -> State:
        """Views of a packed state's tensors."""
        # .data: rows of one memory are written one after the other, and that is no change to those before
        # them
        flat = flat.data
        pairs = zip(self.starts, self.shapes, strict=True)
        return tuple(flat[a : a + shape.numel()].view(shape) for a, shape in pairs)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool = False) -> Tensor:
    """An empty tensor; on the host pinned where there is a GPU, so that copies run behind the computation, in
    stream order."""
    if host:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    return torch.empty(shape, dtype=dtype, device=device)


class Edges:
    """The packed states of one stage at the edges of chunks, in memory taken at once: small blocks that stay,
    put between large ones that go, would break up the heap. A state may be a view of a whole chunk, so it is
    copied.

    Args:
        rows: how many there will be.
        host: whether they are in host memory.
    """

    def __init__(self, packing: Packing, rows: int, host: bool) -> None:
        self.packing, self.rows, self.host = packing, rows, host
        self.memory: Tensor | None = None
        self.used = 0

    def row(self) -> Tensor:
        """Room for the next edge."""
        if self.memory is None:
            shape = self.rows, self.packing.size
            self.memory = room(shape, self.packing.dtype, self.packing.device, self.host)
        self.used += 1
        return self.memory[self.used - 1]


class Slab:
    """An append-only tensor of a state, such as attention's keys: kept once, with the cotangents gathered so
    far.

    Args:
        initial: what is there before the sequence, perhaps nothing.
        dim: along which it grows. tokens: of the sequence.
        host: whether it is in host memory, and its cotangents: what is asked for is copied to the device.
            Token by token there, so that a piece is one block: copies of several wait for the device.
    """

    def __init__(self, initial: Tensor, dim: int, tokens: int, host: bool = False) -> None:
        self.dim, self.along, self.host = dim, 0 if host else dim, host
        self.before, self.device = initial.shape[dim], initial.device
        shape = list(initial.shape)
        del shape[dim]
        shape.insert(self.along, self.before + tokens)
        self.values = room(shape, initial.dtype, self.device, host)
        self.write(initial, -self.before)
        self.cotangents: Tensor | None = None

    def _put(self, memory: Tensor, piece: Tensor, start: int) -> None:
        """Writes a piece that begins at token `start` of the sequence, which may be before it."""
        piece = piece.movedim(self.dim, self.along)
        place = memory.narrow(self.along, self.before + start, piece.shape[self.along]).data
        place.copy_(piece.to(memory.dtype).contiguous() if self.host else piece, non_blocking=True)

    def _get(self, memory: Tensor, start: int, stop: int) -> Tensor:
        """The tokens [start, stop), on the device a view of them."""
        # .data: what is written later is no change to what was read before
        piece = memory.narrow(self.along, self.before + start, stop - start).data
        return piece.to(self.device, non_blocking=True).movedim(self.along, self.dim)

    def write(self, piece: Tensor, start: int) -> None:
        """Puts a piece in its place, that begins at token `start` of the sequence."""
        self._put(self.values, piece, start)

    def between(self, start: int, stop: int) -> Tensor:
        """The tokens [start, stop) of the sequence, on the device a view of them; a negative start is before
        it."""
        return self._get(self.values, start, stop)

    def begin(self, d_final: Tensor | None) -> None:
        """Lets the cotangents begin at those of the final state."""
        dtype = accumulate_dtype(self.values.dtype)
        if d_final is None and not self.host:  # where nothing is gathered, nothing is touched
            self.cotangents = torch.zeros_like(self.values, dtype=dtype)
            return
        self.cotangents = room(self.values.shape, dtype, self.device, self.host)
        if d_final is None:
            self.cotangents.zero_()
        else:
            self._put(self.cotangents, d_final, -self.before)

    def gathered(self, start: int, stop: int) -> Tensor:
        """The cotangent of the piece [start, stop), whole once all later chunks are done."""
        assert self.cotangents is not None
        return self._get(self.cotangents, start, stop).to(self.values.dtype)

    def gather(self, d_past: Tensor, start: int) -> None:
        """Adds what a chunk says of the tokens from `start` on."""
        assert self.cotangents is not None
        sums = self._get(self.cotangents, start, start + d_past.shape[self.dim])
        if self.host:
            self._put(self.cotangents, sums + d_past, start)
        else:
            sums.add_(d_past)

    def initial(self) -> Tensor:
        """The cotangent of what was there before the sequence."""
        return self.gathered(-self.before, 0)

    def final(self) -> Tensor:
        """What is there after the sequence."""
        return self.between(-self.before, self.values.shape[self.along] - self.before)


@dataclass(frozen=True)
class Past:
    """What a chunk sees of an append-only state.

    Attributes:
        start: the chunk's first token.
        begin: the first token that it sees: of its document, or of what is there before the sequence.
        follows: the first token of which it says a cotangent; `start` where none is carried.
        visible: of each row, how many tokens before the chunk are of its first token's document; None where
            documents are not told apart.
    """

    slab: Slab
    start: int
    begin: int
    follows: int
    visible: Sequence[int] | None = None

    def __len__(self) -> int:
        return self.start - self.begin

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """The past, or its last `reach` tokens, with the chunk's own piece behind it: a view of the slab. In
        the backward the past's cotangent goes to the slab's, and only the piece's is handed on: the piece
        must be returned as the new state."""
        begin = self.begin if reach is None else max(self.begin, self.start - reach)
        return _Join.apply(piece, self, begin)

    def gather(self, d: Tensor, start: int) -> None:
        """Adds a cotangent of the past's tokens from `start` on, of those that carry any."""
        dim, first = self.slab.dim, max(start, self.follows)
        stop = min(start + d.shape[dim], self.start)
        if first < stop:
            self.slab.gather(d.narrow(dim, first - start, stop - first), first)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, past: Past, begin: int) -> Tensor:
        ctx.past, ctx.begin = past, begin
        past.slab.write(piece, past.start)
        return past.slab.between(begin, past.start + piece.shape[past.slab.dim])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        past, begin, dim = ctx.past, ctx.begin, ctx.past.slab.dim
        past.gather(d, begin)
        return d.narrow(dim, past.start - begin, d.shape[dim] - (past.start - begin)), None, None


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, made behind the computation."""
    return room(tensor.shape, tensor.dtype, tensor.device, host=True).copy_(tensor, non_blocking=True)


def by_itself(state: Tensor | None) -> Tensor | None:
    """A tensor of a state, or None, without what it may be the last tokens of: a chunk's memory."""
    if state is None or state.untyped_storage().nbytes() < 2 * state.nbytes:
        return state
    return state.clone()


def recurrent(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """The recurrent tensors of a state."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is None)


def growing(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """The append-only tensors of a state."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is not None)


def joined(recurrent: Iterable, growing: Iterable, grows: Sequence[int | None]) -> tuple:
    """The whole state, from its recurrent and its append-only parts."""
    here, past = iter(recurrent), iter(growing)
    return tuple(next(here if dim is None else past) for dim in grows)


def lies_on_host(scheme: Scheme, device: torch.device) -> bool:
    """Whether what is kept is in host memory, not the device's."""
    return scheme.offload and device.type == "cuda"
