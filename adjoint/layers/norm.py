"""RMSNorm, computed in float32 for half-precision inputs."""

from typing import overload

import torch
from torch import Tensor, nn

from adjoint.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight v / sqrt(mean(v²) + eps), the mean over groups of `group_size` channels (all of them by
    default), v = s or s silu(gate), s = x or x + residual; x (…, d) in, same dtype out. With a residual both
    y and s, in residual's dtype, come back."""

    def __init__(self, d: int, eps: float, group_size: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps
        self.group_size = group_size or d

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    @overload
    def forward(self, x: Tensor, gate: Tensor | None = ..., residual: None = ...) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, gate: Tensor | None = ..., *, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, gate: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps, gate, self.group_size)
        return rms_norm(x, self.weight, self.eps, gate, self.group_size, residual=residual)
