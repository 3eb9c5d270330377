"""Training batches and their cursor, evaluation windows, and the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adjoint.data import token_cache
from adjoint.data.batches import Batches, EvalBatches, open_data
from adjoint.data.config import DataConfig
from adjoint.data.token_cache import entropy, frequencies
from adjoint.errors import UserError
from tests.data.text_helpers import packed, stream, write
from tests.test_repository import imports_of, python_files


def test_a_value_from_python_is_read_as_a_flag_is() -> None:
    assert DataConfig(seqlen="4K", path=["a.txt"]).seqlen == 4096  # type: ignore[arg-type]
    for name, value in (("seqlen", True), ("text_field", ""), ("separator", 0), ("path", [1])):
        with pytest.raises(UserError, match=f"data.{name}: expected"):
            DataConfig(**{name: value})  # type: ignore[arg-type]


# Training batches


def test_an_epoch_covers_the_stream_once() -> None:
    seqlen, n = 7, 500
    batches = Batches(np.arange(n, dtype=np.uint16), seqlen, 1, seed=3, fingerprint="f")
    epochs: list[list[int]] = [[], [], [], []]
    while True:
        window = next(batches)[0].tolist()
        if batches.epoch == len(epochs):
            break
        assert window == list(range(window[0], window[0] + seqlen))
        epochs[batches.epoch].append(window[0])
    offsets = [min(starts) for starts in epochs]
    assert len(set(offsets)) > 1
    assert max(offsets) < seqlen
    for starts, offset in zip(epochs, offsets, strict=True):
        assert sorted(starts) == list(range(offset, n - seqlen + 1, seqlen))
        assert starts != sorted(starts)
    assert [s - offsets[0] for s in epochs[0]][:20] != [s - offsets[1] for s in epochs[1]][:20]


@pytest.mark.parametrize("n", [11, 19, 20, 25, 39])
def test_an_epoch_of_few_windows_reads_every_token(n: int) -> None:
    batches = Batches(np.arange(n), 10, 1, seed=0, fingerprint="f")
    for epoch in range(5):
        assert np.unique(batches._window_starts(epoch)[:, None] + np.arange(10)).tolist() == list(range(n))
    rows = Batches(np.arange(2 * n), 10, 2, seed=0, fingerprint="f", consecutive=True)
    assert {len(rows._window_starts(epoch)) for epoch in range(5)} == {2 * (2 * n // 20)}
    before = {key: value for key, value in batches.state_dict().items() if key != "few"}
    batches.load_state_dict(before)  # a cursor of an older version goes on in its own windows
    assert len(batches._window_starts(0)) == (n - batches._window_starts(0).min()) // 10


def test_order_depends_on_the_seed_alone_and_never_changes() -> None:
    def starts(seed: int) -> list[int]:
        batches = Batches(np.arange(100), 10, 1, seed, "f")
        return [int(next(batches)[0, 0]) for _ in range(12)]

    assert starts(0) == starts(0)
    assert starts(0) != starts(1)
    smallest = Batches(np.arange(11, dtype=np.uint32), 10, 4, 0, "f")
    assert {int(start) for _ in range(8) for start in next(smallest)[:, 0]} == {0, 1}
    # A run resumed after an upgrade of NumPy must see this very order.
    assert starts(0) == [21, 11, 1, 71, 51, 61, 31, 41, 81, 69, 39, 49]


@pytest.mark.parametrize("batch", [1, 3])
def test_cursor_resumes_at_every_place(batch: int) -> None:
    def batches() -> Batches:
        return Batches(np.arange(53, dtype=np.uint8), 8, batch, 5, "f")

    whole = batches()
    rows = [next(whole) for _ in range(21)]
    assert whole.epoch > 2 and rows[0].dtype == torch.int64
    ahead = batches()
    for done in range(15):
        resumed = batches()
        resumed.load_state_dict(json.loads(json.dumps(ahead.state_dict())))  # as a checkpoint keeps it
        assert all(torch.equal(next(resumed), row) for row in rows[done : done + 6])
        next(ahead)


@pytest.mark.parametrize(
    "name, other",
    [("batch", 3), ("fingerprint", "g"), ("tokens", np.arange(60)), ("consecutive", True), ("seqlen", 9)],
)
def test_cursor_of_another_run_is_refused(name: str, other: Any) -> None:
    """By the setting that differs; whether a run begins the text again then is the trainer's to say."""
    own: dict[str, Any] = {"tokens": np.arange(50), "seqlen": 8, "batch": 2, "seed": 0, "fingerprint": "f"}
    path, carries = "data.path", "training.carry_state"
    said = {"tokens": path, "fingerprint": path, "consecutive": carries}.get(name, f"data.{name}")
    one, another = Batches(**own), Batches(**{**own, name: other})
    for here, there in ((one, another), (another, one)):
        with pytest.raises(UserError, match=f"has {said} .*, this run has"):
            here.load_state_dict(there.state_dict())


# Evaluation


