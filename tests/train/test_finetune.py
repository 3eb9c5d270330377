"""Fine-tuning a model of transformers: its tokenizer, the defaults, what export writes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from adjoint.batch import labelled
from adjoint.checkpoint import StoredTensors, list_checkpoints
from adjoint.cli import main
from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.errors import UserError
from adjoint.tools.eval.command import Loaded, _held_out
from adjoint.train import peft_adapters
from adjoint.train.config import load_config
from adjoint.train.dependencies import weights_digest
from adjoint.train.unloaded import copy_unloaded
from tests.cluster.threads import train_in_threads
from tests.data.text_helpers import tokenizer_folder
from tests.training_helpers import SENTENCE, metrics, same_training, tiny, train_tiny, write_text

transformers = pytest.importorskip("transformers")

VOCAB = 320


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mamba-2 of transformers with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=16,
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(folder)
    tokenizer_folder(folder, SENTENCE, VOCAB - 20, ["<|end|>", "<|user|>", "<|assistant|>"])
    return folder


def without_tokenizer(base: Path, folder: Path, vocab_size: int) -> Path:
    """A model alone, with a table of another size."""
    model = transformers.Mamba2ForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(folder)
    return folder


def options(base: Path, **more: Any) -> dict[str, Any]:
    sizes = {"model__d_model": 16, "model__n_layer": 2, "model__from_pretrained": base}
    return {**sizes, "training__steps": 2, "training__sample_tokens": 4, **more}


def test_the_folders_tokenizer_and_the_defaults_of_fine_tuning(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_tiny(tmp_path, **options(base)) == 0
    said = capsys.readouterr().out
    assert f"tokenizer: {base}, 300 tokens" in said
    assert "learning rate 2e-05 (cosine to 2e-06, warm-up 2 steps), weight decay 0" in said
    assert "method: exact gradients, chunks of 64 tokens (picked), states kept at chunk edges\n" in said
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["data"]["tokenizer"] == str(base) and written["training"]["lr"] == 2e-5
    words = len(
        transformers.AutoTokenizer.from_pretrained(base)((tmp_path / "text.txt").read_text())["input_ids"]
    )
    cached = json.loads(next((tmp_path / "cache").glob("*.json")).read_text())
    tokens = np.fromfile(next((tmp_path / "cache").glob("*.bin")), cached["dtype"])
    assert len(tokens) == words + 1  # and the end of the one document
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert "its tokenizer" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.decode(again.encode(SENTENCE)) == SENTENCE and again.eos_token == "<|end|>"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == VOCAB


def test_export_keeps_the_dtype_of_the_folder(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "half"
    shutil.copytree(base, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    assert train_tiny(tmp_path, **options(folder, training__steps=1)) == 0
    for asked, dtype in ((), torch.bfloat16), (("--dtype", "float16"), torch.float16):
        out = tmp_path / str(dtype)
        capsys.readouterr()
        assert main(["export", str(tmp_path / "run"), "--to", str(out), *asked]) == 0
        assert f"parameters, {str(dtype).removeprefix('torch.')}, its tokenizer" in capsys.readouterr().out
        assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == dtype
        assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_name_of_the_hub_is_downloaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "some/model":
            return str(base)
        raise FileNotFoundError("Got: ConnectError:\nName or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert train_tiny(tmp_path, **options(base, model__from_pretrained="some/model")) == 0
    assert [name for name, _ in asked] == ["some/model"] and "*.safetensors" in asked[0][1]
    capsys.readouterr()
    assert main(["plan", "--model.from_pretrained", "some/model", "--device", "h100", "--seqlen", "1K"]) == 0
    assert "*.safetensors" not in asked[1][1]
    capsys.readouterr()
    assert main(["train", "--model.from_pretrained", "other/model"]) == 2
    assert capsys.readouterr().err == (
        "error: model.from_pretrained: there is no folder other/model, and the Hugging Face hub says: "
        "Got: ConnectError: Name or service not known\n"
    )


def test_what_is_given_wins_over_the_defaults_of_fine_tuning(base: Path, tmp_path: Path) -> None:
    given = {"training__lr": 0.5, "training__weight_decay": 0.1, "data__tokenizer": "byte"}
    config = load_config(tiny(tmp_path, **options(base, **given))[1:])
    assert (config.training.lr, config.training.weight_decay, config.data.tokenizer) == (0.5, 0.1, "byte")


def test_a_folder_without_a_tokenizer(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, where they may be; else it is refused, unless bytes are asked for."""
    small = without_tokenizer(base, tmp_path / "small", 260)
    assert train_tiny(tmp_path, **options(small, training__steps=1)) == 0
    assert f"note: {small} has no tokenizer: the text is read as bytes" in capsys.readouterr().out
    large = without_tokenizer(base, tmp_path / "large", 600)
    flags = options(large, training__steps=1, run__dir=tmp_path / "bytes")
    assert train_tiny(tmp_path, **flags) == 2
    assert "has no tokenizer, and a vocabulary of 600 is not" in capsys.readouterr().err
    assert train_tiny(tmp_path, **flags, data__tokenizer="byte") == 0
    assert len(metrics(tmp_path / "bytes")) == 1


