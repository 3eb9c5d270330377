"""Our scans, convolution and attention behind the names and signatures of transformers' own, to which they
are bound for the time of a chunk.

transformers' Mamba-1 scan starts from zero whatever the cache holds; its Mamba scans keep every step, or
every pair of steps of a block, in memory; its gated delta rule takes chunks out of a long tensor one by one,
each of which gets a gradient of full length; its convolution keeps what goes into SiLU; its attention, given
no mask, is causal at the upper left, which drops the past."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adjoint.engine.autograd import uncompiled
from adjoint.kernels import attention
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan


class _Handed(threading.local):
    state: Tensor | None = None


handed = _Handed()  # the recurrent state that the cache gave last


@uncompiled
def _mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """transformers' signature: everything (batch, d_inner or d_state, seqlen)."""
    state, handed.state = handed.state, None
    if state is not None and state.dim() == 4:  # (batch, heads, d_inner, d_state): of Zamba, head by head
        state, rest = state[:, 0], state[:, 1:]
        handed.state = rest if rest.shape[1] else None
    u, delta, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)
    y, final = selective_scan(u, delta, A, B, C, D, gate, delta_bias, delta_softplus, initial_state=state)
    y = y.transpose(1, 2).to(hidden_states.dtype)
    return (y, final) if return_last_state else y


def _mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """transformers' signature: x (batch, seqlen, nheads, headdim)."""
    if hidden_states.device.type == "cpu":  # where theirs gives float32 at least; its kernels keep bfloat16
        hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if dt_limit[0] > 0 or dt_limit[1] != float("inf"):
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        dt_bias, dt_softplus = None, False
    y, final = ssd_scan(hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state=initial_states)
    return (y, final) if return_final_states else y


def _chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> Any:
    """transformers' signature: query and key (batch, seqlen, k_heads, d_k), value (batch, seqlen, v_heads,
    d_v)."""
    q, k = (t.to(accumulate_dtype(query.dtype)) for t in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, groups = q * q.shape[-1] ** -0.5, value.shape[2] // q.shape[2]
    if groups > 1:
        q, k = (t.repeat_interleave(groups, dim=2) for t in (q, k))
    with torch.autocast(query.device.type, enabled=False):
        out, final = gated_delta_rule(q, k, value, g, beta, initial_state)
    return out.to(query.dtype), final if output_final_state else None


def _causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """transformers' signature: hidden_states (batch, channels, seqlen), the inputs before a chunk in front of
    it, and weight (channels, d_conv)."""
    x, silu = hidden_states.transpose(1, 2), activation in ("silu", "swish")
    y = causal_conv1d(x.to(weight.dtype), weight, bias, silu=silu)[0]
    y = y if silu or activation is None else ACT2FN[activation](y)
    return y.to(hidden_states.dtype).transpose(1, 2)


@uncompiled
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


# By the names that the Python modules of mixers have for them.
OURS = {
    "causal_conv1d_fn": _causal_conv1d,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": _chunk_gated_delta_rule,
}
# In registries. The configuration goes on saying "sdpa": models look there for what to hand over, such as a
# mask of the keys that sparse attention has picked.
REGISTRIES: list[tuple[Any, dict[str, Any]]] = [
    (ALL_ATTENTION_FUNCTIONS, {"sdpa": _attention}),
    (ALL_MASK_ATTENTION_FUNCTIONS, {"sdpa": _mask}),
]


def places(model: nn.Module) -> list[tuple[Any, dict[str, Any]]]:
    """Mappings from names to functions, of the Python modules of a model's classes and of transformers'
    registries, and ours for each."""
    modules = {cls.__module__ for m in model.modules() for cls in type(m).__mro__}
    found = [vars(sys.modules[name]) for name in sorted(modules) if name in sys.modules]
    pairs = [(names, {name: OURS[name] for name in OURS if name in names}) for names in found]
    return [(names, ours) for names, ours in pairs if ours] + REGISTRIES
