"""Attention of a wrapped model by `adjoint.kernels.attention`. transformers' own, given no mask, is causal at
the upper left, which drops the past."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from adjoint.kernels import attention

NAME = "adjoint"  # under which transformers knows it


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
            return attention.past_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None
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
