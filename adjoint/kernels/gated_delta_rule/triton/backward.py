"""Backward kernels of the gated delta rule in Triton (launched by `launch`).

T, U, W and what is written are made again from the inputs and the states before the chunks. The cotangent
of the states then goes through the chunks from the last to the first (`cotangent_kernel`), and everything
else is again of all chunks at once: through the triangular system (`system_grad_kernel`), through keys,
queries and states (`key_grad_kernel`), and through the decays, whose running sums turn round
(`decay_grad_kernel`).
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from adjoint.kernels.gated_delta_rule.triton.forward import (
    begins_of,
    corners,
    decaying,
    documents_of,
    matrix,
    of_state,
    pair_decays,
    products,
    scalars,
    since_before,
    to_middle,
    tokens_of,
    until_end,
    whole_decay,
)
from adjoint.kernels.triton.common import LENGTHS


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
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    do_b,
    do_t,
    do_h,
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
    """V columns of what is written in a chunk, and of its cotangent so far as the chunk's own outputs read
    it: (batch, nheads, chunks * Q, d_v) each."""
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
    do += batch * do_b + head * do_h
    g += batch * g_b + head * g_h
    at = (batch * nheads + head) * chunks + chunk
    out = at * Q * d_v + (i[:, None] * d_v + m[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        ok = own[:, None] & (m < d_v)[None, :]
        u = matrix(U + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, ACC)
        if document == 0:
            for block in range(0, NK):
                n = block * K + tl.arange(0, K)
                w = matrix(W + at * Q * d_k, 0, n, d_k, Q, d_k, own, Q, DOT)
                state = of_state(states + at * (d_k * d_v), n, m, d_k, d_v, DOT)
                u -= tl.dot(w, state, input_precision=PRECISION, out_dtype=ACC)
        tl.store(written + out, u, mask=ok)
        weights = products(
            *(q, k, g, first, q_t, k_t, g_t, seqlen, d_k, own, segment),
            *(WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC),
        )
        decays = pair_decays(g, first, g_t, seqlen, own, segment, WIDE, HAS_RESET, Q, ACC)
        weights = tl.where(decays > 0.0, weights * decays, 0.0).to(DOT)
        do_ = matrix(do, first, m, do_t, seqlen, d_v, own, Q, DOT)
        part = tl.dot(tl.trans(weights), do_, input_precision=PRECISION, out_dtype=ACC)
        tl.store(d_written + out, part, mask=ok)


@triton.jit(do_not_specialize=LENGTHS)
def cotangent_kernel(
    q,
    k,
    g,
    do,
    segment,
    W,
    d_written,
    d_final,
    d_states,
    d_initial,
    seqlen,
    chunks,
    nheads,
    d_k,
    d_v,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    do_b,
    do_t,
    do_h,
    g_b,
    g_t,
    g_h,
    HAS_FINAL: tl.constexpr,
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
    """The cotangents of the states after each chunk, (batch, nheads, chunks, d_k, d_v), and of the initial
    one; to `d_written` is added what the state after the chunk asks: V columns of one head."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * V + tl.arange(0, V)
    i, n = tl.arange(0, Q), tl.arange(0, K)
    size = d_k * d_v
    line = batch * nheads + head
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    do += batch * do_b + head * do_h
    g += batch * g_b + head * g_h
    state = ()
    for block in tl.static_range(NK):
        if HAS_FINAL:
            part = of_state(d_final + line * size, block * K + n, m, d_k, d_v, ACC)
        else:
            part = tl.zeros((K, V), ACC)
        state = state + (part,)  # noqa: RUF005
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        at = line * chunks + chunk
        first = tl.full((), Q, tl.int64) * chunk
        if HAS_RESET:
            here = segment + (batch * chunks + chunk) * Q
        else:
            here = segment
        end = documents_of(here, HAS_RESET, Q)[1]
        everything = tl.full((Q,), 1, tl.int1)
        goes_on = tokens_of(here, 0, HAS_RESET, Q)
        own = tokens_of(here, end, HAS_RESET, Q)
        asked = tl.zeros((Q, V), ACC)
        for block in tl.static_range(NK):
            j = block * K + n
            ok = (j < d_k)[:, None] & (m < d_v)[None, :]
            tl.store(d_states + at * size + (j[:, None] * d_v + m[None, :]), state[block], mask=ok)
            until = until_end(g, first, j, g_t, seqlen, d_k, own, here, WIDE, HAS_RESET, Q, ACC)
            k_ = matrix(k, first, j, k_t, seqlen, d_k, own, Q, ACC) * until
            asked = tl.dot(k_.to(DOT), state[block].to(DOT), asked, input_precision=PRECISION, out_dtype=ACC)
        out = d_written + at * Q * d_v
        dw = matrix(out, 0, m, d_v, Q, d_v, everything, Q, ACC) + tl.where(own[:, None], asked, 0.0)
        tl.store(out + (i[:, None] * d_v + m[None, :]), dw, mask=(i < Q)[:, None] & (m < d_v)[None, :])
        dw = tl.where(goes_on[:, None], dw, 0.0).to(DOT)
        do_ = matrix(do, first, m, do_t, seqlen, d_v, goes_on, Q, DOT)
        before = ()
        for block in tl.static_range(NK):
            j = block * K + n
            whole = whole_decay(g, first, j, g_t, seqlen, d_k, goes_on, here, WIDE, HAS_RESET, Q, ACC)
            kept = tl.where(end == 0, state[block] * (whole[:, None] if WIDE else whole), 0.0)
            since = since_before(g, first, j, g_t, seqlen, d_k, goes_on, here, WIDE, HAS_RESET, Q, ACC)
            q_ = matrix(q, first, j, q_t, seqlen, d_k, goes_on, Q, ACC) * since
            part = tl.dot(tl.trans(q_).to(DOT), do_, kept, input_precision=PRECISION, out_dtype=ACC)
            w = matrix(W + at * Q * d_k, 0, j, d_k, Q, d_k, goes_on, Q, DOT)
            part -= tl.dot(tl.trans(w), dw, input_precision=PRECISION, out_dtype=ACC)
            before = before + (part,)  # noqa: RUF005
        state = before
    for block in tl.static_range(NK):
        j = block * K + n
        ok = (j < d_k)[:, None] & (m < d_v)[None, :]
        tl.store(d_initial + line * size + (j[:, None] * d_v + m[None, :]), state[block], mask=ok)


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
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    do_b,
    do_t,
    do_h,
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
    """Of one chunk and head: dv and dbeta; ``d_right``, the cotangent of v - S k times beta, (batch, nheads,
    chunks * Q, d_v); ``d_reads`` and ``d_lower``, those of q_i . k_j and k_i . k_j, (batch, nheads, chunks,
    Q, Q), or with decays per channel those of what is left of them; and for one decay per head the share of
    pairs in the cotangent of c, ``dc`` (batch, nheads, chunks * Q)."""
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    first, i = chunk * Q, tl.arange(0, Q)
    if HAS_RESET:
        segment += (batch * chunks + chunk) * Q
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    do += batch * do_b + head * do_h
    g += batch * g_b + head * g_h
    beta += batch * seqlen * nheads + head
    at = (batch * nheads + head) * chunks + chunk
    square = at * (Q * Q) + (i[:, None] * Q + i[None, :])
    tokens = (batch * seqlen + first) * nheads + head
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        inside = own & (i < seqlen - first)
        beta_ = scalars(beta, first, nheads, seqlen, own, Q, ACC)
        both = own[:, None] & own[None, :]
        solved = tl.load(inverses + square, mask=both, other=0.0).to(DOT)
        reads = tl.zeros((Q, Q), ACC)
        lower = tl.zeros((Q, Q), ACC)
        of_beta = tl.zeros((Q,), ACC)
        for block in range(0, NV):
            m = block * V + tl.arange(0, V)
            here = at * Q * d_v + (i[:, None] * d_v + m[None, :])
            ok = own[:, None] & (m < d_v)[None, :]
            dw = matrix(d_written + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, DOT)
            right = tl.dot(tl.trans(solved), dw, input_precision=PRECISION, out_dtype=ACC)
            tl.store(d_right + here, right, mask=ok)
            into = tokens * d_v + (i[:, None] * (nheads * d_v) + m[None, :])
            tl.store(dv + into, right * beta_[:, None], mask=inside[:, None] & (m < d_v)[None, :])
            u = matrix(written + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, DOT)
            do_ = matrix(do, first, m, do_t, seqlen, d_v, own, Q, DOT)
            reads = tl.dot(do_, tl.trans(u), reads, input_precision=PRECISION, out_dtype=ACC)
            lower -= tl.dot(right.to(DOT), tl.trans(u), input_precision=PRECISION, out_dtype=ACC)
            residual = matrix(v, first, m, v_t, seqlen, d_v, own, Q, ACC)
            if document == 0:
                for part in range(0, NK):
                    n = part * K + tl.arange(0, K)
                    since = since_before(g, first, n, g_t, seqlen, d_k, own, segment, WIDE, HAS_RESET, Q, ACC)
                    k_ = (matrix(k, first, n, k_t, seqlen, d_k, own, Q, ACC) * since).to(DOT)
                    state = of_state(states + at * (d_k * d_v), n, m, d_k, d_v, DOT)
                    read = tl.dot(k_, state, input_precision=PRECISION, out_dtype=ACC)
                    residual -= tl.where(own[:, None], read, 0.0)
            of_beta += tl.sum(right * residual, axis=1)
        decays = pair_decays(g, first, g_t, seqlen, own, segment, WIDE, HAS_RESET, Q, ACC)
        pair = (i[:, None] >= i[None, :]) & both
        below = (i[:, None] > i[None, :]) & both
        reads = tl.where(pair, reads * decays, 0.0)
        lower = tl.where(below, lower * decays, 0.0)
        tl.store(d_reads + square, reads, mask=own[:, None])
        tl.store(d_lower + square, lower * beta_[:, None], mask=own[:, None])
        grams = products(
            *(k, k, g, first, k_t, k_t, g_t, seqlen, d_k, own, segment),
            *(WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC),
        )
        lower = tl.where(below, lower * grams, 0.0)
        of_beta += tl.sum(lower, axis=1)
        tl.store(dbeta + tokens + i * nheads, of_beta, mask=inside)
        if not WIDE:
            grams = products(
                *(q, k, g, first, q_t, k_t, g_t, seqlen, d_k, own, segment),
                *(WIDE, HAS_RESET, Q, K, NK, LEVELS, DOT, PRECISION, ACC),
            )
            pairs = tl.where(pair, reads * grams, 0.0) + lower * beta_[:, None]
            # sums along i are of columns, in the other layout: by their own mask too
            tl.store(dc + at * Q + i, tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0), mask=own)


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
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    do_b,
    do_t,
    do_h,
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
    """K columns of dq and dk of one chunk and head; with decays per channel dg of these, else their share of
    the cotangent of c: ``shares`` (NK, batch, nheads, chunks * Q)."""
    chunk, head, batch = (
        (tl.program_id(0) // NK).to(tl.int64),
        tl.program_id(1),
        tl.program_id(2).to(tl.int64),
    )
    block = tl.program_id(0) % NK
    n = block * K + tl.arange(0, K)
    chunks = tl.num_programs(0) // NK
    first, i = chunk * Q, tl.arange(0, Q)
    if HAS_RESET:
        segment += (batch * chunks + chunk) * Q
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    do += batch * do_b + head * do_h
    g += batch * g_b + head * g_h
    beta += batch * seqlen * nheads + head
    at = (batch * nheads + head) * chunks + chunk
    if not WIDE:
        shares += ((block * tl.num_programs(2) + batch) * nheads + head) * chunks * Q + chunk * Q
    square = at * (Q * Q) + (i[:, None] * Q + i[None, :])
    out = ((batch * seqlen + first) * nheads + head) * d_k + (i[:, None] * (nheads * d_k) + n[None, :])
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        of_q = tl.zeros((Q, K), ACC)
        of_k = tl.zeros((Q, K), ACC)
        last_k = tl.zeros((Q, K), ACC)
        through = tl.zeros((K,), ACC)
        beta_ = scalars(beta, first, nheads, seqlen, own, Q, ACC)
        for part in range(0, NV):
            m = part * V + tl.arange(0, V)
            if document == 0:
                state = of_state(states + at * (d_k * d_v), n, m, d_k, d_v, ACC)
                do_ = matrix(do, first, m, do_t, seqlen, d_v, own, Q, DOT)
                dv_ = matrix(d_right + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, ACC) * beta_[:, None]
                turned = tl.trans(state).to(DOT)
                of_q = tl.dot(do_, turned, of_q, input_precision=PRECISION, out_dtype=ACC)
                of_k -= tl.dot(dv_.to(DOT), turned, input_precision=PRECISION, out_dtype=ACC)
                if end == 0:
                    after = of_state(d_states + at * (d_k * d_v), n, m, d_k, d_v, ACC)
                    through += tl.sum(state * after, axis=1)
            if document == end:
                u = matrix(written + at * Q * d_v, 0, m, d_v, Q, d_v, own, Q, DOT)
                after = of_state(d_states + at * (d_k * d_v), n, m, d_k, d_v, DOT)
                last_k = tl.dot(u, tl.trans(after), last_k, input_precision=PRECISION, out_dtype=ACC)
        goes_on, ends = own & (document == 0), own & (document == end)
        since = since_before(g, first, n, g_t, seqlen, d_k, goes_on, segment, WIDE, HAS_RESET, Q, ACC)
        until = until_end(g, first, n, g_t, seqlen, d_k, ends, segment, WIDE, HAS_RESET, Q, ACC)
        whole = whole_decay(g, first, n, g_t, seqlen, d_k, own, segment, WIDE, HAS_RESET, Q, ACC)
        of_q = tl.where(own[:, None], of_q * since, 0.0)
        of_k = tl.where(own[:, None], of_k * since, 0.0)
        last_k = tl.where(own[:, None], last_k * until, 0.0)
        q_ = matrix(q, first, n, q_t, seqlen, d_k, own, Q, ACC)
        k_ = matrix(k, first, n, k_t, seqlen, d_k, own, Q, ACC)
        # what the state after the chunk has of c at the chunk's end, where the last document's sums end
        total = tl.sum(last_k * k_, axis=0) + through * whole
        at_end = (i == Q - 1) & (document == end)
        both = own[:, None] & own[None, :]
        ok = (own & (i < seqlen - first))[:, None] & (n < d_k)[None, :]
        if WIDE:
            decays = decaying(g, first, n, g_t, seqlen, d_k, own, segment, HAS_RESET, Q, ACC)
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
            share = tl.cumsum(tl.where(own[:, None], share, 0.0), axis=0, reverse=True)
            share = tl.where(begins_of(segment, HAS_RESET, Q)[:, None], 0.0, share)
            tl.store(dg + out, share, mask=ok)
            # a token with itself: nothing decays
            alone = tl.load(d_reads + at * (Q * Q) + i * (Q + 1), mask=own, other=0.0)[:, None]
            of_q += alone * k_
            of_k += wrote + alone * q_
        else:
            share = tl.sum(of_q * q_ + (of_k - last_k) * k_, axis=1)
            share += tl.where(at_end, tl.sum(total, axis=0), 0.0)
            tl.store(shares + i, share, mask=own)
            q_ = matrix(q, first, n, q_t, seqlen, d_k, own, Q, DOT)
            k_ = matrix(k, first, n, k_t, seqlen, d_k, own, Q, DOT)
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
    chunk, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    first, i = chunk * Q, tl.arange(0, Q)
    if HAS_RESET:
        segment += (batch * chunks + chunk) * Q
    here = ((batch * nheads + head) * chunks + chunk) * Q + i
    block = tl.num_programs(2).to(tl.int64) * nheads * chunks * Q
    out = dg + (batch * seqlen + first) * nheads + head + i * nheads
    begin, end = documents_of(segment, HAS_RESET, Q)
    for document in range(begin, end + 1):
        own = tokens_of(segment, document, HAS_RESET, Q)
        total = tl.load(dc + here, mask=own, other=0.0)
        for k in range(0, NK):
            total += tl.load(shares + k * block + here, mask=own, other=0.0)
        total = tl.cumsum(total, axis=0, reverse=True)
        total = tl.where(begins_of(segment, HAS_RESET, Q), 0.0, total)
        tl.store(out, total.to(ACC), mask=own & (i < seqlen - first))
