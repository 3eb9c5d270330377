"""Layers that behave as bitsandbytes' do, without the library: tests/external has the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from tests.hf.hf_models import loss_and_gradients, make, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")


class PackedWeight(nn.Parameter):
    """A parameter with attributes, as bitsandbytes' are."""

    quant_state: Any


class Linear4bit(nn.Linear):
    """A layer that packs its weight in an evaluation; packed, it returns no gradient."""

    support_avx512bf16_for_cpu: bool
    compute_dtype: torch.dtype
    quant_state: Any

    def forward(self, x: Tensor) -> Tensor:
        if self.support_avx512bf16_for_cpu and not self.training and not x.requires_grad:
            self.quant_state.packing_format_for_cpu = True
        y = super().forward(x.to(self.compute_dtype).float())
        return y.detach() if self.quant_state.packing_format_for_cpu else y


def with_packing_layers(dtype: torch.dtype = torch.float32) -> Any:
    model = make("LlamaForCausalLM", torch.float32)
    for layer in model.model.layers:
        projection = layer.mlp.gate_proj
        projection.__class__ = Linear4bit
        projection.weight = PackedWeight(projection.weight.detach(), requires_grad=False)
        projection.quant_state = SimpleNamespace(packing_format_for_cpu=False)
        projection.weight.quant_state = projection.quant_state
        projection.support_avx512bf16_for_cpu, projection.compute_dtype = True, dtype
    return model


def test_an_evaluation_packs_no_weights() -> None:
    """Gradients after it are those before it."""
    model, inputs = adjoint.wrap(with_packing_layers(), adjoint.Exact(chunk_size=8)), make_batch(29)
    before = loss_and_gradients(model.train(), **inputs)
    with torch.no_grad():
        model.eval()(**inputs)
    after = loss_and_gradients(model.train(), **inputs)
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1]) and before[1]


def test_weights_that_are_packed_already_are_refused() -> None:
    model = with_packing_layers()
    with torch.no_grad():
        model.eval()(**make_batch(29))
    with pytest.raises(ValueError, match=r"gate_proj: an evaluation has packed its 4-bit weights"):
        adjoint.wrap(model, adjoint.Exact())


def test_layers_that_multiply_in_half_precision_are_compared_in_float32() -> None:
    """A comparison in bfloat16 would see its rounding, and refuse the model."""
    model = adjoint.wrap(with_packing_layers(torch.bfloat16), adjoint.Exact(chunk_size=8)).train()
    assert model(**make_batch(29)).loss.isfinite()
    assert model.model.layers[0].mlp.gate_proj.compute_dtype == torch.bfloat16
