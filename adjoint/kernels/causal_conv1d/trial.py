"""The causal convolution on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import Draw, by_name


def causal_conv1d(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 channels with 4 taps each, bias, SiLU and state included."""
    d, channels = Draw(device, dtype), 48
    x, dy = d.normal(2, d.seqlen, channels), d.normal(2, d.seqlen, channels)
    inputs = x, d.wide(channels, 4), d.wide(channels), d.wide(2, channels, 3), True, d.resets(2, resets)
    results = implementation.forward(*inputs), *implementation.backward(dy, *inputs)
    return by_name("y dx dweight dbias dinitial_state", results)
