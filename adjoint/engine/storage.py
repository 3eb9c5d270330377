"""Storage for what the forward leaves to the backward.

Recurrent states are copied to chunk edges (`Edges`). Append-only ones are stored once for the whole sequence
(`Slab`), and a chunk sees the part before it (`Past`). Both can be in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from adjoint.engine.attention_outputs import AttentionOutputs
from adjoint.engine.grid import EngineSpec
from adjoint.engine.tile import Cotangents
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State

# Elements. Each tensor of a packed state begins at a multiple of this, so that in float32 it is aligned to 64
# bytes like a tensor that torch allocates on a CPU.
PACKING_ALIGNMENT = 16
IN_FORWARD = -2  # in place of autograd's number, for a backward that runs inside a forward


class Packing:
    """The layout of tensors like those of a state in one flat tensor, for a message or a row of `Edges`."""

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
        views = self.unpack(out)
        if out.is_cuda and len(state) > 1 and all(s is not None and s.is_cuda for s in state):
            torch._foreach_copy_(views, [s for s in state if s is not None])  # one launch for all
            return out
        for view, s in zip(views, state, strict=True):
            view.zero_() if s is None else view.copy_(s, non_blocking=True)
        return out

    def unpack(self, flat: Tensor) -> State:
        """Return views of a packed state's tensors."""
        # .data has a version counter of its own. With the shared one, writing a row of `Edges` would make
        # autograd refuse the backward of every tape that has saved a view of another row.
        flat = flat.data
        views = list[Tensor]()
        for start, shape in zip(self.starts, self.shapes, strict=True):
            views.append(flat[start : start + shape.numel()].view(shape))
        return tuple(views)


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

    def place(self, chunk: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the place of a chunk's loss, a scalar, to be written."""
        if self.memory is None:
            self.memory = torch.empty(self.chunks, dtype=dtype, device=device)
        self.written.add(chunk)
        return self.memory[chunk]

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

    A slab may go on from another one, in which several of its rows can have the same beginning: the `prefix`.
    The prefix's tokens have the numbers before those of `initial`. They are read where they are, and their
    cotangents are added there.

    Args:
        initial: the tensor before the sequence; it may have no tokens.
        dim: the dimension along which it grows.
        tokens: the sequence's length.
        host: whether values and cotangents are in host memory. Tokens are then the first dimension, so that a
            piece is one block, which can be copied while the device computes.
        prefix: the slab that this one goes on from, or None.
        prefix_rows: for each row, the prefix's row that it goes on from.

    Attributes:
        memory: the values, None until the first ones are written: only then is their dtype known, which
            under autocast is not that of `initial`.
        is_initial_trained: whether `initial` gets a gradient.
        stored_dim: the dimension of `memory` along which tokens are stored.
        tokens_before: number of tokens before token 0.
        graph_task: number of the backward of autograd that the cotangents belong to.
        returned: an alias of the final values, where these are the memory itself, and its version then.
    """

    def __init__(
        self,
        initial: Tensor,
        dim: int,
        tokens: int,
        host: bool = False,
        prefix: Slab | None = None,
        prefix_rows: Sequence[int] = (),
    ) -> None:
        self.initial, self.dim, self.host, self.device = initial.detach(), dim, host, initial.device
        self.stored_dim, self.tokens = 0 if host else dim, tokens
        self.initial_tokens = initial.shape[dim]
        self.is_initial_trained = initial.requires_grad and self.initial_tokens > 0
        self.prefix, self.prefix_rows = prefix, tuple(prefix_rows)
        self.tokens_before = self.initial_tokens
        if prefix is not None:
            self.tokens_before += prefix.tokens_before + prefix.tokens
        self.graph_task = -1
        self.shape = list(initial.shape)
        del self.shape[dim]
        self.shape.insert(self.stored_dim, self.initial_tokens + tokens)
        self.memory: Tensor | None = None
        self.cotangents: Tensor | None = None
        self.returned: tuple[Tensor, int] | None = None

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
        """Return the values of the tokens [start, stop): a view, or from the host or a prefix a copy."""
        if start >= -self.initial_tokens:
            return self._read(self.values, start, stop)
        return torch.cat([piece.read_by_row() for piece in self.parts(start, stop)], dim=self.dim)

    def parts(self, start: int, stop: int) -> list[SlabPart]:
        """Return where the tokens [start, stop) are: in the slabs before this one, and in this one."""
        first, parts = -self.initial_tokens, list[SlabPart]()
        if start < first:
            assert self.prefix is not None
            shift = self.initial_tokens + self.prefix.tokens  # to the prefix's numbers
            for piece in self.prefix.parts(start + shift, min(stop, first) + shift):
                rows = self.prefix_rows
                if piece.rows is not None:
                    rows = tuple(piece.rows[row] for row in rows)
                parts.append(piece._replace(rows=rows))
        if max(start, first) < stop:
            parts.append(SlabPart(self, None, max(start, first), stop))
        return parts

    def begin_graph_task(self, number: int) -> None:
        """Drop cotangents that a backward other than this one has left, here and in the slabs before.

        Slabs that go on from one another add to its cotangents before its own backward begins, and a backward
        may fail in between.

        Args:
            number: of autograd's graph task, -1 for none.
        """
        if number == -1 or number != self.graph_task:
            self.cotangents, self.graph_task = None, number
        if self.prefix is not None:
            self.prefix.begin_graph_task(number)

    def begin_backward(self, d_final: Tensor | None) -> None:
        """Add the cotangents of the final tensor to those that slabs after this one have added.

        None stands for zeros, and so does a tensor without tokens: it was not asked for.

        Raises:
            UserError: the final values, which this backward reads, were modified in place.
        """
        if self.returned is not None and self.returned[0]._version != self.returned[1]:
            raise UserError(
                "keys and values of a returned state were modified in place before the backward of the call "
                "that has returned them, which reads them: modify copies (clone)"
            )
        if d_final is None or not d_final.shape[self.dim]:
            self._begin_cotangents()
        elif self.cotangents is None and self.prefix is None:
            self.cotangents = self._allocate_cotangents()
            self._copy_in(self.cotangents, d_final, -self.initial_tokens)
        else:
            self._begin_cotangents()
            self.add_cotangent(d_final, -self.tokens_before)

    def end_backward(self) -> None:
        """Drop the cotangents, all of which have been read."""
        self.cotangents = None

    def _begin_cotangents(self) -> Tensor:
        """Return the cotangents, which are zeros at first."""
        if self.cotangents is None:
            if self.host:
                self.cotangents = self._allocate_cotangents().zero_()
            else:  # zeros take no memory until they are written
                self.cotangents = torch.zeros_like(self.values, dtype=accumulate_dtype(self.values.dtype))
        return self.cotangents

    def _allocate_cotangents(self) -> Tensor:
        return allocate(self.values.shape, accumulate_dtype(self.values.dtype), self.device, self.host)

    def cotangent(self, start: int, stop: int) -> Tensor:
        """Return the cotangent of the tokens [start, stop), in the values' dtype.

        It is complete once all chunks that see these tokens have added theirs: call it after them."""
        assert self.cotangents is not None
        return self._read(self.cotangents, start, stop).to(self.values.dtype)

    def add_cotangent(self, d_past: Tensor, start: int, rows: slice = slice(None)) -> None:
        """Add a chunk's cotangent of the tokens from `start` on, in some rows of the batch."""
        if start >= -self.initial_tokens:
            return self._add(d_past, start, lambda sums: sums[rows].add_(d_past))
        first = start
        for piece in self.parts(start, start + d_past.shape[self.dim]):
            tokens = piece.stop - piece.start
            piece.add_cotangent(d_past.narrow(self.dim, start - first, tokens)[rows])
            start += tokens

    def _add(self, d: Tensor, start: int, add: Callable[[Tensor], object]) -> None:
        """Have `add` change the cotangents of the tokens from `start` on."""
        cotangents = self._begin_cotangents()
        sums = self._read(cotangents, start, start + d.shape[self.dim])
        add(sums)  # on the device this is a view of the slab; from the host, a copy
        if self.host:
            self._copy_in(cotangents, sums, start)

    def add_to_rows(self, d: Tensor, start: int, rows: Sequence[int]) -> None:
        """Add cotangents of the tokens from `start` on, each of its rows to one of this slab's.

        Several may go to the same row: they are summed in order, so that every run has the same bits."""
        rows_by_place: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            rows_by_place.setdefault(row, []).append(number)

        def add(sums: Tensor) -> None:
            for row, numbers in rows_by_place.items():
                of_row = d[numbers[0]] if len(numbers) == 1 else d[numbers].sum(0, dtype=sums.dtype)
                sums[row].add_(of_row)

        self._add(d, start, add)

    def initial_cotangent(self) -> Tensor:
        """Return the cotangent of `initial`."""
        return self.cotangent(-self.initial_tokens, 0)

    def final_values(self) -> Tensor:
        """Return the tensor after the sequence, all tokens before it included, in the dtype of `initial`."""
        final = self.read(-self.tokens_before, self.tokens).to(self.initial.dtype)
        if final.untyped_storage()._cdata == self.values.untyped_storage()._cdata:
            self.returned = final.detach(), final._version
        return final


class Increment:
    """A stage's output, stored as what the stage has added to its input, in the dtype in which it was made.

    A residual stream in float32 takes twice the memory of what a layer adds to it in bfloat16. The sum is
    made again as the forward made it, so it is the same to the bit.

    Args:
        below: the stage's input, as it is stored. added: what the stage adds.
        total: the output; None once it has been read.
    """

    def __init__(self, below: Tensor | Increment, added: Tensor, total: Tensor) -> None:
        self.below, self.added = below, added
        self.total: Tensor | None = total
        self.in_a_row: int = 1 + (below.in_a_row if isinstance(below, Increment) else 0)

    def read(self) -> Tensor:
        """Return the output."""
        total, self.total = self.total, None
        return self._sum() if total is None else total

    def _sum(self) -> Tensor:
        stored: Tensor | Increment = self
        increments = list[Tensor]()
        while isinstance(stored, Increment):
            increments.append(stored.added)
            stored = stored.below
        total = stored + increments.pop()
        while increments:
            total += increments.pop()
        return total

    @property
    def nbytes(self) -> int:
        return self.added.nbytes


class SlabPart(NamedTuple):
    """Consecutive tokens of a slab that rows have before those of their own.

    Attributes:
        slab: where they are stored.
        rows: for each row, the slab's row with its tokens; None if that is the row itself.
        start, stop: the slab's tokens [start, stop).
    """

    slab: Slab
    rows: tuple[int, ...] | None
    start: int
    stop: int

    def read(self) -> Tensor:
        """Return the values of all of the slab's rows: a view, or from the host a copy."""
        return self.slab.read(self.start, self.stop)

    def read_by_row(self) -> Tensor:
        """Return the values with a row for each row that has these tokens."""
        values = self.read()
        return values if self.rows is None else take_rows(values, self.rows)

    def add_cotangent(self, d: Tensor, offset: int = 0, rows: Sequence[int] | None = None) -> None:
        """Add cotangents of the tokens from `start + offset` on.

        Args:
            d: with a row for each row that has these tokens; with `rows`, for each of these.
            rows: of the slab.
        """
        rows = self.rows if rows is None else rows
        if rows is None:
            self.slab.add_cotangent(d, self.start + offset)
        else:
            self.slab.add_to_rows(d, self.start + offset, rows)


class Prefix(NamedTuple):
    """The tokens before a batch's rows, as an earlier batch has stored them, of which rows can have the same.

    Attributes:
        slabs: of the earlier batch, by stage.
        rows: for each row, the earlier batch's row that it goes on from.
    """

    slabs: Mapping[int, Sequence[Slab]]
    rows: Sequence[int]


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
        unread: slabs whose tokens `join_unread` has joined and nobody has read yet, by id. None if tokens of
            a slab's prefix are joined to the chunk's own, for attention that is a model's own code.
        outputs: of attention to these tokens, that are kept; None if there are none.
    """

    slab: Slab
    start: int
    begin: int
    first_grad_token: int
    visible: Sequence[int] | None = None
    starts: Sequence[Sequence[int]] | None = None
    anchor: Tensor | None = None
    unread: set[int] | None = None
    outputs: AttentionOutputs | None = None

    def __len__(self) -> int:
        return self.start - self.begin

    def read(self) -> Tensor:
        """Return the values, a view of the slab unless it has a prefix; nothing is allocated for none."""
        if not len(self):
            return self.slab.initial.narrow(self.slab.dim, 0, 0)
        return self.slab.read(self.begin, self.start)

    @property
    def in_parts(self) -> bool:
        """Whether attention may read the tokens part by part, in the slabs where they are."""
        return self.slab.prefix is not None and self.unread is not None

    def parts(self) -> list[SlabPart]:
        """Return where the tokens are."""
        assert self.unread is not None
        self.unread.discard(id(self.slab))
        return self.slab.parts(self.begin, self.start)

    def join_unread(self, piece: Tensor) -> Tensor:
        """Write the chunk's own piece to the slab; return a tensor like that of `join`, without the values.

        Of a prefix, which rows share, they would be copies for each row. Attention that knows this `Past`
        reads `parts()`; any other finds nan, and `unread` tells."""
        assert self.unread is not None
        self.slab.write(piece.detach(), self.start)
        self.unread.add(id(self.slab))
        shape = list(piece.shape)
        shape[self.slab.dim] += len(self)
        return self.slab.values.new_full((), torch.nan).expand(shape)

    def read_joined(self, piece: Tensor) -> Tensor:
        """Return what `join` does, in the place of the tensor that `join_unread` has returned."""
        assert self.unread is not None
        self.unread.discard(id(self.slab))
        return _Join.apply(piece, self, self.begin)

    def kept_output(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return the kept output (batch, heads, tokens, width) of attention to these tokens and the chunk's
        own, with its log-sum-exp (batch, heads, tokens); None if it is to be computed."""
        return None if self.outputs is None else self.outputs.get(self.slab, self.start, tokens)

    def keep_output(self, out: Tensor, log: Tensor) -> None:
        """Keep such an output, if there is room."""
        if self.outputs is not None:
            self.outputs.put(self.slab, self.start, out, log)

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


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of a tensor, which may repeat: a view if all are one row.

    In the backward the cotangents of a row's copies are summed."""
    if len(set(rows)) == 1:
        return tensor[rows[0] : rows[0] + 1].expand(len(rows), *tensor.shape[1:])
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))


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
    return tuple([s.clone() if s.untyped_storage()._cdata == storage else s for s in state])


# A state's tensors by kind. `grows` is `Stage.grows`: per tensor, the dimension along which it grows, None if
# it is recurrent. Cotangents of a state, with None for some, are split and merged in the same way.


def recurrent_part(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return the recurrent tensors of a state."""
    return tuple([s for s, dim in zip(state, grows, strict=True) if dim is None])


def append_only_part(state: Sequence, grows: Sequence[int | None]) -> tuple:
    """Return the append-only tensors of a state."""
    return tuple([s for s, dim in zip(state, grows, strict=True) if dim is not None])


def merge_parts(recurrent: Iterable, append_only: Iterable, grows: Sequence[int | None]) -> tuple:
    """Return a state made of its recurrent and its append-only tensors, in the state's order."""
    next_recurrent, next_append_only = iter(recurrent), iter(append_only)
    return tuple([next(next_recurrent if dim is None else next_append_only) for dim in grows])


def stores_on_host(spec: EngineSpec, device: torch.device) -> bool:
    """Whether stored states and inputs are in host memory instead of the device's."""
    return spec.storage.offload and device.type == "cuda"
