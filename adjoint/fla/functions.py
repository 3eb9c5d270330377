"""Our operations in the places of flash-linear-attention's Triton functions, for its causal LMs.

Its modules call functions that have code for GPUs only. While a chunk runs, and in the comparison on first
use, ours stand where its modules call them by name, so that a wrapped model trains on CPUs too. They
accept what the layers named in `LAYERS` pass, under fla's own names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.fla import delta_rule_variants
from adjoint.fla.arguments import documents, refuse_arguments, scaled
from adjoint.fla.gated_linear_attention import gated_linear_attention
from adjoint.kernels.attention import causal_attention
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.gated import gated
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.rms_norm import l2_norm, rms_norm
from adjoint.kernels.ssd_scan import ssd_scan

# Layers whose state is supported and whose functions are replaced here.
LAYERS = (
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "DeltaNet",
    "HGRNAttention",
    "MultiScaleRetention",
    "LinearAttention",
    "GatedLinearAttention",
    "HGRN2Attention",
    "GatedSlotAttention",
    "RWKV6Attention",
    "RWKV7Attention",
    "Mamba",
    "Mamba2",
    "GatedDeltaProduct",
    "Comba",
    "PrecondGatedDeltaNet",
    "PrecondKDA",
    "LightNetAttention",
    "RodimusAttention",
    "Raven",
    "Attention",
    "MultiheadLatentAttention",
)
SUBMODULES = ("LerpLinear", "DDLerpLinear", "LoRA")  # of these layers, in the same Python modules


# Classes of fla that cannot run by chunks, each with what it needs or lacks.
UNSUPPORTED = {
    "ABCAttention": "its cache lacks the sum by which the softmax of its slots is divided",
    "BitAttention": "its linear maps round activations in kernels of fla's that run on GPUs alone",
    "CATModel": "it compresses pieces of the whole sequence, and has no cache that several tokens go on from",
    "CyclicFlowAttention": "its memory's slots move by a clock, by a function of fla's that has none here",
    "DeltaFormerAttention": "each token's values depend on all earlier ones by a triangular system",
    "ForgettingAttention": "its keys decay from token to token, and chunks carry keys without decays",
    "LogLinearMamba2": "its number of states grows with the logarithm of the length",
    "Mamba3": "fla's own runs on GPUs alone, so nothing can be compared; a Stack has mixer='mamba3'",
    "MesaNet": "it solves a linear system for each token, by a function of fla's that has none here",
    "MoBA": "it attends to all keys where it has a cache, and to the blocks that it picks where it has none",
    "MomAttention": "it packs tokens by the memory that they are sent to; a chunk has one state per layer",
    "NativeSparseAttention": "it picks blocks of keys by their means, in kernels that run on GPUs alone",
    "PaTHAttention": "each later token transforms the keys of all earlier ones",
    "Parallax": "it corrects attention by a second set of scores, by a function of fla's that has none here",
    "StickBreakingAttention": "a key's weight depends on those of all later ones",
    "WallAttention": "its keys decay by channel from token to token, and chunks carry keys without decays",
    "YOCOModel": "half of its layers read keys that another layer of theirs holds",
}


def is_of_fla(thing: object) -> bool:
    """Whether a module's or a configuration's class is flash-linear-attention's."""
    return is_class_of_fla(type(thing))


def _is_class_of_fla(cls: type) -> bool:
    return any(base.__module__.startswith("fla.") for base in cls.__mro__)


# Not a decorator: mypy takes no class for the Hashable that a cached function's arguments are.
is_class_of_fla: Callable[[type], bool] = functools.cache(_is_class_of_fla)


def attention_windows(config: object) -> dict[int, int | None]:
    """Map each layer of attention in one of fla's models to its window, or None for no window."""
    if getattr(config, "model_type", "") in ("transformer", "mla"):
        return dict.fromkeys(range(vars(config)["num_hidden_layers"]), vars(config)["window_size"])
    specs = getattr(config, "attn", None) or []
    specs = [specs] if isinstance(specs, dict) else specs
    return {layer: spec.get("window_size") for spec in specs for layer in spec["layers"]}


