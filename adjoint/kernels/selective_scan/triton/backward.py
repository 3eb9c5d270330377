"""The selective scan's backward kernels in Triton (launched by `launch`).

    mu_t = g_t C_t + a_{t+1} mu_{t+1},   a_t = exp(d_t A),   g_t = dy_t silu(z_t)
    du_t = d_t (B_t . mu_t) + D g_t,   dB_t = sum over channels of d_t u_t mu_t,   dC_t = that of g_t h_t
    dd_t = u_t (B_t . mu_t) + A . (a_t h_{t-1} mu_t),   dA = sum over t of d_t a_t h_{t-1} mu_t

The backward goes through the forward's stretches of ``EVERY`` tokens from last to first: it redoes a
stretch's states once to place finer marks every ``STEPS`` tokens (a scratch buffer), and again group by group
of ``STEPS`` with the decays a_t and the states h_{t-1} held in registers, where the reverse walk of the
adjoint state mu needs them: an exponential costs more than the registers. Tokens are counted from the
stretch's first, so that offsets fit 32 bits: with 64 a tenth more instructions.

What has no state in it (softplus and its slope, the gate, conversions, du, ddelta, dz from their sums over
states) is done apart, ``SPAN`` tokens at once, each by one lane: in the walk the four lanes that share a
channel's states would each do it. Both sides meet in the scratch buffer.

dB and dC are sums over all channels. Programs share the channels out block by block in turn, and a program
visits all its blocks on one stretch of tokens before it goes on to the stretch before: the stretch's dB and
dC stay in cache while they are added up, a visit at a time, and neighbours in memory are read by
neighbouring programs at about one time. What a block carries to the next stretch lies in memory meanwhile.

The (rows, d_state, 8) tile gives a warp 8 lanes of channels × 4 of states, the balance between its two kinds
of sums: over states (du, ddelta, dz) and over channels (dB, dC). Above d_state 32 several warps share a
program's states, so that a thread never holds more than 8 of a token and nothing spills.

Parameters that are not obvious, beside those in `forward`:

    carried: a_{t+1} mu_{t+1} at the right edge of each split, (batch, splits, d_state, d_inner), which
        becomes that at its left edge
    scratch: what a program keeps in memory, see above
    dB, dC: (batch, programs, seqlen, d_state), dA, dD, dbias: (batch, splits × parts, ...): partial
        sums, a part for TOGETHER stretches
    ROWS: rows of 8 channels a program holds; EVEN: whether d_state is N, so that no load needs a mask
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
    opaque_one,
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
    state = n[:, None] * d_inner + a_lane_each(d, opaque_one)[None, :]
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
    through = tl.full((LANES,), 1.0, ACC)
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
            through = over_edge(through, begins, HAS_RESET)
            total += step
    edge = (batch * tl.num_programs(1) + split) * d_inner * d_state
    tl.store(c_out + edge + state, c, mask=ok)
    tl.store(
        decay + edge + state, times_decay(tl.exp2(A2 * total[None, :]), through[None, :], HAS_RESET), mask=ok
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
    """d = softplus(delta + bias) in the states' precision, once: the windowed backward's lanes would each
    redo it."""
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
    B,
    step,
    x,
    begins,
    A2,
    HAS_RESET: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One token on every row: (a_t, h_{t-1}, h_t = a_t h_{t-1} + d_t u_t B_t); h_{t-1} is 0 where a document
    begins."""
    decays = ()
    befores = ()
    hs = ()
    for r in tl.static_range(ROWS):
        place = (t * ROWS + r) * LANES
        a = tl.exp2(A2[r] * tl.load(step + place)[None, :])
        before = over_edge(h[r], begins, HAS_RESET)
        decays = decays + (a,)
        befores = befores + (before,)
        hs = hs + (a * before + tl.load(x + place)[None, :] * B[:, None],)
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
    delta,
    A,
    B,
    C,
    D,
    z,
    bias,
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
    opaque_one,
    dy_b,
    dy_t,
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
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    EVEN: tl.constexpr,
    EVERY: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPAN: tl.constexpr,
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
    lane = tl.arange(0, LANES)
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    dy += batch * dy_b
    u += batch * u_b
    delta += batch * delta_b
    B += batch * B_b
    C += batch * C_b
    if HAS_Z:
        z += batch * z_b
    if HAS_RESET:
        reset += batch * seqlen
    row = batch * seqlen + first  # of the contiguous tensors (batch, seqlen, d_inner)
    shares = (batch * n_programs + program) * seqlen + first  # of dB and dC
    per_batch = tl.cast(d_inner, tl.int64) * d_state
    edge = (batch * n_splits + split) * per_batch
    parts = (split_len // EVERY + 2) // TOGETHER + 1
    n_checkpoints = (seqlen + EVERY - 1) // EVERY
    # This program's scratch: fine marks (EVERY // STEPS, ROWS, d_state, LANES), of which each thread reads
    # back what it wrote; d and d u of a stretch; of a span, dy silu(z), sums over states, dB and dC.
    tile: tl.constexpr = N * LANES
    WIDTH: tl.constexpr = ROWS * LANES
    marks_size: tl.constexpr = (EVERY // STEPS) * ROWS * tile
    size: tl.constexpr = marks_size + (2 * EVERY + 4 * SPAN) * WIDTH + 2 * SPAN * N
    scratch += ((batch * n_splits + split) * n_programs + program) * size
    steps = scratch + marks_size
    xs = steps + EVERY * WIDTH
    gs = xs + EVERY * WIDTH
    sums_y = gs + SPAN * WIDTH
    sums_B = sums_y + SPAN * WIDTH
    sums_A = sums_B + SPAN * WIDTH
    recent_B = sums_A + SPAN * WIDTH
    recent_C = recent_B + SPAN * N
    scratch += n[:, None] * LANES + a_lane_each(lane, opaque_one)[None, :]

    n_stretches = ((stop - first + EVERY - 1) // EVERY).to(tl.int32)
    n_blocks = (d_inner + WIDTH - 1) // WIDTH
    walk = (n_blocks - program + n_programs - 1) // n_programs  # blocks of this program
    # A tile of tokens and channels, for what is done once for each.
    i = tl.arange(0, SPAN)[:, None]
    w = tl.arange(0, WIDTH)
    place = i * WIDTH + w[None, :]
    for visit in range(0, n_stretches * walk):
        back, nth = visit // walk, visit % walk
        start = (program + nth * n_programs) * WIDTH
        # The channels of row r are d + r * LANES: the same pointers at a constant offset.
        d = start + lane
        state = n[:, None] * d_inner + a_lane_each(d, opaque_one)[None, :]
        A2 = ()
        c = ()
        sum_A = ()
        h = ()
        ahead = (n_stretches - 1 - back) * EVERY
        begin = first + ahead
        mark = checkpoints + (batch * n_checkpoints + begin // EVERY) * per_batch + state
        for r in tl.static_range(ROWS):
            state_ok = n_ok[:, None] & (d + r * LANES < d_inner)[None, :]
            A2 = A2 + (tl.load(A + state + r * LANES, mask=state_ok, other=0.0).to(ACC) * LOG2E,)
            c = c + (tl.load(carried + edge + state + r * LANES, mask=state_ok, other=0.0),)
            sum_A = sum_A + (tl.zeros((N, LANES), ACC),)
            h = h + (tl.load(mark + r * LANES, mask=state_ok, other=0.0),)
            tl.store(scratch + r * tile, h[r])
        # Tokens are counted from the stretch's first: offsets in a stretch fit 32 bits.
        tokens = tl.minimum(stop - begin, EVERY).to(tl.int32)
        n_groups = (tokens + STEPS - 1) // STEPS
        n_spans = (tokens + SPAN - 1) // SPAN
        dw = start + w
        dw_ok = (dw < d_inner)[None, :]
        step_bias = tl.zeros((WIDTH,), ACC)
        skip = tl.zeros((WIDTH,), ACC)
        if HAS_BIAS:
            step_bias = tl.load(bias + dw, mask=dw < d_inner, other=0.0).to(ACC)
        if HAS_D:
            skip = tl.load(D + dw, mask=dw < d_inner, other=0.0).to(ACC)
        dy_s = dy + begin * dy_t
        u_s = u + begin * u_t
        delta_s = delta + begin * delta_t
        z_s = z + begin * z_t if HAS_Z else z
        B_s = B + begin * B_t
        C_s = C + begin * C_t
        reset_s = reset + begin if HAS_RESET else reset
        tokens_at = (row + ahead) * d_inner
        du_s = du + tokens_at
        ddelta_s = ddelta + tokens_at
        dz_s = dz + tokens_at if HAS_Z else dz
        for span in range(0, n_spans):
            t = span * SPAN + i
            ok = (t < tokens) & dw_ok
            step_ = tl.load(delta_s + (t * delta_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
            step_ = step_size(step_, step_bias[None, :], SOFTPLUS)
            step_ = tl.where(ok, step_, 0.0)  # past the end: a = 1, nothing added
            u_ = tl.load(u_s + (t * u_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
            tl.store(steps + (span * SPAN * WIDTH + place), step_)
            tl.store(xs + (span * SPAN * WIDTH + place), step_ * u_)
        tl.debug_barrier()
        for group in range(0, n_groups - 1):
            for k in tl.static_range(STEPS):
                t = group * STEPS + k
                B_ = _load(B_s + t * B_t + n, n_ok, EVEN).to(ACC)
                begins = begins_at(reset_s, t, True, HAS_RESET)
                _, _, h = _advance(h, t, B_, steps + lane, xs + lane, begins, A2, HAS_RESET, ROWS, LANES)
            for r in tl.static_range(ROWS):
                tl.store(scratch + ((group + 1) * ROWS + r) * tile, h[r])
        sum_D = tl.zeros((WIDTH,), ACC)
        sum_bias = tl.zeros((WIDTH,), ACC)
        for undone_span in range(0, n_spans):
            span = n_spans - 1 - undone_span
            base = span * SPAN
            tb = base + i
            ok = (tb < tokens) & dw_ok
            g = tl.load(dy_s + (tb * dy_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
            if HAS_Z:
                z_ = tl.load(z_s + (tb * z_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
                g = g * z_ * sigmoid(z_)
            tl.store(gs + place, g)
            tl.debug_barrier()
            in_span = (tl.minimum(tokens - base, SPAN) + STEPS - 1) // STEPS
            for undone in range(0, in_span):
                local = (in_span - 1 - undone) * STEPS
                group = base // STEPS + (in_span - 1 - undone)
                h = ()
                for r in tl.static_range(ROWS):
                    h = h + (tl.load(scratch + (group * ROWS + r) * tile),)
                decays = ()
                states = ()
                for k in tl.static_range(STEPS):
                    at = tl.minimum(base + local + k, tokens - 1)
                    B_ = _load(B_s + at * B_t + n, n_ok, EVEN).to(ACC)
                    begins = begins_at(reset_s, at, base + local + k < tokens, HAS_RESET)
                    a, before, h = _advance(
                        h,
                        base + local + k,
                        B_,
                        steps + lane,
                        xs + lane,
                        begins,
                        A2,
                        HAS_RESET,
                        ROWS,
                        LANES,
                    )
                    decays = decays + (a,)
                    states = states + (before,)
                for k in tl.static_range(STEPS):
                    near = local + (STEPS - 1 - k)
                    t = base + near
                    at = tl.minimum(t, tokens - 1)
                    begins = begins_at(reset_s, at, t < tokens, HAS_RESET)
                    B_ = _load(B_s + at * B_t + n, n_ok, EVEN).to(ACC)
                    C_ = _load(C_s + at * C_t + n, n_ok, EVEN).to(ACC)
                    mu_x = tl.zeros((N, LANES), ACC)
                    h_g = tl.zeros((N, LANES), ACC)
                    new_c = ()
                    new_A = ()
                    for r in tl.static_range(ROWS):
                        a = decays[STEPS - 1 - k][r]
                        p = a * states[STEPS - 1 - k][r]
                        d_ = tl.load(steps + (t * WIDTH + r * LANES) + lane)
                        x = tl.load(xs + (t * WIDTH + r * LANES) + lane)
                        g_ = tl.load(gs + (near * WIDTH + r * LANES) + lane)
                        h_ = p + x[None, :] * B_[:, None]
                        mu = g_[None, :] * C_[:, None] + c[r]
                        v = mu * p
                        mu_x += mu * x[None, :]
                        h_g += h_ * g_[None, :]
                        to = (near * WIDTH + r * LANES) + lane
                        if HAS_Z:
                            tl.store(sums_y + to, tl.sum(h_ * C_[:, None], axis=0))
                        tl.store(sums_B + to, tl.sum(mu * B_[:, None], axis=0))
                        tl.store(sums_A + to, tl.sum(v * A2[r], axis=0))
                        new_A = new_A + (sum_A[r] + v * d_[None, :],)
                        new_c = new_c + (over_edge(a * mu, begins, HAS_RESET),)
                    c = new_c
                    sum_A = new_A
                    tl.store(recent_B + (near * N + n), tl.sum(mu_x, axis=1))
                    tl.store(recent_C + (near * N + n), tl.sum(h_g, axis=1))
            tl.debug_barrier()
            add_recent(
                dB, recent_B, shares + ahead + base, 0, tokens - base, n, n_ok, d_state, nth > 0, N, SPAN
            )
            add_recent(
                dC, recent_C, shares + ahead + base, 0, tokens - base, n, n_ok, d_state, nth > 0, N, SPAN
            )
            step_ = tl.load(steps + (base * WIDTH + place))
            u_ = tl.load(u_s + (tb * u_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
            g = tl.load(dy_s + (tb * dy_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
            out = tb * d_inner + dw[None, :]
            if HAS_Z:
                z_ = tl.load(z_s + (tb * z_t + dw[None, :]), mask=ok, other=0.0).to(ACC)
                gate = sigmoid(z_)
                ungated = tl.load(sums_y + place, mask=ok, other=0.0) + skip[None, :] * u_
                tl.store(dz_s + out, g * ungated * gate * (1.0 + z_ * (1.0 - gate)), mask=ok)
                g = g * z_ * gate
            mu_B = tl.load(sums_B + place, mask=ok, other=0.0)  # what lies past the end is no number
            dstep = tl.load(sums_A + place, mask=ok, other=0.0) * (1.0 / LOG2E) + mu_B * u_
            if SOFTPLUS:
                dstep = dstep * softplus_slope(step_)
            tl.store(du_s + out, mu_B * step_ + skip[None, :] * g, mask=ok)
            tl.store(ddelta_s + out, dstep, mask=ok)
            if HAS_D:
                sum_D += tl.sum(g * u_, axis=0)
            if HAS_BIAS:
                sum_bias += tl.sum(tl.where(ok, dstep, 0.0), axis=0)
            tl.debug_barrier()
        again = back % TOGETHER > 0  # this partial sum's earlier stretches have left their sums
        partial_sum = (batch * n_splits + split) * parts + back // TOGETHER
        for r in tl.static_range(ROWS):
            state_ok = n_ok[:, None] & (d + r * LANES < d_inner)[None, :]
            tl.store(carried + edge + state + r * LANES, c[r], mask=state_ok)
            before = tl.load(
                dA + partial_sum * per_batch + state + r * LANES, mask=state_ok & again, other=0.0
            )
            tl.store(dA + partial_sum * per_batch + state + r * LANES, before + sum_A[r], mask=state_ok)
        at = partial_sum * d_inner + dw
        if HAS_D:
            before = tl.load(dD + at, mask=(dw < d_inner) & again, other=0.0)
            tl.store(dD + at, before + sum_D, mask=dw < d_inner)
        if HAS_BIAS:
            before = tl.load(dbias + at, mask=(dw < d_inner) & again, other=0.0)
            tl.store(dbias + at, before + sum_bias, mask=dw < d_inner)
        tl.debug_barrier()  # the next visit overwrites the marks, and reads what this one has summed
