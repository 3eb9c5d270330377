"""The scan of Mamba-2 on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name

SIZES = 16, 64, 128  # nheads, headdim, d_state: mamba-ssm's defaults, one group


def ssd_scan(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Outputs and gradients of heads of SIZES, everything that backends see included."""
    d, (heads, width, n) = Draw(device, dtype), SIZES
    x, dy = d.normal(1, d.seqlen, heads, width), d.normal(1, d.seqlen, heads, width)
    B, C = d.normal(1, d.seqlen, 1, n), d.normal(1, d.seqlen, 1, n)
    initial, dfinal = d.wide(1, heads, width, n), d.wide(1, heads, width, n)
    steps = d.normal(1, d.seqlen, heads), -d.wide(heads).exp()
    vectors = d.wide(heads), d.wide(heads) - SLOW
    inputs = x, *steps, B, C, *vectors, True, initial, d.resets(1, resets)
    y, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(dy, dfinal, *inputs, saved, window, 0)
    return by_name("y final_state dx ddt dA dB dC dD ddt_bias dinitial_state", (y, state, *gradients))
