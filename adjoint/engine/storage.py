"""Storage for what the forward leaves to the backward.

Recurrent states are copied to chunk edges (`Edges`). Append-only ones are stored once for the whole sequence
(`Slab`), and a chunk sees the part before it (`Past`). Both can be in host memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from adjoint.engine.grid import EngineSpec
from adjoint.engine.tile import Cotangents
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State

# Elements. Each tensor of a packed state begins at a multiple of this, so that in float32 it is aligned to 64
# bytes like a tensor that torch allocates on a CPU.
PACKING_ALIGNMENT = 16


class Packing:
    """The layout of a state's tensors in one flat tensor, for a message or a row of `Edges`.

    Args:
        like: a state with the shapes and the device of the states to pack.
        dtype: dtype of the flat tensor.
    """

    def __init__(self, like: State, dtype: torch.dtype) -> None:
        self.shapes, self.dtype = [s.shape for s in like], dtype
        sizes = [math.ceil(s.numel() / PACKING_ALIGNMENT) * PACKING_ALIGNMENT for s in like]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.size = sum(sizes)
        self.device = like[0].device if like else torch.device("cpu")

    def empty(self) -> Tensor:
        """Return an uninitialised flat tensor for a state."""
        return allocate((self.size,), self.dtype, self.device)

    def pack(self, state: Cotangents, out: Tensor) -> Tensor:
        """Write a state or its cotangents, None as zeros, into the flat tensor `out`; return `out`."""
        for view, s in zip(self.unpack(out), state, strict=True):
            view.zero_() if s is None else view.copy_(s, non_blocking=True)
        return out

    def unpack(self, flat: Tensor) -> State:
        """Return views of a packed state's tensors."""
        # .data has a version counter of its own. With the shared one, writing a row of `Edges` would make
        # autograd refuse the backward of every tape that has saved a view of another row.
        flat = flat.data
        pairs = zip(self.starts, self.shapes, strict=True)
        return tuple(flat[a : a + shape.numel()].view(shape) for a, shape in pairs)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, host: bool = False) -> Tensor:
    """Return an uninitialised tensor on `device` or, with `host`, in host memory.

    If there is a GPU, host memory is pinned: only then are copies with non_blocking=True asynchronous, queued
    on the stream in order with the kernels."""
    if host:
        return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    return torch.empty(shape, dtype=dtype, device=device)


class Edges:
    """Storage for one stage's packed recurrent states, one row of a single tensor per chunk edge.

    States are copied into the rows, because a state may be a view that keeps a whole chunk's activations
    alive. The rows are allocated at once: a small tensor per edge would survive between a chunk's large
    tensors, and leave holes in the heap when these are freed. For the same reason callers hold row numbers,
    not views.

    Args:
        host: whether the rows are in host memory.

    Attributes:
        capacity: the number of rows to allocate. It may be set until the first state is written.
    """

    def __init__(self, packing: Packing, host: bool) -> None:
        self.packing, self.capacity, self.host = packing, 0, host
        self.memory: Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Free all rows."""
        self.rows_used, self.released = 0, list[int]()

    def take_row(self) -> int:
        """Reserve a free row and return its number."""
        if self.released:
            return self.released.pop()
        self.rows_used += 1
        return self.rows_used - 1

    def release(self, row: int) -> None:
        """Free a row for the next state. A tape that still reads it would see that state instead."""
        self.released.append(row)

    def view(self, row: int) -> Tensor:
        """Return a row as a flat tensor, to be written or read."""
        if self.memory is None:
            shape = self.capacity, self.packing.size
            self.memory = allocate(shape, self.packing.dtype, self.packing.device, self.host)
        return self.memory[row]


class ChunkLosses:
    """The summed loss of each chunk, in one tensor (chunks,): see `Edges` on small tensors.

    Attributes:
        written: the chunks whose loss has been set.
    """

    def __init__(self, chunks: int) -> None:
        self.chunks, self.written = chunks, set[int]()
        self.memory: Tensor | None = None

    def __setitem__(self, chunk: int, loss: Tensor) -> None:
        if self.memory is None:
            self.memory = torch.empty(self.chunks, dtype=loss.dtype, device=loss.device)
        self.memory[chunk] = loss.detach()
        self.written.add(chunk)

    def get(self, chunk: int) -> Tensor | None:
        """Return a view of a chunk's loss, or None if it has not been set."""
        return None if self.memory is None or chunk not in self.written else self.memory[chunk]

    def select(self, chunks: Sequence[int]) -> Tensor:
        """Return the losses of these chunks, all of which have been set."""
        assert self.memory is not None
        return self.memory[list(chunks)]


