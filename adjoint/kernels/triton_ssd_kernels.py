"""Tensor-core kernels of Mamba-2's SSD scan (launched by ``triton_ssd``): chunks of Q tokens as matrix products.

Inside a chunk, with c_t the running sum of dt A and L_ij = exp(c_i - c_j) for i >= j (0 across a reset):

    y_i = sum_j (C_i . B_j) L_ij dt_j x_j + exp(c_i) C_i h_in + D x_i,     h_out = sum_j exp(c_Q - c_j) dt_j x_j (x) B_j + exp(c_Q) h_in

The decays' gradient d(dt A)_t is the sum of all that crosses t: pairs j < t <= i inside the chunk, tokens from t on that read
h_in, tokens before t that feed h_out, and h_in through to h_out. These sums are formed directly (a product with a
triangle of ones), never as the difference of two running sums, which would cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton_common import log1p_exp
from adjoint.kernels.triton_selective_scan_kernels import _slope as slope_of


@triton.jit
def step_kernel(dt, A, bias, step, cum, seqlen, nheads, dt_b, dt_t, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
                Q: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """step = softplus(dt + bias) and the chunk's running sum of step * A, both (batch, nheads, chunks * Q), 0-padded."""
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
def _rows(pointer, t, i, stride, seqlen, size, DOT: tl.constexpr):
    """A (tokens, size) tile in the matrix products' dtype, zero outside."""
    ok = (t < seqlen)[:, None] & (i < size)[None, :]
    return tl.load(pointer + t[:, None] * stride + i[None, :], mask=ok, other=0.0).to(DOT)


@triton.jit
def chunk_state_kernel(x, B, step, cum, reset, local, decay, seqlen, nheads, headdim, d_state, heads_a_group,
                       x_b, x_t, x_h, B_b, B_t, B_g, REVERSE: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr,
                       P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
                       ACC: tl.constexpr):  # fmt: skip
    """A chunk's own (headdim, d_state) state. REVERSE: its own cotangent of h_in, x and B being dy and C."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    t = chunk * Q + tl.arange(0, Q)
    p, n = tl.arange(0, P), tl.arange(0, N)
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
    x_ = _rows(x + batch * x_b + head * x_h, t, p, x_t, seqlen, headdim, ACC)
    B_ = _rows(B + batch * B_b + head // heads_a_group * B_g, t, n, B_t, seqlen, d_state, DOT)
    scaled = (x_ * weight[:, None]).to(DOT)
    out = tl.dot(tl.trans(scaled), B_, input_precision=PRECISION, out_dtype=ACC)
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    tl.store(local + state + p[:, None] * d_state + n[None, :], out, mask=ok)
    total = tl.where(all_resets == 0, tl.exp(last), 0.0)
    tl.store(decay + (batch * chunks + chunk) * nheads + head, total)


@triton.jit
def output_kernel(x, B, C, D, step, cum, reset, h_in, y, seqlen, nheads, headdim, d_state, heads_a_group,
                  x_b, x_t, x_h, B_b, B_t, B_g, C_b, C_t, C_g, HAS_D: tl.constexpr, HAS_RESET: tl.constexpr,
                  Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
                  ACC: tl.constexpr):  # fmt: skip
    """y of one chunk and head from the state at its entry."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    i = tl.arange(0, Q)
    t = chunk * Q + i
    p, n = tl.arange(0, P), tl.arange(0, N)
    line = (batch * nheads + head) * (chunks * Q) + t
    c = tl.load(cum + line)
    if HAS_RESET:
        reset += batch * seqlen
    count, _ = _segments(reset, t, seqlen, HAS_RESET, Q)
    group = head // heads_a_group
    C_ = _rows(C + batch * C_b + group * C_g, t, n, C_t, seqlen, d_state, DOT)
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state)
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    h = tl.load(h_in + state + p[:, None] * d_state + n[None, :], mask=ok, other=0.0).to(DOT)
    from_start = tl.where(count == 0, tl.exp(c), 0.0)
    out = tl.dot(C_, tl.trans(h), input_precision=PRECISION, out_dtype=ACC) * from_start[:, None]
    B_ = _rows(B + batch * B_b + group * B_g, t, n, B_t, seqlen, d_state, DOT)
    scores = tl.dot(C_, tl.trans(B_), input_precision=PRECISION, out_dtype=ACC)
    pair = (i[:, None] >= i[None, :]) & (count[:, None] == count[None, :])
    scores *= tl.exp(tl.where(pair, c[:, None] - c[None, :], float("-inf"))) * tl.load(step + line)[None, :]
    x_ = _rows(x + batch * x_b + head * x_h, t, p, x_t, seqlen, headdim, DOT)
    out += tl.dot(scores.to(DOT), x_, input_precision=PRECISION, out_dtype=ACC)
    if HAS_D:
        out += tl.load(D + head).to(ACC) * x_.to(ACC)
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(y + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], out, mask=ok)


