"""Attention of a wrapped model by `adjoint.kernels.attention`, in the place of transformers' "sdpa" for the
time of a chunk. That, given no mask, is causal at the upper left, which drops the past.

The configuration goes on saying "sdpa": models look there for what to hand over, such as a mask of the keys
that sparse attention has picked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adjoint.kernels import attention


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
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and 1 < tokens < seen and causal:
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


# Mappings of transformers, and what stands in them meanwhile.
OURS: list[tuple[Any, dict[str, Any]]] = [
    (ALL_ATTENTION_FUNCTIONS, {"sdpa": _attention}),
    (ALL_MASK_ATTENTION_FUNCTIONS, {"sdpa": _mask}),
]
