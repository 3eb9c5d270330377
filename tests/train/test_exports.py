"""Exports of runs that began with a pretrained model: adapters on shared weights, dtypes, special tokens. The
checkpoints are of models that were changed without a training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import adjoint
from adjoint.cli import main
from adjoint.cluster.training import described_model
from adjoint.data.tokenizer import load_tokenizer
from adjoint.errors import UserError
from adjoint.tools.export import export
from adjoint.train.checkpoint import trained_model
from adjoint.train.config import load_config
from adjoint.train.language_model import PretrainedLM
from adjoint.train.pretrained import load
from tests.training_helpers import checkpoint_of, train_tiny

transformers = pytest.importorskip("transformers")
pytest.importorskip("adjoint.hf.wrap")
from tests.hf.hf_models import VOCAB, make  # noqa: E402

LORA = {"rank": 2, "alpha": None, "dropout": 0.0}
DEFAULT = {"target_modules": None}


@torch.no_grad()
def loss_of(model: Any) -> float:
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def base_folder(name: str, folder: Path, tied: bool = False) -> Path:
    model = make(name, torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def change_trained(model: Any) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name, targets",
    [
        ("LlamaForCausalLM", ["lm_head"]),
        ("LlamaForCausalLM", ["embed_tokens", "q_proj"]),
        ("Mamba2ForCausalLM", ["lm_head", "embeddings"]),
        ("ZambaForCausalLM", None),  # whose blocks share their weights, too
    ],
)
def test_adapters_on_shared_weights_are_merged_into_weights_of_their_own(
    name: str, targets: list[str] | None, tmp_path: Path
) -> None:
    """`eval` and the exported model have the loss of training; without adapters a head stays tied."""
    pytest.importorskip("peft")
    base, lora = base_folder(name, tmp_path / "base", tied=True), LORA | {"target_modules": targets}
    model = load(str(base), adjoint.Exact(), lora)
    change_trained(model)
    trained = loss_of(model)
    checkpoint = checkpoint_of(model, tmp_path / "checkpoints", base, lora)
    assert loss_of(trained_model(checkpoint, adjoint.Exact())) == pytest.approx(trained, rel=1e-5)
    said = export(checkpoint, tmp_path / "out", "transformers")
    assert "modules that shared a weight have one each, as adapters made them differ" in said
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loss_of(exported) == pytest.approx(trained, rel=1e-5)
    assert exported.config.tie_word_embeddings is False


def test_a_head_stays_tied_where_no_adapter_is_on_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base, lora = (
        base_folder("LlamaForCausalLM", tmp_path / "base", tied=True),
        LORA | {"target_modules": None},
    )
    model = load(str(base), adjoint.Exact(), lora)
    change_trained(model)
    checkpoint = checkpoint_of(model, tmp_path / "checkpoints", base, lora)
    assert "shared a weight" not in export(checkpoint, tmp_path / "out", "transformers")
    assert (
        load_file(tmp_path / "out/model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.tie_word_embeddings and loss_of(exported) == pytest.approx(
        loss_of(model), rel=1e-5
    )


@pytest.mark.parametrize(
    "name, targets, said",
    [
        ("InklingForCausalLM", "embed_tokens", "computes more than rows of a table"),
        ("DeepseekV4ForCausalLM", "o_a_proj", "computes more than a product"),
    ],
)
def test_adapters_beside_what_is_no_plain_map_are_refused(
    name: str, targets: str, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    base = base_folder(name, tmp_path / "base")
    with pytest.raises(UserError, match=f"model.lora.target_modules: .*{said}"):
        load(str(base), adjoint.Exact(), LORA | {"target_modules": [targets]})
    load(str(base), adjoint.Exact(), LORA | DEFAULT)  # where none are named it is left out


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Mamba2ForCausalLM"])
def test_each_exported_tensor_has_the_dtype_that_the_folder_has(name: str, tmp_path: Path) -> None:
    """Bit for bit, as nothing is trained. The folder has time scales and biases in float32, as transformers
    has routers; of another dtype asked for these stay so."""
    base = base_folder(name, tmp_path / "base")
    half_model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    half_model.save_pretrained(tmp_path / "own")
    loaded = load_file(tmp_path / "own/model.safetensors")
    stored = load_file(base / "model.safetensors")
    wide = ("A_log", "dt_bias", "D", "norm.weight", "norm_f.weight")
    for key, tensor in loaded.items():
        is_wide = tensor.dtype == torch.float32 or key.endswith(wide)
        stored[key] = stored[key] if is_wide else tensor
    assert {t.dtype for t in stored.values()} == {torch.float32, torch.bfloat16}
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    checkpoint = checkpoint_of(load(str(base), adjoint.Exact()), tmp_path / "checkpoints", base)
    export(checkpoint, tmp_path / "out", "transformers")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == stored.keys()
    for key, tensor in stored.items():
        assert exported[key].dtype == tensor.dtype and torch.equal(exported[key], tensor), key
    export(checkpoint, tmp_path / "half", "transformers", "float16")
    in_float32 = {
        k for k, t in load_file(tmp_path / "half/model.safetensors").items() if t.dtype == torch.float32
    }
    assert in_float32 == {key for key, tensor in stored.items() if tensor.dtype == torch.float32}
    export(checkpoint, tmp_path / "single", "transformers", "float32")
    assert {t.dtype for t in load_file(tmp_path / "single/model.safetensors").values()} == {torch.float32}
    names = {
        "out": "float32",
        "half": "float16",
        "single": "float32",
    }  # the folder's config.json says float32
    for folder, dtype in names.items():
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype


def test_what_transformers_keeps_in_float32_stays_so_in_a_folder_of_float32(tmp_path: Path) -> None:
    """Also where the folder has it, and little else, in 16 bits."""
    base, bias = base_folder("DeepseekV3ForCausalLM", tmp_path / "base"), "e_score_correction_bias"
    stored = load_file(base / "model.safetensors")
    stored = {key: t.bfloat16() if key.endswith((bias, "norm.weight")) else t for key, t in stored.items()}
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    checkpoint = checkpoint_of(load(str(base), adjoint.Exact()), tmp_path / "checkpoints", base)
    export(checkpoint, tmp_path / "out", "transformers")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert {t.dtype for key, t in exported.items() if key.endswith(bias)} == {torch.float32}
    assert {t.dtype for key, t in exported.items() if key.endswith("norm.weight")} == {torch.bfloat16}


def float64_folder(name: str, folder: Path) -> Any:
    """Write a model whose weights are no values of float32, and return it."""
    model = make(name, torch.float64, vocab_size=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-9 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_folder_in_float64_stays_so(adapters: bool, precision: str, tmp_path: Path) -> None:
    """Trained tensors have the checkpoint's values, untrained ones the folder's, to the last bit.

    Adapters are merged in float64, and a run in float64 begins with the folder's values."""
    model = float64_folder("Mamba2ForCausalLM", tmp_path / "base")
    flags: dict[str, Any] = {"model__from_pretrained": tmp_path / "base", "training__precision": precision}
    if adapters:
        pytest.importorskip("peft")
        flags |= {"model__lora__rank": 2, "training__lr": 0.01}
    sizes = {"model__d_model": model.config.hidden_size, "model__n_layer": model.config.num_hidden_layers}
    assert train_tiny(tmp_path, **sizes, **flags, training__steps=1, training__sample_tokens=0) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    trained = load_file(tmp_path / "run/checkpoints/step-00000001/model.safetensors")
    config = load_config(["--config", str(tmp_path / "run/config.yaml")])
    begun = PretrainedLM.from_config(config, dtype=getattr(torch, precision)).module.state_dict()
    base, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert {t.dtype for t in exported.values()} == {torch.float64}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float64"
    assert {t.dtype for t in trained.values()} == {getattr(torch, precision)}
    for name, tensor in exported.items():
        expected, stem = base[name], f"base_model.model.{name.removesuffix('.weight')}.lora"
        if adapters and f"{stem}_B.default.weight" in trained:
            a, b = (trained[f"{stem}_{letter}.default.weight"].double() for letter in "AB")
            expected = expected + 2 * b @ a
            assert (tensor - expected).norm() <= 1e-15 * expected.norm() < (tensor - base[name]).norm(), name
        else:
            assert torch.equal(tensor, expected if adapters else trained[name].double()), name
            if precision == "float64" and not adapters:
                assert torch.equal(begun[name], base[name]), name


