"""Remedies that errors name are applied here, and the next command takes them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.errors import UserError
from adjoint.train.checkpoint import check_config
from adjoint.train.config import load_config

LORA = "--model.from_pretrained base --model.lora.rank 4"


def remedy_in(error: UserError) -> list[str]:
    """The flags that an error says to set."""
    said = re.search(r"set (--[\w.]+ (?:'[^']*'|\S+))", str(error))
    assert said is not None, error
    return shlex.split(said[1])


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    sizes = {"model_type": "mamba", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}
    (tmp_path / "base/config.json").write_text(json.dumps(sizes))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        "--training.optimizer_in_backward true",
        "--training.optimizer_in_backward true --training.grad_clip 0 --training.grad_accumulation 2",
        "--method.name backprop --method.chunk_size 64",
    ],
)
def test_of_settings(flags: str) -> None:
    words = shlex.split(flags)
    with pytest.raises(UserError) as caught:
        load_config(words)
    load_config(words + remedy_in(caught.value))


@pytest.mark.parametrize(
    "saved, current",
    [
        (LORA, "--model.from_pretrained base --model.lora.rank 8"),
        (LORA, "--model.from_pretrained base"),
        (f"{LORA} --model.lora.target_modules '[q_proj, v_proj]'", LORA),
        (f"{LORA} --model.lora.target_modules all-linear", LORA),
        (LORA, f"{LORA} --model.lora.alpha 3 --model.lora.dropout 0.5"),
        ("--model.mixer '[mamba, attention]' --model.n_layer 2", "--model.n_layer 2"),
        ("--model.tie_embeddings true", "--model.tie_embeddings false"),
        ("--model.n_layer 2", "--model.n_layer 3"),
        ("--training.optimizer muon", "--training.optimizer adamw"),
    ],
)
def test_of_a_resumed_run(saved: str, current: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = shlex.split(current)
    config = load_config(shlex.split(saved)).to_dict()
    (tmp_path / "trainer.json").write_text(json.dumps({"config": config}))
    for _ in range(4):  # an error names one key
        try:
            check_config(tmp_path, load_config(words).to_dict())
            break
        except UserError as error:
            words += remedy_in(error)
    else:
        raise AssertionError(words)
    assert words != shlex.split(current)


def test_of_adapters_that_a_run_has_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = load_config(["--model.from_pretrained", "base"]).to_dict()
    (tmp_path / "trainer.json").write_text(json.dumps({"config": config}))
    with pytest.raises(UserError, match=r"has no model.lora, this run has .*; leave model.lora out or start"):
        check_config(tmp_path, load_config(shlex.split(LORA)).to_dict())


def test_of_a_text_beyond_a_pretrained_models_table(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words " * 200)
    config = DataConfig(path="text.txt", seqlen=8, batch=1, cache_dir="cache")
    with pytest.raises(UserError, match="set it to 256, the tokenizer's size"):
        open_data(config, vocab_size=100)
    with pytest.raises(UserError, match="the 100 embeddings of base: name another"):
        open_data(config, vocab_size=100, table_of="base")
