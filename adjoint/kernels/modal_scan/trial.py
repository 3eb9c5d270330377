"""The modal filter on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import Draw, by_name


def modal_scan(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 channels with 16 modes each, everything optional included."""
    d, channels, order = Draw(device, dtype), 48, 16
    u, dy = d.normal(2, d.seqlen, channels), d.normal(2, d.seqlen, channels)
    A, R = -d.wide(channels, order).exp(), d.wide(channels, order)
    initial, dfinal = d.wide(2, channels, order), d.wide(2, channels, order)
    inputs = u, A, R, d.wide(channels), initial, d.resets(2, resets)
    y, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(dy, dfinal, *inputs, saved, window, 0)
    return by_name("y final_state du dA dR dD dinitial_state", (y, state, *gradients))
