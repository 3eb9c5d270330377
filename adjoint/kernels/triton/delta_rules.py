"""Device functions, a kernel, and the sizes and constants of launches that Triton delta rules share.

A sequence is cut into chunks of Q tokens. If a chunk holds several documents, a kernel does its work for each
of them, with tokens of others read as 0 and their rows not written, so that no document gets a NaN or an
infinity of another. The first one continues from the state before the chunk, the last one gives the state
after it.

Parameters that are not obvious:

    *_strides: of batch, token and head; channels are dense
    segment: number of documents that have begun in the chunk up to each token, (batch, chunks * Q), None
        without documents
    place: (first token of the chunk, seqlen, d_k, segment at the chunk), for the functions of decays
    members: mask of the tokens of the document at work, (Q,)
    WIDE: whether each channel of the keys has a decay; Q: tokens of a chunk
    K, V: columns of keys and of values at once, NK, NV: how many times; LEVELS: log2 of Q
    DOT, PRECISION: type and precision of the matrix products; ACC: type of sums, float32 or float64
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.chunks import CHUNK
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import LENGTHS, chunk_left, rows_of

TL_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


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
def earlier_rows(rows, place, n, preceded, Q: tl.constexpr, TO: tl.constexpr):
    """Columns n of the token before each of a chunk's tokens, 0 for those that are not ``preceded``."""
    pointer, stride = rows
    return matrix((pointer - stride, stride), place[0], n, place[1] + 1, place[2], preceded, Q, TO)


