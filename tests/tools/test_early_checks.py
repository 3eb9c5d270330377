"""Flags, keys, values and paths of a command line are checked before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adjoint import cli
from adjoint.errors import UserError
from adjoint.tools import early_checks
from scripts import command_flags
from tests.page_helpers import ROOT

WRONG = [
    "train --data.pth x",
    "train --traning.steps 3",
    "train --num_train_epochs 3",
    "train --data.path nowhere.jsonl",
    "train --data.validation_path nowhere/*.txt",
    "train --config nowhere.yaml",
    "train --config wrong.yaml",
    "plan --config sections.yaml",
    "train --model.from_pretrained ./nowhere",
    "train --model.from_pretrained a--b/model",
    "train --training.steps abc",
    "train --data.seqlen 0",
    "train --method.name exakt",
    "train --method.name truncated",
    "train --method.checkpoints 0",
    "train --training.min_lr=1",
    "train --data.weights [1,2]",
    "train --cluster.replicas 2",
    "train --config values.yaml",
    "train --training.steps",
    "plan --devices 2 --data.seqlen 0",
    "plan --config values.yaml",
    "sweep --out x --widnows 4",
    "sweep --out x --data.pth x",
    "sweep --out x --model nowhere",
    "plan --seqln 4K",
    "plan --config nowhere.yaml",
    "plan --model.from_pretrained /nowhere/model",
    "eval run --lenghts 4K",
    "eval nowhere",
    "export nowhere --to x",
    "export run --format mamba-ssm --dtpye float32 --to x",
    "compare ./model --length 4K",
    "compare /no/such/model",
]


@pytest.mark.parametrize("line", WRONG)
def test_an_early_error_is_the_command_s_own(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("model:\n  lora:\n    rnak: 4\n")
    Path("sections.yaml").write_text("training: 3\n")
    Path("values.yaml").write_text("training: {steps: abc}\n")
    command, *argv = line.split()
    with pytest.raises(UserError) as early:
        early_checks.check(command, argv)
    monkeypatch.setattr(early_checks, "check", lambda command, argv: None)
    assert cli.main([command, *argv]) == 2
    assert capsys.readouterr().err == f"error: {early.value}\n"


def test_an_early_error_does_not_wait_for_imports() -> None:
    code = f"""
import sys
from adjoint.cli import main
for line in {[line for line in WRONG if ".yaml" not in line or "nowhere" in line]}:
    assert main(line.split()) == 2
print(*({{"torch", "transformers", "numpy"}} & {{*sys.modules}}))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


def test_settings_of_fine_tuning_are_checked_before_a_model_is_downloaded() -> None:
    fine_tuned = ["--model.from_pretrained", "some/model", "--training.min_lr"]
    for rate, highest in (("3e-5", "2e-05"), ("3e-4", "0.0002")):
        adapters = ["--model.lora.rank", "8"] * (highest == "0.0002")
        with pytest.raises(UserError, match=f"is above training.lr {highest}"):
            early_checks.check("train", [*fine_tuned, rate, *adapters])
    early_checks.check("train", [*fine_tuned, "3e-5", "--model.lora.rank", "8"])


def test_right_lines_pass(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    for line in (
        f"train --data.path {tmp_path}/*.txt --resume --data.seqlen=4K --training.lr 1e-3",
        "train --data.path hf:some/data --config configs/default.yaml --model.from_pretrained some/model",
        "plan --devices 8 --data.seqlen 4K --timeline x.png --json",
        "compare some/model --method.chunk_size 4K --search",
        f"eval {tmp_path} some/model --needles --path {tmp_path}",
    ):
        command, *argv = line.split()
        early_checks.check(command, argv)


def test_the_file_of_flags_is_current() -> None:
    assert command_flags.FILE.read_text(encoding="utf-8") == command_flags.text(), (
        "python -m scripts.command_flags --write"
    )
