"""The DPLR delta rule on a small problem."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name

SEQLEN = 280  # at most; the sequence is not split, and the reference of more takes long
SIZES = 16, 64, 64  # nheads, d_k, d_v: as RWKV-7 has them


def dplr_delta_rule(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and gradients of heads of SIZES; a and b as in RWKV-7: a token replaces a share of what is
    stored in one direction."""
    d, (heads, d_k, d_v) = Draw(device, dtype), SIZES
    d.seqlen = min(d.seqlen, SEQLEN)
    (q, k), (v, do) = ([d.normal(1, d.seqlen, heads, n) for _ in range(2)] for n in (d_k, d_v))
    direction = torch.nn.functional.normalize(d.normal(1, d.seqlen, heads, d_k), dim=-1)
    b = direction * d.normal(1, d.seqlen, heads, d_k).sigmoid()
    g = -(d.wide(1, d.seqlen, heads, d_k) - SLOW).exp()
    inputs = q, k, v, -direction, b, g, d.wide(1, heads, d_k, d_v), d.resets(1, resets)
    o, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(do, d.wide(1, heads, d_k, d_v), *inputs, saved)
    return by_name("o final_state dq dk dv da db dg dinitial_state", (o, state, *gradients))
