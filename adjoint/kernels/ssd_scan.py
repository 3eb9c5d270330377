"""The scan of Mamba-2 (state-space duality), differentiable in every tensor, both states included."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from adjoint.kernels import checks, dispatch


class _SSDScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        initial_state,
        reset,
        softplus: bool,
        window,
        halo: int,
        impl: ModuleType,
        save: bool,
    ):
        y, final_state, checkpoints = impl.ssd_scan_forward(
            x, dt, A, B, C, D, dt_bias, softplus, initial_state, reset, save
        )
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, initial_state, reset, checkpoints)
        ctx.arguments = softplus, window, halo, impl
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy, dfinal_state):
        x, dt, A, B, C, D, dt_bias, initial_state, reset, checkpoints = ctx.saved_tensors
        softplus, window, halo, impl = ctx.arguments
        if dy is None:
            dy = torch.zeros_like(x)
        dx, ddt, dA, dB, dC, dD, dbias, dinitial = impl.ssd_scan_backward(
            dy,
            dfinal_state,
            x,
            dt,
            A,
            B,
            C,
            D,
            dt_bias,
            softplus,
            initial_state,
            reset,
            checkpoints,
            window,
            halo,
        )
        dinitial = dinitial if initial_state is not None else None
        return dx, ddt, dA, dB, dC, dD, dbias, dinitial, None, None, None, None, None, None


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs h_t = exp(d_t A) h_{t-1} + d_t x_t ⊗ B_t,  y_t = (h_t C_t + D x_t) silu(z_t), one decay a head.

    Mamba-2 (Dao & Gu 2024), section 3; the backward is the accumulated adjoint state (docs/method.md).

    Args:
        x, z: (batch, seqlen, nheads, headdim), floating point. dt: (batch, seqlen, nheads).
        A, D, dt_bias: (nheads,). B, C: (batch, seqlen, ngroups, d_state); ngroups divides nheads.
        initial_state: (batch, nheads, headdim, d_state), zero if None.
        window, seq_idx, backend, halo: as in `selective_scan`.

    Returns:
        y like x, and the final state (batch, nheads, headdim, d_state), float32 for bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    if x.dim() != 4 or x.shape[1] == 0:
        raise ValueError(f"x must have shape (batch, seqlen >= 1, nheads, headdim), got {tuple(x.shape)}")
    batch, seqlen, nheads, headdim = x.shape
    if B.dim() != 4 or nheads % B.shape[2]:
        raise ValueError(
            f"B must have shape (batch, seqlen, ngroups, d_state), ngroups dividing {nheads} heads; "
            f"got {tuple(B.shape)}"
        )
    for name, value in (("B", B), ("C", C)):
        checks.shape(name, value, batch, seqlen, *B.shape[2:])
    checks.shape("dt", dt, batch, seqlen, nheads)
    for name, vector in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        checks.shape(name, vector, nheads)
    checks.shape("z", z, batch, seqlen, nheads, headdim)
    checks.shape("initial_state", initial_state, batch, nheads, headdim, B.shape[-1])
    checks.window_and_halo(window, halo, seqlen)
    reset = checks.reset_of(seq_idx, batch, seqlen)
    dtype = dispatch.compute_dtype(x)
    tensors = [None if t is None else t.to(dtype) for t in (x, dt, A, B, C, D, dt_bias, initial_state)]
    impl = dispatch.choose(backend, x.device, dtype)
    save = checks.differentiable(*tensors)
    y, final_state = _SSDScan.apply(*tensors, reset, dt_softplus, window, halo, impl, save)
    y = y.to(x.dtype)
    return (y if z is None else y * F.silu(z)), final_state