def test_experts_in_float64_have_adapters_and_layer_shards(tmp_path: Path) -> None:
    """Shards begin with the folder's bits; transformers' grouped products take no float64."""
    pytest.importorskip("peft")
    model = float64_folder("JambaForCausalLM", tmp_path / "base")
    words = f"--model.from_pretrained {tmp_path}/base --training.precision float64 --data.tokenizer byte"
    config = load_config(words.split())
    described_model(config, tmp_path / "shards")
    begun = load_file(tmp_path / "shards/model.safetensors")
    assert begun.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(begun[name], parameter) for name, parameter in model.named_parameters())
    adapted = load(str(tmp_path / "base"), adjoint.Exact(4), LORA | DEFAULT, dtype=torch.float64)
    assert loss_of(adapted) == pytest.approx(loss_of(model), rel=1e-6)


def test_an_export_has_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    """The folder's ids would end no text of another tokenizer."""
    base = base_folder("LlamaForCausalLM", tmp_path / "base")
    checkpoint = checkpoint_of(load(str(base), adjoint.Exact()), tmp_path / "checkpoints", base)
    export(checkpoint, tmp_path / "out", "transformers")
    for file in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / file).read_text())
        assert (written["eos_token_id"], written.get("bos_token_id")) == (0, None), file
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.generation_config.eos_token_id == 0 and again.generation_config.bos_token_id is None
    for folder in (tmp_path / "out", tmp_path / "checkpoints"):
        shutil.rmtree(folder)
    from tests.data.text_helpers import tokenizer_folder

    tokenizer_folder(base, "the cat sat on the mat", 60, ["<|end|>"])
    checkpoint = checkpoint_of(
        load(str(base), adjoint.Exact()), tmp_path / "checkpoints", base, tokenizer=str(base)
    )
    export(checkpoint, tmp_path / "out", "transformers")
    before, written = (json.loads((f / "config.json").read_text()) for f in (base, tmp_path / "out"))
    assert [before[f"{k}_token_id"] for k in ("eos", "bos")] == [
        written[f"{k}_token_id"] for k in ("eos", "bos")
    ]


