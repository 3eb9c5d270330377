"""flash-linear-attention's causal LMs, wrapped, against the same models by fla's own references.

Without a GPU fla's kernels do not run: its references in plain PyTorch take their places where it has one,
and lines of PyTorch where it has none. Nothing of ours is among them. Skipped where fla is not installed;
`make test-external` fetches it."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

import adjoint
from adjoint import Exact
from adjoint.engine.verification import Refused
from adjoint.fla import functions as kernels
from adjoint.hf.cache import CHUNK_LAYER_CLASSES
from adjoint.hf.kernels.mixers import FLA_MIXERS
from adjoint.hf.split import describe
from tests.engine.test_sequence import CUTS
from tests.external.references import in_float64
from tests.hf.hf_models import float64_throughout
from tests.model_helpers import relative
from tests.ranks import on_ranks

pytest.importorskip("fla.models", reason="fla is not installed (make test-external)")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

SIZES = {"hidden_size": 24, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31, "intermediate_size": 20}
LOW_RANKS = {f"{name}_low_rank_dim": 4 for name in ("decay", "gate", "a", "v")}
RWKV7: dict[str, Any] = {"num_heads": None, "head_dim": 8, "use_l2warp": False, **LOW_RANKS}
NOT_OF_MAMBA = {"num_heads", "intermediate_size"}  # whose sizes follow from others
MODELS: dict[str, dict[str, Any]] = {
    "KDA": {"head_dim": 8},
    "KDA, bounded": {
        "head_dim": 8,
        "lower_bound": -3.0,
        "safe_gate": True,
        "num_v_heads": 4,
        "expand_v": 2.0,
    },
    "GatedDeltaNet": {"head_dim": 8},
    "GatedDeltaNet, negative": {"head_dim": 6, "num_v_heads": 4, "allow_neg_eigval": True, "use_gate": False},
    "DeltaNet": {},
    "DeltaNet, plain": {"use_short_conv": False, "use_gate": True, "qk_norm": "sum", "qk_activation": "elu"},
    "HGRN": {},
    "HGRN, conv": {"use_short_conv": True},
    "RetNet": {},
    "RetNet, grouped": {
        "use_short_conv": True,
        "num_heads": 4,
        "num_kv_heads": 2,
        "expand_v": 1,
        "use_output_gate": False,
    },
    "GLA": {},
    "GLA, grouped": {
        "use_short_conv": True,
        "num_heads": 4,
        "num_kv_heads": 2,
        "clamp_min": -0.1,
        "fuse_norm": False,
    },
    "HGRN2": {"expand_ratio": 8},
    "GSA": {"num_slots": 6, "use_short_conv": True},
    "RWKV6": {"proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    "RWKV7": RWKV7,
    "RWKV7, unfused": {**RWKV7, "fuse_norm": False, "norm_first": False},
    "Mamba": {"state_size": 3, "residual_in_fp32": False},
    "Mamba2": {"head_dim": 8, "state_size": 3, "chunk_size": 16, "residual_in_fp32": False},
    "Mamba2, limited": {
        "head_dim": 8,
        "state_size": 3,
        "dt_limit": (0.3, 0.9),
        "rmsnorm": False,
        "D_has_hdim": True,
        "use_bias": True,
        "residual_in_fp32": False,
    },
    "GatedDeltaProduct": {"head_dim": 8, "num_householder": 3, "use_forget_gate": True},
    "GatedDeltaProduct, negative": {"head_dim": 8, "num_householder": 2, "allow_neg_eigval": True},
    "Comba": {"head_dim": 8},
    "Comba, plain": {"head_dim": 6, "use_output_gate": False, "use_output_correction": False},
    "PrecondGatedDeltaNet": {"head_dim": 8},
    "PrecondGatedDeltaNet, grouped": {"head_dim": 8, "num_v_heads": 4, "allow_neg_eigval": True},
    "PrecondKDA": {"head_dim": 8},
    "LightNet": {"expand_ratio": 6, "gate_low_rank_dim": 4},
    "Rodimus": {"block_type": "rodimus", "expand_ratio": 6, "num_heads": None, "residual_in_fp32": False},
    "GatedDeltaNet, hybrid": {"head_dim": 8, "attn": {"layers": [1], "num_heads": 3}},
    "GLA, hybrid": {
        "num_hidden_layers": 3,
        "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "qkv_bias": True},
    },
    "Samba": {
        "num_hidden_layers": 4,
        "state_size": 3,
        "attn": {"layers": [1, 3], "num_heads": 2, "window_size": 6},
    },
    "Transformer": {"num_kv_heads": 1, "qk_norm": True},
    "MLA": {
        **{"q_lora_rank": 5, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6},
        **{"qk_head_dim": 10, "v_head_dim": 8},
    },
    "MLA, window": {
        **{"q_lora_rank": None, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6},
        **{"qk_head_dim": 10, "v_head_dim": 10, "window_size": 5},
    },
    "Raven": {"num_slots": 6, "topk": 2, "add_gumbel_noise": False},
    "Raven, decays per slot": {"num_slots": 6, "topk": 3, "add_gumbel_noise": False, "decay_type": "GLA"},
    "LinearAttention": {},
    "LinearAttention, plain": {
        "feature_map": "elu",
        "num_heads": 4,
        "num_kv_heads": 2,
        "do_feature_map_norm": True,
    },
}


def make(name: str, **more: Any) -> Any:
    import fla.models

    torch.manual_seed(0)
    kind = name.partition(",")[0]
    for module in [*sys.modules.values()]:  # without flash-attn there are no models with attention
        if getattr(module, "__name__", "").startswith("fla.layers.") and "flash_attn_func" in vars(module):
            vars(module).update(flash_attn_func=attention, flash_attn_varlen_func=attention)
    sizes = {k: v for k, v in SIZES.items() if not (kind.startswith("Mamba") and k in NOT_OF_MAMBA)}
    config = getattr(fla.models, f"{kind}Config")(**{**sizes, **MODELS.get(name, {}), **more})
    model = getattr(fla.models, f"{kind}ForCausalLM")(config).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    for module in model.modules():
        if hasattr(module, "_update_cos_sin_cache"):  # tables of float32, as without the tests' float64
            module._update_cos_sin_cache(64, torch.device("cpu"), torch.float64)
    return model


# ---------------------------------------------------------------------------------- theirs, in plain PyTorch


def delta_rule(kind: str) -> Any:
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    def rule(q: Any, k: Any, v: Any, beta: Any, g: Any = None, initial_state: Any = None, **has: Any) -> Any:
        if has.get("use_qk_l2norm_in_kernel"):
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if has.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid() * (1 + has["allow_neg_eigval"])
        if kind == "kda":
            bound = has.get("lower_bound")
            given = {} if bound is None else {"lower_bound": bound}
            gate = naive_kda_gate if bound is None else naive_kda_lowerbound_gate
            g = gate(g, has["A_log"], has["dt_bias"], **given)
            assert initial_state is None
            return naive_recurrent_kda(q, k, v, g, beta)[0], None
        g = torch.zeros_like(beta) if g is None else -has["A_log"].exp() * F.softplus(g + has["dt_bias"])
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
        return naive_recurrent_gated_delta_rule(q, k, v, beta, g)[0], None

    return rule


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: Any = (-1, -1)) -> Tensor:
    assert causal and q.shape[1] == k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    age = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (age >= 0) & (age <= (window_size[0] if window_size[0] >= 0 else len(age)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, num_householder: int, **has: Any
) -> Any:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    assert has["use_qk_l2norm_in_kernel"]
    scale = q.shape[-1] ** -0.5
    inputs = unit(q), unit(k), v, g, beta, scale, None, has.get("initial_state")
    return naive_recurrent_gated_delta_product(*inputs, True, num_householder)


def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, **has: Any) -> Any:
    from fla.ops.comba.naive import naive_recurrent_comba

    inputs = unit(q), unit(k), v, unit(p), beta, g, None, has.get("initial_state")
    return naive_recurrent_comba(*inputs, output_final_state=True)


def preconditioned(q: Tensor, k: Tensor, v: Tensor, **has: Any) -> Any:
    from fla.ops.precond_gated_delta_rule import naive as gated_naive
    from fla.ops.precond_kda.naive import naive_recurrent_precond_kda

    names = (
        "g",
        "beta",
        "g_atk",
        "beta_atk",
        "initial_state",
        "initial_A_state",
        "x",
        "eps",
        "log_atk_scale",
    )
    inputs = {name: has[name] for name in names if name in has}
    inputs |= {"q": unit(q), "k": unit(k), "v": v, "output_final_state": True}
    if inputs["g"].dim() == 4:
        return naive_recurrent_precond_kda(**inputs)
    with pytest.MonkeyPatch.context() as patch:  # it divides by norms without an epsilon
        patch.setattr(gated_naive.F, "normalize", lambda x, **_: x)
        return gated_naive.naive_recurrent_precond_gated_delta_rule(**inputs)


def lightnet(q: Tensor, k: Tensor, v: Tensor, state_v_first: bool, **has: Any) -> Any:
    """Each channel of the keys weighs the tokens so far by a softmax; fla has no reference of it."""
    assert state_v_first and has.get("initial_state") is None
    logits = k[:, None].expand(-1, k.shape[1], -1, -1, -1)  # (batch, query, token, heads, d_k)
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(later[None, :, :, None, None], float("-inf")).softmax(2)
    states = torch.einsum("bqthk,bthv->bqhvk", weights, v)
    o = torch.einsum("bqhk,bqhvk->bqhv", q * q.shape[-1] ** -0.5, states)
    return o, (states[:, -1], k.logsumexp(1, keepdim=True))


def kda_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: Any = None) -> Tensor:
    from fla.ops.kda.gate import naive_kda_gate

    assert lower_bound is None
    return naive_kda_gate(g, A_log, dt_bias)


def gated_norm_linear(
    x: Any, g: Any, norm_weight: Any, norm_bias: Any, linear_weight: Any, linear_bias: Any
) -> Any:
    return F.linear(
        gated_norm(x, g, weight=norm_weight, bias=norm_bias, eps=1e-6), linear_weight, linear_bias
    )


def convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Any:
    taps = weight.shape[1]
    y = F.conv1d(F.pad(x.mT, (taps - 1, 0)), weight[:, None], bias, groups=len(weight)).mT
    return y if activation is None else F.silu(y), None


def norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    eps: float = 0,
    prenorm: bool = False,
    **_: Any,
) -> Any:
    from fla.modules.norm.layernorm import rms_norm_ref

    return rms_norm_ref(x, weight, bias, residual, eps, prenorm)


def gated_norm(x: Tensor, g: Tensor, activation: str = "swish", **more: Any) -> Any:
    return norm(x, **more) * (g.sigmoid() if activation == "sigmoid" else F.silu(g))


def hgrn(x: Tensor, g: Tensor, **_: Any) -> Any:
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    return naive_recurrent_hgrn(x, g)[0], None


def retention(q: Tensor, k: Tensor, v: Tensor, scale: Any = None, initial_state: Any = None, **_: Any) -> Any:
    """fla's own calls simple GLA with these decays."""
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    decays = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float64))).log()
    return naive_recurrent_simple_gla(q, k, v, decays.expand(q.shape[:3]), scale, initial_state)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, normalize: bool, **has: Any) -> Any:
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    return naive_recurrent_linear_attn(q, k, v, None, has.get("initial_state"), True, normalize)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Any = None, gk: Any = None, **has: Any) -> Any:
    from fla.ops.gla.naive import naive_recurrent_gla

    return naive_recurrent_gla(q, k, v, gk if g is None else g, has.get("initial_state"), True)


