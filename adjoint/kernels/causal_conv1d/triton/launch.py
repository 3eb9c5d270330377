"""Causal depthwise convolution over time with state, in Triton: ``y_t = silu(bias + sum_j weight[:, j]
x_{t-d_conv+1+j})``.

A bandwidth-bound operation: a program walks a stretch of tokens with the last d_conv inputs (and, backwards,
the unfinished gradients of as many) in registers, so everything is read once. Inputs before the first token
come from the state, the last d_conv - 1 inputs of the stretch before. With resets a tap counts only if no
document begins between it and the output.

Proven under the interpreter and by compilation; not measured on a GPU: the stretch and the channels a program
takes are reasoned, not tuned.

Backward, with p the sum before SiLU:  dp_t = dy_t silu'(p_t),  dx_t = sum_k weight[:, d_conv-1-k] dp_{t+k}.

Parameters of the kernels that are not obvious:

    state: the inputs before the first token, (batch, channels, W - 1); reset: bytes (batch, seqlen)
    *_b, *_t: strides of batch and token; channels are dense
    W: d_conv; TOKENS, CHANNELS: what a program takes; UNROLL: tokens loaded at once
    ACC: type of sums, float32 or float64
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from adjoint.kernels.causal_conv1d.triton.filter import filter_backward, filter_forward
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import registered
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import LENGTHS, sigmoid

TOKENS, CHANNELS = 128, 64  # a program: one warp walks these tokens, two channels a thread
UNROLL = 4  # tokens loaded at once
IN_REGISTERS = registered("causal_conv1d").limits("triton")["d_conv"]  # longer filters are `filter`'s
MAX_D_CONV = registered("long_conv1d").limits("triton")["d_conv"]


@triton.jit
def _input(x, state, t, seqlen, d, d_ok, x_t, W: tl.constexpr, HAS_STATE: tl.constexpr, ACC: tl.constexpr):
    """x_t for 0 <= t < seqlen, the state's entry for t < 0 (zero without one), zero elsewhere."""
    value = tl.load(x + t * x_t + d, mask=d_ok & (t >= 0) & (t < seqlen), other=0.0).to(ACC)
    if HAS_STATE:
        # the state (channels, W - 1) holds x at t = -(W - 1) ... -1
        value += tl.load(state + d * (W - 1) + (t + (W - 1)), mask=d_ok & (t < 0) & (t > -W), other=0.0).to(
            ACC
        )
    return value


@triton.jit
def _begins(reset, t, seqlen, HAS_RESET: tl.constexpr):
    """Whether a document begins at token t."""
    if HAS_RESET:
        return tl.load(reset + t, mask=(t >= 0) & (t < seqlen), other=0) != 0
    else:
        return t > seqlen  # never


