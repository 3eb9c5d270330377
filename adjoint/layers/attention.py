"""Grouped-query attention (Ainslie et al. 2023) with rotary embedding (Su et al. 2021), as in Llama; the
parameters are named as in mamba-ssm's attention. Its state is append-only: the keys and values so far."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjoint.kernels import checks
from adjoint.kernels.attention import causal_attention, is_spread, join, row_of
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers.config import StackConfig
from adjoint.layers.conv1d import CausalConv1d
from adjoint.layers.init import reset
from adjoint.layers.mixer import Mixer
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Split,
    Splits,
    by_columns,
    by_rows,
    local_units,
    rank_config,
)


class AttentionSizes(NamedTuple):
    """Query heads, key and value heads, channels per head, how many of these rotate, and whether in_proj and
    out_proj have biases."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    bias: bool

    @property
    def channels(self) -> int:
        """in_proj's output channels: queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class AttentionMixer(Mixer):
    """in_proj → (conv1d →) rotated q and k, v → causal attention → out_proj. State: rotated keys and values,
    (batch, num_key_value_heads, tokens so far, head_dim) each; before them the conv tail, (batch, channels,
    attention_d_conv - 1), if there is a convolution."""

    projected, takes_state_handoff = True, True

    def __init__(self, config: StackConfig) -> None:
        sizes, taps = self.sizes_of(config), config.attention_d_conv
        past = sizes.kv_heads, None, sizes.head_dim
        super().__init__(config, *([(sizes.channels, taps - 1)] if taps else []), past, past)
        self.sizes = sizes
        self.in_proj = nn.Linear(config.d_model, sizes.channels, bias=sizes.bias)
        self.conv1d = CausalConv1d(sizes.channels, taps) if taps else None
        bias = sizes.bias if config.out_proj_bias is None else config.out_proj_bias
        self.out_proj = nn.Linear(sizes.heads * sizes.head_dim, config.d_model, bias=bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.out_proj)

    @classmethod
    def sizes_of(cls, config: StackConfig) -> AttentionSizes:
        heads = config.num_attention_heads or max(1, config.d_model // 64)
        dim = config.head_dim or max(2, config.d_model // heads // 2 * 2)
        rotary_dim = dim if config.rotary_emb_dim is None else config.rotary_emb_dim
        bias = config.bias if config.attention_bias is None else config.attention_bias
        return AttentionSizes(heads, config.num_key_value_heads or heads, dim, rotary_dim, bias)

    @classmethod
    def check(cls, config: StackConfig) -> None:
        heads, kv_heads, dim, rotary_dim, _ = cls.sizes_of(config)
        if heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads {kv_heads} must divide num_attention_heads, which is {heads}"
            )
        if config.rotary_emb_dim is None and dim % 2:
            raise ValueError(f"head_dim must be even, as rotary embedding rotates pairs; got {dim}")
        if rotary_dim % 2 or rotary_dim > dim:
            raise ValueError(f"rotary_emb_dim must be even, and at most head_dim {dim}; got {rotary_dim}")
        if not config.rope_theta > 1:
            raise ValueError(f"rope_theta must be a number above 1, such as 10000; got {config.rope_theta}")

    @classmethod
    def attended_channels(cls, config: StackConfig) -> int:
        sizes = cls.sizes_of(config)
        return sizes.heads * sizes.head_dim

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts queries, keys and values, repeated for each head, the output, and in_proj's output if there
        is a convolution."""
        heads, kv_heads, dim, rotary_dim, _ = sizes = cls.sizes_of(config)
        bands = 2 if config.sliding_window else 1  # queries in bands, keys and values stored twice
        convolved = sizes.channels if config.attention_d_conv else 0
        if selective:  # products as wide as the residual stream are recomputed
            return (2 * kv_heads * dim * (kv_heads < heads) + convolved) * element
        return (5 * bands * heads * dim + convolved) * element + (rotary_dim + heads) * max(element, 4)

    def splits(self) -> Splits:
        heads, kv_heads, dim, _, _ = self.sizes
        queries = Section("num_attention_heads", heads, dim)
        keys = Section("num_key_value_heads", kv_heads, dim, shared=True)
        rows = by_rows(in_proj=[queries, keys, keys], conv1d=[queries, keys, keys])
        return {**rows, **by_columns(out_proj=[queries])}

    def state_splits(self) -> tuple[Split | None, ...]:
        heads = Split(1, [Section("num_key_value_heads", self.sizes.kv_heads, shared=True)])
        tail = () if self.conv1d is None else (self.splits()["conv1d"]._replace(dim=1),)
        return *tail, heads, heads

    def rank_config(self, ranks: int) -> RankConfig:
        heads, kv_heads, dim, _, _ = self.sizes
        return rank_config(
            self.config,
            ranks,
            num_attention_heads=local_units("num_attention_heads", heads, ranks),
            num_key_value_heads=local_units("num_key_value_heads", kv_heads, ranks, shared=True),
            head_dim=dim,
        )

    def forward(
        self, x: Tensor, state: tuple[Any, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and the new state.

        The new state's keys and values are the old ones followed by the new tokens'; or the new tokens'
        alone, if the old ones are each a `kernels.attention.Past`, to which the forward appends them
        itself."""
        *tail, _, _ = state
        state, qkv = state[-2:], self.in_proj(x)
        if self.conv1d is not None:
            qkv, *tail = self.conv1d(qkv, tail[0], seq_idx=seq_idx)
        heads, kv_heads, dim, rotary_dim, _ = self.sizes
        widths = [n * dim for n in (heads, kv_heads, kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in qkv.split(widths, dim=-1))
        before, window = state[0], self.config.sliding_window
        past_tokens = before.shape[2] if isinstance(before, Tensor) else len(before)
        places = places_of(past_tokens, x.shape[1], x.device)
        base, factor = self.config.rope_theta, self.config.rope_scaling_factor
        turns = rotary(places, rotary_dim, base, q, factor)
        q, k = rotate(q, *turns), rotate(k, *turns)
        if isinstance(before, Tensor):
            for t in state:
                checks.shapes(initial_state=(t, x.shape[0], kv_heads, past_tokens, dim))
            keys, values = (torch.cat([s, t.to(s.dtype)], dim=2) for s, t in zip(state, (k, v), strict=True))
            after = keys, values
        else:
            after, reach = (k, v), None if window is None else window - 1
            keys, values = (join(past, t, reach) for past, t in zip(state, (k, v), strict=True))
        if seq_idx is None:
            y = causal_attention(q, keys, values, window)
        else:
            starts, visible = getattr(before, "starts", None), getattr(before, "visible", None)
            starts = [begins[1:] for begins in checks.starts_in(seq_idx)] if starts is None else starts
            y = _by_documents(q, keys, values, window, starts, visible)
        return self.out_proj(y.transpose(1, 2).flatten(2)), (*tail, *after)


def _by_documents(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    starts: Sequence[Sequence[int]],
    visible: Sequence[int] | None,
) -> Tensor:
    """Attention within each document; others than the first begin at `starts[row]`. A row's first document
    continues from the past, of which the last `visible[row]` tokens are its own; None: all."""
    past, rows = keys.shape[2] - q.shape[2], []
    for row, begins in enumerate(starts):
        out = []
        for a, b in itertools.pairwise([0, *begins, q.shape[2]]):
            first = past + a if a else past - min(past, past if visible is None else visible[row])
            if a == 0 and is_spread(keys):
                k, v = (row_of(t, row, b) for t in (keys, values))
            else:
                k, v = (t[row : row + 1, :, first : past + b] for t in (keys, values))
            out.append(causal_attention(q[row : row + 1, :, a:b], k, v, window))
        rows.append(torch.cat(out, dim=2))
    return torch.cat(rows)


def places_of(first: int, tokens: int, device: torch.device) -> Tensor:
    """Return the positions from `first` on, (tokens,) float64."""
    # angles in float64: at a million tokens float32 would round them to a tenth of a radian
    return torch.arange(first, first + tokens, dtype=torch.float64, device=device)


def rotary(
    places: Tensor, dim: int, theta: float, like: Tensor, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (tokens, dim / 2) each, of the rotary embedding's angles at the positions `places`
    (tokens,) float64 (Su et al. 2021, section 3.2.2), divided by `factor`; float32, or float64 for a float64
    `like`."""
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=like.device)
    places = places if factor == 1 else places / factor
    angles = places[:, None] * theta ** (-pairs / dim)
    dtype = accumulate_dtype(like.dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, heads, tokens, dim) rotated by n angles per token, cos and sin (tokens, n): angle i turns the
    pair of channels i and i + n, as in Hugging Face's models; channels from 2 n on stay as they are."""
    n = cos.shape[-1]
    if not n:
        return x
    a, b, rest = x.to(cos.dtype).split([n, n, x.shape[3] - 2 * n], dim=3)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=3).to(x.dtype)
