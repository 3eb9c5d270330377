"""A gated product on a small problem, as models call it."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import Draw, by_name


def swiglu(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of two halves of one product, and of two tensors, whose cotangent is replaced."""
    draw, backward = Draw(device, dtype), implementation.backward
    halves, d = draw.normal(2, draw.seqlen, 96), draw.normal(2, draw.seqlen, 48)
    gate, value = halves.chunk(2, dim=-1)
    results = implementation.forward(gate, value) + backward(d, gate, value)
    factors = gate.contiguous(), value.contiguous()
    in_place = implementation.forward(*factors) + backward(d.clone(), *factors, True)
    names = "y d_gate d_value"
    return by_name(names, results) | by_name(" ".join(f"contiguous_{n}" for n in names.split()), in_place)
