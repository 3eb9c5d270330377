"""RMSNorm, computed in float32 for half-precision inputs."""

import torch
from torch import Tensor, nn

from adjoint.kernels import dispatch
from adjoint.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight v / sqrt(mean(v²) + eps), of x's shape (…, d) and dtype. The mean is over groups of
    `group_size` channels (default: all d); v = s or s silu(gate); s = x or x + residual. With a residual it
    gives (y, s), s in residual's dtype.

    Args:
        to_linear: y is read by one linear map alone. Under autocast, for a float32 x, y then has the dtype to
            which that map would cast it: the same numbers, without the cast.
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