def test_an_exported_stack_ends_texts(tmp_path: Path) -> None:
    assert train_tiny(tmp_path, training__steps=1, training__sample_tokens=0) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0


def test_an_export_is_trained_on_with_its_end_of_text(tmp_path: Path) -> None:
    """Also where that is no special token of its tokenizer."""
    short = {"training__steps": 1, "training__sample_tokens": 0}
    assert train_tiny(tmp_path, **short, data__separator="\n") == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert load_tokenizer(str(tmp_path / "out")).separator_ids == (10,)
    assert load_tokenizer(str(tmp_path / "out"), "").separator_ids == ()
    shutil.rmtree(tmp_path / "run")
    assert train_tiny(tmp_path, **short, model__from_pretrained=tmp_path / "out") == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "again")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 10


def test_an_export_says_where_its_tokenizer_is_looked_for(tmp_path: Path) -> None:
    base = base_folder("LlamaForCausalLM", tmp_path / "base")
    for tokenizer, remedy in (
        ("words", "call this in the folder the run began in"),
        ("/no/words", "put it back"),
    ):
        model = load(str(base), adjoint.Exact())
        checkpoint = checkpoint_of(model, tmp_path / remedy, base, tokenizer=tokenizer)
        said = export(checkpoint, tmp_path / f"out {remedy}", "transformers")
        assert f", without its tokenizer ({tokenizer}, which is not there; {remedy})" in said
