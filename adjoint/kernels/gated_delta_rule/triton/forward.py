"""Forward kernels of the gated delta rule in Triton, on tensor cores (launched by `launch`), and what the
backward shares with them.

The sequence is cut into chunks of Q tokens, whose updates are one triangular system (Yang, Kautz and
Hatamizadeh 2024, section 3.3, the extended WY form). With c the running sums of g in a chunk, S the state
before it, and L_ij = beta_i exp(c_i - c_j) k_i . k_j for j < i:

    T = (1 + L)^-1,  U = T (beta v),  W = T (beta exp(c) k)
    written = U - W S,  o_i = exp(c_i) S' q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) written_j
    S_next = exp(c_end) S + sum_j exp(c_end - c_j) k_j (x) written_j

T, U and W are computed for all chunks at once (`solve_kernel`); the states follow one another, a program for
some columns of every head (`state_kernel`); outputs are again computed for all chunks at once
(`output_kernel`).

If a chunk holds several documents, the work is done for each of them, with tokens of others read as 0 and
their rows not written, so that no document gets a NaN or an infinity of another. The first one continues from
the state before the chunk, the last one gives the state after it.

Parameters of the kernels here and in `backward` that are not obvious:

    *_strides: of batch, token and head; channels are dense
    segment: number of documents that have begun in the chunk up to each token, (batch, chunks * Q), None
        without documents
    inverses, U, W: as above; states: those before the chunks; written: what each token writes
    place: (first token of the chunk, seqlen, d_k, segment at the chunk), for the functions of decays
    members: mask of the tokens of the document at work, (Q,)
    WIDE: whether each channel of the keys has a decay; Q: tokens of a chunk
    K, V: columns of keys and of values at once, NK, NV: how many times; LEVELS: log2 of Q
    DOT, PRECISION: type and precision of the matrix products; ACC: type of sums, float32 or float64
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import LENGTHS, rows_of


@triton.jit
def place_of(segment, nheads, BLOCKS: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """The place at which a program of the grid (chunks * BLOCKS, nheads, batch) works: one chunk of one head.

    Returns which of the chunk's BLOCKS it is, the head, the row of the batch, the chunk's first token, the
    number of the chunk among those of all heads and rows, and ``segment`` at the chunk.
    """
    chunk, index = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0) // BLOCKS
    at = (batch * nheads + head) * chunks + chunk
    return index, head, batch, chunk * Q, at, segment_of(segment, batch * chunks + chunk, HAS_RESET, Q)


@triton.jit
def segment_of(segment, chunk, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """``segment`` at the first token of a chunk; anything, which nobody reads, without documents."""
    if HAS_RESET:
        return segment + chunk * Q
    else:
        return 0


@triton.jit
def documents_of(segment, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """The numbers of a chunk's first document and of its last one; 0 stands for the one that goes on from the
    chunk before. ``segment``: the number of the chunk's first token."""
    if HAS_RESET:
        return tl.load(segment), tl.load(segment + (Q - 1))
    else:
        return 0, 0


