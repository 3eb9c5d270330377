"""Needles: where the generator puts them, and what `adjoint eval --needles` makes of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import adjoint
from adjoint.cli import main
from adjoint.data.tokenizer import load_tokenizer
from adjoint.engine.grid import EngineSpec
from adjoint.tools.eval import command, needles, positions
from adjoint.train.language_model import PretrainedLM
from benchmarks import recall
from tests.hf.hf_models import float64_throughout, make
from tests.training_helpers import train_tiny, write_text


def test_a_needle_is_where_it_is_said_to_be() -> None:
    haystack, needle, question, answer = (torch.tensor([row]) for row in ([1, 2, 3, 4], [7, 8], [7], [8]))
    for depth, expected in (
        (0.0, [7, 8, 1, 2, 3, 4, 7, 8]),
        (0.5, [1, 2, 7, 8, 3, 4, 7, 8]),
        (0.95, [1, 2, 3, 7, 8, 4, 7, 8]),
        (1.0, [1, 2, 3, 4, 7, 8, 7, 8]),
    ):
        ids, labels = needles.hidden(haystack, needle, question, answer, depth)
        assert ids.tolist() == [expected]
        assert labels.tolist() == [[-100] * 7 + [8]]
    ids, labels = recall.needles(np.random.default_rng(0), 3, 20, 0.5)
    assert torch.equal(ids[:, 8:10], ids[:, 18:]) and torch.equal(labels[:, -1], ids[:, 9])
    assert ((ids[:, 8] > 0) & (ids[:, 8] <= recall.KEYS) & (ids[:, 9] > recall.KEYS)).all()
    assert not ids[:, [*range(8), *range(10, 18)]].any()


def make_tokenizer(folder: Path) -> str:
    """Some digits are tokens together with those before them, the first one with a blank."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["</s>"])
    texts = [needles.LINE.format(n) for n in range(10000, 99999, 997)]
    made.train_from_iterator([*texts, "the state of a chunk is all that next needs to know"], trainer)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_pass_key_in_the_tokens_of_the_run(tmp_path: Path) -> None:
    for name in ("byte", make_tokenizer(tmp_path)):
        tokenizer = load_tokenizer(name)
        for key in (48213, 11111, 90909):
            needle, question, answer = needles.pass_key(tokenizer, key)
            said = [tokenizer.decode(piece[0]) for piece in (question, answer)]
            assert tokenizer.decode(needle[0]).startswith("".join(said))
            assert "pass key is" in said[0] and str(key) in said[1]
            assert not set(said[0]) & set("0123456789")
            assert name != "byte" or said == ["\nThe pass key is ", str(key)]