LORA = {"model__lora__rank": 4, "model__lora__dropout": 0.1, "training__lr": 1e-2}


def test_adapters_train_resume_bitwise_and_are_merged(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    flags = options(base, **LORA, training__steps=6, data__seqlen=32)
    assert train_tiny(tmp_path, **flags) == 0
    written = load_config(["--config", str(tmp_path / "run" / "config.yaml")])
    assert written.model == load_config(tiny(tmp_path, **flags)[1:]).model
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "again", run__resume=first) == 0
    for file in last.glob("*.safetensors"):
        assert (tmp_path / "again" / "checkpoints" / last.name / file.name).read_bytes() == file.read_bytes()
    stored = StoredTensors(last, "model")
    assert {name.rpartition(".lora_")[2] for name in stored.files_by_name} == {
        "A.default.weight",
        "B.default.weight",
    }
    assert all(stored[name].norm() > 0 for name in stored.files_by_name)
    rows = metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    before, merged = (transformers.AutoModelForCausalLM.from_pretrained(f) for f in (base, tmp_path / "out"))
    for name, weight in merged.named_parameters():
        own = name.removesuffix(".weight")
        change = torch.zeros_like(weight)
        if f"base_model.model.{own}.lora_A.default.weight" in stored.files_by_name:
            a, b = (stored[f"base_model.model.{own}.lora_{k}.default.weight"] for k in "AB")
            change = b @ a * 2
        torch.testing.assert_close(weight, before.get_parameter(name) + change)


def test_weights_in_host_memory_train_alike_resume_bitwise_and_are_exported(
    base: Path, tmp_path: Path
) -> None:
    flags = options(base, training__precision="float64", training__steps=6, data__seqlen=32)
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "plain") == 0
    assert train_tiny(tmp_path, **flags, model__offload="weights") == 0
    same_training(tmp_path / "run", tmp_path / "plain")
    first, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    again = {"model__offload": "weights", "run__dir": tmp_path / "again", "run__resume": first}
    assert train_tiny(tmp_path, **flags, **again) == 0
    for file in last.glob("*.safetensors"):
        assert (tmp_path / "again" / "checkpoints" / last.name / file.name).read_bytes() == file.read_bytes()
    # where weights are may change on the way
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "plainly", run__resume=first) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in out.named_parameters():
        torch.testing.assert_close(weight.double(), StoredTensors(last, "model")[name].double())


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"method__name": "backprop"}, "backprop keeps all layers' weights on the GPU for its backward"),
        ({"cluster__shards": 2}, "layer shards keep their weights on their devices; set cluster.shards to 0"),
        (
            {"model__quantization": "4bit", "model__lora__rank": 2},
            "quantized weights stay on the GPU; leave model.quantization out",
        ),
    ],
)
def test_weights_in_host_memory_that_are_refused(
    base: Path, refused_run: Any, flags: dict[str, Any], said: str
) -> None:
    error = refused_run(said, **options(base, model__offload="weights", **flags))
    assert error.startswith("error: model.offload: ")


