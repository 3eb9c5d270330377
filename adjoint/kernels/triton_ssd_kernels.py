"""Tensor-core kernels of Mamba-2's SSD scan (launched by ``triton_ssd``): chunks of Q tokens as matrix
products.

Inside a chunk, with c_t the running sum of dt A and L_ij = exp(c_i - c_j) for i >= j (0 across a reset):

    y_i = sum_j (C_i . B_j) L_ij dt_j x_j + exp(c_i) C_i h_in + D x_i,     h_out = sum_j exp(c_Q - c_j) dt_j
    x_j (x) B_j + exp(c_Q) h_in

The decays' gradient d(dt A)_t is the sum of all that crosses t: pairs j < t <= i inside the chunk, tokens
from t on that read
h_in, tokens before t that feed h_out, and h_in through to h_out. These sums are formed directly (a product
with a
triangle of ones), never as the difference of two running sums, which would cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton_common import log1p_exp
from adjoint.kernels.triton_selective_scan_kernels import _slope as slope_of


@triton.jit
def step_kernel(
    dt,
    A,
    bias,
    step,
    cum,
    seqlen,
    nheads,
    dt_b,
    dt_t,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """step = softplus(dt + bias) and the chunk's running sum of step * A, both (batch, nheads, chunks * Q),
    0-padded."""
    chunk, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    t = chunk.to(tl.int64) * Q + tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h_ok = head < nheads
    ok = (t < seqlen)[:, None] & h_ok[None, :]
    x = tl.load(dt + batch * dt_b + t[:, None] * dt_t + head[None, :], mask=ok, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(bias + head, mask=h_ok, other=0.0).to(ACC)[None, :]
    if SOFTPLUS:
        x = log1p_exp(x)
    x = tl.where(ok, x, 0.0)
    decay = tl.load(A + head, mask=h_ok, other=0.0).to(ACC)
    padded = tl.num_programs(0).to(tl.int64) * Q
    out = (batch * nheads + head[None, :]) * padded + t[:, None]
    tl.store(step + out, x, mask=h_ok[None, :])
    tl.store(cum + out, tl.cumsum(x * decay[None, :], axis=0), mask=h_ok[None, :])


@triton.jit
def _segments(reset, t, seqlen, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """(number of resets in the chunk up to each token, and in all of it)."""
    if HAS_RESET:
        begins = tl.load(reset + t, mask=t < seqlen, other=0).to(tl.int32)
        return tl.cumsum(begins, axis=0), tl.sum(begins, axis=0)
    else:
        return tl.zeros((Q,), tl.int32), 0


@triton.jit
def _rows(pointer, first, j, i, stride, seqlen, size, DOT: tl.constexpr):
    """The tile of tokens first + j, in the matrix products' dtype, zero outside. Offsets in the tile fit 32
    bits."""
    ok = (j < seqlen - first)[:, None] & (i < size)[None, :]
    return tl.load(pointer + first * stride + (j[:, None] * stride + i[None, :]), mask=ok, other=0.0).to(DOT)


@triton.jit
def _state(pointer, p, n, headdim, d_state):
    """A (headdim, d_state) tile of a state, zero outside."""
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    return tl.load(pointer + p[:, None] * d_state + n[None, :], mask=ok, other=0.0)


@triton.jit
def chunk_state_kernel(
    x,
    B,
    step,
    cum,
    reset,
    local,
    decay,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    x_b,
    x_t,
    x_h,
    B_b,
    B_t,
    B_g,
    REVERSE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """A chunk's own (headdim, d_state) state. REVERSE: its own cotangent of h_in, x and B being dy and C."""
    chunk, head, batch = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) % nheads,
        tl.program_id(2).to(tl.int64),
    )
    chunks = tl.num_programs(0)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p, n = tl.arange(0, P), tl.program_id(1) // nheads * N + tl.arange(0, N)
    line = (batch * nheads + head) * (chunks * Q) + t
    c = tl.load(cum + line)
    last = tl.load(cum + (batch * nheads + head) * (chunks * Q) + chunk * Q + Q - 1)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    if REVERSE:
        weight = tl.where(count == 0, tl.exp(c), 0.0)
    else:
        weight = tl.where(count == all_resets, tl.exp(last - c), 0.0) * tl.load(step + line)
    x_ = _rows(x + batch * x_b + head * x_h, chunk * Q, j, p, x_t, seqlen, headdim, ACC)
    B_ = _rows(B + batch * B_b + head // heads_a_group * B_g, chunk * Q, j, n, B_t, seqlen, d_state, DOT)
    scaled = (x_ * weight[:, None]).to(DOT)
    out = tl.dot(tl.trans(scaled), B_, input_precision=PRECISION, out_dtype=ACC)
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    tl.store(local + state + p[:, None] * d_state + n[None, :], out, mask=ok)
    total = tl.where(all_resets == 0, tl.exp(last), 0.0)
    tl.store(decay + (batch * chunks + chunk) * nheads + head, total)


@triton.jit
def output_kernel(
    x,
    B,
    C,
    D,
    step,
    cum,
    reset,
    h_in,
    y,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    x_b,
    x_t,
    x_h,
    B_b,
    B_t,
    B_g,
    C_b,
    C_t,
    C_g,
    HAS_D: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """y of one chunk and head from the state at its entry."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p = tl.arange(0, P)
    line = (batch * nheads + head) * (chunks * Q) + t
    if HAS_RESET:
        reset += batch * seqlen
    count, _ = _segments(reset, t, seqlen, HAS_RESET, Q)
    group = head // heads_a_group
    B += batch * B_b + group * B_g
    C += batch * C_b + group * C_g
    h_in += ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    out = tl.zeros((Q, P), ACC)
    scores = tl.zeros((Q, Q), ACC)
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        C_ = _rows(C, chunk * Q, j, n, C_t, seqlen, d_state, DOT)
        h = _state(h_in, p, n, headdim, d_state).to(DOT)
        out = tl.dot(C_, tl.trans(h), out, input_precision=PRECISION, out_dtype=ACC)
        B_ = _rows(B, chunk * Q, j, n, B_t, seqlen, d_state, DOT)
        scores = tl.dot(C_, tl.trans(B_), scores, input_precision=PRECISION, out_dtype=ACC)
    c = tl.load(cum + line)
    out *= tl.where(count == 0, tl.exp(c), 0.0)[:, None]
    pair = (j[:, None] >= j[None, :]) & (count[:, None] == count[None, :])
    scores *= tl.exp(tl.where(pair, c[:, None] - c[None, :], float("-inf"))) * tl.load(step + line)[None, :]
    x_ = _rows(x + batch * x_b + head * x_h, chunk * Q, j, p, x_t, seqlen, headdim, DOT)
    out = tl.dot(scores.to(DOT), x_, out, input_precision=PRECISION, out_dtype=ACC)
    if HAS_D:
        out += tl.load(D + head).to(ACC) * x_.to(ACC)
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(y + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], out, mask=ok)


@triton.jit
def read_kernel(
    dy,
    C,
    cum,
    reset,
    h_in,
    g_out,
    read,
    through,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    dy_b,
    dy_t,
    dy_h,
    C_b,
    C_t,
    C_g,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """What each token reads of h_in, weighed with its dy, and h_in's way through to h_out, weighed with its
    cotangent.

    (batch, nheads, chunks * Q) and (batch, chunks, nheads): the decays' gradient needs both.
    """
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p = tl.arange(0, P)
    line = (batch * nheads + head) * (chunks * Q)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    C += batch * C_b + head // heads_a_group * C_g
    reads = tl.zeros((Q, P), ACC)
    kept = tl.zeros((P,), ACC)
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        C_ = _rows(C, chunk * Q, j, n, C_t, seqlen, d_state, DOT)
        h = _state(h_in + state, p, n, headdim, d_state)
        reads = tl.dot(C_, tl.trans(h.to(DOT)), reads, input_precision=PRECISION, out_dtype=ACC)
        kept += tl.sum(_state(g_out + state, p, n, headdim, d_state) * h, axis=1)
    c = tl.load(cum + line + t)
    last = tl.load(cum + line + chunk * Q + Q - 1)
    dy_ = _rows(dy + batch * dy_b + head * dy_h, chunk * Q, j, p, dy_t, seqlen, headdim, ACC)
    tl.store(read + line + t, tl.sum(reads * dy_, axis=1) * tl.where(count == 0, tl.exp(c), 0.0))
    total = tl.sum(kept, axis=0) * tl.where(all_resets == 0, tl.exp(last), 0.0)
    tl.store(through + (batch * chunks + chunk) * nheads + head, total)


@triton.jit
def input_grad_kernel(
    dy,
    x,
    B,
    C,
    A,
    D,
    step,
    cum,
    reset,
    g_out,
    read,
    through,
    dx,
    ddt,
    dA,
    dD,
    dbias,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    dy_b,
    dy_t,
    dy_h,
    x_b,
    x_t,
    x_h,
    B_b,
    B_t,
    B_g,
    C_b,
    C_t,
    C_g,
    HAS_D: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx and ddt of one chunk and head, and its share of dA, dD, dbias (batch, chunks, nheads). g_out:
    cotangent of h_out."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p = tl.arange(0, P)
    line = (batch * nheads + head) * (chunks * Q)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    group = head // heads_a_group
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    g_out += state
    B += batch * B_b + group * B_g
    C += batch * C_b + group * C_g
    c = tl.load(cum + line + t)
    last = tl.load(cum + line + chunk * Q + Q - 1)
    dxd = tl.zeros((Q, P), ACC)
    scores = tl.zeros((Q, Q), ACC)  # rows j (inputs), columns i >= j (outputs)
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        C_ = _rows(C, chunk * Q, j, n, C_t, seqlen, d_state, DOT)
        g = _state(g_out, p, n, headdim, d_state)
        B_ = _rows(B, chunk * Q, j, n, B_t, seqlen, d_state, DOT)
        dxd = tl.dot(B_, tl.trans(g.to(DOT)), dxd, input_precision=PRECISION, out_dtype=ACC)
        scores = tl.dot(B_, tl.trans(C_), scores, input_precision=PRECISION, out_dtype=ACC)
    step_ = tl.load(step + line + t)
    x_ = _rows(x + batch * x_b + head * x_h, chunk * Q, j, p, x_t, seqlen, headdim, DOT)
    dy_ = _rows(dy + batch * dy_b + head * dy_h, chunk * Q, j, p, dy_t, seqlen, headdim, DOT)
    # what every token feeds into h_out, weighed with its cotangent
    dxd *= tl.where(count == all_resets, tl.exp(last - c), 0.0)[:, None]
    fed = tl.sum(dxd * x_.to(ACC), axis=1) * step_
    pair = (j[:, None] <= j[None, :]) & (count[:, None] == count[None, :])
    scores *= tl.exp(tl.where(pair, c[None, :] - c[:, None], float("-inf")))
    dxd = tl.dot(scores.to(DOT), dy_, dxd, input_precision=PRECISION, out_dtype=ACC)
    crossing = tl.dot(x_, tl.trans(dy_), input_precision=PRECISION, out_dtype=ACC) * scores * step_[:, None]
    crossing = tl.where(j[:, None] < j[None, :], crossing, 0.0)
    before = (j[None, :] < j[:, None]).to(DOT)  # (t, j): j < t
    summed = tl.dot(before, crossing.to(DOT), input_precision=PRECISION, out_dtype=ACC)
    share = (batch * chunks + chunk) * nheads + head
    over = tl.where(j[None, :] >= j[:, None], summed + tl.load(read + line + t)[None, :], fed[None, :])
    ddecay = tl.sum(over, axis=1) + tl.load(through + share)
    dstep = tl.sum(dxd * x_.to(ACC), axis=1) + ddecay * tl.load(A + head).to(ACC)
    ddt_ = dstep
    if SOFTPLUS:
        ddt_ = dstep * slope_of(step_)
    ddt_ = tl.where(t < seqlen, ddt_, 0.0)
    dx_ = dxd * step_[:, None]
    if HAS_D:
        dx_ += tl.load(D + head).to(ACC) * dy_.to(ACC)
        tl.store(dD + share, tl.sum(tl.sum(dy_.to(ACC) * x_.to(ACC), axis=1), axis=0))
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(dx + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], dx_, mask=ok)
    tl.store(ddt + (batch * seqlen + t) * nheads + head, ddt_, mask=t < seqlen)
    tl.store(dA + share, tl.sum(ddecay * step_, axis=0))
    tl.store(dbias + share, tl.sum(ddt_, axis=0))


@triton.jit
def group_grad_kernel(
    dy,
    x,
    B,
    C,
    step,
    cum,
    reset,
    h_in,
    g_out,
    dB,
    dC,
    seqlen,
    nheads,
    headdim,
    d_state,
    ngroups,
    heads_a_group,
    heads_each,
    dy_b,
    dy_t,
    dy_h,
    x_b,
    x_t,
    x_h,
    B_b,
    B_t,
    B_g,
    C_b,
    C_t,
    C_g,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dB and dC of one chunk and group, summed over a share of the group's heads: (batch, shares, seqlen,
    ngroups, d_state)."""
    chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    blocks = (d_state + N - 1) // N
    group, share = tl.program_id(1) // blocks % ngroups, tl.program_id(1) // (blocks * ngroups)
    shares = tl.num_programs(1) // (blocks * ngroups)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p, n = tl.arange(0, P), tl.program_id(1) % blocks * N + tl.arange(0, N)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    pair = (j[:, None] <= j[None, :]) & (count[:, None] == count[None, :])
    dB_ = tl.zeros((Q, N), ACC)
    dC_ = tl.zeros((Q, N), ACC)
    scores = tl.zeros(
        (Q, Q), ACC
    )  # rows j (inputs), columns i (outputs): cotangent of B_j . C_i, over the heads
    first = group * heads_a_group + share * heads_each
    for head in range(first, tl.minimum(first + heads_each, (group + 1) * heads_a_group)):
        line = (batch * nheads + head) * (chunks * Q)
        c = tl.load(cum + line + t)
        last = tl.load(cum + line + chunk * Q + Q - 1)
        step_ = tl.load(step + line + t)
        state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
        dy_ = _rows(dy + batch * dy_b + head * dy_h, chunk * Q, j, p, dy_t, seqlen, headdim, DOT)
        x_ = _rows(x + batch * x_b + head * x_h, chunk * Q, j, p, x_t, seqlen, headdim, DOT)
        part = tl.dot(x_, tl.trans(dy_), input_precision=PRECISION, out_dtype=ACC)
        scores += part * tl.exp(tl.where(pair, c[None, :] - c[:, None], float("-inf"))) * step_[:, None]
        h = _state(h_in + state, p, n, headdim, d_state).to(DOT)
        weight = tl.where(count == 0, tl.exp(c), 0.0)
        dC_ += tl.dot(dy_, h, input_precision=PRECISION, out_dtype=ACC) * weight[:, None]
        g = _state(g_out + state, p, n, headdim, d_state).to(DOT)
        weight = tl.where(count == all_resets, tl.exp(last - c), 0.0) * step_
        dB_ += tl.dot(x_, g, input_precision=PRECISION, out_dtype=ACC) * weight[:, None]
    scores = scores.to(DOT)
    C_ = _rows(C + batch * C_b + group * C_g, chunk * Q, j, n, C_t, seqlen, d_state, DOT)
    dB_ = tl.dot(scores, C_, dB_, input_precision=PRECISION, out_dtype=ACC)
    B_ = _rows(B + batch * B_b + group * B_g, chunk * Q, j, n, B_t, seqlen, d_state, DOT)
    dC_ = tl.dot(tl.trans(scores), B_, dC_, input_precision=PRECISION, out_dtype=ACC)
    out = (((batch * shares + share) * seqlen + t[:, None]) * ngroups + group) * d_state + n[None, :]
    ok = (t < seqlen)[:, None] & (n < d_state)[None, :]
    tl.store(dB + out, dB_, mask=ok)
    tl.store(dC + out, dC_, mask=ok)
