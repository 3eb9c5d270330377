"""SSD scan (Mamba-2) in Triton on tensor cores: the forward/backward pair behind ``adjoint.ssd_scan``.

Chunks' own states, a pass that carries them through the sequence, then every tile's outputs from the state at
its chunk's entry; the backward is its mirror image, with the state's cotangent passed from the last chunk to
the first. So the sequence is always split over programs, whatever batch and heads are. Products take the
inputs' 16-bit dtype (float32 inputs: three-fold TF32, as exact as float32), sums and states are float32. A
window or halo takes the selective scan's windowed kernel, head channels side by side: exact, linear in time,
without tensor cores. Nothing depends on values (only a tile takes one more product for each document that
begins in it), all sums have a fixed order, and nothing waits for the device but the first call of a size on a
GPU, which measures how deep its loops are pipelined.

Proven under the interpreter and by compilation (no kernel spills for sm_80 and sm_90); not measured on a GPU:
the chunk lengths, tile sizes and warps below are reasoned, not tuned. Longer chunks write fewer states, which
are most of the traffic, and do more products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import registered
from adjoint.kernels.selective_scan.triton import launch as selective
from adjoint.kernels.ssd_scan.triton import backward, forward, saved_states
from adjoint.kernels.ssd_scan.triton.saved_states import chunk_tokens, ssd_scan_saved_shape
from adjoint.kernels.triton import common

# By the size of the inputs' elements: columns of d_state that a program takes where they are the inner and
# where they are the outer dimension.
INNER = {2: 32, 4: 32, 8: 16}
OUTER = {2: 64, 4: 64, 8: 16}
WARPS = 4
# Stages of the pipelined loops, by the size of the inputs' elements: a loop's tiles are loaded so many turns
# ahead, less one, into shared memory, of which two programs a multiprocessor leave 82 KB each (sm_80), 114
# (sm_90, sm_100) or 49 (sm_120).
# Three-fold TF32 holds so many operands that ptxas spills when it has stages to look after too.
STAGES = {2: 3, 4: 1, 8: 1}
# What else is measured on a GPU for 16-bit inputs: as deep as fits there, or with more left for the cache.
DEEP, SHALLOW = 4, 2
# What the number of stages is picked by: not lengths, which change from call to call.
SIZES = ("nheads", "headdim", "d_state", "heads_a_group", "CHUNK", "HAS_RESET", "REVERSE", "OF_B")
PAIR_BLOCK = {2: 64, 4: 32, 8: 16}  # of headdim, in pair_grad_kernel
PAIR_WARPS = {2: 8, 4: 4, 8: 4}  # its tiles of 64 x 64 and its stages are more than Triton 3.6 fits into four
# A thread's registers in the kernels that ptxas, left to itself, holds to fewer and makes spill.
GROUP_REGISTERS, STEP_REGISTERS = 255, 96
HEADS_EACH = 16  # heads whose dB, dC a program sums before writing them
STEP_HEADS = 16  # heads a program of the step kernels
LIMITS = registered("ssd_scan").limits("triton")

_TL = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _tile(x: torch.Tensor, d_state: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constexprs of the kernels that sum over d_state, and of those that are split over it."""
    headdim, size = x.shape[-1], x.element_size()
    if headdim > LIMITS["headdim"] or d_state > LIMITS["d_state"]:
        raise ValueError(
            f"headdim={headdim}, d_state={d_state}: the Triton SSD scan takes at most "
            f"{LIMITS['headdim']} and {LIMITS['d_state']}; "
            "use smaller ones or backend='reference'"
        )
    n = max(16, triton.next_power_of_2(d_state))
    tile = {
        "CHUNK": chunk_tokens(x),
        "Q": saved_states.TILE[size],
        "P": max(16, triton.next_power_of_2(headdim)),
        "DOT": _TL[x.dtype],
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee" if x.dtype == torch.float64 else "tf32",
        "ACC": common.tl_dtype(x.dtype),
        "num_stages": STAGES[size],
        "num_warps": WARPS * (2 if headdim > 64 else 1),
    }
    return {**tile, "N": min(n, INNER[size])}, {**tile, "N": min(n, OUTER[size])}


def candidates(stages: int, capability: int) -> tuple[int, int]:
    """Numbers of stages to choose from on a device, the one for where nothing can be measured first."""
    return stages, DEEP if 90 <= capability < 120 else SHALLOW


_PICKED: dict[tuple[Any, ...], int] = {}


