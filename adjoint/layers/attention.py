"""Grouped-query attention (Ainslie et al. 2023) with rotary embedding (Su et al. 2021), as in Llama; the
parameters are named as in mamba-ssm's attention. Its state is append-only: keys and values so far."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.kernels import checks
from adjoint.kernels.attention import causal_attention, join
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.layers.config import StackConfig
from adjoint.layers.init import reset


class AttentionMixer(nn.Module):
    """in_proj → (conv1d →) rotated q, k and v → causal attention → out_proj. State: (conv tail,) keys and
    values, (batch, num_key_value_heads, tokens so far, head_dim) each, the keys rotated."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.heads, self.kv_heads, self.head_dim = config.attention_heads
        channels, taps = (self.heads + 2 * self.kv_heads) * self.head_dim, config.attention_d_conv
        self.in_proj = nn.Linear(config.d_model, channels, bias=config.attention_has_bias)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels) if taps else None
        width = self.heads * self.head_dim
        self.out_proj = nn.Linear(width, config.d_model, bias=config.attention_has_bias)
        self.grows = (2, 2) if self.conv1d is None else (None, 2, 2)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.out_proj)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros, the conv tail (batch, channels, attention_d_conv - 1) where there is a convolution; keys and
        values of no token, (batch, num_key_value_heads, 0, head_dim) each."""
        tail = (batch, self.in_proj.out_features, self.config.attention_d_conv - 1)
        shapes = (() if self.conv1d is None else (tail,)) + ((batch, self.kv_heads, 0, self.head_dim),) * 2
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def forward(
        self, x: Tensor, state: tuple[Any, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x (batch, seqlen, d_model) → the same shape, and the new state.

        Args:
            seq_idx: (batch, seqlen): where it changes another document begins.
            state: tensors, which come back with the new tokens behind them; or a `kernels.attention.Past`
                each, which the new tokens join, and these alone come back.
        """
        *tail, _, _ = state
        state, qkv = state[-2:], self.in_proj(x)
        if self.conv1d is not None:
            qkv, *tail = causal_conv1d(
                qkv, self.conv1d.weight.squeeze(1), self.conv1d.bias, tail[0], seq_idx=seq_idx
            )
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in qkv.split(sizes, dim=-1))
        before, window = state[0], self.config.sliding_window
        seen = before.shape[2] if isinstance(before, Tensor) else len(before)
        turns = rotary(seen, x.shape[1], self.config.rotary_dim, self.config.rope_theta, q)
        q, k = rotate(q, *turns), rotate(k, *turns)
        if isinstance(before, Tensor):
            for t in state:
                checks.shape("initial_state", t, x.shape[0], self.kv_heads, seen, self.head_dim)
            keys, values = (torch.cat([s, t.to(s.dtype)], dim=2) for s, t in zip(state, (k, v), strict=True))
            after = keys, values
        else:
            after, reach = (k, v), None if window is None else window - 1
            keys, values = (join(past, t, reach) for past, t in zip(state, (k, v), strict=True))
        if seq_idx is None:
            y = causal_attention(q, keys, values, window)
        else:
            y = _by_documents(q, keys, values, window, seq_idx, getattr(before, "visible", None))
        return self.out_proj(y.transpose(1, 2).flatten(2)), (*tail, *after)


def _by_documents(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    seq_idx: Tensor,
    visible: Sequence[int] | None,
) -> Tensor:
    """Each document's attention by itself. The first one of a row goes on from the past, of which `visible`
    tokens are its own, where not all are."""
    past, rows = keys.shape[2] - q.shape[2], []
    for row, numbers in enumerate(seq_idx):
        begins = (numbers[1:] != numbers[:-1]).nonzero().flatten() + 1
        out = []
        for a, b in itertools.pairwise([0, *begins.tolist(), len(numbers)]):
            first = past + a if a else past - min(past, past if visible is None else visible[row])
            k, v = (t[row : row + 1, :, first : past + b] for t in (keys, values))
            out.append(causal_attention(q[row : row + 1, :, a:b], k, v, window))
        rows.append(torch.cat(out, dim=2))
    return torch.cat(rows)


def rotary(first: int, tokens: int, dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, dim / 2) of the rotary embedding's angles, of the tokens from place `first`
    on (Su et al. 2021, section 3.2.2); float32, for a float64 `like` float64."""
    # angles in float64: at a million tokens float32 would round them to a tenth of a radian
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=like.device)
    places = torch.arange(first, first + tokens, dtype=torch.float64, device=like.device)
    angles = places[:, None] * theta ** (-pairs / dim)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, heads, tokens, dim), of whose first 2 n channels, n angles a token being given, channel i is
    turned together with channel i + n, as in Hugging Face's models."""
    n = cos.shape[-1]
    if not n:
        return x
    a, b, rest = x.to(cos.dtype).split([n, n, x.shape[3] - 2 * n], dim=3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=3).to(x.dtype)