def test_needles_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is told of them is what a forward over the whole finds."""
    monkeypatch.setattr(needles, "CHUNK", 50)
    flags = {"training__steps": 1, "training__sample_tokens": 0, "data__eval_tokens": 0}
    assert train_tiny(tmp_path, model__mixer="[mamba2, attention]", model__headdim=8, **flags) == 0
    path = str(tmp_path / "text.txt")
    asked = ["--needles", "--path", path, "--lengths", "100,300", "--tokens", "3K"]
    assert main(["eval", str(tmp_path / "run"), *asked]) == 0
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "run" / "eval" / "needles.json").read_text())["rows"]
    assert (tmp_path / "run" / "eval" / "needles.png").stat().st_size > 1000
    assert [(r["length"], r["depth"]) for r in rows] == [(n, d) for n in (100, 300) for d in needles.DEPTHS]
    assert [r["needles"] for r in rows] == [6] * 5 + [2] * 5
    loaded = command.load(str(tmp_path / "run"), torch.device("cpu"), "float32")
    text = command._held_out(loaded, path, 300)
    for row in rows[5:]:
        pieces = [needles.pass_key(load_tokenizer("byte"), key) for key in
                  np.random.default_rng(0).integers(10000, 100000, 2).tolist()]  # fmt: skip
        room = 300 - sum(piece.shape[1] for piece in pieces[0])
        hits, losses = [], []
        for start, each in zip((0, len(text) - room), pieces, strict=True):
            ids, _ = needles.hidden(text[None, start : start + room], *each, row["depth"])
            logits = loaded.model.module(ids).logits[0, -6:-1]
            hits.append((logits.argmax(-1) == ids[0, -5:]).double())
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, -5:]))
        assert row["accuracy"] == pytest.approx(torch.cat(hits).mean().item())
        assert row["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
        assert f"{row['accuracy']:.0%} ({row['loss']:.2f})" in shown
    assert main(["eval", str(tmp_path / "run"), "--needles", "--path", path, "--lengths", "40"]) == 2
    assert "--lengths" in capsys.readouterr().err


def test_needles_of_a_folder_of_transformers(tmp_path: Path) -> None:
    with float64_throughout():
        model = make("BambaForCausalLM").eval()
        ids = torch.arange(45)[None] % 61
        with torch.no_grad():
            expected = model(ids).logits[:, -9:]
        found = PretrainedLM(adjoint.wrap(model, adjoint.Exact()), adjoint.Exact()).last_logits(ids, 9, 8)
    assert (found - expected).norm() <= 1e-10 * expected.norm()
    folder = tmp_path / "model"
    make("LlamaForCausalLM", torch.float32, vocab_size=200).save_pretrained(folder)
    make_tokenizer(folder)
    asked = ["--needles", "--path", str(write_text(tmp_path / "text.txt")), "--lengths", "100"]
    assert main(["eval", str(folder), *asked, "--tokens", "1", "--out", str(tmp_path)]) == 0
    assert len(json.loads((tmp_path / "needles.json").read_text())["rows"]) == len(needles.DEPTHS)


def test_runs_of_one_name_have_columns_of_their_own() -> None:
    row = {"length": 64, "start": 0, "stop": 64, "predictions": 63, "windows": 1}
    rows = [{"run": "a/run", "loss": 1.0, **row}, {"run": "b/run", "loss": 2.0, **row}]
    head, losses, _ = positions.table(rows)
    assert head[1:] == ["a/run, 64 tokens", "b/run, 64 tokens"] and losses[1:] == ["1.0000", "2.0000"]


def test_the_picture_of_losses_has_shades_of_lengths_and_bars_of_errors() -> None:
    """A bar where a point is a mean of several windows; the legend says how many."""
    rows: list[positions.LossRow] = [
        {
            "run": "a",
            "length": n,
            "start": 0,
            "stop": n,
            "loss": 1.0,
            "error": error,
            "predictions": k * (n - 1),
            "windows": k,
        }
        for n, k, error in [(64, 4, 0.1), (256, 1, None)]
    ]
    (axes,) = positions.loss_curves(rows).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "64 tokens, windows: 4",
        "256 tokens, windows: 1",
    ]
    assert [len(container.lines[2]) for container in axes.containers] == [1, 0]
    shades = [container.lines[0].get_color() for container in axes.containers]
    assert sum(shades[0]) > sum(shades[1])  # the longest is the darkest


def test_errors_are_those_of_means_over_windows() -> None:
    class Model:
        """A model whose summed loss is the sum of the tokens that it reads."""

        def chunk_losses(self, ids: torch.Tensor, spec: EngineSpec, labels: None) -> list[torch.Tensor]:
            cuts = spec.cuts(ids.shape[1])
            return [ids[0, a:b].double().sum() for a, b in itertools.pairwise(cuts)]

    text = torch.repeat_interleave(torch.tensor([1, 3]), 32)
    (row,) = positions.evaluate(Model(), text, 32, 64, torch.device("cpu"))  # type: ignore[arg-type]
    means = torch.tensor([32 / 31, 96 / 31], dtype=torch.float64)
    assert row["loss"] == pytest.approx(means.mean().item())
    assert row["error"] == pytest.approx((means.std() / 2**0.5).item())
