"""Storage of a forward's results for the backward.

It has states at chunk edges (`Edges`), append-only states (`Slab`, `Past`), and copies in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.grid import EngineSpec
from adjoint.engine.tile import Cotangents
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State

ALIGNED = 16  # elements: each tensor of a packed state begins on a multiple, aligned as if it were alone


class Packing:
    """The layout of a state's tensors in one flat tensor, for a message or a row of `Edges`.

    Args:
        like: a state with the shapes and the device of the states to pack.
        dtype: dtype of the flat tensor.
    """

    def __init__(self, like: State, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = [s.shape for s in like], dtype
        sizes = [-(-s.numel() // ALIGNED) * ALIGNED for s in like]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = sum(sizes)
        self.device = like[0].device if like else torch.device("cpu")

    def empty(self) -> Tensor:
        """Return an empty flat tensor for a state."""
        return room((self.size,), self.dtype, self.device)

    def pack(self, state: Cotangents, out: Tensor) -> Tensor:
        """Write a state or its cotangents, None as zeros, into the flat tensor `out`; return `out`."""
        for place, s in zip(self.unpack(out), state, strict=True):
            place.zero_() if s is None else place.copy_(s, non_blocking=True)
        return out

    def unpack(self, flat: Tensor) -> State:
        """Return views of a packed state's tensors."""
        # .data: to autograd, writing the next row must not count as a change of the rows before it
        flat = flat.data
        pairs = zip(self.starts, self.shapes, strict=True)
        return tuple(flat[a : a + shape.numel()].view(shape) for a, shape in pairs)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool = False) -> Tensor:
    """Return an empty tensor.

    With `host` it is in host memory, pinned if there is a GPU: then the host does not wait for copies, which
    run between the kernels of the stream."""
    if host:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    return torch.empty(shape, dtype=dtype, device=device)


class Edges:
    """Memory for one stage's packed states at chunk edges, a row each.

    It is allocated at once, and rows are known by their numbers: small blocks that stay between large ones
    that are freed, even views of rows, would fragment the heap. States are copied into it, as a state may be
    a view that keeps a whole chunk's memory.

    Args:
        host: whether the memory is the host's.

    Attributes:
        rows: the number of states for which there is room; it may be set until the first one is written.
    """

    def __init__(self, packing: Packing, host: bool) -> None:
        self.packing, self.rows, self.host = packing, 0, host
        self.memory: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Make all rows free."""
        self.used, self.released = 0, list[int]()

    def row(self) -> int:
        """Take a free row and return its number."""
        if self.released:
            return self.released.pop()
        self.used += 1
        return self.used - 1

    def release(self, row: int) -> None:
        """Make a row free again: no tape may hold a view of it."""
        self.released.append(row)

    def at(self, row: int) -> Tensor:
        """Return a row, to be written or read."""
        if self.memory is None:
            shape = self.rows, self.packing.size
            self.memory = room(shape, self.packing.dtype, self.packing.device, self.host)
        return self.memory[row]


class PerChunk:
    """A number for each chunk, in one tensor (chunks,), which does not fragment the heap (see `Edges`).

    Attributes:
        written: the chunks whose number has been set.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks, self.written = chunks, set[int]()
        self.memory: Tensor | None = None

    def __setitem__(self, chunk: int, number: Tensor) -> None:
        if self.memory is None:
            self.memory = torch.empty(self.chunks, dtype=number.dtype, device=number.device)
        self.memory[chunk] = number.detach()
        self.written.add(chunk)

    def get(self, chunk: int) -> Tensor | None:
        """Return a chunk's number, a view, or None if it has not been set."""
        return None if self.memory is None or chunk not in self.written else self.memory[chunk]

    def select(self, chunks: Sequence[int]) -> Tensor:
        """Return the numbers of these chunks, all of which have been set."""
        assert self.memory is not None
        return self.memory[list(chunks)]


