"""States that go on from batch to batch, and the loss by position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adjoint import Exact
from adjoint.batch import shift_labels
from adjoint.checkpoint import list_checkpoints
from adjoint.cli import main
from adjoint.data.batches import Batches
from adjoint.tools.eval import command
from tests.cluster.threads import train_in_threads
from tests.model_helpers import make_ids, make_model
from tests.training_helpers import metrics, run, tiny, train_tiny, weights


def test_rows_read_on() -> None:
    """Every row's windows follow each other in a part of its own; with the last one an epoch begins."""
    batches = Batches(np.arange(1000), 10, 3, 0, "f", consecutive=True)
    assert batches.begins
    rows = torch.cat([next(batches) for _ in range(33)], dim=1)
    assert torch.equal(rows, rows[:, :1] + torch.arange(330))
    assert len(rows[:, 0].unique()) == 3 and batches.begins
    next(batches)
    assert batches.epoch == 1 and not batches.begins


@pytest.mark.parametrize("method", [None, Exact(7)])
def test_a_document_in_pieces_has_the_losses_of_the_whole(method: Any) -> None:
    """A model that stands still reads one document in pieces: the losses are those of the whole's forward."""
    model, ids = make_model("mixed, untied"), make_ids(1, 60)
    logits = model(ids).logits
    state, losses = None, []
    for piece in ids.split(20, dim=1):
        out = model(piece, labels=piece, method=method, state=state, return_state=True)
        state = [tuple(s.detach() for s in layer) for layer in out.state]
        losses.append(out.loss)
    for i, loss in enumerate(losses):
        at = slice(20 * i, 20 * i + 19)
        whole = torch.nn.functional.cross_entropy(logits[0, at], shift_labels(ids)[0, at])
        assert torch.allclose(loss, whole, rtol=1e-12)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", ["previous", "other", "noise"])
