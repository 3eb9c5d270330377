"""The convergence benchmark: its tasks, the fairness of its comparison, its workers and what it publishes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import adjoint
from benchmarks.convergence import command, tables, train
from benchmarks.convergence import tasks as recall_tasks

SMALL: dict[str, Any] = {"model": {"d_model": 8, "n_layer": 2, "d_state": 4}, "batch": 2, "seqlen": 48}


def losses(method: str, steps: int = 4, **changes: Any) -> list[float]:
    point = {"task": "recall-slow", "method": method, "seed": 0, "steps": steps, "dtype": "float64"} | SMALL
    found = train.measure(point | changes)["losses"]
    assert len(found) == steps
    return found


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


def test_accuracy_is_counted_by_distance() -> None:
    """A model that always finds the value at distance 4 and never another."""

    class Four:
        def __call__(self, ids: torch.Tensor) -> Any:
            back = torch.nn.functional.pad(ids[:, :-3], (3, 0), value=recall_tasks.ALPHABET)
            return adjoint.StackOutput(
                logits=10 * torch.nn.functional.one_hot(back, recall_tasks.ALPHABET + 1).float()
            )

    found = recall_tasks.RecallData(64, 2, seed=0).evaluate(Four())
    assert found["accuracy"]["4"] == 1.0
    assert all(0 < found["accuracy"][d] < 0.15 for d in ("8", "16", "32"))  # chance is 1 in 16
    assert sum(found["questions"].values()) > 256
    # a miss costs 10 nats more than a hit, near enough
    misses = sum(n * (1 - found["accuracy"][d]) for d, n in found["questions"].items())
    assert found["held_out"] == pytest.approx(10 * misses / sum(found["questions"].values()), rel=0.01)


def test_a_seed_has_its_own_batches_and_none_twice() -> None:
    one, same, other = (recall_tasks.RecallData(64, 2, seed=s).train() for s in (0, 0, 1))
    (first, _), (second, _) = next(one), next(one)
    assert torch.equal(first, next(same)[0])
    assert not torch.equal(first, next(other)[0]) and not torch.equal(first, second)


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
        result = train.measure(point)
        assert result["before"].keys() == {"16", "24"}
        before.add((result["losses"][0], *result["before"].values()))
    assert len(before) == 1
    monkeypatch.setitem(recall_tasks.TASKS, "recall-far", dataclasses.replace(small, lessons=()))
    unprepared = train.measure(point)
    assert "before" not in unprepared and unprepared["losses"][0] != before.pop()[0]


# ----------------------------------------------------------------------------------------- what is made of it


def test_rows_pair_seeds_and_keep_failures() -> None:
    convergence = command.Convergence()
    options = convergence.parse(["--methods", "backprop", "exact", "--tasks", "text", "--steps", "12"])
    found = []
    for point in convergence.points(options):
        shift = 0.1 if point["method"] == "exact" else 0.0
        result = {"losses": [float(point["seed"] + i) for i in range(12)], "windows": None,
                  "held_out": 10.0**point["seed"] + shift, "core_seconds": 1.0}  # fmt: skip
        failed = (point["method"], point["seed"]) == ("exact", 2)
        found.append((point, {"error": "ended"} if failed else result))
    backprop, exact = rows = convergence.rows(options, found)
    assert (backprop["held_out"], backprop["held_out_max"], backprop["gap"]) == (10.0, 100.0, 0.0)
    assert (exact["seeds"], exact["note"]) == (2, "ended")
    assert exact["gap"] == pytest.approx(0.1)
    assert exact["curve_distance"] == 0.0
    result = convergence.payload(options, found) | {"rows": rows}
    assert result["curves"][0]["losses"]["1"] == [5.5, 11.5]
    assert "| Exact | 5.600 | +0.100 (+0.100 … +0.100) |" in tables.markdown(result)
