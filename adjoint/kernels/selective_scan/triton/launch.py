"""Selective scan (Mamba-1) in Triton: the forward/backward pair behind ``adjoint.selective_scan``.

The kernels are in `forward`, `backward` and, for windows and halos, `window`;
here are their launches: shapes, buffers, how the sequence is split. Nothing here waits for the device or
depends on values, so a call can be captured in a CUDA graph. All sums over channels and splits go through
partial buffers added up in a fixed order: the same call gives the same bits.

Proven under the interpreter and by compilation (up to d_state 128 nothing spills for sm_80 and sm_90, but for
the backward at d_state 16 on sm_80, outside its loops over tokens); not measured on a GPU. Reasoned,
not tuned: 64 tokens between checkpoints, tokens held in registers,
registers a thread, as many splits as run at once and not one more (one: no pass over splits), the shortest
split, the backward's scratch, about 43 KiB a program at d_state 16, staying in cache for the most part, and,
above d_state 32, several warps a program, whose sums over states then go through shared memory
once a token. With a window splits are whole windows, so that one of half the sequence leaves two splits, and
a halo without a window none.
"""

from __future__ import annotations

import torch
import triton

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import registered
from adjoint.kernels.selective_scan.triton import backward as backward_kernels
from adjoint.kernels.selective_scan.triton import forward as forward_kernels
from adjoint.kernels.selective_scan.triton import saved_states as saved
from adjoint.kernels.selective_scan.triton import window as windowed_kernels
from adjoint.kernels.selective_scan.triton.saved_states import selective_scan_saved_shape
from adjoint.kernels.triton import common

SPAN = 8  # tokens of which the backward does at once what is not by states
UNROLL = 4  # tokens the forward walks at once
STRETCHES_TOGETHER = 32  # whose dA, dD and dbias are one float32 sum: longer ones would lose digits
SHORTEST_SPLIT = 128  # tokens; a shorter split is not worth its share of the pass over splits
MOST_CHANNELS = 256  # over which a backward program sums dB and dC
# Writing a program's dB and dC and reading them again takes about this share of a block of channels' time.
SHARE_OF_SUMS = 1 / 16
SHARE_OF_PASS = 181 / 810  # of a block's time, the pass over splits: their instructions, as counted
# above, a warp's registers cannot hold the state
MAX_D_STATE = registered("selective_scan").limits("triton")["d_state"]
# Registers a thread may take: ptxas, left to itself, takes a few more or makes kernels spill that need not.
# Of a backward with 168 twelve warps share a multiprocessor.
FORWARD_REGISTERS, BACKWARD_REGISTERS, MOST_REGISTERS = 128, 168, 255


