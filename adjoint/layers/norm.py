"""RMSNorm, computed in float32 for half-precision inputs."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x²) + eps) over groups of `group_size` channels (all of them by default); x
    (…, d) in, same dtype out."""

    def __init__(self, d: int, eps: float, group_size: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps
        self.group_size = group_size or d

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        grouped = wide.unflatten(-1, (-1, self.group_size))
        # one matmul-free reduction and one product: cheap to recompute, and its backward keeps x and the
        # scale alone
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * (grouped * scale).flatten(-2)).to(x.dtype)