def gsa(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, **has: Any) -> Any:
    from fla.ops.gsa.naive import naive_recurrent_gsa

    return naive_recurrent_gsa(q, k, v, s, g, has.get("scale"), has.get("initial_state"), True)


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **has: Any) -> Any:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    by_heads = (x.transpose(1, 2) for x in (r, k, v, w))
    o, state = naive_recurrent_rwkv6(*by_heads, u, has.get("scale"), has.get("initial_state"), True)
    return o.transpose(1, 2), state


def norm_linear(
    x: Tensor, norm_weight: Any, norm_bias: Any, linear_weight: Tensor, linear_bias: Any, eps: float = 1e-5
) -> Any:
    return F.linear(norm(x, norm_weight, norm_bias, eps=eps), linear_weight, linear_bias)


def layer_norm(x: Any, weight: Any, bias: Any, residual: Any, eps: float, prenorm: bool, **_: Any) -> Any:
    from fla.modules.norm.layernorm import layer_norm_ref

    return layer_norm_ref(x, weight, bias, residual, eps, prenorm)


def group_norm(x: Any, weight: Any, bias: Any, num_groups: int, eps: float, **_: Any) -> Any:
    from fla.modules.norm.layernorm import group_norm_ref

    return group_norm_ref(x, weight, bias, num_groups, eps=eps)