def test_adapters_without_a_gradient_are_told_of(tmp_path: Path) -> None:
    """Transformers reads the weight of Mamba's dt_proj past them."""
    pytest.importorskip("peft")
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    flags = options(tmp_path / "mamba", **LORA, training__steps=1, training__sample_tokens=0)
    with pytest.warns(UserWarning, match=r"2 adapters have no gradient, such as .*layers\.0\.mixer\.dt_proj"):
        assert train_tiny(tmp_path, **flags, model__lora__target_modules="[in_proj, dt_proj]") == 0


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command ends with, as its only error."""
    capsys.readouterr()
    assert main(argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lora", [True, False])
def test_a_run_does_not_go_on_with_another_base(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: bool
) -> None:
    """A checkpoint of adapters is of the weights that these were trained on; any other needs config.json."""
    pytest.importorskip("peft")
    own = shutil.copytree(base, tmp_path / "own")
    flags = options(own, **LORA if lora else {})
    assert train_tiny(tmp_path, **flags) == 0
    moved = shutil.copytree(own, tmp_path / "moved")
    resumed = tiny(tmp_path, **flags | {"training__steps": 3}, run__resume="auto")
    assert main([*resumed, "--model.from_pretrained", str(moved)]) == 0, "the same model elsewhere"
    weights = safetensors.torch.load_file(own / "model.safetensors")
    weights["backbone.layers.0.mixer.D"] += 1
    safetensors.torch.save_file(weights, own / "model.safetensors", {"format": "pt"})
    checkpoint = str(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    commands = (
        [*resumed, "--run.resume", checkpoint, "--run.dir", str(tmp_path / "other")],
        ["eval", checkpoint, "--lengths", "64", "--out", str(tmp_path / "eval")],
        ["export", checkpoint, "--to", str(tmp_path / "exported")],
    )
    for command in commands:
        if lora:
            said = f"the weights in {own} changed since the run began"
            assert said in refusal(command, capsys)
        else:
            assert main(command) == 0
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)
    for command in commands[1:]:
        assert f"the config.json in {own} changed since the run began" in refusal(command, capsys)
    shutil.copyfile(moved / "config.json", own / "config.json")
    (own / "generation_config.json").write_text('{"top_k": 3}')
    for command in commands[1:]:
        assert f"the generation_config.json in {own} changed since" in refusal(command, capsys)
    shutil.copyfile(moved / "generation_config.json", own / "generation_config.json")
    shutil.copyfile(moved / "model.safetensors", own / "model.safetensors")
    (own / "tokenizer_config.json").write_text("{}")
    assert "changed since the run began, and the model knows the tokens" in refusal(commands[2], capsys)
    shutil.rmtree(own)
    for command in commands[1:]:
        assert f"the model {own}, which is not there; put it back" in refusal(command, capsys)


def test_a_digest_of_weights_is_that_of_the_tensors(base: Path, tmp_path: Path) -> None:
    """However they are distributed over files."""
    model = transformers.Mamba2ForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_digest(tmp_path / "shards") == weights_digest(base)


FOLDERS: dict[str, tuple[Any, str]] = {
    "cut": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:5000]
        ),
        "model.safetensors is damaged",
    ),
    "emptied": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "model.safetensors is damaged",
    ),
    "another shape": (
        lambda folder: reshape(folder, "backbone.embeddings.weight"),
        "its tensor backbone.embeddings.weight has shape (3, 16), and Mamba2ForCausalLM with its config.json",
    ),
    "a config of another kind": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "mamba2", "vocab_size": "many"}'),
        "its files cannot be read",
    ),
}


def reshape(folder: Path, name: str) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights[name] = torch.zeros(3, 16)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


READ_BY_WORKERS = ("cut", "emptied", "another shape")  # Ray starts before a shard reads weights


@pytest.mark.parametrize(
    ("damage", "shards"),
    [
        pytest.param(name, n, marks=pytest.mark.slow if n and name in READ_BY_WORKERS else ())
        for name in FOLDERS
        for n in (0, 1)
    ],
)
def test_a_damaged_folder_is_told_in_a_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, shards: int
) -> None:
    folder = shutil.copytree(base, tmp_path / "damaged")
    change, said = FOLDERS[damage]
    change(folder)
    text = str(write_text(tmp_path / "text.txt"))
    for argv in (
        tiny(tmp_path, **options(folder), cluster__shards=shards),
        ["eval", str(folder), "--lengths", "64", "--path", text],
    ):
        assert said in refusal(argv, capsys)


CODE = """
from transformers import Mamba2Config, Mamba2ForCausalLM
class OwnConfig(Mamba2Config):
    model_type = "own"
