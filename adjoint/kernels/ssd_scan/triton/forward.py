"""Forward kernels of Mamba-2's SSD scan in Triton, on tensor cores (launched by `launch`), and what the
backward shares with them.

The sequence is cut into chunks of CHUNK tokens, whose states go through memory, and chunks into tiles of Q
tokens, the matrices that registers hold. With S(j, i) = the sum of dt A over tokens j + 1 … i, and pairs
across a reset dropped:

    y_i = sum_{j <= i} (C_i . B_j) exp(S(j, i)) dt_j x_j + exp(S(start, i)) C_i h_in + D x_i
    h_out = sum_j exp(S(j, end)) dt_j x_j (x) B_j + exp(S(start, end)) h_in

Every S is added up from sums inside the tiles of its two ends and over whole tiles between: terms of one
sign, so that its error is a fraction of itself. The difference of two running sums over a long chunk would
put the rounding of the whole chunk's decay on neighbouring tokens.

No document of a row gets a NaN or an infinity of another: in a product that sums over tokens, weights of 0
are not enough, as 0 × NaN is NaN. Only one document crosses a tile's edge: tokens of others are read as 0,
and what others would get is dropped. Inside a tile there is a product for each document.

C_i . B_j is the same for all heads of a group: ``gram_kernel`` writes it once, (batch, chunks, ngroups,
CHUNK, CHUNK), of which the tiles on and under the diagonal are written and read.

Parameters of the kernels here and in `backward` that are not obvious:

    *_strides: of batch, token, and head or group; channels, or states, are dense
    step: dt, softplus(dt + bias) if asked; prefix, suffix: S inside a tile up to a token, and after it; all
        three (batch, nheads, chunks * CHUNK)
    segment: number of resets in the chunk up to each token, (batch, chunks * CHUNK), None without resets
    gram: C_i . B_j; h_in, local: states at the chunks' entries, and those of a chunk from a zero state
    decay: exp(S) of a whole chunk
    heads_a_group: heads that share B and C
    CHUNK, Q: tokens of a chunk and of a tile; P: headdim as a power of two; N: columns of d_state at once
    DOT, PRECISION: type and precision of the matrix products; ACC: type of sums, float32 or float64
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import LENGTHS, chunk_left, log1p_exp, rows_of


@triton.jit
def _add_in_document(a, begun_a, b, begun_b):
    """Join two neighbouring runs of sums that begin again with each document: the sum, and whether a document
    begins in it."""
    return tl.where(begun_b != 0, b, a + b), begun_a | begun_b


@triton.jit(do_not_specialize=LENGTHS)
def step_kernel(
    dt,
    A,
    bias,
    segment,
    step,
    prefix,
    suffix,
    seqlen,
    nheads,
    dt_b,
    dt_t,
    HAS_BIAS: tl.constexpr,
    HAS_RESET: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """step = softplus(dt + bias), 0 beyond the end; and, of step * A inside each tile, the sum up to and with
    a token (prefix) and the sum after it (suffix): (batch, nheads, tiles * Q) each. The prefix is that of
    the token's document."""
    tile, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    j = tl.arange(0, Q)
    t = tile * Q + j
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h_ok = (head < nheads)[None, :]
    ok = (t < seqlen)[:, None] & h_ok
    x = tl.load(dt + batch * dt_b + t[:, None] * dt_t + head[None, :], mask=ok, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(bias + head, mask=head < nheads, other=0.0).to(ACC)[None, :]
    if SOFTPLUS:
        x = log1p_exp(x)
    x = tl.where(ok, x, 0.0)
    decay = x * tl.load(A + head, mask=head < nheads, other=0.0).to(ACC)[None, :]
    out = (batch * nheads + head[None, :]) * (tl.num_programs(0).to(tl.int64) * Q) + t[:, None]
    tl.store(step + out, x, mask=h_ok)
    if HAS_RESET:
        segment += (batch * tl.num_programs(0) + tile) * Q
        begins = tl.load(segment + j) != tl.load(segment + j - 1, mask=j > 0, other=0)
        begins = ((begins & (j > 0))[:, None] & (head >= 0)[None, :]).to(tl.int32)
        sums, begins = tl.associative_scan((decay, begins), 0, _add_in_document)
        tl.store(prefix + out, sums, mask=h_ok)
    else:
        tl.store(prefix + out, tl.cumsum(decay, axis=0), mask=h_ok)
    # the sum from a token on is the sum after the one before it
    tl.store(suffix + out - 1, tl.cumsum(decay, axis=0, reverse=True), mask=h_ok & (j > 0)[:, None])
    tl.store(suffix + out, tl.zeros((Q, HEADS), ACC), mask=h_ok & (j == Q - 1)[:, None])


@triton.jit
def place_of(segment, nheads, HAS_RESET: tl.constexpr, CHUNK: tl.constexpr, Q: tl.constexpr):
    """The place at which a program of the grid (chunks * tiles, nheads, batch) works: one tile of one head.

    Returns the tile's number in its chunk and its first token; the head and the row of the batch; the number
    of the chunk in the row, and of the head's state there among those (batch, chunks, nheads); where the
    head's line of (batch, nheads, chunks * CHUNK) begins; and ``segment`` at the row.
    """
    TILES: tl.constexpr = CHUNK // Q
    chunk, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0) // TILES
    at = (batch * chunks + chunk) * nheads + head
    line = (batch * nheads + head) * (chunks * CHUNK)
    segment = row_segment(segment, batch * (chunks * CHUNK), HAS_RESET)
    return tile, chunk * CHUNK + tile * Q, head, batch, chunk, at, line, segment


