"""The selective scan's backward kernels in Triton (launched by `launch`).

The backward goes through the forward's stretches of ``EVERY`` tokens from last to first: it redoes a
stretch's states once to place finer marks every ``STEPS`` tokens (a scratch buffer that stays in cache), and
again group by group of ``STEPS`` with the decays a_t and the states h_{t-1} held in registers, where the
reverse walk of the adjoint state mu needs them: an exponential costs more than the registers. Tokens are
counted from the stretch's first, so that offsets fit 32 bits: with 64 a tenth more instructions.

dB and dC are sums over all channels. Programs share the channels out block by block in turn, and a program
visits all its blocks on one stretch of tokens before it goes on to the stretch before: the stretch's dB and
dC stay in cache while they are added up, a visit at a time, and neighbours in memory are read by
neighbouring programs at about one time. What a block carries to the next stretch lies in memory meanwhile.

The (rows, d_state, 8) tile gives a warp 8 lanes of channels × 4 of states, the balance between its two kinds
of sums: over states (du, ddelta, dz) and over channels (dB, dC). Above d_state 32 several warps share a
program's states, so that a thread never holds more than 8 of a token and nothing spills.
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import (
    LENGTHS,
    LOG2E,
    a_lane_each,
    begins_at,
    log1p_exp,
    over_edge,
    sigmoid,
    softplus_slope,
    step_size,
    times_decay,
)


@triton.jit(do_not_specialize=LENGTHS)
def adjoint_local_kernel(
    dy,
    delta,
    A,
    C,
    z,
    bias,
    reset,
    c_out,
    decay,
    seqlen,
    d_inner,
    d_state,
    split_len,
    one,
    dy_b,
    dy_t,
    delta_b,
    delta_t,
    C_b,
    C_t,
    z_b,
    z_t,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    UNROLL: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    """The carried adjoint c = a_t mu_t at a split's left edge when it enters with zero, and the product of
    decays."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * LANES + tl.arange(0, LANES)
    n = tl.arange(0, N)
    d_ok, n_ok = d < d_inner, n < d_state
    ok = n_ok[:, None] & d_ok[None, :]
    state = n[:, None] * d_inner + a_lane_each(d, one)[None, :]
    A2 = tl.load(A + state, mask=ok, other=0.0).to(ACC) * LOG2E
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    dy += batch * dy_b
    delta += batch * delta_b
    C += batch * C_b
    if HAS_Z:
        z += batch * z_b
    if HAS_RESET:
        reset += batch * seqlen
    step_bias = tl.zeros((LANES,), ACC)
    if HAS_BIAS:
        step_bias = tl.load(bias + d, mask=d_ok, other=0.0).to(ACC)
    c = tl.zeros((N, LANES), ACC)
    total = tl.zeros((LANES,), ACC)
    kept = tl.full((LANES,), 1.0, ACC)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        for i in tl.static_range(UNROLL):
            t = stop - 1 - group * UNROLL - i
            inside = t >= first
            at = tl.maximum(t, first)
            step = step_size(
                tl.load(delta + at * delta_t + d, mask=d_ok, other=0.0).to(ACC), step_bias, SOFTPLUS
            )
            step = tl.where(inside, step, 0.0)
            g = tl.where(inside, tl.load(dy + at * dy_t + d, mask=d_ok, other=0.0).to(ACC), 0.0)
            if HAS_Z:
                z_ = tl.load(z + at * z_t + d, mask=d_ok, other=0.0).to(ACC)
                g = g * z_ * sigmoid(z_)
            C_t_ = tl.load(C + at * C_t + n, mask=n_ok, other=0.0).to(ACC)
            a = tl.exp2(A2 * step[None, :])
            new_c = a * (g[None, :] * C_t_[:, None] + c)
            if HAS_RESET:  # what is read for a token outside times 0 would be NaN where it is
                new_c = tl.where(inside, new_c, c)
            begins = begins_at(reset, t, inside, HAS_RESET)
            c = over_edge(new_c, begins, HAS_RESET)
            kept = over_edge(kept, begins, HAS_RESET)
            total += step
    edge = (batch * tl.num_programs(1) + split) * d_inner * d_state
    tl.store(c_out + edge + state, c, mask=ok)
    tl.store(
        decay + edge + state, times_decay(tl.exp2(A2 * total[None, :]), kept[None, :], HAS_RESET), mask=ok
    )