def why_not(module: nn.Module) -> str | None:
    """Return the reason why one of fla's modules is known not to work by chunks, or None."""
    kind = type(module)
    if kind.__name__ in UNSUPPORTED:
        return f"fla's {kind.__name__} is not supported: {UNSUPPORTED[kind.__name__]}"
    if kind.__module__.startswith("fla.layers.") and kind.__name__ not in (*LAYERS, *SUBMODULES):
        return f"fla's {kind.__name__} is not supported; {', '.join(LAYERS)} are"
    config = getattr(module, "config", None)
    if getattr(config, "attnres_block_size", None) is not None:
        return "attention over residuals runs in fla's own kernels alone; set attnres_block_size to None"
    if getattr(module, "hidden_act", "swish") != "swish":
        return f"fla's MLP with hidden_act {module.hidden_act!r} is not supported; set it to 'swish'"
    return None


def activation_replacements(
    model: nn.Module,
) -> list[tuple[dict[str, Callable[..., object]], dict[str, Callable[..., object]]]]:
    """Return the attributes of fla's modules that hold one of its activations, with ours for each."""
    if (activations := sys.modules.get("fla.modules.activations")) is None:
        return []
    table = getattr(activations, "ACT2FN", {})
    ours = {theirs: ACTIVATIONS[name] for name, theirs in table.items() if name in ACTIVATIONS}
    replacements = []
    for attributes in (vars(module) for module in model.modules() if is_of_fla(module)):
        functions = {
            name: ours[function]
            for name, value in attributes.items()
            if callable(function := getattr(value, "theirs", value)) and function in ours
        }
        if functions:
            replacements.append((attributes, functions))
    return replacements


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
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
    assert beta is not None
    wide, heads = accumulate_dtype(q.dtype), v.shape[2]
    queries, keys = (t.to(wide) for t in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = l2_norm(queries), l2_norm(keys)
    queries, shared = scaled(queries, scale), heads // q.shape[2]
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


def _kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,  # of fla's kernel; ours is that of the sums
) -> Tensor:
    return _gate(g.to(accumulate_dtype(g.dtype)), A_log, dt_bias, lower_bound)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend to the tokens up to the query's own; the last query's token is the last key's.

    Args:
        q, k, v: (batch, seqlen, heads, d), with more keys than queries and fewer heads of them, maybe.
        window_size: how many tokens before its own a query sees, and how many after it: none.
    """
    if not causal:
        raise ValueError("flash_attn_func is called without causal=True, and ours in its place has no other")
    window = None if window_size[0] < 0 else window_size[0] + 1
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    return causal_attention(queries, keys, values, window).transpose(1, 2)


def _attention_of_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_: int,  # lengths of the longest documents, for fla's kernels
) -> Tensor:
    """Attend within documents, whose tokens are joined: q, k and v are (seqlen, heads, d)."""
    pieces = [
        t.split(lengths.diff().tolist())
        for t, lengths in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    outputs = [
        _attention(queries[None], keys[None], values[None], causal, window_size)[0]
        for queries, keys, values in zip(*pieces, strict=True)
    ]
    return torch.cat(outputs)


def _hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute h_t = exp(g_t) h_{t-1} + x_t, all of (batch, seqlen, d)."""
    seq_idx, wide = documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(x.dtype)
    initial_state = None if initial_state is None else initial_state.to(wide)
    h = linear_scan(g.to(wide).exp(), x.to(wide), initial_state, seq_idx=seq_idx)
    return h.to(x.dtype), h[:, -1] if output_final_state else None