@triton.jit
def tokens_of(segment, document, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """Mask of a document's tokens in a chunk, (Q,)."""
    if HAS_RESET:
        return tl.load(segment + tl.arange(0, Q)) == document
    else:
        return tl.full((Q,), 1, tl.int1)


@triton.jit
def begins_of(segment, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """Mask of the tokens of a chunk with which a document begins, (Q,)."""
    q = tl.arange(0, Q)
    if HAS_RESET:
        return tl.load(segment + q) != tl.load(segment + q - 1, mask=q > 0, other=0)
    else:
        return tl.full((Q,), 0, tl.int1)


@triton.jit
def scalars(rows, first, seqlen, members, Q: tl.constexpr, ACC: tl.constexpr):
    """g or beta of a chunk's tokens, 0 for those that are not ``members``, (Q,)."""
    pointer, stride = rows
    q = tl.arange(0, Q)
    return tl.load(pointer + (first + q) * stride, mask=members & (q < seqlen - first), other=0.0).to(ACC)


@triton.jit
def matrix(rows, first, i, seqlen, size, members, Q: tl.constexpr, TO: tl.constexpr):
    """Columns i of a chunk's tokens, 0 for those that are not ``members``, (Q, columns)."""
    pointer, stride = rows
    q = tl.arange(0, Q)
    ok = (members & (q < seqlen - first))[:, None] & (i < size)[None, :]
    return tl.load(pointer + first * stride + (q[:, None] * stride + i[None, :]), mask=ok, other=0.0).to(TO)


@triton.jit
def of_chunk(pointer, at, i, size, members, Q: tl.constexpr, TO: tl.constexpr):
    """`matrix` of a tensor (batch, nheads, chunks * Q, size): columns i of chunk ``at`` among those of all
    heads."""
    return matrix((pointer + at * Q * size, size), 0, i, Q, size, members, Q, TO)


@triton.jit
def store_chunk(pointer, at, x, i, size, members, Q: tl.constexpr):
    """Write columns i of chunk ``at``, as `of_chunk` reads them, of the tokens that are ``members``."""
    q = tl.arange(0, Q)
    ok = members[:, None] & (i < size)[None, :]
    tl.store(pointer + at * Q * size + (q[:, None] * size + i[None, :]), x, mask=ok)


@triton.jit
def of_state(pointer, at, n, m, d_k, d_v, TO: tl.constexpr):
    """Rows n and columns m of state ``at`` of those (…, d_k, d_v)."""
    ok = (n < d_k)[:, None] & (m < d_v)[None, :]
    place = pointer + at * (d_k * d_v) + (n[:, None] * d_v + m[None, :])
    return tl.load(place, mask=ok, other=0.0).to(TO)


@triton.jit
def state_blocks(
    pointer,
    at,
    m,
    d_k,
    d_v,
    GIVEN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Columns m of state ``at`` of those (…, d_k, d_v), NK blocks of K rows each; zero unless GIVEN."""
    state = ()
    for block in tl.static_range(NK):
        if GIVEN:
            rows = of_state(pointer, at, block * K + tl.arange(0, K), m, d_k, d_v, ACC)
        else:
            rows = tl.zeros((K, V), ACC)
        state = state + (rows,)  # noqa: RUF005
    return state


@triton.jit
def store_state(pointer, at, rows, n, m, d_k, d_v):
    """Write rows n and columns m of state ``at`` of those (…, d_k, d_v)."""
    ok = (n < d_k)[:, None] & (m < d_v)[None, :]
    tl.store(pointer + at * (d_k * d_v) + (n[:, None] * d_v + m[None, :]), rows, mask=ok)


@triton.jit
def decaying(g, place, n, members, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr):
    """g of channels n of a document's tokens of a chunk, (Q, columns); 0 for its first token, which has
    nothing before it that would decay."""
    first, seqlen, d_k, segment = place
    decays = members & (begins_of(segment, HAS_RESET, Q) == 0)
    return matrix(g, first, n, seqlen, d_k, decays, Q, ACC)


@triton.jit
def running_sums(g, place, members, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr):
    """c, the sums of g over a document's tokens of a chunk up to each, and the sum of all. The first token
    of a document has nothing before it that would decay."""
    first, seqlen, _, segment = place
    values = scalars(g, first, seqlen, members & (begins_of(segment, HAS_RESET, Q) == 0), Q, ACC)
    return tl.cumsum(values, axis=0), tl.sum(values, axis=0)


@triton.jit
def since_before(
    g, place, n, members, WIDE: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr
):
    """Share of channels n of the state before the chunk that is left at each token: exp(c), (Q, columns or
    1)."""
    if WIDE:
        c = tl.cumsum(decaying(g, place, n, members, HAS_RESET, Q, ACC), axis=0)
    else:
        c = running_sums(g, place, members, HAS_RESET, Q, ACC)[0][:, None]
    return tl.where(members[:, None], tl.exp(c), 0.0)


@triton.jit
def until_end(
    g, place, n, members, WIDE: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr
):
    """Share of what each token, of the chunk's last document, writes into channels n that is left at its end:
    exp(c_end - c), (Q, columns or 1). Of decays per channel it sums from the end: a difference would round
    away what a channel keeps that decays slowly."""
    if WIDE:
        first, seqlen, d_k, _ = place
        following = members & (tl.arange(0, Q) < Q - 1)
        later = matrix((g[0] + g[1], g[1]), first, n, seqlen - 1, d_k, following, Q, ACC)
        rest = tl.cumsum(later, axis=0, reverse=True)
    else:
        c, total = running_sums(g, place, members, HAS_RESET, Q, ACC)
        rest = (total - c)[:, None]
    return tl.where(members[:, None], tl.exp(rest), 0.0)


@triton.jit
def chunk_decay(
    g, place, n, members, WIDE: tl.constexpr, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr
):
    """Share of channels n of the state before a chunk that it leaves: exp(c_end), (columns,), or a number."""
    if WIDE:
        total = tl.sum(decaying(g, place, n, members, HAS_RESET, Q, ACC), axis=0)
    else:
        total = running_sums(g, place, members, HAS_RESET, Q, ACC)[1]
    return tl.exp(total)


@triton.jit
def token_pairs(TRANSPOSED: tl.constexpr, Q: tl.constexpr):
    """Tokens i and j of the elements of a (Q, Q) matrix: rows are i and columns j, or TRANSPOSED."""
    rows, columns = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    if TRANSPOSED:
        return columns, rows
    else:
        return rows, columns


@triton.jit
def pair_decays(
    g,
    place,
    members,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """exp(c_i - c_j) of a document's tokens j <= i, 0 for all other pairs. Of decays per channel, which are
    in the `products`: 1 for 0."""
    i, j = token_pairs(TRANSPOSED, Q)
    pair = (i >= j) & members[:, None] & members[None, :]
    if WIDE:
        return pair.to(ACC)
    else:
        c, _ = running_sums(g, place, members, HAS_RESET, Q, ACC)
        between = c[None, :] - c[:, None] if TRANSPOSED else c[:, None] - c[None, :]
        return tl.exp(tl.where(pair, between, float("-inf")))


@triton.jit
def corners(bits, Q: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The pairs (i, j) of which j is in the first half of a block of 2 * 2**bits tokens, i in the second: for
    bits from 0 on, every pair j < i once."""
    i, j = token_pairs(TRANSPOSED, Q)
    return (i >> (bits + 1) == j >> (bits + 1)) & (i >> bits > j >> bits)


@triton.jit
def to_middle(decays, bits, Q: tl.constexpr, ACC: tl.constexpr):
    """Share that channels, whose logs are ``decays`` (Q, columns), keep between each token and the middle of
    its block of 2 * 2**bits: in the first half after the token, in the second up to it. The product of two
    such is what is left from j to i; both are exponentials of sums of at most 2**bits numbers of one sign."""
    i, t = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    second = (i >> bits) % 2 == 1
    between = (i >> bits == t >> bits) & ((t <= i) == second)
    if ACC == tl.float64:  # noqa: SIM300 - the constexpr is what knows how to compare
        total = tl.dot(between.to(ACC), decays, input_precision="ieee", out_dtype=ACC)
    else:
        # TF32 in two parts: it has the first eleven bits of a number, and then the next eleven
        high = (decays.to(tl.int32, bitcast=True) & -8192).to(ACC, bitcast=True)
        total = tl.dot(between.to(ACC), decays - high, input_precision="tf32", out_dtype=ACC)
        total = tl.dot(between.to(ACC), high, total, input_precision="tf32", out_dtype=ACC)
    return tl.exp(total)


@triton.jit
def products(
    a,
    b,
    g,
    place,
    members,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    NK: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """a_i . b_j of a document's tokens, (Q, Q), their channels decayed from j to i if each has a decay;
    `pair_decays` then drops what is not j <= i. TRANSPOSED: b_j . a_i, (Q, Q), with j in the rows."""
    first, seqlen, d_k, _ = place
    total = tl.zeros((Q, Q), ACC)
    q = tl.arange(0, Q)
    for block in range(0, NK):
        i = block * K + tl.arange(0, K)
        if WIDE:
            a_ = matrix(a, first, i, seqlen, d_k, members, Q, ACC)
            b_ = matrix(b, first, i, seqlen, d_k, members, Q, ACC)
            total += tl.where(q[:, None] == q[None, :], tl.sum(a_ * b_, axis=1)[:, None], 0.0)
            decays = decaying(g, place, i, members, HAS_RESET, Q, ACC)
            for bits in range(0, LEVELS):
                left = to_middle(decays, bits, Q, ACC)
                read, wrote = (a_ * left).to(DOT), (b_ * left).to(DOT)
                if TRANSPOSED:
                    term = tl.dot(wrote, tl.trans(read), input_precision=PRECISION, out_dtype=ACC)
                else:
                    term = tl.dot(read, tl.trans(wrote), input_precision=PRECISION, out_dtype=ACC)
                total += tl.where(corners(bits, Q, TRANSPOSED), term, 0.0)
        else:
            a_ = matrix(a, first, i, seqlen, d_k, members, Q, DOT)
            b_ = matrix(b, first, i, seqlen, d_k, members, Q, DOT)
            if TRANSPOSED:
                total = tl.dot(b_, tl.trans(a_), total, input_precision=PRECISION, out_dtype=ACC)
            else:
                total = tl.dot(a_, tl.trans(b_), total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def weights_of(
    q,
    k,
    g,
    place,
    members,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    NK: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):
    """exp(c_i - c_j) q_i . k_j of a document's tokens j <= i, 0 for all other pairs, (Q, Q).

    TRANSPOSED it is computed with j in the rows, not transposed afterwards: what a product leaves in
    registers would have to go through shared memory, which Triton 3.4 to 3.7.0 gets wrong on Hopper
    (https://github.com/fla-org/flash-linear-attention/issues/640)."""
    weights = products(
        q, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC, TRANSPOSED
    )
    decays = pair_decays(g, place, members, WIDE, HAS_RESET, Q, ACC, TRANSPOSED)
    return tl.where(decays > 0.0, weights * decays, 0.0).to(DOT)


@triton.jit
def inverse(lower, Q: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangular matrix (Q, Q), Q = 2**LEVELS.

    Blocks on the diagonal are inverted, two of them at a time put together: with the inverse T of the blocks
    and the corner O that joins two of them, the inverse is T - T O T.
    """
    i, j = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    corner = (i // 2 == j // 2) & (i > j)
    solved = tl.where(i == j, 1.0, tl.where(corner, -lower, 0.0)).to(ACC)
    for bits in range(1, LEVELS):  # blocks of 2**bits; unrolled it takes too many registers
        joined = tl.where(corners(bits, Q), lower, 0.0)
        joined = tl.dot(joined, solved, input_precision=PRECISION, out_dtype=ACC)
        solved -= tl.dot(solved, joined, input_precision=PRECISION, out_dtype=ACC)
    return solved


@triton.jit(do_not_specialize=LENGTHS)
def solve_kernel(
    k,
    v,
    g,
    beta,
    segment,
    inverses,
    U,
    W,
    seqlen,
    nheads,
    d_k,
    d_v,
    k_strides,
    v_strides,
    g_strides,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DOT: tl.constexpr,
    LEVELS: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """T (batch, nheads, chunks, Q, Q), U (batch, nheads, chunks * Q, d_v), W (batch, nheads, chunks * Q, d_k)
    of one chunk and head."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    q = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    beta = beta + (batch * seqlen * nheads + head), nheads
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        beta_ = scalars(beta, first, seqlen, members, Q, ACC)
        lower = products(k, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC)
        below = (q[:, None] > q[None, :]) & members[:, None] & members[None, :]
        decays = pair_decays(g, place, members, WIDE, HAS_RESET, Q, ACC)
        lower = tl.where(below, lower * decays * beta_[:, None], 0.0)
        solved = inverse(lower, Q, LEVELS, SOLVE, ACC)
        tl.store(inverses + at * (Q * Q) + (q[:, None] * Q + q[None, :]), solved, mask=members[:, None])
        solved = solved.to(DOT)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            v_ = matrix(v, first, m, seqlen, d_v, members, Q, ACC) * beta_[:, None]
            u = tl.dot(solved, v_.to(DOT), input_precision=PRECISION, out_dtype=ACC)
            store_chunk(U, at, u, m, d_v, members, Q)
        goes_on = members & (document == 0)
        for block in range(0, NK):
            n = block * K + tl.arange(0, K)
            since = since_before(g, place, n, goes_on, WIDE, HAS_RESET, Q, ACC)
            k_ = matrix(k, first, n, seqlen, d_k, members, Q, ACC) * (since * beta_[:, None])
            w = tl.dot(solved, k_.to(DOT), input_precision=PRECISION, out_dtype=ACC)
            store_chunk(W, at, w, n, d_k, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def state_kernel(
    k,
    g,
    segment,
    U,
    W,
    initial,
    states,
    written,
    final,
    seqlen,
    chunks,
    nheads,
    d_k,
    d_v,
    k_strides,
    g_strides,
    HAS_INITIAL: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """The states before each chunk (batch, nheads, chunks, d_k, d_v), what is written in it, (batch, nheads,
    chunks * Q, d_v), and the final state: V columns of one head."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * V + tl.arange(0, V)
    n = tl.arange(0, K)
    line = batch * nheads + head
    k = rows_of(k, k_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    state = state_blocks(initial, line, m, d_k, d_v, HAS_INITIAL, K, V, NK, ACC)
    for chunk in range(0, chunks):
        at = line * chunks + chunk
        first = tl.full((), Q, tl.int64) * chunk
        documents = segment_of(segment, batch * chunks + chunk, HAS_RESET, Q)
        place = first, seqlen, d_k, documents
        end = documents_of(documents, HAS_RESET, Q)[1]
        all_tokens = tl.full((Q,), 1, tl.int1)
        reads = tl.zeros((Q, V), ACC)
        for block in tl.static_range(NK):
            i = block * K + n
            store_state(states, at, state[block], i, m, d_k, d_v)
            w = of_chunk(W, at, i, d_k, all_tokens, Q, DOT)
            reads = tl.dot(w, state[block].to(DOT), reads, input_precision=PRECISION, out_dtype=ACC)
        goes_on = tokens_of(documents, 0, HAS_RESET, Q)
        members = tokens_of(documents, end, HAS_RESET, Q)
        u = of_chunk(U, at, m, d_v, all_tokens, Q, ACC)
        u -= tl.where(goes_on[:, None], reads, 0.0)
        store_chunk(written, at, u, m, d_v, all_tokens, Q)
        u = tl.where(members[:, None], u, 0.0).to(DOT)
        after = ()
        for block in tl.static_range(NK):
            i = block * K + n
            until = until_end(g, place, i, members, WIDE, HAS_RESET, Q, ACC)
            k_ = matrix(k, first, i, seqlen, d_k, members, Q, ACC) * until
            decay = chunk_decay(g, place, i, members, WIDE, HAS_RESET, Q, ACC)
            carried = tl.where(end == 0, state[block] * (decay[:, None] if WIDE else decay), 0.0)
            term = tl.dot(tl.trans(k_).to(DOT), u, carried, input_precision=PRECISION, out_dtype=ACC)
            after = after + (term,)  # noqa: RUF005
        state = after
    for block in tl.static_range(NK):
        store_state(final, line, state[block], block * K + n, m, d_k, d_v)


@triton.jit(do_not_specialize=LENGTHS)
def output_kernel(
    q,
    k,
    g,
    segment,
    states,
    written,
    o,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    g_strides,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    NV: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """V columns of the outputs of one chunk and head."""
    index, head, batch, first, at, segment = place_of(segment, nheads, NV, HAS_RESET, Q)
    m = index * V + tl.arange(0, V)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    out = o + ((batch * seqlen + first) * nheads + head) * d_v + (i[:, None] * (nheads * d_v) + m[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        weights = weights_of(q, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC)
        u = of_chunk(written, at, m, d_v, members, Q, DOT)
        total = tl.dot(weights, u, input_precision=PRECISION, out_dtype=ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                since = since_before(g, place, n, members, WIDE, HAS_RESET, Q, ACC)
                q_ = matrix(q, first, n, seqlen, d_k, members, Q, ACC) * since
                state = of_state(states, at, n, m, d_k, d_v, DOT)
                total = tl.dot(q_.to(DOT), state, total, input_precision=PRECISION, out_dtype=ACC)
        ok = (members & (i < seqlen - first))[:, None] & (m < d_v)[None, :]
        tl.store(out, total, mask=ok)
