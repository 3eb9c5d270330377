"""The gated delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"), chunked, with its state.

    S_t = exp(g_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ        o_t = S_tᵀ q_t

Inside a chunk the updates are one triangular system (their section 3.3, the extended WY form); from chunk to
chunk the state is carried."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose updates are solved for together


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o and the final state, differentiable in everything.

    Args:
        q, k: (batch, seqlen, nheads, d_k), as they enter the rule: scaled and normalised already.
        v: (batch, seqlen, nheads, d_v). g: (batch, seqlen, nheads), log decays, 0 or less.
        beta: (batch, seqlen, nheads).
        initial_state: (batch, nheads, d_k, d_v); zero if None.

    Returns:
        (batch, seqlen, nheads, d_v) and (batch, nheads, d_k, d_v), in float32, or float64 for float64 inputs.
    """
    seqlen, wide = q.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    pad = -seqlen % CHUNK
    # (batch, nheads, chunks, CHUNK, …); a padded token decays nothing and writes nothing
    q, k, v, g, beta = (
        F.pad(t.to(wide).transpose(1, 2), (0, 0) * (t.dim() - 3) + (0, pad)).unflatten(2, (-1, CHUNK))
        for t in (q, k, v, g, beta)
    )
    decayed = g.cumsum(-1)
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pairs = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(~below, -torch.inf).exp()
    written = k * beta[..., None]
    system = (written @ k.mT) * pairs
    right = torch.cat([v * beta[..., None], written * decayed.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * pairs
    queries = q * decayed.exp()[..., None]
    keys = (k * (decayed[..., -1:] - decayed).exp()[..., None]).mT
    whole = decayed[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    state, out = state.to(wide), []
    # unbound at once: taking chunk i out of a long tensor would make a gradient as long, a chunk
    for u, w, inside, query, key, decay in zip(
        *(t.unbind(2) for t in (values, reads, within, queries, keys, whole)), strict=True
    ):
        new = u - w @ state
        out.append(query @ state + inside @ new)
        state = state * decay + key @ new
    return torch.cat(out, dim=2)[:, :, :seqlen].transpose(1, 2), state
