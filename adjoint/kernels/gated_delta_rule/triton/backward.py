"""Backward kernels of the gated delta rule in Triton (launched by `launch`).

In the terms of `forward`, with d of a name its cotangent:

    dwritten_j = sum_{i >= j} exp(c_i - c_j) (q_i . k_j) do_i + exp(c_end - c_j) dS_next' k_j
    dS = exp(c_end) dS_next + sum_i exp(c_i) q_i (x) do_i - W' dwritten
    d_right = T' dwritten,   dv = beta d_right

T, U, W and what is written are recomputed from the inputs and the states before the chunks. The cotangent
of the states then goes through the chunks from the last to the first (`delta_rules.cotangent_kernel`).
Everything else is done for all chunks at once: the backward of the triangular system
(`system_grad_kernel`), of keys, queries and states (`key_grad_kernel`), and of the decays, whose running
sums become sums from the end (`decay_grad_kernel`).

Parameters that are not obvious, beside those in `forward` and `delta_rules`:

    d_right: see above; d_reads, d_lower: cotangents of q_i . k_j and k_i . k_j, (batch, nheads, chunks, Q, Q)
    d_states: cotangents of the states after the chunks
    dc, shares: cotangent of c, of pairs, and of each NK columns of keys; for one decay per head
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.gated_delta_rule.triton.forward import products, weights_of
from adjoint.kernels.triton.common import LENGTHS, rows_of
from adjoint.kernels.triton.delta_rules import (
    begins_of,
    chunk_decay,
    corners,
    decaying,
    documents_of,
    matrix,
    of_chunk,
    of_state,
    pair_decays,
    place_of,
    scalars,
    since_before,
    store_chunk,
    to_middle,
    tokens_of,
    until_end,
)


@triton.jit(do_not_specialize=LENGTHS)
def written_kernel(
    q,
    k,
    g,
    do,
    segment,
    U,
    W,
    states,
    written,
    d_written,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    do_strides,
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
    """V columns of what is written in a chunk, and of its cotangent as far as the chunk's own outputs read
    it: (batch, nheads, chunks * Q, d_v) each."""
    index, head, batch, first, at, segment = place_of(segment, nheads, NV, HAS_RESET, Q)
    m = index * V + tl.arange(0, V)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        u = of_chunk(U, at, m, d_v, members, Q, ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                w = of_chunk(W, at, n, d_k, members, Q, DOT)
                state = of_state(states, at, n, m, d_k, d_v, DOT)
                u -= tl.dot(w, state, input_precision=PRECISION, out_dtype=ACC)
        store_chunk(written, at, u, m, d_v, members, Q)
        weights = weights_of(
            q, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC, TRANSPOSED=True
        )
        do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
        term = tl.dot(weights, do_, input_precision=PRECISION, out_dtype=ACC)
        store_chunk(d_written, at, term, m, d_v, members, Q)


@triton.jit(do_not_specialize=LENGTHS)
def system_grad_kernel(
    q,
    k,
    v,
    g,
    beta,
    do,
    segment,
    inverses,
    written,
    d_written,
    states,
    d_right,
    d_reads,
    d_lower,
    dv,
    dbeta,
    dc,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
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
    """dv and dbeta of one chunk and head; ``d_right``, the cotangent of v - S k times beta, (batch, nheads,
    chunks * Q, d_v); ``d_reads`` and ``d_lower``, those of q_i . k_j and k_i . k_j, (batch, nheads, chunks,
    Q, Q), or with decays per channel those of what is left of them; and for one decay per head the share of
    pairs in the cotangent of c, ``dc`` (batch, nheads, chunks * Q)."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    v = rows_of(v, v_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    beta = beta + (batch * seqlen * nheads + head), nheads
    square = at * (Q * Q) + (i[:, None] * Q + i[None, :])
    tokens = (batch * seqlen + first) * nheads + head
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        inside = members & (i < seqlen - first)
        beta_ = scalars(beta, first, seqlen, members, Q, ACC)
        both = members[:, None] & members[None, :]
        solved = tl.load(inverses + square, mask=both, other=0.0).to(DOT)
        reads = tl.zeros((Q, Q), ACC)
        lower = tl.zeros((Q, Q), ACC)
        of_beta = tl.zeros((Q,), ACC)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            dw = of_chunk(d_written, at, m, d_v, members, Q, DOT)
            right = tl.dot(tl.trans(solved), dw, input_precision=PRECISION, out_dtype=ACC)
            store_chunk(d_right, at, right, m, d_v, members, Q)
            into = tokens * d_v + (i[:, None] * (nheads * d_v) + m[None, :])
            tl.store(dv + into, right * beta_[:, None], mask=inside[:, None] & (m < d_v)[None, :])
            u = of_chunk(written, at, m, d_v, members, Q, DOT)
            do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
            reads = tl.dot(do_, tl.trans(u), reads, input_precision=PRECISION, out_dtype=ACC)
            lower -= tl.dot(right.to(DOT), tl.trans(u), input_precision=PRECISION, out_dtype=ACC)
            residual = matrix(v, first, m, seqlen, d_v, members, Q, ACC)
            if document == 0:
                for term in range(0, NK):
                    n = term * K + tl.arange(0, K)
                    since = since_before(g, place, n, members, WIDE, HAS_RESET, Q, ACC)
                    k_ = (matrix(k, first, n, seqlen, d_k, members, Q, ACC) * since).to(DOT)
                    state = of_state(states, at, n, m, d_k, d_v, DOT)
                    read = tl.dot(k_, state, input_precision=PRECISION, out_dtype=ACC)
                    residual -= tl.where(members[:, None], read, 0.0)
            of_beta += tl.sum(right * residual, axis=1)
        decays = pair_decays(g, place, members, WIDE, HAS_RESET, Q, ACC)
        pair = (i[:, None] >= i[None, :]) & both
        below = (i[:, None] > i[None, :]) & both
        reads = tl.where(pair, reads * decays, 0.0)
        lower = tl.where(below, lower * decays, 0.0)
        tl.store(d_reads + square, reads, mask=members[:, None])
        tl.store(d_lower + square, lower * beta_[:, None], mask=members[:, None])
        grams = products(k, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC)
        lower = tl.where(below, lower * grams, 0.0)
        of_beta += tl.sum(lower, axis=1)
        tl.store(dbeta + tokens + i * nheads, of_beta, mask=inside)
        if not WIDE:
            grams = products(q, k, g, place, members, WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC)
            pairs = tl.where(pair, reads * grams, 0.0) + lower * beta_[:, None]
            # sums along i are of columns, in the other layout: by their mask too
            tl.store(dc + at * Q + i, tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0), mask=members)


