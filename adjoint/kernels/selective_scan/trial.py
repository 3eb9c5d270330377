"""The selective scan on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name


def selective_scan(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 channels with 16 states each, everything optional included."""
    d, d_inner, n = Draw(device, dtype), 48, 16
    u, delta, z, dy = (d.normal(2, d.seqlen, d_inner) for _ in range(4))
    B, C = d.normal(2, d.seqlen, n), d.normal(2, d.seqlen, n)
    A, initial, dfinal = -d.wide(d_inner, n).exp(), d.wide(2, d_inner, n), d.wide(2, d_inner, n)
    vectors = d.wide(d_inner), z, d.wide(d_inner) - SLOW
    inputs = u, delta, A, B, C, *vectors, True, initial, d.resets(2, resets)
    y, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(dy, dfinal, *inputs, saved, window, 0)
    names = "y final_state du ddelta dA dB dC dD dz ddelta_bias dinitial_state"
    return by_name(names, (y, state, *gradients))
