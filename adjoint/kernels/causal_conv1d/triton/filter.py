"""Causal depthwise convolution with long filters, in Triton: ``y_t = sum_j weight[:, j] x_{t-width+1+j}``.

A program takes a tile of tokens and channels and goes through the taps: a tap's inputs are the tile's rows
some tokens back, which the caches have from the tap before. For the weights' gradient it goes through a
stretch of tokens with a few taps, so that the cotangents are read once for these.

Backward:  dx_s = sum_k weight[:, width-1-k] dy_{s+k},  dweight[:, width-1-k] = sum_t dy_t x_{t-k}.

Proven under the interpreter and by compilation; not measured on a GPU.

Parameters of the kernels that are not obvious:

    state: the inputs before the first token, (batch, channels, width - 1)
    starts: (batch, seqlen) int32, the first token of each token's document; -width for the one that goes on
        from the state. Without documents there is none
    *_b, *_t: strides of batch and token; channels are dense
    TOKENS, CHANNELS: a tile; TAPS: of a program of the weights' gradient; STRETCH: its tokens
    ACC: type of sums, float32 or float64
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.triton import common

TOKENS, CHANNELS = 64, 32
TAPS, STRETCH = 4, 1024
WEIGHT_TOKENS = 32  # of a tile of the weights' gradient, whose sums are in registers beside it


@triton.jit
def _inputs(x, state, s, low, seqlen, d, d_ok, width, x_t, HAS_STATE: tl.constexpr, ACC: tl.constexpr):
    """The inputs of tokens s (tokens, 1) and channels d: those of the state for s < 0, zero before `low`."""
    value = tl.load(x + s * x_t + d, mask=d_ok & (s >= 0) & (s >= low) & (s < seqlen), other=0.0).to(ACC)
    if HAS_STATE:
        before = (s < 0) & (s > -width) & (s >= low)
        value += tl.load(state + d * (width - 1) + (s + width - 1), mask=d_ok & before, other=0.0).to(ACC)
    return value


@triton.jit
def _first_tokens(starts, t, seqlen, width, HAS_RESET: tl.constexpr):
    """The first token of the document of each of the tokens t; -width outside of the sequence."""
    if HAS_RESET:
        return tl.load(starts + t, mask=(t >= 0) & (t < seqlen), other=0).to(tl.int64) - tl.where(
            (t >= 0) & (t < seqlen), 0, width
        )
    else:
        return t * 0 - width


@triton.jit(do_not_specialize=[*common.LENGTHS, "width"])
def _forward_kernel(
    x,
    weight,
    state,
    starts,
    y,
    seqlen,
    channels,
    width,
    x_b,
    x_t,
    HAS_STATE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    d_ok = d < channels
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (width - 1)
    if HAS_RESET:
        starts += batch * seqlen
    low = _first_tokens(starts, t, seqlen, width, HAS_RESET)
    total = tl.zeros((TOKENS, CHANNELS), ACC)
    for k in range(0, width):
        w = tl.load(weight + d * width + (width - 1 - k), mask=d_ok, other=0.0).to(ACC)
        total += w * _inputs(x, state, t - k, low, seqlen, d, d_ok, width, x_t, HAS_STATE, ACC)
    tl.store(y + (batch * seqlen + t) * channels + d, total, mask=d_ok & (t < seqlen))


@triton.jit(do_not_specialize=[*common.LENGTHS, "width"])
def _inputs_kernel(
    dy,
    weight,
    starts,
    dx,
    dstate,
    seqlen,
    channels,
    width,
    dy_b,
    dy_t,
    HAS_RESET: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx, and the state's gradient: tokens are counted from -(width - 1)."""
    batch = tl.program_id(2).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * TOKENS - (width - 1) + tl.arange(0, TOKENS)[:, None]
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    d_ok = d < channels
    dy += batch * dy_b
    if HAS_RESET:
        starts += batch * seqlen
    total = tl.zeros((TOKENS, CHANNELS), ACC)
    for k in range(0, width):
        t = s + k
        reads = (t >= 0) & (t < seqlen) & (_first_tokens(starts, t, seqlen, width, HAS_RESET) <= s)
        w = tl.load(weight + d * width + (width - 1 - k), mask=d_ok, other=0.0).to(ACC)
        total += w * tl.load(dy + t * dy_t + d, mask=d_ok & reads, other=0.0).to(ACC)
    tl.store(dx + (batch * seqlen + s) * channels + d, total, mask=d_ok & (s >= 0) & (s < seqlen))
    tl.store(
        dstate + (batch * channels + d) * (width - 1) + (s + width - 1),
        total,
        mask=d_ok & (s < 0),
    )


