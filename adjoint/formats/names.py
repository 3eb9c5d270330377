"""Sizes and weight names of a stack, which all formats share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.layers import MIXERS, StackConfig
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.mamba import MambaMixer

Weights = dict[str, Tensor]
Values = dict[str, Any]  # of a config.json, or of a configuration's fields, by key
EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"


def sizes(config: StackConfig, kind: str) -> Values:
    """Return a configuration's fields, with the defaults of this kind of mixer and of attention."""
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


def as_config_values(sizes: Values) -> Values:
    """Return other libraries' values as a StackConfig takes them: 2.0 as 2, and "auto" as None.

    A number that is not integral stays, for StackConfig to refuse."""
    expand, rank = sizes["expand"], sizes.get("dt_rank")
    integral = int(expand) if isinstance(expand, float) and expand.is_integer() else expand
    return sizes | {"expand": integral, "dt_rank": None if rank == "auto" else rank}


def with_stack_names(tensors: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """Rename weights of transformers or mamba-ssm to a stack's names: only embedding and MLP differ.

    Raises:
        ValueError: two tensors stand for one of a stack.
    """
    weights: Weights = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("backbone.").replace("embeddings.weight", EMBEDDING)
        if ".mlp.fc1." in ours:
            tensor = swap_halves(tensor)
        ours = ours.replace(".mlp.fc1.", ".mlp.in_proj.").replace(".mlp.fc2.", ".mlp.out_proj.")
        if ours in weights:
            raise ValueError(f"{name}: the model has two tensors for {ours}, a Stack has one")
        weights[ours] = tensor
    return with_tied_table(weights, config)


def with_tied_table(weights: Weights, config: StackConfig) -> tuple[StackConfig, Weights]:
    """Return configuration and weights with a tied table under both of its names; either name may be missing.

    Two tables that differ are not tied, whatever the configuration says: a head was replaced, or trained
    alone."""
    stored = [weights[name] for name in (EMBEDDING, HEAD) if name in weights]
    if not stored or not config.tie_embeddings:
        return config, weights
    first, last = stored[0], stored[-1]
    if first.dtype != last.dtype or not torch.equal(first, last):
        return dataclasses.replace(config, tie_embeddings=False), weights
    return config, {**weights, EMBEDDING: first, HEAD: first}


def swap_halves(weight: Tensor) -> Tensor:
    """Swap the halves of an MLP's input weight: mamba-ssm has (value, gate), a stack (gate, value)."""
    first, second = weight.chunk(2)
    return torch.cat([second, first])


def assign(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Make these tensors the module's parameters and buffers, without a copy.

    A module under several names, such as a projection that two directions share, needs weights under one.

    Raises:
        ValueError: the module's names or shapes differ.
    """
    names_of: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for names in names_of.values():
        stored = [weights[name] for name in names if name in weights]
        weights = {**dict.fromkeys(names, stored[0]), **weights} if stored else weights
    module_shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    weight_shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in [*module_shapes, *weight_shapes]:
        if module_shapes.get(name) != weight_shapes.get(name):
            shapes = [
                f"shape {shapes[name]}" if name in shapes else "none"
                for shapes in (module_shapes, weight_shapes)
            ]
            raise ValueError(f"{name}: its configuration asks for {shapes[0]}, its weights have {shapes[1]}")
    module.load_state_dict(weights, assign=True)
