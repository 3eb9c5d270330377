"""Shapes of the sparse states that each backend saves for its backward: a compiler asks for them."""

import torch
from torch import Tensor

from adjoint.kernels import dispatch, reference
from adjoint.kernels.cpu import backend as cpu
from adjoint.kernels.libraries import Library


def selective_scan(backend: str | None, u: Tensor, A: Tensor) -> tuple[int, ...]:
    """For u (batch, seqlen, d_inner) and A (d_inner, d_state)."""
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    impl = dispatch.choose("selective_scan", backend, u.device, u.dtype)
    if impl is reference:
        return batch, -(-seqlen // reference.SEGMENT), d_inner, d_state
    if impl is cpu:
        return _cpu(batch, seqlen, 1, d_inner, d_state, u.dtype)
    from adjoint.kernels.triton.selective_scan import launch as triton_selective_scan

    return batch, -(-seqlen // triton_selective_scan.CHECKPOINT), d_state, d_inner


def ssd_scan(backend: str | None, x: Tensor, B: Tensor) -> tuple[int, ...]:
    """For x (batch, seqlen, nheads, headdim) and B (batch, seqlen, ngroups, d_state)."""
    batch, seqlen, nheads, headdim = x.shape
    d_state = B.shape[-1]
    impl = dispatch.choose("ssd_scan", backend, x.device, x.dtype)
    if isinstance(impl, Library):
        return (0,)
    if impl is reference:
        return batch, -(-seqlen // reference.SEGMENT), nheads, headdim, d_state
    if impl is cpu:
        return _cpu(batch, seqlen, nheads, headdim, d_state, x.dtype)
    from adjoint.kernels.triton.ssd_scan import launch as triton_ssd

    return batch, -(-seqlen // triton_ssd.CHUNK[x.element_size()]), nheads, headdim, d_state


def _cpu(
    batch: int, seqlen: int, nheads: int, headdim: int, d_state: int, dtype: torch.dtype
) -> tuple[int, ...]:
    blocks, segments = cpu._blocks(nheads, headdim, dtype), -(-seqlen // cpu._scan_interval(d_state))
    return batch, segments, blocks, d_state, cpu._lanes(dtype)