@triton.jit
def _taps(xs, begins, w, W: tl.constexpr, HAS_RESET: tl.constexpr):
    """(sum_k w_k x_{t-k}, the inputs x_{t-k} as the taps see them); xs and begins hold t, t - 1, ..."""
    total = w[0] * xs[0]
    inputs = (xs[0],)
    if HAS_RESET:
        cut = begins[0]
    for k in tl.static_range(1, W):
        x_ = xs[k]
        if HAS_RESET:
            x_ = tl.where(cut, 0.0, x_)
            cut = cut | begins[k]
        total += w[k] * x_
        inputs = inputs + (x_,)
    return total, inputs


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    x,
    weight,
    bias,
    state,
    reset,
    y,
    seqlen,
    channels,
    x_b,
    x_t,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    d_ok = d < channels
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (W - 1)
    if HAS_RESET:
        reset += batch * seqlen
    b = tl.zeros((CHANNELS,), ACC)
    if HAS_BIAS:
        b = tl.load(bias + d, mask=d_ok, other=0.0).to(ACC)
    w = ()
    xs = ()  # x_{t-1}, x_{t-2}, ...
    begins = ()
    for k in tl.static_range(W):  # the tap k tokens back
        w = w + (tl.load(weight + d * W + (W - 1 - k), mask=d_ok, other=0.0).to(ACC),)
        xs = xs + (_input(x, state, first - 1 - k, seqlen, d, d_ok, x_t, W, HAS_STATE, ACC),)
        begins = begins + (_begins(reset, first - 1 - k, seqlen, HAS_RESET),)
    for group in range(0, (tl.minimum(TOKENS, seqlen - first) + UNROLL - 1) // UNROLL):
        loaded = ()
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            loaded = loaded + (tl.load(x + t * x_t + d, mask=d_ok & (t < seqlen), other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            xs = (loaded[i],) + xs[: W - 1]
            begins = (_begins(reset, t, seqlen, HAS_RESET),) + begins[: W - 1]
            out, _inputs = _taps(xs, begins, w, W, HAS_RESET)
            out += b
            if SILU:
                out = out * sigmoid(out)
            tl.store(y + (batch * seqlen + t) * channels + d, out, mask=d_ok & (t < seqlen))


@triton.jit(do_not_specialize=LENGTHS)
def _backward_kernel(
    dy,
    x,
    weight,
    bias,
    state,
    reset,
    dx,
    dstate,
    dweight,
    dbias,
    seqlen,
    channels,
    dy_b,
    dy_t,
    x_b,
    x_t,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx of TOKENS tokens, and their share of dweight and dbias: (batch, parts, W, channels), (batch, parts,
    channels)."""
    batch = tl.program_id(2).to(tl.int64)
    stretch, stretches = tl.program_id(0), tl.num_programs(0)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    d_ok = d < channels
    dy += batch * dy_b
    x += batch * x_b
    if HAS_STATE:
        state += batch * channels * (W - 1)
    if HAS_RESET:
        reset += batch * seqlen
    b = tl.zeros((CHANNELS,), ACC)
    if HAS_BIAS:
        b = tl.load(bias + d, mask=d_ok, other=0.0).to(ACC)
    # Tokens are counted from -(W - 1): the state's inputs get their gradient like any other.
    first = stretch.to(tl.int64) * TOKENS - (W - 1)
    stop = first + TOKENS
    w = ()
    xs = ()
    begins = ()
    sums = ()
    pending = ()  # of dx: at t - 1, t - 2, ...
    for k in tl.static_range(W):
        w = w + (tl.load(weight + d * W + (W - 1 - k), mask=d_ok, other=0.0).to(ACC),)
        xs = xs + (_input(x, state, first - 1 - k, seqlen, d, d_ok, x_t, W, HAS_STATE, ACC),)
        begins = begins + (_begins(reset, first - 1 - k, seqlen, HAS_RESET),)
        sums = sums + (tl.zeros((CHANNELS,), ACC),)
        pending = pending + (tl.zeros((CHANNELS,), ACC),)
    sum_bias = tl.zeros((CHANNELS,), ACC)
    # W - 1 tokens more, into which the last of these tokens feed
    for group in range(0, (TOKENS + W - 1 + UNROLL - 1) // UNROLL):
        loaded = ()
        grads = ()
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            loaded = loaded + (_input(x, state, t, seqlen, d, d_ok, x_t, W, HAS_STATE, ACC),)
            inside = (t >= 0) & (t < seqlen)
            grads = grads + (tl.load(dy + t * dy_t + d, mask=d_ok & inside, other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            xs = (loaded[i],) + xs[: W - 1]
            begins = (_begins(reset, t, seqlen, HAS_RESET),) + begins[: W - 1]
            out, inputs = _taps(xs, begins, w, W, HAS_RESET)
            grad = grads[i]
            if SILU:
                out += b
                gate = sigmoid(out)
                grad = grad * gate * (1.0 + out * (1.0 - gate))
            inner = tl.where(t < stop, grad, 0.0)
            sum_bias += inner
            if HAS_RESET:
                cut = begins[0]
            new_sums = (sums[0] + inner * inputs[0],)
            new_pending = (w[0] * grad,)
            for k in tl.static_range(1, W):
                new_sums = new_sums + (sums[k] + inner * inputs[k],)
                share = w[k] * grad
                if HAS_RESET:
                    share = tl.where(cut, 0.0, share)
                    cut = cut | begins[k]
                new_pending = new_pending + (pending[k - 1] + share,)
            sums = new_sums
            pending = new_pending
            s = t - (W - 1)  # complete now
            done = d_ok & (s >= first) & (s < stop) & (s < seqlen)
            tl.store(dx + (batch * seqlen + s) * channels + d, pending[W - 1], mask=done & (s >= 0))
            tl.store(
                dstate + (batch * channels + d) * (W - 1) + (s + (W - 1)), pending[W - 1], mask=done & (s < 0)
            )
    row = batch * stretches + stretch
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
    """Return y (batch, seqlen, channels) for x of that shape (last dimension dense), weight (channels,
    d_conv) and bias (channels,).

    initial_state (batch, channels, d_conv - 1): the inputs just before, oldest first; None stands for zeros.
    reset (batch, seqlen) bool: taps do not reach back across a token where it is True. Raises ValueError for
    d_conv above 1,024."""
    batch, seqlen, channels = x.shape
    d_conv = _check(x, weight)
    x, bias = common.last_contiguous(x), common.dense(bias)
    if d_conv > IN_REGISTERS:
        y = filter_forward(x, weight, initial_state, reset)
        y = y if bias is None else (y + bias).to(x.dtype)
        return F.silu(y) if silu else y
    state = initial_state.contiguous() if initial_state is not None and d_conv > 1 else None
    y = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    with common.on_device(x):
        _forward_kernel[(triton.cdiv(seqlen, TOKENS), triton.cdiv(channels, CHANNELS), batch)](
            *(x, weight.contiguous(), bias, state, common.reset_bytes(reset), y),
            *(seqlen, channels, *common.strides(x)),
            W=d_conv,
            SILU=silu,
            **common.has_flags(BIAS=bias, STATE=state, RESET=reset),
            TOKENS=TOKENS,
            UNROLL=UNROLL,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(x.dtype),
            num_warps=1,
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
    """(dx, dweight, dbias, dinitial_state) of :func:`causal_conv1d_forward`; dbias is None for a bias that
    is None.

    dinitial_state (batch, channels, d_conv - 1) is given also when initial_state is None (the gradient at
    zeros), in x's dtype."""
    batch, seqlen, channels = x.shape
    d_conv = _check(x, weight)
    dy, x, bias = common.last_contiguous(dy), common.last_contiguous(x), common.dense(bias)
    if d_conv > IN_REGISTERS:
        if silu:
            p = causal_conv1d_forward(x, weight, bias, initial_state, False, reset)
            dy = torch.ops.aten.silu_backward(dy, p)
        filter_dbias = None if bias is None else dy.sum((0, 1), dtype=torch.float64).to(bias.dtype)
        filter_dx, filter_dweight, filter_dstate = filter_backward(dy, x, weight, initial_state, reset)
        return filter_dx, filter_dweight, filter_dbias, filter_dstate
    state = initial_state.contiguous() if initial_state is not None and d_conv > 1 else None
    acc = accumulate_dtype(x.dtype)
    stretches = triton.cdiv(seqlen + d_conv - 1, TOKENS)
    dx = torch.empty((batch, seqlen, channels), dtype=x.dtype, device=x.device)
    dstate = torch.empty(
        (batch, channels, d_conv - 1),
        dtype=x.dtype if initial_state is None else initial_state.dtype,
        device=x.device,
    )
    dweight = torch.empty((batch, stretches, d_conv, channels), dtype=acc, device=x.device)
    dbias = torch.empty((batch, stretches, channels), dtype=acc, device=x.device)
    with common.on_device(x):
        _backward_kernel[(stretches, triton.cdiv(channels, CHANNELS), batch)](
            *(dy, x, weight.contiguous(), bias, state, common.reset_bytes(reset), dx, dstate, dweight, dbias),
            *(seqlen, channels, *common.strides(dy, x)),
            W=d_conv,
            SILU=silu,
            **common.has_flags(BIAS=bias, STATE=state, RESET=reset),
            TOKENS=TOKENS,
            UNROLL=UNROLL,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(x.dtype),
            num_warps=1,
        )
    dweight_sum = dweight.sum((0, 1)).t().contiguous().to(weight.dtype)
    return dx, dweight_sum, None if bias is None else dbias.sum((0, 1)).to(bias.dtype), dstate
