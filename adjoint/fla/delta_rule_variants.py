"""Delta rules with more than one write per token, or with other keys for what is read before a write.

All are S_t = (diag(exp(g_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ with o_t = S_tᵀ q_t, under fla's own names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adjoint.fla.arguments import documents, scaled
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.rms_norm import l2_norm


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule with n = `num_householder` writes per token (Siems et al. 2025, DeltaProduct).

    It is the delta rule over n · seqlen steps: a token decays the state in its first, and reads it after its
    last.

    Args:
        q: (batch, seqlen, heads, d_k). g: log decays (batch, seqlen, heads); None for none.
        k, v, beta: (batch, n · seqlen, heads, d_k), (…, d_v), (…).
    """
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
    assert beta is not None
    n, wide = num_householder, accumulate_dtype(q.dtype)
    queries, keys = (l2_norm(t.to(wide)) if use_qk_l2norm_in_kernel else t.to(wide) for t in (q, k))
    decays = beta.new_zeros(q.shape[:3], dtype=wide) if g is None else g.to(wide)
    if seq_idx is not None:
        seq_idx = seq_idx.repeat_interleave(n, dim=1)
    o, final = gated_delta_rule(
        scaled(queries, scale).repeat_interleave(n, dim=1),
        keys,
        v,
        torch.stack([decays, *[torch.zeros_like(decays)] * (n - 1)], dim=2).flatten(1, 2),
        beta.to(wide),
        initial_state,
        seq_idx,
    )
    return o[:, n - 1 :: n].to(v.dtype), final if output_final_state else None


def comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run Comba (Hu et al. 2025): a delta rule that reads by p what it replaces, and writes by k.

    Args:
        q, k, p: (batch, seqlen, k_heads, d_k). v: (batch, seqlen, heads, d_v).
        g, beta: (batch, seqlen, heads).
    """
    seq_idx, wide = documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(q.dtype)
    queries, keys, reads = (t.to(wide) for t in (q, k, p))
    if use_qk_l2norm_in_kernel:
        queries, keys, reads = map(l2_norm, (queries, keys, reads))
    o, final = _write_apart(queries, keys, reads, v, g, beta, scale, initial_state, seq_idx)
    return o, final if output_final_state else None


def preconditioned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,  # promises to fla's kernels
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the gated delta rule with a diagonal preconditioner of the keys that it writes by.

    The preconditioner is x^(-s), with s = r / (1 + |r|) and r the logarithm of a decayed sum of the keys'
    squares, less a centre per head.

    Args:
        q, k: (batch, seqlen, k_heads, d_k). v: (batch, seqlen, heads, d_v).
        g: log decays, (batch, seqlen, heads), or (…, d_k). beta: (batch, seqlen, heads).
        g_atk, beta_atk: log decays and weights of the sum of squares, (batch, seqlen, k_heads).
        initial_A_state: that sum, (batch, k_heads, d_k), as the returned one.
    """
    assert not use_gate_in_kernel
    state = initial_state if initial_state is not None else initial_A_state
    seq_idx, wide = documents(cu_seqlens, state, output_final_state), accumulate_dtype(q.dtype)
    queries, keys = (l2_norm(t.to(wide)) if use_qk_l2norm_in_kernel else t.to(wide) for t in (q, k))
    weights, decays = beta_atk.to(wide).unsqueeze(-1), g_atk.to(wide).exp().unsqueeze(-1)
    squares = (weights * keys.square()).flatten(2)
    before = None if initial_A_state is None else initial_A_state.to(wide).flatten(1)
    sums = linear_scan(decays.expand_as(keys).flatten(2), squares, before, seq_idx=seq_idx).view_as(keys)
    centre = -0.2 if log_atk_scale is None else log_atk_scale
    if isinstance(centre, Tensor):
        centre = centre.to(wide).view(1, 1, -1, 1)
    r = (sums + eps).log() - centre
    writes = keys * (-math.log(x) * r / (1 + r.abs())).exp()
    o, final = _write_apart(queries, writes, keys, v, g, beta, scale, initial_state, seq_idx)
    return o, final if output_final_state else None, sums[:, -1] if output_final_state else None


def _write_apart(
    queries: Tensor,
    writes: Tensor,
    reads: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = D S + β w (v - D S r)ᵀ, with D = diag(exp(g)), keys w that are written and r that are read.

    Returns:
        o (batch, seqlen, heads, d_v) and the final state (batch, heads, d_k, d_v).
    """
    shared = v.shape[2] // queries.shape[2]
    if shared > 1:
        queries, writes, reads = (t.repeat_interleave(shared, dim=2) for t in (queries, writes, reads))
    decays = g.to(writes.dtype)
    if decays.dim() == 3:
        decays = decays.unsqueeze(-1).expand_as(writes)
    writes = beta.to(writes.dtype).unsqueeze(-1) * writes
    o, final = dplr_delta_rule(
        scaled(queries, scale), writes, v, reads * decays.exp(), -writes, decays, initial_state, seq_idx
    )
    return o.to(v.dtype), final
