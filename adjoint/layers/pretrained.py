"""Models as a stack has them, and back: sizes and weights, by the stack's names, of transformers' Mamba and
Mamba-2, of mamba-ssm's language models, and of runs.

Folders are read as they are: neither transformers nor mamba-ssm need be installed.
"""

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.checkpoint import MANIFEST, Tensors, checkpoint_at, read_trainer
from adjoint.errors import UserError
from adjoint.layers.config import StackConfig

Weights = dict[str, Tensor]
FORMATS = ("transformers", "mamba-ssm")
_EMBEDDING, _HEAD = "embedding.weight", "lm_head.weight"
_INFINITE = (0.0, math.inf)

# What transformers takes for keys that a config.json leaves out.
_HF_DEFAULTS: dict[str, Any] = {
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
    "time_step_limit": _INFINITE,
}
# Of each of mamba-ssm's recurrent layers, our mixer, and the keys of ssm_cfg that a stack has too, by the
# same names; then what others must be, since a stack has nothing else; and those that say how weights begin
# or how fast things go, not what is computed.
_SSM_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2", "Mamba3": "mamba3"}
_SSM_COMMON = ["d_state", "expand", "dt_min", "dt_max", "dt_init_floor"]
_SSM_SHARED = {
    "mamba": [*_SSM_COMMON, "d_conv", "bias", "conv_bias", "dt_rank"],
    "mamba2": [*_SSM_COMMON, "d_conv", "bias", "conv_bias", "headdim", "ngroups"],
    "mamba3": [*_SSM_COMMON, "headdim", "ngroups", "rope_fraction", "A_floor", "is_outproj_norm"],
}
_SSM_SHARED["mamba3"] += ["is_mimo", "mimo_rank"]
_SSM_FIXED: dict[str, Any] = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": list(_INFINITE),
}
_SSM_FREE = ["conv_init", "A_init_range", "dt_init", "dt_scale", "chunk_size", "use_fast_path"]
_SSM_FREE += ["use_mem_eff_path", "sequence_parallel", "fuse_pregate_headwise_norm", "dropout"]
# Keys of mamba-ssm's attn_cfg, what it takes for those that are left out, and the names that a stack has for
# them; None where it has but one value, below.
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


def from_pretrained(folder: Path, layout: str | None = None) -> tuple[StackConfig, Weights]:
    """The configuration and the weights, on the CPU in the dtypes they are stored in, of a model in a folder.

    Args:
        folder: of transformers' MambaForCausalLM or Mamba2ForCausalLM; of mamba-ssm's MambaLMHeadModel; of a
            run, whose newest good checkpoint is read; or a checkpoint of one.
        layout: the one of `FORMATS` that it must be of.

    Raises:
        UserError: it is none of these, a file is missing or damaged, or the model has what a stack has not.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; download a model's with huggingface_hub.snapshot_download"
        )
    if (folder / "checkpoints").is_dir() or (folder / MANIFEST).is_file():
        _of_layout(folder, "a run", None, layout)
        return from_checkpoint(checkpoint_at(folder, str(folder)))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: neither a model (it has no config.json) nor a run; name the folder of one"
        )
    given = _read_json(folder / "config.json")
    kind = given.get("model_type")
    if kind is not None:
        _of_layout(folder, f"a model of transformers, of type {kind!r}", "transformers", layout)
    try:
        config = _transformers_config(given) if "model_type" in given else _mamba_ssm_config(given)
    except KeyError as error:
        raise UserError(f"{folder}: its config.json has no {error.args[0]}; take the model's own") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {error}") from None
    weights = _read_weights(folder)
    try:
        return _renamed(weights, config)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None


def _of_layout(folder: Path, what: str, found: str | None, layout: str | None) -> None:
    if layout not in (None, found):
        raise UserError(f"{folder}: is {what}, not a model of {layout}; use Stack.from_pretrained")


def from_transformers(hf_model: nn.Module) -> tuple[StackConfig, Weights]:
    """The configuration and copies of the weights of a MambaForCausalLM or Mamba2ForCausalLM.

    Raises:
        ValueError: the model is neither, or uses an option a stack does not have.
    """
    hf: Any = getattr(hf_model, "config", None)
    kind = getattr(hf, "model_type", None)
    known = kind in ("mamba", "mamba2", "falcon_mamba")
    if not known or not hasattr(hf_model, "backbone") or not hasattr(hf_model, "lm_head"):
        name = type(hf_model).__name__
        raise ValueError(
            f"only MambaForCausalLM and Mamba2ForCausalLM can be copied, this is a {name} of type {kind!r}"
        )
    config = _transformers_config(hf.to_dict())
    return _renamed({name: t.clone() for name, t in hf_model.state_dict().items()}, config)


def from_checkpoint(checkpoint: Path) -> tuple[StackConfig, Weights]:
    """The configuration and the weights of a run's checkpoint, which the caller has verified."""
    config, stored = checkpoint_config(checkpoint), Tensors(checkpoint, "model")
    return _tied({name: stored[name].clone() for name in stored.where}, config)


