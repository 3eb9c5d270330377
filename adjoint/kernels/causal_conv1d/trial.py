"""The causal convolution on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import Draw, by_name


def causal_conv1d(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
    taps: int = 4,
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 channels with 4 taps each, bias, SiLU and state included."""
    d, channels = Draw(device, dtype), 48
    x, dy = d.normal(2, d.seqlen, channels), d.normal(2, d.seqlen, channels)
    weight, bias = d.wide(channels, taps) * (4 / taps) ** 0.5, d.wide(channels)
    inputs = x, weight, bias, d.wide(2, channels, taps - 1), True, d.resets(2, resets)
    results = implementation.forward(*inputs), *implementation.backward(dy, *inputs)
    return by_name("y dx dweight dbias dinitial_state", results)


def long_conv1d(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 channels with 128 taps each, bias, SiLU and state included."""
    return causal_conv1d(implementation, window, resets, device, dtype, taps=128)
