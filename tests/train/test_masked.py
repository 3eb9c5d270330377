"""Runs of models that read in both directions, with a masked objective."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from adjoint import Backprop, Exact, Stack
from adjoint.cli import main
from adjoint.data.masking import EVALUATION, TRAINING, Masking
from adjoint.tools.eval import command, positions
from adjoint.train import trainer
from tests.training_helpers import metrics, train_tiny, weights

FLAGS: dict[str, Any] = {
    "model__bidirectional": "tied",
    "model__vocab_size": 257,
    "data__tokenizer": "byte",
    "training__eval_every": 4,
}


def test_masks_depend_on_seed_and_number_alone() -> None:
    masking, ids = Masking(0.25, 3, 9), torch.arange(4000).view(4, 1000) % 8
    ids[:, :100] = -1 - ids[:, :100]  # not to be predicted
    chosen = masking.choose(ids, TRAINING, 5)
    assert torch.equal(chosen, masking.choose(ids, TRAINING, 5))
    for other in (masking.choose(ids, TRAINING, 6), masking.choose(ids, EVALUATION, 5)):
        assert not torch.equal(chosen, other)
    assert not torch.equal(chosen, Masking(0.25, 4, 9).choose(ids, TRAINING, 5))
    tokens, labels = masking.inputs(chosen)
    is_masked, text = labels != -100, torch.where(ids < 0, -1 - ids, ids)
    assert 0.2 < is_masked[:, 100:].double().mean() < 0.3 and not is_masked[:, :100].any()
    assert (tokens[is_masked] == 9).all() and torch.equal(labels[is_masked], text[is_masked])
    assert torch.equal(tokens[~is_masked], text[~is_masked])


def test_eval_reads_the_loss_of_masked_tokens_and_export_writes_caduceus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of both strands has the loss of logits of whole windows, and its weights come back."""
    monkeypatch.setattr(positions, "CHUNK", 50)
    strands = {"model__complement_map": "[1, 0]", "training__steps": 2, "training__precision": "float64"}
    assert train_tiny(tmp_path, **FLAGS | strands) == 0
    run, text = str(tmp_path / "run"), str(tmp_path / "text.txt")
    flags = ["--lengths", "40,200", "--tokens", "400", "--path", text, "--precision", "float64"]
    assert main(["eval", run, *flags]) == 0
    rows = json.loads((tmp_path / "run/eval/eval.json").read_text())["rows"]
    assert (tmp_path / "run/eval/eval.png").stat().st_size > 1000
    loaded = command.load(run, torch.device("cpu"), "float64")
    ids, model = command._held_out(loaded, text, 200), loaded.model.module
    assert loaded.masking is not None and loaded.masking.mask_id == 256
    read, losses = [row for row in rows if row["length"] == 200], []
    for window, start in enumerate((0, len(ids) - 200)):
        chosen = loaded.masking.choose(ids[None, start : start + 200], EVALUATION, window)
        tokens, labels = loaded.masking.inputs(chosen)
        with torch.no_grad():
            losses.append(F.cross_entropy(model(tokens).logits[0], labels[0], reduction="none"))
    for row in read:
        total = sum(loss[row["start"] : row["stop"]].sum() for loss in losses)
        assert row["loss"] * row["predictions"] == pytest.approx(float(total), rel=1e-10)
    assert sum(row["predictions"] for row in read) == sum(int((loss != 0).sum()) for loss in losses)
    capsys.readouterr()
    assert main(["eval", run, "--needles", "--path", text]) == 2
    assert "reads in both directions" in capsys.readouterr().err
    assert main(["export", run, "--to", str(tmp_path / "out")]) == 2
    assert "in both directions (bidirectional); give --format caduceus" in capsys.readouterr().err
    assert main(["export", run, "--to", str(tmp_path / "out"), "--format", "caduceus"]) == 0
    said = capsys.readouterr().out
    assert f"CaduceusForMaskedLM of caduceus, {model.num_parameters():,} parameters, float64" in said
    assert Stack.from_pretrained(tmp_path / "out")(ids[None, :50]).logits.equal(model(ids[None, :50]).logits)


def test_a_run_stops_resumes_to_the_same_bits_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are those of backpropagation, and fall."""
    folders = {name: tmp_path / name for name in ("whole", "stopped", "backprop")}
    for folder in folders.values():
        folder.mkdir()
    assert train_tiny(folders["whole"], **FLAGS, method__chunk_size=40) == 0
    assert "15% of the tokens are masked (id 256)" in capsys.readouterr().out
    assert not (folders["whole"] / "run/sample.txt").exists()
    with monkeypatch.context() as patch:
        original, steps = trainer.take_step, itertools.count(1)

        def take_step(*arguments: Any) -> None:
            original(*arguments)
            if next(steps) == 5:
                signal.raise_signal(signal.SIGINT)

        patch.setattr(trainer, "take_step", take_step)
        assert train_tiny(folders["stopped"], **FLAGS, method__chunk_size=40) == 130
    assert train_tiny(folders["stopped"], **FLAGS, method__chunk_size=40, run__resume="auto") == 0
    assert weights(folders["stopped"] / "run", 8) == weights(folders["whole"] / "run", 8)
    held_out = [
        [row.get("eval_loss") for row in metrics(folders[name] / "run")] for name in ("whole", "stopped")
    ]
    assert held_out[0] == held_out[1] and held_out[0][-1] is not None
    assert train_tiny(folders["backprop"], **FLAGS, method__name="backprop") == 0
    losses, plain = (
        [row["loss"] for row in metrics(folders[name] / "run")] for name in ("whole", "backprop")
    )
    assert losses == pytest.approx(plain, rel=1e-4) and losses[-1] < losses[0] - 0.3
    model = Stack.from_pretrained(folders["whole"] / "run").double()
    assert model.config.bidirectional == "tied"
    mixer = model.layers[0].mixer
    assert mixer.forward_mixer.in_proj.weight is mixer.reverse_mixer.in_proj.weight
    ids = torch.randint(256, (2, 50), generator=torch.Generator().manual_seed(0))
    a, b = (model(ids, labels=ids, method=method).loss for method in (Exact(7), Backprop()))
    assert abs(a - b) <= 1e-10 * b


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"method__name": "truncated", "method__window": 8}, "Exact()"),
        ({"cluster__shards": 2}, "leave cluster.shards out"),
        ({"training__carry_state": "previous"}, "leave training.carry_state out"),
        ({"model__vocab_size": 256}, "model.vocab_size: 256 ids are the tokenizer's"),
        ({"model__offload": "weights"}, "leave model.offload out"),
        ({"training__mask_share": 1.5}, "a number between 0 and 1"),
    ],
)
def test_what_such_a_run_cannot_have_is_refused_in_one_line(
    refused_run: Any, flags: dict[str, Any], message: str
) -> None:
    refused_run(message, **FLAGS | flags)