@triton.jit(do_not_specialize=LENGTHS)
def key_grad_kernel(
    q,
    k,
    g,
    beta,
    do,
    segment,
    written,
    d_right,
    states,
    d_states,
    d_reads,
    d_lower,
    dq,
    dk,
    dg,
    shares,
    seqlen,
    nheads,
    d_k,
    d_v,
    q_strides,
    k_strides,
    do_strides,
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
    """K columns of dq and dk of one chunk and head; with decays per channel dg of these, else their share of
    the cotangent of c: ``shares`` (NK, batch, nheads, chunks * Q)."""
    index, head, batch, first, at, segment = place_of(segment, nheads, NK, HAS_RESET, Q)
    n = index * K + tl.arange(0, K)
    i = tl.arange(0, Q)
    place = first, seqlen, d_k, segment
    q = rows_of(q, q_strides, batch, head)
    k = rows_of(k, k_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    beta = beta + (batch * seqlen * nheads + head), nheads
    if not WIDE:
        chunks = tl.num_programs(0) // NK
        shares += ((index * tl.num_programs(2) + batch) * nheads + head) * chunks * Q + first
    square = at * (Q * Q) + (i[:, None] * Q + i[None, :])
    out = ((batch * seqlen + first) * nheads + head) * d_k + (i[:, None] * (nheads * d_k) + n[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        of_q = tl.zeros((Q, K), ACC)
        of_k = tl.zeros((Q, K), ACC)
        last_k = tl.zeros((Q, K), ACC)
        through = tl.zeros((K,), ACC)
        beta_ = scalars(beta, first, seqlen, members, Q, ACC)
        for term in range(0, NV):
            m = term * V + tl.arange(0, V)
            if document == 0:
                state = of_state(states, at, n, m, d_k, d_v, ACC)
                do_ = matrix(do, first, m, seqlen, d_v, members, Q, DOT)
                dv_ = of_chunk(d_right, at, m, d_v, members, Q, ACC) * beta_[:, None]
                transposed = tl.trans(state).to(DOT)
                of_q = tl.dot(do_, transposed, of_q, input_precision=PRECISION, out_dtype=ACC)
                of_k -= tl.dot(dv_.to(DOT), transposed, input_precision=PRECISION, out_dtype=ACC)
                if end == 0:
                    after = of_state(d_states, at, n, m, d_k, d_v, ACC)
                    through += tl.sum(state * after, axis=1)
            if document == end:
                u = of_chunk(written, at, m, d_v, members, Q, DOT)
                after = of_state(d_states, at, n, m, d_k, d_v, DOT)
                last_k = tl.dot(u, tl.trans(after), last_k, input_precision=PRECISION, out_dtype=ACC)
        goes_on, ends = members & (document == 0), members & (document == end)
        since = since_before(g, place, n, goes_on, WIDE, HAS_RESET, Q, ACC)
        until = until_end(g, place, n, ends, WIDE, HAS_RESET, Q, ACC)
        decay = chunk_decay(g, place, n, members, WIDE, HAS_RESET, Q, ACC)
        of_q = tl.where(members[:, None], of_q * since, 0.0)
        of_k = tl.where(members[:, None], of_k * since, 0.0)
        last_k = tl.where(members[:, None], last_k * until, 0.0)
        q_ = matrix(q, first, n, seqlen, d_k, members, Q, ACC)
        k_ = matrix(k, first, n, seqlen, d_k, members, Q, ACC)
        # what the state after the chunk has of c at the chunk's end, where the last document's sums end
        total = tl.sum(last_k * k_, axis=0) + through * decay
        at_end = (i == Q - 1) & (document == end)
        both = members[:, None] & members[None, :]
        ok = (members & (i < seqlen - first))[:, None] & (n < d_k)[None, :]
        if WIDE:
            decays = decaying(g, place, n, members, HAS_RESET, Q, ACC)
            wrote = (
                last_k  # as `of_k`, of what is written: the decays' cotangents have it with the other sign
            )
            for bits in range(0, LEVELS):
                left = to_middle(decays, bits, Q, ACC)
                corner = corners(bits, Q) & both
                left_q, left_k = (q_ * left).to(DOT), (k_ * left).to(DOT)
                pairs = tl.load(d_reads + square, mask=corner, other=0.0).to(DOT)
                of_q += left * tl.dot(pairs, left_k, input_precision=PRECISION, out_dtype=ACC)
                writes = tl.dot(tl.trans(pairs), left_q, input_precision=PRECISION, out_dtype=ACC)
                pairs = tl.load(d_lower + square, mask=corner, other=0.0).to(DOT)
                of_k += left * tl.dot(pairs, left_k, input_precision=PRECISION, out_dtype=ACC)
                writes = tl.dot(tl.trans(pairs), left_k, writes, input_precision=PRECISION, out_dtype=ACC)
                wrote += left * writes
            share = of_q * q_ + (of_k - wrote) * k_ + tl.where(at_end[:, None], total[None, :], 0.0)
            share = tl.cumsum(tl.where(members[:, None], share, 0.0), axis=0, reverse=True)
            share = tl.where(begins_of(segment, HAS_RESET, Q)[:, None], 0.0, share)
            tl.store(dg + out, share, mask=ok)
            # a token with itself: nothing decays
            diagonal = tl.load(d_reads + at * (Q * Q) + i * (Q + 1), mask=members, other=0.0)[:, None]
            of_q += diagonal * k_
            of_k += wrote + diagonal * q_
        else:
            share = tl.sum(of_q * q_ + (of_k - last_k) * k_, axis=1)
            share += tl.where(at_end, tl.sum(total, axis=0), 0.0)
            tl.store(shares + i, share, mask=members)
            q_ = matrix(q, first, n, seqlen, d_k, members, Q, DOT)
            k_ = matrix(k, first, n, seqlen, d_k, members, Q, DOT)
            pairs = tl.load(d_reads + square, mask=both, other=0.0).to(DOT)
            of_q = tl.dot(pairs, k_, of_q, input_precision=PRECISION, out_dtype=ACC)
            of_k = tl.dot(tl.trans(pairs), q_, of_k + last_k, input_precision=PRECISION, out_dtype=ACC)
            pairs = tl.load(d_lower + square, mask=both, other=0.0).to(DOT)
            of_k = tl.dot(pairs, k_, of_k, input_precision=PRECISION, out_dtype=ACC)
            of_k = tl.dot(tl.trans(pairs), k_, of_k, input_precision=PRECISION, out_dtype=ACC)
        tl.store(dq + out, of_q, mask=ok)
        tl.store(dk + out, of_k, mask=ok)


@triton.jit(do_not_specialize=LENGTHS)
def decay_grad_kernel(
    segment,
    dc,
    shares,
    dg,
    seqlen,
    nheads,
    HAS_RESET: tl.constexpr,
    Q: tl.constexpr,
    NK: tl.constexpr,
    ACC: tl.constexpr,
):
    """dg of one chunk and head: the sums of c's cotangent from each token of a document on."""
    _, head, batch, first, at, segment = place_of(segment, nheads, 1, HAS_RESET, Q)
    i = tl.arange(0, Q)
    tokens = at * Q + i
    per_block = tl.num_programs(2).to(tl.int64) * nheads * tl.num_programs(0) * Q
    out = dg + (batch * seqlen + first) * nheads + head + i * nheads
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        members = tokens_of(segment, document, HAS_RESET, Q)
        total = tl.load(dc + tokens, mask=members, other=0.0)
        for k in range(0, NK):
            total += tl.load(shares + k * per_block + tokens, mask=members, other=0.0)
        total = tl.cumsum(total, axis=0, reverse=True)
        total = tl.where(begins_of(segment, HAS_RESET, Q), 0.0, total)
        tl.store(out, total.to(ACC), mask=members & (i < seqlen - first))
