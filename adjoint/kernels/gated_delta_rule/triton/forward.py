"""Forward kernels of the gated delta rule in Triton, on tensor cores (launched by `launch`), and what the
backward shares with them.

The sequence is cut into chunks of Q tokens, whose updates are one triangular system (Yang, Kautz and
Hatamizadeh 2024, section 3.3, the extended WY form). With c the running sums of g in a chunk, S the state
before it, and L_ij = beta_i exp(c_i - c_j) k_i . k_j for j < i:

    T = (1 + L)^-1,  U = T (beta v),  W = T (beta exp(c) k)
    written = U - W S,  o_i = exp(c_i) S' q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) written_j
    S_next = exp(c_end) S + sum_j exp(c_end - c_j) k_j (x) written_j

T, U and W are made for all chunks at once (`solve_kernel`); the states follow one another, a program for some
columns of every head (`state_kernel`); outputs are again of all chunks at once (`output_kernel`).

Where a chunk holds several documents, the work is done for each, tokens of others read as 0 and their rows
not written: none gets what another one has, NaN or infinite as it may be. The first goes on from the state
before, the last one goes into the state after.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import LENGTHS


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
    """Which tokens of a chunk are a document's, (Q,)."""
    if HAS_RESET:
        return tl.load(segment + tl.arange(0, Q)) == document
    else:
        return tl.full((Q,), 1, tl.int1)


