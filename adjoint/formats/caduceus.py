"""CaduceusForMaskedLM (kuleshov-group/caduceus on GitHub): its config.json, and its weights' names.

Caduceus-PS (`rcps`) has two computations for the same weights. Without `fused_add_norm` each block runs on
both strands (`layers.strands`). With it, as in the published models, a block also exchanges the halves of the
residual stream, so that the strands enter every second block, the first included, with tokens and channels in
reverse order. Let F reverse both. A block G between two of these, F G F, is a block with its two directions
exchanged, and with channels reversed in norm, in_proj and out_proj: weights are read and written so, and a
stack need not know.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from adjoint.formats import mamba_ssm
from adjoint.formats.names import EMBEDDING, HEAD, Values, Weights, sizes, with_tied_table
from adjoint.layers import StackConfig
from adjoint.layers.bidirectional_mixer import TIED

# Caduceus' names of modules, and a stack's, in the order in which they are replaced.
_NAMES = {
    "embeddings.word_embeddings.": "embedding.",
    ".mamba_fwd.": ".forward_mixer.",
    ".mamba_rev.": ".reverse_mixer.",
}
_COMPLEMENTS = ("embedding.complement_map", "lm_head.complement_map")  # buffers of Caduceus-PS
# Dimensions of d_model channels of a block's tensors, by the ends of their names.
_CHANNELS = {"norm.weight": 0, "in_proj.weight": 1, "out_proj.weight": 0, "out_proj.bias": 0}


WEIGHTS_FILE = "model.safetensors"
WHY_NOT_EVALUATED: str | None = "a Caduceus model, whose tokenizer is Python code of its own"


def holds(config_json: Values) -> bool:
    """Whether a config.json is Caduceus'."""
    return config_json.get("model_type") == "caduceus"


def class_name(config_json: Values) -> str:
    """Return the name of the class that a config.json names."""
    return config_json["architectures"][0]


def read_config(config_json: Values) -> StackConfig:
    """Return the configuration of a stack with the sizes of a config.json.

    Raises:
        ValueError: the model has parts that a stack lacks.
        KeyError: a key is missing.
    """
    bidirectional, rcps = config_json.get("bidirectional", True), config_json.get("rcps", False)
    if rcps and not bidirectional:
        raise ValueError(
            "rcps is true and bidirectional false: a Stack reads both strands in both directions"
        )
    if rcps and config_json.get("complement_map") is None:
        raise ValueError("rcps is true and there is no complement_map: give each token id's complement")
    if rcps and _exchanges_halves(config_json) and config_json["n_layer"] % 2:
        raise ValueError(
            f"rcps and fused_add_norm with an odd n_layer, {config_json['n_layer']}: Caduceus' code ends "
            "with its two strands exchanged, which a Stack does not; use an even n_layer, or fused_add_norm "
            "false for a model that was trained so"
        )
    layer = (config_json.get("ssm_cfg") or {}).get("layer", "Mamba1")
    if layer != "Mamba1":
        raise ValueError(f"ssm_cfg.layer is {layer!r}; Caduceus' layers are Mamba1")
    config = mamba_ssm.read_config(
        {**config_json, "d_intermediate": 0, "tie_embeddings": config_json.get("tie_word_embeddings", True)}
    )
    config = dataclasses.replace(config, norm_eps=config_json.get("norm_epsilon", 1e-5))
    if not bidirectional:
        return config
    return dataclasses.replace(
        config,
        bidirectional="tied" if config_json.get("bidirectional_weight_tie", True) else "separate",
        bidirectional_strategy=config_json.get("bidirectional_strategy") or "add",
        complement_map=_complements(config_json["complement_map"]) if rcps else None,
    )


