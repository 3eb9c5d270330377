"""The gated delta rule on a small problem, with decays per head and per channel."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name


def gated_delta_rule(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
    d_decay: int | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients of 3 heads, keys of 16 and values of 24 channels; `d_decay`: channels that have a
    decay each, None for one per head."""
    d, heads, d_k, d_v = Draw(device, dtype), 3, 16, 24
    q, v, do = d.normal(2, d.seqlen, heads, d_k), *(d.normal(2, d.seqlen, heads, d_v) for _ in range(2))
    k = torch.nn.functional.normalize(d.normal(2, d.seqlen, heads, d_k), dim=-1)
    g = -(d.wide(2, d.seqlen, heads, *([] if d_decay is None else [d_decay])) - SLOW).exp()
    beta = d.wide(2, d.seqlen, heads).sigmoid()
    inputs = q, k, v, g, beta, d.wide(2, heads, d_k, d_v), d.resets(2, resets)
    o, state, saved = implementation.forward(*inputs, True)
    gradients = implementation.backward(do, d.wide(2, heads, d_k, d_v), *inputs, saved)
    return by_name("o final_state dq dk dv dg dbeta dinitial_state", (o, state, *gradients))


def kda(
    implementation: Implementation, window: int | None, resets: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same problem with a decay for each channel of the keys."""
    return gated_delta_rule(implementation, window, resets, device, dtype, d_decay=16)