@triton.jit
def input_grad_kernel(dy, x, B, C, A, D, step, cum, reset, h_in, g_out, dx, ddt, dA, dD, dbias, seqlen, nheads, headdim,
                      d_state, heads_a_group, dy_b, dy_t, dy_h, x_b, x_t, x_h, B_b, B_t, B_g, C_b, C_t, C_g,
                      HAS_D: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr,
                      P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
                      ):  # fmt: skip
    """dx and ddt of one chunk and head, and its share of dA, dD, dbias (batch, chunks, nheads). g_out: cotangent of h_out."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p, n = tl.arange(0, P), tl.arange(0, N)
    line = (batch * nheads + head) * (chunks * Q)
    c = tl.load(cum + line + t)
    last = tl.load(cum + line + chunk * Q + Q - 1)
    step_ = tl.load(step + line + t)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    group = head // heads_a_group
    state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state) + p[:, None] * d_state + n[None, :]
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    dy_ = _rows(dy + batch * dy_b + head * dy_h, t, p, dy_t, seqlen, headdim, DOT)
    C_ = _rows(C + batch * C_b + group * C_g, t, n, C_t, seqlen, d_state, DOT)
    h = tl.load(h_in + state, mask=ok, other=0.0)
    # what every token reads of h_in, weighed with its dy
    read = tl.dot(C_, tl.trans(h.to(DOT)), input_precision=PRECISION, out_dtype=ACC)
    read = tl.sum(read * dy_.to(ACC), axis=1) * tl.where(count == 0, tl.exp(c), 0.0)
    g = tl.load(g_out + state, mask=ok, other=0.0)
    through = tl.sum(tl.sum(g * h, axis=1), axis=0) * tl.where(all_resets == 0, tl.exp(last), 0.0)
    B_ = _rows(B + batch * B_b + group * B_g, t, n, B_t, seqlen, d_state, DOT)
    x_ = _rows(x + batch * x_b + head * x_h, t, p, x_t, seqlen, headdim, DOT)
    dxd = tl.dot(B_, tl.trans(g.to(DOT)), input_precision=PRECISION, out_dtype=ACC)
    dxd *= tl.where(count == all_resets, tl.exp(last - c), 0.0)[:, None]
    fed = tl.sum(dxd * x_.to(ACC), axis=1) * step_  # what every token feeds into h_out, weighed with its cotangent
    # rows j (inputs), columns i >= j (outputs)
    pair = (j[:, None] <= j[None, :]) & (count[:, None] == count[None, :])
    scores = tl.dot(B_, tl.trans(C_), input_precision=PRECISION, out_dtype=ACC)
    scores *= tl.exp(tl.where(pair, c[None, :] - c[:, None], float("-inf")))
    dxd += tl.dot(scores.to(DOT), dy_, input_precision=PRECISION, out_dtype=ACC)
    crossing = tl.dot(x_, tl.trans(dy_), input_precision=PRECISION, out_dtype=ACC) * scores * step_[:, None]
    crossing = tl.where(j[:, None] < j[None, :], crossing, 0.0)
    before = (j[None, :] < j[:, None]).to(ACC)  # (t, j): j < t
    if DOT == ACC:
        summed = tl.dot(before, crossing, input_precision=PRECISION, out_dtype=ACC)
    else:
        summed = tl.dot(before, crossing, input_precision="tf32", out_dtype=ACC)
    over = tl.where(j[None, :] >= j[:, None], summed + read[None, :], fed[None, :])
    ddecay = tl.sum(over, axis=1) + through
    dstep = tl.sum(dxd * x_.to(ACC), axis=1) + ddecay * tl.load(A + head).to(ACC)
    ddt_ = dstep
    if SOFTPLUS:
        ddt_ = dstep * slope_of(step_)
    ddt_ = tl.where(t < seqlen, ddt_, 0.0)
    dx_ = dxd * step_[:, None]
    share = (batch * chunks + chunk) * nheads + head
    if HAS_D:
        dx_ += tl.load(D + head).to(ACC) * dy_.to(ACC)
        tl.store(dD + share, tl.sum(tl.sum(dy_.to(ACC) * x_.to(ACC), axis=1), axis=0))
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(dx + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], dx_, mask=ok)
    tl.store(ddt + (batch * seqlen + t) * nheads + head, ddt_, mask=t < seqlen)
    tl.store(dA + share, tl.sum(ddecay * step_, axis=0))
    tl.store(dbias + share, tl.sum(ddt_, axis=0))


@triton.jit
def group_grad_kernel(dy, x, B, C, step, cum, reset, h_in, g_out, dB, dC, seqlen, nheads, headdim, d_state, ngroups,
                      heads_a_group, heads_each, dy_b, dy_t, dy_h, x_b, x_t, x_h, B_b, B_t, B_g, C_b, C_t, C_g,
                      HAS_RESET: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
                      PRECISION: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """dB and dC of one chunk and group, summed over a share of the group's heads: (batch, shares, seqlen, ngroups, d_state)."""
    chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    group, share = tl.program_id(1) % ngroups, tl.program_id(1) // ngroups
    shares = tl.num_programs(1) // ngroups
    j = tl.arange(0, Q)
    t = chunk * Q + j
    p, n = tl.arange(0, P), tl.arange(0, N)
    if HAS_RESET:
        reset += batch * seqlen
    count, all_resets = _segments(reset, t, seqlen, HAS_RESET, Q)
    pair = (j[:, None] <= j[None, :]) & (count[:, None] == count[None, :])
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    dB_ = tl.zeros((Q, N), ACC)
    dC_ = tl.zeros((Q, N), ACC)
    scores = tl.zeros((Q, Q), ACC)  # rows j (inputs), columns i (outputs): cotangent of B_j . C_i, over the heads
    first = group * heads_a_group + share * heads_each
    for head in range(first, tl.minimum(first + heads_each, (group + 1) * heads_a_group)):
        line = (batch * nheads + head) * (chunks * Q)
        c = tl.load(cum + line + t)
        last = tl.load(cum + line + chunk * Q + Q - 1)
        step_ = tl.load(step + line + t)
        state = ((batch * chunks + chunk) * nheads + head) * (headdim * d_state) + p[:, None] * d_state + n[None, :]
        dy_ = _rows(dy + batch * dy_b + head * dy_h, t, p, dy_t, seqlen, headdim, DOT)
        x_ = _rows(x + batch * x_b + head * x_h, t, p, x_t, seqlen, headdim, DOT)
        part = tl.dot(x_, tl.trans(dy_), input_precision=PRECISION, out_dtype=ACC)
        scores += part * tl.exp(tl.where(pair, c[None, :] - c[:, None], float("-inf"))) * step_[:, None]
        h = tl.load(h_in + state, mask=ok, other=0.0).to(DOT)
        weight = tl.where(count == 0, tl.exp(c), 0.0)
        scaled = (dy_.to(ACC) * weight[:, None]).to(DOT)
        dC_ += tl.dot(scaled, h, input_precision=PRECISION, out_dtype=ACC)
        g = tl.load(g_out + state, mask=ok, other=0.0).to(DOT)
        weight = tl.where(count == all_resets, tl.exp(last - c), 0.0) * step_
        scaled = (x_.to(ACC) * weight[:, None]).to(DOT)
        dB_ += tl.dot(scaled, g, input_precision=PRECISION, out_dtype=ACC)
    scores = scores.to(DOT)
    C_ = _rows(C + batch * C_b + group * C_g, t, n, C_t, seqlen, d_state, DOT)
    dB_ += tl.dot(scores, C_, input_precision=PRECISION, out_dtype=ACC)
    B_ = _rows(B + batch * B_b + group * B_g, t, n, B_t, seqlen, d_state, DOT)
    dC_ += tl.dot(tl.trans(scores), B_, input_precision=PRECISION, out_dtype=ACC)
    out = (((batch * shares + share) * seqlen + t[:, None]) * ngroups + group) * d_state + n[None, :]
    ok = (t < seqlen)[:, None] & (n < d_state)[None, :]
    tl.store(dB + out, dB_, mask=ok)
    tl.store(dC + out, dC_, mask=ok)