def read_weights(config_json: Values, config: StackConfig, weights: Weights) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights under a stack's names.

    Raises:
        ValueError: two tensors stand for one of a stack, or differ where they are one.
    """
    renamed: Weights = {}
    for name, tensor in weights.items():
        ours = _stack_name(name, config.bidirectional is not None)
        if ours in renamed:
            raise ValueError(f"{name}: the model has two tensors for {ours}, a Stack has one")
        renamed[ours] = tensor
    if config.complement_map is not None:
        # The model computes with these; keys of config.json are texts, whose order some files have changed.
        for name in _COMPLEMENTS:
            if name in renamed and renamed[name].tolist() != config.complements:
                raise ValueError(f"{name}: differs from complement_map of config.json; use the model's own")
            renamed.pop(name, None)
        if _exchanges_halves(config_json):
            renamed = _with_reversed_blocks(renamed)
    if config.bidirectional == "tied":
        _check_tied(renamed)
    return with_tied_table(renamed, config)


def why_not(config: StackConfig) -> str | None:
    """Return why a stack of this configuration is no Caduceus model; None if it is one."""
    kinds = dict.fromkeys(config.mixers)
    if config.bidirectional is None:
        return "a Caduceus model's layers read in both directions, this model's forward (bidirectional null)"
    if set(kinds) != {"mamba"}:
        return f"a Caduceus model's mixers are all mamba, this model's are {', '.join(kinds)}"
    if config.d_intermediate:
        return f"Caduceus has no MLPs, this model has d_intermediate {config.d_intermediate}"
    if config.complement_map is not None and not config.tie_embeddings:
        return "Caduceus ties head and embedding of both strands, this model does not (tie_embeddings false)"
    return None


def convert(config: StackConfig, weights: Weights) -> tuple[Values, Weights]:
    """Return config.json and weights of a stack in Caduceus' form, if `why_not` has no objection."""
    settings, has_strands = sizes(config, "mamba"), config.complement_map is not None
    is_fused = not has_strands or config.n_layer % 2 == 0
    config_json = {
        "architectures": ["CaduceusForMaskedLM"],
        "model_type": "caduceus",
        "d_model": config.d_model,
        "n_layer": config.n_layer,
        "vocab_size": config.vocab_size,
        "ssm_cfg": {name: settings[name] for name in mamba_ssm.shared_keys("mamba")},
        "rms_norm": True,
        "residual_in_fp32": False,
        "fused_add_norm": is_fused,
        "pad_vocab_size_multiple": 1,
        "norm_epsilon": config.norm_eps,
        "bidirectional": True,
        "bidirectional_strategy": config.bidirectional_strategy,
        "bidirectional_weight_tie": config.bidirectional == "tied",
        "rcps": has_strands,
        "complement_map": {str(i): c for i, c in enumerate(config.complements)} if has_strands else None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(weights[EMBEDDING].dtype).removeprefix("torch."),
    }
    weights = dict(weights)
    if config.tie_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    if has_strands and is_fused:
        weights = _with_reversed_blocks(weights)
    if config.bidirectional == "tied":  # under both names, as a file of Caduceus has them
        weights |= {_other_direction(name): tensor for name, tensor in weights.items() if _is_shared(name)}
    if has_strands:
        weights |= {name: torch.tensor(config.complements) for name in _COMPLEMENTS}
    return config_json, {
        _caduceus_name(name, has_strands, is_fused): tensor for name, tensor in weights.items()
    }


def _stack_name(name: str, bidirectional: bool) -> str:
    """Return a stack's name of a tensor of Caduceus; the model may be in a wrapper for each strand."""
    name = name.removeprefix("caduceus.").removeprefix("backbone.")
    name = name.replace(".submodule.", ".").replace("lm_head.lm_head.", "lm_head.")
    name = name.replace("word_embeddings.embedding.", "word_embeddings.")
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name if bidirectional else name.replace(".forward_mixer.", ".")


def _caduceus_name(name: str, has_strands: bool, is_fused: bool) -> str:
    """Return Caduceus' name of a tensor: with two strands, layers and tables are in wrappers."""
    for theirs, ours in _NAMES.items():
        name = name.replace(ours, theirs)
    if has_strands and name not in ("lm_head.complement_map", "embeddings.word_embeddings.complement_map"):
        name = name.replace("word_embeddings.", "word_embeddings.embedding.")
        name = name.replace("lm_head.", "lm_head.lm_head.").replace(".mixer.", ".mixer.submodule.")
        if not is_fused:
            name = re.sub(r"\b(norm|norm_f)\.weight", r"\1.submodule.weight", name)
    return name if name.startswith("lm_head.") else f"caduceus.backbone.{name}"


def _exchanges_halves(config_json: Values) -> bool:
    return bool(config_json.get("fused_add_norm", True))


def _with_reversed_blocks(weights: Weights) -> Weights:
    """Return the weights with each second block, the first included, for strands in reverse order.

    Applied twice it changes nothing."""
    reversed_weights: Weights = {}
    for name, tensor in weights.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) % 2:
            reversed_weights[name] = tensor
            continue
        dims = [dim for end, dim in _CHANNELS.items() if name.endswith(f".{end}")]
        reversed_weights[_other_direction(name)] = tensor.flip(dims) if dims else tensor
    return reversed_weights


def _other_direction(name: str) -> str:
    """Return the name of the same tensor in the layer's other direction; of a shared one, its own."""
    forward, reverse = ".forward_mixer.", ".reverse_mixer."
    return name.replace(forward, reverse) if forward in name else name.replace(reverse, forward)


def _is_shared(name: str) -> bool:
    """Whether tied directions share the tensor."""
    return any(f".{projection}." in name for projection in TIED)


def _check_tied(weights: Weights) -> None:
    """Raise a ValueError if a projection that two directions share is stored twice and differs."""
    for name, tensor in weights.items():
        other = weights.get(_other_direction(name), tensor)
        if _is_shared(name) and not torch.equal(tensor, other):
            raise ValueError(
                f"{name}: differs in the two directions, and bidirectional_weight_tie is true: set that to "
                "false"
            )


def _complements(complement_map: dict[str, int] | list[int]) -> list[int]:
    """Return each token id's complement from a config.json, whose keys are ids as texts."""
    if not isinstance(complement_map, dict):
        return list(complement_map)
    by_id = {int(i): complement for i, complement in complement_map.items()}
    return [by_id.get(i, i) for i in range(max(by_id, default=-1) + 1)]
