"""The selective scan of Mamba-1, differentiable in every tensor, both states included."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adjoint.kernels import checks, dispatch


class _SelectiveScan(torch.autograd.Function):
    """Backward is the accumulated adjoint state: a reverse scan that recomputes h from sparse saved
    states."""

    @staticmethod
    def forward(
        ctx: Any,
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        initial_state,
        reset,
        softplus: bool,
        window,
        halo: int,
        impl: ModuleType,
        save: bool,
    ):
        y, final_state, checkpoints = impl.selective_scan_forward(
            u, delta, A, B, C, D, z, delta_bias, softplus, initial_state, reset, save
        )
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, initial_state, reset, checkpoints)
        ctx.arguments = softplus, window, halo, impl
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy, dfinal_state):
        u, delta, A, B, C, D, z, delta_bias, initial_state, reset, checkpoints = ctx.saved_tensors
        softplus, window, halo, impl = ctx.arguments
        if dy is None:
            dy = torch.zeros_like(u)
        du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial = impl.selective_scan_backward(
            dy,
            dfinal_state,
            u,
            delta,
            A,
            B,
            C,
            D,
            z,
            delta_bias,
            softplus,
            initial_state,
            reset,
            checkpoints,
            window,
            halo,
        )
        dinitial = dinitial if initial_state is not None else None
        return du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial, None, None, None, None, None, None


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,  y_t = (C_t · h_t + D u_t) silu(z_t),  d = delta or
    softplus(delta + delta_bias).

    Mamba (Gu & Dao 2023), eq. 2; the backward is the accumulated adjoint state (docs/method.md), in time
    linear in seqlen.

    Args:
        u, delta, z: (batch, seqlen, d_inner), floating point.
        A: (d_inner, d_state), usually negative. D, delta_bias: (d_inner,).
        B, C: (batch, seqlen, d_state).
        initial_state: (batch, d_inner, d_state), zero if None.
        window: tokens; the backward keeps, of each output's dependence on the past, the last `window` tokens.
            None keeps all: exact.
        seq_idx: (batch, seqlen) integers; where it changes a new document begins and the state starts from
            zero.
        backend: a name of `adjoint.backends()`; None picks one.
        halo: the last `halo` tokens only serve the windows of the others: they get no gradients of their own.

    Returns:
        y (batch, seqlen, d_inner) in u's dtype and the final state (batch, d_inner, d_state), float32 for
        bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    if u.dim() != 3 or u.shape[1] == 0:
        raise ValueError(f"u must have shape (batch, seqlen >= 1, d_inner), got {tuple(u.shape)}")
    batch, seqlen, d_inner = u.shape
    if A.dim() != 2:
        raise ValueError(f"A must have shape (d_inner, d_state), got {tuple(A.shape)}")
    d_state = A.shape[1]
    checks.shape("A", A, d_inner, d_state)
    for name, x in (("delta", delta), ("z", z)):
        checks.shape(name, x, batch, seqlen, d_inner)
    for name, x in (("B", B), ("C", C)):
        checks.shape(name, x, batch, seqlen, d_state)
    for name, x in (("D", D), ("delta_bias", delta_bias)):
        checks.shape(name, x, d_inner)
    checks.shape("initial_state", initial_state, batch, d_inner, d_state)
    checks.window_and_halo(window, halo, seqlen)
    reset = checks.reset_of(seq_idx, batch, seqlen)
    dtype = dispatch.compute_dtype(u)
    tensors = [
        None if x is None else x.to(dtype) for x in (u, delta, A, B, C, D, z, delta_bias, initial_state)
    ]
    impl = dispatch.choose(backend, u.device, dtype)
    save = checks.differentiable(*tensors)
    y, final_state = _SelectiveScan.apply(*tensors, reset, delta_softplus, window, halo, impl, save)
    return y.to(u.dtype), final_state
