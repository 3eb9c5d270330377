"""RWKV-7 in RWKV-LM's names, in plain PyTorch, token by token: its published formulas (Peng et al. 2025, and
`RWKV-v7/rwkv_v7_demo.py` of BlinkDL/RWKV-LM), with nothing of ours or of flash-linear-attention.

C channels in heads of N, F channels of the channel mix, V tokens; ranks of the low-rank maps by letters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = {"V": 19, "C": 16, "N": 8, "F": 40, "w": 3, "a": 4, "v": 2, "g": 5, "layers": 3}


def random_tensors(
    seed: int = 0, dtype: torch.dtype = torch.float64, unused: bool = False, **sizes: Any
) -> dict[str, Tensor]:
    """Return a model's tensors in RWKV-LM's names, shapes and order, away from initial values.

    Args:
        unused: whether the first block has the value mix that its trainer saves and nothing reads.
    """
    n = SIZES | sizes
    draw, channels = torch.Generator().manual_seed(seed), n["C"]

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + scale * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)

    def matrix(rows: int, columns: int, inputs: int) -> Tensor:
        return normal(rows, columns, scale=inputs**-0.5)

    def norm(name: str) -> dict[str, Tensor]:
        return {
            f"{name}.weight": normal(channels, scale=0.2, mean=1.0),
            f"{name}.bias": normal(channels, scale=0.2),
        }

    tensors = {"emb.weight": normal(n["V"], channels)}
    for i in range(n["layers"]):
        block = {**norm("ln1"), **norm("ln2"), **(norm("ln0") if i == 0 else {})}
        block |= {f"att.x_{x}": normal(1, 1, channels, scale=0.3, mean=0.5) for x in "rwkvag"}
        for x in "wavg" if i or unused else "wag":
            block[f"att.{x}1"] = matrix(channels, n[x], channels)
            block[f"att.{x}2"] = matrix(n[x], channels, n[x])
            if x != "g":
                block[f"att.{x}0"] = normal(1, 1, channels)
        block |= {f"att.k_{x}": normal(1, 1, channels, scale=0.2, mean=1.0) for x in "ka"}
        block["att.r_k"] = normal(channels // n["N"], n["N"], scale=0.3)
        for name in ("receptance", "key", "value", "output"):
            block[f"att.{name}.weight"] = matrix(channels, channels, channels)
        block |= norm("att.ln_x")
        block["ffn.x_k"] = normal(1, 1, channels, scale=0.3, mean=0.5)
        block["ffn.key.weight"] = matrix(n["F"], channels, channels)
        block["ffn.value.weight"] = matrix(channels, n["F"], n["F"])
        tensors |= {f"blocks.{i}.{name}": t for name, t in block.items()}
    return tensors | norm("ln_out") | {"head.weight": matrix(n["V"], channels, channels)}


def logits(tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return logits (batch, seqlen, V)."""
    x, first_values = tensors["emb.weight"][ids], None
    for i in range(1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))):
        block = {name.removeprefix(f"blocks.{i}."): t for name, t in tensors.items()}
        if i == 0:
            x = _layer_norm(block, "ln0", x)
        mixed, first_values = _time_mix(block, _layer_norm(block, "ln1", x), first_values)
        x = x + mixed
        x = x + _channel_mix(block, _layer_norm(block, "ln2", x))
    return _layer_norm(tensors, "ln_out", x) @ tensors["head.weight"].mT


def _layer_norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)


def _shifted(x: Tensor) -> Tensor:
    """Return each token's predecessor, 0 before the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def _channel_mix(w: dict[str, Tensor], x: Tensor) -> Tensor:
    x = x + (_shifted(x) - x) * w["ffn.x_k"]
    return F.relu(x @ w["ffn.key.weight"].mT).square() @ w["ffn.value.weight"].mT


def _time_mix(w: dict[str, Tensor], x: Tensor, first_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs and the first block's values.

    S_t = S_{t-1} (diag(w_t) - κ̂_t (a_t ∘ κ̂_t)ᵀ) + v_t k_tᵀ, y_t = S_t r_t, per head."""
    w = {name.removeprefix("att."): t for name, t in w.items() if name.startswith("att.")}
    heads, dim = w["r_k"].shape
    before = _shifted(x)
    xs = {name: x + (before - x) * w[f"x_{name}"] for name in "rwkvag"}
    r, k, v = (xs[name[0]] @ w[f"{name}.weight"].mT for name in ("receptance", "key", "value"))
    log_decay = -math.exp(-0.5) * torch.sigmoid(w["w0"] + torch.tanh(xs["w"] @ w["w1"]) @ w["w2"])
    if first_values is None:
        first_values = v
    else:
        v = v + (first_values - v) * torch.sigmoid(w["v0"] + xs["v"] @ w["v1"] @ w["v2"])
    rate = torch.sigmoid(w["a0"] + xs["a"] @ w["a1"] @ w["a2"])
    gate = torch.sigmoid(xs["g"] @ w["g1"]) @ w["g2"]
    removed = F.normalize((k * w["k_k"]).unflatten(-1, (heads, dim)), dim=-1)
    k = k * (1 + (rate - 1) * w["k_a"])
    r, k, v, rate, decay = (t.unflatten(-1, (heads, dim)) for t in (r, k, v, rate, log_decay.exp()))

    state, outputs = x.new_zeros(len(x), heads, dim, dim), []
    for t in range(x.shape[1]):
        read = state @ removed[:, t, :, :, None]
        state = state * decay[:, t, :, None] - read * (removed * rate)[:, t, :, None]
        state = state + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((state @ r[:, t, :, :, None])[..., 0])
    y = torch.stack(outputs, dim=1).flatten(0, 1).flatten(1)
    y = F.group_norm(y, heads, w["ln_x.weight"], w["ln_x.bias"], eps=64e-5).view_as(x)
    bonus = (r * k * w["r_k"]).sum(-1, keepdim=True) * v
    return ((y + bonus.flatten(2)) * gate) @ w["output.weight"].mT, first_values