def norm_with_silu(x: Tensor, weight: Tensor, **has: Any) -> Tensor:
    from fla.modules.norm.layernorm_gated import rms_norm_ref

    return rms_norm_ref(x, weight, **has)


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **has: Any) -> Any:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    by_heads = (x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, k, v, a, b, w))
    o, state = dplr_recurrence(*by_heads, has.get("initial_state"))
    return o.transpose(1, 2), state


def rwkv7_step(r: Any, w: Any, k: Any, v: Any, kk: Tensor, a: Tensor, **has: Any) -> Any:
    return rwkv7(r, w, k, v, -kk, kk * a, **has)


def replacement_keys(k: Tensor, a: Tensor, k_a: Tensor) -> Tensor:
    from fla.ops.rwkv7.fused_k_update import k_update_ref

    return k_update_ref(k, a, k_a)


def mixed_inputs(*inputs: Any) -> Any:
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7

    return torch_addcmul_rwkv7(*inputs)


def with_bonus(*inputs: Any) -> Tensor:
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    return gate_output_correction_ref(*inputs)


def token_shift(x: Tensor, cu_seqlens: Any = None, cache: Any = None, output_cache: bool = False) -> Any:
    from fla.modules.token_shift import token_shift_ref

    assert cache is None
    shifted = token_shift_ref(x, cu_seqlens)
    return (shifted, x[:, -1:]) if output_cache else shifted


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, **_: Any) -> Tensor:
    from fla.modules.rotary.ops import rotary_embedding_ref

    return rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)


