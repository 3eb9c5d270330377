"""Quantized bases with adapters, by chunks against the untouched model: bitsandbytes and torchao."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.checkpoint import StoredTensors
from adjoint.cli import main
from adjoint.train.checkpoint import trained_model
from adjoint.train.quantization import transformers_config
from tests.hf.hf_models import errors, loss_and_gradients, make, make_batch
from tests.training_helpers import metrics, train_tiny

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


def test_layers_that_multiply_in_bfloat16(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """QLoRA's usual setting is accepted on first use: it is compared in float32, on a copy."""
    pytest.importorskip("bitsandbytes")
    make("LlamaForCausalLM", torch.float32, **SIZES["LlamaForCausalLM"]).save_pretrained(tmp_path)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    settings = transformers.BitsAndBytesConfig(**options)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=settings
    )
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = adjoint.wrap(peft.get_peft_model(base, config).train(), adjoint.Exact(chunk_size=8))
    loss, gradients = loss_and_gradients(model, **make_batch(29))
    assert loss.isfinite() and gradients
    assert not [w for w in recwarn if "compared in its own precision" in str(w.message)]


def test_training_goes_on_after_an_evaluation(tmp_path: Path) -> None:
    """Gradients stay as they are: bitsandbytes would pack weights on a CPU with AVX-512 BF16."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, head_dim=32, vocab_size=64, num_hidden_layers=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization("4-bit")
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = adjoint.wrap(peft.get_peft_model(base, lora).train(), adjoint.Exact(chunk_size=8))
    inputs = make_batch(29)
    before = loss_and_gradients(model, **inputs)
    with torch.no_grad():
        model.eval()(**inputs)
    after = loss_and_gradients(model.train(), **inputs)
    assert errors(after, before).total == 0


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs resume bitwise, checkpoints hold adapters alone, exports have floating-point weights.

    A base that is saved quantized trains the same way, and its export has the loss of training."""
    pytest.importorskip("bitsandbytes")
    make("BambaForCausalLM", torch.float32, vocab_size=256, **SIZES["BambaForCausalLM"]).save_pretrained(
        tmp_path / "base"
    )
    keys = {"model__from_pretrained": tmp_path / "base", "model__lora__rank": 4, "training__lr": 1e-2}
    keys |= {"training__sample_tokens": 0, "training__eval_every": 1, "training__keep_checkpoints": 9}
    keys |= {"training__save_every": 1, "model__quantization": kind}
    runs = [tmp_path / name for name in ("through", "resumed")]
    assert train_tiny(tmp_path, **sized(keys), training__steps=3, run__dir=runs[0]) == 0
    assert train_tiny(tmp_path, **sized(keys), training__steps=2, run__dir=runs[1]) == 0
    resumed = {"training__steps": 3, "run__dir": runs[1], "run__resume": "auto"}
    assert train_tiny(tmp_path, **sized(keys), **resumed) == 0
    files = [run / "checkpoints" / "step-00000003" / "model.safetensors" for run in runs]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all("lora_" in name for name in StoredTensors(files[0].parent, "model").files_by_name)
    capsys.readouterr()
    assert main(["export", str(runs[0]), "--to", str(tmp_path / "merged")]) == 0
    assert (
        f"merged into the weights of {tmp_path / 'base'} (trained on these in {kind})"
        in capsys.readouterr().out
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {type(m).__name__ for m in merged.modules()}.isdisjoint({"Linear4bit", "Linear8bitLt"})

    settings = transformers_config(kind)
    transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=settings
    ).save_pretrained(tmp_path / "stored")
    keys |= {"model__from_pretrained": tmp_path / "stored", "model__quantization": "null"}
    assert train_tiny(tmp_path, **sized(keys), training__steps=3, run__dir=tmp_path / "of stored") == 0
    assert [row["loss"] for row in metrics(tmp_path / "of stored")] == [
        row["loss"] for row in metrics(runs[0])
    ]
    assert main(["export", str(tmp_path / "of stored"), "--to", str(tmp_path / "dequantized")]) == 0
    config = json.loads((tmp_path / "dequantized" / "config.json").read_text())
    assert "quantization_config" not in config
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    trained = trained_model(tmp_path / "of stored" / "checkpoints" / "step-00000003", adjoint.Exact()).eval()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized")
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss.item() for model in (trained, exported)]
    assert abs(losses[0] - losses[1]) < (1e-5 if kind == "4bit" else 1e-2) * losses[0]


def sized(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a run with the model's sizes, in the place of those of `train_tiny`."""
    return {"model__d_model": 64, "model__n_layer": 3, **keys}


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters are measured on a quantized base; gradients agree, as nothing packs weights before."""
    pytest.importorskip("bitsandbytes")
    make("LlamaForCausalLM", torch.float32, **SIZES["LlamaForCausalLM"]).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    words = ["--lengths", "32", "--repeat", "1", "--device", "cpu", "--quantization", "4bit"]
    assert main(["compare", "base", *words]) == 0
    said = capsys.readouterr().out
    assert "quantized (bitsandbytes, 4 bits), under adapters of rank 8" in said
    result = json.loads(Path("compare/compare.json").read_text())
    assert 0 <= result["gradients"]["difference"] < 1e-4
    assert len(result["rows"]) == 3 and all("loss" in row for row in result["rows"])


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