@triton.jit
def row_segment(segment, first, HAS_RESET: tl.constexpr):
    """``segment`` at a row's first place; anything, which nobody reads, without resets."""
    if HAS_RESET:
        return segment + first
    else:
        return 0


@triton.jit
def tile_sums(prefix, Q: tl.constexpr, CHUNK: tl.constexpr):
    """(index, sum of step * A) of each tile of the chunk whose prefixes begin at ``prefix``."""
    k = tl.arange(0, CHUNK // Q)
    return k, tl.load(prefix + k * Q + (Q - 1))


@triton.jit
def sum_before(sums, tile):
    """Sum of `tile_sums` over the tiles before one."""
    return tl.sum(tl.where(sums[0] < tile, sums[1], 0.0), axis=0)


@triton.jit
def sum_after(sums, tile):
    """Sum of `tile_sums` over the tiles after one."""
    return tl.sum(tl.where(sums[0] > tile, sums[1], 0.0), axis=0)


@triton.jit
def sum_between(sums, col, row):
    """Sum of `tile_sums` over the tiles between those of the inputs and of the outputs."""
    return tl.sum(tl.where((sums[0] > col) & (sums[0] < row), sums[1], 0.0), axis=0)


@triton.jit
def segments(segment, t, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """The number of resets in the chunk up to each token t."""
    if HAS_RESET:
        return tl.load(segment + t)
    else:
        return tl.zeros((Q,), tl.int32)


@triton.jit
def chunk_resets(segment, chunk, HAS_RESET: tl.constexpr, CHUNK: tl.constexpr):
    """The number of resets in a chunk."""
    if HAS_RESET:
        return tl.load(segment + chunk * CHUNK + (CHUNK - 1))
    else:
        return 0


@triton.jit
def segments_before(segment, first, tile, HAS_RESET: tl.constexpr):
    """The number of resets in the chunk before a tile, whose first token is ``first``."""
    if HAS_RESET:
        return tl.load(segment + first - 1, mask=tile > 0, other=0)
    else:
        return 0


@triton.jit
def segments_after(segment, first, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """The number of resets in the chunk up to a tile's end."""
    if HAS_RESET:
        return tl.load(segment + first + (Q - 1))
    else:
        return 0


@triton.jit
def token_tile(rows, first, j, i, seqlen, size, DOT: tl.constexpr):
    """Columns i of the tokens first + j, in the matrix products' dtype, zero outside. ``rows`` as `rows_of`
    returns them. Offsets in the tile fit 32 bits."""
    pointer, stride = rows
    ok = (j < seqlen - first)[:, None] & (i < size)[None, :]
    return tl.load(pointer + first * stride + (j[:, None] * stride + i[None, :]), mask=ok, other=0.0).to(DOT)


@triton.jit
def document_tile(rows, first, j, i, seqlen, size, in_document, HAS_RESET: tl.constexpr, DOT: tl.constexpr):
    """`token_tile`, zero also where ``in_document`` is false: in other documents."""
    pointer, stride = rows
    ok = (j < seqlen - first)[:, None] & (i < size)[None, :]
    if HAS_RESET:
        ok = ok & in_document[:, None]
    return tl.load(pointer + first * stride + (j[:, None] * stride + i[None, :]), mask=ok, other=0.0).to(DOT)


@triton.jit
def add_by_document(
    out, scores, values, count, segment, Q: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr
):
    """out + scores @ values in a tile with itself, a product for each document in it. ``segment``: the tile's
    first token's."""
    for document in range(tl.load(segment), tl.load(segment + (Q - 1)) + 1):
        in_document = (count == document)[:, None]
        product = tl.dot(scores, tl.where(in_document, values, 0.0), input_precision=PRECISION, out_dtype=ACC)
        out += tl.where(in_document, product, 0.0)
    return out


@triton.jit
def state_tile(pointer, at, p, n, headdim, d_state):
    """A tile of the state ``at`` of those (…, headdim, d_state), zero outside."""
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    state = pointer + at * (headdim * d_state)
    return tl.load(state + p[:, None] * d_state + n[None, :], mask=ok, other=0.0)


@triton.jit
def pair_decay(row, col, same, between, count_i, count_j, i, j):
    """exp(S(j, i)) of a tile of outputs i (rows) and inputs j <= i (columns), 0 for all other pairs.

    In the diagonal tile (``same``) row and col are both prefixes; else row is the prefix of i's tile, col the
    suffix of j's, and ``between`` the sum over the tiles between them.
    """
    exponent = tl.where(same, row[:, None] - col[None, :], row[:, None] + col[None, :] + between)
    pair = pairs(same, count_i, count_j, i, j)
    return tl.exp(tl.where(pair, exponent, float("-inf")))


@triton.jit
def pairs(same, count_i, count_j, i, j):
    """Mask of the pairs of an output i (rows) and an input j <= i (columns) of one document."""
    return (count_i[:, None] == count_j[None, :]) & (tl.where(same, i[:, None] - j[None, :], 0) >= 0)


@triton.jit
def of_pairs(x, same, count_i, count_j, i, j, HAS_RESET: tl.constexpr):
    """Return ``x`` at pairs of tokens, and 0 elsewhere even if x is NaN or infinite there."""
    if HAS_RESET:
        return tl.where(pairs(same, count_i, count_j, i, j), x, 0.0)
    else:
        return x


@triton.jit(do_not_specialize=LENGTHS)
def chunk_state_kernel(
    x,
    B,
    step,
    prefix,
    suffix,
    segment,
    local,
    decay,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    x_strides,
    B_strides,
    REVERSE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """A chunk's local (headdim, d_state) state, N columns a program, and its decay. REVERSE: its local
    cotangent of h_in, x and B being dy and C."""
    chunk, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head, chunks = tl.program_id(1) % nheads, tl.num_programs(0)
    j = tl.arange(0, Q)
    p, n = tl.arange(0, P), tl.program_id(1) // nheads * N + tl.arange(0, N)
    line = (batch * nheads + head) * (chunks * CHUNK)
    segment = row_segment(segment, batch * (chunks * CHUNK), HAS_RESET)
    x = rows_of(x, x_strides, batch, head)
    B = rows_of(B, B_strides, batch, head // heads_a_group)
    all_resets = chunk_resets(segment, chunk, HAS_RESET, CHUNK)
    sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
    out = tl.zeros((P, N), ACC)
    left = (seqlen - chunk * CHUNK).to(tl.int32)
    for tile in range(0, (tl.minimum(left, CHUNK) + Q - 1) // Q):
        first = chunk * CHUNK + tile * Q
        t = first + j
        count = segments(segment, t, HAS_RESET, Q)
        if REVERSE:
            in_document = count == 0
            before = sum_before(sums, tile)
            weight = tl.where(in_document, tl.exp(tl.load(prefix + line + t) + before), 0.0)
        else:
            in_document = count == all_resets
            after = sum_after(sums, tile)
            weight = tl.where(in_document, tl.exp(tl.load(suffix + line + t) + after), 0.0)
            if HAS_RESET:
                weight *= tl.load(step + line + t, mask=in_document, other=0.0)
            else:
                weight *= tl.load(step + line + t)
        x_ = document_tile(x, first, j, p, seqlen, headdim, in_document, HAS_RESET, ACC)
        scaled = (x_ * weight[:, None]).to(DOT)
        B_ = document_tile(B, first, j, n, seqlen, d_state, in_document, HAS_RESET, DOT)
        out = tl.dot(tl.trans(scaled), B_, out, input_precision=PRECISION, out_dtype=ACC)
    at = (batch * chunks + chunk) * nheads + head
    ok = (p < headdim)[:, None] & (n < d_state)[None, :]
    tl.store(local + at * (headdim * d_state) + p[:, None] * d_state + n[None, :], out, mask=ok)
    total = tl.where(all_resets == 0, chunk_left(tl.sum(sums[1], axis=0), chunk, ACC), 0.0)
    # one program writes it: that of the first columns
    tl.store(decay + at, total, mask=tl.program_id(1) < nheads)


@triton.jit(do_not_specialize=LENGTHS)
def gram_kernel(
    B,
    C,
    gram,
    seqlen,
    d_state,
    B_strides,
    C_strides,
    CHUNK: tl.constexpr,
    Q: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """C_i . B_j, a tile of outputs i (rows) and inputs j (columns) a program; nothing above the diagonal."""
    TILES: tl.constexpr = CHUNK // Q
    chunk, group = (tl.program_id(0) // (TILES * TILES)).to(tl.int64), tl.program_id(1)
    row, col = tl.program_id(0) // TILES % TILES, tl.program_id(0) % TILES
    batch, chunks = tl.program_id(2).to(tl.int64), tl.num_programs(0) // (TILES * TILES)
    B, C = rows_of(B, B_strides, batch, group), rows_of(C, C_strides, batch, group)
    if col <= row:
        i = tl.arange(0, Q)
        first_i, first_j = chunk * CHUNK + row * Q, chunk * CHUNK + col * Q
        out = tl.zeros((Q, Q), ACC)
        for block in range(0, (d_state + N - 1) // N):
            n = block * N + tl.arange(0, N)
            C_ = token_tile(C, first_i, i, n, seqlen, d_state, DOT)
            B_ = token_tile(B, first_j, i, n, seqlen, d_state, DOT)
            out = tl.dot(C_, tl.trans(B_), out, input_precision=PRECISION, out_dtype=ACC)
        square = ((batch * chunks + chunk) * tl.num_programs(1) + group) * (CHUNK * CHUNK)
        tl.store(gram + square + (row * Q + i)[:, None] * CHUNK + (col * Q + i)[None, :], out)


@triton.jit(do_not_specialize=LENGTHS)
def output_kernel(
    x,
    C,
    D,
    gram,
    step,
    prefix,
    suffix,
    segment,
    h_in,
    y,
    seqlen,
    nheads,
    headdim,
    d_state,
    heads_a_group,
    x_strides,
    C_strides,
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
    """y of one tile and head from the state at its chunk's entry."""
    row, first, head, batch, chunk, at, line, segment = place_of(segment, nheads, HAS_RESET, CHUNK, Q)
    i, p = tl.arange(0, Q), tl.arange(0, P)
    t = first + i
    chunks = tl.num_programs(0) // (CHUNK // Q)
    count_i = segments(segment, t, HAS_RESET, Q)
    group = head // heads_a_group
    x = rows_of(x, x_strides, batch, head)
    C = rows_of(C, C_strides, batch, group)
    gram += ((batch * chunks + chunk) * (nheads // heads_a_group) + group) * (CHUNK * CHUNK)
    out = tl.zeros((Q, P), ACC)
    for block in range(0, (d_state + N - 1) // N):
        n = block * N + tl.arange(0, N)
        C_ = token_tile(C, first, i, n, seqlen, d_state, DOT)
        h = state_tile(h_in, at, p, n, headdim, d_state).to(DOT)
        out = tl.dot(C_, tl.trans(h), out, input_precision=PRECISION, out_dtype=ACC)
    sums = tile_sums(prefix + line + chunk * CHUNK, Q, CHUNK)
    prefix_i = tl.load(prefix + line + t)
    before = sum_before(sums, row)
    out = tl.where((count_i == 0)[:, None], out * tl.exp(prefix_i + before)[:, None], 0.0)
    # of the documents in earlier tiles this tile has the last one
    open_ = segments_before(segment, first, row, HAS_RESET)
    for col in range(0, row if HAS_RESET else row + 1):
        first_j = chunk * CHUNK + col * Q
        j = first_j + i
        count_j = segments(segment, j, HAS_RESET, Q)
        between = sum_between(sums, col, row)
        if col == row:
            edge = prefix_i
        else:
            edge = tl.load(suffix + line + j)
        scores = tl.load(gram + (row * Q + i)[:, None] * CHUNK + (col * Q + i)[None, :])
        scores *= pair_decay(prefix_i, edge, col == row, between, count_i, count_j, i, i)
        scores *= tl.load(step + line + j)[None, :]
        scores = of_pairs(scores, col == row, count_i, count_j, i, i, HAS_RESET)
        x_ = document_tile(x, first_j, i, p, seqlen, headdim, count_j == open_, HAS_RESET, DOT)
        out = tl.dot(scores.to(DOT), x_, out, input_precision=PRECISION, out_dtype=ACC)
    if HAS_RESET:
        out = tl.where((count_i == open_)[:, None], out, 0.0)
        scores = tl.load(gram + (row * Q + i)[:, None] * CHUNK + (row * Q + i)[None, :])
        scores *= pair_decay(prefix_i, prefix_i, True, 0.0, count_i, count_i, i, i)
        scores *= tl.load(step + line + t)[None, :]
        scores = of_pairs(scores, True, count_i, count_i, i, i, HAS_RESET)
        x_ = token_tile(x, first, i, p, seqlen, headdim, DOT)
        out = add_by_document(out, scores.to(DOT), x_, count_i, segment + first, Q, PRECISION, ACC)
    if HAS_D:
        out += tl.load(D + head).to(ACC) * token_tile(x, first, i, p, seqlen, headdim, ACC)
    ok = (t < seqlen)[:, None] & (p < headdim)[None, :]
    tl.store(y + ((batch * seqlen + t[:, None]) * nheads + head) * headdim + p[None, :], out, mask=ok)
