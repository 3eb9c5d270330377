"""RMSNorm, optionally of a gated input, which keeps its input and one number a row for the backward."""

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators


def _forward(x, weight, gate, eps, group_size, backend, save=False):
    impl = dispatch.choose("rms_norm", backend, x.device, x.dtype)
    y, rstd = impl.rms_norm_forward(x, weight, gate, eps, group_size)
    return y, rstd if save else None


def _fake(x, weight, gate, eps, group_size, backend, save=False):
    groups = x.shape[-1] // group_size
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(
        (*x.shape[:-1], groups) if save else 0
    )


def _backward(dy, x, weight, gate, rstd, eps, group_size, backend):
    impl = dispatch.choose("rms_norm", backend, x.device, x.dtype)
    dy = torch.zeros_like(x) if dy is None else dy
    return impl.rms_norm_backward(dy, x, weight, gate, rstd, group_size)


_rms_norm = operators.register(
    "rms_norm",
    "Tensor x, Tensor weight, Tensor? gate",
    "float eps, int group_size, str? backend",
    outputs=1,
    gradients=3,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    checkpoints=True,
)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    group_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """y = weight v / sqrt(mean(v²) + eps) with v = x silu(gate), or x (Zhang & Sennrich 2019; gated as in
    Mamba-2, Dao & Gu 2024, section 7).

    Args:
        x, gate: (…, d), floating point. weight: (d,).
        group_size: channels a mean is taken over; all d if None.
        backend: a name of `adjoint.backends()`; None picks one.

    Returns:
        y like x, computed in float32 for bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, group_size does not divide d, or the backend is not usable here.
    """
    d = x.shape[-1]
    checks.shape("weight", weight, d)
    checks.shape("gate", gate, *x.shape)
    group_size = d if group_size is None else group_size
    if group_size < 1 or d % group_size:
        raise ValueError(f"group_size must divide the {d} channels, got {group_size}")
    wide, narrow = dispatch.compute_dtype(x), dispatch.sequence_dtype("rms_norm", backend, x)
    gate = None if gate is None else gate.to(narrow)
    y, _ = _rms_norm(x.to(narrow), weight.to(wide), gate, eps, group_size, backend)
    return y.to(x.dtype)
