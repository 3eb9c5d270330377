"""Linear recurrences h_t = A_t h_{t-1} + b_t with scalar, diagonal or dense A_t, returning every state."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adjoint.kernels import checks, dispatch


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a, b, initial_state, reset, window, halo: int, impl: ModuleType, dense: bool):
        h = (impl.dense_scan_forward if dense else impl.linear_scan_forward)(a, b, initial_state, reset)
        ctx.save_for_backward(a, initial_state, reset, h)
        ctx.arguments = window, halo, impl, dense
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh):
        a, initial_state, reset, h = ctx.saved_tensors
        window, halo, impl, dense = ctx.arguments
        backward = impl.dense_scan_backward if dense else impl.linear_scan_backward
        da, db, dinitial = backward(dh.contiguous(), a, h, initial_state, reset, window, halo)
        return da, db, dinitial if initial_state is not None else None, None, None, None, None, None


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> Tensor:
    """All states of h_t = A_t h_{t-1} + b_t (the generic selective SSM; docs/method.md §1).

    Args:
        a: (batch, seqlen, 1) scalar, (batch, seqlen, d_state) diagonal or (batch, seqlen, d_state, d_state)
            dense.
        b: (batch, seqlen, d_state). initial_state: (batch, d_state), zero if None.
        window, seq_idx, backend, halo: as in `selective_scan`.

    Returns:
        h (batch, seqlen, d_state) in b's dtype; h[:, -1] is the final state.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    if b.dim() != 3 or b.shape[1] == 0:
        raise ValueError(f"b must have shape (batch, seqlen >= 1, d_state), got {tuple(b.shape)}")
    batch, seqlen, d_state = b.shape
    dense = a.dim() == 4
    if tuple(a.shape) not in (
        (batch, seqlen, 1),
        (batch, seqlen, d_state),
        (batch, seqlen, d_state, d_state),
    ):
        raise ValueError(
            f"a must be scalar, diagonal or dense for states {tuple(b.shape)}, got {tuple(a.shape)}"
        )
    checks.shape("initial_state", initial_state, batch, d_state)
    checks.window_and_halo(window, halo, seqlen)
    reset = checks.reset_of(seq_idx, batch, seqlen)
    dtype = dispatch.compute_dtype(b)
    initial_state = None if initial_state is None else initial_state.to(dtype)
    impl = dispatch.choose(backend, b.device, dtype)
    h = _LinearScan.apply(a.to(dtype), b.to(dtype), initial_state, reset, window, halo, impl, dense)
    return h.to(b.dtype)
