"""Backward kernels of Mamba-2's SSD scan in Triton, on tensor cores (launched by `launch`).

With G the cotangents of the states, and S as in `forward`:

    G_in = sum_i exp(S(start, i)) dy_i (x) C_i + exp(S(start, end)) G_out
    d(dt x)_j = sum_{i >= j} (C_i . B_j) exp(S(j, i)) dy_i + exp(S(j, end)) G_out B_j
    dgram_ij = exp(S(j, i)) dy_i . dt_j x_j,   dC_i = sum_{j <= i} dgram_ij B_j + exp(S(start, i)) dy_i h_in
    dB_j = sum_{i >= j} dgram_ij C_i + exp(S(j, end)) dt_j x_j G_out

The decays' gradient d(dt A)_t is the sum of all that crosses t: pairs j < t <= i inside the chunk, tokens
from t on that read h_in, tokens before t that feed h_out, and h_in through to h_out. These sums are formed
directly, never as the difference of two running sums, which would cancel: ``pair_grad_kernel`` leaves, of the
pairs, what crosses inside a tile and the sums along the rows and columns of every other tile, and
``step_grad_kernel`` adds up. Products are split over kernels so that none holds more tiles than a thread's
255 registers take.

Parameters that are not obvious, beside those in `forward`:

    g_out: G_out of every chunk, like h_in
    read, fed, direct, through, inside, by_output, by_input: what `step_grad_kernel` adds up, each described
        where it is made
    dgram: dgram summed over heads_each of a group's heads, for each such share
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.ssd_scan.triton.forward import (
    add_by_document,
    chunk_resets,
    document_tile,
    of_pairs,
    pair_decay,
    place_of,
    row_segment,
    segments,
    segments_after,
    segments_before,
    state_tile,
    sum_after,
    sum_before,
    sum_between,
    tile_sums,
    token_tile,
)
from adjoint.kernels.triton.common import LENGTHS, rows_of, softplus_slope


@triton.jit(do_not_specialize=LENGTHS)
def read_kernel(
    dy,
    C,
    prefix,
    segment,
    h_in,
    g_out,
    read,
    through,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    dy_strides,
    C_strides,
    HAS_RESET: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """The share of h_in that each token reads, weighed with its dy, and h_in's way through to h_out, weighed
    with its cotangent: (batch, nheads, chunks * CHUNK) and (batch, chunks, nheads)."""
    tile, first, head, batch, chunk, at, line, segment = place_of(segment, nheads, HAS_RESET, CHUNK, Q)
    i, p = tl.arange(0, Q), tl.arange(0, P)
    t = first + i
    C = rows_of(C, C_strides, batch, head // heads_a_group)
    reads = tl.zeros((Q, P), ACC)
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        C_ = token_tile(C, first, i, n, seqlen, d_state, DOT)
        h = state_tile(h_in, at, p, n, headdim, d_state).to(DOT)
        reads = tl.dot(C_, tl.trans(h), reads, input_precision=PRECISION, out_dtype=ACC)
    sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
    decay = tl.load(prefix + line + t) + sum_before(sums, tile)
    goes_on = segments(segment, t, HAS_RESET, Q) == 0
    dy_ = token_tile(rows_of(dy, dy_strides, batch, head), first, i, p, seqlen, headdim, ACC)
    tl.store(read + line + t, tl.where(goes_on, tl.sum(reads * dy_, axis=1) * tl.exp(decay), 0.0))
    if tile == 0:
        crossing = tl.zeros((P,), ACC)
        for block in range(0, (d_state + N - 1) // N):
            n = block * N + tl.arange(0, N)
            h = state_tile(h_in, at, p, n, headdim, d_state)
            crossing += tl.sum(state_tile(g_out, at, p, n, headdim, d_state) * h, axis=1)
        unbroken = chunk_resets(segment, chunk, HAS_RESET, CHUNK) == 0
        total = tl.where(unbroken, tl.exp(tl.sum(sums[1], axis=0)) * tl.sum(crossing, axis=0), 0.0)
        tl.store(through + at, total)


@triton.jit(do_not_specialize=LENGTHS)
def input_grad_kernel(
    dy,
    x,
    B,
    D,
    gram,
    step,
    prefix,
    suffix,
    segment,
    g_out,
    dx,
    dD,
    direct,
    fed,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    dy_strides,
    x_strides,
    B_strides,
    HAS_D: tl.constexpr,
    HAS_RESET: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dx of one tile of inputs j and one head, and its share of dD: (batch, tiles, nheads).

    For ``step_grad_kernel``, (batch, nheads, chunks * CHUNK) each: ``direct``, the step's gradient through
    dt x, and ``fed``, what each token feeds into h_out, weighed with its cotangent g_out.
    """
    col, first, head, batch, chunk, at, line, segment = place_of(segment, nheads, HAS_RESET, CHUNK, Q)
    j, p = tl.arange(0, Q), tl.arange(0, P)
    t = first + j
    chunks = tl.num_programs(0) // (CHUNK // Q)
    group = head // heads_a_group
    dy = rows_of(dy, dy_strides, batch, head)
    B = rows_of(B, B_strides, batch, group)
    gram += ((batch * chunks + chunk) * (nheads // heads_a_group) + group) * (CHUNK * CHUNK)
    gram += col * Q + j[None, :]
    count_j = segments(segment, t, HAS_RESET, Q)
    sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
    suffix_j = tl.load(suffix + line + t)
    step_j = tl.load(step + line + t)
    x_ = token_tile(rows_of(x, x_strides, batch, head), first, j, p, seqlen, headdim, DOT)

    dxd = tl.zeros((Q, P), ACC)  # of dt x
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        g = state_tile(g_out, at, p, n, headdim, d_state).to(DOT)
        B_ = token_tile(B, first, j, n, seqlen, d_state, DOT)
        dxd = tl.dot(B_, tl.trans(g), dxd, input_precision=PRECISION, out_dtype=ACC)
    feeds = count_j == chunk_resets(segment, chunk, HAS_RESET, CHUNK)
    after = suffix_j + sum_after(sums, col)
    dxd = tl.where(feeds[:, None], dxd * tl.exp(after)[:, None], 0.0)
    tl.store(fed + line + t, tl.where(feeds, tl.sum(dxd * x_.to(ACC), axis=1) * step_j, 0.0))

    last_tile = ((tl.minimum(seqlen - chunk * CHUNK, CHUNK) + Q - 1) // Q).to(tl.int32)
    open_ = segments_after(segment, first, HAS_RESET, Q)
    for row in range(col + 1 if HAS_RESET else col, last_tile):
        i = chunk * CHUNK + row * Q + j
        count_i = segments(segment, i, HAS_RESET, Q)
        between = sum_between(sums, col, row)
        prefix_i = tl.load(prefix + line + i)
        edge = suffix_j
        if row == col:
            edge = prefix_i
        scores = tl.load(gram + (row * Q + j)[:, None] * CHUNK)
        scores *= pair_decay(prefix_i, edge, row == col, between, count_i, count_j, j, j)
        scores = of_pairs(scores, row == col, count_i, count_j, j, j, HAS_RESET)
        in_document = count_i == open_
        dy_ = document_tile(dy, chunk * CHUNK + row * Q, j, p, seqlen, headdim, in_document, HAS_RESET, DOT)
        dxd = tl.dot(tl.trans(scores.to(DOT)), dy_, dxd, input_precision=PRECISION, out_dtype=ACC)
    if HAS_RESET:
        dxd = tl.where((count_j == open_)[:, None], dxd, 0.0)
        prefix_j = tl.load(prefix + line + t)
        scores = tl.load(gram + (col * Q + j)[:, None] * CHUNK)
        scores *= pair_decay(prefix_j, prefix_j, True, 0.0, count_j, count_j, j, j)
        scores = tl.trans(of_pairs(scores, True, count_j, count_j, j, j, HAS_RESET).to(DOT))
        dy_ = token_tile(dy, first, j, p, seqlen, headdim, DOT)
        dxd = add_by_document(dxd, scores, dy_, count_j, segment + first, Q, PRECISION, ACC)
    tl.store(direct + line + t, tl.sum(dxd * x_.to(ACC), axis=1))

    dx_ = dxd * step_j[:, None]
    if HAS_D:
        dy_ = token_tile(dy, first, j, p, seqlen, headdim, ACC)
        dx_ += tl.load(D + head).to(ACC) * dy_
        total = tl.sum(tl.sum(dy_ * x_.to(ACC), axis=1), axis=0)
        tl.store(dD + (batch * tl.num_programs(0) + tl.program_id(0)) * nheads + head, total)
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(dx + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], dx_, mask=ok)


@triton.jit(do_not_specialize=LENGTHS)
def step_grad_kernel(
    A,
    step,
    direct,
    fed,
    inside,
    by_output,
    by_input,
    read,
    through,
    ddt,
    dA,
    dbias,
    seqlen,
    nheads,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """ddt (batch, seqlen, nheads) of a tile and HEADS heads, and its shares of dA, dbias (batch, tiles,
    nheads)."""
    TILES: tl.constexpr = CHUNK // Q
    tiles = tl.num_programs(0)
    chunk, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    batch, chunks = tl.program_id(2).to(tl.int64), tiles // TILES
    q = tl.arange(0, Q)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h_ok = head < nheads
    both = h_ok[None, :] & (q >= 0)[:, None]
    begin = chunk * CHUNK
    start = (batch * nheads + head) * (chunks * CHUNK)
    line = start[None, :] + (begin + q[:, None])  # a chunk's first tile, (Q, HEADS)
    wide = start[None, :] * TILES + (begin + q[:, None])
    last_tile = ((tl.minimum(seqlen - begin, CHUNK) + Q - 1) // Q).to(tl.int32)

    # outputs from t on: reading h_in, or an input of an earlier tile
    later = tl.zeros((HEADS,), ACC)
    inside_tile = tl.zeros((Q, HEADS), ACC)
    for row in range(tile, last_tile):
        value = tl.load(read + line + row * Q, mask=both, other=0.0)
        for col in range(0, tile):
            value += tl.load(by_output + wide + col * (chunks * CHUNK) + row * Q, mask=both, other=0.0)
        if row == tile:
            inside_tile = tl.cumsum(value, axis=0, reverse=True)
        else:
            later += tl.sum(value, axis=0)
    # inputs before t: feeding h_out, or an output of a later tile
    earlier = tl.zeros((HEADS,), ACC)
    for col in range(0, tile):
        earlier += tl.sum(tl.load(fed + line + col * Q, mask=both, other=0.0), axis=0)
    place = line + tile * Q
    shifted = both & (q > 0)[:, None]  # the sum up to the token before
    value = tl.load(fed + place - 1, mask=shifted, other=0.0)
    for row in range(tile + 1, last_tile):
        value += tl.load(by_input + wide + row * (chunks * CHUNK) + tile * Q - 1, mask=shifted, other=0.0)
    inside_tile += tl.cumsum(value, axis=0) + tl.load(inside + place - 1, mask=shifted, other=0.0)
    crossing = tl.load(through + (batch * chunks + chunk) * nheads + head, mask=h_ok, other=0.0)
    ddecay = inside_tile + (later + earlier + crossing)[None, :]

    step_ = tl.load(step + place, mask=both, other=0.0)
    decay = tl.load(A + head, mask=h_ok, other=0.0).to(ACC)
    grad = tl.load(direct + place, mask=both, other=0.0) + ddecay * decay[None, :]
    if SOFTPLUS:
        grad = grad * softplus_slope(step_)
    t = begin + tile * Q + q
    ok = both & (t < seqlen)[:, None]
    grad = tl.where(ok, grad, 0.0)
    tl.store(ddt + (batch * seqlen + t[:, None]) * nheads + head[None, :], grad, mask=ok)
    share = (batch * tiles + tl.program_id(0)) * nheads + head
    tl.store(dA + share, tl.sum(tl.where(ok, ddecay * step_, 0.0), axis=0), mask=h_ok)
    tl.store(dbias + share, tl.sum(grad, axis=0), mask=h_ok)


@triton.jit(do_not_specialize=LENGTHS)
def pair_grad_kernel(
    dy,
    x,
    step,
    prefix,
    suffix,
    segment,
    gram,
    dgram,
    inside,
    by_output,
    by_input,
    seqlen,
    nheads,
    headdim,
    ngroups,
    heads_a_group,
    heads_each,
    dy_strides,
    x_strides,
    HAS_RESET: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """The cotangent of C_i . B_j, summed over a share of the group's heads: (batch, shares, chunks, ngroups,
    CHUNK, CHUNK), a tile a program; nothing above the diagonal.

    And, of every head's pairs (the cotangent times C_i . B_j), for ``step_grad_kernel``: off the diagonal the
    sums over the tile's inputs, ``by_output[j's tile]``, and outputs, ``by_input[i's tile]``, both (batch,
    nheads, TILES, chunks * CHUNK); on it ``inside``, at token k the pairs with j <= k < i, (batch, nheads,
    chunks * CHUNK)."""
    TILES: tl.constexpr = CHUNK // Q
    chunk, batch = (tl.program_id(0) // (TILES * TILES)).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, col = tl.program_id(0) // TILES % TILES, tl.program_id(0) % TILES
    chunks = tl.num_programs(0) // (TILES * TILES)
    group, share = tl.program_id(1) % ngroups, tl.program_id(1) // ngroups
    shares = tl.num_programs(1) // ngroups
    segment = row_segment(segment, batch * (chunks * CHUNK), HAS_RESET)
    if col <= row:
        q = tl.arange(0, Q)
        first_i, first_j = chunk * CHUNK + row * Q, chunk * CHUNK + col * Q
        i, j = first_i + q, first_j + q
        count_i, count_j = segments(segment, i, HAS_RESET, Q), segments(segment, j, HAS_RESET, Q)
        place = (row * Q + q)[:, None] * CHUNK + (col * Q + q)[None, :]
        square = CHUNK * CHUNK
        grams = tl.load(gram + ((batch * chunks + chunk) * ngroups + group) * square + place)
        grams = of_pairs(grams, col == row, count_i, count_j, q, q, HAS_RESET)
        out = tl.zeros((Q, Q), ACC)
        head_0 = group * heads_a_group + share * heads_each
        for head in range(head_0, tl.minimum(head_0 + heads_each, (group + 1) * heads_a_group)):
            line = (batch * nheads + head) * (chunks * CHUNK)
            cotangent = tl.zeros((Q, Q), ACC)
            for block in range(0, BLOCKS):  # one: no loop is left, and that over heads is pipelined
                p = block * P + tl.arange(0, P)
                dy_ = token_tile(rows_of(dy, dy_strides, batch, head), first_i, q, p, seqlen, headdim, DOT)
                x_ = token_tile(rows_of(x, x_strides, batch, head), first_j, q, p, seqlen, headdim, DOT)
                cotangent = tl.dot(dy_, tl.trans(x_), cotangent, input_precision=PRECISION, out_dtype=ACC)
            sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
            between = sum_between(sums, col, row)
            if col == row:
                edge = tl.load(prefix + line + j)
            else:
                edge = tl.load(suffix + line + j)
            prefix_i = tl.load(prefix + line + i)
            cotangent *= pair_decay(prefix_i, edge, col == row, between, count_i, count_j, q, q)
            cotangent *= tl.load(step + line + j)[None, :]
            cotangent = of_pairs(cotangent, col == row, count_i, count_j, q, q, HAS_RESET)
            out += cotangent
            products = cotangent * grams
            if col == row:
                before = tl.cumsum(tl.where(q[:, None] > q[None, :], products, 0.0), axis=1)
                crossing = tl.sum(tl.where(q[:, None] > q[None, :], before, 0.0), axis=0)
                tl.store(inside + line + j, crossing)
            else:
                tl.store(by_output + line * TILES + col * (chunks * CHUNK) + i, tl.sum(products, axis=1))
                tl.store(by_input + line * TILES + row * (chunks * CHUNK) + j, tl.sum(products, axis=0))
        tl.store(
            dgram + (((batch * shares + share) * chunks + chunk) * ngroups + group) * square + place, out
        )


@triton.jit(do_not_specialize=LENGTHS)
def group_grad_kernel(
    x,
    other,
    step,
    prefix,
    suffix,
    segment,
    state,
    dgram,
    out,
    seqlen,
    nheads,
    headdim,
    d_state,
    ngroups,
    heads_a_group,
    heads_each,
    x_strides,
    other_strides,
    OF_B: tl.constexpr,
    HAS_RESET: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """dB (OF_B) or dC of one tile and group, summed over a share of the group's heads: (batch, shares,
    seqlen, ngroups, d_state). For dB, x, other, state are x, C, g_out; for dC, dy, B, h_in."""
    TILES: tl.constexpr = CHUNK // Q
    chunk, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    batch, chunks = tl.program_id(2).to(tl.int64), tl.num_programs(0) // TILES
    blocks = (d_state + N - 1) // N
    group, share = tl.program_id(1) // blocks % ngroups, tl.program_id(1) // (blocks * ngroups)
    shares = tl.num_programs(1) // (blocks * ngroups)
    q, p = tl.arange(0, Q), tl.arange(0, P)
    n = tl.program_id(1) % blocks * N + tl.arange(0, N)
    first = chunk * CHUNK + tile * Q
    t = first + q
    segment = row_segment(segment, batch * (chunks * CHUNK), HAS_RESET)
    count = segments(segment, t, HAS_RESET, Q)
    all_resets = chunk_resets(segment, chunk, HAS_RESET, CHUNK)
    total = tl.zeros((Q, N), ACC)
    head_0 = group * heads_a_group + share * heads_each
    for head in range(head_0, tl.minimum(head_0 + heads_each, (group + 1) * heads_a_group)):
        line = (batch * nheads + head) * (chunks * CHUNK)
        sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
        if OF_B:
            after = tl.load(suffix + line + t) + sum_after(sums, tile)
            weight = tl.where(count == all_resets, tl.exp(after), 0.0) * tl.load(step + line + t)
        else:
            before = tl.load(prefix + line + t) + sum_before(sums, tile)
            weight = tl.where(count == 0, tl.exp(before), 0.0)
        x_ = token_tile(rows_of(x, x_strides, batch, head), first, q, p, seqlen, headdim, ACC)
        scaled = (x_ * weight[:, None]).to(DOT)
        at = (batch * chunks + chunk) * nheads + head
        h = state_tile(state, at, p, n, headdim, d_state).to(DOT)
        total = tl.dot(scaled, h, total, input_precision=PRECISION, out_dtype=ACC)
    dgram += (((batch * shares + share) * chunks + chunk) * ngroups + group) * (CHUNK * CHUNK)
    other = rows_of(other, other_strides, batch, group)
    if OF_B:
        open_ = segments_after(segment, first, HAS_RESET, Q)
        total = tl.where((count == all_resets)[:, None], total, 0.0)
        last_tile = ((tl.minimum(seqlen - chunk * CHUNK, CHUNK) + Q - 1) // Q).to(tl.int32)
        for row in range(tile + 1 if HAS_RESET else tile, last_tile):
            scores = tl.load(dgram + (row * Q + q)[:, None] * CHUNK + (tile * Q + q)[None, :]).to(DOT)
            at = chunk * CHUNK + row * Q
            in_document = segments(segment, at + q, HAS_RESET, Q) == open_
            C_ = document_tile(other, at, q, n, seqlen, d_state, in_document, HAS_RESET, DOT)
            total = tl.dot(tl.trans(scores), C_, total, input_precision=PRECISION, out_dtype=ACC)
    else:
        open_ = segments_before(segment, first, tile, HAS_RESET)
        total = tl.where((count == 0)[:, None], total, 0.0)
        for col in range(0, tile if HAS_RESET else tile + 1):
            scores = tl.load(dgram + (tile * Q + q)[:, None] * CHUNK + (col * Q + q)[None, :]).to(DOT)
            at = chunk * CHUNK + col * Q
            in_document = segments(segment, at + q, HAS_RESET, Q) == open_
            B_ = document_tile(other, at, q, n, seqlen, d_state, in_document, HAS_RESET, DOT)
            total = tl.dot(scores, B_, total, input_precision=PRECISION, out_dtype=ACC)
    if HAS_RESET:
        total = tl.where((count == open_)[:, None], total, 0.0)
        scores = tl.load(dgram + (tile * Q + q)[:, None] * CHUNK + (tile * Q + q)[None, :]).to(DOT)
        if OF_B:
            scores = tl.trans(scores)
        own_rows = token_tile(other, first, q, n, seqlen, d_state, DOT)
        total = add_by_document(total, scores, own_rows, count, segment + first, Q, PRECISION, ACC)
    at = (((batch * shares + share) * seqlen + t[:, None]) * ngroups + group) * d_state + n[None, :]
    tl.store(out + at, total, mask=(t < seqlen)[:, None] & (n < d_state)[None, :])