def checkpoint_config(checkpoint: Path) -> StackConfig:
    """The model of a run's checkpoint.

    Raises:
        UserError: its trainer.json describes none that this version knows.
    """
    try:
        given = dict(read_trainer(checkpoint)["config"]["model"])
        if given.pop("from_pretrained", None) is not None:
            raise ValueError("it is of a Hugging Face model")
        return StackConfig(**given)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint}: its trainer.json describes no model that this version knows ({error!r})"
        ) from None


def why_not(config: StackConfig, layout: str) -> str | None:
    """Why a model of this configuration cannot be had in a layout of `FORMATS`; None if it can."""
    kinds, width = dict.fromkeys(config.mixers), config.d_intermediate
    if layout == "transformers":
        if set(kinds) not in ({"mamba"}, {"mamba2"}):
            return (
                f"a {layout} model's mixers are all mamba or all mamba2, this model's are {', '.join(kinds)}"
            )
        what = f"transformers' Mamba models have no MLP, this model has d_intermediate {width}"
        return what if width else None
    recurrent = set(kinds) - {"attention"}
    if len(recurrent) != 1 or not recurrent <= set(_SSM_SHARED):
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
    if config.sliding_window and "attention" in kinds:
        return f"mamba-ssm's attention has no window, this model's sliding_window is {config.sliding_window}"
    return None


