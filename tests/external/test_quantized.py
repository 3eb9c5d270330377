"""Quantized bases with adapters, by chunks against the untouched model: bitsandbytes and torchao."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from tests.hf.hf_models import errors, loss_and_gradients, make, make_batch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"hidden_size": 64, "intermediate_size": 128},
    "BambaForCausalLM": {"hidden_size": 64, "intermediate_size": 128, "mamba_d_head": 32},
    "Mamba2ForCausalLM": {"hidden_size": 64, "head_dim": 32},
    "Qwen3_5ForCausalLM": {"hidden_size": 64, "intermediate_size": 128},
}


def quantization(kind: str) -> Any:
    """Return transformers' configuration of a kind of quantization, if its library is installed."""
    if kind == "int8 weights":
        library = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quant_type=library.Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    options = {
        "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "LLM.int8": {"load_in_8bit": True},
        "8-bit without outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    }[kind]
    return transformers.BitsAndBytesConfig(**options)


def with_adapters(name: str, kind: str, folder: Path) -> Any:
    """Return a quantized model with LoRA on all of its linear maps that may have one."""
    make(name, torch.float32, **SIZES[name]).save_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(kind))
    torch.manual_seed(1)
    targets: Any = ["in_proj"] if name == "Mamba2ForCausalLM" else "all-linear"
    config = peft.LoraConfig(
        r=4,
        target_modules=targets,
        exclude_modules=["out_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base, config).train()


@pytest.mark.parametrize("kind", ["4-bit", "8-bit without outliers", "int8 weights"])
@pytest.mark.parametrize("name", SIZES)
def test_adapters_on_a_quantized_base(name: str, kind: str, tmp_path: Path) -> None:
    """Computed in float32: as far apart as two orders of summation."""
    model, inputs = with_adapters(name, kind, tmp_path), make_batch(29)
    expected = loss_and_gradients(model, **inputs)
    got = loss_and_gradients(adjoint.wrap(model, adjoint.Exact(chunk_size=8)), **inputs)
    difference = errors(got, expected)
    assert difference.total <= 5e-6 and difference.loss <= 1e-6, difference


def test_outliers_are_picked_by_chunk(tmp_path: Path) -> None:
    """A warning says that the rounding of LLM.int8 differs; gradients do by no more than the format's own."""
    model, inputs = with_adapters("BambaForCausalLM", "LLM.int8", tmp_path), make_batch(29)
    expected = loss_and_gradients(model, **inputs)
    wrapped = adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    with pytest.warns(UserWarning, match="LLM.int8 picks the columns"):
        got = loss_and_gradients(wrapped, **inputs)
    assert errors(got, expected).total < 0.1


class Linear8bitLt(nn.Linear):
    """A linear map like bitsandbytes': columns with an outlier in any token are left unrounded."""

    state: Any

    def forward(self, x: Tensor) -> Tensor:
        rounded = x + ((x * 512).round() / 512 - x).detach()
        is_outlier = (x.abs() > self.state.threshold).flatten(0, -2).any(0)
        return super().forward(torch.where(is_outlier, x, rounded) if self.state.threshold else rounded)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_layers_whose_rounding_depends_on_other_tokens(threshold: float) -> None:
    """The same without bitsandbytes. Without a threshold each token is rounded by itself: all is exact."""
    model = make("LlamaForCausalLM", torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate_proj.__class__ = Linear8bitLt
        layer.mlp.gate_proj.state = SimpleNamespace(threshold=threshold)
    wrapped, inputs = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=8)), make_batch(29)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = loss_and_gradients(wrapped, **inputs)
    expected = loss_and_gradients(model, **inputs)
    assert any("picks the columns" in str(w.message) for w in caught) == bool(threshold)
    difference = errors(got, expected)
    assert difference.total < (1e-2 if threshold else 1e-5), difference
    assert difference.total > 1e-5 or not threshold
