"""Forward kernels of the DPLR delta rule in Triton, on tensor cores (launched by `launch`).

The sequence is cut into chunks of Q tokens, whose reads are one triangular system. With c the running sums of
g in a chunk and S the state before it, as in the reference,

    A_ij = sum over channels of exp(c_{i-1} - c_j) a_i b_j for j < i,   T = (1 - A)^-1
    U = T (a_keys v),   W = T (exp(c_{i-1}) a),   read = U + W S
    o = (exp(c) q) S + q_keys v + q_writes read
    S_next = exp(c_end) S + sum_j exp(c_end - c_j) (k_j (x) v_j + b_j (x) read_j)

where q_keys and q_writes are q_i . k_j and q_i . b_j, decayed from j to i, for j <= i, and a_keys is
a_i . k_j, decayed from j to i - 1, for j < i: a token's a reads the state before the token decays it. Decays
go across the middle of blocks of 2, 4, ... Q tokens (`delta_rules.to_middle`); a's factors leave out the
token's own decay.

Pairs, T, U and W are computed for all chunks at once (`pair_kernel` for those with queries, `solve_kernel`
for the rest); the states follow one another, a program for some columns of every head (`state_kernel`);
outputs are again computed for all chunks at once (`output_kernel`).

Parameters of the kernels here and in `backward` that are not obvious, beside those in `delta_rules`:

    q_keys, q_writes, a_keys, inverses (T): (batch, nheads, chunks, Q, Q), in the type of products
    U, W, read: as above, (batch, nheads, chunks * Q, d_v or d_k); states: those before the chunks
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
    earlier_rows,
    inverse,
    matrix,
    of_chunk,
    of_state,
    place_of,
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
def reading(a, place, n, members, HAS_RESET: tl.constexpr, Q: tl.constexpr, ACC: tl.constexpr):
    """a of channels n of a document's tokens of a chunk, (Q, columns); 0 for its first token, which reads a
    state of zeros."""
    return decaying(a, place, n, members, HAS_RESET, Q, ACC)


@triton.jit
def since_read(g, place, n, members, Q: tl.constexpr, ACC: tl.constexpr):
    """Share of channels n of the state before the chunk that is left where each token, of the chunk's first
    document, reads it: exp(c_{i-1}), (Q, columns). A difference of c_i and g_i would round it away."""
    earlier = earlier_rows(g, place, n, members & (tl.arange(0, Q) > 0), Q, ACC)
    c = tl.cumsum(earlier, axis=0)
    return tl.where(members[:, None], tl.exp(c), 0.0)


@triton.jit
def square(pointer, at, members, Q: tl.constexpr, TO: tl.constexpr):
    """Pairs of a document's tokens of chunk ``at``, (Q, Q)."""
    return of_chunk(pointer, at, tl.arange(0, Q), Q, members, Q, TO)


