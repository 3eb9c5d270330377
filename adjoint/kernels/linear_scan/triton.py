"""The plain linear scan ``h_t = a_t h_{t-1} + b_t`` in Triton: a diagonal (batch, seqlen, N) or scalar
(batch, seqlen, 1).

    mu_t = dh_t + a_{t+1} mu_{t+1},   da_t = mu_t h_{t-1},   db_t = mu_t

Bandwidth is all it costs, so a thread owns one channel and walks its split of the sequence with a few loads
in flight; a scalar decay is read once a token, never expanded. The windowed backward: blocks
of ``window`` tokens, a suffix scan inside each, joined with the prefix scan of the next; nothing is
subtracted or divided. Blocks are counted from the token before the first, whose windowed adjoint state is the
initial state's gradient.

Proven under the interpreter and by compilation; not measured on a GPU: tokens loaded at once, channels a
program and the shortest split are reasoned, not tuned.

Parameters of the kernels that are not obvious:

    *_b, *_t: strides of batch and token; states are dense
    h_in, c_in: state, and a_t mu_t, at the entry of each split; h_out, c_out: those at its other end
    decay: product of a split's decays; prefix: see `_prefix_kernel`
    split_len: tokens of a split; SCALAR: one decay for all states; UNROLL: tokens loaded at once
    ACC: type of states and sums, see `state_dtype`
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import begins_at, over_edge, times_decay

CHANNELS = 32  # a program: one warp, one channel a thread
UNROLL = 8  # tokens loaded at once
UNIT = 64  # split lengths are multiples of this
SHORTEST_SPLIT = 256
PER_SM = 32


@triton.jit(do_not_specialize=common.LENGTHS)
def _forward_kernel(
    a,
    b,
    h_in,
    reset,
    h,
    h_out,
    decay,
    seqlen,
    size,
    split_len,
    a_b,
    a_t,
    b_b,
    b_t,
    LOCAL: tl.constexpr,
    SCALAR: tl.constexpr,
    HAS_INIT: tl.constexpr,
    HAS_RESET: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """One split. LOCAL: from zero, only the local final state and the product of a. Else: h."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < size
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    a += batch * a_b
    b += batch * b_b
    if HAS_RESET:
        reset += batch * seqlen
    edge = (batch * tl.num_programs(1) + split) * size + d
    state = tl.zeros((CHANNELS,), ACC)
    if HAS_INIT:
        state = tl.load(h_in + edge, mask=ok, other=0.0).to(ACC)
    product = tl.full((CHANNELS,), 1.0, ACC)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        decays = ()
        inputs = ()
        begins = ()
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            inside = t < stop
            if SCALAR:
                a_ = tl.load(a + t * a_t, mask=inside, other=1.0).to(ACC) + tl.zeros((CHANNELS,), ACC)
            else:
                a_ = tl.load(a + t * a_t + d, mask=ok & inside, other=1.0).to(ACC)
            begins = begins + (begins_at(reset, t, inside, HAS_RESET),)
            decays = decays + (a_,)
            inputs = inputs + (tl.load(b + t * b_t + d, mask=ok & inside, other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            state = over_edge(decays[i] * state, begins[i], HAS_RESET) + inputs[i]
            if LOCAL:
                product = over_edge(product * decays[i], begins[i], HAS_RESET)
            else:
                tl.store(h + (batch * seqlen + t) * size + d, state, mask=ok & (t < stop))
    if LOCAL:
        tl.store(h_out + edge, state, mask=ok)
        tl.store(decay + edge, product, mask=ok)


@triton.jit(do_not_specialize=common.LENGTHS)
def _prefix_kernel(
    dh,
    a,
    reset,
    prefix,
    seqlen,
    size,
    split_len,
    window,
    dh_b,
    dh_t,
    a_b,
    a_t,
    SCALAR: tl.constexpr,
    HAS_RESET: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """For token i, the part of its window in the next block, up to that block's first decay: sum of g_t (a
    ... a)."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < size
    dh += batch * dh_b
    a += batch * a_b
    if HAS_RESET:
        reset += batch * seqlen
    first = split.to(tl.int64) * split_len - 1  # a block's first token; the blocks are anchored at token -1
    total = tl.zeros((CHANNELS,), ACC)
    product = tl.full((CHANNELS,), 1.0, ACC)
    for k in range(0, tl.minimum(split_len, seqlen - first)):
        i = first + k
        j = i + window
        if k % window == 0:
            total = tl.zeros((CHANNELS,), ACC)
        tl.store(prefix + (batch * seqlen + i) * size + d, total, mask=ok & (i >= 0))
        inside = j < seqlen
        if SCALAR:
            a_ = tl.load(a + j * a_t, mask=inside, other=0.0).to(ACC) + tl.zeros((CHANNELS,), ACC)
        else:
            a_ = tl.load(a + j * a_t + d, mask=ok & inside, other=0.0).to(ACC)
        if k % window == 0:
            product = tl.full((CHANNELS,), 1.0, ACC)
        else:
            product = over_edge(
                times_decay(a_, product, HAS_RESET), begins_at(reset, j, inside, HAS_RESET), HAS_RESET
            )
        g = tl.load(dh + j * dh_t + d, mask=ok & inside, other=0.0).to(ACC)
        total += times_decay(g, product, HAS_RESET)


@triton.jit(do_not_specialize=common.LENGTHS)
def _backward_kernel(
    dh,
    a,
    h,
    initial,
    reset,
    c_in,
    prefix,
    da,
    db,
    c_out,
    decay,
    seqlen,
    size,
    split_len,
    window,
    halo,
    dh_b,
    dh_t,
    a_b,
    a_t,
    LOCAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALAR: tl.constexpr,
    HAS_CIN: tl.constexpr,
    HAS_INIT: tl.constexpr,
    HAS_RESET: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """One split in reverse: mu_t = dh_t + c, c = a_t mu_t. LOCAL: from c = 0, only its end and the product
    of a."""
    split, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block, n_blocks = tl.program_id(0), tl.num_programs(0)
    d = block * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < size
    # Windowed splits are whole blocks, which are anchored at token -1.
    first = split.to(tl.int64) * split_len
    if WINDOWED:
        first -= 1
    stop = tl.minimum(first + split_len, seqlen)
    first = tl.maximum(first, 0)
    dh += batch * dh_b
    a += batch * a_b
    if HAS_RESET:
        reset += batch * seqlen
    rows = batch * seqlen
    edge = (batch * tl.num_programs(1) + split) * size + d
    c = tl.zeros((CHANNELS,), ACC)
    if HAS_CIN:
        c = tl.load(c_in + edge, mask=ok, other=0.0).to(ACC)
    product = tl.full(
        (CHANNELS,), 1.0, ACC
    )  # of a over the split; windowed: of a from the token to the next block's first
    if WINDOWED:
        beyond = stop < seqlen
        if SCALAR:
            product *= tl.load(a + stop * a_t, mask=beyond, other=1.0).to(ACC)
        else:
            product = tl.load(a + stop * a_t + d, mask=ok & beyond, other=1.0).to(ACC)
        product = over_edge(product, begins_at(reset, stop, beyond, HAS_RESET), HAS_RESET)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        decays = ()
        grads = ()
        befores = ()
        begins = ()
        for i in tl.static_range(UNROLL):
            t = stop - 1 - group * UNROLL - i
            inside = t >= first
            if SCALAR:
                a_ = tl.load(a + t * a_t, mask=inside, other=1.0).to(ACC) + tl.zeros((CHANNELS,), ACC)
            else:
                a_ = tl.load(a + t * a_t + d, mask=ok & inside, other=1.0).to(ACC)
            begins = begins + (begins_at(reset, t, inside, HAS_RESET),)
            decays = decays + (a_,)
            grads = grads + (tl.load(dh + t * dh_t + d, mask=ok & inside, other=0.0).to(ACC),)
            if not LOCAL:
                before = tl.load(h + (rows + t - 1) * size + d, mask=ok & inside & (t > 0), other=0.0).to(ACC)
                if HAS_INIT:
                    before += tl.load(initial + batch * size + d, mask=ok & (t == 0), other=0.0).to(ACC)
                befores = befores + (over_edge(before, begins[i], HAS_RESET),)
        for i in tl.static_range(UNROLL):
            t = stop - 1 - group * UNROLL - i
            inside = t >= first
            mu = grads[i] + c
            c_ = over_edge(decays[i] * mu, begins[i], HAS_RESET)
            if WINDOWED:
                tail = tl.load(prefix + (rows + t) * size + d, mask=ok & inside, other=0.0)
                mu += times_decay(tail, product, HAS_RESET)
                block_begins = ((t + 1) % window == 0) & inside
                c = tl.where(block_begins, 0.0, c_)
                product = tl.where(block_begins, decays[i], product * decays[i])
            else:
                c = c_
                product = product * decays[i]
            product = over_edge(product, begins[i], HAS_RESET)
            if not LOCAL:
                mu = tl.where(t < seqlen - halo, mu, 0.0)
                tl.store(db + (rows + t) * size + d, mu, mask=ok & inside)
                if SCALAR:
                    tl.store(
                        da + (batch * n_blocks + block) * seqlen + t,
                        tl.sum(mu * befores[i], axis=0),
                        mask=inside,
                    )
                else:
                    tl.store(da + (rows + t) * size + d, mu * befores[i], mask=ok & inside)
    if LOCAL:
        tl.store(decay + edge, product, mask=ok)
        tl.store(c_out + edge, c, mask=ok)
    else:
        tl.store(c_out + batch * size + d, c, mask=ok & (split == 0))


def _splits(x: torch.Tensor, batch: int, seqlen: int, blocks: int, window: int | None) -> tuple[int, int]:
    """(tokens a split, number of splits); with a window a split is whole blocks, counted from token -1."""
    programs_at_once = common.programs_that_fill(x, PER_SM)
    unit = UNIT if window is None else window
    length = common.split_length(seqlen, batch * blocks, programs_at_once, unit, SHORTEST_SPLIT)
    return length, triton.cdiv(seqlen + (window is not None), length)


def state_dtype(dtype: torch.dtype, window: int | None = None) -> torch.dtype:
    """Return the dtype of states inside of a scan: float64 for float32, float32 for half precision.

    With decays near 1 the rounding of a float32 state would add up over all tokens. Multiplications take
    less time than reading, in float64 too. With a window nothing lasts, and prefix sums would take twice the
    memory."""
    return torch.float64 if dtype == torch.float32 and window is None else accumulate_dtype(dtype)


def linear_scan_forward(
    a: torch.Tensor, b: torch.Tensor, initial_state: torch.Tensor | None, reset: torch.Tensor | None
) -> torch.Tensor:
    """h (batch, seqlen, N) of ``h_t = a_t h_{t-1} + b_t`` for b of that shape and a (batch, seqlen, N) or
    (batch, seqlen, 1).

    initial_state (batch, N) or None (zero); reset (batch, seqlen) bool or None: True takes a_t as 0. h has
    b's dtype, the running state that of `state_dtype`."""
    batch, seqlen, size = b.shape
    a, b = common.last_contiguous(a), common.last_contiguous(b)
    acc = state_dtype(b.dtype)
    scalar = a.shape[-1] == 1
    blocks = triton.cdiv(size, CHANNELS)
    split_len, splits = _splits(b, batch, seqlen, blocks, None)
    h = torch.empty((batch, seqlen, size), dtype=b.dtype, device=b.device)
    h_in = None if initial_state is None else initial_state.to(acc).contiguous()
    reset_u8 = common.reset_bytes(reset)

    def launch(state: torch.Tensor | None, h_out: torch.Tensor | None, decay: torch.Tensor | None) -> None:
        _forward_kernel[(blocks, splits, batch)](
            *(a, b, state, reset_u8, h, h_out, decay),
            *(seqlen, size, split_len, *common.strides(a, b)),
            LOCAL=decay is not None,
            SCALAR=scalar,
            **common.has_flags(INIT=state, RESET=reset),
            UNROLL=UNROLL,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(acc),
            num_warps=1,
        )

    with common.on_device(b):
        if splits > 1:
            local = torch.empty((batch, splits, size), dtype=acc, device=b.device)
            decay = torch.empty_like(local)
            launch(None, local, decay)
            h_in, _ = common.pass_states(local, decay, h_in, reset is not None, reverse=False)
        launch(h_in, None, None)
    return h


def linear_scan_backward(
    dh: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    window: int | None,
    halo: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(da, db, dinitial_state) of :func:`linear_scan_forward`: ``mu_t = dh_t + a_{t+1} mu_{t+1}``, db = mu,
    da = mu h_{t-1}.

    ``window`` = W keeps the terms of tokens t … t+W-1 in mu_t; the last ``halo`` tokens get zero gradients.
    dinitial_state (batch, N) is in float32 (float64 for float64).
    """
    batch, seqlen, size = h.shape
    dh, a, h = common.last_contiguous(dh), common.last_contiguous(a), h.contiguous()
    scalar = a.shape[-1] == 1
    if window is not None and window > seqlen:  # the initial state counts as one more token
        window = None
    acc, result = state_dtype(h.dtype, window), accumulate_dtype(h.dtype)
    blocks = triton.cdiv(size, CHANNELS)
    split_len, splits = _splits(h, batch, seqlen, blocks, window)
    initial = None if initial_state is None else initial_state.contiguous()
    reset_u8 = common.reset_bytes(reset)
    db = torch.empty((batch, seqlen, size), dtype=h.dtype, device=h.device)
    da_shape = (batch, blocks, seqlen) if scalar else (batch, seqlen, size)
    da = torch.empty(da_shape, dtype=result if scalar else a.dtype, device=h.device)
    dinitial = torch.empty((batch, size), dtype=result, device=h.device)
    prefix = None
    if window is not None:
        prefix = torch.empty((batch, seqlen, size), dtype=acc, device=h.device)

    def launch(c: torch.Tensor | None, c_out: torch.Tensor, decay: torch.Tensor | None) -> None:
        _backward_kernel[(blocks, splits, batch)](
            *(dh, a, h, initial, reset_u8, c, prefix, da, db, c_out, decay),
            *(seqlen, size, split_len, window or 0, halo, *common.strides(dh, a)),
            LOCAL=decay is not None,
            WINDOWED=window is not None,
            SCALAR=scalar,
            **common.has_flags(CIN=c, INIT=initial, RESET=reset),
            UNROLL=UNROLL,
            CHANNELS=CHANNELS,
            ACC=common.tl_dtype(acc),
            num_warps=1,
        )

    with common.on_device(h):
        carried = None
        if window is not None:
            _prefix_kernel[(blocks, splits, batch)](
                *(dh, a, reset_u8, prefix, seqlen, size, split_len, window, *common.strides(dh, a)),
                SCALAR=scalar,
                **common.has_flags(RESET=reset),
                CHANNELS=CHANNELS,
                ACC=common.tl_dtype(acc),
                num_warps=1,
            )
        elif splits > 1:
            local = torch.empty((batch, splits, size), dtype=acc, device=h.device)
            decay = torch.empty_like(local)
            launch(None, local, decay)
            carried, _ = common.pass_states(local, decay, None, reset is not None, reverse=True)
        launch(carried, dinitial, None)
    return (da.sum(1).to(a.dtype)[..., None] if scalar else da), db, dinitial