def _retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run retention: head h decays by 1 - 2^(-5 - h) per token (Sun et al. 2023, section 2.2)."""
    heads = torch.arange(q.shape[2], dtype=accumulate_dtype(q.dtype), device=q.device)
    decay = torch.log1p(-(2.0 ** (-5.0 - heads)))
    return _decayed_per_head(q, k, v, decay, scale, initial_state, output_final_state, cu_seqlens)


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]:
    """Run linear attention without decays.

    With `normalize`, o_t is divided by q_t times the sum of the keys up to t. Then the state is a pair:
    (batch, heads, d_k, d_v), and the sum of the keys (batch, 1, heads, d_k)."""
    sums = None
    if isinstance(initial_state, tuple):
        initial_state, sums = initial_state
    wide = accumulate_dtype(q.dtype)
    decay = torch.zeros(q.shape[2], dtype=wide, device=q.device)
    o, final = _decayed_per_head(q, k, v, decay, scale, initial_state, output_final_state, cu_seqlens)
    if not normalize:
        return o, final
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
    keys = k.to(wide).flatten(2)
    sums = None if sums is None else sums.flatten(1).to(wide)
    key_sums = linear_scan(torch.ones_like(keys[..., :1]), keys, sums, seq_idx=seq_idx).view_as(k)
    o = o.to(wide) / ((scaled(q.to(wide), scale) * key_sums).sum(-1, keepdim=True) + 1e-10)
    return o.to(v.dtype), None if final is None else (final, key_sums[:, -1:])


def _decayed_per_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention whose heads decay by e^decay per token, an SSD scan with steps of 1.

    Args:
        q, k: (batch, seqlen, heads, d_k). v: (batch, seqlen, heads, d_v). decay: (heads,).
        initial_state: (batch, heads, d_k, d_v), as the returned one.
    """
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
    queries = scaled(q, scale)
    before = None if initial_state is None else initial_state.mT
    o, final = ssd_scan(
        v, torch.ones_like(v[..., 0]), decay, k, queries, initial_state=before, seq_idx=seq_idx
    )
    return o, final.mT if output_final_state else None


def _gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run gated linear attention (Yang et al. 2023), with log decays g or gk like k.

    States are (batch, heads, d_k, d_v), or (…, d_v, d_k) with state_v_first."""
    seq_idx, wide = documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(q.dtype)
    queries = scaled(q.to(wide), scale)
    decay = gk if g is None else g
    if initial_state is not None:
        initial_state = (initial_state.mT if state_v_first else initial_state).to(wide)
    o, final = gated_linear_attention(
        queries,
        k.to(wide),
        v.to(wide),
        key_decay=None if decay is None else decay.to(wide),
        initial_state=initial_state,
        seq_idx=seq_idx,
    )
    final = final.mT if state_v_first else final
    return o.to(v.dtype), final if output_final_state else None


def _lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor | None, Tensor | None] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor]]:
    """Run LightNet (Qin et al. 2024): gated linear attention whose keys are a softmax over the tokens so far.

    Args:
        k: logits of the keys, (batch, seqlen, heads, d_k).
        initial_state: that of gated linear attention, and the logarithm (batch, 1, heads, d_k) of the sum of
            exp(k) over earlier tokens, as the returned ones.
    """
    state, log_sum = (None, None) if initial_state is None else initial_state
    logits = k.to(accumulate_dtype(k.dtype))
    lengths = [k.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    keys, decays = [], []
    for row in logits.split(lengths, dim=1):
        before = row.new_full(row[:, :1].shape, float("-inf")) if log_sum is None else log_sum.to(row.dtype)
        sums = torch.cat([before, row], dim=1).logcumsumexp(1) if log_sum is not None else row.logcumsumexp(1)
        sums = sums[:, -row.shape[1] :]
        # the first token of all forgets nothing: there is no state before it
        first = before - sums[:, :1] if log_sum is not None else torch.zeros_like(before)
        decays.append(torch.cat([first, sums[:, :-1] - sums[:, 1:]], dim=1))
        keys.append((row - sums).exp())
        last = sums[:, -1:]
    o, final = _gla(
        q,
        torch.cat(keys, dim=1),
        v,
        torch.cat(decays, dim=1),
        scale=scale,
        initial_state=state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return o, (final, last)


def _gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Run gated slot attention (Zhang et al. 2024): queries read slots' keys, and by a softmax slots' values.

    Args:
        q, k: (batch, seqlen, heads, d_k). v: (batch, seqlen, heads, d_v).
        s, g: how much is written to each slot, and its log decay, (batch, seqlen, heads, slots).
        initial_state: (batch, heads, d_k, slots) and (batch, heads, slots, d_v), as the returned ones.
    """
    seq_idx, wide = documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(q.dtype)
    queries = scaled(q.to(wide), scale)
    keys, values, writes, decay = (t.to(wide) for t in (k, v, s, g))
    before = (None, None) if initial_state is None else [state.to(wide) for state in initial_state]
    scores, slot_keys = gated_linear_attention(
        queries, keys, writes, value_decay=decay, initial_state=before[0], seq_idx=seq_idx
    )
    o, slot_values = gated_linear_attention(
        scores.softmax(-1), writes, values, key_decay=decay, initial_state=before[1], seq_idx=seq_idx
    )
    return o.to(v.dtype), (slot_keys, slot_values) if output_final_state else None