@triton.jit(do_not_specialize=LENGTHS)
def step_kernel(
    delta,
    bias,
    step,
    seqlen,
    d_inner,
    delta_b,
    delta_t,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """d = softplus(delta + bias) in the states' precision, once: the backward's lanes would each redo it."""
    batch = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    ok = (t < seqlen) & (d < d_inner)
    x = tl.load(delta + batch * delta_b + t * delta_t + d, mask=ok, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(bias + d, mask=d < d_inner, other=0.0).to(ACC)
    if SOFTPLUS:
        x = log1p_exp(x)
    tl.store(step + (batch * seqlen + t) * d_inner + d, x, mask=ok)


@triton.jit
def _advance(
    h,
    t,
    tokens,
    u,
    step,
    B,
    reset,
    n,
    d_ok,
    n_ok,
    u_t,
    B_t,
    d_inner,
    A2,
    HAS_RESET: tl.constexpr,
    EVEN: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ACC: tl.constexpr,
):
    """One token on every row: (a_t, h_{t-1}, h_t = a_t h_{t-1} + d_t u_t B_t); h_{t-1} is 0 where a document
    begins."""
    # Past the end, read the last token again and take d = 0: loads need no mask for that.
    at = tl.minimum(t, tokens - 1)
    live = tl.where(t < tokens, 1.0, 0.0).to(ACC)
    begins = begins_at(reset, at, t < tokens, HAS_RESET)
    B_ = _load(B + at * B_t + n, n_ok, EVEN).to(ACC)
    decays = ()
    befores = ()
    hs = ()
    for r in tl.static_range(ROWS):
        step_ = _load(step + at * d_inner + r * LANES, d_ok[r], EVEN) * live
        x = step_ * _load(u + at * u_t + r * LANES, d_ok[r], EVEN).to(ACC)
        a = tl.exp2(A2[r] * step_[None, :])
        before = over_edge(h[r], begins, HAS_RESET)
        decays = decays + (a,)
        befores = befores + (before,)
        hs = hs + (a * before + x[None, :] * B_[:, None],)
    return decays, befores, hs


@triton.jit
def _load(pointer, ok, EVEN: tl.constexpr):
    """A load, masked only where the tile overhangs (EVEN: it does not)."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=ok, other=0.0)


@triton.jit
def add_recent(total, recent, begin, first, end, n, n_ok, d_state, add, N: tl.constexpr, EVERY: tl.constexpr):
    """``total`` (seqlen, d_state) of tokens first to end - 1, counted from ``begin``, becomes what is there,
    if ``add``, plus ``recent`` (EVERY, N)."""
    AT_ONCE: tl.constexpr = EVERY if EVERY < 16 else 16
    total += begin * d_state
    for block in range(0, EVERY // AT_ONCE):
        i = block * AT_ONCE + tl.arange(0, AT_ONCE)
        ok = ((i >= first) & (i < end))[:, None] & n_ok[None, :]
        place = total + (i[:, None] * d_state + n[None, :])
        new = tl.load(recent + (i[:, None] * N + n[None, :]), mask=ok, other=0.0)
        tl.store(place, tl.load(place, mask=ok & add, other=0.0) + new, mask=ok)


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
    seqlen,
    d_inner,
    d_state,
    split_len,
    one,
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
    SOFTPLUS: tl.constexpr,
    EVEN: tl.constexpr,
    EVERY: tl.constexpr,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    ACC: tl.constexpr,
):
    """One split, from the adjoint ``carried`` in at its right edge, which is left as it is at the left one.
    dB and dC are this program's share of the sum over channels."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    program, n_splits, n_programs = tl.program_id(0), tl.num_programs(1), tl.num_programs(0)
    n = tl.arange(0, N)
    n_ok = n < d_state
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    dy += batch * dy_b
    u += batch * u_b
    B += batch * B_b
    C += batch * C_b
    if HAS_Z:
        z += batch * z_b
    if HAS_RESET:
        reset += batch * seqlen
    row = batch * seqlen + first  # of the contiguous tensors (batch, seqlen, d_inner)
    part = (batch * n_programs + program) * seqlen + first  # of dB and dC
    per_batch = tl.cast(d_inner, tl.int64) * d_state
    edge = (batch * n_splits + split) * per_batch
    sums = (batch * n_splits + split) * d_inner
    n_checkpoints = (seqlen + EVERY - 1) // EVERY
    # This program's fine marks, (EVERY // STEPS, ROWS, d_state, LANES): each thread reads back what it wrote.
    tile: tl.constexpr = N * LANES
    marks_size: tl.constexpr = (EVERY // STEPS) * ROWS * tile
    scratch += ((batch * n_splits + split) * n_programs + program) * (marks_size + 2 * EVERY * N)
    recent_B = scratch + marks_size  # dB and dC of a visit's tokens
    recent_C = recent_B + EVERY * N
    scratch += n[:, None] * LANES + a_lane_each(tl.arange(0, LANES), one)[None, :]

    n_stretches = ((stop - first + EVERY - 1) // EVERY).to(tl.int32)
    n_blocks = (d_inner + ROWS * LANES - 1) // (ROWS * LANES)
    walk = (n_blocks - program + n_programs - 1) // n_programs  # blocks of this program
    for visit in range(0, n_stretches * walk):
        back, nth = visit // walk, visit % walk
        # The channels of row r are d + r * LANES: the same pointers at a constant offset.
        d = (program + nth * n_programs) * (ROWS * LANES) + tl.arange(0, LANES)
        state = n[:, None] * d_inner + a_lane_each(d, one)[None, :]
        d_ok = ()
        A2 = ()
        c = ()
        sum_A = ()
        sum_D = ()
        sum_bias = ()
        skip = ()
        for r in tl.static_range(ROWS):
            d_ok = d_ok + (d + r * LANES < d_inner,)
            ok = n_ok[:, None] & d_ok[r][None, :]
            A2 = A2 + (tl.load(A + state + r * LANES, mask=ok, other=0.0).to(ACC) * LOG2E,)
            c = c + (tl.load(carried + edge + state + r * LANES, mask=ok, other=0.0),)
            if HAS_D:
                skip = skip + (tl.load(D + d + r * LANES, mask=d_ok[r], other=0.0).to(ACC),)
            else:
                skip = skip + (tl.zeros((LANES,), ACC),)
            sum_A = sum_A + (tl.zeros((N, LANES), ACC),)
            sum_D = sum_D + (tl.zeros((LANES,), ACC),)
            sum_bias = sum_bias + (tl.zeros((LANES,), ACC),)
        ahead = (n_stretches - 1 - back) * EVERY
        begin = first + ahead
        # Tokens are counted from the stretch's first: offsets in a stretch fit 32 bits.
        tokens = tl.minimum(stop - begin, EVERY).to(tl.int32)
        n_groups = (tokens + STEPS - 1) // STEPS
        dy_s = dy + (begin * dy_t + d)
        u_s = u + (begin * u_t + d)
        z_s = z + (begin * z_t + d) if HAS_Z else z
        B_s = B + begin * B_t
        C_s = C + begin * C_t
        reset_s = reset + begin if HAS_RESET else reset
        here = (row + ahead) * d_inner + d
        step_s = step + here
        du_s = du + here
        ddelta_s = ddelta + here
        dz_s = dz + here if HAS_Z else dz
        mark = checkpoints + (batch * n_checkpoints + begin // EVERY) * per_batch
        h = ()
        for r in tl.static_range(ROWS):
            h = h + (tl.load(mark + state + r * LANES, mask=n_ok[:, None] & d_ok[r][None, :], other=0.0),)
            tl.store(scratch + r * tile, h[r])
        for group in range(0, n_groups - 1):
            for i in tl.static_range(STEPS):
                t = group * STEPS + i
                _, _, h = _advance(
                    h,
                    t,
                    tokens,
                    u_s,
                    step_s,
                    B_s,
                    reset_s,
                    n,
                    d_ok,
                    n_ok,
                    u_t,
                    B_t,
                    d_inner,
                    A2,
                    HAS_RESET,
                    EVEN,
                    LANES,
                    ROWS,
                    ACC,
                )
            for r in tl.static_range(ROWS):
                tl.store(scratch + ((group + 1) * ROWS + r) * tile, h[r])
        tl.debug_barrier()
        for undone in range(0, n_groups):
            group = n_groups - 1 - undone
            h = ()
            for r in tl.static_range(ROWS):
                h = h + (tl.load(scratch + (group * ROWS + r) * tile),)
            decays = ()
            states = ()
            for i in tl.static_range(STEPS):
                t = group * STEPS + i
                a, before, h = _advance(
                    h,
                    t,
                    tokens,
                    u_s,
                    step_s,
                    B_s,
                    reset_s,
                    n,
                    d_ok,
                    n_ok,
                    u_t,
                    B_t,
                    d_inner,
                    A2,
                    HAS_RESET,
                    EVEN,
                    LANES,
                    ROWS,
                    ACC,
                )
                decays = decays + (a,)
                states = states + (before,)
            for i in tl.static_range(STEPS):
                t = group * STEPS + (STEPS - 1 - i)
                inside = t < tokens
                at = tl.minimum(t, tokens - 1)
                live = tl.where(inside, 1.0, 0.0).to(ACC)
                begins = begins_at(reset_s, at, inside, HAS_RESET)
                B_ = _load(B_s + at * B_t + n, n_ok, EVEN).to(ACC)
                C_ = _load(C_s + at * C_t + n, n_ok, EVEN).to(ACC)
                mu_x = tl.zeros((N, LANES), ACC)
                h_g = tl.zeros((N, LANES), ACC)
                new_c = ()
                new_A = ()
                new_D = ()
                new_bias = ()
                for r in tl.static_range(ROWS):
                    m = d_ok[r] & inside
                    a = decays[STEPS - 1 - i][r]
                    p = a * states[STEPS - 1 - i][r]
                    step_ = _load(step_s + at * d_inner + r * LANES, d_ok[r], EVEN) * live
                    u_ = _load(u_s + at * u_t + r * LANES, d_ok[r], EVEN).to(ACC)
                    g = _load(dy_s + at * dy_t + r * LANES, d_ok[r], EVEN).to(ACC) * live
                    x = step_ * u_
                    h_ = p + x[None, :] * B_[:, None]
                    if HAS_Z:
                        z_ = _load(z_s + at * z_t + r * LANES, d_ok[r], EVEN).to(ACC)
                        gate = sigmoid(z_)
                        ungated = tl.sum(h_ * C_[:, None], axis=0) + skip[r] * u_
                        dz_ = g * ungated * gate * (1.0 + z_ * (1.0 - gate))
                        tl.store(dz_s + at * d_inner + r * LANES, dz_, mask=m)
                        g = g * z_ * gate
                    mu = g[None, :] * C_[:, None] + c[r]
                    v = mu * p
                    mu_x += mu * x[None, :]
                    h_g += h_ * g[None, :]
                    mu_B = tl.sum(mu * B_[:, None], axis=0)
                    dstep = tl.sum(v * A2[r], axis=0) * (1.0 / LOG2E) + mu_B * u_
                    if SOFTPLUS:
                        dstep = dstep * softplus_slope(step_)
                    tl.store(du_s + at * d_inner + r * LANES, mu_B * step_ + skip[r] * g, mask=m)
                    tl.store(ddelta_s + at * d_inner + r * LANES, dstep, mask=m)
                    new_A = new_A + (sum_A[r] + v * step_[None, :],)
                    new_D = new_D + (sum_D[r] + g * u_,)
                    new_bias = new_bias + (sum_bias[r] + tl.where(inside, dstep, 0.0),)
                    new_c = new_c + (over_edge(a * mu, begins, HAS_RESET),)
                c = new_c
                sum_A = new_A
                sum_D = new_D
                sum_bias = new_bias
                place = at * N + n
                tl.store(recent_B + place, tl.sum(mu_x, axis=1), mask=n_ok & inside)
                tl.store(recent_C + place, tl.sum(h_g, axis=1), mask=n_ok & inside)
        tl.debug_barrier()
        add_recent(dB, recent_B, part + ahead, 0, tokens, n, n_ok, d_state, nth > 0, N, EVERY)
        add_recent(dC, recent_C, part + ahead, 0, tokens, n, n_ok, d_state, nth > 0, N, EVERY)
        again = back > 0  # this split's earlier stretches have left their sums
        for r in tl.static_range(ROWS):
            ok = n_ok[:, None] & d_ok[r][None, :]
            tl.store(carried + edge + state + r * LANES, c[r], mask=ok)
            before = tl.load(dA + edge + state + r * LANES, mask=ok & again, other=0.0)
            tl.store(dA + edge + state + r * LANES, before + sum_A[r], mask=ok)
            at = sums + d + r * LANES
            if HAS_D:
                before = tl.load(dD + at, mask=d_ok[r] & again, other=0.0)
                tl.store(dD + at, before + sum_D[r], mask=d_ok[r])
            if HAS_BIAS:
                before = tl.load(dbias + at, mask=d_ok[r] & again, other=0.0)
                tl.store(dbias + at, before + sum_bias[r], mask=d_ok[r])
        tl.debug_barrier()  # the next visit overwrites the marks, and reads what this one has summed