@triton.jit
def later_rows(rows, place, n, followed, Q: tl.constexpr, TO: tl.constexpr):
    """Columns n of the token after each of a chunk's tokens, 0 for those that are not ``followed``."""
    pointer, stride = rows
    return matrix((pointer + stride, stride), place[0], n, place[1] - 1, place[2], followed, Q, TO)


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
        later = later_rows(g, place, n, members & (tl.arange(0, Q) < Q - 1), Q, ACC)
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
    return chunk_left(total, place[0] // Q, ACC)


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
def to_middle(decays, bits, Q: tl.constexpr, ACC: tl.constexpr, OWN: tl.constexpr = True):
    """Share that channels, whose logs are ``decays`` (Q, columns), keep between each token and the middle of
    its block of 2 * 2**bits: in the first half after the token, in the second up to it, without its own decay
    unless OWN. The product of two such is what is left from j to i, or to i - 1; both are exponentials of
    sums of at most 2**bits numbers of one sign."""
    i, t = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    second = (i >> bits) % 2 == 1
    between = (i >> bits == t >> bits) & ((t <= i) == second)
    if not OWN:
        between = between & (t != i)
    if ACC == tl.float64:  # noqa: SIM300 - the constexpr is what knows how to compare
        total = tl.dot(between.to(ACC), decays, input_precision="ieee", out_dtype=ACC)
    else:
        # TF32 in two parts: it has the first eleven bits of a number, and then the next eleven
        high = (decays.to(tl.int32, bitcast=True) & -8192).to(ACC, bitcast=True)
        total = tl.dot(between.to(ACC), decays - high, input_precision="tf32", out_dtype=ACC)
        total = tl.dot(between.to(ACC), high, total, input_precision="tf32", out_dtype=ACC)
    return tl.exp(total)


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
def cotangent_kernel(
    q,
    keys,
    g,
    do,
    segment,
    W,
    d_term,
    d_final,
    d_states,
    d_initial,
    seqlen,
    chunks,
    nheads,
    d_k,
    d_v,
    q_strides,
    keys_strides,
    do_strides,
    g_strides,
    HAS_FINAL: tl.constexpr,
    ADDS: tl.constexpr,
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
    one: V columns of one head, from the last chunk to the first.

    A token writes its row of `keys` times a term, which is its row of U + W S with ADDS, else of U - W S, S
    the state before the chunk. `d_term` is the term's cotangent, to which is added what the state after the
    chunk asks; with it dS = exp(c_end) dS_next + (exp(c) q)' do +- W' d_term.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * V + tl.arange(0, V)
    n = tl.arange(0, K)
    line = batch * nheads + head
    q = rows_of(q, q_strides, batch, head)
    keys = rows_of(keys, keys_strides, batch, head)
    do = rows_of(do, do_strides, batch, head)
    g = rows_of(g, g_strides, batch, head)
    state = state_blocks(d_final, line, m, d_k, d_v, HAS_FINAL, K, V, NK, ACC)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        at = line * chunks + chunk
        first = tl.full((), Q, tl.int64) * chunk
        documents = segment_of(segment, batch * chunks + chunk, HAS_RESET, Q)
        place = first, seqlen, d_k, documents
        end = documents_of(documents, HAS_RESET, Q)[1]
        all_tokens = tl.full((Q,), 1, tl.int1)
        goes_on = tokens_of(documents, 0, HAS_RESET, Q)
        members = tokens_of(documents, end, HAS_RESET, Q)
        requested = tl.zeros((Q, V), ACC)
        for block in tl.static_range(NK):
            j = block * K + n
            store_state(d_states, at, state[block], j, m, d_k, d_v)
            until = until_end(g, place, j, members, WIDE, HAS_RESET, Q, ACC)
            keys_ = matrix(keys, first, j, seqlen, d_k, members, Q, ACC) * until
            requested = tl.dot(
                keys_.to(DOT), state[block].to(DOT), requested, input_precision=PRECISION, out_dtype=ACC
            )
        d_ = of_chunk(d_term, at, m, d_v, all_tokens, Q, ACC) + tl.where(members[:, None], requested, 0.0)
        store_chunk(d_term, at, d_, m, d_v, all_tokens, Q)
        d_ = tl.where(goes_on[:, None], d_, 0.0).to(DOT)
        do_ = matrix(do, first, m, seqlen, d_v, goes_on, Q, DOT)
        before = ()
        for block in tl.static_range(NK):
            j = block * K + n
            decay = chunk_decay(g, place, j, goes_on, WIDE, HAS_RESET, Q, ACC)
            carried = tl.where(end == 0, state[block] * (decay[:, None] if WIDE else decay), 0.0)
            since = since_before(g, place, j, goes_on, WIDE, HAS_RESET, Q, ACC)
            q_ = matrix(q, first, j, seqlen, d_k, goes_on, Q, ACC) * since
            term = tl.dot(tl.trans(q_).to(DOT), do_, carried, input_precision=PRECISION, out_dtype=ACC)
            w = of_chunk(W, at, j, d_k, goes_on, Q, DOT)
            if ADDS:
                term = tl.dot(tl.trans(w), d_, term, input_precision=PRECISION, out_dtype=ACC)
            else:
                term -= tl.dot(tl.trans(w), d_, input_precision=PRECISION, out_dtype=ACC)
            before = before + (term,)  # noqa: RUF005
        state = before
    for block in tl.static_range(NK):
        store_state(d_initial, line, state[block], block * K + n, m, d_k, d_v)


class DeltaRuleCall:
    """Sizes, constants and grids that the kernels of one call share.

    The class attributes are, by the size of the inputs' elements, columns of keys and of values that a
    program takes at once (WIDE ones with a decay for each channel, in `constants` and `grad_constants`; in
    the latter also with resets; STATE ones in the loops from chunk to chunk), warps of a program, and stages
    of those loops. Those of 16-bit inputs are the fastest of some twenty that an H200 has run with keys and
    values of 128 channels, though some spill registers; the others are reasoned from the compiled code: with
    blocks of 128 instead of 32 keys, float32's loops from chunk to chunk have half the instructions and spill
    tens of bytes instead of thousands.

    Attributes:
        constants: of kernels that do all chunks at once.
        state_constants: of those that go from chunk to chunk, each with some columns of a head's state.
        grad_constants: of the kernel of keys' and queries' gradients, which holds most.
        system_constants: of that of the triangular systems' gradients.
        segment: see above.
        sizes, walk: arguments of the kernels of all chunks, and of those that go from chunk to chunk.
    """

    KEYS: ClassVar[dict[int, int]] = {2: 64, 4: 32, 8: 16}
    WIDE_KEYS: ClassVar[dict[int, int]] = {2: 64, 4: 16, 8: 16}
    GRAD_KEYS: ClassVar[dict[int, int]] = {2: 64, 4: 32, 8: 16}
    WIDE_GRAD_KEYS: ClassVar[dict[int, int]] = {2: 32, 4: 32, 8: 16}
    STATE_KEYS: ClassVar[dict[int, int]] = {2: 64, 4: 128, 8: 16}
    VALUES: ClassVar[dict[int, int]] = {2: 64, 4: 32, 8: 16}
    SYSTEM_VALUES: ClassVar[dict[int, int]] = {2: 64, 4: 16, 8: 16}
    STATE_VALUES: ClassVar[dict[int, int]] = {2: 16, 4: 16, 8: 16}  # the fewer, the more programs
    WARPS: ClassVar[dict[int, int]] = {2: 4, 4: 8, 8: 8}
    STATE_STAGES: ClassVar[dict[int, int]] = {2: 2, 4: 1, 8: 1}
    MAX_STAGED_KEY_BLOCKS = 2  # small GPUs' shared memory holds no more, nor decays per channel

    def __init__(self, k, v, reset, max_d_k: int, decay_per_channel: bool) -> None:
        self.batch, self.seqlen, self.nheads, self.d_k = k.shape
        self.d_v = v.shape[-1]
        if self.d_k > max_d_k:
            raise ValueError(
                f"d_k={self.d_k}: the Triton kernels of the delta rules take at most {max_d_k}; use "
                "fewer or backend='reference'"
            )
        size = v.element_size()
        self.acc = accumulate_dtype(v.dtype)
        self.chunks = triton.cdiv(self.seqlen, CHUNK)
        keys, values = (max(16, triton.next_power_of_2(width)) for width in (self.d_k, self.d_v))
        columns = min(self.STATE_KEYS[size], keys)
        self.values = min(self.VALUES[size], values)
        self.state_values = min(self.STATE_VALUES[size], self.values)
        products = {2: "tf32", 4: "tf32x3", 8: "ieee"}[size]
        blocks_of_keys = triton.cdiv(self.d_k, columns)
        is_staged = not decay_per_channel and blocks_of_keys <= self.MAX_STAGED_KEY_BLOCKS
        self.state_constants: dict[str, object] = {
            **common.has_flags(RESET=reset),
            "Q": CHUNK,
            "K": columns,
            "V": self.state_values,
            "NK": blocks_of_keys,
            "LEVELS": CHUNK.bit_length() - 1,
            "DOT": TL_TYPES[v.dtype],
            "PRECISION": products,
            "ACC": common.tl_dtype(v.dtype),
            "num_warps": self.WARPS[size],
            "num_stages": self.STATE_STAGES[size] if is_staged else 1,
        }
        columns = min(self.KEYS[size], keys)
        if decay_per_channel:  # two blocks at least: with one, three kernels spill kilobytes
            columns = min(columns, self.WIDE_KEYS[size], max(16, keys // 2))
        blocks = {"V": self.values, "NV": triton.cdiv(self.d_v, self.values)}
        blocks |= {"K": columns, "NK": triton.cdiv(self.d_k, columns)}
        self.constants = self.state_constants | blocks | {"num_stages": 1}
        columns_of_values = min(self.values, self.SYSTEM_VALUES[size])
        blocks = {"V": columns_of_values, "NV": triton.cdiv(self.d_v, columns_of_values)}
        self.system_constants = self.constants | blocks
        has_less_room = decay_per_channel or reset is not None
        columns = min(columns, (self.WIDE_GRAD_KEYS if has_less_room else self.GRAD_KEYS)[size])
        self.grad_constants = self.constants | {"K": columns, "NK": triton.cdiv(self.d_k, columns)}
        self.segment = None
        if reset is not None:
            begins = torch.nn.functional.pad(reset, (0, self.chunks * CHUNK - self.seqlen))
            counts = begins.view(self.batch, self.chunks, -1).cumsum(-1, dtype=torch.int32)
            self.segment = counts.view(self.batch, -1)
        self.sizes = (self.seqlen, self.nheads, self.d_k, self.d_v)
        self.walk = (self.seqlen, self.chunks, *self.sizes[1:])

    def grid(self, blocks: int = 1) -> tuple[int, int, int]:
        """Programs: so many for each chunk, each head and row."""
        return self.chunks * blocks, self.nheads, self.batch

    def columns(self) -> tuple[int, int, int]:
        """Programs that go from chunk to chunk: each some columns of a head's state."""
        return triton.cdiv(self.d_v, self.state_values), self.nheads, self.batch

    def empty(self, like, *shape):
        """Uninitialised memory for sums, (batch, nheads, *shape)."""
        return torch.empty((self.batch, self.nheads, *shape), dtype=self.acc, device=like.device)