def _stages(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> int:
    """The number of stages for these sizes on this GPU: measured when they first come up, and kept by Triton
    in its cache on disk. It says when tiles are loaded, not in what order sums are taken: no result depends
    on it."""
    x, default = args[0], constants["num_stages"]
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    key = (kernel, x.device, x.dtype, *(values.get(name) for name in SIZES))
    if key not in _PICKED:
        if torch.cuda.is_current_stream_capturing():
            return default  # a graph's capture cannot wait for a measurement
        major, minor = torch.cuda.get_device_capability(x.device)
        choice = candidates(default, 10 * major + minor)
        configs = [triton.Config({}, num_warps=constants["num_warps"], num_stages=n) for n in choice]
        names = [name for name in SIZES if name in kernel.arg_names]
        tuner = triton.autotune(configs, key=names, cache_results=True)(kernel)
        rest = {k: v for k, v in constants.items() if k not in ("num_stages", "num_warps")}
        tuner[grid](*args, **rest)
        _PICKED[key] = tuner.best_config.num_stages
    return _PICKED[key]


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel whose loops are pipelined, on a GPU with as many stages as are fastest there."""
    if args[0].is_cuda and isinstance(kernel, JITFunction) and constants["num_stages"] > 1:
        constants["num_stages"] = _stages(kernel, grid, args, constants)
    kernel[grid](*args, **constants)


class _Steps:
    """Quantities of dt that all kernels need: (batch, nheads, chunks * CHUNK) each, `forward.step_kernel`;
    and the number of resets in the chunk up to each token, (batch, chunks * CHUNK), None without resets."""

    def __init__(self, dt, A, dt_bias, dt_softplus, reset, tile):
        batch, seqlen, nheads = dt.shape
        acc = accumulate_dtype(dt.dtype) if tile["ACC"] == tl.float32 else torch.float64
        self.chunks = triton.cdiv(seqlen, tile["CHUNK"])
        padded = self.chunks * tile["CHUNK"]
        self.step = torch.empty((batch, nheads, padded), dtype=acc, device=dt.device)
        self.prefix, self.suffix = torch.empty_like(self.step), torch.empty_like(self.step)
        self.segment = None
        if reset is not None:
            begins = torch.nn.functional.pad(reset.to(torch.int32), (0, padded - seqlen))
            counts = begins.view(batch, self.chunks, -1).cumsum(-1, dtype=torch.int32)
            self.segment = counts.view(batch, padded)
        grid = (padded // tile["Q"], triton.cdiv(nheads, STEP_HEADS), batch)
        forward.step_kernel[grid](
            *(dt, A, dt_bias, self.segment, self.step, self.prefix, self.suffix),
            *(seqlen, nheads, *common.strides(dt)),
            **common.has_flags(BIAS=dt_bias, RESET=reset),
            SOFTPLUS=dt_softplus,
            Q=tile["Q"],
            HEADS=STEP_HEADS,
            ACC=tile["ACC"],
            num_warps=4,
        )


def _gram(B, C, chunks, tile, acc):
    """C_i . B_j inside the chunks, (batch, chunks, ngroups, CHUNK, CHUNK), on and under the diagonal
    tiles."""
    batch, seqlen, ngroups, d_state = B.shape
    chunk, tiles = tile["CHUNK"], tile["CHUNK"] // tile["Q"]
    gram = torch.empty((batch, chunks, ngroups, chunk, chunk), dtype=acc, device=B.device)
    constants = {k: v for k, v in tile.items() if k != "P"}
    _launch(
        forward.gram_kernel,
        (chunks * tiles * tiles, ngroups, batch),
        *(B, C, gram, seqlen, d_state, *common.head_strides(B, C)),
        **constants,
    )
    return gram


def ssd_scan_forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t (x) B_t``, ``y_t = h_t C_t + D x_t`` in every head.

    x (batch, seqlen, nheads, headdim), dt (batch, seqlen, nheads), A, D, dt_bias (nheads,), B, C (batch,
    seqlen, ngroups, d_state), initial_state (batch, nheads, headdim, d_state) or None, reset (batch, seqlen)
    bool or None. Returns y (like x), final_state (float32, float64 for float64 inputs) and the states at the
    chunks' entries (None unless ``save``). Raises ValueError for headdim above 128 or d_state above 256.
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    inner, outer = _tile(x, d_state)
    acc = accumulate_dtype(x.dtype)
    x, dt, B, C = (common.last_contiguous(v) for v in (x, dt, B, C))
    A, D, dt_bias = A.contiguous(), common.dense(D), common.dense(dt_bias)
    chunks, tiles = triton.cdiv(seqlen, inner["CHUNK"]), inner["CHUNK"] // inner["Q"]
    y = torch.empty((batch, seqlen, nheads, headdim), dtype=x.dtype, device=x.device)
    local = torch.empty(ssd_scan_saved_shape(x, B), dtype=acc, device=x.device)
    decay = torch.empty((batch, chunks, nheads), dtype=acc, device=x.device)
    sizes = (seqlen, nheads, headdim, d_state, nheads // ngroups)
    with common.on_device(x):
        s = _Steps(dt, A, dt_bias, dt_softplus, reset, inner)
        _launch(
            forward.chunk_state_kernel,
            (chunks, nheads * triton.cdiv(d_state, outer["N"]), batch),
            *(x, B, s.step, s.prefix, s.suffix, s.segment, local, decay, *sizes),
            *common.head_strides(x, B),
            REVERSE=False,
            **common.has_flags(RESET=reset),
            **outer,
        )
        init = None if initial_state is None else initial_state.to(acc)
        incoming, final = common.pass_states(local, decay, init, reset is not None, reverse=False)
        gram = _gram(B, C, chunks, inner, acc)
        _launch(
            forward.output_kernel,
            (chunks * tiles, nheads, batch),
            *(x, C, D, gram, s.step, s.prefix, s.suffix, s.segment, incoming, y, *sizes),
            *common.head_strides(x, C),
            **common.has_flags(D=D, RESET=reset),
            **inner,
        )
    return y, final, incoming if save else None


def ssd_scan_backward(
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    checkpoints: torch.Tensor,
    window: int | None,
    halo: int = 0,
) -> tuple[torch.Tensor | None, ...]:
    """(dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_state) of :func:`ssd_scan_forward`, each in its tensor's
    dtype.

    ``window`` and ``halo`` as in the selective scan's backward. None stands for the gradients of D, dt_bias
    that are None.
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    if halo > 0 or (window is not None and window <= seqlen):
        return _through_selective_scan(
            dy, dfinal_state, x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, window, halo
        )
    inner, outer = _tile(x, d_state)
    acc = accumulate_dtype(x.dtype)
    dy, x, dt, B, C = (common.last_contiguous(v) for v in (dy, x, dt, B, C))
    A, D, dt_bias = A.contiguous(), common.dense(D), common.dense(dt_bias)
    chunk, tiles = inner["CHUNK"], inner["CHUNK"] // inner["Q"]
    chunks, blocks = triton.cdiv(seqlen, chunk), triton.cdiv(d_state, outer["N"])
    shares = triton.cdiv(nheads // ngroups, HEADS_EACH)
    pair_block = min(inner["P"], PAIR_BLOCK[x.element_size()])

    def empty(*shape: int, dtype: torch.dtype = acc) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    dx, ddt = empty(*x.shape, dtype=x.dtype), empty(*dt.shape, dtype=dt.dtype)
    dA, dD, dbias = (empty(batch, chunks * tiles, nheads) for _ in range(3))
    dB, dC = (empty(batch, shares, seqlen, ngroups, d_state) for _ in range(2))
    local, decay = empty(batch, chunks, nheads, headdim, d_state), empty(batch, chunks, nheads)
    dgram = empty(batch, shares, chunks, ngroups, chunk, chunk)
    by_output, by_input = (empty(batch, nheads, tiles, chunks * chunk) for _ in range(2))
    sizes = (seqlen, nheads, headdim, d_state, nheads // ngroups)
    flag = common.has_flags(RESET=reset)
    d, xs, b, c = common.head_strides(dy, x, B, C)
    with common.on_device(x):
        s = _Steps(dt, A, dt_bias, dt_softplus, reset, inner)
        sums = (s.step, s.prefix, s.suffix, s.segment)
        read, direct, fed, inside = (torch.empty_like(s.step) for _ in range(4))
        through = torch.empty_like(decay)
        _launch(
            forward.chunk_state_kernel,
            (chunks, nheads * blocks, batch),
            *(dy, C, *sums, local, decay, *sizes, d, c),
            REVERSE=True,
            **flag,
            **outer,
        )
        last = None if dfinal_state is None else dfinal_state.to(acc)
        g_out, dinitial = common.pass_states(local, decay, last, reset is not None, reverse=True)
        _launch(
            backward.read_kernel,
            (chunks * tiles, nheads, batch),
            *(dy, C, s.prefix, s.segment, checkpoints, g_out, read, through, *sizes, d, c),
            **flag,
            **inner,
        )
        gram = _gram(B, C, chunks, inner, acc)
        _launch(
            backward.input_grad_kernel,
            (chunks * tiles, nheads, batch),
            *(dy, x, B, D, gram, *sums, g_out, dx, dD, direct, fed, *sizes, d, xs, b),
            **common.has_flags(D=D),
            **flag,
            **inner,
        )
        _launch(
            backward.pair_grad_kernel,
            (chunks * tiles * tiles, ngroups * shares, batch),
            *(dy, x, *sums, gram, dgram, inside, by_output, by_input, *sizes[:3]),
            *(ngroups, nheads // ngroups, HEADS_EACH, d, xs),
            **flag,
            **{k: v for k, v in inner.items() if k not in ("N", "P", "num_warps")},
            P=pair_block,
            BLOCKS=triton.cdiv(headdim, pair_block),
            num_warps=PAIR_WARPS[x.element_size()],
        )
        backward.step_grad_kernel[(chunks * tiles, triton.cdiv(nheads, STEP_HEADS), batch)](
            *(A, s.step, direct, fed, inside, by_output, by_input, read, through, ddt, dA, dbias),
            *(seqlen, nheads),
            SOFTPLUS=dt_softplus,
            CHUNK=chunk,
            Q=inner["Q"],
            HEADS=STEP_HEADS,
            ACC=inner["ACC"],
            num_warps=4,
            maxnreg=None if acc == torch.float64 else STEP_REGISTERS,
        )
        grid, groups = (chunks * tiles, ngroups * shares * blocks, batch), (ngroups, sizes[-1], HEADS_EACH)
        for of_b, v, other, state, out in ((True, x, C, g_out, dB), (False, dy, B, checkpoints, dC)):
            _launch(
                backward.group_grad_kernel,
                grid,
                *(v, other, *sums, state, dgram, out, *sizes[:4], *groups),
                *common.head_strides(v, other),
                OF_B=of_b,
                maxnreg=None if acc == torch.float64 else GROUP_REGISTERS,
                **flag,
                **outer,
            )
    return (
        dx,
        ddt,
        dA.sum((0, 1)).to(A.dtype),
        dB.sum(1).to(B.dtype),
        dC.sum(1).to(C.dtype),
        None if D is None else dD.sum((0, 1)).to(D.dtype),
        None if dt_bias is None else dbias.sum((0, 1)).to(dt_bias.dtype),
        dinitial,
    )


def _through_selective_scan(
    dy, dfinal_state, x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, window, halo
):
    """The windowed backward: a group's heads are channels of a selective scan whose decay does not depend on
    the state's index."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    heads = nheads // ngroups
    acc = accumulate_dtype(x.dtype)

    def channels(v: torch.Tensor) -> torch.Tensor:
        """(..., heads) → (..., heads * headdim)."""
        return v.unsqueeze(-1).expand(*v.shape, headdim).reshape(*v.shape[:-1], heads * headdim)

    parts = []
    for group in range(ngroups):
        s = slice(group * heads, (group + 1) * heads)
        decay = channels(A[s].to(acc))[:, None].expand(-1, d_state)
        init = None if initial_state is None else initial_state[:, s].reshape(batch, -1, d_state)
        last = None if dfinal_state is None else dfinal_state[:, s].reshape(batch, -1, d_state)
        inputs = (
            x[:, :, s].reshape(batch, seqlen, -1),
            channels(dt[:, :, s]),
            decay,
            B[:, :, group],
            C[:, :, group],
            None if D is None else channels(D[s]),
            None,
            None if dt_bias is None else channels(dt_bias[s].to(acc)),
            dt_softplus,
            init,
            reset,
        )
        _, _, checkpoints = selective.selective_scan_forward(*inputs)
        assert checkpoints is not None
        d_out = dy[:, :, s].reshape(batch, seqlen, -1)
        parts.append(selective.selective_scan_backward(d_out, last, *inputs, checkpoints, window, halo))
    du, ddelta, dA, dB, dC, dD, _, dbias, dinitial = zip(*parts, strict=True)

    def per_head(pieces: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.cat(pieces, -1).unflatten(-1, (nheads, headdim)).to(acc).sum(-1).to(like.dtype)

    return (
        torch.cat(du, -1).unflatten(-1, (nheads, headdim)),
        per_head(ddelta, dt),
        per_head(tuple(v.sum(1) for v in dA), A),
        torch.stack(dB, 2),
        torch.stack(dC, 2),
        None if D is None else per_head(dD, D),
        None if dt_bias is None else per_head(dbias, dt_bias),
        torch.cat(dinitial, 1).unflatten(1, (nheads, headdim)),
    )
