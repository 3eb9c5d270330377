"""RMSNorm, computed in float32 for half-precision inputs."""

import torch
from torch import Tensor, nn

from adjoint.kernels import dispatch
from adjoint.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight v / sqrt(mean(v²) + eps), the mean over groups of `group_size` channels (all of them by
    default), v = s or s silu(gate), s = x or x + residual; x (…, d) in, same dtype out. With a residual both
    y and s, in residual's dtype, come back.

    Args:
        to_linear: y goes into a single linear map and nowhere else. Of a float32 x y then has the dtype in
            which autocast, where it is on, would have that map read it: the same numbers, no cast behind it.
    """

    def __init__(self, d: int, eps: float, group_size: int | None = None, to_linear: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps
        self.group_size = group_size or d
        self.to_linear = to_linear

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, gate: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        narrow = self.to_linear and x.dtype == torch.float32
        dtype = dispatch.autocast_dtype(x.device) if narrow else None
        if residual is None:
            return rms_norm(x, self.weight, self.eps, gate, self.group_size, dtype=dtype)
        return rms_norm(x, self.weight, self.eps, gate, self.group_size, residual=residual, dtype=dtype)
