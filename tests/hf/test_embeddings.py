"""Embeddings instead of ids: loss, gradients and the embeddings' own gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import (
    assert_exact,
    current_gradients,
    make,
    make_batch,
    skip_if_broken,
)

pytestmark = pytest.mark.usefixtures("one_thread", "double")

LLAMA, BAMBA, QWEN = "LlamaForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM"
EXACT = adjoint.Exact(chunk_size=8)
BATCH = make_batch(29)
IDS = BATCH.pop("input_ids")
LEFT = {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.arange(6), 0)}
LEFT["labels"] = IDS.masked_fill(LEFT["attention_mask"].roll(1, dims=1) == 0, -100)
ROWS = torch.cat([torch.arange(11), torch.arange(18)])[None].expand(2, -1)

Call = Callable[[Any, Tensor], Tensor]


def loss_of_embeddings(**inputs: Any) -> Call:
    return lambda model, embeds: model(inputs_embeds=embeds, **{**BATCH, **inputs}).loss


def above_the_backbone(model: Any, embeds: Tensor) -> Tensor:
    weight = torch.randn(embeds.shape, dtype=embeds.dtype, generator=torch.Generator().manual_seed(5))
    return (model.base_model(inputs_embeds=embeds)[0] * weight).sum()


def frozen(model: Any, embeds: Tensor) -> Tensor:
    model.requires_grad_(False)
    return loss_of_embeddings()(model, embeds)


def by_documents(model: Any, embeds: Tensor) -> Tensor:
    """Return the loss of packed documents; the untouched model runs each by itself."""
    labels = IDS.index_fill(1, torch.tensor([11]), -100)
    if "_adjoint" in vars(model):
        return model(inputs_embeds=embeds, labels=labels, position_ids=ROWS).loss
    pieces = zip(embeds.split([11, 18], dim=1), labels.split([11, 18], dim=1), strict=True)
    losses = [model(inputs_embeds=e, labels=i, num_items_in_batch=54).loss for e, i in pieces]
    return losses[0] + losses[1]


def without_padding(model: Any, embeds: Tensor) -> Tensor:
    """Return the loss without an attention_mask, of a model that contains a causal LM."""
    return model(inputs_embeds=embeds, labels=BATCH["labels"]).loss


CASES: list[tuple[str, Any, Call]] = [
    *(
        (name, EXACT, loss_of_embeddings())
        for name in (LLAMA, "Mamba2ForCausalLM", BAMBA, QWEN, "Qwen3NextForCausalLM")
    ),
    (BAMBA, adjoint.Truncated(64, chunk_size=8), loss_of_embeddings()),
    (QWEN, adjoint.Exact(chunk_size=5, keep="inputs", recompute="full"), loss_of_embeddings()),
    (LLAMA, adjoint.Exact(memory="1GB"), loss_of_embeddings(num_items_in_batch=7)),
    (LLAMA, adjoint.MiniSequence(), loss_of_embeddings()),
    (BAMBA, EXACT, loss_of_embeddings(**LEFT)),
    (BAMBA, EXACT, by_documents),
    (BAMBA, EXACT, frozen),
    ("Llama4ForConditionalGeneration", EXACT, without_padding),
    (LLAMA, EXACT, above_the_backbone),
    (BAMBA, EXACT, above_the_backbone),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "method", "call"), CASES)
def test_embeddings_have_the_models_own_gradient(name: str, method: Any, call: Call) -> None:
    results = []
    skip_if_broken(name)
    for wrapped in (True, False):
        model = adjoint.wrap(make(name), method) if wrapped else make(name)
        embeds = torch.randn(2, 29, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        embeds.requires_grad_()
        loss = call(model, embeds)
        loss.backward()
        assert embeds.grad is not None
        results.append((loss.detach(), {**current_gradients(model), "embeddings": embeds.grad}))
    assert_exact(*results)