class OwnForCausalLM(Mamba2ForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_where_it_is_trusted(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(base, tmp_path / "remote")
    (folder / "own_model.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    flags = options(folder, data__tokenizer=base)
    assert "set --model.trust_remote_code true" in refusal(tiny(tmp_path, **flags), capsys)
    text = ["--lengths", "64", "--path", str(tmp_path / "text.txt"), "--out", str(tmp_path / "eval")]
    assert "set --trust-remote-code" in refusal(["eval", str(folder), *text], capsys)
    assert main(tiny(tmp_path, **flags, model__trust_remote_code=True)) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "exported")]) == 0
    assert "OwnForCausalLM" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), *text]) == 0


def test_eval_takes_names_of_the_hub(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        if name == "some/model":
            return str(base)
        raise FileNotFoundError(f"no network for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    text = ["--lengths", "64", "--path", str(write_text(tmp_path / "text.txt"))]
    assert main(["eval", "some/model", *text]) == 0
    assert "no network for other/model" in refusal(["eval", "other/model", *text], capsys)
    assert "runs/other: no such run or checkpoint" in refusal(["eval", "runs/other", *text], capsys)


def test_eval_takes_the_separator_of_a_tokenizer_that_has_none(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(base, tmp_path / "without_end")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|endoftext|>", "<|stop|>"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "eos_token"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    monkeypatch.chdir(tmp_path)
    argv = ["eval", str(folder), "--lengths", "64", "--path", str(write_text(tmp_path / "text.txt"))]
    assert "has no known end-of-text token" in refusal(argv, capsys)
    assert main([*argv, "--data.separator", ""]) == 0
    assert "'nothing' is not a token of" in refusal([*argv, "--data.separator", "nothing"], capsys)


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"cluster__shards": 1}, "model.lora: shards do not train adapters"),
        ({"model__lora__target_modules": "nothing"}, "model.lora.target_modules: "),
        ({"model__lora__target_modules": "in_proj"}, "modules are a list: [in_proj]"),
        ({"model__lora__rank": 0}, "--model.lora.rank: expected a whole number (1 or more)"),
        ({"model__from_pretrained": "null"}, "model.lora: adapters need a pretrained model"),
        ({"model__lora__r": 3}, "did you mean model.lora.rank?"),
    ],
)
def test_adapters_that_are_refused(base: Path, refused_run: Any, flags: dict[str, Any], said: str) -> None:
    pytest.importorskip("peft")
    refused_run(said, **options(base, **{**LORA, **flags}))


