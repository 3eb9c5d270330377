"""Our operations in the places of flash-linear-attention's Triton functions, for its causal LMs.

Its modules call functions that have code for GPUs only. While a chunk runs, and in the comparison on first
use, ours stand where its modules call them by name, so that a wrapped model trains on CPUs too. They
accept what the layers named in `LAYERS` pass, under fla's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.gated import gated
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.rms_norm import rms_norm

# Layers whose state is supported and whose functions are replaced here.
LAYERS = ("GatedDeltaNet", "KimiDeltaAttention", "DeltaNet", "HGRNAttention")


def is_of_fla(thing: object) -> bool:
    """Whether a module's or a configuration's class is flash-linear-attention's."""
    return any(cls.__module__.startswith("fla.") for cls in type(thing).__mro__)


def why_not(module: nn.Module) -> str | None:
    """Return the reason why one of fla's modules is known not to work by chunks, or None."""
    kind = type(module)
    if kind.__module__.startswith("fla.layers.") and kind.__name__ not in LAYERS:
        return f"fla's {kind.__name__} is not supported; {', '.join(LAYERS)} are"
    config = getattr(module, "config", None)
    if getattr(config, "attnres_block_size", None) is not None:
        return "attention over residuals runs in fla's own kernels alone; set attnres_block_size to None"
    if getattr(module, "hidden_act", "swish") != "swish":
        return f"fla's MLP with hidden_act {module.hidden_act!r} is not supported; set it to 'swish'"
    return None


def ignores_other_tokens(inputs: Iterable[str]) -> bool:
    """Whether fla's models treat tokens with these inputs as without the tokens before them.

    They leave out what an attention_mask pads, and do not look at positions."""
    return set(inputs) == {"attention_mask"}


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,  # a promise to fla's kernels
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule.

    Args:
        q, k: (batch, seqlen, k_heads, d_k).
        v: (batch, seqlen, heads, d_v).
        g: log decays, (batch, seqlen, heads) or (batch, seqlen, heads, d_k); None for no decay.
        initial_state: (batch, heads, d_k, d_v), or (…, d_v, d_k) with state_v_first, as the returned one.
        safe_gate: a promise to fla's kernels; ours do not need it.
    """
    seq_idx = _documents(cu_seqlens, initial_state, output_final_state)
    assert beta is not None
    wide, heads = accumulate_dtype(q.dtype), v.shape[2]
    queries, keys = (t.to(wide) for t in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (queries, keys))
    queries, shared = queries * (q.shape[-1] ** -0.5 if scale is None else scale), heads // q.shape[2]
    if shared > 1:
        queries, keys = (t.repeat_interleave(shared, dim=2) for t in (queries, keys))
    beta = beta.to(wide)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    g = torch.zeros_like(beta) if g is None else g.to(wide)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    o, final = gated_delta_rule(queries, keys, v, g, beta, initial_state, seq_idx)
    final = final.mT if state_v_first else final
    return o.to(v.dtype), final if output_final_state else None


def _gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return log decays (batch, seqlen, heads) or (batch, seqlen, heads, d_k), computed from a layer's
    gate."""
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype).view(g.shape[2:])
    rate = None if A_log is None else A_log.to(g.dtype).exp().view(-1, *[1] * (g.dim() - 3))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if rate is None else rate * g)
    assert rate is not None
    return -rate * F.softplus(g)


def _hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute h_t = exp(g_t) h_{t-1} + x_t, all of (batch, seqlen, d)."""
    seq_idx, wide = _documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(x.dtype)
    initial_state = None if initial_state is None else initial_state.to(wide)
    h = linear_scan(g.to(wide).exp(), x.to(wide), initial_state, seq_idx=seq_idx)
    return h.to(x.dtype), h[:, -1] if output_final_state else None


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve x (batch, seqlen, channels); states are (batch, channels, taps), and their oldest entry is
    never read."""
    _refuse_arguments(chunk_indices=chunk_indices)
    seq_idx = _documents(cu_seqlens, initial_state, output_final_state)
    before = None if initial_state is None else initial_state[..., 1:]
    y, tail = causal_conv1d(x, weight, bias, before, activation in ("silu", "swish"), seq_idx)
    y = y if residual is None else y + residual
    return y, F.pad(tail, (1, 0)) if output_final_state else None


def _conv_step(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve a single token."""
    assert weight is not None
    return _conv(x, weight, bias, residual, cache, True, activation)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize the sum of x and the residual; with `prenorm` return the sum, too."""
    _refuse_arguments(bias=bias, residual_in_fp32=residual_in_fp32 or None)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    if residual is None:
        y, total = rms_norm(x, weight, eps), x
    else:
        y, total = rms_norm(x, weight, eps, residual=residual)
    return (y, total) if prenorm else y


def _rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    _refuse_arguments(residual=residual, prenorm=prenorm or None)
    _refuse_arguments(bias=bias, residual_in_fp32=residual_in_fp32 or None)
    y = rms_norm(x, x.new_ones(x.shape[-1]) if weight is None else weight, eps)
    return y * torch.sigmoid(g) if activation == "sigmoid" else gated(g, y)


def _swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(gated(x, y), weight, bias)


def _documents(cu_seqlens: Tensor | None, initial_state: Tensor | None, final: bool | None) -> Tensor | None:
    """Return document numbers (1, seqlen) of the rows that fla's layers join without their padding.

    A chunk's rows are not joined, and only chunks have states: both at once are refused."""
    if cu_seqlens is None:
        return None
    _refuse_arguments(initial_state=initial_state, output_final_state=final or None)
    lengths = cu_seqlens.diff()
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[None]


def _refuse_arguments(**unsupported: object) -> None:
    """Refuse arguments of fla's functions that ours do not support, if they are given."""
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{name} is given to one of fla's functions, and ours in its place takes none")


# Our functions, by the names under which fla's modules call theirs.
FUNCTIONS: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor | None]]] = {
    **{
        f"{prefix}_{name}": _delta_rule
        for prefix in ("chunk", "fused_recurrent")
        for name in ("gated_delta_rule", "kda", "delta_rule")
    },
    "chunk_hgrn": _hgrn,
    "fused_recurrent_hgrn": _hgrn,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_step,
    "rms_norm": _rms_norm,
    "rms_norm_gated": _rms_norm_gated,
    "swiglu": gated,
    "swiglu_linear": _swiglu_linear,
}