def forward_tile(d_state: int) -> tuple[int, int, int]:
    """(padded d_state, channels, warps) of a forward program: 32 channels, fewer once a thread would hold
    over 32 states, and four warps where that leaves no 8."""
    n = triton.next_power_of_2(d_state)
    lanes = max(1024 // max(n, 32), 8)
    return n, lanes, max(n * lanes // 512, 1) if n > 128 else 1


def local_tile(d_state: int) -> tuple[int, int, int]:
    """The same for the passes that sum nothing over states, where a thread may hold a part of a channel's:
    16, for there are two or three values to each."""
    n = triton.next_power_of_2(d_state)
    return n, 32, max(n // 16, 1)


def backward_tile(d_state: int, window: bool) -> tuple[int, int, int, int, int]:
    """(padded d_state, rows, lanes, warps, steps) of a backward program: rows × 8 channels, 8 state elements
    a thread; with a window, whose prefixes are as many again, 4. ``steps``: tokens whose states it holds."""
    n = triton.next_power_of_2(d_state)
    if window:
        return n, 1, max(8, 32 // n), max(n // 16, 1), 2
    warps = max(n // (32 if n <= 128 else 16), 1)
    return n, min(max(32 // n, 1), 2), max(8, 32 // n), warps, 2


def _registers(budget: int, dtype: torch.dtype) -> int | None:
    """The register limit of a launch; float64, slow on any account, has none."""
    return None if dtype == torch.float64 else budget


def _programs_at_once(x: torch.Tensor, registers: int, warps: int) -> int:
    """Programs of so many registers a thread that run on the tensor's device at once."""
    resident = 65536 // (32 * (registers + 7 & ~7))  # warps; a multiprocessor has 65,536 registers
    return common.programs_that_fill(x, max(resident // warps, 1))


def backward_programs(
    batch: int,
    seqlen: int,
    d_inner: int,
    channels: int,
    programs_at_once: int,
    unit: int,
    passes: bool = False,
) -> tuple[int, int]:
    """(programs that share out the channels, tokens a split) of a backward whose programs hold ``channels``
    at a time, of which ``programs_at_once`` run together.

    Fewer programs, each of which takes several blocks of channels, leave fewer partial sums of dB and dC, and
    shorter splits in their place fill the device: as few as cost no time by idle or uneven work, or, if
    ``passes``, by the pass that more than one split takes."""
    blocks = triton.cdiv(d_inner, channels)

    def time(programs: int) -> float:
        split_len = common.split_length(seqlen, batch * programs, programs_at_once, unit, SHORTEST_SPLIT)
        waves = triton.cdiv(batch * programs * triton.cdiv(seqlen, split_len), programs_at_once)
        each = triton.cdiv(blocks, programs)
        share = SHARE_OF_PASS if passes and split_len < seqlen else 0.0
        return waves * min(split_len, seqlen) * (each * (1 + share) + SHARE_OF_SUMS)

    most = max(min(MOST_CHANNELS // channels, blocks), 1)
    programs = min((triton.cdiv(blocks, each) for each in range(1, most + 1)), key=time)
    return programs, common.split_length(seqlen, batch * programs, programs_at_once, unit, SHORTEST_SPLIT)


def check(d_state: int) -> None:
    """Raise ValueError for a d_state beyond what the kernels' registers hold."""
    if d_state > MAX_D_STATE:
        raise ValueError(
            f"d_state={d_state} is above {MAX_D_STATE}, the most the Triton selective scan takes: "
            "use a smaller d_state or backend='reference'"
        )


def selective_scan_forward(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run ``h_t = exp(d_t A) h_{t-1} + d_t u_t B_t``, ``y_t = (C_t h_t + D u_t) silu(z_t)``, ``d =
    softplus(delta + bias)``.

    u, delta, z (batch, seqlen, d_inner) with a dense last dimension, in float32, float64, bfloat16 or
    float16; A (d_inner, d_state); B, C (batch, seqlen, d_state); D, delta_bias (d_inner,) or None;
    initial_state (batch, d_inner, d_state) or None; reset (batch, seqlen) bool or None: True drops the
    carried state before that token.

    Returns y (like u), final_state (batch, d_inner, d_state) and the states before every 64th token, for the
    backward;
    both in float32 (float64 for float64 inputs). With ``save`` false the last is None. Raises ValueError for
    d_state above 256.
    """
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    check(d_state)
    acc = accumulate_dtype(u.dtype)
    n, lanes, warps = forward_tile(d_state)
    u, delta = common.last_contiguous(u), common.last_contiguous(delta)
    # Widened once, not by every program again, while registers hold a token's.
    B, C = (common.last_contiguous(x.to(acc) if n <= 16 else x) for x in (B, C))
    z = None if z is None else common.last_contiguous(z)
    D, delta_bias = common.dense(D), common.dense(delta_bias)
    checkpoints = None
    if save:
        checkpoints = torch.empty(selective_scan_saved_shape(u, A), dtype=acc, device=u.device)
    A = A.t().contiguous()  # kernels store every state as (d_state, d_inner), channels dense
    reset_u8 = common.reset_bytes(reset)
    h_in = None if initial_state is None else initial_state.to(acc).transpose(1, 2).contiguous()
    y = torch.empty((batch, seqlen, d_inner), dtype=u.dtype, device=u.device)
    final = torch.empty((batch, d_state, d_inner), dtype=acc, device=u.device)
    blocks = triton.cdiv(d_inner, lanes)
    registers = FORWARD_REGISTERS if n <= 16 else MOST_REGISTERS
    programs_at_once = _programs_at_once(u, registers, warps)
    split_len = common.split_length(
        seqlen, batch * blocks, programs_at_once, saved.CHECKPOINT, SHORTEST_SPLIT
    )
    splits = triton.cdiv(seqlen, split_len)

    def launch(h: torch.Tensor | None, h_out: torch.Tensor, decay: torch.Tensor | None) -> None:
        local = decay is not None
        forward_kernels.forward_kernel[(blocks, splits, batch)](
            *(u, delta, A, B, C, D, z, delta_bias, reset_u8),
            *(h, y, checkpoints, h_out, decay),
            *(seqlen, d_inner, d_state, split_len, 1),
            *common.strides(u, delta, B, C, z),
            LOCAL=local,
            SAVE=save,
            **common.has_flags(D=D, Z=z, BIAS=delta_bias, RESET=reset, INIT=h),
            SOFTPLUS=delta_softplus,
            EVERY=saved.CHECKPOINT,
            UNROLL=UNROLL if reset is None else UNROLL // 2,  # resets take registers too
            N=n,
            LANES=lanes,
            ACC=common.tl_dtype(acc),
            num_warps=warps,
            num_stages=1,
            maxnreg=_registers(registers, acc),
        )

    with common.on_device(u):
        if splits > 1:
            local = torch.empty((batch, splits, d_state, d_inner), dtype=acc, device=u.device)
            decay = torch.empty_like(local)
            launch(None, local, decay)
            h_in, _ = common.pass_states(local, decay, h_in, reset is not None, reverse=False)
        launch(h_in, final, None)
    return y, final.transpose(1, 2).contiguous(), checkpoints


def selective_scan_backward(
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    checkpoints: torch.Tensor,
    window: int | None,
    halo: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of :func:`selective_scan_forward` through the accumulated adjoint state.

    ``mu_t = (dy_t silu(z_t)) C_t + a_{t+1} mu_{t+1}``, dfinal_state added at the last token; with ``window``
    = W, mu_i sums the terms of tokens i … i+W-1 only. The last ``halo`` tokens get zero gradients. Returns
    (du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state), each in its tensor's dtype (states in
    float32, float64 for float64 inputs), None for D, z, delta_bias that are None."""
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    check(d_state)
    acc = accumulate_dtype(u.dtype)
    dy, u, delta = (common.last_contiguous(x) for x in (dy, u, delta))
    wide_B, wide_C = (common.last_contiguous(x.to(acc)) for x in (B, C))  # once, not by every program again
    z = None if z is None else common.last_contiguous(z)
    D, delta_bias = common.dense(D), common.dense(delta_bias)
    A = A.t().contiguous()  # kernels keep every state as (d_state, d_inner), channels dense
    reset_u8 = common.reset_bytes(reset)
    if window is not None and window > seqlen:  # the initial state counts as one more token
        window = None
    if halo > 0 and window is None:
        window = seqlen + 1  # only the windowed kernel knows halos

    n, rows, lanes, warps, steps = backward_tile(d_state, window is not None)
    light = n <= 32 and window is None and reset is None  # resets take registers too
    registers = BACKWARD_REGISTERS if light else MOST_REGISTERS
    programs_at_once = _programs_at_once(u, registers, warps)
    unit = (
        saved.CHECKPOINT if window is None else window
    )  # windowed splits are whole blocks, counted from token -1
    length = seqlen + (window is not None)
    programs, split_len = backward_programs(
        batch, length, d_inner, rows * lanes, programs_at_once, unit, window is None
    )
    splits = triton.cdiv(length, split_len)

    def empty(*shape: int, dtype: torch.dtype = acc) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=u.device)

    du = empty(*u.shape, dtype=u.dtype)
    ddelta = empty(*u.shape, dtype=delta.dtype)
    dz = None if z is None else empty(*u.shape, dtype=z.dtype)
    dB_parts = empty(batch, programs, seqlen, d_state)
    dC_parts = empty(batch, programs, seqlen, d_state)
    # Each split's stretches, STRETCHES_TOGETHER in a part; a split may leave its last parts as they are.
    parts = splits * ((split_len // saved.CHECKPOINT + 2) // STRETCHES_TOGETHER + 1)
    dA_parts = empty(batch, parts, d_state, d_inner).zero_()
    dD_parts = None if D is None else empty(batch, parts, d_inner).zero_()
    dbias_parts = None if delta_bias is None else empty(batch, parts, d_inner).zero_()
    marks = saved.CHECKPOINT // steps * (1 if window is None else 3)
    span = min(SPAN, saved.CHECKPOINT)
    per_channel, recent = (
        (0, saved.CHECKPOINT) if window is not None else (2 * saved.CHECKPOINT + 4 * span, span)
    )
    scratch = empty(batch, splits, programs, (marks * n + per_channel) * rows * lanes + 2 * recent * n)
    flags = {
        **common.has_flags(Z=z, BIAS=delta_bias, RESET=reset),
        "SOFTPLUS": delta_softplus,
        "ACC": common.tl_dtype(acc),
        "num_stages": 1,
        "maxnreg": _registers(registers, acc),
    }
    c_in = None if dfinal_state is None else dfinal_state.to(acc).transpose(1, 2).contiguous()
    with common.on_device(u):
        if window is not None:
            dinitial = empty(batch, d_state, d_inner)
            step = empty(*u.shape)
            backward_kernels.step_kernel[(triton.cdiv(seqlen, 32), triton.cdiv(d_inner, 128), batch)](
                *(delta, delta_bias, step, seqlen, d_inner, *common.strides(delta)),
                **common.has_flags(BIAS=delta_bias),
                SOFTPLUS=delta_softplus,
                ROWS=32,
                BLOCK=128,
                ACC=common.tl_dtype(acc),
                num_warps=4,
            )
            _windowed(
                *(dy, u, step, A, wide_B, wide_C, D, z, reset_u8, checkpoints, c_in, scratch),
                *(du, ddelta, dz, dB_parts, dC_parts, dA_parts, dD_parts, dbias_parts, dinitial),
                *(split_len, splits, window, halo, flags),
            )
        elif splits > 1:
            local = empty(batch, splits, d_state, d_inner)
            decay = torch.empty_like(local)
            n_local, lanes_local, warps_local = local_tile(d_state)
            backward_kernels.adjoint_local_kernel[(triton.cdiv(d_inner, lanes_local), splits, batch)](
                *(dy, delta, A, wide_C, z, delta_bias, reset_u8, local, decay),
                *(seqlen, d_inner, d_state, split_len, 1, *common.strides(dy, delta, wide_C, z)),
                UNROLL=UNROLL,
                N=n_local,
                LANES=lanes_local,
                num_warps=warps_local,
                **flags,
            )
            carried, dinitial = common.pass_states(local, decay, c_in, reset is not None, reverse=True)
        else:
            carried = empty(batch, 1, d_state, d_inner)
            carried.copy_(torch.zeros_like(carried) if c_in is None else c_in[:, None])
            dinitial = carried[:, 0]  # what the only split leaves
        if window is None:
            backward_kernels.backward_kernel[(programs, splits, batch)](
                *(dy, u, delta, A, wide_B, wide_C, D, z, delta_bias, reset_u8, checkpoints, carried, scratch),
                *(du, ddelta, dz, dB_parts, dC_parts, dA_parts, dD_parts, dbias_parts),
                *(seqlen, d_inner, d_state, split_len, 1),
                *common.strides(dy, u, delta, wide_B, wide_C, z),
                **common.has_flags(D=D),
                EVEN=d_state == n,
                EVERY=saved.CHECKPOINT,
                TOGETHER=STRETCHES_TOGETHER,
                SPAN=span,
                STEPS=steps,
                N=n,
                ROWS=rows,
                LANES=lanes,
                num_warps=warps,
                **flags,
            )
    return (
        du,
        ddelta,
        dA_parts.sum((0, 1)).t().contiguous().to(A.dtype),
        dB_parts.sum(1).to(B.dtype),
        dC_parts.sum(1).to(C.dtype),
        None if dD_parts is None or D is None else dD_parts.sum((0, 1)).to(D.dtype),
        dz,
        None if dbias_parts is None or delta_bias is None else dbias_parts.sum((0, 1)).to(delta_bias.dtype),
        dinitial.transpose(1, 2).contiguous(),
    )


def _windowed(
    dy,
    u,
    step,
    A,
    B,
    C,
    D,
    z,
    reset,
    checkpoints,
    dfinal,
    scratch,
    du,
    ddelta,
    dz,
    dB,
    dC,
    dA,
    dD,
    dbias,
    dinitial,
    split_len,
    splits,
    window,
    halo,
    flags,
):
    """Launch the windowed backward on the buffers that :func:`selective_scan_backward` made."""
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[0]
    shared = {key: value for key, value in flags.items() if key not in ("HAS_BIAS", "SOFTPLUS")}
    shared.update(common.has_flags(FINAL=dfinal), EVERY=saved.CHECKPOINT)
    totals, products = torch.empty_like(checkpoints), torch.empty_like(checkpoints)
    n, lanes, warps = local_tile(d_state)
    windowed_kernels.marks_kernel[(triton.cdiv(d_inner, lanes), splits, batch)](
        *(dy, step, A, C, z, reset, dfinal, totals, products, seqlen, d_inner, d_state, split_len, window, 1),
        *common.strides(dy, C, z),
        N=n,
        LANES=lanes,
        num_warps=warps,
        **shared,
    )
    n, _, lanes, warps, steps = backward_tile(d_state, True)
    carried = torch.empty((batch, splits, 2, d_state, d_inner), dtype=checkpoints.dtype, device=u.device)
    windowed_kernels.backward_kernel[(dB.shape[1], splits, batch)](
        *(dy, u, step, A, B, C, D, z, reset, checkpoints, totals, products, dfinal, carried, scratch),
        *(du, ddelta, dz, dB, dC, dA, dD, dbias, dinitial),
        *(seqlen, d_inner, d_state, split_len, window, halo, 1, *common.strides(dy, u, B, C, z)),
        **common.has_flags(D=D),
        HAS_BIAS=flags["HAS_BIAS"],
        SOFTPLUS=flags["SOFTPLUS"],
        TOGETHER=STRETCHES_TOGETHER,
        STEPS=steps,
        N=n,
        LANES=lanes,
        num_warps=warps,
        **shared,
    )
