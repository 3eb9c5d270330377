"""Tensors that a wrapped model's forward writes to, or that others write to while it runs: counters, PEFT's
parametrized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import loss_and_gradients, make, make_batch, transformers
from tests.model_helpers import assert_same

__all__ = ["transformers"]
pytestmark = pytest.mark.usefixtures("one_thread", "double")
IDS = make_batch(29)["input_ids"]
BATCH = {"input_ids": IDS, "labels": IDS}


def counting(what: str) -> tuple[Any, Any]:
    """A model, and its part that counts by a buffer and by a plain attribute: "tokens" or "calls"."""
    model = make("LlamaForCausalLM")
    mlp = model.model.layers[0].mlp
    mlp.register_buffer("count", torch.zeros(()))
    mlp.seen = torch.zeros((), dtype=torch.long)

    def count(module: Any, given: tuple[Tensor], out: Tensor) -> None:
        more = given[0].shape[1] if what == "tokens" else 1
        module.count += more
        module.seen += more

    mlp.register_forward_hook(count)
    return model, mlp


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_are_counted_once(recompute: str) -> None:
    model, mlp = counting("tokens")
    expected = loss_and_gradients(model, **BATCH)[1]
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, recompute=recompute))
    for calls in (2, 3):
        assert_same(loss_and_gradients(model, **BATCH)[1], expected)
        assert float(mlp.count) == float(mlp.seen) == calls * 29


def test_calls_that_are_counted_are_refused() -> None:
    """Before the first loss: there would be one a chunk."""
    model, mlp = counting("calls")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.(count|seen) differs from the whole's"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=8))(**BATCH)
    assert float(mlp.count) == 0


def test_adapters_of_parameters() -> None:
    """PEFT's `target_parameters`: a frozen weight is parametrized for the time of each forward."""
    peft = pytest.importorskip("peft")
    found = []
    for wrapped in (False, True):
        model = make("MixtralForCausalLM")
        config = peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj"],
            init_lora_weights=False,
        )
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config).double()
        if wrapped:
            adjoint.wrap(model, adjoint.Exact(chunk_size=8))
        for _ in range(2):
            model.zero_grad()
            model(**BATCH).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert any("experts" in name for name in found[0])
    assert_same(found[1], found[0])
