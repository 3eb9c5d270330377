"""RMSNorm on small problems, as models call it."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import Draw, by_name


def rms_norm(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients over 48 channels: gated in groups, with a residual, and from a float32 stream."""
    d, forward, backward = Draw(device, dtype), implementation.forward, implementation.backward
    x, gate, dy, weight = *(d.normal(2, d.seqlen, 48) for _ in range(3)), d.wide(48)
    y, _, rstd = forward(x, weight, gate, None, 1e-5, 24, d.dtype)
    gradients = backward(dy, None, x, weight, gate, rstd, 24, d.dtype)[:3]
    gated = by_name("gated_y gated_dx gated_dweight gated_dgate", (y, *gradients))
    residual, ds = d.wide(2, d.seqlen, 48), d.wide(2, d.seqlen, 48)
    y, s, rstd = forward(x, weight, None, residual, 1e-5, 48, d.dtype)
    dresidual, dweight, _, dx = backward(dy, ds, s, weight, None, rstd, 48, d.dtype)
    dx = dresidual if dx is None else dx
    summed = by_name("y sum dweight dresidual dx", (y, s, dweight, dresidual, dx))
    # under autocast a block's norm reads the float32 stream and writes what its linear map reads
    y, _, rstd = forward(residual, weight, None, None, 1e-5, 48, d.dtype)
    gradients = backward(dy, None, residual, weight, None, rstd, 48, residual.dtype)[:2]
    offsets: dict[str, Tensor] = {}
    for name, added_to in (("unit", None), ("around_one", weight)):
        y_offset, _, rstd_offset = forward(x, added_to, None, None, 1e-5, 24, d.dtype, 1.0)
        d_offset = backward(dy, None, x, added_to, None, rstd_offset, 24, d.dtype, 1.0)[:2]
        results = zip(("y", "dx", "dweight"), (y_offset, *d_offset), strict=True)
        offsets |= {f"{name}_{result}": t for result, t in results if t is not None}
    return gated | summed | offsets | by_name("stream_y stream_dx stream_dweight", (y, *gradients))
