"""The selective scan's forward kernel in Triton (launched by `launch`).

    h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,   d = softplus(delta + bias)
    y_t = (C_t . h_t + D u_t) silu(z_t)

A program owns one batch element, a few channels with their whole d_state, and one split of the sequence; the
state lives in registers and time is walked in order, so each (token, channel, state) element costs one
exponential and nothing is ever scanned twice in a tree. The state is kept once every ``EVERY`` tokens.

Triton lays the last dimension of a tile over the lanes of the warp first: the (d_state, lanes) tile gives a
thread one channel and, up to d_state 32, all its states, so that the sum over d_state needs no communication.

Parameters of this kernel and of those in `backward` and `window` that are not obvious:

    *_b, *_t: strides of batch and token; channels, or states, are dense
    bias: delta_bias; reset: bytes (batch, seqlen), not 0 where a document begins
    checkpoints: the states before every EVERY tokens, (batch, checkpoints, d_state, d_inner)
    split_len: tokens of a split; opaque_one: 1, see `common.a_lane_each`
    N, LANES: d_state as a power of two, and channels that a tile holds; UNROLL: tokens walked at once
    ACC: type of states and sums, float32 or float64
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import (
    LENGTHS,
    LOG2E,
    a_lane_each,
    begins_at,
    over_edge,
    sigmoid,
    step_size,
    times_decay,
)


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    bias,
    reset,
    h_in,
    y,
    checkpoints,
    h_out,
    decay,
    seqlen,
    d_inner,
    d_state,
    split_len,
    opaque_one,
    u_b,
    u_t,
    delta_b,
    delta_t,
    B_b,
    B_t,
    C_b,
    C_t,
    z_b,
    z_t,
    LOCAL: tl.constexpr,
    SAVE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    HAS_INIT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    EVERY: tl.constexpr,
    UNROLL: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Run the recurrence over one split of the sequence.

    LOCAL: start from zeros and write only h_out and decay, (batch, splits, d_state, d_inner). Otherwise start
    from h_in and write y, the checkpoints and, in the last split, h_out.
    """
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_splits = tl.num_programs(1)
    d = tl.program_id(0) * LANES + tl.arange(0, LANES)
    n = tl.arange(0, N)
    d_ok, n_ok = d < d_inner, n < d_state
    ok = n_ok[:, None] & d_ok[None, :]
    state = n[:, None] * d_inner + a_lane_each(d, opaque_one)[None, :]
    A2 = tl.load(A + state, mask=ok, other=0.0).to(ACC) * LOG2E

    # int64 from here on: batch * stride and t * stride pass 2^31 at the lengths this is for
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    u += batch * u_b
    delta += batch * delta_b
    B += batch * B_b
    C += batch * C_b
    if HAS_RESET:
        reset += batch * seqlen
    if not LOCAL:
        y += batch * seqlen * d_inner
        if HAS_Z:
            z += batch * z_b
    per_batch = tl.cast(d_inner, tl.int64) * d_state
    n_checkpoints = (seqlen + EVERY - 1) // EVERY

    step_bias = tl.zeros((LANES,), ACC)
    if HAS_BIAS:
        step_bias = tl.load(bias + d, mask=d_ok, other=0.0).to(ACC)
    skip = tl.zeros((LANES,), ACC)
    if HAS_D:
        skip = tl.load(D + d, mask=d_ok, other=0.0).to(ACC)
    h = tl.zeros((N, LANES), ACC)
    if HAS_INIT:
        h = tl.load(h_in + (batch * n_splits + split) * per_batch + state, mask=ok, other=0.0).to(ACC)
    total = tl.zeros((LANES,), ACC)
    through = tl.full((LANES,), 1.0, ACC)

    for stretch in range(0, (stop - first + EVERY - 1) // EVERY):
        begin = first + stretch * EVERY
        if SAVE and not LOCAL:
            mark = checkpoints + (batch * n_checkpoints + begin // EVERY) * per_batch
            tl.store(mark + state, h, mask=ok)
        for group in range(0, (tl.minimum(begin + EVERY, stop) - begin + UNROLL - 1) // UNROLL):
            # A store keeps later loads from being issued early: a few tokens' outputs are stored at the end,
            # as far as registers reach.
            us = ()
            deltas = ()
            for i in tl.static_range(UNROLL):
                t = begin + group * UNROLL + i
                at = tl.minimum(t, stop - 1)  # past the end: read the last token again, and take d = 0 below
                us = us + (tl.load(u + at * u_t + d, mask=d_ok, other=0.0),)
                deltas = deltas + (tl.load(delta + at * delta_t + d, mask=d_ok, other=0.0),)
            outs = ()
            for i in tl.static_range(UNROLL):
                t = begin + group * UNROLL + i
                inside = t < stop
                at = tl.minimum(t, stop - 1)
                step = step_size(deltas[i].to(ACC), step_bias, SOFTPLUS)
                step = tl.where(inside, step, 0.0)  # past the end: a = 1, nothing added
                u_t_ = us[i].to(ACC)
                B_t_ = tl.load(B + at * B_t + n, mask=n_ok, other=0.0).to(ACC)
                a = tl.exp2(A2 * step[None, :])
                begins = begins_at(reset, t, inside, HAS_RESET)
                h = over_edge(a * h, begins, HAS_RESET) + (step * u_t_)[None, :] * B_t_[:, None]
                if LOCAL:
                    through = over_edge(through, begins, HAS_RESET)
                total += step
                if not LOCAL:
                    C_t_ = tl.load(C + at * C_t + n, mask=n_ok, other=0.0).to(ACC)
                    out = tl.sum(h * C_t_[:, None], axis=0) + skip * u_t_
                    if HAS_Z:
                        z_ = tl.load(z + at * z_t + d, mask=d_ok, other=0.0).to(ACC)
                        out = out * z_ * sigmoid(z_)
                    if N <= 16:
                        outs = outs + (out,)
                    else:
                        tl.store(y + at * d_inner + d, out, mask=d_ok & inside)
            if N <= 16 and not LOCAL:
                for i in tl.static_range(UNROLL):
                    t = begin + group * UNROLL + i
                    tl.store(y + tl.minimum(t, stop - 1) * d_inner + d, outs[i], mask=d_ok & (t < stop))

    if LOCAL:
        edge = (batch * n_splits + split) * per_batch
        tl.store(h_out + edge + state, h, mask=ok)
        tl.store(
            decay + edge + state,
            times_decay(tl.exp2(A2 * total[None, :]), through[None, :], HAS_RESET),
            mask=ok,
        )
    else:
        if split == n_splits - 1:
            tl.store(h_out + batch * per_batch + state, h, mask=ok)
