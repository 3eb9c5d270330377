"""Backward kernels of the DPLR delta rule in Triton (launched by `launch`).

In the terms of `forward`, with d of a name its cotangent:

    dread = q_writes' do + exp(c_end - c) b dS_next
    dS = exp(c_end) dS_next + (exp(c) q)' do + W' dread
    d_right = T' dread,   dv = q_keys' do + exp(c_end - c) k dS_next + a_keys' d_right

Pairs, T, U, W and what is read are recomputed from the inputs and the states before the chunks. The
cotangent of the states then goes through the chunks from the last to the first
(`delta_rules.cotangent_kernel`). Everything else is done for all chunks at once: the backward of pairs with
queries (`pair_grad_kernel`), of the triangular system (`system_grad_kernel`), and of q, k, a, b and g
(`key_grad_kernel`). A decay's gradient is the sum of c's cotangents from its token on; what token i's a
contributes to them belongs to c_{i-1}.

Parameters that are not obvious, beside those in `forward`:

    d_right: see above; d_states: cotangents of the states after the chunks
    d_qk, d_qb, d_ak, d_ab: cotangents of what is left of q_i . k_j, q_i . b_j, a_i . k_j and a_i . b_j,
        (batch, nheads, chunks, Q, Q), in the type of products
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.dplr_delta_rule.triton.forward import reading, since_read, square
from adjoint.kernels.triton.common import LENGTHS, rows_of
from adjoint.kernels.triton.delta_rules import (
    begins_of,
    chunk_decay,
    corners,
    decaying,
    documents_of,
    earlier_rows,
    later_rows,
    matrix,
    of_chunk,
    of_state,
    place_of,
    since_before,
    store_chunk,
    to_middle,
    tokens_of,
    until_end,
)


@triton.jit(do_not_specialize=LENGTHS)
def read_kernel(
    do,
    segment,
    q_writes,
    U,
    W,
    states,
    read,
    d_read,
    seqlen,
    nheads,
    d_k,
    d_v,
    do_strides,
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
    """V columns of what is read in a chunk, and of its cotangent as far as the chunk's own outputs ask it:
    (batch, nheads, chunks * Q, d_v) each."""
    index, head, batch, first, at, segment = place_of(segment, nheads, NV, HAS_RESET, Q)
    m = index * V + tl.arange(0, V)
    do = rows_of(do, do_strides, batch, head)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        u = of_chunk(U, at, m, d_v, members, Q, ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                w = of_chunk(W, at, n, d_k, members, Q, DOT)
                state = of_state(states, at, n, m, d_k, d_v, DOT)
                u = tl.dot(w, state, u, input_precision=PRECISION, out_dtype=ACC)
        store_chunk(read, at, u, m, d_v, members, Q)
        weights = square(q_writes, at, members, Q, DOT)
        do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
        term = tl.dot(tl.trans(weights), do_, input_precision=PRECISION, out_dtype=ACC)
        store_chunk(d_read, at, term, m, d_v, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def pair_grad_kernel(
    v,
    do,
    segment,
    read,
    d_qk,
    d_qb,
    seqlen,
    nheads,
    d_k,
    d_v,
    v_strides,
    do_strides,
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
    """Cotangents of pairs with queries of one chunk and head."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    v = rows_of(v, v_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        qk = tl.zeros((Q, Q), ACC)
        qb = tl.zeros((Q, Q), ACC)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
            v_ = tl.trans(matrix(v, first, m, seqlen, d_v, members, Q, DOT))
            qk = tl.dot(do_, v_, qk, input_precision=PRECISION, out_dtype=ACC)
            u = tl.trans(of_chunk(read, at, m, d_v, members, Q, DOT))
            qb = tl.dot(do_, u, qb, input_precision=PRECISION, out_dtype=ACC)
        pair = members[:, None] & members[None, :] & (i[:, None] >= i[None, :])
        store_chunk(d_qk, at, tl.where(pair, qk, 0.0), i, Q, members, Q)
        store_chunk(d_qb, at, tl.where(pair, qb, 0.0), i, Q, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def system_grad_kernel(
    k,
    v,
    g,
    do,
    segment,
    q_keys,
    a_keys,
    inverses,
    read,
    d_read,
    d_states,
    d_right,
    d_ak,
    d_ab,
    dv,
    seqlen,
    nheads,
    d_k,
    d_v,
    k_strides,
    v_strides,
    g_strides,
    do_strides,
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
    """dv of one chunk and head; ``d_right``, the cotangent of the triangular system's right side, (batch,
    nheads, chunks * Q, d_v); and the cotangents of pairs with a."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    out = dv + ((batch * seqlen + first) * nheads + head) * d_v + i[:, None] * (nheads * d_v)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        inside = members & (i < seqlen - first)
        ak = tl.zeros((Q, Q), ACC)
        ab = tl.zeros((Q, Q), ACC)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            dr = of_chunk(d_read, at, m, d_v, members, Q, DOT)
            solved = tl.trans(square(inverses, at, members, Q, DOT))
            right = tl.dot(solved, dr, input_precision=PRECISION, out_dtype=ACC)
            right = tl.where(members[:, None], right, 0.0)
            store_chunk(d_right, at, right, m, d_v, members, Q)
            right = right.to(DOT)
            do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
            weights = tl.trans(square(q_keys, at, members, Q, DOT))
            total = tl.dot(weights, do_, input_precision=PRECISION, out_dtype=ACC)
            weights = tl.trans(square(a_keys, at, members, Q, DOT))
            total = tl.dot(weights, right, total, input_precision=PRECISION, out_dtype=ACC)
            if document == end:
                for term in range(0, NK):
                    n = term * K + tl.arange(0, K)
                    until = until_end(g, place, n, members, True, HAS_RESET, Q, ACC)
                    k_ = (matrix(k, first, n, seqlen, d_k, members, Q, ACC) * until).to(DOT)
                    after = of_state(d_states, at, n, m, d_k, d_v, DOT)
                    total = tl.dot(k_, after, total, input_precision=PRECISION, out_dtype=ACC)
            tl.store(out + m[None, :], total, mask=inside[:, None] & (m < d_v)[None, :])
            v_ = tl.trans(matrix(v, first, m, seqlen, d_v, members, Q, DOT))
            ak = tl.dot(right, v_, ak, input_precision=PRECISION, out_dtype=ACC)
            u = tl.trans(of_chunk(read, at, m, d_v, members, Q, DOT))
            ab = tl.dot(right, u, ab, input_precision=PRECISION, out_dtype=ACC)
        below = members[:, None] & members[None, :] & (i[:, None] > i[None, :])
        store_chunk(d_ak, at, tl.where(below, ak, 0.0), i, Q, members, Q)
        store_chunk(d_ab, at, tl.where(below, ab, 0.0), i, Q, members, Q)


@triton.jit
def followed_in(segment, document, members, HAS_RESET: tl.constexpr, Q: tl.constexpr):
    """Mask of a document's tokens that have another one of it behind them in the chunk, (Q,)."""
    i = tl.arange(0, Q)
    if HAS_RESET:
        return members & (tl.load(segment + i + 1, mask=i < Q - 1, other=-1) == document)
    else:
        return i < Q - 1


@triton.jit
def through_pairs(
    read,
    k,
    b,
    decays,
    d_keys,
    d_writes,
    of_read,
    of_k,
    of_b,
    at,
    members,
    OWN: tl.constexpr,
    Q: tl.constexpr,
    LEVELS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ACC: tl.constexpr,
):
    """Gradients of a document's q, k and b, added to those in ``of_…``, through pairs j < i with queries;
    without OWN those of a, k and b, through pairs j < i - 1 with a. What is left out does not decay."""
    both = members[:, None] & members[None, :]
    i = tl.arange(0, Q)
    square = at * (Q * Q) + (i[:, None] * Q + i[None, :])
    if not OWN:
        both = both & (i[:, None] != i[None, :] + 1)
    for bits in range(0, LEVELS):
        left = to_middle(decays, bits, Q, ACC, OWN)
        corner = corners(bits, Q) & both
        reads = (read * left).to(DOT)
        pairs = tl.load(d_keys + square, mask=corner, other=0.0).to(DOT)
        by_read = tl.dot(pairs, (k * left).to(DOT), input_precision=PRECISION, out_dtype=ACC)
        of_k += left * tl.dot(tl.trans(pairs), reads, input_precision=PRECISION, out_dtype=ACC)
        pairs = tl.load(d_writes + square, mask=corner, other=0.0).to(DOT)
        of_read += left * tl.dot(pairs, (b * left).to(DOT), by_read, input_precision=PRECISION, out_dtype=ACC)
        of_b += left * tl.dot(tl.trans(pairs), reads, input_precision=PRECISION, out_dtype=ACC)
    return of_read, of_k, of_b


@triton.jit(do_not_specialize=LENGTHS)
def key_grad_kernel(
    q,
    k,
    v,
    a,
    b,
    g,
    do,
    segment,
    read,
    d_right,
    states,
    d_states,
    d_qk,
    d_qb,
    d_ak,
    d_ab,
    dq,
    dk,
    da,
    db,
    dg,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    v_strides,
    a_strides,
    b_strides,
    g_strides,
    do_strides,
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
    """K columns of dq, dk, da, db and dg of one chunk and head."""
    index, head, batch, first, at, segment = place_of(segment, nheads, NK, HAS_RESET, Q)
    n = index * K + tl.arange(0, K)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    a = rows_of(a, a_strides, batch, head)
    b = rows_of(b, b_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    out = ((batch * seqlen + first) * nheads + head) * d_k + (i[:, None] * (nheads * d_k) + n[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        of_q = tl.zeros((Q, K), ACC)
        of_a = tl.zeros((Q, K), ACC)
        of_k = tl.zeros((Q, K), ACC)
        of_b = tl.zeros((Q, K), ACC)
        through = tl.zeros((K,), ACC)
        for term in range(0, NV):
            m = term * V + tl.arange(0, V)
            if document == 0:
                state = of_state(states, at, n, m, d_k, d_v, ACC)
                if end == 0:
                    through += tl.sum(state * of_state(d_states, at, n, m, d_k, d_v, ACC), axis=1)
                state = tl.trans(state).to(DOT)
                do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
                of_q = tl.dot(do_, state, of_q, input_precision=PRECISION, out_dtype=ACC)
                right = of_chunk(d_right, at, m, d_v, members, Q, DOT)
                of_a = tl.dot(right, state, of_a, input_precision=PRECISION, out_dtype=ACC)
            if document == end:
                after = tl.trans(of_state(d_states, at, n, m, d_k, d_v, DOT))
                v_ = matrix(v, first, m, seqlen, d_v, members, Q, DOT)
                of_k = tl.dot(v_, after, of_k, input_precision=PRECISION, out_dtype=ACC)
                u = of_chunk(read, at, m, d_v, members, Q, DOT)
                of_b = tl.dot(u, after, of_b, input_precision=PRECISION, out_dtype=ACC)
        goes_on, ends = members & (document == 0), members & (document == end)
        since = since_before(g, place, n, goes_on, True, HAS_RESET, Q, ACC)
        of_q = tl.where(goes_on[:, None], of_q * since, 0.0)
        since = since_read(g, place, n, goes_on, Q, ACC)
        of_a = tl.where(goes_on[:, None], of_a * since, 0.0)
        until = until_end(g, place, n, ends, True, HAS_RESET, Q, ACC)
        of_k = tl.where(ends[:, None], of_k * until, 0.0)
        of_b = tl.where(ends[:, None], of_b * until, 0.0)
        q_ = matrix(q, first, n, seqlen, d_k, members, Q, ACC)
        k_ = matrix(k, first, n, seqlen, d_k, members, Q, ACC)
        a_ = reading(a, place, n, members, HAS_RESET, Q, ACC)
        b_ = matrix(b, first, n, seqlen, d_k, members, Q, ACC)
        # what the state after the chunk has of c at the chunk's end, where the last document's sums end
        decay = chunk_decay(g, place, n, members, True, HAS_RESET, Q, ACC)
        total = tl.sum(of_k * k_ + of_b * b_, axis=0) + through * decay
        decays = decaying(g, place, n, members, HAS_RESET, Q, ACC)
        of_a, of_k, of_b = through_pairs(
            *(a_, k_, b_, decays, d_ak, d_ab, of_a, of_k, of_b, at, members, False, Q),
            *(LEVELS, DOT, PRECISION, ACC),
        )
        of_q, of_k, of_b = through_pairs(
            *(q_, k_, b_, decays, d_qk, d_qb, of_q, of_k, of_b, at, members, True, Q),
            *(LEVELS, DOT, PRECISION, ACC),
        )
        begins = begins_of(segment, HAS_RESET, Q)
        at_end = (i == Q - 1) & (document == end)
        share = of_q * q_ - of_k * k_ - of_b * b_ + tl.where(at_end[:, None], total[None, :], 0.0)
        # the chunk's first token reads what has not decayed in the chunk
        by_reading = tl.where((members & (i > 0))[:, None], of_a * a_, 0.0)
        share = tl.where(members[:, None], share, 0.0) + by_reading
        share = tl.cumsum(share, axis=0, reverse=True) - by_reading
        ok = (members & (i < seqlen - first))[:, None] & (n < d_k)[None, :]
        tl.store(dg + out, tl.where(begins[:, None], 0.0, share), mask=ok)
        # pairs that do not decay: q with its own token, a with the one before
        diagonal = at * (Q * Q) + i * (Q + 1)
        with_k = tl.load(d_qk + diagonal, mask=members, other=0.0).to(ACC)[:, None]
        with_b = tl.load(d_qb + diagonal, mask=members, other=0.0).to(ACC)[:, None]
        tl.store(dq + out, of_q + with_k * k_ + with_b * b_, mask=ok)
        of_k += with_k * q_
        of_b += with_b * q_
        preceded = members & (i > 0) & (begins == 0)
        with_k = tl.load(d_ak + diagonal - 1, mask=preceded, other=0.0).to(ACC)[:, None]
        with_b = tl.load(d_ab + diagonal - 1, mask=preceded, other=0.0).to(ACC)[:, None]
        of_a += with_k * earlier_rows(k, place, n, preceded, Q, ACC)
        of_a += with_b * earlier_rows(b, place, n, preceded, Q, ACC)
        tl.store(da + out, tl.where(begins[:, None], 0.0, of_a), mask=ok)
        followed = followed_in(segment, document, members, HAS_RESET, Q)
        with_k = tl.load(d_ak + diagonal + Q, mask=followed, other=0.0).to(ACC)[:, None]
        with_b = tl.load(d_ab + diagonal + Q, mask=followed, other=0.0).to(ACC)[:, None]
        a_ = later_rows(a, place, n, followed, Q, ACC)
        tl.store(dk + out, of_k + with_k * a_, mask=ok)
        tl.store(db + out, of_b + with_b * a_, mask=ok)