@triton.jit(do_not_specialize=[*common.LENGTHS, "width"])
def _weight_kernel(
    dy,
    x,
    state,
    starts,
    dweight,
    seqlen,
    channels,
    width,
    dy_b,
    dy_t,
    x_b,
    x_t,
    HAS_STATE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    TAPS: tl.constexpr,
    STRETCH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """TAPS taps' share of dweight from STRETCH tokens: (batch, stretches, width, channels)."""
    stretches = (seqlen + STRETCH - 1) // STRETCH
    stretch, batch = tl.program_id(2) % stretches, (tl.program_id(2) // stretches).to(tl.int64)
    k = tl.program_id(0) * TAPS
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    d_ok = d < channels
    dy += batch * dy_b
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (width - 1)
    if HAS_RESET:
        starts += batch * seqlen
    sums = ()
    for _i in tl.static_range(TAPS):
        sums = sums + (tl.zeros((CHANNELS,), ACC),)
    for tile in range(0, STRETCH // TOKENS):
        t = stretch.to(tl.int64) * STRETCH + tile * TOKENS + tl.arange(0, TOKENS)[:, None]
        low = _first_tokens(starts, t, seqlen, width, HAS_RESET)
        grad = tl.load(dy + t * dy_t + d, mask=d_ok & (t < seqlen), other=0.0).to(ACC)
        added = ()
        for i in tl.static_range(TAPS):
            lag = k + i
            inputs = _inputs(x, state, t - lag, low, seqlen, d, d_ok, width, x_t, HAS_STATE, ACC)
            added = added + (sums[i] + tl.sum(tl.where(t < seqlen, grad * inputs, 0.0), axis=0),)
        sums = added
    row = (batch * stretches + stretch) * width
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    for i in tl.static_range(TAPS):
        lag = k + i
        inside = (channel < channels) & (lag < width)
        tl.store(dweight + (row + width - 1 - lag) * channels + channel, sums[i], mask=inside)


def _starts(reset: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """Return each token's document's first token, (batch, seqlen) int32; None without documents."""
    if reset is None:
        return None
    places = torch.arange(reset.shape[1], device=reset.device, dtype=torch.int32)
    return torch.where(reset, places, -width).cummax(1).values.to(torch.int32).contiguous()


def filter_forward(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor | None, reset: torch.Tensor | None
) -> torch.Tensor:
    """Return y (batch, seqlen, channels) for x of that shape (last dimension dense), weight (channels,
    width); initial_state and reset as in `causal_conv1d_forward`."""
    (batch, seqlen, channels), width = x.shape, weight.shape[1]
    state = None if initial_state is None else initial_state.contiguous()
    y = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    with common.on_device(x):
        _forward_kernel[(triton.cdiv(seqlen, TOKENS), triton.cdiv(channels, CHANNELS), batch)](
            *(x, weight.contiguous(), state, _starts(reset, width), y),
            *(seqlen, channels, width, *common.strides(x)),
            **common.has_flags(STATE=state, RESET=reset),
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(x.dtype),
            num_warps=4,
        )
    return y


def filter_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dweight, dinitial_state) of `filter_forward`, as in `causal_conv1d_backward`."""
    (batch, seqlen, channels), width = x.shape, weight.shape[1]
    state = None if initial_state is None else initial_state.contiguous()
    starts, blocks = _starts(reset, width), triton.cdiv(channels, CHANNELS)
    stretches = triton.cdiv(seqlen, STRETCH)
    dx = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    dstate = torch.empty(
        (batch, channels, width - 1),
        dtype=x.dtype if initial_state is None else initial_state.dtype,
        device=x.device,
    )
    dweight = torch.empty(
        (batch, stretches, width, channels), dtype=accumulate_dtype(x.dtype), device=x.device
    )
    constants = {
        **common.has_flags(RESET=reset),
        "CHANNELS": CHANNELS,
        "ACC": common.tl_dtype(x.dtype),
        "num_warps": 4,
    }
    with common.on_device(x):
        _inputs_kernel[(triton.cdiv(seqlen + width - 1, TOKENS), blocks, batch)](
            *(dy, weight.contiguous(), starts, dx, dstate, seqlen, channels, width, *common.strides(dy)),
            TOKENS=TOKENS,
            **constants,
        )
        _weight_kernel[(triton.cdiv(width, TAPS), blocks, stretches * batch)](
            *(dy, x, state, starts, dweight, seqlen, channels, width, *common.strides(dy, x)),
            **common.has_flags(STATE=state),
            TAPS=TAPS,
            STRETCH=STRETCH,
            TOKENS=WEIGHT_TOKENS,
            **constants,
        )
    return dx, dweight.sum((0, 1)).t().contiguous().to(weight.dtype), dstate
