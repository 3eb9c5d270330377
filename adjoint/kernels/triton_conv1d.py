"""Causal depthwise convolution over time with state, in Triton: ``y_t = silu(bias + sum_j weight[:, j] x_{t-d_conv+1+j})``.

A bandwidth-bound operation: a program covers a tile of tokens × channels and reads each input once from memory (the
d_conv shifted reads of a tile hit the cache). Inputs before the first token come from the state, the last d_conv - 1
inputs of the stretch before. With resets a tap counts only if no document begins between it and the output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels import triton_common as common
from adjoint.kernels.triton_common import sigmoid

TOKENS, CHANNELS = 16, 128  # a tile
TILES = 16  # tiles of tokens a backward program goes through, so that few partial weight gradients are written
MAX_D_CONV = 8


@triton.jit
def _input(x, state, t, d, ok, x_t, channels, W: tl.constexpr, HAS_STATE: tl.constexpr, ACC: tl.constexpr):
    """x_t for t >= 0, the state's entry for t < 0 (zero without one); zero where not ``ok``."""
    value = tl.load(x + t * x_t + d, mask=ok & (t >= 0), other=0.0).to(ACC)
    if HAS_STATE:
        # the state (channels, W - 1) holds x at t = -(W - 1) ... -1
        value += tl.load(state + d * (W - 1) + (t + (W - 1)), mask=ok & (t < 0) & (t > -W), other=0.0).to(ACC)
    return value


