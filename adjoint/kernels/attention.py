"""Causal attention of a chunk to all that is before it, without a mask of chunk × sequence entries.

On a CPU: two flash calls, to the past and, causally, to the chunk itself, joined by their log-sum-exp (as in
ring attention, Liu et al. 2023); on CUDA PyTorch's flash or memory-efficient kernel, causal at the lower
right. With a window: in bands, so that time and memory are linear in the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import dispatch, operators
from adjoint.kernels.checks import accumulate_dtype

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


BLOCK = 2048  # tokens of the past at a time


class _PastAttention(torch.autograd.Function):
    """softmax(q [past own]ᵀ) [past own], causal among the own. The past comes block by block: nothing as long
    as the sequence is made, but for its cotangents where nobody takes them.

    Heads that share keys lie side by side as more queries where there is no order among them: towards the
    past."""

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
    ) -> Tensor:
        groups, width = q.shape[1] // k.shape[1], v.shape[3]
        scale = q.shape[3] ** -0.5 if scale is None else scale  # before q is padded to v's width
        q = _padded(q, max(q.shape[3], width))
        out, log = torch.ops.adjoint.past_attention(q, k, v, k_past, v_past, scale)
        ctx.save_for_backward(q, k, v, k_past, v_past, out, log)
        ctx.scale, ctx.width, ctx.groups, ctx.gather = scale, width, groups, gather
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        q, k, v, k_past, v_past, out, log = ctx.saved_tensors
        groups, widest, scale = ctx.groups, q.shape[3], ctx.scale
        d = _padded(d, widest).contiguous()
        own = (_repeated(_padded(t, widest), groups) for t in (k, v))
        # With the joined output and log-sum-exp, each part's backward is its share of the whole's.
        dq, *d_own = _flash_backward(d, q, *own, out, log, 0.0, True, scale=scale)
        dk, dv = (_summed(t, groups)[..., : p.shape[3]] for t, p in zip(d_own, (k, v), strict=True))
        del d_own
        dk_past = dv_past = None
        if ctx.gather is None and k_past.shape[2]:
            dk_past, dv_past = torch.empty_like(k_past), torch.empty_like(v_past)
        folded = [_folded(t, groups).contiguous() for t in (d, q, out, log)]
        for start in range(0, k_past.shape[2], BLOCK):
            block = (_padded(t[:, :, start : start + BLOCK], widest).to(q.dtype) for t in (k_past, v_past))
            part, *d_block = _flash_backward(*folded[:2], *block, *folded[2:], 0.0, False, scale=scale)
            dq += part.reshape(q.shape)
            a, b = (t[..., : p.shape[3]] for t, p in zip(d_block, (k, v), strict=True))
            if dk_past is None or dv_past is None:
                ctx.gather(start, a, b)
            else:
                dk_past[:, :, start : start + BLOCK], dv_past[:, :, start : start + BLOCK] = a, b
            del part, d_block, a, b  # before the next ones are made
        return dq[..., : k.shape[3]], dk, dv, dk_past, dv_past, None, None


def _joined_attention(
    q: Tensor, k: Tensor, v: Tensor, k_past: Tensor, v_past: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output, as wide as q, and its log-sum-exp (batch, heads, tokens); in memory token by token, as the
    kernel writes them."""
    if not q.numel():  # of which the kernel divides by zero
        return _fake(q, k, v, k_past, v_past, scale)
    groups, widest, q = q.shape[1] // k.shape[1], q.shape[3], _in_rows(q)
    own = (_repeated(_padded(t, widest), groups) for t in (k, v))
    out, log = _flash(q, *own, 0.0, True, scale=scale)
    folded = _folded(q, groups)
    for start in range(0, k_past.shape[2], BLOCK):
        block = (_padded(t[:, :, start : start + BLOCK], widest).to(q.dtype) for t in (k_past, v_past))
        before, log_before = _flash(folded, *block, 0.0, False, scale=scale)
        before, log_before = before.reshape(q.shape), log_before.reshape(q.shape[:3])
        joined = torch.logaddexp(log, log_before)
        out = out * (log - joined).exp()[..., None] + before * (log_before - joined).exp()[..., None]
        log = joined
    return _by_tokens(out.to(q.dtype)), _by_tokens(log)