def to_transformers(config: StackConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    """config.json and weights of the MambaForCausalLM or Mamba2ForCausalLM that a stack is; the other way
    round `from_pretrained` reads them. `why_not` says whether there is one."""
    kind = config.mixers[0]
    hf: dict[str, Any] = {
        "architectures": ["MambaForCausalLM" if kind == "mamba" else "Mamba2ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "state_size": config.state_size(kind),
        "conv_kernel": config.d_conv,
        "expand": config.expand,
        "hidden_act": "silu",
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.initializer_range,
        "time_step_min": config.dt_min,
        "time_step_max": config.dt_max,
        "time_step_floor": config.dt_init_floor,
        "tie_word_embeddings": config.tie_embeddings,
        # A stack knows no special tokens, and transformers' defaults would be some of its own.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": str(weights[_EMBEDDING].dtype).removeprefix("torch."),
    }
    if kind == "mamba":
        hf |= {"intermediate_size": config.d_inner, "time_step_rank": config.step_rank}
    else:
        hf |= {"num_heads": config.nheads, "head_dim": config.headdim, "n_groups": config.ngroups}
    inside = {name: t for name, t in weights.items() if name != _HEAD}
    renamed = {f"backbone.{name.replace(_EMBEDDING, 'embeddings.weight')}": t for name, t in inside.items()}
    return hf, renamed if config.tie_embeddings else {**renamed, _HEAD: weights[_HEAD]}


def to_mamba_ssm(config: StackConfig, weights: Weights) -> tuple[dict[str, Any], Weights]:
    """The same of mamba-ssm's MambaLMHeadModel, version 2 or later."""
    (kind,) = set(config.mixers) - {"attention"}
    (layer,) = (name for name, ours in _SSM_LAYERS.items() if ours == kind)
    ssm_cfg: dict[str, Any] = {name: getattr(config, name) for name in _SSM_SHARED[kind]}
    ssm_cfg |= {"layer": layer, "d_state": config.state_size(kind)}
    if kind == "mamba":
        ssm_cfg["dt_rank"] = config.step_rank
    at = [k for k, mixer in enumerate(config.mixers) if mixer == "attention"]
    given = {
        "d_model": config.d_model,
        "d_intermediate": config.d_intermediate,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm_cfg,
        "attn_layer_idx": at,
        "attn_cfg": _attn_cfg(config) if at else {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.tie_embeddings,
    }
    renamed: Weights = {}
    for name, tensor in weights.items():
        if ".mlp.in_proj." in name:
            tensor = _halves_swapped(tensor)
        name = name.replace(".mlp.in_proj.", ".mlp.fc1.").replace(".mlp.out_proj.", ".mlp.fc2.")
        renamed[name if name == _HEAD else f"backbone.{name}"] = tensor
    return given, renamed


def _attn_cfg(config: StackConfig) -> dict[str, Any]:
    heads, kv_heads, dim = config.attention_heads
    own = {name: getattr(config, name) for _, name in _ATTN.values() if name is not None}
    own |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    own |= {"rotary_emb_dim": config.rotary_dim, "attention_bias": config.attention_has_bias}
    return {key: _ATTN_FIXED[key] if name is None else own[name] for key, (_, name) in _ATTN.items()}


# ------------------------------------------------------------------------------------------- configurations


def _transformers_config(given: dict[str, Any]) -> StackConfig:
    kind = given["model_type"]
    if kind == "falcon_mamba":
        raise ValueError(
            "Falcon-Mamba's mixer normalises dt, B and C (RMS norms), which a Stack does not have; "
            "adjoint.wrap trains it as it is"
        )
    if kind not in ("mamba", "mamba2"):
        raise ValueError(
            f"a Stack can be a mamba or a mamba2 model of transformers, not one of type {kind!r}; "
            "adjoint.wrap trains recurrent models of other types as they are"
        )
    hf = {**_HF_DEFAULTS, "tie_word_embeddings": kind == "mamba", **given}
    if hf["hidden_act"] not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, the model has {hf['hidden_act']!r}")
    shared = {
        "mixer": kind,
        "vocab_size": hf["vocab_size"],
        "d_model": hf["hidden_size"],
        "n_layer": hf["num_hidden_layers"],
        "d_state": hf["state_size"],
        "d_conv": hf["conv_kernel"],
        "expand": _whole(hf["expand"]),
        "tie_embeddings": hf["tie_word_embeddings"],
        "norm_eps": hf["layer_norm_epsilon"],
        "bias": hf["use_bias"],
        "conv_bias": hf["use_conv_bias"],
        "dt_min": hf["time_step_min"],
        "dt_max": hf["time_step_max"],
        "dt_init_floor": hf["time_step_floor"],
        "initializer_range": hf["initializer_range"],
    }
    if kind == "mamba2":
        if list(hf["time_step_limit"]) != list(_INFINITE):
            raise ValueError(
                "time_step_limit must be (0, inf): step sizes are not clamped here, "
                f"the model has {hf['time_step_limit']}"
            )
        return StackConfig(**shared, headdim=hf["head_dim"], ngroups=hf["n_groups"])
    d_inner = hf["expand"] * hf["hidden_size"]
    if hf.get("intermediate_size", d_inner) != d_inner:
        raise ValueError(
            f"intermediate_size {hf['intermediate_size']} must be expand * hidden_size = {d_inner}"
        )
    return StackConfig(**shared, dt_rank=_rank(hf["time_step_rank"]))


def _mamba_ssm_config(given: dict[str, Any]) -> StackConfig:
    ssm_cfg = dict(given.get("ssm_cfg") or {})
    layer = ssm_cfg.pop("layer", "Mamba1")
    if layer not in _SSM_LAYERS:
        raise ValueError(f"ssm_cfg.layer is {layer!r}; {', '.join(_SSM_LAYERS)} are read into a Stack")
    kind = _SSM_LAYERS[layer]
    if not given.get("rms_norm", True):
        raise ValueError("rms_norm is false: the model has LayerNorms, a Stack has RMS norms")
    for name, value in ssm_cfg.items():
        if name in _SSM_FIXED and value != _SSM_FIXED[name]:
            raise ValueError(f"ssm_cfg.{name} is {value!r}, a Stack has {_SSM_FIXED[name]!r} alone")
        if name not in (*_SSM_FIXED, *_SSM_SHARED[kind], *_SSM_FREE):
            raise ValueError(f"ssm_cfg.{name} is an option that a Stack does not know of {layer}")
    sizes = {"expand": 2, "dt_rank": "auto", **{n: v for n, v in ssm_cfg.items() if n in _SSM_SHARED[kind]}}
    sizes |= {"expand": _whole(sizes["expand"]), "dt_rank": _rank(sizes["dt_rank"])}
    width = given.get("d_intermediate", 0)
    if width and sizes.get("bias"):
        raise ValueError("ssm_cfg.bias is true and the MLPs have no biases, a Stack has both or neither")
    at = set(given.get("attn_layer_idx") or ())
    mixers = ["attention" if k in at else kind for k in range(given["n_layer"])] if at else kind
    multiple = given.get("pad_vocab_size_multiple", 8)
    return StackConfig(
        mixer=mixers,
        vocab_size=_rounded_up(given["vocab_size"], multiple),
        d_model=given["d_model"],
        n_layer=given["n_layer"],
        d_intermediate=_rounded_up(width, 128),
        tie_embeddings=given.get("tie_embeddings", True),
        **sizes,
        **(_attention_sizes(given) if at else {}),
    )


def _attention_sizes(given: dict[str, Any]) -> dict[str, Any]:
    attn_cfg = dict(given.get("attn_cfg") or {})
    for name in attn_cfg:
        if name not in _ATTN:
            raise ValueError(f"attn_cfg.{name} is an option that a Stack does not know")
    heads = attn_cfg["num_heads"]
    attn_cfg = {name: attn_cfg.get(name, default) for name, (default, _) in _ATTN.items()}
    if attn_cfg["head_dim"] is None:
        attn_cfg["head_dim"] = given["d_model"] // heads
    if attn_cfg["softmax_scale"] == attn_cfg["head_dim"] ** -0.5:
        attn_cfg["softmax_scale"] = None
    for name, value in _ATTN_FIXED.items():
        if attn_cfg[name] != value:
            raise ValueError(f"attn_cfg.{name} is {attn_cfg[name]!r}, a Stack has {value!r} alone")
    if attn_cfg["qkv_proj_bias"] != attn_cfg["out_proj_bias"]:
        raise ValueError("attn_cfg.qkv_proj_bias and out_proj_bias differ, a Stack has both or neither")
    return {ours: attn_cfg[name] for name, (_, ours) in _ATTN.items() if ours is not None}


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _whole(number: Any) -> Any:
    """2.0 as 2; what is no whole number is left for StackConfig to refuse."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _rank(number: Any) -> Any:
    return None if number == "auto" else number  # a stack's default is what auto means


# -------------------------------------------------------------------------------------------------- weights


def _renamed(tensors: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """By a stack's names: transformers' and mamba-ssm's are alike but for the embedding and the MLP."""
    weights: Weights = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("backbone.").replace("embeddings.weight", _EMBEDDING)
        if ".mlp.fc1." in ours:
            tensor = _halves_swapped(tensor)
        ours = ours.replace(".mlp.fc1.", ".mlp.in_proj.").replace(".mlp.fc2.", ".mlp.out_proj.")
        if ours in weights:
            raise ValueError(f"{name}: the model has another tensor for {ours}, and a stack has one")
        weights[ours] = tensor
    return _tied(weights, config)


def _tied(weights: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """With a tied table under both of its names; either may be all that is stored. Two tables that differ are
    not tied, whatever the configuration says: a head was replaced, or trained by itself."""
    stored = [weights[name] for name in (_EMBEDDING, _HEAD) if name in weights]
    if not stored or not config.tie_embeddings:
        return config, weights
    first, last = stored[0], stored[-1]
    if first.dtype != last.dtype or not torch.equal(first, last):
        return dataclasses.replace(config, tie_embeddings=False), weights
    return config, {**weights, _EMBEDDING: first, _HEAD: first}


def _halves_swapped(weight: Tensor) -> Tensor:
    """mamba-ssm's MLP computes (value, gate) where a stack's computes (gate, value)."""
    first, second = weight.chunk(2)
    return torch.cat([second, first])


def _read_weights(folder: Path) -> Weights:
    """All tensors of a model's folder, in one file or in the shards of an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        files, index = [folder / name], folder / f"{name}.index.json"
        if index.is_file() and not files[0].is_file():
            files = [folder / shard for shard in sorted(set(_read_json(index)["weight_map"].values()))]
        elif not files[0].is_file():
            continue
        return {key: tensor for file in files for key, tensor in _read_tensors(file).items()}
    raise UserError(f"{folder}: has neither model.safetensors nor pytorch_model.bin; download all its files")


def _read_tensors(file: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise UserError(f"{file}: no such file, but the index beside it lists it; download all files")
    try:
        if file.suffix == ".safetensors":  # parts of a mapped file: copied, to be the model's own
            return {name: tensor.clone() for name, tensor in load_file(str(file)).items()}
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be read ({reason}); download it anew") from None


def _read_json(file: Path) -> dict[str, Any]:
    def special(value: dict[str, Any]) -> Any:  # transformers 5 writes {"__float__": "Infinity"}
        return float(value["__float__"]) if set(value) == {"__float__"} else value

    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=special)
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error}); download it anew") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no keys; download it anew")
    return content