class Slab:
    """An append-only tensor of a state, such as attention's keys, stored once for the whole sequence.

    It has the values of all tokens and, from the backward on, their cotangents, to which every later chunk
    adds. Token 0 is the sequence's first; the tokens of `initial` have negative numbers. All methods take and
    return tensors that grow along `dim`, on the device, wherever the slab is.

    Args:
        initial: the tensor before the sequence; it may have no tokens.
        dim: the dimension along which it grows.
        tokens: the sequence's length.
        host: whether values and cotangents are in host memory. Tokens are then the first dimension, so that a
            piece is one block, which can be copied while the device computes.

    Attributes:
        memory: the values, None until the first ones are written: only then is their dtype known, which
            under autocast is not that of `initial`.
        is_initial_trained: whether `initial` gets a gradient.
        stored_dim: the dimension of `memory` along which tokens are stored.
    """

    def __init__(self, initial: Tensor, dim: int, tokens: int, host: bool = False) -> None:
        self.initial, self.dim, self.host, self.device = initial.detach(), dim, host, initial.device
        self.is_initial_trained = initial.requires_grad
        self.stored_dim = 0 if host else dim
        self.initial_tokens = initial.shape[dim]
        self.shape = list(initial.shape)
        del self.shape[dim]
        self.shape.insert(self.stored_dim, self.initial_tokens + tokens)
        self.memory: Tensor | None = None
        self.cotangents: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The values as they are stored, allocated if they are not yet; undefined for unwritten tokens."""
        return self._allocate(self.initial.dtype) if self.memory is None else self.memory

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        """Allocate the values and write the initial ones."""
        self.memory = allocate(self.shape, dtype, self.device, self.host)
        self._copy_in(self.memory, self.initial, -self.initial_tokens)
        return self.memory

    def max_bytes(self) -> int:
        """Return the bytes of values and cotangents in the dtype of `initial`: under autocast, at most."""
        dtype = self.initial.dtype
        return math.prod(self.shape) * (dtype.itemsize + accumulate_dtype(dtype).itemsize)

    def _copy_in(self, memory: Tensor, piece: Tensor, start: int) -> None:
        """Copy a piece to the tokens of `memory` from `start` on."""
        piece = piece.movedim(self.dim, self.stored_dim)
        out = memory.narrow(self.stored_dim, self.initial_tokens + start, piece.shape[self.stored_dim]).data
        # Between GPU and host torch copies anything but contiguous tensors of one dtype through temporaries,
        # for which the host waits.
        out.copy_(piece.to(memory.dtype).contiguous() if self.host else piece, non_blocking=True)

    def _read(self, memory: Tensor, start: int, stop: int) -> Tensor:
        """Return the tokens [start, stop) of `memory`: a view, or from the host a copy."""
        # .data: to autograd, later writes must not count as a change of what was read before
        piece = memory.narrow(self.stored_dim, self.initial_tokens + start, stop - start).data
        return piece.to(self.device, non_blocking=True).movedim(self.stored_dim, self.dim)

    def write(self, piece: Tensor, start: int) -> None:
        """Write the values of a piece that begins at token `start`."""
        if self.memory is None:
            # Initial tokens keep their precision; without any, the first piece decides (autocast's dtype).
            dtype = piece.dtype
            if self.initial_tokens:
                dtype = torch.promote_types(self.initial.dtype, dtype)
            self._allocate(dtype)
        self._copy_in(self.values, piece, start)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the values of the tokens [start, stop): a view, or from the host a copy."""
        return self._read(self.values, start, stop)

    def begin_backward(self, d_final: Tensor | None) -> None:
        """Set the cotangents of all tokens to those of the final tensor; None stands for zeros."""
        dtype = accumulate_dtype(self.values.dtype)
        if d_final is None and not self.host:  # zeros take no memory until they are written
            self.cotangents = torch.zeros_like(self.values, dtype=dtype)
            return
        self.cotangents = allocate(self.values.shape, dtype, self.device, self.host)
        if d_final is None:
            self.cotangents.zero_()
        else:
            self._copy_in(self.cotangents, d_final, -self.initial_tokens)

    def cotangent(self, start: int, stop: int) -> Tensor:
        """Return the cotangent of the tokens [start, stop), in the values' dtype.

        It is complete once all chunks that see these tokens have added theirs: call it after them."""
        assert self.cotangents is not None
        return self._read(self.cotangents, start, stop).to(self.values.dtype)

    def add_cotangent(self, d_past: Tensor, start: int, rows: slice = slice(None)) -> None:
        """Add a chunk's cotangent of the tokens from `start` on, in some rows of the batch."""
        assert self.cotangents is not None
        sums = self._read(self.cotangents, start, start + d_past.shape[self.dim])
        sums[rows].add_(d_past)  # on the device this is a view of the slab; from the host, a copy
        if self.host:
            self._copy_in(self.cotangents, sums, start)

    def initial_cotangent(self) -> Tensor:
        """Return the cotangent of `initial`."""
        return self.cotangent(-self.initial_tokens, 0)

    def final_values(self) -> Tensor:
        """Return the tensor after the sequence, initial tokens included, in the dtype of `initial`."""
        stop = self.shape[self.stored_dim] - self.initial_tokens
        return self.read(-self.initial_tokens, stop).to(self.initial.dtype)


