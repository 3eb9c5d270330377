"""Models as a stack has them, and back: sizes and weights, by the stack's names, of transformers' Mamba and
Mamba-2, of mamba-ssm's language models, and of runs.

Folders are read as they are: neither transformers nor mamba-ssm need be installed.
"""

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
# Keys of mamba-ssm's ssm_cfg: those that a stack has too, by the same names; what others must be, since a
# stack has nothing else; and those that say how weights begin or how fast things go, not what is computed.
_SSM_SHARED = ["d_state", "d_conv", "expand", "bias", "conv_bias", "dt_min", "dt_max", "dt_init_floor"]
_SSM_SHARED += ["dt_rank", "headdim", "ngroups"]
_SSM_FIXED: dict[str, Any] = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_limit": list(_INFINITE),
}
_SSM_FREE = ["conv_init", "A_init_range", "dt_init", "dt_scale", "chunk_size", "use_fast_path"]
_SSM_FREE += ["use_mem_eff_path", "sequence_parallel"]


def from_pretrained(folder: Path) -> tuple[StackConfig, Weights]:
    """The configuration and the weights, on the CPU in the dtypes they are stored in, of a model in a folder.

    Args:
        folder: of transformers' MambaForCausalLM or Mamba2ForCausalLM; of mamba-ssm's MambaLMHeadModel; of a
            run, whose newest good checkpoint is read; or a checkpoint of one.

    Raises:
        UserError: it is none of these, a file is missing or damaged, or the model has what a stack has not.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; download a model's with huggingface_hub.snapshot_download"
        )
    if (folder / "checkpoints").is_dir() or (folder / MANIFEST).is_file():
        return from_checkpoint(checkpoint_at(folder, str(folder)))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: neither a model (it has no config.json) nor a run; name the folder of one"
        )
    given = _read_json(folder / "config.json")
    try:
        config = _transformers_config(given) if "model_type" in given else _mamba_ssm_config(given)
    except KeyError as error:
        raise UserError(f"{folder}: its config.json has no {error.args[0]}; take the model's own") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: {error}") from None
    return config, _renamed(_read_weights(folder), config)


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
    return config, _renamed({name: t.clone() for name, t in hf_model.state_dict().items()}, config)


def from_checkpoint(checkpoint: Path) -> tuple[StackConfig, Weights]:
    """The configuration and the weights of a run's checkpoint, which the caller has verified."""
    config, stored = checkpoint_config(checkpoint), Tensors(checkpoint, "model")
    return config, _tied({name: stored[name].clone() for name in stored.where}, config)


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
    if set(config.mixers) not in ({"mamba"}, {"mamba2"}):
        kinds = ", ".join(dict.fromkeys(config.mixers))
        return f"a {layout} model's mixers are all mamba or all mamba2, this model's are {kinds}"
    width = config.d_intermediate
    if layout == "transformers":
        what = f"transformers' Mamba models have no MLP, this model has d_intermediate {width}"
        return what if width else None
    if config.norm_eps != 1e-5:
        return f"mamba-ssm's norms have epsilon 1e-05, this model's norm_eps is {config.norm_eps}"
    if width % 128:
        return f"mamba-ssm's MLPs are multiples of 128 wide, this model's d_intermediate is {width}"
    if width and config.bias:
        return "mamba-ssm's MLPs have no biases, this model's have (bias true)"
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
    kind = config.mixers[0]
    ssm_cfg: dict[str, Any] = {"layer": "Mamba1" if kind == "mamba" else "Mamba2"}
    other = ("headdim", "ngroups") if kind == "mamba" else ("dt_rank",)  # which that layer does not take
    ssm_cfg |= {name: getattr(config, name) for name in _SSM_SHARED if name not in other}
    ssm_cfg["d_state"] = config.state_size(kind)
    if kind == "mamba":
        ssm_cfg["dt_rank"] = config.step_rank
    given = {
        "d_model": config.d_model,
        "d_intermediate": config.d_intermediate,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": ssm_cfg,
        "attn_layer_idx": [],
        "attn_cfg": {},
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
    if given.get("attn_layer_idx"):
        layers = ", ".join(map(str, given["attn_layer_idx"]))
        raise ValueError(f"attn_layer_idx names attention layers ({layers}), which are not read into a Stack")
    if layer not in ("Mamba1", "Mamba2"):
        raise ValueError(f"ssm_cfg.layer is {layer!r}; Mamba1 and Mamba2 are read into a Stack")
    if not given.get("rms_norm", True):
        raise ValueError("rms_norm is false: the model has LayerNorms, a Stack has RMS norms")
    for name, value in ssm_cfg.items():
        if name in _SSM_FIXED and value != _SSM_FIXED[name]:
            raise ValueError(f"ssm_cfg.{name} is {value!r}, a Stack has {_SSM_FIXED[name]!r} alone")
        if name not in (*_SSM_FIXED, *_SSM_SHARED, *_SSM_FREE):
            raise ValueError(f"ssm_cfg.{name} is an option that a Stack does not know")
    sizes = {"expand": 2, "dt_rank": "auto", **{n: v for n, v in ssm_cfg.items() if n in _SSM_SHARED}}
    sizes |= {"expand": _whole(sizes["expand"]), "dt_rank": _rank(sizes["dt_rank"])}
    width = given.get("d_intermediate", 0)
    if width and sizes.get("bias"):
        raise ValueError("ssm_cfg.bias is true and the MLPs have no biases, a Stack has both or neither")
    multiple = given.get("pad_vocab_size_multiple", 8)
    return StackConfig(
        mixer="mamba" if layer == "Mamba1" else "mamba2",
        vocab_size=_rounded_up(given["vocab_size"], multiple),
        d_model=given["d_model"],
        n_layer=given["n_layer"],
        d_intermediate=_rounded_up(width, 128),
        tie_embeddings=given.get("tie_embeddings", True),
        **sizes,
    )


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _whole(number: Any) -> Any:
    """2.0 as 2; what is no whole number is left for StackConfig to refuse."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _rank(number: Any) -> Any:
    return None if number == "auto" else number  # a stack's default is what auto means


# -------------------------------------------------------------------------------------------------- weights


def _renamed(tensors: Weights, config: StackConfig) -> Weights:
    """By a stack's names: transformers' and mamba-ssm's are alike but for the embedding and the MLP."""
    weights: Weights = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("backbone.").replace("embeddings.weight", _EMBEDDING)
        if ".mlp.fc1." in name:
            tensor = _halves_swapped(tensor)
        weights[name.replace(".mlp.fc1.", ".mlp.in_proj.").replace(".mlp.fc2.", ".mlp.out_proj.")] = tensor
    return _tied(weights, config)


def _tied(weights: Weights, config: StackConfig) -> Weights:
    """With a tied table under both of its names; either may be all that is stored."""
    table = weights.get(_EMBEDDING, weights.get(_HEAD))
    if table is None or not config.tie_embeddings:
        return weights
    return {**weights, _EMBEDDING: table, _HEAD: table}


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
