"""Attention of a chunk to all that is before it, without a mask of chunk × sequence entries.

On a CPU: two flash calls, to the past and, causally, to the chunk itself, joined by their log-sum-exp (as in
ring attention, Liu et al. 2023); on CUDA PyTorch's flash or memory-efficient kernel, causal at the lower
right. transformers' own, given no mask, is causal at the upper left, which drops the past."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "adjoint"  # under which transformers knows it

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


BLOCK = 4096  # tokens of the past at a time


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
        widest = max(q.shape[3], width)
        q = _padded(q, widest)
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
        out = out.to(q.dtype)
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
        dk_past = dv_past = None
        if ctx.gather is None and k_past.shape[2]:
            dk_past, dv_past = torch.empty_like(k_past), torch.empty_like(v_past)
        folded = [_folded(t, groups).contiguous() for t in (d, q, out, log)]
        for start in range(0, k_past.shape[2], BLOCK):
            block = (_padded(t[:, :, start : start + BLOCK], widest).to(q.dtype) for t in (k_past, v_past))
            part, *d_block = _flash_backward(*folded[:2], *block, *folded[2:], 0.0, False, scale=scale)
            dq = dq + part.reshape(q.shape)
            a, b = (t[..., : p.shape[3]] for t, p in zip(d_block, (k, v), strict=True))
            if dk_past is None or dv_past is None:
                ctx.gather(start, a, b)
            else:
                dk_past[:, :, start : start + BLOCK], dv_past[:, :, start : start + BLOCK] = a, b
        return dq[..., : k.shape[3]], dk, dv, dk_past, dv_past, None, None


def _padded(t: Tensor, width: int) -> Tensor:
    """The kernel wants values as wide as keys."""
    return t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3]))


def _folded(t: Tensor, groups: int) -> Tensor:
    """(batch, heads, tokens, …) → (batch, heads / groups, groups × tokens, …)."""
    return t.reshape(t.shape[0], t.shape[1] // groups, groups * t.shape[2], *t.shape[3:])


def _repeated(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(1, (-1, groups)).sum(2)


def past_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of queries (batch, heads, tokens, dim) to keys and values (batch, kv_heads, past + tokens,
    dim), each query to all up to its own place.

    Keys and values that the cache has just joined to their past are read where they lie, and the past's
    cotangents are added where they are gathered."""
    tokens = q.shape[2]
    if q.device.type != "cpu":
        bias, groups = causal_lower_right(tokens, k.shape[2]), q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(
            q, repeat_kv(k, groups), repeat_kv(v, groups), bias, scale=scale
        )
    joined: list[Any] = [getattr(t, "joined", None) for t in (k, v)]
    (k_past, k_own), (v_past, v_own) = (t.split([t.shape[2] - tokens, tokens], dim=2) for t in (k, v))
    if None in joined or k_own.shape[2] != tokens:
        return _PastAttention.apply(q, k_own, v_own, k_past, v_past, scale, None)
    begin = joined[0].past.start - k_past.shape[2]

    def gather(start: int, *d: Tensor) -> None:
        for whole, part in zip(joined, d, strict=True):
            whole.past.gather(part, begin + start)

    own = (whole.piece.to(q.dtype) for whole in joined)
    return _PastAttention.apply(q, *own, k_past.detach(), v_past.detach(), scale, gather)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    tokens, seen = query.shape[2], key.shape[2]
    if attention_mask is None and 1 < tokens < seen and is_causal is not False:
        if torch.is_autocast_enabled(query.device.type):  # which does not reach into a function of one's own
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            if query.is_cuda or dropout:
                key, value = key.to(dtype), value.to(dtype)
        if not dropout and kwargs.get("position_bias") is None:
            return past_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None
        attention_mask = torch.ones(tokens, seen, dtype=torch.bool, device=query.device).tril(seen - tokens)
        attention_mask = attention_mask[None, None]
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask where attention is plainly causal: `_attention` knows where the diagonal is."""
    plain = kwargs.get("local_size") is None and kwargs.get("allow_is_causal_skip", True)
    if plain and kwargs.get("attention_mask") is None:
        return None
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