STORED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    "flags, stored, said",
    [
        (
            {"model__quantization": "3bit"},
            None,
            "--model.quantization: expected 4bit or 8bit or null, got '3bit'",
        ),
        ({"model__from_pretrained": "null"}, None, "model.quantization: is for a pretrained model"),
        (
            {},
            None,
            "model.quantization: 4bit: quantized weights are not trained; add adapters, --model.lora.rank",
        ),
        (
            LORA,
            None,
            "model.quantization: 4bit needs bitsandbytes, which is not installed; pip install bitsandbytes",
        ),
        (LORA, STORED, "are quantized already (bitsandbytes, 4 bits); leave it out"),
        (
            {"model__quantization": "null"},
            STORED,
            "(bitsandbytes, 4 bits): quantized weights are not trained",
        ),
        ({"model__quantization": "null", **LORA}, STORED, "(bitsandbytes, 4 bits) needs bitsandbytes"),
        (
            {"training__precision": "float64", **LORA},
            None,
            "4bit: quantized weights do not multiply in float64",
        ),
        ({"load_in_4bit": "true"}, None, "did you mean model.quantization?"),
    ],
)
def test_quantized_bases_that_are_refused(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused_run: Any,
    flags: dict[str, Any],
    stored: dict[str, Any] | None,
    said: str,
) -> None:
    """Each case gives one line, before anything is loaded; bitsandbytes seems not to be installed."""
    monkeypatch.setattr("adjoint.train.quantization.importlib.util.find_spec", lambda name: None)
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    if stored is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    sizes = {} if flags.get("model__from_pretrained") else options(folder)
    refused_run(said, **{**sizes, "model__quantization": "4bit", **flags})


def test_quantized_weights_whose_library_is_missing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the folder and has what transformers says of the library."""
    pytest.importorskip("peft")
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "hqq", "quant_config": {}, "skip_modules": []}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert train_tiny(tmp_path, **options(folder, **LORA)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{folder}: its weights (hqq) cannot be loaded: " in error and "HQQ" in error
    assert main(["plan", "--model.from_pretrained", str(folder), "--data.seqlen", "64"]) == 2
    assert "is quantized (hqq), and a plan counts all weights" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- conversations

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    ("user", "the state"),
    ("assistant", "of a chunk"),
    ("user", "is all"),
    ("assistant", "that next needs"),
]


@pytest.fixture
def chatty(base: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder whose tokenizer has a chat template, and `chat.jsonl` beside it."""
    folder = tmp_path / "chatty"
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(PLAIN)
    said = [{"role": role, "content": content} for role, content in TURNS]
    chats = [{"messages": said}, {"messages": said[:2]}, {"messages": [*said, *said[:1]]}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats * 20))
    return folder


def chat_options(chatty: Path, **more: Any) -> dict[str, Any]:
    return options(chatty, data__path=chatty.parent / "chat.jsonl", data__seqlen=48, **more)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_alone_are_predicted(chatty: Path, tmp_path: Path, template: str) -> None:
    (chatty / "chat_template.jinja").write_text(template)
    config = DataConfig(
        path=str(tmp_path / "chat.jsonl"), tokenizer=str(chatty), seqlen=48, cache_dir=str(tmp_path)
    )
    data = open_data(config)
    ids, labels = labelled(next(data.train))
    assert (ids >= 0).all() and (labels[labels >= 0] == ids[labels >= 0]).all()
    whole = data.train.tokens
    runs = data.tokenizer.decode(np.where(whole < 0, 1, whole)).replace("<|user|>", " ").split("<|end|>")
    assert {run.strip() for run in runs} == {"", "of a chunk", "that next needs"}
    text = data.tokenizer.decode(np.where(whole < 0, ~whole, whole))
    assert text.startswith("<|user|>the state<|end|><|assistant|>of a chunk<|end|><|user|>is all<|end|>")
    short = open_data(dataclasses.replace(config, max_tokens=200, eval_fraction=0.0)).train
    assert np.array_equal(short.tokens, whole[:200])
    loaded = Loaded(SimpleNamespace(vocab_size=None), config, tmp_path)  # type: ignore[arg-type]
    assert _held_out(loaded, None, 2).min() >= 0  # `adjoint eval` reads all tokens
    with pytest.raises(UserError, match=r"data.separator: '<\|end\|>' is inside documents too"):
        open_data(dataclasses.replace(config, documents="packed"))