@triton.jit
def _preactivation(x, weight, bias, state, reset, t, d, ok, x_t, channels, W: tl.constexpr, HAS_BIAS: tl.constexpr,
                   HAS_STATE: tl.constexpr, HAS_RESET: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """bias + sum over the taps for tokens t (rows, 1) and channels d (1, columns)."""
    total = tl.zeros(ok.shape, ACC)
    if HAS_BIAS:
        total += tl.load(bias + d, mask=d < channels, other=0.0).to(ACC)
    same = ok
    for k in tl.static_range(W):  # the tap k tokens back
        w = tl.load(weight + d * W + (W - 1 - k), mask=d < channels, other=0.0).to(ACC)
        total += w * _input(x, state, t - k, d, same, x_t, channels, W, HAS_STATE, ACC)
        if HAS_RESET:
            same = same & (tl.load(reset + t - k, mask=(t - k >= 0) & ok, other=0) == 0)
    return total


@triton.jit
def _forward_kernel(x, weight, bias, state, reset, y, seqlen, channels, x_b, x_t, W: tl.constexpr, SILU: tl.constexpr,
                    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_RESET: tl.constexpr, TOKENS: tl.constexpr,
                    CHANNELS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    d = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    ok = (t < seqlen) & (d < channels)
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (W - 1)
    if HAS_RESET:
        reset += batch * seqlen
    out = _preactivation(x, weight, bias, state, reset, t, d, ok, x_t, channels, W, HAS_BIAS, HAS_STATE, HAS_RESET, ACC)
    if SILU:
        out = out * sigmoid(out)
    tl.store(y + (batch * seqlen + t) * channels + d, out, mask=ok)


@triton.jit
def _grad_preactivation(dy, x, weight, bias, state, reset, t, d, ok, dy_t, x_t, channels, W: tl.constexpr,
                        SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_RESET: tl.constexpr,
                        ACC: tl.constexpr):  # fmt: skip
    grad = tl.load(dy + t * dy_t + d, mask=ok, other=0.0).to(ACC)
    if SILU:
        pre = _preactivation(x, weight, bias, state, reset, t, d, ok, x_t, channels, W, HAS_BIAS, HAS_STATE, HAS_RESET, ACC)
        gate = sigmoid(pre)
        grad = grad * gate * (1.0 + pre * (1.0 - gate))
    return grad


@triton.jit
def _backward_kernel(dy, x, weight, bias, state, reset, dx, dstate, dweight, dbias, seqlen, channels, dy_b, dy_t, x_b, x_t,
                     W: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
                     HAS_RESET: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, CHANNELS: tl.constexpr,
                     ACC: tl.constexpr):  # fmt: skip
    """dx of TILES tiles of tokens, and their share of dweight and dbias: (batch, parts, W, channels), (…, channels)."""
    batch = tl.program_id(2).to(tl.int64)
    part, parts = tl.program_id(0), tl.num_programs(0)
    d = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    d_ok = d < channels
    dy += batch * dy_b
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (W - 1)
    if HAS_RESET:
        reset += batch * seqlen
    sums = ()
    for k in tl.static_range(W):
        sums = sums + (tl.zeros((1, CHANNELS), ACC),)
    sum_bias = tl.zeros((1, CHANNELS), ACC)
    # Tokens are counted from -(W - 1): the state's inputs get their gradient like any other.
    first = part.to(tl.int64) * TOKENS * TILES - (W - 1)
    for tile in range(0, TILES):
        t = (first + tile * TOKENS + tl.arange(0, TOKENS))[:, None]
        grad_x = tl.zeros((TOKENS, CHANNELS), ACC)
        same = d_ok & (t > -W)
        x_ = _input(x, state, t, d, same & (t < seqlen), x_t, channels, W, HAS_STATE, ACC)
        new = ()
        for k in tl.static_range(W):  # x_t is the tap k back of output t + k
            if HAS_RESET and k > 0:
                begins = (t + k >= 0) & (t + k < seqlen)
                same = same & (tl.load(reset + t + k, mask=begins, other=0) == 0)
            ok = same & (t + k >= 0) & (t + k < seqlen)
            grad = _grad_preactivation(dy, x, weight, bias, state, reset, t + k, d, ok, dy_t, x_t, channels, W, SILU,
                                       HAS_BIAS, HAS_STATE, HAS_RESET, ACC)  # fmt: skip
            w = tl.load(weight + d * W + (W - 1 - k), mask=d_ok, other=0.0).to(ACC)
            grad_x += w * grad
            new = new + (sums[k] + tl.sum(grad * x_, axis=0)[None, :],)
            if k == 0:
                sum_bias += tl.sum(grad, axis=0)[None, :]
        sums = new
        tl.store(dx + (batch * seqlen + t) * channels + d, grad_x, mask=d_ok & (t >= 0) & (t < seqlen))
        entry = dstate + (batch * channels + d) * (W - 1) + (t + (W - 1))
        tl.store(entry, grad_x, mask=d_ok & (t < 0) & (t > -W))
    row = batch * parts + part
    for k in tl.static_range(W):
        tl.store(dweight + (row * W + (W - 1 - k)) * channels + d, sums[k], mask=d_ok)
    tl.store(dbias + row * channels + d, sum_bias, mask=d_ok)


def _check(x: torch.Tensor, weight: torch.Tensor) -> int:
    d_conv = weight.shape[1]
    if not 1 <= d_conv <= MAX_D_CONV:
        raise ValueError(f"d_conv={d_conv} is outside 1 … {MAX_D_CONV}, which the Triton convolution takes")
    return d_conv


def causal_conv1d_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    silu: bool,
    reset: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (batch, seqlen, channels) for x of that shape (last dimension dense), weight (channels, d_conv), bias (channels,).

    initial_state (batch, channels, d_conv - 1): the inputs just before, oldest first; None stands for zeros. reset (batch,
    seqlen) bool: taps do not reach back across a token where it is True. Raises ValueError for d_conv above 8.
    """
    batch, seqlen, channels = x.shape
    d_conv = _check(x, weight)
    x = common.last_contiguous(x)
    state = initial_state.contiguous() if initial_state is not None and d_conv > 1 else None
    y = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    with common.on_device(x):
        _forward_kernel[(triton.cdiv(seqlen, TOKENS), triton.cdiv(channels, CHANNELS), batch)](
            *(x, weight.contiguous(), bias, state, common.reset_bytes(reset), y, seqlen, channels, *x.stride()[:2]),
            W=d_conv,
            SILU=silu,
            HAS_BIAS=bias is not None,
            HAS_STATE=state is not None,
            HAS_RESET=reset is not None,
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(x.dtype),
            num_warps=4,
        )
    return y


def causal_conv1d_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    silu: bool,
    reset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(dx, dweight, dbias, dinitial_state) of :func:`causal_conv1d_forward`; dbias is None for a bias that is None.

    dinitial_state (batch, channels, d_conv - 1) is given also when initial_state is None (the gradient at zeros), in
    x's dtype.
    """
    batch, seqlen, channels = x.shape
    d_conv = _check(x, weight)
    dy, x = common.last_contiguous(dy), common.last_contiguous(x)
    state = initial_state.contiguous() if initial_state is not None and d_conv > 1 else None
    acc = common.state_dtype(x.dtype)
    parts = triton.cdiv(seqlen + d_conv - 1, TOKENS * TILES)
    dx = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    dstate = torch.empty(
        (batch, channels, d_conv - 1),
        dtype=x.dtype if initial_state is None else initial_state.dtype,
        device=x.device,
    )
    dweight = torch.empty((batch, parts, d_conv, channels), dtype=acc, device=x.device)
    dbias = torch.empty((batch, parts, channels), dtype=acc, device=x.device)
    with common.on_device(x):
        _backward_kernel[(parts, triton.cdiv(channels, CHANNELS), batch)](
            *(dy, x, weight.contiguous(), bias, state, common.reset_bytes(reset), dx, dstate, dweight, dbias),
            *(seqlen, channels, *dy.stride()[:2], *x.stride()[:2]),
            W=d_conv,
            SILU=silu,
            HAS_BIAS=bias is not None,
            HAS_STATE=state is not None,
            HAS_RESET=reset is not None,
            TOKENS=TOKENS,
            TILES=TILES,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(x.dtype),
            num_warps=4,
        )
    dweight_sum = dweight.sum((0, 1)).t().contiguous().to(weight.dtype)
    return dx, dweight_sum, None if bias is None else dbias.sum((0, 1)).to(bias.dtype), dstate
