"""Causal attention of a chunk to all that is before it, without a mask of chunk × sequence entries.

The past comes block by block: a kernel call for each, and one, causal, for the chunk itself, joined by their
log-sum-exp (as in ring attention, Liu et al. 2023). The kernels are ours on a CPU in full precision, else
PyTorch's. With a window: in bands, so that time and memory are linear in the number of tokens.

Rows that begin with the same tokens share one row of keys (as in Hydragen, Juravsky et al. 2024): towards
these keys their queries are side by side, as more queries of one row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import dispatch, operators
from adjoint.kernels.attention import reference
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
from adjoint.kernels.cpu import backend as cpu
from adjoint.kernels.operation import Operation, register

BLOCK = 2048  # tokens of the past at a time, on a CPU
CUDA_BLOCK = 8 * BLOCK  # where to join a block's output is a pass over memory; and offsets stay below 2**31


def _kernel(q: Tensor) -> str:
    """The kernel that attends from such queries, as wide as `kernel_width`: on a CPU the "compiled" one, of
    rows of whole vectors, or PyTorch's, "cpu"; on CUDA "flash" or "efficient", where PyTorch would use them;
    or "plain" operations, as for float64 on CUDA."""
    if dispatch.is_as_on_cuda():
        return {torch.float64: "plain", torch.float32: "efficient"}.get(q.dtype, "flash")
    if q.device.type == "cpu":
        lanes = _lanes(q)
        return "compiled" if lanes and q.shape[3] % lanes == 0 else "cpu"
    if torch.version.hip is None:  # whose kernels read the random numbers' state and pad no log-sum-exp
        like = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
        if torch.backends.cuda.can_use_flash_attention(like):
            return "flash"
        if torch.backends.cuda.can_use_efficient_attention(like):
            return "efficient"
    return "plain"


def _lanes(q: Tensor) -> int:
    """Return the lanes of the compiled kernel, 0 where it cannot run: tensors of a subclass, such as fake
    ones, may have no memory, and torch.compile cannot trace it."""
    if torch.compiler.is_compiling() or type(q) not in (Tensor, nn.Parameter):
        return 0
    return cpu.attention_lanes(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of the scores, (batch, heads, tokens), of one call of a kernel."""
    kernel, aten = _kernel(q), torch.ops.aten
    if kernel == "compiled":
        return cpu.past_attention_forward(q, k, v, causal, scale)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    if kernel == "efficient":  # its offset of a head is a 32-bit product, which a slab's heads can exceed
        k, v = k.contiguous(), v.contiguous()
        attend = aten._scaled_dot_product_efficient_attention
        out, log = attend(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        return out, log[:, :, : q.shape[2]]  # padded to a multiple of 32
    return reference.past_attention_forward(q, k, v, causal, scale)


def _attend_backward(
    d: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log: Tensor,
    causal: bool,
    scale: float,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of q, k and v. Every kernel reads only `out` and `log` of the forward: it makes the
    softmax again as exp(scores - log) and takes Σ d · out from each of its cotangents. So with the output and
    the log-sum-exp of all keys that the queries see, the backward of some keys gives their share.

    Args:
        d, out: (batch, heads, tokens, width), in memory token by token. log: (batch, heads, tokens),
            contiguous: CUDA's kernels take both to lie so without looking.
        delta: d · out by `_delta`, if it is known.
    """
    kernel, aten = _kernel(q), torch.ops.aten
    if kernel == "compiled":
        return cpu.past_attention_backward(d, q, k, v, out, log, causal, scale, delta)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(d, q, k, v, out, log, 0.0, causal, scale=scale)
    if kernel == "flash":  # no bounds of packed sequences, no dropout's state
        backward, sizes = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        return backward(d, q, k, v, out, log, None, None, *sizes, 0.0, causal, None, None, scale=scale)
    if kernel == "efficient":
        log = F.pad(log, (0, -log.shape[2] % 32), value=torch.inf)
        k, v, which_gradients = k.contiguous(), v.contiguous(), [True, True, True, False]
        backward = aten._scaled_dot_product_efficient_attention_backward
        return backward(d, q, k, v, None, out, log, None, None, 0.0, which_gradients, causal, scale=scale)[:3]
    return reference.past_attention_backward(d, q, k, v, out, log, causal, scale)


def _delta(d: Tensor, q: Tensor, out: Tensor, log: Tensor) -> Tensor | None:
    """d · out of each query, for several calls of `_attend_backward`; None where the kernel computes it."""
    return cpu.past_attention_delta(d, out, log) if _kernel(q) == "compiled" else None


def kernel_width(q: Tensor, v: Tensor) -> int:
    """Width to which rows of queries, keys and values are padded: the wider of keys and values; for compiled
    kernels to whole vectors, for CUDA's to a multiple of 8, above 192 of 64, to which flash fills them up
    anyway."""
    width = max(q.shape[3], v.shape[3])
    if q.device.type == "cpu" and not dispatch.is_as_on_cuda():
        return width + -width % (_lanes(q) or 1)
    return width + -width % (8 if width <= 192 else 64)


class _PastAttention(torch.autograd.Function):
    """softmax(q [shared past own]ᵀ) [shared past own], causal among the own. The past comes block by block:
    nothing as long as the sequence is made, but for its cotangents where nobody takes them.

    Heads and rows that share keys lie side by side as more queries where there is no order among them:
    towards the past.

    Args of the forward:
        shared: pairs (keys, values) of parts of the past that rows share. They are read again in the
            backward: no tape holds them.
        past: keeps the output for a forward that is run again; None if there is no past.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_past: Tensor,
        v_past: Tensor,
        scale: float | None,
        gather: Callable[[int, Tensor, Tensor], None] | None,
        shared: Sequence[tuple[Part, Part]] = (),
        past: Past | None = None,
    ) -> Tensor:
        groups, width = q.shape[1] // k.shape[1], v.shape[3]
        scale = q.shape[3] ** -0.5 if scale is None else scale  # before q is padded to v's width
        q = padded(q, kernel_width(q, v))
        output = None if past is None else past.kept_output(q.shape[2])
        if output is not None:
            out, log = padded(output[0], q.shape[3]), output[1]
        else:
            k_shared, v_shared = [keys.read() for keys, _ in shared], [values.read() for _, values in shared]
            rows = [row for keys, _ in shared for row in keys.rows or ()]
            inputs = q, k, v, k_past, v_past, k_shared, v_shared, rows, scale
            out, log = torch.ops.adjoint.past_attention(*inputs)
            if past is not None:
                past.keep_output(out[..., :width], log)
        ctx.save_for_backward(q, k, v, k_past, v_past, out, log)
        ctx.scale, ctx.width, ctx.groups, ctx.gather, ctx.shared = scale, width, groups, gather, shared
        return out[..., :width]

    @staticmethod
    @differentiable_once("attention to the past")
    def backward(ctx: Any, d: Tensor) -> Any:
        q, k, v, k_past, v_past, out, log = ctx.saved_tensors
        d = padded(d, q.shape[3])
        dq, dk, dv = own_backward(d, q, k, v, out, log, ctx.scale)
        dk_past = dv_past = None
        gather = ctx.gather
        if gather is None and k_past.shape[2]:
            dk_past, dv_past = torch.empty_like(k_past), torch.empty_like(v_past)

            def gather(start: int, *d: Tensor) -> None:
                for cotangent, of_block in zip((dk_past, dv_past), d, strict=True):
                    cotangent[:, :, start : start + of_block.shape[2]] = of_block

        if k_past.shape[2]:
            dq += past_backward(d, q, (k_past, v_past), out, log, ctx.scale, gather)
        for pair in ctx.shared:
            _shared_backward(dq, d, q, pair, out, log, ctx.scale)
        return dq[..., : k.shape[3]], dk, dv, dk_past, dv_past, None, None, None, None


def own_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of queries, and of keys and values of the same tokens.

    Args:
        d: (batch, heads, tokens, width) like q and out, of `kernel_width`.
        out, log: of all that the queries see; log (batch, heads, tokens).
    """
    groups, widest = q.shape[1] // k.shape[1], q.shape[3]
    k_own, v_own = (_repeated(padded(t, widest), groups) for t in (k, v))
    d, out, log = _by_tokens(d), _by_tokens(out), log.contiguous()
    dq, *d_own = _attend_backward(d, q, k_own, v_own, out, log, True, scale)
    dk, dv = (_summed(t, groups)[..., : p.shape[3]] for t, p in zip(d_own, (k, v), strict=True))
    return dq, dk, dv


def past_backward(
    d: Tensor,
    q: Tensor,
    kv: Sequence[Tensor],
    out: Tensor,
    log: Tensor,
    scale: float,
    gather: Callable[..., None] | None,
) -> Tensor:
    """The cotangent of queries that see all of some keys, in log's precision where it is a sum over blocks;
    those of keys and values go to `gather`, after the first token's place, block by block.

    Args:
        d, q, out, log: as in `own_backward`. kv: keys and values.
    """
    k, v = kv
    if not k.shape[2]:
        return torch.zeros_like(q)
    groups, dq = q.shape[1] // k.shape[1], None
    d, q, out = (_folded(t, groups) for t in (d, q, out))
    log = log.reshape(q.shape[:3]).contiguous()
    delta = _delta(d, q, out, log)
    for start, of_k, of_v in _blocks(q, k, v):
        dq_block, *d_block = _attend_backward(d, q, of_k, of_v, out, log, False, scale, delta)
        dq = dq_block if dq is None else dq.to(log.dtype).add_(dq_block)
        assert gather is not None
        gather(start, *(t[..., : p.shape[3]] for t, p in zip(d_block, (k, v), strict=True)))
        del dq_block, d_block  # before the next ones are made
    assert dq is not None
    del d, q, out  # before as much is made once more
    return _unfolded(dq, groups)


def _shared_backward(
    dq: Tensor,
    d: Tensor,
    q: Tensor,
    pair: tuple[Part, Part],
    out: Tensor,
    log: Tensor,
    scale: float,
) -> None:
    """Add the cotangent of queries towards a shared part of the past to dq, and those of its keys and values
    to these.

    Args:
        d, q, out, log: as in `own_backward`.
    """
    keys, values = pair
    k, v = keys.read(), values.read()
    for rows in _RowsInOne.all_of(keys.rows or (), k):
        together = (rows.together(t) for t in (d, q, out, log[..., None]))
        d_rows, q_rows, out_rows, log_rows = together

        def gather(start: int, *d_block: Tensor, places: Sequence[int] = rows.places) -> None:
            for tokens, of_block in zip(pair, d_block, strict=True):
                tokens.add_cotangent(of_block, start, places)

        kv = rows.keys(k), rows.keys(v)
        d_queries = past_backward(d_rows, q_rows, kv, out_rows, log_rows[..., 0], scale, gather)
        d_queries = rows.separated(d_queries).to(dq.dtype)
        if rows.is_all:
            dq += d_queries
        else:
            dq.index_add_(0, rows.numbers, d_queries)  # each row once


class _RowsInOne:
    """Rows of queries, of which equally many share each of some rows of keys, as fewer rows of more queries.

    Args:
        places: rows of the keys.
        members: for each, the rows of queries that see it.
        keys: (rows, …).
        batch: number of rows of queries.
    """

    def __init__(self, places: list[int], members: list[list[int]], keys: Tensor, batch: int) -> None:
        numbers = [row for rows in members for row in rows]
        self.places, self.members, self.has_all_keys = places, len(members[0]), places == [*range(len(keys))]
        self.is_all = numbers == [*range(batch)]
        self.numbers = torch.tensor(numbers, device=keys.device)

    @staticmethod
    def all_of(rows: Sequence[int], keys: Tensor) -> list[_RowsInOne]:
        """Sort rows of queries by the row of keys that each sees, and these by how many see them."""
        members_by_place: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            members_by_place.setdefault(row, []).append(number)
        places_by_count: dict[int, list[int]] = {}
        for place in sorted(members_by_place):
            places_by_count.setdefault(len(members_by_place[place]), []).append(place)
        return [
            _RowsInOne(places, [members_by_place[place] for place in places], keys, len(rows))
            for places in places_by_count.values()
        ]

    def keys(self, t: Tensor) -> Tensor:
        """The rows of keys or values that these queries see."""
        return t if self.has_all_keys else t[self.places]

    def together(self, t: Tensor) -> Tensor:
        """(batch, heads, tokens, …) → (places, heads, members × tokens, …), in memory token by token.

        Heads that share keys stay apart, so that `_folded` can put them side by side, too."""
        t = t if self.is_all else t.index_select(0, self.numbers)
        if self.members == 1:
            return t
        t = t.unflatten(0, (-1, self.members)).permute(
            0, 1, 3, 2, 4
        )  # (places, members, tokens, heads, width)
        return t.flatten(1, 2).transpose(1, 2)

    def separated(self, t: Tensor) -> Tensor:
        """Undo `together`, but for the order of the rows: row i is that of number i of `numbers`."""
        if self.members == 1:
            return t
        t = t.unflatten(2, (self.members, -1)).movedim(2, 1)  # (places, members, heads, tokens, width)
        return t.flatten(0, 1)


def _joined_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_past: Tensor,
    v_past: Tensor,
    k_shared: Sequence[Tensor],
    v_shared: Sequence[Tensor],
    rows: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output, as wide as q, in memory token by token, and its log-sum-exp (batch, heads, tokens).

    Args:
        k_past, v_past: with a row for each of q's.
        k_shared, v_shared: parts of the past with fewer rows.
        rows: of each of these parts in turn: for each row of q, the part's row that it sees.
    """
    if not q.numel():  # of which a kernel divides by zero
        return _fake(q, k, v, k_past, v_past, k_shared, v_shared, rows, scale)
    groups, widest, q = q.shape[1] // k.shape[1], q.shape[3], _in_rows(q)
    k_own, v_own = (_repeated(padded(t, widest), groups) for t in (k, v))
    out, log = _attend(q, k_own, v_own, True, scale)
    folded = _folded(q, groups)
    chunk = _folded(out, groups), log.reshape(folded.shape[:3])
    out, log = merged(itertools.chain([chunk], _to_blocks(folded, k_past, v_past, scale)))
    out, log = _unfolded(out, groups), log.reshape(q.shape[:3])
    for i, kv in enumerate(zip(k_shared, v_shared, strict=True)):
        out, log = merged([(out, log), _to_shared(q, *kv, rows[i * len(q) : (i + 1) * len(q)], scale)])
    return _by_tokens(out.to(q.dtype)), log.contiguous()


def _to_shared(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of queries that see all of some keys, of which rows share rows."""
    outs, logs, numbers = [], [], []
    for some in _RowsInOne.all_of(rows, k):
        together = some.together(q)
        folded = _folded(together, q.shape[1] // k.shape[1])
        out, log = merged(_to_blocks(folded, some.keys(k), some.keys(v), scale))
        out = _unfolded(out, q.shape[1] // k.shape[1])
        outs.append(some.separated(out))
        logs.append(some.separated(log.reshape(together.shape[:3])[..., None])[..., 0])
        numbers.append(some.numbers)
        if some.is_all:
            return outs[0], logs[0]
    order = torch.cat(numbers).argsort()
    return torch.cat(outs)[order], torch.cat(logs)[order]


def attention_to_all(q: Tensor, kv: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The output (batch, heads, tokens, width) of queries that see all of some keys and values, of one token
    at least, and its log-sum-exp (batch, heads, tokens); q is of `kernel_width`."""
    k, v = kv
    groups = q.shape[1] // k.shape[1]
    out, log = merged(_to_blocks(_folded(q, groups), k, v, scale))
    return _unfolded(out.to(q.dtype), groups), log.reshape(q.shape[:3])


def _to_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and log-sum-exps of folded queries that see all keys, block by block."""
    for _, of_k, of_v in _blocks(q, k, v):
        yield _attend(q, of_k, of_v, False, scale)


def _blocks(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values block by block after their first token's place, as kernels want them for q."""
    size = CUDA_BLOCK if _kernel(q) in ("flash", "efficient") else BLOCK
    for start in range(0, k.shape[2], size):
        of_k, of_v = (padded(t[:, :, start : start + size], q.shape[3]).to(q.dtype) for t in (k, v))
        yield start, of_k, of_v


def merged(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries that see several parts of keys, from those of each part."""
    parts = iter(parts)
    out, log = next(parts)
    for other, log_other in parts:  # one at a time
        share, wide = (log_other - log).sigmoid()[..., None], out.to(log.dtype)
        mix = wide.lerp if wide is out else wide.lerp_
        out = mix(other.to(log.dtype), share)
        log = torch.logaddexp(log, log_other)
    return out, log


def _by_tokens(t: Tensor) -> Tensor:
    """The same values (batch, heads, tokens, …) in memory token by token."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    return out.transpose(1, 2), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


# One operator, of whose results selective recomputation keeps the joined one and none of its parts.
operators.LIBRARY.define(
    "past_attention(Tensor q, Tensor k, Tensor v, Tensor k_past, Tensor v_past, "
    "Tensor[] k_shared, Tensor[] v_shared, int[] rows, float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators.LIBRARY.impl("past_attention", _joined_attention, "CompositeExplicitAutograd")
torch.library.register_fake("adjoint::past_attention", _fake, lib=operators.LIBRARY)


def padded(t: Tensor, width: int) -> Tensor:
    """Rows so wide: kernels want values as wide as keys."""
    return _in_rows(t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])))


def _in_rows(t: Tensor) -> Tensor:
    """Kernels take the numbers of a row to lie side by side, without looking."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _folded(t: Tensor, groups: int) -> Tensor:
    """(batch, heads, tokens, width) → (batch, heads / groups, groups × tokens, width), in memory token by
    token."""
    if groups == 1:
        return _by_tokens(t)
    batch, heads, tokens, width = t.shape
    t = t.reshape(batch, heads // groups, groups, tokens, width).movedim(1, 3)
    return t.reshape(batch, groups * tokens, heads // groups, width).contiguous().transpose(1, 2)


def _unfolded(t: Tensor, groups: int) -> Tensor:
    """Undo `_folded`."""
    if groups == 1:
        return t
    batch, heads, rows, width = t.shape
    t = t.transpose(1, 2).reshape(batch, groups, rows // groups, heads, width).movedim(1, 3)
    return t.reshape(batch, rows // groups, heads * groups, width).transpose(1, 2)


def _repeated(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(1, (-1, groups)).sum(2)


class Part(Protocol):
    """Keys or values of some tokens before a chunk, stored once for all rows that have these tokens
    (`adjoint.engine.storage.SlabPart`)."""

    @property
    def rows(self) -> Sequence[int] | None:
        """The row of `read()` that each row of the chunk sees; None if each has its own."""
        ...

    @property
    def start(self) -> int:
        """The place of its first token, where `Past.add_cotangent` takes it."""
        ...

    def read(self) -> Tensor:
        """The keys or values, (rows, heads, tokens, dim)."""
        ...

    def add_cotangent(self, d: Tensor, offset: int, rows: Sequence[int] | None) -> None:
        """Add a cotangent of the tokens from `offset` on, in some rows, each once."""
        ...


class Past(Protocol):
    """Keys or values before a chunk, in an append-only state (`adjoint.engine.storage.Past`)."""

    @property
    def start(self) -> int: ...

    @property
    def visible(self) -> Sequence[int] | None: ...

    def __len__(self) -> int: ...

    def anchored(self, piece: Tensor) -> Tensor:
        """The chunk's own piece, with a graph if the past needs one for its cotangent."""
        ...

    def kept_output(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """The output and log-sum-exp that `keep_output` got for as many queries; None if it kept none."""
        ...

    def keep_output(self, out: Tensor, log: Tensor) -> None:
        """Keep the output of the chunk's queries for a forward that is run again, if there is room."""
        ...

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """The past, or its last `reach` tokens, with the chunk's own piece behind it."""
        ...

    def add_cotangent(self, d: Tensor, start: int) -> None:
        """Add a cotangent of the past's tokens from `start` on."""
        ...


class PastInParts(Past, Protocol):
    """A `Past` of which rows share parts."""

    def parts(self) -> Sequence[Part]:
        """The parts in the order of their tokens; the last one is the rows' alone, if there is such a one."""
        ...

    def join_unread(self, piece: Tensor) -> Tensor:
        """A tensor like that of `join`, without the values: `parts()` and `read_joined` read them."""
        ...

    def read_joined(self, piece: Tensor) -> Tensor:
        """The values that `join_unread` has left out, with a copy for each row."""
        ...


@dataclass(frozen=True)
class Joined:
    """The past and the piece that a tensor of keys or values consists of: attention that finds it there need
    not take it apart.

    Attributes:
        in_parts: whether the tensor has no values: they are in the parts of the past, of which rows share
            some, and in the piece.
    """

    past: Past
    piece: Tensor
    in_parts: bool = False


def join(past: Past, piece: Tensor, reach: int | None = None) -> Tensor:
    """`past.join`, of which `past_attention` knows what it is made of; what has been fetched from other
    ranks is a tensor like any other."""
    piece = past.anchored(piece)
    if reach is None and getattr(past, "in_parts", False):
        tensor = cast(PastInParts, past).join_unread(piece)
        tensor.joined = Joined(past, piece, in_parts=True)  # type: ignore[attr-defined]
        return tensor
    tensor = past.join(piece, reach)
    if hasattr(past, "attend"):
        if reach is not None or getattr(past, "fetches", False):
            return tensor
        tensor, piece = tensor.view_as(tensor), tensor
    tensor.joined = Joined(past, piece)  # type: ignore[attr-defined]
    return tensor


def is_spread(k: Tensor) -> bool:
    """Whether what is before these keys, and joined to them by name only, is on several ranks
    (`adjoint.parallel.kv`): then `past_attention` alone knows what they are."""
    return hasattr(getattr(getattr(k, "joined", None), "past", None), "attend")


def in_parts(k: Tensor) -> bool:
    """Whether these keys have no values but in the parts of their past: `past_attention` reads them there."""
    joined: Joined | None = getattr(k, "joined", None)
    return joined is not None and joined.in_parts


def as_whole(k: Tensor) -> Tensor:
    """Keys or values that any code can read: those in parts are joined, with a copy for each row."""
    if not in_parts(k):
        return k
    joined: Joined = k.joined  # type: ignore[attr-defined]
    return cast(PastInParts, joined.past).read_joined(joined.piece)


def row_of(tensor: Tensor, row: int, tokens: int) -> Tensor:
    """The first tokens of one row of spread keys or values, as what they are."""
    joined: Any = tensor.joined  # type: ignore[attr-defined]
    row_tensor = tensor[row : row + 1, :, :tokens]
    row_tensor.joined = Joined(joined.past.of_row(row), joined.piece[row : row + 1, :, :tokens])  # type: ignore[attr-defined]
    return row_tensor


def past_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of queries (batch, heads, tokens, dim) to keys and values (batch, kv_heads, past + tokens,
    dim), each query to all up to its own place. Computed in q's dtype.

    Keys and values that come from `join` are read where they lie, and the past's cotangents are added where
    they are gathered."""
    tokens = q.shape[2]
    joined: list[Any] = [getattr(t, "joined", None) for t in (k, v)]
    if is_spread(k):
        return joined[0].past.attend(q, *joined, scale)
    if not q.numel():
        return _of_nothing(q, k, v)
    if in_parts(k):
        return _attend_in_parts(q, joined[0], joined[1], scale)
    (k_past, k_own), (v_past, v_own) = (t.split([t.shape[2] - tokens, tokens], dim=2) for t in (k, v))
    if None in joined or k_own.shape[2] != tokens:
        piece = k_own.to(q.dtype), v_own.to(q.dtype)
        return _PastAttention.apply(q, *piece, k_past, v_past, scale, None)
    begin = joined[0].past.start - k_past.shape[2]

    def gather(start: int, *d: Tensor) -> None:
        for keys_or_values, of_block in zip(joined, d, strict=True):
            keys_or_values.past.add_cotangent(of_block, begin + start)

    piece = joined[0].piece.to(q.dtype), joined[1].piece.to(q.dtype)
    past = joined[0].past
    return _PastAttention.apply(q, *piece, k_past.detach(), v_past.detach(), scale, gather, (), past)


def _attend_in_parts(q: Tensor, keys: Joined, values: Joined, scale: float | None) -> Tensor:
    """`past_attention` to a past of which rows share parts."""
    pasts = cast(PastInParts, keys.past), cast(PastInParts, values.past)
    pairs = list(zip(*(past.parts() for past in pasts), strict=True))
    rows_alone = pairs.pop() if pairs[-1][0].rows is None else None
    k, v = keys.piece.to(q.dtype), values.piece.to(q.dtype)
    if rows_alone is None:
        k_past, v_past = k[:, :, :0], v[:, :, :0]
    else:
        k_past, v_past = (tokens.read() for tokens in rows_alone)

    def gather(start: int, *d: Tensor) -> None:
        for past, tokens, of_block in zip(pasts, rows_alone or (), d, strict=True):
            past.add_cotangent(of_block, tokens.start + start)

    inputs = q, k, v, k_past.detach(), v_past.detach(), scale, gather, pairs, pasts[0]
    return _PastAttention.apply(*inputs)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Attention of queries to keys and values up to their own place, as `past_attention`'s.

    Args:
        window: keys that a query sees, its own included; None for all.
        scale: of the scores, without a window; None for 1 / √dim.
    """
    tokens, n_keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if is_spread(k) or in_parts(k):
        return past_attention(q, k, v, scale)
    if not q.numel():
        return _of_nothing(q, k, v)
    if window is not None and window < n_keys:
        k, v = (_repeated(t.to(q.dtype), groups) for t in (k, v))
        return _banded(q, k, v, window)
    if 1 < tokens < n_keys:
        return past_attention(q, k, v, scale)
    k, v = (_repeated(t.to(q.dtype), groups) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, scale=scale)


def _of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of no row or no token: it depends on q, k and v all the same, with gradients of zero."""
    k, v = (_repeated(t.to(q.dtype), q.shape[1] // t.shape[1]) for t in (k, v))
    return (q @ k.mT) @ v


BAND = 128  # tokens of a band at least: shorter ones would be many small products


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Queries in bands no shorter than what a query looks back: each band sees its own keys and those of the
    band before it."""
    past, size = k.shape[2] - q.shape[2], max(window - 1, BAND)
    if past > window - 1:  # the first query does not see further
        k, v, past = k[:, :, past - window + 1 :], v[:, :, past - window + 1 :], window - 1
    first, rest = q.split([min(size, q.shape[2]), max(0, q.shape[2] - size)], dim=2)
    out = _in_sight(first, k[:, :, : past + size], v[:, :, : past + size], window)
    if not rest.shape[2]:
        return out
    pad = -rest.shape[2] % size
    bands = F.pad(rest, (0, 0, 0, pad)).unflatten(2, (-1, size)).flatten(1, 2)
    pairs = []
    for t in (k, v):
        band = F.pad(t[:, :, past:], (0, 0, 0, pad)).unflatten(2, (-1, size))
        pairs.append(torch.cat([band[:, :, :-1], band[:, :, 1:]], dim=3).flatten(1, 2))
    more = _in_sight(bands, pairs[0], pairs[1], window).unflatten(1, (q.shape[1], -1)).flatten(2, 3)
    return torch.cat([out, more[:, :, : rest.shape[2]]], dim=2)


def _in_sight(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention by a mask: the last query's place is the last key's."""
    tokens, n_keys = q.shape[2], k.shape[2]
    ones = torch.ones(tokens, n_keys, dtype=torch.bool, device=q.device)
    mask = ones.tril(n_keys - tokens).triu(n_keys - tokens - window + 1)
    return F.scaled_dot_product_attention(q, k, v, mask)


OPERATION = register(
    Operation(
        name="past_attention",
        function=past_attention,
        operator="past_attention",
        code_name="past_attention",
        reference=reference,
        backends={},  # it picks by itself (`_kernel`), mostly among PyTorch's
        saves_states=False,
        under_recompute="save",
        trial=None,
    )
)
