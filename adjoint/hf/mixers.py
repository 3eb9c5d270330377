"""Mixers of transformers that keep their state in themselves, or do not go on from one in a single pass: here
they go on from a chunk's cache, by our kernels. They are known by the names of their classes; the comparison
on first use tells whether they are the ones that are meant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.hf.cache import ChunkCache
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.ssd_scan import ssd_scan


def _griffin(module: Any, cache: Any, input_states: Tensor, position_ids: Tensor, **_: Any) -> Any:
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
    cache.set("conv", 0, tail)
    cache.set("recurrent", 0, states[:, -1])
    return module.linear_out(states.to(b.dtype) * y), None


def _lightning(module: Any, cache: Any, hidden_states: Tensor, **_: Any) -> Any:
    """MiniMax's linear attention with a decay per head: an SSD scan whose step is 1."""
    heads = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    query, key, value = heads.chunk(3, dim=-1)
    step, decay = torch.ones_like(query[..., 0]), -module.slope_rate.flatten()
    y, state = ssd_scan(value, step, decay, key, query, initial_state=cache.recurrent_states[0])
    cache.set("recurrent", 0, state)
    y = torch.sigmoid(module.output_gate(hidden_states)) * module.norm(y.flatten(-2))
    return module.out_proj(y), None


OURS: dict[str, Callable[..., Any]] = {
    "RecurrentGemmaRecurrentBlock": _griffin,
    "MiniMaxLightningAttention": _lightning,
}


def forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Of each mixer that has one of ours, a forward that goes on from a `ChunkCache`."""
    found = {}
    for name, module in model.named_modules():
        if (ours := OURS.get(type(module).__name__)) is not None:
            index = next(int(part) for part in reversed(name.split(".")) if part.isdigit())
            found[module] = _forward(module, ours, index)
    return found


def _forward(module: Any, ours: Callable[..., Any], index: int) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if not isinstance(past_key_values, ChunkCache):
            return own(*args, past_key_values=past_key_values, **kwargs)
        return ours(module, past_key_values.layers[index], *args, **kwargs)

    return forward
