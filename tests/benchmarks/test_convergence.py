"""The convergence benchmark: its tasks, the fairness of its comparison, its workers and what it publishes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adjoint
from adjoint.errors import UserError
from benchmarks import common
from benchmarks.convergence import command as convergence
from benchmarks.convergence import report as convergence_report
from benchmarks.convergence import tasks as recall_tasks
from benchmarks.convergence import train
from benchmarks.convergence.workers import Workers

SMALL: dict[str, Any] = {"model": {"d_model": 8, "n_layer": 2, "d_state": 4}, "batch": 2, "seqlen": 48}


def losses(method: str, steps: int = 4, **changes: Any) -> list[float]:
    point = {"task": "recall-slow", "method": method, "seed": 0, "steps": steps, "dtype": "float64"} | SMALL
    *counted, result = train.train(point | changes)
    assert counted == list(range(1, steps + 1))
    assert isinstance(result, dict)
    return result["losses"]


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------ tasks


def test_questions_ask_for_the_token_after_the_trigger_before() -> None:
    drawn = recall_tasks.questions(np.random.default_rng(0), 16, 200, [4, 8, 64])
    asked = 0
    for ids, labels, distance in zip(
        drawn.ids.tolist(), drawn.labels.tolist(), drawn.distance.tolist(), strict=True
    ):
        triggers = [i for i, token in enumerate(ids) if token == recall_tasks.TRIGGER]
        expected = {b + 1: ids[a + 1] for a, b in itertools.pairwise(triggers)}
        assert {i: label for i, label in enumerate(labels) if label != -100} == expected
        gaps = {b: b - a for a, b in itertools.pairwise(triggers)}
        assert {i: d for i, d in enumerate(distance) if d} == gaps
        assert set(gaps.values()) <= {4, 8, 64}
        asked += len(gaps)
    assert asked > 50
    assert drawn.ids.min() >= 0 and drawn.ids.max() == recall_tasks.TRIGGER


def test_answers_cannot_be_guessed_from_their_frequency() -> None:
    drawn = recall_tasks.questions(np.random.default_rng(1), 400, 128, [4, 8])
    answers = drawn.labels[drawn.labels >= 0]
    counts = torch.bincount(answers, minlength=recall_tasks.ALPHABET).double()
    expected = len(answers) / recall_tasks.ALPHABET
    # chi-squared with 15 degrees of freedom is above 44.3 once in 10,000 fair draws; this draw is fixed
    assert float(((counts - expected) ** 2 / expected).sum()) < 44.3


def test_accuracy_is_counted_by_distance() -> None:
    """A model that always finds the value at distance 4 and never another."""

    class Four:
        def __call__(self, ids: torch.Tensor) -> Any:
            back = torch.nn.functional.pad(ids[:, :-3], (3, 0), value=recall_tasks.ALPHABET)
            return adjoint.stack.StackOutput(
                logits=10 * torch.nn.functional.one_hot(back, recall_tasks.ALPHABET + 1).float()
            )

    found = recall_tasks.RecallData(64, 2, seed=0).evaluate(Four())
    assert found["accuracy"]["4"] == 1.0
    assert all(0 < found["accuracy"][d] < 0.15 for d in ("8", "16", "32"))  # chance is 1 in 16
    assert sum(found["questions"].values()) > 256
    # a miss costs 10 nats more than a hit, near enough
    misses = sum(n * (1 - found["accuracy"][d]) for d, n in found["questions"].items())
    assert found["held_out"] == pytest.approx(10 * misses / sum(found["questions"].values()), rel=0.01)


def test_seeds_change_the_training_data_and_nothing_else() -> None:
    one, same, other = (recall_tasks.RecallData(64, 2, seed=s) for s in (0, 0, 1))
    first = next(one.train())[0]
    assert torch.equal(first, next(same.train())[0])
    assert not torch.equal(first, next(other.train())[0])
    assert not torch.equal(first, next(one.train())[0])  # no batch twice


def test_text_is_evaluated_by_its_mean_over_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    data = recall_tasks.TextData(64, 2, seed=0, path=str(tmp_path / "text.txt"))
    ids, labels = next(data.train())
    assert ids.shape == (2, 64) and torch.equal(ids, labels)
    torch.manual_seed(0)
    model = adjoint.Stack(adjoint.StackConfig(vocab_size=data.vocab_size, d_model=8, n_layer=1))
    batches = list(data.data.eval)
    with torch.no_grad():
        expected = sum(model(b, labels=b).loss.item() * b[:, 1:].numel() for b in batches)
    expected /= sum(b[:, 1:].numel() for b in batches)
    assert data.evaluate(model)["held_out"] == pytest.approx(expected)


def test_too_short_a_sequence_is_refused() -> None:
    with pytest.raises(UserError, match="at least 32"):
        recall_tasks.distances_within(16)
    assert recall_tasks.distances_within(64) == [4, 8, 16, 32]


# ----------------------------------------------------------------------------------------------- the training


def test_exact_trains_along_the_curve_of_backprop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CHUNK", 7)  # seven chunks, the last one shorter
    curve = losses("backprop")
    assert len(set(curve)) == 4
    assert apart(curve, losses("exact")) < 1e-11  # float64: rounding over four steps
    assert apart(curve, losses("truncated-48")) < 1e-11
    assert apart(curve, losses("unbiased-48")) < 1e-11  # nothing left to cut


def test_methods_differ_only_in_their_gradient() -> None:
    curves = {m: losses(m) for m in ("backprop", "truncated-2", "unbiased-16", "layer-local")}
    for name, curve in curves.items():
        assert curve[0] == pytest.approx(curves["backprop"][0], abs=1e-12), name  # same weights, same batch
        assert name == "backprop" or apart(curve, curves["backprop"]) > 1e-7, name
    assert curves["backprop"] != losses("backprop", seed=1)
    assert curves["unbiased-16"] == losses("unbiased-16")  # its draws are seeded


def test_lessons_come_first_and_are_the_same_for_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recall_tasks.Task("far", 2, 1e-2, distances=(16, 24), lessons=(4, 8), lesson_steps=3)
    monkeypatch.setitem(recall_tasks.TASKS, "recall-far", small)
    monkeypatch.setattr(recall_tasks, "HELD_OUT_SEQUENCES", 4)
    before = set()
    for method in ("backprop", "layer-local"):
        point = {"task": "recall-far", "method": method, "seed": 0, "steps": 2} | SMALL
        *steps, result = train.train(point)
        assert steps == [1, 2] and isinstance(result, dict)
        assert result["before"].keys() == {"16", "24"}
        before.add((result["losses"][0], *result["before"].values()))
    assert len(before) == 1
    monkeypatch.setitem(recall_tasks.TASKS, "recall-far", dataclasses.replace(small, lessons=()))
    *_, unprepared = train.train(point)
    assert isinstance(unprepared, dict)
    assert "before" not in unprepared and unprepared["losses"][0] != before.pop()[0]


def test_auto_reports_a_window_a_layer_and_step() -> None:
    point = {"task": "recall-fast", "method": "truncated-auto", "seed": 0, "steps": 2} | SMALL
    *_, result = train.train(point)
    assert isinstance(result, dict)
    assert [len(row) for row in result["windows"]] == [2, 2]
    assert all(1 <= w <= SMALL["seqlen"] for row in result["windows"] for w in row)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("backprop", adjoint.Backprop()),
        ("exact", adjoint.Exact(chunk_size=train.CHUNK)),
        ("truncated-16", adjoint.Truncated(16)),
        ("truncated-auto", adjoint.Truncated("auto", tolerance=1e-3)),
        ("unbiased-64", adjoint.Truncated(64, unbiased=True)),
        ("layer-local", adjoint.LayerLocal(chunk_size=train.CHUNK)),
        ("layer-local-16", adjoint.LayerLocal(16)),
    ],
)
def test_names_of_methods(name: str, method: object) -> None:
    assert train.make_method(name) == method


@pytest.mark.parametrize(
    "arguments",
    [
        ["--methods", "magic"],
        ["--methods", "truncated"],
        ["--methods", "exact-4"],
        ["--methods", "truncated-0"],
        ["--seeds", "0"],
        ["--tasks", "magic"],
        ["--seqlen", "16"],
        ["--steps", "-1"],
    ],
)
def test_wrong_options_end_with_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        convergence.parse(arguments)
    assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the workers


def worked(point: dict[str, Any]) -> Iterator[int | dict[str, Any]]:
    yield 1
    if point["n"] == "dies":
        os._exit(3)
    if point["n"] == "raises":
        raise OSError("disk full\nmore")
    yield {"square": point["n"] ** 2}


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_point_only() -> None:
    points = [{"n": n} for n in (2, "dies", "raises", 5)]
    workers = Workers(worked, 1, 1)
    try:
        seen = list(workers.run(points))
    finally:
        workers.close()
    assert [content for _, kind, content in seen if kind == "result"] == [
        {"square": 4},
        {"error": "the process ended with code 3"},
        {"error": "OSError: disk full"},
        {"square": 25},
    ]
    assert sum(kind == "step" for _, kind, _ in seen) == 4
    assert not workers.idle[0][0].is_alive()


# -------------------------------------------------------------------------------------------- the whole thing


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "backprop", "truncated-4", "truncated-auto", "--tasks", "recall-fast",
                 "--seeds", "1", "--steps", "3", "--seqlen", "32", "--jobs", "1",
                 "--out", str(tmp_path)]  # fmt: skip
    assert convergence.main(arguments) == 0
    first = json.loads((tmp_path / "convergence.json").read_text())
    assert first["complete"] and first["command"].startswith("python -m benchmarks.convergence --methods")
    assert "Truncated(auto)" in capsys.readouterr().out
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert "| Truncated(4) |" in (tmp_path / "convergence.md").read_text()

    options = convergence.parse(arguments)
    journal = common.Journal(tmp_path / "journal", "mark")
    points = convergence.grid(options)
    kept = {"losses": [1.0, 2.0, 3.0], "windows": None, "held_out": 7.0}
    journal.add(points[0], kept)
    convergence.run(options, journal)
    assert journal.get(points[0]) == kept  # not trained again
    by_method = {row["method"]: row for row in first["rows"]}
    for point in points[1:]:
        again = journal.get(point)
        assert again is not None
        assert again["held_out"] == by_method[point["method"]]["held_out"]  # the same numbers to the last bit


def test_summary_pairs_seeds_and_keeps_failures(tmp_path: Path) -> None:
    options = convergence.parse(["--methods", "backprop", "exact", "--tasks", "text", "--seeds", "3",
                                 "--steps", "12"])  # fmt: skip
    journal = common.Journal(tmp_path / "j", "m")
    for point in convergence.grid(options):
        shift = 0.1 if point["method"] == "exact" else 0.0
        result = {"losses": [float(point["seed"] + i) for i in range(12)], "windows": None,
                  "held_out": 10.0**point["seed"] + shift}  # fmt: skip
        if (point["method"], point["seed"]) == ("exact", 2):
            result = {"error": "ended"}
        journal.add(point, result)
    rows, curves = convergence.summarise(options, journal)
    backprop, exact = rows
    assert (backprop["held_out"], backprop["held_out_max"], backprop["gap"]) == (10.0, 100.0, 0.0)
    assert (exact["seeds"], exact["note"]) == (2, "ended")
    assert exact["gap"] == pytest.approx(0.1)
    assert exact["curve_distance"] == 0.0
    assert curves[0]["losses"]["1"] == [5.5, 11.5]
    about = {"tasks": {"text": {"label": "text", "steps": 12}}, "rows": rows, "curves": curves}
    assert "| Exact | 5.600 (1.100 … 10.100) | +0.100 (+0.100 … +0.100) |" in convergence_report.markdown(
        about | {"block_steps": 10}
    )


def test_when_recall_was_half_learned() -> None:
    result = {"block_steps": 10}
    curve = {"losses": {"0": [2.8, 1.38, 1.5], "1": [2.7, 2.6, 1.0], "2": [2.7, 2.6, 2.5]}}
    found = convergence_report.half_learned(result, curve)  # guessing among 16 costs 2.77
    assert found == [20, 30, None]
    assert convergence_report._steps_text(found) == "30 (20 … never)"


def test_published_table_replaces_the_one_before() -> None:
    begin, end = "<!-- convergence table -->", "<!-- end of convergence table -->"
    document = (common.ROOT / "docs" / "convergence.md").read_text()
    replaced = common.with_table(document, "convergence", "new\n")
    assert f"{begin}\n\nnew\n\n{end}" in replaced
    assert replaced.partition(begin)[0] == document.partition(begin)[0]
