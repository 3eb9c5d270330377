"""MambaLMHeadModel of mamba-ssm, version 2 or later: its config.json, and its weights' names."""

import math
from typing import Any

from adjoint.formats.names import (
    HEAD,
    Values,
    Weights,
    as_config_values,
    sizes,
    swap_halves,
    with_stack_names,
)
from adjoint.layers import StackConfig

# _LAYERS: our mixer for each of mamba-ssm's recurrent layers. _SHARED: keys of ssm_cfg that a stack has too,
# by the same names. _FIXED: keys whose only value in a stack is this one. _FREE: keys that change initial
# weights or speed, not the computation.
_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2", "Mamba3": "mamba3"}
_COMMON = ("d_state", "expand", "dt_min", "dt_max", "dt_init_floor")
_CONVOLVED = (*_COMMON, "d_conv", "bias", "conv_bias")
_OF_MAMBA3 = ("rope_fraction", "A_floor", "is_outproj_norm", "is_mimo", "mimo_rank")
_SHARED = {
    "mamba": (*_CONVOLVED, "dt_rank"),
    "mamba2": (*_CONVOLVED, "headdim", "ngroups"),
    "mamba3": (*_COMMON, "headdim", "ngroups", *_OF_MAMBA3),
}
_FIXED: Values = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": [0.0, math.inf],
}
_FREE: tuple[str, ...] = ("conv_init", "A_init_range", "dt_init", "dt_scale", "chunk_size", "use_fast_path")
_FREE += ("use_mem_eff_path", "sequence_parallel", "fuse_pregate_headwise_norm", "dropout")
# Keys of mamba-ssm's attn_cfg: their defaults, and a stack's names for them; None if a stack has only the
# value in _ATTN_FIXED.
_ATTN: dict[str, tuple[Any, str | None]] = {
    "num_heads": (None, "num_attention_heads"),
    "num_heads_kv": (None, "num_key_value_heads"),
    "head_dim": (None, "head_dim"),
    "qkv_proj_bias": (True, "attention_bias"),
    "out_proj_bias": (True, "attention_bias"),
    "d_conv": (0, "attention_d_conv"),
    "rotary_emb_dim": (0, "rotary_emb_dim"),
    "rotary_emb_base": (10000.0, "rope_theta"),
    "causal": (False, None),
    "mlp_dim": (0, None),
    "softmax_scale": (None, None),
    "rotary_emb_interleaved": (False, None),
}
_ATTN_FIXED = {"causal": True, "mlp_dim": 0, "softmax_scale": None, "rotary_emb_interleaved": False}


WEIGHTS_FILE = "pytorch_model.bin"
WHY_NOT_EVALUATED: str | None = None


def holds(config_json: Values) -> bool:
    """Whether a config.json is mamba-ssm's, which names no type."""
    return "model_type" not in config_json


def class_name(config_json: Values) -> str:
    """Return the name of mamba-ssm's only class."""
    return "MambaLMHeadModel"


def read_config(config_json: Values) -> StackConfig:
    """Return the configuration of a stack with the sizes of a config.json.

    Raises:
        ValueError: the model has parts that a stack lacks.
        KeyError: a key is missing.
    """
    ssm_cfg = dict(config_json.get("ssm_cfg") or {})
    layer = ssm_cfg.pop("layer", "Mamba1")
    if layer not in _LAYERS:
        raise ValueError(f"ssm_cfg.layer is {layer!r}; a Stack reads {', '.join(_LAYERS)}")
    kind = _LAYERS[layer]
    if not config_json.get("rms_norm", True):
        raise ValueError("rms_norm is false: the model has LayerNorms, a Stack has RMS norms")
    for name, value in ssm_cfg.items():
        if name in _FIXED and value != _FIXED[name]:
            raise ValueError(f"ssm_cfg.{name} is {value!r}, a Stack has only {_FIXED[name]!r}")
        if name not in (*_FIXED, *_SHARED[kind], *_FREE):
            raise ValueError(f"ssm_cfg.{name} is an option of {layer} that a Stack does not have")
    layer_settings = as_config_values(
        {"expand": 2, **{n: v for n, v in ssm_cfg.items() if n in _SHARED[kind]}}
    )
    width = config_json.get("d_intermediate", 0)
    if width and layer_settings.get("bias"):
        raise ValueError("ssm_cfg.bias is true and the MLPs have no biases, a Stack has both or neither")
    attention_layers = set(config_json.get("attn_layer_idx") or ())
    return StackConfig(
        mixer=["attention" if k in attention_layers else kind for k in range(config_json["n_layer"])]
        if attention_layers
        else kind,
        vocab_size=_rounded_up(config_json["vocab_size"], config_json.get("pad_vocab_size_multiple", 8)),
        d_model=config_json["d_model"],
        n_layer=config_json["n_layer"],
        d_intermediate=_rounded_up(width, 128),
        tie_embeddings=config_json.get("tie_embeddings", True),
        **layer_settings,
        **(_attention_sizes(config_json) if attention_layers else {}),
    )


