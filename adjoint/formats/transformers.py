"""MambaForCausalLM and Mamba2ForCausalLM of transformers: their config.json, and their weights' names."""

import copy
import math
import warnings
from typing import Any

import torch
from torch import nn

from adjoint.formats.names import EMBEDDING, HEAD, Values, Weights, as_config_values, sizes, with_stack_names
from adjoint.layers import StackConfig

# A stack's sizes, and transformers' keys for them; then those of one of the mixers.
_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init_floor": "time_step_floor",
    "initializer_range": "initializer_range",
}
_KEYS_OF = {
    "mamba": _KEYS | {"dt_rank": "time_step_rank"},
    "mamba2": _KEYS | {"headdim": "head_dim", "ngroups": "n_groups"},
}
# Defaults of transformers for keys that a config.json leaves out.
_DEFAULTS: Values = {
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "initializer_range": 0.1,
    "time_step_rank": "auto",
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 1e-4,
    "time_step_limit": (0.0, math.inf),
}
_OF_TRAINING = ("training", "gradient_checkpointing")  # attributes of modules that change no result


WEIGHTS_FILE = "model.safetensors"
WHY_NOT_EVALUATED: str | None = None


def holds(config_json: Values) -> bool:
    """Return True: `read_config` refuses what no format holds."""
    return True


def class_name(config_json: Values) -> str:
    """Return the name of the class that a config.json names."""
    return config_json["architectures"][0]


def from_model(hf_model: nn.Module) -> tuple[StackConfig, Weights]:
    """Return the configuration and copies of the weights of a MambaForCausalLM or Mamba2ForCausalLM.

    Raises:
        ValueError: the model is neither, or uses an option a stack does not have.
    """
    hf: Any = getattr(hf_model, "config", None)
    kind = getattr(hf, "model_type", None)
    is_mamba = kind in ("mamba", "mamba2", "falcon_mamba")
    if not is_mamba or not hasattr(hf_model, "backbone") or not hasattr(hf_model, "lm_head"):
        name = type(hf_model).__name__
        raise ValueError(
            f"only MambaForCausalLM and Mamba2ForCausalLM can be copied, this is a {name} of type {kind!r}"
        )
    if any(".base_layer." in name for name in hf_model.state_dict()):
        raise ValueError("the model has adapters of PEFT; merge them first: model = model.merge_and_unload()")
    _refuse_other_settings(hf_model)
    config = read_config(hf.to_dict())
    normalises_groups = any(hasattr(module, "group_size") for module in hf_model.modules())
    if kind == "mamba2" and hf.n_groups > 1 and not normalises_groups:
        warnings.warn(
            f"this transformers normalises all {hf.n_groups} groups of {type(hf_model).__name__} together "
            "(since 5.23 each by itself); the Stack normalises each, as mamba-ssm does, with which the "
            "published weights were trained",
            stacklevel=3,
        )
    return with_stack_names({name: t.clone() for name, t in hf_model.state_dict().items()}, config)


def _refuse_other_settings(hf_model: nn.Module) -> None:
    """Refuse a model some module of which is set otherwise than its configuration says.

    Raises:
        ValueError: it is, as after a change of the configuration or of the module.
    """
    classes = [cls for cls in type(hf_model).__mro__ if cls.__module__.startswith("transformers.")]
    model_class = classes[0] if classes else type(hf_model)
    with torch.device("meta"):
        configured: nn.Module = model_class(copy.deepcopy(hf_model.config))
    modules = dict(hf_model.named_modules())
    for name, module in configured.named_modules():
        settings = vars(modules.get(name, module))
        for key, value in vars(module).items():
            is_setting = isinstance(value, (int, float, str, tuple)) and not key.startswith("_")
            if is_setting and key not in _OF_TRAINING and settings.get(key, value) != value:
                raise ValueError(
                    f"the model's {name}.{key} is {settings[key]!r}, but by its config it would be "
                    f"{value!r}: a stack is made by the config; make both the same"
                )


def read_config(config_json: Values) -> StackConfig:
    """Return the configuration of a stack with the sizes of a config.json.

    Raises:
        ValueError: the model has parts that a stack lacks.
        KeyError: a key is missing.
    """
    kind = config_json["model_type"]
    if kind == "falcon_mamba":
        raise ValueError(
            "Falcon-Mamba's mixer normalises dt, B and C (RMS norms), which a Stack does not have; "
            "adjoint.wrap trains it as it is"
        )
    if kind not in _KEYS_OF:
        raise ValueError(
            f"a Stack can be a mamba or a mamba2 model of transformers, not one of type {kind!r}; "
            "adjoint.wrap trains recurrent models of other types as they are"
        )
    hf = {**_DEFAULTS, "tie_word_embeddings": kind == "mamba", **config_json}
    if hf["hidden_act"] not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, the model has {hf['hidden_act']!r}")
    if kind == "mamba2" and list(hf["time_step_limit"]) != [0.0, math.inf]:
        raise ValueError(
            f"time_step_limit must be (0, inf): step sizes are not clamped here, the model has "
            f"{hf['time_step_limit']}"
        )
    settings = {ours: hf[theirs] for ours, theirs in _KEYS_OF[kind].items()}
    d_inner = settings["expand"] * settings["d_model"]
    if kind == "mamba" and hf.get("intermediate_size", d_inner) != d_inner:
        raise ValueError(
            f"intermediate_size {hf['intermediate_size']} must be expand * hidden_size = {d_inner}"
        )
    return StackConfig(mixer=kind, **as_config_values(settings))


def read_weights(config_json: Values, config: StackConfig, weights: Weights) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights under a stack's names.

    Raises:
        ValueError: two tensors stand for one of a stack.
    """
    return with_stack_names(weights, config)


def why_not(config: StackConfig) -> str | None:
    """Return why a stack of this configuration is no model of transformers; None if it is one."""
    if config.bidirectional is not None:
        return "a transformers model's layers read forward, this model's in both directions (bidirectional)"
    kinds = dict.fromkeys(config.mixers)
    if len(kinds) > 1 or not set(kinds) <= set(_KEYS_OF):
        return "a transformers model's mixers are all mamba or all mamba2, this model's are " + ", ".join(
            kinds
        )
    if config.d_intermediate:
        return (
            f"transformers' Mamba models have no MLP, this model has d_intermediate {config.d_intermediate}"
        )
    return None


def convert(config: StackConfig, weights: Weights) -> tuple[Values, Weights]:
    """Return config.json and weights of a stack in transformers' form, if `why_not` has no objection."""
    kind = config.mixers[0]
    settings = sizes(config, kind)
    hf: Values = {
        "architectures": ["MambaForCausalLM" if kind == "mamba" else "Mamba2ForCausalLM"],
        "model_type": kind,
        **{theirs: settings[ours] for ours, theirs in _KEYS_OF[kind].items()},
        **({"intermediate_size": config.d_inner} if kind == "mamba" else {"num_heads": config.nheads}),
        "hidden_act": "silu",
        # A stack knows no special tokens, and transformers' defaults would be some of its own.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": str(weights[EMBEDDING].dtype).removeprefix("torch."),
    }
    inside = {name: t for name, t in weights.items() if name != HEAD}
    renamed = {f"backbone.{name.replace(EMBEDDING, 'embeddings.weight')}": t for name, t in inside.items()}
    return hf, renamed if config.tie_embeddings else {**renamed, HEAD: weights[HEAD]}
