"""RMSNorm, computed in float32 for half-precision inputs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import dispatch
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.collectives import copy_to_ranks, sum_over_ranks
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


def norm_over_ranks(
    norm: RMSNorm, x: Tensor, gate: Tensor, group: dist.ProcessGroup, ranks_per_group: int
) -> Tensor:
    """Return the gated norm of x (…, d) whose channels are one rank's part of a group of channels.

    Each group of channels is spread over `ranks_per_group` neighbouring ranks. A sum of squares per token and
    group of channels travels between ranks."""
    dtype = accumulate_dtype(x.dtype)
    v = x.to(dtype) * F.silu(gate.to(dtype))
    groups = dist.get_world_size(group) // ranks_per_group
    is_local = F.one_hot(torch.tensor(dist.get_rank(group) // ranks_per_group, device=x.device), groups).to(
        dtype
    )
    squares = v.square().sum(-1, keepdim=True) * is_local
    squares = copy_to_ranks(sum_over_ranks(squares, group), group)
    mean = (squares * is_local).sum(-1, keepdim=True) / (v.shape[-1] * ranks_per_group)
    return (norm.weight.to(dtype) * v * torch.rsqrt(mean + norm.eps)).to(x.dtype)
