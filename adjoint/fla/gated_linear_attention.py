"""Linear attention with a decay per channel of the keys or of the values, in plain PyTorch.

    S_t = e^{g_t} ⊙ S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

where e^{g_t} multiplies the rows of S (a decay per channel of the keys) or its columns (of the values).
`linear_scan` computes the states before blocks of `BLOCK` tokens. A block is divided into halves: queries of
the second half read keys of the first one, and each half is divided again. From a key to a query, a channel
decays by a product of two factors: from the key to the middle, and from the middle to the query. Each is the
exponential of a sum of g, so that no factor is above 1 and nothing is divided."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import checks
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.plain_recurrence import zero_where

BLOCK = 64  # tokens from one computed state to the next, a power of two


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor | None = None,
    value_decay: Tensor | None = None,
    bonus: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence above in the dtype of the arguments, which all have the same.

    Args:
        q, k: (batch, seqlen, heads, d_k). v: (batch, seqlen, heads, d_v).
        key_decay: log decays of the keys' channels, at most 0, like k; None for no decay.
        value_decay: log decays of the values' channels, at most 0, like v; None for no decay.
        bonus: (heads, d_k). If it is given, o_t = S_{t-1}ᵀ q_t + (q_t · (bonus ⊙ k_t)) v_t, as in RWKV-6.
        initial_state: (batch, heads, d_k, d_v), zero if None.
        seq_idx: (batch, seqlen) document numbers; each document begins with a state of zero.

    Returns:
        o like v, and the final state (batch, heads, d_k, d_v).
    """
    batch, seqlen = q.shape[:2]
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    block = min(BLOCK, 1 << (seqlen - 1).bit_length())

    def to_blocks(x: Tensor) -> Tensor:
        """Return (batch, heads, blocks, block, d); padding neither decays nor writes."""
        return F.pad(x.transpose(1, 2), (0, 0, 0, -seqlen % block)).unflatten(2, (-1, block))

    # Documents of a block, numbered. The first one, 0, goes on from the block before.
    document = None if reset is None else to_blocks(reset[:, :, None, None].int()).cumsum(-2)
    key_decay, value_decay = (
        None if g is None else to_blocks(zero_where(g, reset)) for g in (key_decay, value_decay)
    )
    q, k, v = to_blocks(q), to_blocks(k), to_blocks(v)
    written = k if bonus is None else k * bonus[:, None, None]
    # what a token reads of itself, of its block, and of the state before the block
    o = (q * written).sum(-1, keepdim=True) * v
    size = block // 2
    while size:
        o = o + _across_halves(q, k, v, key_decay, value_decay, document, size, bonus is not None)
        size //= 2
    before, final_state = _states(k, v, key_decay, value_decay, document, initial_state)
    queries = q if document is None else q.masked_fill(document > 0, 0)
    o = o + _since(value_decay, bonus is not None) * (
        (queries * _since(key_decay, bonus is not None)) @ before
    )
    return o.flatten(2, 3)[:, :, :seqlen].transpose(1, 2), final_state


def _across_halves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor | None,
    value_decay: Tensor | None,
    document: Tensor | None,
    size: int,
    is_exclusive: bool,
) -> Tensor:
    """Return what tokens read of the `size` tokens before theirs, in pairs of pieces of that size."""

    def half(x: Tensor | None, index: int) -> Tensor | None:
        return None if x is None else x.unflatten(-2, (-1, 2, size)).select(-3, index)

    queries, keys, values = (x.unflatten(-2, (-1, 2, size)) for x in (q, k, v))
    queries = queries[..., 1, :, :] * _since(half(key_decay, 1), is_exclusive)
    keys = keys[..., 0, :, :] * _until(half(key_decay, 0))
    values = values[..., 0, :, :] * _until(half(value_decay, 0))
    weights = queries @ keys.mT
    if document is not None:
        reads, writes = half(document, 1), half(document, 0)
        assert reads is not None and writes is not None
        weights = weights.masked_fill(reads != writes.mT, 0)
    read = (weights @ values) * _since(half(value_decay, 1), is_exclusive)
    return F.pad(read[..., None, :, :], (0, 0, 0, 0, 1, 0)).flatten(-4, -2)


def _states(
    k: Tensor,
    v: Tensor,
    key_decay: Tensor | None,
    value_decay: Tensor | None,
    document: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the states before each block, (batch, heads, blocks, d_k, d_v), and the last one."""
    keys, values = k * _until(key_decay), v * _until(value_decay)
    if document is not None:  # only the last document of a block is in the state after it
        keys = keys.masked_fill(document != document[..., -1:, :], 0)
    writes = keys.mT @ values
    through = torch.ones_like(writes)
    if key_decay is not None:
        through = through * key_decay.sum(-2).exp()[..., :, None]
    if value_decay is not None:
        through = through * value_decay.sum(-2).exp()[..., None, :]
    if document is not None:
        through = through.masked_fill(document[..., -1:, :] > 0, 0)
    initial = writes.new_zeros(writes[:, :, 0].shape) if initial_state is None else initial_state
    decays, inputs = (x.flatten(0, 1).flatten(2) for x in (through, writes))
    states = linear_scan(decays, inputs, initial.flatten(0, 1).flatten(1)).view_as(writes)
    return torch.cat([initial[:, :, None], states[:, :, :-1]], dim=2), states[:, :, -1]


def _since(g: Tensor | None, is_exclusive: bool) -> Tensor | float:
    """Return how much is left at each token of what there was before the first, by log decays (…, tokens, d).

    is_exclusive: before the token's own decay."""
    if g is None:
        return 1.0
    g = F.pad(g[..., :-1, :], (0, 0, 1, 0)) if is_exclusive else g
    return g.cumsum(-2).exp()


def _until(g: Tensor | None) -> Tensor | float:
    """Return how much is left of each token after the last one, by log decays (…, tokens, d)."""
    if g is None:
        return 1.0
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
