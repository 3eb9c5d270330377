"""RMSNorm in plain PyTorch, with residual sum and gate."""

import torch
import torch.nn.functional as F


def offset_weight(weight: torch.Tensor | None, offset: float) -> torch.Tensor | float:
    """Return what the normalised channels are multiplied by: (width,), or a number without a weight."""
    if weight is None:
        return offset
    return weight + offset if offset else weight


def rms_norm_forward(x, weight, gate, residual, eps, group_size, dtype, offset=0.0):
    """y in `dtype`, the sum s = x + residual (None without a residual), the reciprocal root mean squares (…,
    groups)."""
    s = x if residual is None else x + residual
    grouped = (s if gate is None else s * F.silu(gate)).unflatten(-1, (-1, group_size))
    rstd = torch.rsqrt(grouped.square().mean(-1) + eps)
    y = offset_weight(weight, offset) * (grouped * rstd.unsqueeze(-1)).flatten(-2)
    return y.to(dtype), None if residual is None else s, rstd


def rms_norm_backward(dy, ds, s, weight, gate, rstd, group_size, x_dtype, offset=0.0):
    """The cotangent of s, to which ds, that of s as an output, is added; dweight; dgate; and the first once
    more in x's dtype, None where that is s's."""
    grouped = (s if gate is None else s * F.silu(gate)).unflatten(-1, (-1, group_size))
    scale = rstd.unsqueeze(-1)
    normalised = grouped * scale
    inner = (dy * offset_weight(weight, offset)).unflatten(-1, (-1, group_size))
    dv = (scale * (inner - normalised * (inner * normalised).mean(-1, keepdim=True))).flatten(-2)
    dweight = None if weight is None else (dy * normalised.flatten(-2)).reshape(-1, len(weight)).sum(0)
    dgate = None
    if gate is not None:
        sig = torch.sigmoid(gate)
        dgate = dv * s * sig * (1 + gate * (1 - sig))
        dv = dv * gate * sig
    return dv if ds is None else dv + ds, dweight, dgate, None