class Slab:
    """An append-only tensor of a state, such as attention's keys, stored once for the whole sequence.

    A cotangent of the same size, to which chunks add in the backward, is stored with it. Its tokens are
    numbered as the sequence's; negative numbers are the tokens of `initial`. Memory is allocated when the
    first piece is written, in the piece's precision: under autocast less than that of `initial`, which may
    have no tokens.

    Args:
        initial: the tensor before the sequence; it may have no tokens.
        dim: the dimension along which it grows. tokens: the sequence's length.
        host: whether values and cotangents are in host memory; reads then copy to the device. Tokens are
            then the first dimension, so that a piece is one block, which is copied while the device computes.
    """

    def __init__(self, initial: Tensor, dim: int, tokens: int, host: bool = False) -> None:
        self.dim, self.along, self.host = dim, 0 if host else dim, host
        self.before, self.device, self.initially = initial.shape[dim], initial.device, initial
        self.shape = list(initial.shape)
        del self.shape[dim]
        self.shape.insert(self.along, self.before + tokens)
        self.written: Tensor | None = None
        self.cotangents: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """Values of all tokens; tokens that are not written yet are undefined."""
        return self._allocate(self.initially.dtype) if self.written is None else self.written

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """Allocate the values and write the initial ones."""
        self.written = room(self.shape, dtype, self.device, self.host)
        self._put(self.written, self.initially, -self.before)
        return self.written

    def most_bytes(self) -> int:
        """Return the bytes of values and cotangents, at most."""
        dtype = self.initially.dtype
        return math.prod(self.shape) * (dtype.itemsize + accumulate_dtype(dtype).itemsize)

    def _put(self, memory: Tensor, piece: Tensor, start: int) -> None:
        """Write a piece into `memory` from token `start` on."""
        piece = piece.movedim(self.dim, self.along)
        place = memory.narrow(self.along, self.before + start, piece.shape[self.along]).data
        place.copy_(piece.to(memory.dtype).contiguous() if self.host else piece, non_blocking=True)

    def _get(self, memory: Tensor, start: int, stop: int) -> Tensor:
        """Return the tokens [start, stop) of `memory`: a view, or from the host a copy."""
        # .data: to autograd, later writes must not count as a change of what was read before
        piece = memory.narrow(self.along, self.before + start, stop - start).data
        return piece.to(self.device, non_blocking=True).movedim(self.along, self.dim)

    def write(self, piece: Tensor, start: int) -> None:
        """Store the values of a piece that begins at token `start`."""
        if self.written is None:
            dtype = self.initially.dtype
            self._allocate(torch.promote_types(dtype, piece.dtype) if self.before else piece.dtype)
        self._put(self.values, piece, start)

    def between(self, start: int, stop: int) -> Tensor:
        """Return the values of the tokens [start, stop): a view, or from the host a copy."""
        return self._get(self.values, start, stop)

    def begin(self, d_final: Tensor | None) -> None:
        """Begin the backward: set all cotangents to the final state's, or zero for None."""
        dtype = accumulate_dtype(self.values.dtype)
        if d_final is None and not self.host:  # zeros take no memory until they are written
            self.cotangents = torch.zeros_like(self.values, dtype=dtype)
            return
        self.cotangents = room(self.values.shape, dtype, self.device, self.host)
        if d_final is None:
            self.cotangents.zero_()
        else:
            self._put(self.cotangents, d_final, -self.before)

    def gathered(self, start: int, stop: int) -> Tensor:
        """Return the cotangent of the tokens [start, stop), to which all later chunks must have added."""
        assert self.cotangents is not None
        return self._get(self.cotangents, start, stop).to(self.values.dtype)

    def gather(self, d_past: Tensor, start: int, rows: slice = slice(None)) -> None:
        """Add a chunk's cotangent of the tokens from `start` on, in some rows."""
        assert self.cotangents is not None
        sums = self._get(self.cotangents, start, start + d_past.shape[self.dim])
        sums[rows].add_(d_past)
        if self.host:
            self._put(self.cotangents, sums, start)

    def initial(self) -> Tensor:
        """Return the cotangent of `initial`."""
        return self.gathered(-self.before, 0)

    def final(self) -> Tensor:
        """Return the tensor after the sequence, `initial` included, in its precision."""
        return self.between(-self.before, self.shape[self.along] - self.before).to(self.initially.dtype)


@dataclass(frozen=True)
class Past:
    """The tokens before a chunk, which a stage gets for an append-only tensor of its state.

    Attributes:
        start: the chunk's first token.
        begin: the first visible token: its document's, or the first of the slab.
        first_grad_token: the first token that gets a cotangent from this chunk; `start` if none does.
        visible: per row, how many tokens before the chunk belong to its first token's document; None if the
            batch has no `seq_idx`.
        starts: then also, per row, where in the chunk other documents begin.
    """

    slab: Slab
    start: int
    begin: int
    first_grad_token: int
    visible: Sequence[int] | None = None
    starts: Sequence[Sequence[int]] | None = None

    def __len__(self) -> int:
        return self.start - self.begin

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """Return the past, or its last `reach` tokens, followed by the chunk's own piece.

        It is a view of the slab. The backward adds the past's cotangent to the slab and hands on the piece's
        alone, so the stage must return the piece as its new state."""
        begin = self.begin if reach is None else max(self.begin, self.start - reach)
        return _Join.apply(piece, self, begin)

    def gather(self, d: Tensor, start: int) -> None:
        """Add a cotangent of the past's tokens from `start` on, but for tokens before `first_grad_token`."""
        dim, first = self.slab.dim, max(start, self.first_grad_token)
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
    """Return a copy in host memory, for which the host does not wait."""
    return room(tensor.shape, tensor.dtype, tensor.device, host=True).copy_(tensor, non_blocking=True)


def by_itself(state: Tensor | None) -> Tensor | None:
    """Return the tensor or None; a copy if it is a view into memory at least twice as large.

    The view would keep that memory, such as a chunk's, alive."""
    if state is None or state.untyped_storage().nbytes() < 2 * state.nbytes:
        return state
    return state.clone()


def apart_from(memory: Tensor, state: State) -> State:
    """Return the state with copies of tensors that are views of `memory`, which will be written to.

    A layer may hand on the state it got, or a view of it."""
    place = memory.untyped_storage()._cdata
    return tuple(s.clone() if s.untyped_storage()._cdata == place else s for s in state)


def recurrent(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return a state's recurrent tensors; `grows` is `Stage.grows`."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is None)


def growing(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return a state's append-only tensors."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is not None)


def joined(recurrent: Iterable, growing: Iterable, grows: Sequence[int | None]) -> tuple:
    """Return the whole state, made of its recurrent and its append-only tensors."""
    recurrent_entries, growing_entries = iter(recurrent), iter(growing)
    return tuple(next(recurrent_entries if dim is None else growing_entries) for dim in grows)


def stores_on_host(spec: EngineSpec, device: torch.device) -> bool:
    """Whether stored states and inputs are in host memory instead of the device's."""
    return spec.storage.offload and device.type == "cuda"
