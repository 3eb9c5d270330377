"""Shards in one process: the same weights, losses, gradients and training as a `Stack` in one piece."""

from __future__ import annotations

import pytest
import torch
from model_helpers import SIZES, VARIANTS, make_ids

from adjoint import Stack, StackConfig
from adjoint.cluster.part import Part


def split(n_layer: int, shards: int) -> list[range]:
    return [range(n_layer * s // shards, n_layer * (s + 1) // shards) for s in range(shards)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_the_parts_have_the_weights_of_the_whole(variant: str, tied: bool, shards: int) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 5, **VARIANTS[variant], "tie_embeddings": tied})
    torch.manual_seed(7)
    whole = dict(Stack(config).named_parameters())
    generator = torch.get_rng_state()
    found: dict[str, torch.Tensor] = {}
    for span in split(config.n_layer, shards):
        part = Part(config, span, seed=7)
        named = part.named_weights()
        assert not found.keys() & named.keys()
        found |= named
        if part.first:
            ids = make_ids(2, 3)
            assert torch.equal(part.embed(ids), whole["embedding.weight"][ids])
        if part.last:
            assert torch.equal(
                part.head_parameters()[1], whole.get("lm_head.weight", whole["embedding.weight"])
            )
        assert not list(part.buffers())
    assert found.keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(found[name], parameter), name
    assert torch.equal(torch.get_rng_state(), generator), "drawing a part's weights moves the generator"


@pytest.mark.parametrize("shards", [1, 3])
def test_parts_are_filled_by_name(shards: int) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3})
    whole = dict(Stack(config).double().named_parameters())
    for span in split(3, shards):
        part = Part(config, span, seed=None, dtype=torch.float64)
        part.load_weights(whole.__getitem__)
        for name, parameter in part.named_weights().items():
            assert torch.equal(parameter, whole[name]), name
        if part.first:
            assert torch.equal(part.table.weight, whole["embedding.weight"])
        if part.first and part.last:
            assert part.lm_head.weight is part.embedding.weight