def _attention_sizes(config_json: Values) -> Values:
    attn_cfg = dict(config_json.get("attn_cfg") or {})
    for name in attn_cfg:
        if name not in _ATTN:
            raise ValueError(f"attn_cfg.{name} is an option that a Stack does not have")
    heads = attn_cfg["num_heads"]
    attn_cfg = {name: attn_cfg.get(name, default) for name, (default, _) in _ATTN.items()}
    if attn_cfg["head_dim"] is None:
        attn_cfg["head_dim"] = config_json["d_model"] // heads
    if attn_cfg["softmax_scale"] == attn_cfg["head_dim"] ** -0.5:
        attn_cfg["softmax_scale"] = None
    for name, value in _ATTN_FIXED.items():
        if attn_cfg[name] != value:
            raise ValueError(f"attn_cfg.{name} is {attn_cfg[name]!r}, a Stack has only {value!r}")
    if attn_cfg["qkv_proj_bias"] != attn_cfg["out_proj_bias"]:
        raise ValueError("attn_cfg.qkv_proj_bias and out_proj_bias differ, a Stack has both or neither")
    return {ours: attn_cfg[name] for name, (_, ours) in _ATTN.items() if ours is not None}


def read_weights(config_json: Values, config: StackConfig, weights: Weights) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights under a stack's names.

    Raises:
        ValueError: two tensors stand for one of a stack.
    """
    return with_stack_names(weights, config)


def why_not(config: StackConfig) -> str | None:
    """Return why a stack of this configuration is no model of mamba-ssm; None if it is one."""
    if config.bidirectional is not None:
        return "a mamba-ssm model's layers read forward, this model's in both directions (bidirectional)"
    kinds, width = dict.fromkeys(config.mixers), config.d_intermediate
    recurrent = set(kinds) - {"attention"}
    if len(recurrent) != 1 or not recurrent <= set(_SHARED):
        return (
            "a mamba-ssm model's mixers are mamba, mamba2 or mamba3, one of them, besides attention, this "
            f"model's are {', '.join(kinds)}"
        )
    if config.norm_eps != 1e-5:
        return f"mamba-ssm's norms have epsilon 1e-05, this model's norm_eps is {config.norm_eps}"
    if width % 128:
        return f"mamba-ssm's MLPs are multiples of 128 wide, this model's d_intermediate is {width}"
    if width and config.bias:
        return "mamba-ssm's MLPs have no biases, this model's have (bias true)"
    if config.bias and "mamba3" in kinds:
        return "mamba-ssm's Mamba-3 has no biases, this model's has (bias true)"
    if width and set(config.mlp_activations) != {"silu"}:
        return f"mamba-ssm's MLPs apply silu, this model's mlp_activation is {config.mlp_activation}"
    for name, default in (("rope_scaling_factor", 1.0), ("out_proj_bias", None)):
        if "attention" in kinds and (value := getattr(config, name)) != default:
            return f"mamba-ssm's attention has no {name}, this model's is {value}"
    if config.sliding_window and "attention" in kinds:
        return f"mamba-ssm's attention has no window, this model's sliding_window is {config.sliding_window}"
    return None


def convert(config: StackConfig, weights: Weights) -> tuple[Values, Weights]:
    """Return config.json and weights of a stack in mamba-ssm's form, if `why_not` has no objection."""
    (kind,) = set(config.mixers) - {"attention"}
    (layer,) = (name for name, ours in _LAYERS.items() if ours == kind)
    settings = sizes(config, kind)
    attention_layers = [k for k, mixer in enumerate(config.mixers) if mixer == "attention"]
    attn_cfg = {
        name: _ATTN_FIXED[name] if ours is None else settings[ours] for name, (_, ours) in _ATTN.items()
    }
    config_json = {
        "d_model": config.d_model,
        "d_intermediate": config.d_intermediate,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": {"layer": layer, **{name: settings[name] for name in _SHARED[kind]}},
        "attn_layer_idx": attention_layers,
        "attn_cfg": attn_cfg if attention_layers else {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_embeddings,
    }
    renamed: Weights = {}
    for name, tensor in weights.items():
        if ".mlp.in_proj." in name:
            tensor = swap_halves(tensor)
        name = name.replace(".mlp.in_proj.", ".mlp.fc1.").replace(".mlp.out_proj.", ".mlp.fc2.")
        renamed[name if name == HEAD else f"backbone.{name}"] = tensor
    return config_json, renamed


def shared_keys(kind: str) -> tuple[str, ...]:
    """Return the keys of ssm_cfg that a mixer of this kind has as settings, by the same names."""
    return _SHARED[kind]


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