def _rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run RWKV-6's time mixing (Peng et al. 2024), with log decays w like k and the bonus u (heads, d_k)."""
    seq_idx, wide = documents(cu_seqlens, initial_state, output_final_state), accumulate_dtype(r.dtype)
    queries = scaled(r.to(wide), scale)
    keys, values, decay, bonus = (t.to(wide) for t in (k, v, w, u))
    initial_state = None if initial_state is None else initial_state.to(wide)
    o, final = gated_linear_attention(
        queries, keys, values, decay, bonus=bonus, initial_state=initial_state, seq_idx=seq_idx
    )
    return o.to(v.dtype), final if output_final_state else None


def _rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,  # promises to fla's kernels, and how these cut the sequence
    lower_bound: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run RWKV-7's time mixing (Peng et al. 2025), with log decays w and the low-rank transition b aᵀ, all
    like k (batch, seqlen, heads, d_k)."""
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
    o, final = dplr_delta_rule(scaled(r, scale), k, v, a, b, w, initial_state, seq_idx)
    return o.to(v.dtype), final if output_final_state else None


def _rwkv7_step(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run RWKV-7's time mixing, where kk is the direction of which a token replaces a share `a`."""
    return _rwkv7(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens)


def _mixed_inputs(x: Tensor, difference: Tensor, *shares: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return for each share (1, 1, d) x plus the share of its difference to the token before."""
    return tuple(None if share is None else torch.addcmul(x, difference, share) for share in shares)


def _replacement_keys(k: Tensor, a: Tensor, k_a: Tensor) -> Tensor:
    """Return RWKV-7's keys k (1 + (a - 1) k_a), from keys and learning rates (batch, seqlen, d)."""
    return torch.addcmul(k, k * (a - 1), k_a)


def _with_bonus(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Return RWKV-7's gated output, with the token's own values weighted by r · (r_k k).

    Args:
        o, g: (batch, seqlen, heads d_v). r, k: (batch, seqlen, heads, d_k). r_k: (heads, d_k).
        v: (batch, seqlen, heads, d_v).
    """
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).view_as(o)) * g


def _token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the differences of x (batch, seqlen, d) to the token before, which is 0 before a document.

    Args:
        cache: the last token of the call before, (batch, 1, d), or (batch, d); None for 0.
        output_cache: whether to return the last token, too.
    """
    documents(cu_seqlens, cache, None)
    before = x.new_zeros(x[:, :1].shape) if cache is None else cache.view_as(x[:, :1]).to(x.dtype)
    shifted = torch.cat([before, x[:, :-1]], dim=1)
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1][cu_seqlens.diff() > 0]
        shifted = shifted.index_fill(1, starts, 0)
    return (shifted - x, x[:, -1:].clone()) if output_cache else shifted - x


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
    refuse_arguments(chunk_indices=chunk_indices)
    seq_idx = documents(cu_seqlens, initial_state, output_final_state)
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
    refuse_arguments(bias=bias, residual_in_fp32=residual_in_fp32 or None)
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
    refuse_arguments(residual=residual, prenorm=prenorm or None)
    refuse_arguments(bias=bias, residual_in_fp32=residual_in_fp32 or None)
    y = rms_norm(x, x.new_ones(x.shape[-1]) if weight is None else weight, eps)
    return y * torch.sigmoid(g) if activation == "sigmoid" else gated(g, y)


def _swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(gated(x, y), weight, bias)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize the sum of x and the residual, each group of channels (the last dimension) to mean 0 and
    variance 1; with `prenorm` return the sum, too."""
    refuse_arguments(residual_in_fp32=residual_in_fp32 or None, is_rms_norm=is_rms_norm or None)
    total = x if residual is None else x + residual
    groups = total.unflatten(-1, (num_groups, -1))
    y = F.layer_norm(groups, groups.shape[-1:], eps=eps).flatten(-2)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y, total) if prenorm else y


def _rms_norm_with_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Normalize groups of channels of x, before or after a product with silu(z)."""
    refuse_arguments(bias=bias)
    gate = x.new_ones(()) if z is None else F.silu(z)
    x = x if norm_before_gate else x * gate
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = rms_norm(groups, x.new_ones(groups.shape[-1]), eps).flatten(-2) * weight
    return y * gate if norm_before_gate else y


def _rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float = 1e-5,
) -> Tensor:
    y = _rms_norm(x, norm_weight, norm_bias, eps=eps)
    assert isinstance(y, Tensor)
    return F.linear(y, linear_weight, linear_bias)


