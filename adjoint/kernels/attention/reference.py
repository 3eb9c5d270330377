"""Attention to a part of the keys in plain PyTorch, for devices and dtypes without a kernel, such as float64
on CUDA: the scores of all queries and keys at once."""

import torch
from torch import Tensor

from adjoint.kernels.checks import accumulate_dtype


def past_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v and the log-sum-exp of the scores, (batch, heads, tokens); `causal`: query i sees
    the keys up to i."""
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k, causal, scale)
        log = scores.logsumexp(-1)
        out = scores.sub_(log[..., None]).exp_() @ v.to(scores.dtype)
        return out.to(q.dtype), log


def past_attention_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of q, k and v; `out` and `log` are of all keys that the queries see, also where k and v are
    a part of them."""
    with torch.autocast(q.device.type, enabled=False):
        weights = _scores(q, k, causal, scale).sub_(log[..., None]).exp_()
        narrow = q.dtype
        d, q, k, v = (t.to(weights.dtype) for t in (d, q, k, v))
        d_scores = d @ v.mT - (d * out).sum(-1, keepdim=True)
        d_scores.mul_(weights).mul_(scale)
        return (d_scores @ k).to(narrow), (d_scores.mT @ q).to(narrow), (weights.mT @ d).to(narrow)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """scale q kᵀ, in float32 at least; -inf where a query does not see a key."""
    wide = accumulate_dtype(q.dtype)
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
        scores.masked_fill_(~visible, -torch.inf)
    return scores