@triton.jit
def begins_of(segment, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """With which tokens of a chunk a document begins, (Q,)."""
    q = tl.arange(0, Q)
    if HAS_RESET:
        return tl.load(segment + q) != tl.load(segment + q - 1, mask=q > 0, other=0)
    else:
        return tl.full((Q,), 0, tl.int1)


@triton.jit
def scalars(pointer, first, stride, seqlen, own, Q: tl.constexpr, ACC: tl.constexpr):
    """g or beta of a chunk's tokens, 0 for those that are not ``own``, (Q,)."""
    q = tl.arange(0, Q)
    return tl.load(pointer + (first + q) * stride, mask=own & (q < seqlen - first), other=0.0).to(ACC)


@triton.jit
def matrix(pointer, first, i, stride, seqlen, size, own, Q: tl.constexpr, TO: tl.constexpr):
    """Columns i of a chunk's tokens, 0 for those that are not ``own``, (Q, columns)."""
    q = tl.arange(0, Q)
    ok = (own & (q < seqlen - first))[:, None] & (i < size)[None, :]
    return tl.load(pointer + first * stride + (q[:, None] * stride + i[None, :]), mask=ok, other=0.0).to(TO)


@triton.jit
def of_state(pointer, n, m, d_k, d_v, TO: tl.constexpr):
    """Rows n and columns m of a state (d_k, d_v)."""
    ok = (n < d_k)[:, None] & (m < d_v)[None, :]
    return tl.load(pointer + (n[:, None] * d_v + m[None, :]), mask=ok, other=0.0).to(TO)


@triton.jit
def decaying(
    g,
    first,
    n,
    stride,
    seqlen,
    d_k,
    own,
    segment,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
):
    """g of channels n of a document's tokens of a chunk, (Q, columns); 0 for its first token, which has
    nothing before it that would decay."""
    decays = own & (begins_of(segment, HAS_RESET, Q) == 0)
    return matrix(g, first, n, stride, seqlen, d_k, decays, Q, ACC)


@triton.jit
def running_sums(
    g, first, stride, seqlen, own, segment, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr
):
    """c, the sums of g over a document's tokens of a chunk up to each, and their whole sum. The first token
    of a document has nothing before it that would decay."""
    values = scalars(g, first, stride, seqlen, own & (begins_of(segment, HAS_RESET, Q) == 0), Q, ACC)
    return tl.cumsum(values, axis=0), tl.sum(values, axis=0)


@triton.jit
def since_before(
    g,
    first,
    n,
    stride,
    seqlen,
    d_k,
    own,
    segment,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
):
    """What is left at each token of channels n of the state before the chunk: exp(c), (Q, columns or 1)."""
    if WIDE:
        decays = decaying(g, first, n, stride, seqlen, d_k, own, segment, HAS_RESET, Q, ACC)
        c = tl.cumsum(decays, axis=0)
    else:
        c = running_sums(g, first, stride, seqlen, own, segment, HAS_RESET, Q, ACC)[0][:, None]
    return tl.where(own[:, None], tl.exp(c), 0.0)


@triton.jit
def until_end(
    g,
    first,
    n,
    stride,
    seqlen,
    d_k,
    own,
    segment,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
):
    """What is left at the chunk's end of what each token, of its last document, writes into channels n:
    exp(c_end - c), (Q, columns or 1). Of decays per channel it sums from the end: a difference would round
    away what a channel keeps that decays slowly."""
    if WIDE:
        following = own & (tl.arange(0, Q) < Q - 1)
        later = matrix(g + stride, first, n, stride, seqlen - 1, d_k, following, Q, ACC)
        rest = tl.cumsum(later, axis=0, reverse=True)
    else:
        c, whole = running_sums(g, first, stride, seqlen, own, segment, HAS_RESET, Q, ACC)
        rest = (whole - c)[:, None]
    return tl.where(own[:, None], tl.exp(rest), 0.0)


@triton.jit
def whole_decay(
    g,
    first,
    n,
    stride,
    seqlen,
    d_k,
    own,
    segment,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
):
    """What a chunk leaves of channels n of the state before it: exp(c_end), (columns,), or a number."""
    if WIDE:
        whole = tl.sum(decaying(g, first, n, stride, seqlen, d_k, own, segment, HAS_RESET, Q, ACC), axis=0)
    else:
        whole = running_sums(g, first, stride, seqlen, own, segment, HAS_RESET, Q, ACC)[1]
    return tl.exp(whole)


@triton.jit
def pair_decays(
    g,
    first,
    stride,
    seqlen,
    own,
    segment,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    ACC: tl.constexpr,
):
    """exp(c_i - c_j) of a document's tokens j <= i, 0 for all other pairs. Of decays per channel, which are
    in the `products`: 1 for 0."""
    q = tl.arange(0, Q)
    pair = (q[:, None] >= q[None, :]) & own[:, None] & own[None, :]
    if WIDE:
        return pair.to(ACC)
    else:
        c, _ = running_sums(g, first, stride, seqlen, own, segment, HAS_RESET, Q, ACC)
        return tl.exp(tl.where(pair, c[:, None] - c[None, :], float("-inf")))


@triton.jit
def corners(bits, Q: tl.constexpr):
    """The pairs (i, j) of which j is in the first half of a block of 2 * 2**bits tokens, i in the second: for
    bits from 0 on, every pair j < i once."""
    i, j = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    return (i >> (bits + 1) == j >> (bits + 1)) & (i >> bits > j >> bits)


@triton.jit
def to_middle(decays, bits, Q: tl.constexpr, ACC: tl.constexpr):
    """How much channels, whose logs are ``decays`` (Q, columns), keep between each token and the middle of
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
    first,
    a_t,
    b_t,
    g_t,
    seqlen,
    d_k,
    own,
    segment,
    WIDE: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    NK: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """a_i . b_j of a document's tokens, (Q, Q), their channels decayed from j to i where they have decays of
    their own; what is not j <= i is then left to `pair_decays`."""
    total = tl.zeros((Q, Q), ACC)
    q = tl.arange(0, Q)
    for block in range(0, NK):
        i = block * K + tl.arange(0, K)
        if WIDE:
            a_ = matrix(a, first, i, a_t, seqlen, d_k, own, Q, ACC)
            b_ = matrix(b, first, i, b_t, seqlen, d_k, own, Q, ACC)
            total += tl.where(q[:, None] == q[None, :], tl.sum(a_ * b_, axis=1)[:, None], 0.0)
            decays = decaying(g, first, i, g_t, seqlen, d_k, own, segment, HAS_RESET, Q, ACC)
            for bits in range(0, LEVELS):
                left = to_middle(decays, bits, Q, ACC)
                read, wrote = (a_ * left).to(DOT), (b_ * left).to(DOT)
                part = tl.dot(read, tl.trans(wrote), input_precision=PRECISION, out_dtype=ACC)
                total += tl.where(corners(bits, Q), part, 0.0)
        else:
            a_ = matrix(a, first, i, a_t, seqlen, d_k, own, Q, DOT)
            b_ = matrix(b, first, i, b_t, seqlen, d_k, own, Q, DOT)
            total = tl.dot(a_, tl.trans(b_), total, input_precision=PRECISION, out_dtype=ACC)
    return total


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
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    g_b,
    g_t,
    g_h,
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
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    first = chunk * Q
    q = tl.arange(0, Q)
    if HAS_RESET:
        segment += (batch * chunks + chunk) * Q
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    g += batch * g_b + head * g_h
    beta += batch * seqlen * nheads + head
    at = (batch * nheads + head) * chunks + chunk
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        beta_ = scalars(beta, first, nheads, seqlen, own, Q, ACC)
        lower = products(
            *(k, k, g, first, k_t, k_t, g_t, seqlen, d_k, own, segment),
            *(WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC),
        )
        below = (q[:, None] > q[None, :]) & own[:, None] & own[None, :]
        decays = pair_decays(g, first, g_t, seqlen, own, segment, WIDE, HAS_RESET, Q, ACC)
        lower = tl.where(below, lower * decays * beta_[:, None], 0.0)
        solved = inverse(lower, Q, LEVELS, SOLVE, ACC)
        tl.store(inverses + at * (Q * Q) + (q[:, None] * Q + q[None, :]), solved, mask=own[:, None])
        solved = solved.to(DOT)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            v_ = matrix(v, first, m, v_t, seqlen, d_v, own, Q, ACC) * beta_[:, None]
            u = tl.dot(solved, v_.to(DOT), input_precision=PRECISION, out_dtype=ACC)
            tl.store(
                U + at * Q * d_v + (q[:, None] * d_v + m[None, :]), u, mask=own[:, None] & (m < d_v)[None, :]
            )
        goes_on = own & (document == 0)
        for block in range(0, NK):
            n = block * K + tl.arange(0, K)
            since = since_before(g, first, n, g_t, seqlen, d_k, goes_on, segment, WIDE, HAS_RESET, Q, ACC)
            k_ = matrix(k, first, n, k_t, seqlen, d_k, own, Q, ACC) * (since * beta_[:, None])
            w = tl.dot(solved, k_.to(DOT), input_precision=PRECISION, out_dtype=ACC)
            tl.store(
                W + at * Q * d_k + (q[:, None] * d_k + n[None, :]), w, mask=own[:, None] & (n < d_k)[None, :]
            )


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
    k_b,
    k_t,
    k_h,
    g_b,
    g_t,
    g_h,
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
    q, n = tl.arange(0, Q), tl.arange(0, K)
    size = d_k * d_v
    line = batch * nheads + head
    k += batch * k_b + head * k_h
    g += batch * g_b + head * g_h
    state = ()
    for block in tl.static_range(NK):
        if HAS_INITIAL:
            part = of_state(initial + line * size, block * K + n, m, d_k, d_v, ACC)
        else:
            part = tl.zeros((K, V), ACC)
        state = state + (part,)  # noqa: RUF005
    for chunk in range(0, chunks):
        at = line * chunks + chunk
        first = tl.full((), Q, tl.int64) * chunk
        if HAS_RESET:
            here = segment + (batch * chunks + chunk) * Q
        else:
            here = segment
        end = documents_of(here, HAS_RESET, Q)[1]
        everything = tl.full((Q,), 1, tl.int1)
        reads = tl.zeros((Q, V), ACC)
        for block in tl.static_range(NK):
            i = block * K + n
            ok = (i < d_k)[:, None] & (m < d_v)[None, :]
            tl.store(states + at * size + (i[:, None] * d_v + m[None, :]), state[block], mask=ok)
            w = matrix(W + at * Q * d_k, 0, i, d_k, Q, d_k, everything, Q, DOT)
            reads = tl.dot(w, state[block].to(DOT), reads, input_precision=PRECISION, out_dtype=ACC)
        goes_on = tokens_of(here, 0, HAS_RESET, Q)
        own = tokens_of(here, end, HAS_RESET, Q)
        u = matrix(U + at * Q * d_v, 0, m, d_v, Q, d_v, everything, Q, ACC)
        u -= tl.where(goes_on[:, None], reads, 0.0)
        tl.store(
            written + at * Q * d_v + (q[:, None] * d_v + m[None, :]),
            u,
            mask=(q < Q)[:, None] & (m < d_v)[None, :],
        )
        u = tl.where(own[:, None], u, 0.0).to(DOT)
        after = ()
        for block in tl.static_range(NK):
            i = block * K + n
            until = until_end(g, first, i, g_t, seqlen, d_k, own, here, WIDE, HAS_RESET, Q, ACC)
            k_ = matrix(k, first, i, k_t, seqlen, d_k, own, Q, ACC) * until
            whole = whole_decay(g, first, i, g_t, seqlen, d_k, own, here, WIDE, HAS_RESET, Q, ACC)
            kept = tl.where(end == 0, state[block] * (whole[:, None] if WIDE else whole), 0.0)
            part = tl.dot(tl.trans(k_).to(DOT), u, kept, input_precision=PRECISION, out_dtype=ACC)
            after = after + (part,)  # noqa: RUF005
        state = after
    for block in tl.static_range(NK):
        i = block * K + n
        ok = (i < d_k)[:, None] & (m < d_v)[None, :]
        tl.store(final + line * size + (i[:, None] * d_v + m[None, :]), state[block], mask=ok)


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
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    g_b,
    g_t,
    g_h,
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
    chunk, head, batch = (
        (tl.program_id(0) // NV).to(tl.int64),
        tl.program_id(1),
        tl.program_id(2).to(tl.int64),
    )
    m = tl.program_id(0) % NV * V + tl.arange(0, V)
    chunks = tl.num_programs(0) // NV
    first, i = chunk * Q, tl.arange(0, Q)
    if HAS_RESET:
        segment += (batch * chunks + chunk) * Q
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    g += batch * g_b + head * g_h
    at = (batch * nheads + head) * chunks + chunk
    out = o + ((batch * seqlen + first) * nheads + head) * d_v + (i[:, None] * (nheads * d_v) + m[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        weights = products(
            *(q, k, g, first, q_t, k_t, g_t, seqlen, d_k, own, segment),
            *(WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC),
        )
        decays = pair_decays(g, first, g_t, seqlen, own, segment, WIDE, HAS_RESET, Q, ACC)
        weights = tl.where(decays > 0.0, weights * decays, 0.0).to(DOT)
        u = matrix(written + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, DOT)
        total = tl.dot(weights, u, input_precision=PRECISION, out_dtype=ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                since = since_before(g, first, n, g_t, seqlen, d_k, own, segment, WIDE, HAS_RESET, Q, ACC)
                q_ = matrix(q, first, n, q_t, seqlen, d_k, own, Q, ACC) * since
                state = of_state(states + at * (d_k * d_v), n, m, d_k, d_v, DOT)
                total = tl.dot(q_.to(DOT), state, total, input_precision=PRECISION, out_dtype=ACC)
        ok = (own & (i < seqlen - first))[:, None] & (m < d_v)[None, :]
        tl.store(out, total, mask=ok)