@triton.jit
def pairs_with(
    read,
    k,
    b,
    g,
    place,
    members,
    OWN: tl.constexpr,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    NK: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """q_keys and q_writes of a document's tokens, (Q, Q), if ``read`` are queries; without OWN ``read`` is a,
    and they are a_keys and A."""
    first, seqlen, d_k, _ = place
    i = tl.arange(0, Q)
    diagonal = i[:, None] == i[None, :]
    both = members[:, None] & members[None, :]
    keys = tl.zeros((Q, Q), ACC)
    writes = tl.zeros((Q, Q), ACC)
    for block in range(0, NK):
        n = block * K + tl.arange(0, K)
        k_ = matrix(k, first, n, seqlen, d_k, members, Q, ACC)
        b_ = matrix(b, first, n, seqlen, d_k, members, Q, ACC)
        if OWN:
            read_ = matrix(read, first, n, seqlen, d_k, members, Q, ACC)
            keys += tl.where(diagonal, tl.sum(read_ * k_, axis=1)[:, None], 0.0)
            writes += tl.where(diagonal, tl.sum(read_ * b_, axis=1)[:, None], 0.0)
        else:
            read_ = reading(read, place, n, members, HAS_RESET, Q, ACC)
        decays = decaying(g, place, n, members, HAS_RESET, Q, ACC)
        for bits in range(0, LEVELS):
            left = to_middle(decays, bits, Q, ACC, OWN)
            corner = corners(bits, Q) & both
            reads = (read_ * left).to(DOT)
            wrote = tl.trans((k_ * left).to(DOT))
            keys += tl.where(corner, tl.dot(reads, wrote, input_precision=PRECISION, out_dtype=ACC), 0.0)
            wrote = tl.trans((b_ * left).to(DOT))
            writes += tl.where(corner, tl.dot(reads, wrote, input_precision=PRECISION, out_dtype=ACC), 0.0)
    return keys, writes


@triton.jit(do_not_specialize=LENGTHS)
def pair_kernel(
    q,
    k,
    b,
    g,
    segment,
    q_keys,
    q_writes,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    b_strides,
    g_strides,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DOT: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """Pairs with queries of one chunk and head."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    b = rows_of(b, b_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        keys, writes = pairs_with(
            q, k, b, g, place, members, True, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC
        )
        store_chunk(q_keys, at, keys, i, Q, members, Q)
        store_chunk(q_writes, at, writes, i, Q, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def solve_kernel(
    k,
    v,
    a,
    b,
    g,
    segment,
    a_keys,
    inverses,
    U,
    W,
    seqlen,
    nheads,
    d_k,
    d_v,
    k_strides,
    v_strides,
    a_strides,
    b_strides,
    g_strides,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DOT: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """Pairs with a, T, U and W of one chunk and head."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    a = rows_of(a, a_strides, batch, head)
    b = rows_of(b, b_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        keys, system = pairs_with(
            a, k, b, g, place, members, False, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC
        )
        store_chunk(a_keys, at, keys, i, Q, members, Q)
        solved = inverse(-system, Q, LEVELS, PRECISION, ACC)
        store_chunk(inverses, at, solved, i, Q, members, Q)
        solved, keys = solved.to(DOT), keys.to(DOT)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            v_ = matrix(v, first, m, seqlen, d_v, members, Q, DOT)
            mixed = tl.dot(keys, v_, input_precision=PRECISION, out_dtype=ACC).to(DOT)
            u = tl.dot(solved, mixed, input_precision=PRECISION, out_dtype=ACC)
            store_chunk(U, at, u, m, d_v, members, Q)
        goes_on = members & (document == 0)
        for block in range(0, NK):
            n = block * K + tl.arange(0, K)
            since = since_read(g, place, n, goes_on, Q, ACC)
            a_ = (reading(a, place, n, goes_on, HAS_RESET, Q, ACC) * since).to(DOT)
            w = tl.dot(solved, a_, input_precision=PRECISION, out_dtype=ACC)
            store_chunk(W, at, w, n, d_k, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def state_kernel(
    k,
    v,
    b,
    g,
    segment,
    U,
    W,
    initial,
    states,
    read,
    final,
    seqlen,
    chunks,
    nheads,
    d_k,
    d_v,
    k_strides,
    v_strides,
    b_strides,
    g_strides,
    HAS_INITIAL: tl.constexpr,
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
    """The states before each chunk (batch, nheads, chunks, d_k, d_v), what is read in it, (batch, nheads,
    chunks * Q, d_v), and the final state: V columns of one head."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * V + tl.arange(0, V)
    n = tl.arange(0, K)
    line = batch * nheads + head
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    b = rows_of(b, b_strides, batch, head)
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
        u = of_chunk(U, at, m, d_v, all_tokens, Q, ACC) + tl.where(goes_on[:, None], reads, 0.0)
        store_chunk(read, at, u, m, d_v, all_tokens, Q)
        u = tl.where(members[:, None], u, 0.0).to(DOT)
        v_ = matrix(v, first, m, seqlen, d_v, members, Q, DOT)
        after = ()
        for block in tl.static_range(NK):
            i = block * K + n
            until = until_end(g, place, i, members, True, HAS_RESET, Q, ACC)
            decay = chunk_decay(g, place, i, members, True, HAS_RESET, Q, ACC)
            term = tl.where(end == 0, state[block] * decay[:, None], 0.0)
            wrote = (matrix(k, first, i, seqlen, d_k, members, Q, ACC) * until).to(DOT)
            term = tl.dot(tl.trans(wrote), v_, term, input_precision=PRECISION, out_dtype=ACC)
            wrote = (matrix(b, first, i, seqlen, d_k, members, Q, ACC) * until).to(DOT)
            term = tl.dot(tl.trans(wrote), u, term, input_precision=PRECISION, out_dtype=ACC)
            after = after + (term,)  # noqa: RUF005
        state = after
    for block in tl.static_range(NK):
        store_state(final, line, state[block], block * K + n, m, d_k, d_v)


@triton.jit(do_not_specialize=LENGTHS)
def output_kernel(
    q,
    v,
    g,
    segment,
    q_keys,
    q_writes,
    states,
    read,
    o,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    v_strides,
    g_strides,
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
    v = rows_of(v, v_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    out = o + ((batch * seqlen + first) * nheads + head) * d_v + (i[:, None] * (nheads * d_v) + m[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        v_ = matrix(v, first, m, seqlen, d_v, members, Q, DOT)
        weights = square(q_keys, at, members, Q, DOT)
        total = tl.dot(weights, v_, input_precision=PRECISION, out_dtype=ACC)
        u = of_chunk(read, at, m, d_v, members, Q, DOT)
        weights = square(q_writes, at, members, Q, DOT)
        total = tl.dot(weights, u, total, input_precision=PRECISION, out_dtype=ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                since = since_before(g, place, n, members, True, HAS_RESET, Q, ACC)
                q_ = matrix(q, first, n, seqlen, d_k, members, Q, ACC) * since
                state = of_state(states, at, n, m, d_k, d_v, DOT)
                total = tl.dot(q_.to(DOT), state, total, input_precision=PRECISION, out_dtype=ACC)
        ok = (members & (i < seqlen - first))[:, None] & (m < d_v)[None, :]
        tl.store(out, total, mask=ok)