def test_a_batch_of_answers_weighs_as_they_do(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches of one row are one of two rows, which differ in how many tokens are predicted."""
    for name, batch, parts in (("whole", 2, 1), ("parts", 1, 2)):
        flags = {"data__batch": batch, "training__grad_accumulation": parts, "run__dir": tmp_path / name}
        assert train_tiny(tmp_path, **chat_options(chatty, training__precision="float64", **flags)) == 0
    assert "% of them predicted" in capsys.readouterr().out
    same_training(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("method", ["exact", "backprop"])
def test_windows_without_an_answer(
    chatty: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers' own loss is nan where nothing is predicted; a step of such windows has no loss."""
    said = [{"role": "user", "content": SENTENCE * 3}, {"role": "assistant", "content": "is"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 40)
    flags = chat_options(chatty, method__name=method, training__steps=8) | {"data__seqlen": 8}
    with pytest.warns(UserWarning, match="which teach nothing; raise data.seqlen") as warned:
        assert train_tiny(tmp_path, **flags, data__eval_fraction=0.2) == 0
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert None in losses and capsys.readouterr().out.count("no token predicted") == losses.count(None)
    assert all(loss > 0 and math.isfinite(loss) for loss in losses if loss is not None)
    assert metrics(tmp_path / "run")[-1]["eval_loss"] > 0 and (tmp_path / "run" / "loss.png").exists()
    share = f"and {losses.count(None) / len(losses):.0%} of the next 8 steps"
    assert any(share in str(warning.message) for warning in warned)


def test_held_out_text_without_an_answer_has_no_loss_and_no_best_step(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"messages": [{"role": "user", "content": SENTENCE}]}
    answered = {"messages": [*question["messages"], {"role": "assistant", "content": "is"}]}
    lines = [json.dumps(record) + "\n" for record in [*[question] * 9, answered]]
    (tmp_path / "held.jsonl").write_text("".join(lines))
    flags = chat_options(chatty, data__validation_path=tmp_path / "held.jsonl", data__eval_tokens=96)
    with pytest.warns(UserWarning, match="in 100% of the held-out windows: there is nothing to evaluate"):
        assert train_tiny(tmp_path, **flags) == 0
    shown = capsys.readouterr().out
    assert "held-out 0" not in shown and "lowest held-out loss" not in shown
    assert not any("eval_loss" in row for row in metrics(tmp_path / "run"))


def test_conversations_over_shards_are_as_in_one_process(
    chatty: Path, tmp_path: Path, one_thread: None
) -> None:
    """Of a `Stack`: how a run is spread does not matter to what is predicted."""
    flags: dict[str, Any] = {
        "data__path": tmp_path / "chat.jsonl",
        "data__tokenizer": chatty,
        "model__vocab_size": VOCAB,
        "training__precision": "float64",
        "training__steps": 3,
        "training__grad_accumulation": 2,
    }
    assert train_tiny(tmp_path, **flags) == 0
    train_in_threads(tiny(tmp_path, **flags, cluster__shards=2, run__dir=tmp_path / "shards"))
    same_training(tmp_path / "shards", tmp_path / "run")


def test_the_table_of_layers_with_an_adapter_is_true() -> None:
    from tests.hf.hf_models import make

    text = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rows = [row for row in rows if row[0].endswith("ForCausalLM`")]
    assert len(rows) > 10
    for name, picked, left_out in rows:
        model = make(name.strip("`"), torch.float32)
        linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        with_adapter = {n.rpartition(".")[2] for n in peft_adapters._linear_maps(model)}
        assert set(re.findall(r"`(.+?)`", picked)) == with_adapter, name
        assert set(re.findall(r"`(.+?)`", left_out)) == linear - with_adapter - {"lm_head"}, name


@pytest.fixture(scope="module")
def with_tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with a vision tower, and a tensor of `mtp.*` that no class of transformers loads."""
    from tests.hf.multimodal_models import make_multimodal

    folder = tmp_path_factory.mktemp("with_tower")
    make_multimodal("Qwen3_5ForConditionalGeneration", vocab_size=VOCAB).float().save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = safetensors.torch.load_file(file) | {"mtp.fc.weight": torch.randn(3, 5).bfloat16()}
    safetensors.torch.save_file(stored, file, {"format": "pt"})
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: t for file in files for name, t in safetensors.torch.load_file(file).items()}


def test_export_copies_what_the_class_does_not_load(
    with_tower: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained as a causal LM: all tensors are exported, trained ones changed; the old class loads them."""
    flags = options(with_tower, model__d_model=24, model__n_layer=3, data__tokenizer="byte")
    assert train_tiny(tmp_path, **flags) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    said = f"34 tensors of {with_tower} that it does not load, as they are (model.visual, mtp.fc)"
    assert said in capsys.readouterr().out
    stored, exported = tensors_of(with_tower), tensors_of(tmp_path / "out")
    assert exported.keys() == stored.keys() and exported["mtp.fc.weight"].dtype == torch.bfloat16
    for name, tensor in stored.items():
        is_copied = name.startswith(("model.visual.", "mtp."))
        assert torch.equal(exported[name], tensor) == is_copied or name.endswith(("bias", "norm.weight"))
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    again, report = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"] and again.config.vision_config.depth == 2
    assert torch.equal(again.lm_head.weight, exported["lm_head.weight"])


def test_what_is_copied_beside_shards_and_tied_tensors(with_tower: Path, tmp_path: Path) -> None:
    """A folder of several files keeps them. A tied head is loaded, and not copied: it would be an old one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(with_tower)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(copy_unloaded(with_tower, tmp_path / "shards", model)) == 34
    assert tensors_of(tmp_path / "shards").keys() == tensors_of(with_tower).keys()
    again = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "shards")
    assert all(
        torch.equal(again.state_dict()[n], t) for n, t in tensors_of(with_tower).items() if "mtp" not in n
    )
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in copy_unloaded(with_tower, tmp_path / "tied", model)
    assert "lm_head.weight" not in tensors_of(tmp_path / "tied")
    config = json.loads((tmp_path / "tied" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]  # one tensor is not there, so it stays


@pytest.mark.parametrize("command", ["train", pytest.param("eval", marks=pytest.mark.slow), "compare"])
def test_experts_compute_in_float64(tmp_path: Path, command: str) -> None:
    """Their usual products, `torch.nn.functional.grouped_mm`, do not take it."""
    make = pytest.importorskip("tests.hf.hf_models").make
    make("MixtralForCausalLM", torch.float32, vocab_size=256).save_pretrained(tmp_path / "moe")
    sizes = {"model__d_model": 24, "model__n_layer": 3, "training__threads": 1}
    flags = options(tmp_path / "moe", **sizes, training__sample_tokens=0)
    losses = []
    if command == "compare":
        from adjoint.tools.compare.measure import _loss, _model

        ids = torch.arange(3, 40)[None]
        point = {"model": str(tmp_path / "moe"), "trust_remote_code": False, "random": False}
        point |= {"device": "cpu", "quantization": None, "quantized": None, "lora_rank": None}
        for dtype in ("float32", "float64"):
            model = _model(point | {"dtype": dtype})
            losses.append([_loss(model).loss(ids).item()])
    elif command == "train":
        for precision in ("float32", "float64"):
            run = tmp_path / precision
            assert train_tiny(tmp_path, **flags, training__precision=precision, run__dir=run) == 0
            losses.append([row["loss"] for row in metrics(run)])
    else:
        assert train_tiny(tmp_path, **flags) == 0
        for precision in ("float32", "float64"):
            evaluate = ["eval", str(tmp_path / "run"), "--lengths", "32", "--tokens", "64"]
            assert main([*evaluate, "--precision", precision]) == 0
            rows = json.loads((tmp_path / "run/eval/eval.json").read_text())["rows"]
            losses.append([row["loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
