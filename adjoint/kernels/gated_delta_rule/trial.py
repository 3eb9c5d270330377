"""The gated delta rule on a small problem, with decays per head and per channel."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name

SEQLEN = 280  # at most; the sequence is not split, and the reference of more takes long
SIZES = 16, 128, 128  # nheads, d_k, d_v: as Gated DeltaNet, Qwen3.5 and Kimi Linear have them


def gated_delta_rule(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
    decay_per_channel: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients of heads of SIZES, with one decay per head or per channel of the keys."""
    d, (heads, d_k, d_v) = Draw(device, dtype), SIZES
    d.seqlen = min(d.seqlen, SEQLEN)
    q, v, do = d.normal(1, d.seqlen, heads, d_k), *(d.normal(1, d.seqlen, heads, d_v) for _ in range(2))
    k = torch.nn.functional.normalize(d.normal(1, d.seqlen, heads, d_k), dim=-1)
    g = -(d.wide(1, d.seqlen, heads, *([d_k] if decay_per_channel else [])) - SLOW).exp()
    beta = d.wide(1, d.seqlen, heads).sigmoid()
    inputs = q, k, v, g, beta, d.wide(1, heads, d_k, d_v), d.resets(1, resets)
    o, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(do, d.wide(1, heads, d_k, d_v), *inputs, saved)
    return by_name("o final_state dq dk dv dg dbeta dinitial_state", (o, state, *gradients))


def kda(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same problem with a decay for each channel of the keys."""
    return gated_delta_rule(implementation, window, resets, device, dtype, decay_per_channel=True)
