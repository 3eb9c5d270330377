"""Configuration: YAML ↔ dataclasses ↔ flags, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import torch

from adjoint.errors import UserError
from adjoint.formats import file_kinds
from adjoint.layers import MIXERS
from adjoint.methods import METHODS, Exact
from adjoint.settings import whole_number
from adjoint.stack import Stack
from adjoint.train.config import Config, known_keys, load_config
from adjoint.train.other_trainers import FOREIGN_KEYS

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER_SIZES = {f"mamba-{size}m": size * 1e6 for size in (32, 63, 127, 225)} | {"mamba-1.27b": 1.27e9}


def test_default_yaml_is_the_built_in_default_and_complete() -> None:
    assert load_config(["--config", str(CONFIGS / "default.yaml")]) == load_config([])
    assert load_config([]).data.seqlen == 16384
    assert load_config([]).method.name == "exact"


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_the_papers_sizes_have_their_stated_parameter_counts(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    config = load_config(["--config", str(file)])
    with torch.device("meta"):
        parameters = Stack(config.model).num_parameters()
    assert abs(parameters / PAPER_SIZES[name] - 1) < 0.02
    assert f"{parameters:,}" in file.read_text()


def test_usual_spellings_of_a_choice_are_taken() -> None:
    config = load_config(["--training.precision", "bf16", "--method.name", "layer_local"])
    assert (config.training.precision, config.method.name) == ("bfloat16", "layer-local")
    assert load_config(["--resume", "--training.steps", "2"]).run.resume == "auto"


def test_a_model_key_that_no_layer_reads_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="^model.headdim is for mamba2, .*; no layer reads it with model.mix"
    ):
        config = load_config(["--model.headdim", "32"])
    (tmp_path / "complete.yaml").write_text(load_config(["--model.mixer", "mamba2"]).to_yaml())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(["--config", str(tmp_path / "complete.yaml"), "--model.headdim", "32"])
        Stack(config.model)


def test_help_begins_with_the_keys_that_most_need(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            load_config([flag])
        shown[flag] = set(re.findall(r"^  --(\w+\.[\w.]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(shown["--help"]) == 10 and {"data.path", "run.resume"} <= shown["--help"]
    assert shown["--help-all"] == known_keys().keys()


def test_every_config_file_is_tested() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {"default", *PAPER_SIZES}


def test_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    argv = ["--training.eps", "1e-05", "--method.chunk_size", "4K", "--run.name", "x"]
    config = load_config([*argv, "--data.path", "[a.txt, b]"])
    assert config.training.eps == 1e-5
    assert config.data.path == ["a.txt", "b"]
    assert config.method.chunk_size == 4096
    file = tmp_path / "again.yaml"
    file.write_text(config.to_yaml())
    again = load_config(["--config", str(file)])
    assert again.to_dict() == config.to_dict()
    assert (again.training, again.data, again.model) == (config.training, config.data, config.model)
    written = {f"{section}.{key}" for section, keys in config.to_dict().items() for key in keys}
    assert {k for k in known_keys() if not k.startswith(("method.", "model.lora."))} < written


def test_a_size_of_memory_is_no_count_of_tokens() -> None:
    """18G are 18·10⁹ bytes, as in Python; of tokens they would be 18·2³⁰."""
    argv = ["--method.chunk_size", "1K", "--method.memory"]
    assert load_config([*argv, "18G"]).method == Exact(chunk_size=1024, memory="18G")
    assert load_config([*argv, "1000"]).method.memory == 1000


def test_null_is_no_text() -> None:
    """A null on the command line is the default, also of keys whose texts have a condition."""
    config = load_config(["--data.tokenizer", "null", "--data.text_field", "null", "--run.name", "null"])
    assert (config.data.tokenizer, config.data.text_field) == (None, None)
    assert config.run.name == "default"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run.name", "..", "a folder's name"),
        ("run.dir", "", "a path or null"),
        ("data.cache_dir", "", "a path or null"),
        ("data.path", "a\0b", "a path, a list of paths or null"),
        ("model.from_pretrained", "", "a text that is not empty or null"),
        ("training.threads", "100000", "a whole number from 1 to 4096 or null"),
        ("data.weights", "[0]", "a list, each a finite number above 0 or null"),
    ],
)
def test_values_that_would_fail_later_are_refused(key: str, value: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"^--{key}: expected {re.escape(expected)}"):
        load_config([f"--{key}={value}"])


def test_flags_win_over_files_wherever_they_stand_and_later_files_over_earlier(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "training: {lr: 1e-3, steps: 7}\nmodel: {n_layer: 2, mixer: [mamba, mamba2]}\ndata: {seqlen: 32K}"
    )
    (tmp_path / "b.yaml").write_text("training: {steps: 9}\n")
    argv = ["--training.lr", "0.5", "--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}"]
    config = load_config(argv)
    assert (config.training.lr, config.training.steps) == (0.5, 9)
    assert config.model.mixers == ("mamba", "mamba2")
    assert (config.run.name, config.data.seqlen) == ("b", 32768)
    assert load_config(["--resume=some/where"]).run.resume == "some/where"


def test_variables_win_over_files_and_flags_over_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("training: {lr: 1e-3, steps: 7, seed: 3}\n")
    for name, text in {"TRAINING__STEPS": "2", "MODEL__A_FLOOR": "0.5", "TRAINING__LR": "1"}.items():
        monkeypatch.setenv(f"ADJOINT_{name}", text)
    config = load_config(["--config", str(tmp_path / "a.yaml"), "--training.lr", "0.25"])
    assert dataclasses.astuple(config.training)[:2] == (2, 3) and config.training.lr == 0.25
    assert config.model.A_floor == 0.5
    said = capsys.readouterr().err
    assert said == "from the environment: ADJOINT_MODEL__A_FLOOR=0.5, ADJOINT_TRAINING__STEPS=2\n"
    for variable in ("ADJOINT_TRAINING__STEP", "ADJOINT_TRAINING_STEPS"):
        monkeypatch.setenv(variable, "2")
        with pytest.raises(UserError, match=rf"^{variable}: unknown key .* did you mean training\.steps"):
            load_config([])
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("written", "number"),
    [("16K", 16384), ("1M", 1048576), ("1.5k", 1536), ("16_384", 16384), (5, 5), ("2G", 2**31)],
)
def test_counts(written: object, number: int) -> None:
    assert whole_number(written) == number


@pytest.mark.parametrize("written", ["", "K", "1.5", "1.0001K", 2.0, True, "1e3", "0x10", "4x", None])
def test_what_is_no_count(written: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        whole_number(written)


def test_another_method_can_be_chosen_beside_a_file(tmp_path: Path) -> None:
    file = tmp_path / "exact.yaml"
    file.write_text(Config().to_yaml())
    argv = ["--config", str(file), "--method.name", "backprop"]
    assert load_config(argv).method == METHODS["backprop"]()
    file.write_text(load_config(["--method.keep", "inputs"]).to_yaml())
    with pytest.raises(UserError, match=r"--method\.keep null"):
        load_config(argv)  # it would be lost
    assert load_config([*argv, "--method.keep", "null"]).method == METHODS["backprop"]()


def test_every_key_has_a_help_text() -> None:
    assert not [name for name, key in known_keys().items() if not key.help]
    named = set(re.findall(r"\w+", known_keys()["model.mixer"].help))
    assert {*MIXERS} <= named, "StackConfig.mixer's text in adjoint/layers/config.py names every mixer"
    assert file_kinds() in known_keys()["model.from_pretrained"].help, "ModelConfig's text names every format"
    assert "    window: tokens that each" in (METHODS["truncated"].__doc__ or ""), "so has help() in Python"


def test_keys_of_other_trainers_are_answered_with_keys_that_exist() -> None:
    for answer in FOREIGN_KEYS.values():
        named = re.findall(r"\b(?:model|method|data|training|run|cluster)\.\w+(?:\.\w+)?", answer)
        assert all(key in known_keys() for key in named)
        assert answer in named or " " in answer
