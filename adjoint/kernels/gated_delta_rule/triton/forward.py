"""Forward kernels of the gated delta rule in Triton, on tensor cores (launched by `launch`), and what the
backward shares with them beside `delta_rules`.

The sequence is cut into chunks of Q tokens, whose updates are one triangular system (Yang, Kautz and
Hatamizadeh 2024, section 3.3, the extended WY form). With c the running sums of g in a chunk, S the state
before it, and L_ij = beta_i exp(c_i - c_j) k_i . k_j for j < i:

    T = (1 + L)^-1,  U = T (beta v),  W = T (beta exp(c) k)
    written = U - W S,  o_i = exp(c_i) S' q_i + sum_{j <= i} exp(c_i - c_j) (q_i . k_j) written_j
    S_next = exp(c_end) S + sum_j exp(c_end - c_j) k_j (x) written_j

T, U and W are computed for all chunks at once (`solve_kernel`); the states follow one another, a program for
some columns of every head (`state_kernel`); outputs are again computed for all chunks at once
(`output_kernel`).

Parameters of the kernels here and in `backward` that are not obvious, beside those in `delta_rules`:

    inverses, U, W: as above; states: those before the chunks; written: what each token writes
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.triton.common import LENGTHS, rows_of
from adjoint.kernels.triton.delta_rules import (
    chunk_decay,
    corners,
    decaying,
    documents_of,
    inverse,
    matrix,
    of_chunk,
    of_state,
    pair_decays,
    place_of,
    scalars,
    segment_of,
    since_before,
    state_blocks,
    store_chunk,
    store_state,
    to_middle,
    tokens_of,
    until_end,
)


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
