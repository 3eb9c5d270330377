"""Training batches and their cursor, evaluation windows, and the configuration."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from adjoint.data import cache as token_cache
from adjoint.data.batches import Batches, DataConfig, EvalBatches, open_data
from adjoint.data.cache import entropy, frequencies
from adjoint.errors import UserError
from tests.data.text_helpers import own_cache, packed, stream, words  # noqa: F401  (own_cache is an autouse fixture)
from tests.test_repository import imports_of, python_files


def test_a_value_from_python_is_read_as_a_flag_is() -> None:
    assert DataConfig(seqlen="4K", path=["a.txt"]).seqlen == 4096  # type: ignore[arg-type]
    for name, value in (("seqlen", True), ("text_field", None), ("separator", 0), ("path", [1])):
        with pytest.raises(UserError, match=f"data.{name}: expected"):
            DataConfig(**{name: value})  # type: ignore[arg-type]


# Training batches


def take(batches: Batches, count: int) -> list[list[list[int]]]:
    return [next(batches).tolist() for _ in range(count)]


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


def test_order_depends_on_the_seed_alone_and_never_changes() -> None:
    def starts(seed: int) -> list[int]:
        batches = Batches(np.arange(100), 10, 1, seed, "f")
        return [int(next(batches)[0, 0]) for _ in range(12)]

    assert starts(0) == starts(0)
    assert starts(0) != starts(1)
    # A run resumed after an upgrade of NumPy must see this very order.
    assert starts(0) == [21, 11, 1, 71, 51, 61, 31, 41, 81, 69, 39, 49]


def test_batches_are_int64_and_span_epochs() -> None:
    batches = Batches(np.arange(21, dtype=np.uint8), 10, 4, 0, "f")
    ids = next(batches)
    assert ids.dtype == torch.int64
    assert ids.shape == (4, 10)
    assert batches.epoch >= 1
    assert iter(batches) is batches
    smallest = Batches(np.arange(11, dtype=np.uint32), 10, 1, 0, "f")
    assert {int(next(smallest)[0, 0]) for _ in range(30)} == {0, 1}


@pytest.mark.parametrize("batch", [1, 3])
def test_cursor_resumes_at_every_place(batch: int) -> None:
    tokens = np.arange(53, dtype=np.uint8)
    whole = Batches(tokens, 8, batch, 5, "f")
    for done in range(15):
        cursor = json.loads(json.dumps(whole.state_dict()))  # must survive a checkpoint's plain formats
        resumed = Batches(tokens, 8, batch, 5, "f")
        resumed.load_state_dict(cursor)
        ahead = Batches(tokens, 8, batch, 5, "f")
        take(ahead, done)
        assert take(resumed, 6) == take(ahead, 6)
        assert resumed.state_dict() == ahead.state_dict()
        next(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlen": 9}, "seqlen 8, this run has 9"),
        ({"batch": 3}, "batch 2, this run has 3"),
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"fingerprint": "other"}, "fingerprint 'f'"),
        ({"tokens": np.arange(60)}, "n_tokens 50, this run has 60"),
    ],
)
def test_cursor_of_another_run_is_refused(change: dict[str, object], message: str) -> None:
    own: dict[str, object] = {"tokens": np.arange(50), "seqlen": 8, "batch": 2, "seed": 0, "fingerprint": "f"}
    cursor = Batches(**own).state_dict()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        Batches(**{**own, **change}).load_state_dict(cursor)  # type: ignore[arg-type]


# Evaluation


def test_evaluation_reads_the_same_windows_in_order() -> None:
    evaluation = EvalBatches(np.arange(100, dtype=np.uint8), seqlen=8, batch=3, eval_tokens=70)
    first, second = list(evaluation), list(evaluation)
    assert [tuple(ids.shape) for ids in first] == [(3, 8), (3, 8), (2, 8)]
    assert len(evaluation) == 3
    assert torch.equal(torch.cat(first).flatten(), torch.arange(64))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("available", "eval_tokens", "shape"),
    [(5, 100, (1, 5)), (100, 6, (1, 6)), (2, 2, (1, 2)), (1, 9, None), (0, 9, None), (100, 0, None)],
)
def test_short_evaluation(available: int, eval_tokens: int, shape: tuple[int, int] | None) -> None:
    evaluation = EvalBatches(np.arange(available, dtype=np.uint8), 8, 2, eval_tokens)
    assert [tuple(ids.shape) for ids in evaluation] == ([shape] if shape else [])
    assert len(evaluation) == (1 if shape else 0)


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(f"{i:04}" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    data = open_data(DataConfig(path=str(tmp_path / "a.txt"), seqlen=64))
    assert data.n_train_tokens + data.n_eval_tokens == 4001
    assert data.n_eval_tokens == 200
    assert stream(data) == packed([text])
    assert [tuple(ids.shape) for ids in data.eval] == [(1, 64)] * 3


def test_rows_are_taken_by_weight(tmp_path: Path) -> None:
    """Each stream is read over and over; a cursor goes on as the rows would have."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 300)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config = DataConfig(path=paths, weights=[3, 1], seqlen=16, batch=2)
    data = open_data(config, seed=1)
    assert (data.n_train_tokens, data.n_eval_tokens, data.n_documents) == (572, 30, 2)
    assert data.unigram_entropy == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    seen = [row.tolist() for _ in range(40) for row in next(data.train)]
    counts = [sum(ord(letter) in row for row in seen) for letter in "ab"]
    assert counts == [60, 20] and [ord("b") in row for row in seen[:4]].count(True) == 1
    cursor = json.loads(json.dumps(data.train.state_dict()))
    again = open_data(config, seed=1).train
    again.load_state_dict(cursor)
    assert all(torch.equal(next(again), next(data.train)) for _ in range(5))
    with pytest.raises(UserError, match=r"has weights \[3.0, 1.0\] and batch 2, this run has \[1.0, 1.0\]"):
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
    assert (both.n_documents, both.fingerprint) == (2, data.fingerprint)


def test_training_never_sees_held_out_files(tmp_path: Path) -> None:
    words(tmp_path, 40)
    data = open_data(DataConfig(path=str(tmp_path), seqlen=16, batch=4))
    held_out = {text.split("x")[0] for text in data.tokenizer.decode(data.eval.tokens).split("\0") if text}
    seen = "\n".join(data.tokenizer.decode(row) for _ in range(400) for row in next(data.train))
    assert data.train.epoch >= 1
    assert len(held_out) == 2
    assert not any(f"{word}x" in seen for word in held_out)


# Entropy


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
