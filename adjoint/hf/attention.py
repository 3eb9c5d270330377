"""Attention of a chunk to all that is before it, without a mask of chunk × sequence entries.

On a CPU: two flash calls, to the past and, causally, to the chunk itself, joined by their log-sum-exp (as in
ring attention, Liu et al. 2023); on CUDA PyTorch's flash or memory-efficient kernel, causal at the lower
right. transformers' own, given no mask, is causal at the upper left, which drops the past."""

from __future__ import annotations

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


class _PastAttention(torch.autograd.Function):
    """softmax(q [past own]ᵀ) [past own], causal at the lower right. Heads that share keys lie side by side as
    more queries where there is no order among them: towards the past."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        past, groups, width = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1], v.shape[3]
        q, k, v = _of_one_width(q, k, v)
        before, log_before = _flash(
            _folded(q, groups), k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale
        )
        before, log_before = before.reshape(q.shape), log_before.reshape(q.shape[:3])
        own, log_own = _flash(
            q, _repeated(k[:, :, past:], groups), _repeated(v[:, :, past:], groups), 0.0, True, scale=scale
        )
        log = torch.logaddexp(log_before, log_own)
        out = before * (log_before - log).exp()[..., None] + own * (log_own - log).exp()[..., None]
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log)
        ctx.scale, ctx.widths = scale, (width, past, groups)
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        q, k, v, out, log = ctx.saved_tensors
        width, past, groups = ctx.widths
        d = F.pad(d, (0, out.shape[3] - width)).contiguous()
        folded = (_folded(t, groups) for t in (d, q))
        # With the joined output and log-sum-exp, each part's backward is its share of the whole's.
        dq, dk, dv = _flash_backward(
            *folded,
            k[:, :, :past],
            v[:, :, :past],
            _folded(out, groups),
            _folded(log, groups).contiguous(),
            0.0,
            False,
            scale=ctx.scale,
        )
        dq_own, dk_own, dv_own = _flash_backward(
            d,
            q,
            _repeated(k[:, :, past:], groups),
            _repeated(v[:, :, past:], groups),
            out,
            log,
            0.0,
            True,
            scale=ctx.scale,
        )
        dk = torch.cat([dk, _summed(dk_own, groups)], dim=2)
        dv = torch.cat([dv, _summed(dv_own, groups)], dim=2)
        return dq.reshape(q.shape) + dq_own, dk, dv[..., :width], None


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel wants values as wide as keys."""
    widest = max(q.shape[3], v.shape[3])
    padded = (t if t.shape[3] == widest else F.pad(t, (0, widest - t.shape[3])) for t in (q, k, v))
    q, k, v = padded
    return q, k, v


def _folded(t: Tensor, groups: int) -> Tensor:
    """(batch, heads, tokens, …) → (batch, heads / groups, groups × tokens, …)."""
    return t.reshape(t.shape[0], t.shape[1] // groups, groups * t.shape[2], *t.shape[3:])


def _repeated(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.unflatten(1, (-1, groups)).sum(2)


def past_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention of queries (batch, heads, tokens, dim) to keys and values (batch, kv_heads, past + tokens,
    dim), each query to all up to its own place."""
    if q.device.type == "cpu":
        return _PastAttention.apply(q, k, v, scale)
    bias = causal_lower_right(q.shape[2], k.shape[2])
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), bias, scale=scale)


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
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
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