def _by_tokens(t: Tensor) -> Tensor:
    """The same values (batch, heads, tokens, …) in memory token by token."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_past: Tensor, v_past: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    log = torch.empty_like(
        out[..., 0], dtype=accumulate_dtype(q.dtype), memory_format=torch.contiguous_format
    )
    return out.transpose(1, 2), log.transpose(1, 2)


# One operator, of whose results selective recomputation keeps the joined one and none of its parts.
operators.LIBRARY.define(
    "past_attention(Tensor q, Tensor k, Tensor v, Tensor k_past, Tensor v_past, float? scale) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators.LIBRARY.impl("past_attention", _joined_attention, "CompositeExplicitAutograd")
torch.library.register_fake("adjoint::past_attention", _fake, lib=operators.LIBRARY)


def _padded(t: Tensor, width: int) -> Tensor:
    """The kernel wants values as wide as keys."""
    return _in_rows(t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])))


def _in_rows(t: Tensor) -> Tensor:
    """The kernel takes the numbers of a row to lie side by side, without looking."""
    return t if t.stride(3) == 1 or t.shape[3] == 1 else t.contiguous()


def _folded(t: Tensor, groups: int) -> Tensor:
    """(batch, heads, tokens, …) → (batch, heads / groups, groups × tokens, …)."""
    return t.reshape(t.shape[0], t.shape[1] // groups, groups * t.shape[2], *t.shape[3:])


def _repeated(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(1, (-1, groups)).sum(2)


class Past(Protocol):
    """Keys or values before a chunk, in an append-only state (`adjoint.engine.kept.Past`)."""

    @property
    def start(self) -> int: ...

    @property
    def visible(self) -> Sequence[int] | None: ...

    def __len__(self) -> int: ...

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """The past, or its last `reach` tokens, with the chunk's own piece behind it."""
        ...

    def gather(self, d: Tensor, start: int) -> None:
        """Adds a cotangent of the past's tokens from `start` on."""
        ...


@dataclass(frozen=True)
class Joined:
    """What a tensor of keys or values is made of: attention that finds it there need not take it apart."""

    past: Past
    piece: Tensor


def join(past: Past, piece: Tensor, reach: int | None = None) -> Tensor:
    """`past.join`, of which `past_attention` knows what it is made of."""
    whole = past.join(piece, reach)
    whole.joined = Joined(past, piece)  # type: ignore[attr-defined]
    return whole


def past_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of queries (batch, heads, tokens, dim) to keys and values (batch, kv_heads, past + tokens,
    dim), each query to all up to its own place. Computed in q's dtype.

    Keys and values that come from `join` are read where they lie, and the past's cotangents are added where
    they are gathered."""
    tokens = q.shape[2]
    if not q.numel():
        return _of_nothing(q, k, v)
    if dispatch.is_as_on_cuda():  # one fused kernel, played by the CPU's
        k, v = (_repeated(t.to(q.dtype), q.shape[1] // t.shape[1]) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if q.device.type != "cpu":
        from torch.backends.cuda import SDPAParams, can_use_flash_attention
        from torch.nn.attention.bias import causal_lower_right

        k, v, bias = k.to(q.dtype), v.to(q.dtype), causal_lower_right(tokens, k.shape[2])
        # flash reads one head of keys for several of queries, the other kernel wants a copy for each
        grouped = q.shape[1] > k.shape[1]
        grouped = grouped and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True))
        if not grouped:
            k, v = (_repeated(t, q.shape[1] // t.shape[1]) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=grouped)
    joined: list[Any] = [getattr(t, "joined", None) for t in (k, v)]
    (k_past, k_own), (v_past, v_own) = (t.split([t.shape[2] - tokens, tokens], dim=2) for t in (k, v))
    if None in joined or k_own.shape[2] != tokens:
        own = k_own.to(q.dtype), v_own.to(q.dtype)
        return _PastAttention.apply(q, *own, k_past, v_past, scale, None)
    begin = joined[0].past.start - k_past.shape[2]

    def gather(start: int, *d: Tensor) -> None:
        for whole, part in zip(joined, d, strict=True):
            whole.past.gather(part, begin + start)

    own = joined[0].piece.to(q.dtype), joined[1].piece.to(q.dtype)
    return _PastAttention.apply(q, *own, k_past.detach(), v_past.detach(), scale, gather)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Attention of queries to keys and values up to their own place, as `past_attention`'s.

    Args:
        window: keys that a query sees, its own included; None for all.
    """
    tokens, seen, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if not q.numel():
        return _of_nothing(q, k, v)
    if window is not None and window < seen:
        k, v = (_repeated(t.to(q.dtype), groups) for t in (k, v))
        return _banded(q, k, v, window)
    if 1 < tokens < seen:
        return past_attention(q, k, v)
    k, v = (_repeated(t.to(q.dtype), groups) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)


def _of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What no row or no token gets: it depends on q, k and v all the same, with gradients of zero."""
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
        own = F.pad(t[:, :, past:], (0, 0, 0, pad)).unflatten(2, (-1, size))
        pairs.append(torch.cat([own[:, :, :-1], own[:, :, 1:]], dim=3).flatten(1, 2))
    more = _in_sight(bands, pairs[0], pairs[1], window).unflatten(1, (q.shape[1], -1)).flatten(2, 3)
    return torch.cat([out, more[:, :, : rest.shape[2]]], dim=2)


def _in_sight(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """By a mask: the last query's place is the last key's."""
    tokens, seen = q.shape[2], k.shape[2]
    ones = torch.ones(tokens, seen, dtype=torch.bool, device=q.device)
    mask = ones.tril(seen - tokens).triu(seen - tokens - window + 1)
    return F.scaled_dot_product_attention(q, k, v, mask)
