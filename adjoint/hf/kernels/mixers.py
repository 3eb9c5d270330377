"""Forwards in the places of mixers' own, which go on from a cache's states.

RecurrentGemma's and MiniMax's keep their states in themselves. flash-linear-attention's Mamba and Mamba-2 go
on from states by single tokens alone, and its attention needs flash-attn."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.fla import functions as fla
from adjoint.hf.cache import AttentionLayer, ChunkCache, RecurrentLayer
from adjoint.hf.model_parts import Forward
from adjoint.hf.transformers_api import CACHE_NAMES
from adjoint.kernels.attention import causal_attention
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan


class _MambaMixer(nn.Module):
    """Attributes of fla's Mamba and Mamba2; each has some."""

    in_proj: nn.Linear
    conv1d: nn.Conv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    dt_bias: nn.Parameter
    norm: nn.Module | None
    out_proj: nn.Linear
    A_log: nn.Parameter
    D: nn.Parameter
    D_has_hdim: bool
    dt_rank: int
    dt_limit: tuple[float, float]
    ssm_state_size: int
    intermediate_size: int
    conv_dim: int
    n_groups: int
    num_heads: int
    activation: str
    act: Callable[[Tensor], Tensor]


def _mamba(
    module: _MambaMixer,
    cache: RecurrentLayer,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Run Mamba's mixer (Gu & Dao 2023) on a chunk."""
    u, gate = module.in_proj(hidden_states).chunk(2, dim=-1)
    u = _masked(_mixer_conv(module, cache, _masked(u, attention_mask)), attention_mask)
    sizes = [module.dt_rank, module.ssm_state_size, module.ssm_state_size]
    step, B, C = module.x_proj(u).split(sizes, dim=-1)
    A = -module.A_log.to(accumulate_dtype(u.dtype)).exp()
    y, state = selective_scan(
        u,
        module.dt_proj(step),
        A,
        B,
        C,
        module.D,
        delta_softplus=True,
        initial_state=cache.recurrent_states[0],
    )
    cache.store_state("recurrent", 0, state)
    return module.out_proj(y * module.act(gate)), None


def _mamba2(
    module: _MambaMixer,
    cache: RecurrentLayer,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Run Mamba-2's mixer (Dao & Gu 2024) on a chunk."""
    sizes = [module.intermediate_size, module.conv_dim, module.num_heads]
    gate, inputs, dt = module.in_proj(_masked(hidden_states, attention_mask)).split(sizes, dim=-1)
    inputs = _masked(_mixer_conv(module, cache, _masked(inputs, attention_mask)), attention_mask)
    state_size = (module.conv_dim - module.intermediate_size) // 2
    x, B, C = inputs.split([module.intermediate_size, state_size, state_size], dim=-1)
    x = x.unflatten(-1, (module.num_heads, -1))
    B, C = (t.unflatten(-1, (module.n_groups, -1)) for t in (B, C))
    wide = accumulate_dtype(x.dtype)
    is_limited = tuple(module.dt_limit) != (0.0, float("inf"))
    if is_limited:
        dt = F.softplus(dt.to(wide) + module.dt_bias.to(wide)).clamp(*module.dt_limit)
    y, state = ssd_scan(
        x,
        dt,
        -module.A_log.to(wide).exp(),
        B,
        C,
        None if module.D_has_hdim else module.D,
        dt_bias=None if is_limited else module.dt_bias,
        dt_softplus=not is_limited,
        initial_state=cache.recurrent_states[0],
    )
    cache.store_state("recurrent", 0, state)
    y = y.flatten(-2)
    if module.D_has_hdim:
        y = y + module.D * x.flatten(-2)
    y = y * module.act(gate) if module.norm is None else module.norm(y, gate)
    return module.out_proj(y), None


class _AttentionMixer(nn.Module):
    """Attributes of fla's Attention and MultiheadLatentAttention; each has some."""

    q_proj: nn.Module
    k_proj: nn.Linear
    v_proj: nn.Linear
    kv_proj: nn.Module
    k_rope: nn.Linear
    o_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    rotary: nn.Module
    qk_norm: bool
    num_heads: int
    head_dim: int
    qk_nope_head_dim: int
    window_size: int | None
    max_position_embeddings: int | None


def _attention(
    module: _AttentionMixer,
    cache: AttentionLayer,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,  # of padding behind a chunk's tokens, which no token sees
    **_: object,
) -> tuple[Tensor, None]:
    """Run attention with rotary positions on a chunk."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (linear(hidden_states).unflatten(-1, (-1, module.head_dim)) for linear in projections)
    if module.qk_norm:
        q, k = module.q_norm(q), module.k_norm(k)
    longest = max(cache.past_length + q.shape[1], module.max_position_embeddings or 0)
    q, k = module.rotary(q, k, seqlen_offset=cache.past_length, max_seqlen=longest, cu_seqlens=None)
    keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2))
    y = causal_attention(q.transpose(1, 2), keys, values, module.window_size)
    return module.o_proj(y.transpose(1, 2).flatten(-2)), None


def _latent_attention(
    module: _AttentionMixer,
    cache: AttentionLayer,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,  # as of attention
    **_: object,
) -> tuple[Tensor, None]:
    """Run attention whose keys and values are made of a few channels (MLA, DeepSeek-V2) on a chunk."""
    heads, plain = module.num_heads, module.qk_nope_head_dim
    q = module.q_proj(hidden_states).unflatten(-1, (heads, -1))
    keys_and_values = module.kv_proj(hidden_states).unflatten(-1, (heads, -1))
    k, v = keys_and_values[..., :plain], keys_and_values[..., plain:]
    longest = max(cache.past_length + q.shape[1], module.max_position_embeddings or 0)
    turned = module.rotary(
        q[..., plain:],
        module.k_rope(hidden_states).unsqueeze(2),
        seqlen_offset=cache.past_length,
        max_seqlen=longest,
        cu_seqlens=None,
    )
    q = torch.cat([q[..., :plain], turned[0]], dim=-1)
    k = torch.cat([k, turned[1].expand(-1, -1, heads, -1)], dim=-1)
    keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2))
    y = causal_attention(q.transpose(1, 2), keys, values, module.window_size)
    return module.o_proj(y.transpose(1, 2).flatten(-2)), None


def _mixer_conv(module: _MambaMixer, cache: RecurrentLayer, x: Tensor) -> Tensor:
    """Convolve x (batch, seqlen, channels) from the cache's tail on, and store the new tail."""
    weight, bias = module.conv1d.weight[:, 0], module.conv1d.bias
    is_silu = module.activation in ("silu", "swish")
    y, tail = causal_conv1d(x, weight, bias, cache.conv_states[0], is_silu)
    cache.store_state("conv", 0, tail)
    return y if is_silu else module.act(y)


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return x (batch, seqlen, channels), zero where there is padding."""
    return x if attention_mask is None else x * attention_mask[:, -x.shape[1] :, None].to(x.dtype)


# --------------------------------------------------------------------------------------------- transformers


class _Griffin(nn.Module):
    """Attributes of RecurrentGemma's recurrent block."""

    rg_lru: _Recurrence
    conv_1d: nn.Conv1d
    linear_x: nn.Linear
    linear_y: nn.Linear
    linear_out: nn.Linear
    act_fn: Callable[[Tensor], Tensor]


class _Recurrence(nn.Module):
    """Attributes of RecurrentGemma's gated recurrence."""

    num_attention_heads: int
    recurrent_param: nn.Parameter
    recurrent_gate_weight: nn.Parameter
    recurrent_gate_bias: nn.Parameter
    input_gate_weight: nn.Parameter
    input_gate_bias: nn.Parameter


def _griffin(
    module: _Griffin, cache: RecurrentLayer, input_states: Tensor, position_ids: Tensor, **_: object
) -> tuple[Tensor, None]:
    """RecurrentGemma's recurrent block (De et al. 2024, sections 2.3 and 2.4)."""
    lru, conv = module.rg_lru, module.conv_1d
    y = module.act_fn(module.linear_y(input_states))
    u = module.linear_x(input_states)
    u, tail = causal_conv1d(u, conv.weight[:, 0], conv.bias, initial_state=cache.conv_states[0])
    begins = (position_ids == 0)[..., None]
    heads = u.unflatten(-1, (lru.num_attention_heads, -1))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(torch.einsum("bthi,hij->bthj", heads, weight) + bias).flatten(-2)

    decay = -8.0 * gate(lru.recurrent_gate_weight, lru.recurrent_gate_bias) * F.softplus(lru.recurrent_param)
    bounded = vars(sys.modules[type(lru).__module__])["SqrtBoundDerivative"]
    scale = begins + ~begins * bounded.apply(1 - torch.exp(2 * decay))
    b = u * gate(lru.input_gate_weight, lru.input_gate_bias) * scale.type(u.dtype)
    dtype = accumulate_dtype(b.dtype)
    states = linear_scan((torch.exp(decay) * ~begins).to(dtype), b.to(dtype), cache.recurrent_states[0])
    cache.store_state("conv", 0, tail)
    cache.store_state("recurrent", 0, states[:, -1])
    return module.linear_out(states.to(b.dtype) * y), None


class _Lightning(nn.Module):
    """Attributes of MiniMax's linear attention."""

    num_attention_heads: int
    slope_rate: Tensor
    qkv_proj: nn.Linear
    out_proj: nn.Linear
    output_gate: nn.Linear
    norm: nn.Module
    act_fn: Callable[[Tensor], Tensor]


def _lightning(
    module: _Lightning, cache: RecurrentLayer, hidden_states: Tensor, **_: object
) -> tuple[Tensor, None]:
    """MiniMax's linear attention with a decay per head: an SSD scan whose step is 1."""
    heads = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    query, key, value = heads.chunk(3, dim=-1)
    step, decay = torch.ones_like(query[..., 0]), -module.slope_rate.flatten()
    y, state = ssd_scan(value, step, decay, key, query, initial_state=cache.recurrent_states[0])
    cache.store_state("recurrent", 0, state)
    y = torch.sigmoid(module.output_gate(hidden_states)) * module.norm(y.flatten(-2))
    return module.out_proj(y), None


# By the name of the class.
MIXERS: dict[str, Forward] = {
    "RecurrentGemmaRecurrentBlock": _griffin,
    "MiniMaxLightningAttention": _lightning,
}
FLA_MIXERS: dict[str, Forward] = {
    "Mamba": _mamba,
    "Mamba2": _mamba2,
    "Attention": _attention,
    "MultiheadLatentAttention": _latent_attention,
}


# A mixer, our forward of its class, and the index of its layer.
MixerRow = tuple[weakref.ref[nn.Module], Forward, int]


def mixer_rows(model: nn.Module) -> list[MixerRow]:
    """Return the mixers for which there is a forward of ours."""
    rows = []
    for name, module in model.named_modules():
        table = FLA_MIXERS if fla.is_of_fla(module) else MIXERS
        if (ours := table.get(type(module).__name__)) is not None:
            index = next(int(component) for component in reversed(name.split(".")) if component.isdigit())
            rows.append((weakref.ref(module), ours, index))
    return rows


def mixer_forwards(rows: Iterable[MixerRow]) -> dict[nn.Module, Forward]:
    """Map mixers to the forwards that take the place of their own."""
    return {
        module: _forward_from_cache(module, ours, index)
        for reference, ours, index in rows
        if (module := reference()) is not None
    }


def _forward_from_cache(module: nn.Module, ours: Forward, index: int) -> Forward:
    """Return a forward that runs ours if it is given a `ChunkCache`, else the module's own."""
    original_forward = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        cache = next((kwargs[name] for name in CACHE_NAMES if name in kwargs), None)
        if not isinstance(cache, ChunkCache):
            return original_forward(*args, **kwargs)
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        outputs = ours(module, cache.layers[index], *args, **others)
        if fla.is_of_fla(module):  # whose blocks take the cache from one mixer to the next
            return *cast(tuple[object, ...], outputs), cache
        return outputs

    return forward