PLACES = {
    "layers.kda": {"chunk_kda": "kda"},
    "layers.gated_deltanet": {"chunk_gated_delta_rule": "gated", "causal_conv1d": convolution},
    "layers.delta_net": {"chunk_delta_rule": "delta", "fused_recurrent_delta_rule": "delta"},
    "layers.hgrn": {"chunk_hgrn": hgrn, "swiglu": lambda x, y: F.silu(x) * y},
    "layers.multiscale_retention": {"chunk_retention": retention},
    "layers.linear_attn": {"chunk_linear_attn": linear_attention},
    "layers.gla": {"chunk_gla": gla, "fused_recurrent_gla": gla},
    "layers.hgrn2": {"fused_recurrent_gla": gla, "swish": F.silu, "rms_norm_linear": norm_linear},
    "layers.gsa": {"fused_recurrent_gsa": gsa, "rms_norm_linear": norm_linear},
    "layers.gated_deltaproduct": {"chunk_gated_delta_product": delta_product},
    "layers.comba": {"chunk_comba": comba},
    "layers.precond_gated_deltanet": {"chunk_precond_gated_delta_rule": preconditioned},
    "layers.precond_kda": {"chunk_precond_kda": preconditioned, "fused_kda_gate": kda_gate},
    "layers.lightnet": {
        "fused_recurrent_lightnet": lightnet,
        "rms_norm_swish_gate_linear": gated_norm_linear,
    },
    "layers.rodimus": {"chunk_gla": gla, "fused_recurrent_gla": gla},
    "layers.attn": {"flash_attn_func": attention},
    "layers.mla": {"flash_attn_func": attention},
    "layers.raven": {"chunk_gsa": gsa, "fused_recurrent_gsa": gsa, "rms_norm_linear": norm_linear},
    "layers.rwkv6": {"fused_recurrent_rwkv6": rwkv6, "token_shift": token_shift},
    "layers.rwkv7": {
        "chunk_rwkv7": rwkv7,
        "fused_mul_recurrent_rwkv7": rwkv7_step,
        "token_shift": token_shift,
        "fused_addcmul_rwkv7": mixed_inputs,
        "fused_k_rwkv7": replacement_keys,
        "gate_output_correction": with_bonus,
        "l2_norm": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    },
    "models.rwkv6.modeling_rwkv6": {"token_shift": token_shift},
    "models.rwkv7.modeling_rwkv7": {"token_shift": token_shift},
    "modules.feature_map": {"swish": F.silu},
    "modules.rotary.ops": {"rotary_embedding": rotary},
    "modules.norm.layernorm": {"rms_norm": norm, "layer_norm": layer_norm, "group_norm": group_norm},
    "modules.norm.layernorm_gated": {"rmsnorm_fn": norm_with_silu},
    "modules.norm.fused_norm_gate": {"rms_norm_gated": gated_norm},
    "modules.mlp": {"swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)},
    "modules.causal_conv1d.ops": {"causal_conv1d": convolution},
}


# Those of the models above, by the attributes of fla's modules that hold them.
ACTIVATIONS = {"act": F.silu, "gate_fn": F.silu, "act_fn": lambda x: F.relu(x).square()}


def run_by_references(model: Any, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of a copy of an unwrapped model."""
    model = copy.deepcopy(model)
    model.config.fuse_cross_entropy = False
    for module in model.modules():
        for name, activation in ACTIVATIONS.items():
            if name in vars(module):
                setattr(module, name, activation)
    with pytest.MonkeyPatch.context() as theirs:
        for module, functions in PLACES.items():
            for name, function in functions.items():
                reference = delta_rule(function) if isinstance(function, str) else function
                theirs.setattr(sys.modules[f"fla.{module}"], name, reference)
        in_float64(theirs)
        theirs.setattr(sys.modules["fla.ops.kda.gate"].naive_kda_gate, "__defaults__", (None, torch.float64))
        lower = sys.modules["fla.ops.kda.gate"].naive_kda_lowerbound_gate
        theirs.setattr(lower, "__defaults__", (*lower.__defaults__[:-1], torch.float64))
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def by_references() -> Any:
    """A way to run an unwrapped model: loss and gradients."""
    return run_by_references


KEYS_AND_VALUES = {"q": "bthk", "k": "bthk", "v": "bthv"}
# By name of fla's function: its reference, the inputs' dimensions, and those of its states.
OPERATIONS: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "chunk_retention": (retention, KEYS_AND_VALUES, ["bhkv"]),
    "chunk_linear_attn": (linear_attention, KEYS_AND_VALUES, ["bhkv", "b1hk"]),
    "chunk_gla": (gla, KEYS_AND_VALUES | {"g": "bthk"}, ["bhkv"]),
    "chunk_gsa": (gsa, KEYS_AND_VALUES | {"s": "bthm", "g": "bthm"}, ["bhkm", "bhmv"]),
    "chunk_rwkv6": (rwkv6, {"r": "bthk", "k": "bthk", "v": "bthv", "w": "bthk", "u": "hk"}, ["bhkv"]),
    "chunk_rwkv7": (rwkv7, {n: "bthv" if n == "v" else "bthk" for n in "rwkvab"}, ["bhkv"]),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_fla_s_references(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and final states, with the gradients of both, with initial states in half of the cases."""
    reference, inputs, states = OPERATIONS[name]
    draw = torch.Generator().manual_seed(seed)
    low, high = (
        {"b": 1, "t": 1, "h": 1, "k": 2, "v": 1, "m": 2},
        {"b": 3, "t": 150, "h": 4, "k": 9, "v": 9, "m": 9},
    )
    sizes = {n: int(torch.randint(low[n], high[n] + 1, (), generator=draw)) for n in low} | {"1": 1}
    sizes["t"] |= 1  # odd

    def random(dims: str) -> Tensor:
        return torch.randn([sizes[n] for n in dims], generator=draw, dtype=torch.float64)

    args = {key: random(dims) for key, dims in inputs.items()}
    for key in args.keys() & {"g", "w"}:  # log decays, of which some leave nothing
        args[key] = -(2 * args[key]).exp()
    if name == "chunk_rwkv7":  # else states would grow without bound
        args |= {key: 0.5 * F.normalize(args[key], dim=-1) for key in "ab"}
    if name == "chunk_linear_attn":  # what it divides by is not near 0
        args |= {key: args[key].abs() for key in "qk"}
    before = [random(dims).abs() for dims in states] if seed % 2 else []
    for leaf in (*args.values(), *before):
        leaf.requires_grad_()
    initial = (tuple(before) if len(before) > 1 else before[0]) if before else None
    more = {"normalize": True} if name == "chunk_linear_attn" else {}
    results = []
    for function in (kernels.FUNCTIONS[name], reference):
        with monkeypatch.context() as patch:
            if function is reference:
                in_float64(patch)
            o, final = function(**args, **more, initial_state=initial, output_final_state=True)
        outputs = [o, *(final if isinstance(final, tuple) else (final,))]
        weights = torch.Generator().manual_seed(seed)
        loss = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in outputs)
        results.append(
            [*outputs, *torch.autograd.grad(loss, [*args.values(), *before], materialize_grads=True)]
        )
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_mixers_are_those_of_fla_token_by_token(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, states and gradients: fla's mixers go on from states by single tokens, ours by all of them."""
    import fla.layers

    draw = torch.Generator().manual_seed(seed)
    batch, tokens = (int(torch.randint(1, high, (), generator=draw)) for high in (4, 20))
    tokens |= 1
    config: dict[str, Any] = {"hidden_size": 8, "state_size": 3, "use_bias": seed % 3 == 0, "layer_idx": 0}
    if name == "Mamba":
        config |= {"intermediate_size": 12}
    else:
        config |= {
            "head_dim": 4,
            "n_groups": 1 + seed % 2,
            "D_has_hdim": seed % 4 > 1,
            "rmsnorm": seed % 5 > 0,
        }
        config |= {"dt_limit": (0.2, 0.6)} if seed % 3 == 1 else {}
    torch.manual_seed(seed)
    module = getattr(fla.layers, name)(**config).double()
    module.act = F.silu
    channels, state = module.conv1d.weight.shape[0], (batch, *((12, 3) if name == "Mamba" else (4, 4, 3)))
    x = torch.randn(batch, tokens, 8, generator=draw, dtype=torch.float64)
    tail = torch.randn(batch, channels, 4, generator=draw, dtype=torch.float64)
    before = torch.randn(state, generator=draw, dtype=torch.float64)
    leaves = [x.requires_grad_(), tail.requires_grad_(), before.requires_grad_(), *module.parameters()]
    step = module.slow_forward if name == "Mamba" else module.torch_forward
    with monkeypatch.context() as patch:
        in_float64(patch)
        patch.setattr(sys.modules["fla.modules.norm.layernorm_gated"], "rmsnorm_fn", norm_with_silu)
        pieces, last = [], {"conv_state": tail, "recurrent_state": before}
        for token in x.split(1, dim=1):
            y, last["conv_state"], last["recurrent_state"] = step(token, last)
            pieces.append(y)
        expected = [torch.cat(pieces, dim=1), last["conv_state"][..., 1:], last["recurrent_state"]]
    with monkeypatch.context() as patch:
        ours = kernels.FUNCTIONS["rmsnorm_fn"]
        patch.setattr(sys.modules["fla.modules.norm.layernorm_gated"], "rmsnorm_fn", ours)
        cache = CHUNK_LAYER_CLASSES[LinearAttentionLayer]()
        cache.handoffs, cache.handed_off = {}, {}
        cache.store_state("conv", 0, tail[..., 1:])
        cache.store_state("recurrent", 0, before)
        got = [FLA_MIXERS[name](module, cache, x)[0], cache.conv_states[0], cache.recurrent_states[0]]
    weights = [torch.randn(e.shape, generator=draw, dtype=e.dtype) for e in expected]
    for outputs in (got, expected):
        loss = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
        outputs += torch.autograd.grad(loss, leaves, materialize_grads=True)
    for value, reference in zip(got, expected, strict=True):
        assert (value - reference).abs().max() <= 1e-12 * reference.abs().max()


@pytest.mark.parametrize("tokens", [37, 17])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_fla_s_references(
    name: str, tokens: int, by_references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, in chunks that the length leaves one token of."""
    monkeypatch.setattr(torch, "float", torch.float64)  # to which HGRN casts its bounds
    model = make(name)
    ids = torch.randint(31, (2, tokens), generator=torch.Generator().manual_seed(1))
    loss, expected = by_references(model, input_ids=ids, labels=ids)
    adjoint.wrap(model, Exact(4))
    with float64_throughout():  # for layers' own casts
        got = model(input_ids=ids, labels=ids).loss
        got.backward()
    assert relative(got.detach(), loss) <= 1e-12
    for key, parameter in model.named_parameters():
        assert relative(parameter.grad, expected[key]) <= 1e-10, key


@pytest.mark.parametrize(
    "name",
    [
        "KDA",
        "GatedDeltaNet",
        "HGRN, conv",
        "RetNet",
        "LinearAttention, plain",
        "GLA, grouped",
        "GSA",
        "RWKV6",
        "RWKV7",
        "Mamba",
        "Mamba2, limited",
        "GatedDeltaProduct",
        "Comba",
        "PrecondGatedDeltaNet, grouped",
        "PrecondKDA",
        "LightNet",
        "Rodimus",
        "GLA, hybrid",
        "Samba",
        "Transformer",
        "MLA",
        "Raven",
    ],
)
def test_documents_and_padding(name: str, by_references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are as if alone, and padding at the left as if it were not there."""
    monkeypatch.setattr(torch, "float", torch.float64)
    model, lengths = make(name), [6, 13]
    ids = torch.randint(31, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    alone = [by_references(model, input_ids=piece, labels=piece) for piece in ids.split(lengths, dim=1)]
    shares = [(length - 1) / (sum(lengths) - 2) for length in lengths]  # of the labels
    adjoint.wrap(model, Exact(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)  # no token predicts another document's
    warned = pytest.warns(UserWarning, match="own forward lets documents attend to earlier ones")
    with warned, float64_throughout():
        model(input_ids=ids, labels=labels, position_ids=positions).loss.backward()
    for key, parameter in model.named_parameters():
        expected = sum(share * gradients[key] for share, (_, gradients) in zip(shares, alone, strict=True))
        assert relative(parameter.grad, expected) <= 1e-10, key
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids[:, : lengths[0]]], dim=1)
    places = torch.arange(padded.shape[1])[None]
    labels = padded.masked_fill(places <= 3, -100)
    with float64_throughout():
        loss = model(input_ids=padded, labels=labels, attention_mask=(places >= 3).long()).loss
    assert relative(loss.detach(), alone[0][0]) <= 1e-12


def shared(name: str) -> None:
    model, ids = make(name), torch.randint(31, (2, 23), generator=torch.Generator().manual_seed(3))
    found = []
    for group in (None, dist.group.WORLD):
        adjoint.wrap(model, Exact(4), sequence_group=group)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({key: p.grad.clone() for key, p in model.named_parameters()})
    for key, expected in found[0].items():
        assert relative(found[1][key], expected) <= 1e-10, key


@pytest.mark.parametrize(
    "name",
    [
        *("KDA", "DeltaNet", "RetNet", "LinearAttention, plain", "RWKV6", "RWKV7", "Mamba2"),
        *("GatedDeltaProduct", "PrecondKDA", "LightNet", "GatedDeltaNet, hybrid", "Samba"),
    ],
)
def test_ranks_that_share_sequences(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, shared, name)


def cut_by_ranks(name: str, lengths: list[int], expected: dict[str, Tensor]) -> None:
    model, positions = make(name), torch.cat([torch.arange(length) for length in lengths])[None]
    ids = ids_of(lengths)
    adjoint.wrap(model, Exact(sum(lengths) // dist.get_world_size()), sequence_group=dist.group.WORLD)
    labels = ids.masked_fill(positions == 0, -100)
    model(input_ids=ids, labels=labels, position_ids=positions).loss.backward()
    for key, parameter in model.named_parameters():
        assert relative(parameter.grad, expected[key]) <= 1e-10, (key, lengths)


def ids_of(lengths: list[int]) -> Tensor:
    return torch.randint(31, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))


@pytest.mark.parametrize("name", ["KDA", "GatedDeltaNet", "RWKV6", "RWKV7", "Mamba2"])
@pytest.mark.parametrize(
    ("ranks", "lengths"), [(ranks, lengths) for ranks, each in CUTS.items() for lengths in each[-3:]]
)
def test_documents_cut_by_ranks(
    name: str, ranks: int, lengths: list[int], by_references: Any, tmp_path: Path
) -> None:
    """Gradients are those of each document alone, by fla's references: after its context-parallel tests."""
    model, expected = make(name), dict[str, Tensor]()
    for row in ids_of(lengths).split(lengths, dim=1):
        if row.shape[1] > 1:
            _, gradients = by_references(model, input_ids=row, labels=row)
            weight = (row.shape[1] - 1) / (sum(lengths) - len(lengths))
            for key, gradient in gradients.items():
                expected[key] = expected.get(key, 0) + weight * gradient
    on_ranks(ranks, tmp_path, cut_by_ranks, name, lengths, expected)


# Models with a class that is refused: options, and the class.
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "ABC": ({}, "ABCAttention"),
    "BitNet": ({}, "BitAttention"),
    "CAT": ({}, "CATModel"),
    "CyclicFlowAttention": ({}, "CyclicFlowAttention"),
    "DeltaFormer": ({}, "DeltaFormerAttention"),
    "ForgettingTransformer": ({}, "ForgettingAttention"),
    "LogLinearMamba2": ({}, "LogLinearMamba2"),
    "Mamba3": ({"head_dim": 8}, "Mamba3"),
    "MesaNet": ({}, "MesaNet"),
    "MoBA": ({}, "MoBA"),
    "Mom": ({}, "MomAttention"),
    "NSA": ({"num_kv_heads": 1}, "NativeSparseAttention"),
    "PaTHAttention": ({}, "PaTHAttention"),
    "Parallax": ({}, "Parallax"),
    "StickBreakingAttention": ({}, "StickBreakingAttention"),
    "WallTransformer": ({}, "WallAttention"),
    "YOCO": ({}, "YOCOModel"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_class_that_lacks_something_is_refused_with_what_it_lacks(name: str) -> None:
    options, cls = UNSUPPORTED[name]
    ids = torch.randint(31, (1, 9))
    model = adjoint.wrap(make(name, **options), Exact(4))
    with pytest.raises(Refused, match=f"fla's {cls} is not supported: {re.escape(kernels.UNSUPPORTED[cls])}"):
        model(input_ids=ids, labels=ids)


def test_every_class_of_fla_is_tried_or_refused_by_name() -> None:
    import fla.models

    classes = {name.removesuffix("ForCausalLM") for name in dir(fla.models) if name.endswith("ForCausalLM")}
    assert classes == {name.partition(",")[0] for name in MODELS} | UNSUPPORTED.keys()
    assert {cls for _, cls in UNSUPPORTED.values()} == kernels.UNSUPPORTED.keys()


def test_what_is_not_known_is_refused_by_name() -> None:
    ids = torch.randint(31, (1, 9))
    for name, more, said in (
        ("KDA", {"attnres_block_size": 2, "head_dim": 8}, "set attnres_block_size to None"),
    ):
        model = adjoint.wrap(make(name, **more), Exact(4))
        with pytest.raises(Refused, match=said):
            model(input_ids=ids, labels=ids)
    penalized = make("RWKV7", use_l2warp=True)
    with pytest.raises(Refused, match=r"largest logit.*use_l2warp to False.*shards 0"):
        describe(penalized, ids)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1] = -100
    with pytest.raises(Refused, match="use_l2warp is on, and counts logits of padding"):
        adjoint.wrap(penalized, Exact(4))(input_ids=ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("counted", [{}, {"num_items_in_batch": torch.tensor(7)}], ids=["mean", "counted"])
def test_a_penalty_of_each_tokens_largest_logit(counted: dict[str, Any], by_references: Any) -> None:
    """`use_l2warp`, RWKV-7's default, changes gradients and not the loss."""
    ids = torch.randint(31, (2, 11), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids < 4, -100), **counted}
    model = make("RWKV7", use_l2warp=True)
    expected_loss, expected = by_references(model, **batch)
    without_loss, without = by_references(make("RWKV7"), **batch)
    torch.testing.assert_close(without_loss, expected_loss, rtol=0, atol=0)
    assert relative(without["lm_head.weight"], expected["lm_head.weight"]) > 1e-6

    sliced_loss, sliced = by_references(adjoint.wrap(copy.deepcopy(model), adjoint.MiniSequence()), **batch)
    loss = adjoint.wrap(model, Exact(4))(**batch).loss
    loss.backward()
    by_chunks = {name: p.grad for name, p in model.named_parameters()}
    for our_loss, ours in ((loss.detach(), by_chunks), (sliced_loss, sliced)):
        torch.testing.assert_close(our_loss, expected_loss, rtol=1e-12, atol=0)
        assert max(relative(ours[name], gradient) for name, gradient in expected.items()) < 1e-10
