"""SSD scan (Mamba-2) in Triton on tensor cores: the forward/backward pair behind ``adjoint.ssd_scan``.

Chunks' own states, a pass that carries them through the sequence, then every chunk's outputs from the state
at its entry; the
backward is its mirror image, with the state's cotangent passed from the last chunk to the first. Products
take the
inputs' 16-bit dtype (float32 inputs: three-fold TF32, as exact as float32), sums and states are float32. A
window or halo
takes the selective scan's windowed kernel, head channels side by side: exact, linear in time, without tensor
cores.
Nothing waits for the device or depends on values, and all sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from adjoint.kernels import triton_common as common
from adjoint.kernels import triton_selective_scan as selective
from adjoint.kernels import triton_ssd_kernels as kernels

CHUNK = {
    2: 64,
    4: 32,
    8: 16,
}  # tokens a matrix tile, by the size of the inputs' elements: registers hold the tiles
BLOCK = {2: 32, 4: 32, 8: 16}  # of d_state, likewise
BACKWARD_WARPS = 8
HEADS_EACH = 16  # heads whose dB, dC a program sums before writing them
MAX_HEADDIM, MAX_D_STATE = 128, 256

_TL = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _tile(x: torch.Tensor, d_state: int) -> dict[str, Any]:
    """Constexprs that all kernels share: tile sizes, dtype and precision of the products."""
    headdim = x.shape[-1]
    if headdim > MAX_HEADDIM or d_state > MAX_D_STATE:
        raise ValueError(
            f"headdim={headdim}, d_state={d_state}: the Triton SSD scan takes at most "
            f"{MAX_HEADDIM} and {MAX_D_STATE}; "
            "use smaller ones or backend='reference'"
        )
    return {
        "Q": CHUNK[x.element_size()],
        "P": max(16, triton.next_power_of_2(headdim)),
        "N": min(max(16, triton.next_power_of_2(d_state)), BLOCK[x.element_size()]),
        "DOT": _TL[x.dtype],
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee" if x.dtype == torch.float64 else "tf32",
        "ACC": common.tl_dtype(x.dtype),
        "num_stages": 1,
    }


def _steps(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    chunk: int,
    acc: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, running sum of step * A in each chunk), both (batch, nheads, chunks * chunk)."""
    batch, seqlen, nheads = dt.shape
    chunks = triton.cdiv(seqlen, chunk)
    step = torch.empty((batch, nheads, chunks * chunk), dtype=acc, device=dt.device)
    cum = torch.empty_like(step)
    heads = 16
    kernels.step_kernel[(chunks, triton.cdiv(nheads, heads), batch)](
        *(dt, A, dt_bias, step, cum, seqlen, nheads, *dt.stride()[:2]),
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        Q=chunk,
        HEADS=heads,
        ACC=common.tl_dtype(acc),
        num_warps=4,
    )
    return step, cum


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
    seqlen, ngroups,
    d_state), initial_state (batch, nheads, headdim, d_state) or None, reset (batch, seqlen) bool or None.
    Returns y (like x),
    final_state (float32, float64 for float64 inputs) and the states at the chunks' entries (None unless
    ``save``).
    Raises ValueError for headdim above 128 or d_state above 256.
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    tile = _tile(x, d_state)
    acc = common.state_dtype(x.dtype)
    x, dt, B, C = (common.last_contiguous(v) for v in (x, dt, B, C))
    reset_u8 = common.reset_bytes(reset)
    chunk, blocks = tile["Q"], triton.cdiv(d_state, tile["N"])
    chunks = triton.cdiv(seqlen, chunk)
    y = torch.empty((batch, seqlen, nheads, headdim), dtype=x.dtype, device=x.device)
    local = torch.empty((batch, chunks, nheads, headdim, d_state), dtype=acc, device=x.device)
    decay = torch.empty((batch, chunks, nheads), dtype=acc, device=x.device)
    sizes = (seqlen, nheads, headdim, d_state, nheads // ngroups)
    with common.on_device(x):
        step, cum = _steps(dt, A, dt_bias, dt_softplus, chunk, acc)
        kernels.chunk_state_kernel[(chunks, nheads * blocks, batch)](
            *(x, B, step, cum, reset_u8, local, decay, *sizes, *x.stride()[:3], *B.stride()[:3]),
            REVERSE=False,
            HAS_RESET=reset is not None,
            num_warps=4,
            **tile,
        )
        init = None if initial_state is None else initial_state.to(acc)
        incoming, final = common.pass_states(local, decay, init, reverse=False)
        kernels.output_kernel[(chunks, nheads, batch)](
            *(x, B, C, D, step, cum, reset_u8, incoming, y, *sizes),
            *(*x.stride()[:3], *B.stride()[:3], *C.stride()[:3]),
            HAS_D=D is not None,
            HAS_RESET=reset is not None,
            num_warps=4,
            **tile,
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
    tile = _tile(x, d_state)
    acc = common.state_dtype(x.dtype)
    dy, x, dt, B, C = (common.last_contiguous(v) for v in (dy, x, dt, B, C))
    reset_u8 = common.reset_bytes(reset)
    chunk, blocks = tile["Q"], triton.cdiv(d_state, tile["N"])
    chunks = triton.cdiv(seqlen, chunk)

    def empty(*shape: int, dtype: torch.dtype = acc) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    shares = triton.cdiv(nheads // ngroups, HEADS_EACH)
    dx, ddt = empty(*x.shape, dtype=x.dtype), empty(*dt.shape, dtype=dt.dtype)
    dA, dD, dbias = (empty(batch, chunks, nheads) for _ in range(3))
    dB, dC = (empty(batch, shares, seqlen, ngroups, d_state) for _ in range(2))
    local, decay = empty(batch, chunks, nheads, headdim, d_state), empty(batch, chunks, nheads)
    sizes = (seqlen, nheads, headdim, d_state)
    heads_a_group = nheads // ngroups
    strides = (*dy.stride()[:3], *x.stride()[:3], *B.stride()[:3], *C.stride()[:3])
    with common.on_device(x):
        step, cum = _steps(dt, A, dt_bias, dt_softplus, chunk, acc)
        kernels.chunk_state_kernel[(chunks, nheads * blocks, batch)](
            *(
                dy,
                C,
                step,
                cum,
                reset_u8,
                local,
                decay,
                *sizes,
                heads_a_group,
                *dy.stride()[:3],
                *C.stride()[:3],
            ),
            REVERSE=True,
            HAS_RESET=reset is not None,
            num_warps=4,
            **tile,
        )
        last = None if dfinal_state is None else dfinal_state.to(acc)
        g_out, dinitial = common.pass_states(local, decay, last, reverse=True)
        read, through = torch.empty_like(step), torch.empty_like(decay)
        kernels.read_kernel[(chunks, nheads, batch)](
            *(dy, C, cum, reset_u8, checkpoints, g_out, read, through, *sizes, heads_a_group),
            *(*dy.stride()[:3], *C.stride()[:3]),
            HAS_RESET=reset is not None,
            num_warps=4,
            **tile,
        )
        kernels.input_grad_kernel[(chunks, nheads, batch)](
            *(dy, x, B, C, A, D, step, cum, reset_u8, g_out, read, through, dx, ddt, dA, dD, dbias, *sizes),
            *(heads_a_group, *strides),
            HAS_D=D is not None,
            SOFTPLUS=dt_softplus,
            HAS_RESET=reset is not None,
            num_warps=BACKWARD_WARPS,
            **tile,
        )
        kernels.group_grad_kernel[(chunks, ngroups * shares * blocks, batch)](
            *(dy, x, B, C, step, cum, reset_u8, checkpoints, g_out, dB, dC, *sizes, ngroups, heads_a_group),
            *(HEADS_EACH, *strides),
            HAS_RESET=reset is not None,
            num_warps=BACKWARD_WARPS,
            **tile,
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
    acc = common.state_dtype(x.dtype)

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