def test_a_run_that_carries_states_resumes_bitwise(tmp_path: Path, how: str) -> None:
    flags = {"training__carry_state": how, "data__batch": 2}
    assert train_tiny(tmp_path, **flags) == 0
    whole = tmp_path / "run"
    first = list_checkpoints(whole / "checkpoints")[0]
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "again", run__resume=first) == 0
    assert weights(tmp_path / "again", 8) == weights(whole, 8)
    assert train_tiny(tmp_path, data__batch=2, run__dir=tmp_path / "plain") == 0
    assert metrics(whole)[-1]["loss"] != metrics(tmp_path / "plain")[-1]["loss"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", ["previous", "other", "noise"])
def test_shards_carry_states_as_one_process_does(tmp_path: Path, one_thread: None, how: str) -> None:
    """And a checkpoint's go on in any number of shards, bit for bit in the same one."""
    flags = {
        "training__carry_state": how,
        "training__precision": "float64",
        "training__steps": 4,
        "training__save_every": 2,
        "training__grad_accumulation": 2,
        "training__sample_tokens": 0,
        "model__tie_embeddings": "false",
        "method__chunk_size": 20,
        "data__batch": 2,
    }
    assert train_tiny(tmp_path, **flags) == 0
    whole, cut = tmp_path / "run", tmp_path / "cut"
    train_in_threads(tiny(tmp_path, **flags, cluster__shards=2, run__dir=cut))
    for found, expected in zip(metrics(cut), metrics(whole), strict=True):
        assert abs(found["loss"] - expected["loss"]) <= 1e-12 * expected["loss"]
    first, last = list_checkpoints(cut / "checkpoints")
    assert len(list(first.glob("state-*-of-00002.safetensors"))) == 2
    again = {"run__resume": first, "run__dir": tmp_path / "again"}
    train_in_threads(tiny(tmp_path, **flags, **again, cluster__shards=2))
    for file in last.glob("*.safetensors"):
        assert (tmp_path / "again" / "checkpoints" / last.name / file.name).read_bytes() == file.read_bytes()
    assert train_tiny(tmp_path, **flags, **again | {"run__dir": tmp_path / "one"}) == 0
    assert metrics(tmp_path / "one")[-1]["loss"] == pytest.approx(metrics(whole)[-1]["loss"], rel=1e-12)


def test_eval_refuses_held_out_text_that_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that change places move into the part that is held out."""
    rows = [f'{{"text": "line {i} of them"}}\n' for i in range(300)]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("".join(rows))
    mixture = {"data__path": f"[{paths[0]}, {paths[1]}]", "data__weights": "[1, 2]"}
    for name, given in (("one", {"data__path": paths[0]}), ("two", mixture)):
        flags = {"training__steps": 1, "training__sample_tokens": 0, "run__dir": tmp_path / name}
        assert train_tiny(tmp_path, **flags, **given) == 0
        assert run(["eval", str(tmp_path / name), "--lengths", "64"]) == 0
    paths[0].write_text("".join(rows[150:] + rows[:150]))
    capsys.readouterr()
    for name in ("one", "two"):
        assert run(["eval", str(tmp_path / name), "--lengths", "64"]) == 2
        assert "has changed since it was trained on" in capsys.readouterr().err
        assert run(["eval", str(tmp_path / name), "--lengths", "64", "--path", str(paths[0])]) == 0


def test_eval_gives_the_loss_by_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its bins hold the mean of each token's loss, and all of them the loss of the whole."""
    assert train_tiny(tmp_path) == 0
    text = tmp_path / "text.txt"
    assert (
        main(["eval", str(tmp_path / "run"), "--path", str(text), "--lengths", "300,1K", "--tokens", "1"])
        == 0
    )
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "run" / "eval" / "eval.json").read_text())["rows"]
    assert (tmp_path / "run" / "eval" / "eval.png").stat().st_size > 1000
    assert [(r["start"], r["stop"]) for r in rows if r["length"] == 300] == [
        (0, 64),
        (64, 128),
        (128, 256),
        (256, 300),
    ]
    loaded = command.load(str(tmp_path / "run"), torch.device("cpu"), "float32")
    whole = command._held_out(loaded, str(text), 1024)
    assert len(whole) == text.stat().st_size + 1, "all of a text that is named, and the separator"
    ids = whole[None, :1024]
    losses = torch.nn.functional.cross_entropy(
        loaded.model.module(ids).logits[0, :-1], ids[0, 1:], reduction="none"
    )
    for row in (r for r in rows if r["length"] == 1024):
        assert abs(row["loss"] - losses[row["start"] : row["stop"]].mean().item()) <= 1e-5 * row["loss"]
        assert f"{row['loss']:.4f}" in shown
    assert sum(r["predictions"] for r in rows if r["length"] == 1024) == 1023


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a small Mamba-2 and a small Bamba."""
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make

    folders = {}
    for name in ("Mamba2ForCausalLM", "BambaForCausalLM"):
        folders[name] = tmp_path_factory.mktemp(name)
        make(name, torch.float32, vocab_size=256).save_pretrained(folders[name])
    return folders


@pytest.mark.sampled(11)
@pytest.mark.parametrize("carry_state", ["previous", "noise"])
def test_a_pretrained_model_carries_states_and_resumes_bitwise(
    pretrained: dict[str, Path], tmp_path: Path, carry_state: str
) -> None:
    flags = {"model__from_pretrained": pretrained["Mamba2ForCausalLM"], "data__tokenizer": "byte"}
    flags |= {"model__d_model": 24, "model__n_layer": 3, "data__batch": 2, "training__sample_tokens": 0}
    carried = {**flags, "training__carry_state": carry_state}
    assert train_tiny(tmp_path, **carried) == 0
    complete = tmp_path / "run"
    first = list_checkpoints(complete / "checkpoints")[0]
    assert train_tiny(tmp_path, **carried, run__dir=tmp_path / "again", run__resume=first) == 0
    assert weights(tmp_path / "again", 8) == weights(complete, 8)
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "plain") == 0
    assert metrics(complete)[-1]["loss"] != metrics(tmp_path / "plain")[-1]["loss"]


def test_pretrained_models_that_carry_no_states(
    pretrained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"model__from_pretrained": pretrained["BambaForCausalLM"], "data__tokenizer": "byte"}
    flags |= {"training__carry_state": "previous", "model__d_model": 24, "model__n_layer": 3}
    assert train_tiny(tmp_path, **flags) == 2
    assert "BambaForCausalLM: attention's keys and values would grow without limit" in capsys.readouterr().err
    assert train_tiny(tmp_path, **flags, data__documents="packed") == 2
    assert 'set data.documents to "stream"' in capsys.readouterr().err
