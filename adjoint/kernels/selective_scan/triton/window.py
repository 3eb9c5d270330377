"""The selective scan's windowed backward in Triton: mu_i sums the terms of tokens i … i + window - 1 only,
in time O(seqlen).

    mu_i = sum over t in [i, i + window) of a_{i+1} ... a_t g_t C_t
    a_t = exp(d_t A),   g_t = dy_t silu(z_t)

Blocks of ``window`` tokens, counted from the token before the first (whose windowed adjoint is the initial
state's gradient): token i's window is the rest of its own block, a suffix scan, and the beginning of the
next, a prefix scan carried across by the decays between. Nothing is subtracted and nothing divided. A first
kernel walks the prefixes forward and marks them every ``EVERY`` tokens; the second goes through the sequence
backwards and redoes states and prefixes from the marks. A split of the sequence is whole blocks, so splits
need nothing of each other.

``halo``: the last tokens serve the windows of the others and get no gradient themselves.

Parameters that are not obvious, beside those in `forward` and `backward`:

    step: d, (batch, seqlen, d_inner)
    totals, products: marks of the prefixes, sums of g C and products of decays, like checkpoints
    c_out: the initial state's gradient
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.selective_scan.triton.backward import add_recent
from adjoint.kernels.triton.common import (
    LENGTHS,
    LOG2E,
    a_lane_each,
    begins_at,
    over_edge,
    sigmoid,
    softplus_slope,
    times_decay,
)


@triton.jit
def _decay(step, reset, t, inside, d, d_ok, A2, d_inner, HAS_RESET: tl.constexpr, ACC: tl.constexpr):
    """(d_t, a_t, whether a document begins at t); outside: d = 0, so a = 1."""
    step_ = tl.load(step + t * d_inner + d, mask=d_ok & inside, other=0.0).to(ACC)
    return step_, tl.exp2(A2 * step_[None, :]), begins_at(reset, t, inside, HAS_RESET)


@triton.jit
def _include(
    total,
    product,
    i,
    begins,
    left,
    dy,
    z,
    C,
    step,
    reset,
    last,
    dy_t,
    z_t,
    C_t,
    d,
    n,
    d_ok,
    n_ok,
    A2,
    d_inner,
    HAS_Z: tl.constexpr,
    HAS_RESET: tl.constexpr,
    ACC: tl.constexpr,
):
    """(the prefix that token i uses, prefix and product after token i + window joins them); ``begins``: that
    one is the first of its block. The pointers are ``window`` tokens ahead of i's, with ``left`` tokens
    there."""
    used = tl.where(begins, 0.0, total)
    inside = i < left
    g = tl.load(dy + i * dy_t + d, mask=d_ok & inside, other=0.0).to(ACC)
    if HAS_Z:
        z_ = tl.load(z + i * z_t + d, mask=d_ok & inside, other=0.0).to(ACC)
        g = g * z_ * sigmoid(z_)
    C_ = tl.load(C + i * C_t + n, mask=n_ok & inside, other=0.0).to(ACC)
    _step, a, cut = _decay(step, reset, i, inside, d, d_ok, A2, d_inner, HAS_RESET, ACC)
    product = over_edge(times_decay(a, product, HAS_RESET), cut, HAS_RESET)
    product = tl.where(begins, 1.0, product)
    term = g[None, :] * C_[:, None] + tl.where(i == left - 1, last, 0.0)
    return used, used + times_decay(term, product, HAS_RESET), product


@triton.jit(do_not_specialize=LENGTHS)
def marks_kernel(
    dy,
    step,
    A,
    C,
    z,
    reset,
    dfinal,
    totals,
    products,
    seqlen,
    d_inner,
    d_state,
    split_len,
    window,
    opaque_one,
    dy_b,
    dy_t,
    C_b,
    C_t,
    z_b,
    z_t,
    HAS_Z: tl.constexpr,
    HAS_RESET: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    EVERY: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Prefix and product before every EVERY-th token, (batch, marks, d_state, d_inner) each."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * LANES + tl.arange(0, LANES)
    n = tl.arange(0, N)
    d_ok, n_ok = d < d_inner, n < d_state
    ok = n_ok[:, None] & d_ok[None, :]
    state = n[:, None] * d_inner + a_lane_each(d, opaque_one)[None, :]
    A2 = tl.load(A + state, mask=ok, other=0.0).to(ACC) * LOG2E
    per_batch = tl.cast(d_inner, tl.int64) * d_state
    last = tl.zeros((N, LANES), ACC)
    if HAS_FINAL:
        last = tl.load(dfinal + batch * per_batch + state, mask=ok, other=0.0).to(ACC)
    dy += batch * dy_b
    step += batch * seqlen * d_inner
    C += batch * C_b
    if HAS_Z:
        z += batch * z_b
    if HAS_RESET:
        reset += batch * seqlen
    marks = (seqlen + EVERY - 1) // EVERY
    first = split.to(tl.int64) * split_len - 1
    dy += window * tl.cast(dy_t, tl.int64)
    step += window * tl.cast(d_inner, tl.int64)
    C += window * tl.cast(C_t, tl.int64)
    if HAS_Z:
        z += window * tl.cast(z_t, tl.int64)
    if HAS_RESET:
        reset += window
    total = tl.zeros((N, LANES), ACC)
    product = tl.zeros((N, LANES), ACC)
    for k in range(0, tl.minimum(split_len, seqlen - first)):
        i = first + k
        mark = (batch * marks + i // EVERY) * per_batch + state
        at_mark = ok & (i % EVERY == 0) & (i >= 0)
        tl.store(totals + mark, total, mask=at_mark)
        tl.store(products + mark, product, mask=at_mark)
        _used, total, product = _include(
            total,
            product,
            i,
            (i + 1) % window == 0,
            seqlen - window,
            dy,
            z,
            C,
            step,
            reset,
            last,
            dy_t,
            z_t,
            C_t,
            d,
            n,
            d_ok,
            n_ok,
            A2,
            d_inner,
            HAS_Z,
            HAS_RESET,
            ACC,
        )


@triton.jit(do_not_specialize=LENGTHS)
def backward_kernel(
    dy,
    u,
    step,
    A,
    B,
    C,
    D,
    z,
    reset,
    checkpoints,
    totals,
    products,
    dfinal,
    carried,
    scratch,
    du,
    ddelta,
    dz,
    dB,
    dC,
    dA,
    dD,
    dbias,
    c_out,
    seqlen,
    d_inner,
    d_state,
    split_len,
    window,
    halo,
    opaque_one,
    dy_b,
    dy_t,
    u_b,
    u_t,
    B_b,
    B_t,
    C_b,
    C_t,
    z_b,
    z_t,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    EVERY: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    """One split (whole blocks of tokens) in reverse; channels shared out and outputs as of the kernel without
    a window. ``carried``, (batch, splits, 2, d_state, d_inner), keeps the suffix and the decays across to the
    next block between visits."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    program, n_splits, n_programs = tl.program_id(0), tl.num_programs(1), tl.num_programs(0)
    n = tl.arange(0, N)
    n_ok = n < d_state
    per_batch = tl.cast(d_inner, tl.int64) * d_state
    dy += batch * dy_b
    u += batch * u_b
    B += batch * B_b
    C += batch * C_b
    if HAS_Z:
        z += batch * z_b
    shares = (batch * n_programs + program) * seqlen
    edge = (batch * n_splits + split) * per_batch
    parts = (split_len // EVERY + 2) // TOGETHER + 1
    marks = (seqlen + EVERY - 1) // EVERY
    tile: tl.constexpr = N * LANES
    marks_size: tl.constexpr = (EVERY // STEPS) * 3 * tile
    scratch += ((batch * n_splits + split) * n_programs + program) * (marks_size + 2 * EVERY * N)
    recent_B = scratch + marks_size  # dB and dC of a visit's tokens
    recent_C = recent_B + EVERY * N
    scratch += n[:, None] * LANES + a_lane_each(tl.arange(0, LANES), opaque_one)[None, :]

    first = split.to(tl.int64) * split_len - 1
    stop = tl.minimum(first + split_len, seqlen)
    first = tl.maximum(first, 0)
    s_first, s_last = first // EVERY, (stop - 1) // EVERY
    n_blocks = (d_inner + LANES - 1) // LANES
    walk = (n_blocks - program + n_programs - 1) // n_programs  # blocks of channels of this program
    for visit in range(0, (s_last - s_first + 1).to(tl.int32) * walk):
        back, nth = visit // walk, visit % walk
        again = back > 0  # this split's later stretch has left what it carries
        d = (program + nth * n_programs) * LANES + tl.arange(0, LANES)
        d_ok = d < d_inner
        ok = n_ok[:, None] & d_ok[None, :]
        state = n[:, None] * d_inner + a_lane_each(d, opaque_one)[None, :]
        A2 = tl.load(A + state, mask=ok, other=0.0).to(ACC) * LOG2E
        last = tl.zeros((N, LANES), ACC)
        if HAS_FINAL:
            last = tl.load(dfinal + batch * per_batch + state, mask=ok, other=0.0).to(ACC)
        skip = tl.zeros((LANES,), ACC)
        if HAS_D:
            skip = tl.load(D + d, mask=d_ok, other=0.0).to(ACC)
        # Tokens are counted from the stretch's first: offsets in a stretch fit 32 bits.
        begin = (s_last - back) * EVERY
        low = tl.maximum(first - begin, 0).to(tl.int32)
        tokens = tl.minimum(stop - begin, EVERY).to(tl.int32)
        n_groups = (tokens + STEPS - 1) // STEPS
        row = batch * seqlen + begin  # of the contiguous tensors (batch, seqlen, d_inner)
        tokens_at = row * d_inner
        step_s = step + tokens_at
        du_s = du + tokens_at
        ddelta_s = ddelta + tokens_at
        dz_s = dz + tokens_at if HAS_Z else dz
        dy_s = dy + begin * dy_t
        u_s = u + begin * u_t
        B_s = B + begin * B_t
        C_s = C + begin * C_t
        z_s = z + begin * z_t if HAS_Z else z
        reset_s = reset + row if HAS_RESET else reset
        ahead = begin + window
        dy_w = dy + ahead * dy_t
        C_w = C + ahead * C_t
        z_w = z + ahead * z_t if HAS_Z else z
        step_w = step + (row + window) * d_inner
        reset_w = reset + (row + window) if HAS_RESET else reset
        phase = (begin % window).to(tl.int32) + 1
        # Tokens from the stretch's first on: in the sequence, with a gradient, and that the windows reach.
        to_end = tl.minimum(seqlen - begin, 2 * EVERY).to(tl.int32)
        to_halo = tl.maximum(tl.minimum(seqlen - halo - begin, 2 * EVERY), 0).to(tl.int32)
        left = tl.maximum(tl.minimum(seqlen - ahead, 2 * EVERY), 0).to(tl.int32)
        c = tl.load(carried + (edge * 2 + state), mask=ok & again, other=0.0)
        across = tl.load(carried + (edge * 2 + per_batch + state), mask=ok & again, other=0.0)
        if back == 0:
            step_, across, cut = _decay(
                step_s, reset_s, tokens, tokens < to_end, d, d_ok, A2, d_inner, HAS_RESET, ACC
            )
            across = over_edge(across, cut, HAS_RESET)
        sum_A = tl.zeros((N, LANES), ACC)
        sum_D = tl.zeros((LANES,), ACC)
        sum_bias = tl.zeros((LANES,), ACC)
        mark = (batch * marks + begin // EVERY) * per_batch + state
        h = tl.load(checkpoints + mark, mask=ok, other=0.0)
        total = tl.load(totals + mark, mask=ok, other=0.0)
        product = tl.load(products + mark, mask=ok, other=0.0)
        for group in range(0, n_groups):
            tl.store(scratch + group * 3 * tile, h)
            tl.store(scratch + group * 3 * tile + tile, total)
            tl.store(scratch + group * 3 * tile + 2 * tile, product)
            for k in range(0, STEPS):
                t = group * STEPS + k
                inside = t < tokens
                step_, a, cut = _decay(step_s, reset_s, t, inside, d, d_ok, A2, d_inner, HAS_RESET, ACC)
                x = step_ * tl.load(u_s + t * u_t + d, mask=d_ok & inside, other=0.0).to(ACC)
                B_ = tl.load(B_s + t * B_t + n, mask=n_ok & inside, other=0.0).to(ACC)
                h = over_edge(a * h, cut, HAS_RESET) + x[None, :] * B_[:, None]
                used, total, product = _include(
                    total,
                    product,
                    t,
                    (phase + t) % window == 0,
                    left,
                    dy_w,
                    z_w,
                    C_w,
                    step_w,
                    reset_w,
                    last,
                    dy_t,
                    z_t,
                    C_t,
                    d,
                    n,
                    d_ok,
                    n_ok,
                    A2,
                    d_inner,
                    HAS_Z,
                    HAS_RESET,
                    ACC,
                )
        tl.debug_barrier()
        for undone in range(0, n_groups):
            group = n_groups - 1 - undone
            h = tl.load(scratch + group * 3 * tile)
            total = tl.load(scratch + group * 3 * tile + tile)
            product = tl.load(scratch + group * 3 * tile + 2 * tile)
            decayed = ()
            prefixes = ()
            for k in tl.static_range(STEPS):
                t = group * STEPS + k
                inside = t < tokens
                step_, a, cut = _decay(step_s, reset_s, t, inside, d, d_ok, A2, d_inner, HAS_RESET, ACC)
                x = step_ * tl.load(u_s + t * u_t + d, mask=d_ok & inside, other=0.0).to(ACC)
                B_ = tl.load(B_s + t * B_t + n, mask=n_ok & inside, other=0.0).to(ACC)
                p = over_edge(a * h, cut, HAS_RESET)
                h = p + x[None, :] * B_[:, None]
                used, total, product = _include(
                    total,
                    product,
                    t,
                    (phase + t) % window == 0,
                    left,
                    dy_w,
                    z_w,
                    C_w,
                    step_w,
                    reset_w,
                    last,
                    dy_t,
                    z_t,
                    C_t,
                    d,
                    n,
                    d_ok,
                    n_ok,
                    A2,
                    d_inner,
                    HAS_Z,
                    HAS_RESET,
                    ACC,
                )
                decayed = decayed + (p,)
                prefixes = prefixes + (used,)
            for k in tl.static_range(STEPS):
                p = decayed[STEPS - 1 - k]
                t = group * STEPS + (STEPS - 1 - k)
                inside = (t < tokens) & (t >= low)
                counts = tl.where(inside & (t < to_halo), 1.0, 0.0).to(ACC)
                m = d_ok & inside
                step_, a, cut = _decay(step_s, reset_s, t, inside, d, d_ok, A2, d_inner, HAS_RESET, ACC)
                u_ = tl.load(u_s + t * u_t + d, mask=m, other=0.0).to(ACC)
                g = tl.load(dy_s + t * dy_t + d, mask=m, other=0.0).to(ACC)
                B_ = tl.load(B_s + t * B_t + n, mask=n_ok & inside, other=0.0).to(ACC)
                C_ = tl.load(C_s + t * C_t + n, mask=n_ok & inside, other=0.0).to(ACC)
                x = step_ * u_
                h_ = p + x[None, :] * B_[:, None]
                if HAS_Z:
                    z_ = tl.load(z_s + t * z_t + d, mask=m, other=0.0).to(ACC)
                    gate = sigmoid(z_)
                    ungated = tl.sum(h_ * C_[:, None], axis=0) + skip * u_
                    dz_ = counts * g * ungated * gate * (1.0 + z_ * (1.0 - gate))
                    tl.store(dz_s + t * d_inner + d, dz_, mask=m)
                    g = g * z_ * gate
                suffix = g[None, :] * C_[:, None] + tl.where(inside & (t == to_end - 1), last, 0.0) + c
                mu = (suffix + times_decay(prefixes[STEPS - 1 - k], across, HAS_RESET)) * counts
                begins = ((phase + t) % window == 0) & inside
                c = tl.where(begins, 0.0, over_edge(a * suffix, cut, HAS_RESET))
                across = over_edge(tl.where(begins, a, across * a), cut, HAS_RESET)
                g = g * counts
                place = t * N + n
                tl.store(recent_B + place, tl.sum(mu * x[None, :], axis=1), mask=n_ok & inside)
                tl.store(recent_C + place, tl.sum(h_ * g[None, :], axis=1), mask=n_ok & inside)
                v = mu * p
                mu_B = tl.sum(mu * B_[:, None], axis=0)
                dstep = tl.sum(v * A2, axis=0) * (1.0 / LOG2E) + mu_B * u_
                if SOFTPLUS:
                    dstep = dstep * softplus_slope(step_)
                tl.store(du_s + t * d_inner + d, mu_B * step_ + skip * g, mask=m)
                tl.store(ddelta_s + t * d_inner + d, dstep, mask=m)
                sum_A += v * step_[None, :]
                sum_D += g * u_
                sum_bias += dstep
        tl.debug_barrier()
        add_recent(dB, recent_B, shares + begin, low, tokens, n, n_ok, d_state, nth > 0, N, EVERY)
        add_recent(dC, recent_C, shares + begin, low, tokens, n, n_ok, d_state, nth > 0, N, EVERY)
        tl.store(carried + (edge * 2 + state), c, mask=ok)
        tl.store(carried + (edge * 2 + per_batch + state), across, mask=ok)
        again = back % TOGETHER > 0  # this partial sum's earlier stretches have left their sums
        partial_sum = (batch * n_splits + split) * parts + back // TOGETHER
        before = tl.load(dA + partial_sum * per_batch + state, mask=ok & again, other=0.0)
        tl.store(dA + partial_sum * per_batch + state, before + sum_A, mask=ok)
        if HAS_D:
            before = tl.load(dD + partial_sum * d_inner + d, mask=d_ok & again, other=0.0)
            tl.store(dD + partial_sum * d_inner + d, before + sum_D, mask=d_ok)
        if HAS_BIAS:
            before = tl.load(dbias + partial_sum * d_inner + d, mask=d_ok & again, other=0.0)
            tl.store(dbias + partial_sum * d_inner + d, before + sum_bias, mask=d_ok)
        if (split == 0) & (begin == s_first * EVERY):
            tl.store(c_out + batch * per_batch + state, c, mask=ok)
        tl.debug_barrier()  # the next visit overwrites the marks, and reads what this one has summed