@dataclass(frozen=True)
class Past:
    """The tokens before a chunk, which a stage gets for an append-only tensor of its state.

    Attributes:
        start: the chunk's first token.
        begin: the slab's first token that the chunk may see: where chunks are cut at documents, the
            document's first, else the slab's first.
        first_grad_token: the first token that gets a cotangent from this chunk; `start` if none does.
        visible: per row, the number of tokens before `start` that are in the same document as the token
            `start`; None if the batch has no `seq_idx`.
        starts: per row, the indices in the chunk, except 0, at which documents begin; None as `visible`.
        anchor: a tensor that requires a gradient if the initial tokens do; else None.
    """

    slab: Slab
    start: int
    begin: int
    first_grad_token: int
    visible: Sequence[int] | None = None
    starts: Sequence[Sequence[int]] | None = None
    anchor: Tensor | None = None

    def __len__(self) -> int:
        return self.start - self.begin

    def anchored(self, piece: Tensor) -> Tensor:
        """Return the chunk's own piece, with a graph if the initial tokens need one.

        Below frozen weights the piece has none, and then no backward would come to the past."""
        if self.anchor is None or piece.requires_grad or not torch.is_grad_enabled():
            return piece
        return piece + self.anchor.to(piece.dtype)

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """Write the chunk's own piece to the slab; return the past followed by the piece, a view of the slab.

        In the backward the past's cotangent is added to the slab, and the piece gets its own part alone. The
        cotangents that later chunks have added for the piece come with the stage's new state: a stage must
        return the piece as its new state, or it loses them.

        Args:
            reach: the number of tokens of the past to return (a sliding window's); None for all.
        """
        begin = self.begin if reach is None else max(self.begin, self.start - reach)
        return _Join.apply(piece, self, begin)

    def add_cotangent(self, d: Tensor, start: int) -> None:
        """Add a cotangent of the past's tokens from `start` on; drop it before `first_grad_token`."""
        dim, first = self.slab.dim, max(start, self.first_grad_token)
        stop = min(start + d.shape[dim], self.start)
        if first < stop:
            self.slab.add_cotangent(d.narrow(dim, first - start, stop - first), first)


class _Join(torch.autograd.Function):
    """(piece, past, first token) → the slab's tokens from the first one to the piece's last: see `Past.join`.

    A view of the slab instead of torch.cat([past, piece]): concatenating would copy the whole past in every
    chunk, which is quadratic in the sequence's length."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, past: Past, begin: int) -> Tensor:
        ctx.past, ctx.begin = past, begin
        past.slab.write(piece, past.start)
        return past.slab.read(begin, past.start + piece.shape[past.slab.dim])

    @staticmethod
    def backward(ctx: Any, d_joined: Tensor) -> Any:
        past, dim, past_tokens = ctx.past, ctx.past.slab.dim, ctx.past.start - ctx.begin
        past.add_cotangent(d_joined, ctx.begin)
        return d_joined.narrow(dim, past_tokens, d_joined.shape[dim] - past_tokens), None, None


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, made asynchronously: only work queued on the stream may read it yet."""
    return allocate(tensor.shape, tensor.dtype, tensor.device, host=True).copy_(tensor, non_blocking=True)


@overload
def compact(tensor: Tensor) -> Tensor: ...
@overload
def compact(tensor: Tensor | None) -> Tensor | None: ...
def compact(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor (or None), cloned if it is a view into a storage at least twice as large.

    Stored as it is, such a view would keep the storage, often a whole chunk's, alive."""
    if tensor is None or tensor.untyped_storage().nbytes() < 2 * tensor.nbytes:
        return tensor
    return tensor.clone()


def clone_views_of(memory: Tensor, state: State) -> State:
    """Return the state with clones of the tensors that share storage with `memory`.

    Call it before overwriting `memory`: a layer may return the state that it was given, or a view of it."""
    storage = memory.untyped_storage()._cdata
    return tuple(s.clone() if s.untyped_storage()._cdata == storage else s for s in state)


# A state's tensors by kind. `grows` is `Stage.grows`: per tensor, the dimension along which it grows, None if
# it is recurrent. Cotangents of a state, with None for some, are split and merged in the same way.


def recurrent_part(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return the recurrent tensors of a state."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is None)


def append_only_part(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return the append-only tensors of a state."""
    return tuple(s for s, dim in zip(state, grows, strict=True) if dim is not None)


def merge_parts(recurrent: Iterable, append_only: Iterable, grows: Sequence[int | None]) -> tuple:
    """Return a state made of its recurrent and its append-only tensors, in the state's order."""
    next_recurrent, next_append_only = iter(recurrent), iter(append_only)
    return tuple(next(next_recurrent if dim is None else next_append_only) for dim in grows)


def stores_on_host(spec: EngineSpec, device: torch.device) -> bool:
    """Whether stored states and inputs are in host memory instead of the device's."""
    return spec.storage.offload and device.type == "cuda"