@pytest.mark.parametrize(
    ("available", "eval_tokens", "shapes"),
    [
        (100, 70, [(3, 8), (3, 8), (2, 8)]),
        (5, 100, [(1, 5)]),
        (100, 6, [(1, 6)]),
        (2, 2, [(1, 2)]),
        (1, 9, []),
        (100, 0, []),
    ],
)
def test_evaluation_reads_the_same_windows_in_order(
    available: int, eval_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    evaluation = EvalBatches(np.arange(available, dtype=np.uint8), 8, 3, eval_tokens)
    for found in (list(evaluation), list(evaluation)):
        assert [tuple(ids.shape) for ids in found] == shapes and len(evaluation) == len(shapes)
        read = [token for ids in found for token in ids.flatten().tolist()]
        assert read == list(range(len(read)))


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(f"{i:04}" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    data = open_data(DataConfig(path=str(tmp_path / "a.txt"), seqlen=64))
    assert (data.n_train_tokens, len(data.eval.tokens)) == (3801, 200)
    assert stream(data) == packed([text])
    assert [tuple(ids.shape) for ids in data.eval] == [(1, 64)] * 3


def test_rows_are_taken_by_weight(tmp_path: Path) -> None:
    """Each stream is read over and over; a cursor goes on as the rows would have."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config = DataConfig(path=paths, weights=[3, 1], seqlen=16, batch=2)
    data = open_data(config, seed=1)
    assert (data.n_train_tokens, len(data.eval.tokens)) == (572, 30)
    assert data.unigram_entropy == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    seen = [row.tolist() for _ in range(40) for row in next(data.train)]
    counts = [sum(ord(letter) in row for row in seen) for letter in "ab"]
    assert counts == [60, 20] and [ord("b") in row for row in seen[:4]].count(True) == 1
    cursor = json.loads(json.dumps(data.train.state_dict()))
    again = open_data(config, seed=1).train
    again.load_state_dict(cursor)
    assert all(torch.equal(next(again), next(data.train)) for _ in range(5))
    with pytest.raises(UserError, match=r"has data.weights \[3.0, 1.0\], this run has \[1.0, 1.0\]"):
        open_data(dataclasses.replace(config, weights=[1, 1]), seed=1).train.load_state_dict(cursor)


def test_held_out_text_of_its_own_or_none(tmp_path: Path) -> None:
    text, other = "some text " * 50, "more of it"
    for name, content in (("a.txt", text), ("b.txt", other)):
        (tmp_path / name).write_text(content)
    config = DataConfig(path=str(tmp_path / "a.txt"), seqlen=8, eval_fraction=0)
    data = open_data(config)
    assert (data.train.tokens.tolist(), len(data.eval)) == (packed([text]), 0)
    both = open_data(dataclasses.replace(config, eval_fraction=0.3, validation_path=str(tmp_path / "b.txt")))
    assert both.train.tokens.tolist() == packed([text])
    assert both.eval.tokens.tolist() == packed([other])
    assert both.fingerprint == data.fingerprint


def test_held_out_text_is_not_the_training_text_under_another_name(tmp_path: Path) -> None:
    """A link, a copy, a table and its file, a folder and a file of it; a few documents alike are told of."""
    rows = [f"document {i} " * 9 for i in range(40)]
    table = tmp_path / "table"
    table.mkdir()
    parts = [write(table / f"{i}.jsonl", rows[i * 10 : i * 10 + 10]) for i in range(4)]
    whole = write(tmp_path / "whole.jsonl", rows)
    (tmp_path / "linked.jsonl").hardlink_to(whole)
    other = write(tmp_path / "other.jsonl", [*rows[:2], *(f"unlike {i} " * 9 for i in range(30))])
    pairs = [(whole, tmp_path / "linked.jsonl"), (table, whole), (whole, parts[1]), (parts[1], whole)]
    with contextlib.suppress(ImportError):
        importlib.import_module("datasets")
        pairs += [(f"hf:{table}", f"hf:{table}/"), (f"hf:{table}", parts[1]), (parts[1], f"hf:{table}")]
    for path, held_out in pairs:
        config = DataConfig(path=str(path), validation_path=str(held_out), seqlen=8)
        with pytest.raises(UserError, match=r"data\.validation_path: \d+% of its text is trained on too"):
            open_data(config)
    with pytest.warns(UserWarning, match="7% of its text is trained on too"):
        open_data(DataConfig(path=str(whole), validation_path=str(other), seqlen=8))


def test_unigram_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the training split alone; a token counts whether it is predicted or not."""
    monkeypatch.setattr(token_cache, "_SPAN", 7)
    tokens = np.random.default_rng(0).integers(0, 40, 1000).astype(np.int16) ** 2 % 53
    p = np.bincount(tokens)[np.bincount(tokens) > 0] / 1000
    assert entropy(frequencies(tokens)) == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)
    tokens[::3] = ~tokens[::3]
    assert entropy(frequencies(tokens)) == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)
    assert entropy(frequencies(np.empty(0, np.uint8))) == 0.0
    (tmp_path / "a.txt").write_text("ab" * 500 + "z" * 100)
    data = open_data(DataConfig(path=str(tmp_path), seqlen=16))
    assert data.unigram_entropy == entropy(frequencies(data.train.tokens))


def test_optional_packages_are_imported_where_they_are_used() -> None:
    for path in python_files("adjoint/data"):
        names = {name.partition(".")[0] for _, name in imports_of(path, at_import=True)}
        assert not names & {"datasets", "pyarrow", "tokenizers", "transformers"}
