"""A stack's side of every format: its sizes with defaults filled in, and its weights by their names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.layers import MIXERS, StackConfig
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.mamba import MambaMixer

Weights = dict[str, Tensor]
EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"


def sizes(config: StackConfig, kind: str) -> dict[str, Any]:
    """A configuration's fields, with the defaults of a mixer of that kind and of attention filled in."""
    heads, kv_heads, dim, rotary_dim, bias = AttentionMixer.sizes_of(config)
    return dataclasses.asdict(config) | {
        "d_state": MIXERS[kind].state_size(config),
        "dt_rank": MambaMixer.step_rank(config),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rotary_emb_dim": rotary_dim,
        "attention_bias": bias,
    }


def as_given(sizes: dict[str, Any]) -> dict[str, Any]:
    """Other libraries' values as a StackConfig takes them: 2.0 as 2, and "auto" as None. What is no whole
    number is left for it to refuse."""
    expand, rank = sizes["expand"], sizes.get("dt_rank")
    whole = int(expand) if isinstance(expand, float) and expand.is_integer() else expand
    return sizes | {"expand": whole, "dt_rank": None if rank == "auto" else rank}


def by_our_names(tensors: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """Weights of transformers or mamba-ssm, whose names are a stack's but for the embedding and the MLP.

    Raises:
        ValueError: two tensors stand for one of a stack.
    """
    weights: Weights = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("backbone.").replace("embeddings.weight", EMBEDDING)
        if ".mlp.fc1." in ours:
            tensor = halves_swapped(tensor)
        ours = ours.replace(".mlp.fc1.", ".mlp.in_proj.").replace(".mlp.fc2.", ".mlp.out_proj.")
        if ours in weights:
            raise ValueError(f"{name}: the model has another tensor for {ours}, and a stack has one")
        weights[ours] = tensor
    return tied(weights, config)


def tied(weights: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """With a tied table under both of its names; either may be all that is stored. Two tables that differ are
    not tied, whatever the configuration says: a head was replaced, or trained by itself."""
    stored = [weights[name] for name in (EMBEDDING, HEAD) if name in weights]
    if not stored or not config.tie_embeddings:
        return config, weights
    first, last = stored[0], stored[-1]
    if first.dtype != last.dtype or not torch.equal(first, last):
        return dataclasses.replace(config, tie_embeddings=False), weights
    return config, {**weights, EMBEDDING: first, HEAD: first}


def halves_swapped(weight: Tensor) -> Tensor:
    """mamba-ssm's MLP computes (value, gate) where a stack's computes (gate, value)."""
    first, second = weight.chunk(2)
    return torch.cat([second, first])


def assign(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Makes these tensors the module's own; none is copied.

    Raises:
        ValueError: the module has others, or others in shape.
    """
    own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in [*own, *given]:
        if own.get(name) != given.get(name):
            shapes = [f"shape {shapes[name]}" if name in shapes else "none" for shapes in (own, given)]
            raise ValueError(f"{name}: its configuration asks for {shapes[0]}, its weights have {shapes[1]}")
    module.load_state_dict(weights, assign=True)
