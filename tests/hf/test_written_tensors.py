"""Tensors that are written to while a wrapped model runs: counters, PEFT's parametrized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.engine.verification import Results, difference
from tests.hf.hf_models import loss_and_gradients, make, make_batch, transformers
from tests.model_helpers import assert_same

__all__ = ["transformers"]
pytestmark = pytest.mark.usefixtures("one_thread", "double")
IDS = make_batch(29)["input_ids"]
BATCH = {"input_ids": IDS, "labels": IDS}


def make_counting_model(unit: str) -> tuple[Any, Any]:
    """Return a model and its part that counts "tokens" or "calls", in a buffer and in a plain attribute."""
    model = make("LlamaForCausalLM")
    mlp = model.model.layers[0].mlp
    mlp.register_buffer("count", torch.zeros(()))
    mlp.plain_count = torch.zeros((), dtype=torch.long)

    def count(module: Any, inputs: tuple[Tensor], out: Tensor) -> None:
        more = inputs[0].shape[1] if unit == "tokens" else 1
        module.count += more
        module.plain_count += more

    mlp.register_forward_hook(count)
    return model, mlp


BUFFERS = {  # what differs is the first entry
    "bool": torch.tensor([True, False]),
    "bytes": torch.tensor([3, 250], dtype=torch.uint8),
    "uint16": torch.tensor([3, 250], dtype=torch.uint16),
    "int64": torch.tensor([3, -7]),
    "float8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, -3j]),
    "not_finite": torch.tensor([1.0, torch.nan, -torch.inf, torch.inf]),
    "quantized": torch._make_per_tensor_quantized_tensor(torch.tensor([9, 200], dtype=torch.uint8), 0.1, 3),
    "empty": torch.zeros(0),
}


def test_buffers_of_every_dtype_are_compared() -> None:
    """Compare buffers that a forward writes to, also with values that are not equal to themselves."""
    model = make("LlamaForCausalLM")
    mlp = model.model.layers[0].mlp
    for name, values in BUFFERS.items():
        mlp.register_buffer(name, values.clone())

    def write(*_: object) -> None:
        for name, values in BUFFERS.items():
            getattr(mlp, name).copy_(values)

    mlp.register_forward_hook(write)
    expected = loss_and_gradients(model, **BATCH)[1]
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(loss_and_gradients(model, **BATCH)[1], expected)


@pytest.mark.parametrize("name", [name for name, values in BUFFERS.items() if len(values)])
def test_a_buffer_that_differs_is_told(name: str) -> None:
    values = BUFFERS[name]
    other = values.clone()
    other[0] = values[1] if name == "quantized" else torch.zeros((), dtype=values.dtype)
    results = Results({}, outputs={name: values})
    assert difference(results, Results({}, outputs={name: values.clone()}), 1e-5) is None
    assert difference(results, Results({}, outputs={name: other}), 1e-5).startswith(f"{name} differs")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_are_counted_once(recompute: str) -> None:
    model, mlp = make_counting_model("tokens")
    expected = loss_and_gradients(model, **BATCH)[1]
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, recompute=recompute))
    for calls in (2, 3):
        assert_same(loss_and_gradients(model, **BATCH)[1], expected)
        assert float(mlp.count) == float(mlp.plain_count) == calls * 29


def test_calls_that_are_counted_are_refused() -> None:
    """Refused before the first loss: the model would count one call per chunk."""
    model, mlp = make_counting_model("calls")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.(count|plain_count) differs from the whole's"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=8))(**BATCH)
    assert float(mlp.count) == 0


def test_adapters_of_parameters() -> None:
    """PEFT's `target_parameters`: a frozen weight is parametrized for the time of each forward."""
    peft = pytest.importorskip("peft")
    gradients = []
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
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert any("experts" in name for name in gradients[0])
    assert_same(gradients[1], gradients[0])