def _rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    eps: float = 1e-6,
) -> Tensor:
    return F.linear(_rms_norm_gated(x, g, norm_weight, norm_bias, eps=eps), linear_weight, linear_bias)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,  # a promise that the caller does not read x again
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate x (batch, seqlen, heads, d) by tables (positions, channels / 2).

    Args:
        seqlen_offsets: the first token's position, or one per row.
        cu_seqlens: where the documents of a single row begin and end; each counts from 0.
    """
    refuse_arguments(chunk_indices=chunk_indices)
    positions = torch.arange(x.shape[1], device=x.device)[None]
    if cu_seqlens is not None:
        refuse_arguments(seqlen_offsets=seqlen_offsets or None)
        positions = positions - cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    positions = positions + (
        seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    )
    cos, sin = (table[positions][:, :, None] for table in (cos, sin))
    rotated, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    dim = -1 if interleaved else -2  # of the two coordinates that are rotated together
    first, second = rotated.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(dim)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=dim)
    return torch.cat([turned.flatten(-2), rest], dim=-1)


# Activations that fla's modules hold as attributes, by their names in its table.
ACTIVATIONS: dict[str, Callable[..., object]] = {
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
    "sqrelu": _squared_relu,
}
# Our functions, by the names under which fla's modules call theirs.
FUNCTIONS: dict[str, Callable[..., object]] = {
    **{
        f"{prefix}_{name}": _delta_rule
        for prefix in ("chunk", "fused_recurrent")
        for name in ("gated_delta_rule", "kda", "delta_rule")
    },
    "chunk_hgrn": _hgrn,
    "fused_recurrent_hgrn": _hgrn,
    **{
        f"{prefix}_{name}": function
        for prefix in ("chunk", "fused_chunk", "fused_recurrent")
        for name, function in (
            ("retention", _retention),
            ("linear_attn", _linear_attention),
            ("gla", _gla),
            ("gsa", _gsa),
            ("rwkv6", _rwkv6),
            ("rwkv7", _rwkv7),
        )
    },
    **{
        f"{prefix}_{name}": function
        for prefix in ("chunk", "fused_recurrent")
        for name, function in (
            ("comba", delta_rule_variants.comba),
            ("precond_gated_delta_rule", delta_rule_variants.preconditioned),
            ("precond_kda", delta_rule_variants.preconditioned),
            ("lightnet", _lightnet),
        )
    },
    "chunk_gated_delta_product": delta_rule_variants.delta_product,
    "fused_kda_gate": _kda_gate,
    "flash_attn_func": _attention,
    "flash_attn_varlen_func": _attention_of_documents,
    "rms_norm_swish_gate_linear": _rms_norm_swish_gate_linear,
    "fused_mul_recurrent_rwkv7": _rwkv7_step,
    "fused_addcmul_rwkv7": _mixed_inputs,
    "fused_k_rwkv7": _replacement_keys,
    "gate_output_correction": _with_bonus,
    "l2_norm": l2_norm,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_step,
    "rms_norm": _rms_norm,
    "rms_norm_gated": _rms_norm_gated,
    "rms_norm_linear": _rms_norm_linear,
    "rmsnorm_fn": _rms_norm_with_silu,
    "layer_norm": _group_norm,
    "group_norm": _group_norm,
    "rotary_embedding": _rotary_embedding,
    "token_shift": _token_shift,
    **ACTIVATIONS,
    "swiglu": gated,
    "swiglu_linear": _swiglu_linear,
}
