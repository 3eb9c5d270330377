"""Gradients side by side, and `adjoint sweep`."""

from __future__ import annotations

import csv
import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, Truncated
from adjoint.memory import PeakMemory, memory_left
from adjoint.tools.sweep import compare
from adjoint.tools.sweep import report as sweep_report
from adjoint.tools.sweep.compare import Comparison
from adjoint.train.machine import environment
from tests.model_helpers import make_ids, make_model
from tests.training_helpers import run, train_tiny, write_text


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Spare the collection before each row of a sweep the walk over what other tests have imported."""
    gc.collect()
    gc.freeze()


def sweep(folder: Path, *more: str, out: str = "out", **flags: Any) -> int:
    """`adjoint sweep` of a fresh tiny model; keywords are the sweep's flags."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    values = {"windows": "1,4,full", "seqlen": 32, "batches": 2, **flags}
    argv = ["sweep", "--out", str(folder / out)]
    argv += [
        word
        for key, value in values.items()
        for word in (f"--{key if '.' in key else key.replace('_', '-')}", str(value))
    ]
    if not {"model", "model.from_pretrained"} & flags.keys():
        argv += ["--model.d_model", "8", "--model.n_layer", "2"]
    argv += ["--data.path", str(text), "--data.cache_dir", str(folder / "cache"), "--training.threads", "1"]
    return run([*argv, *more])


def results(folder: Path, out: str = "out") -> dict[str, Any]:
    return json.loads((folder / out / "sweep.json").read_text())


def by_key(result: dict[str, Any]) -> dict[tuple[str, int | None], dict[str, Any]]:
    return {(row["method"], row["window"]): row for row in result["rows"]}


# ------------------------------------------------------------------------------------------------- comparison


def test_agreement_is_cosine_and_relative_error_of_each_part() -> None:
    reference = {
        "embedding.weight": torch.tensor([3.0, 4.0]),
        "layers.0.mixer.A_log": torch.tensor([2.0]),
        "layers.1.mixer.A_log": torch.tensor([0.0]),
        "layers.1.mixer.conv1d.weight": torch.tensor([1.0]),
        "layers.1.mixer.conv1d.bias": torch.tensor([1.0]),
        "layers.1.norm.weight": torch.tensor([0.0]),
    }
    found = {
        **reference,
        "embedding.weight": torch.tensor([-4.0, 3.0]),
        "layers.1.mixer.A_log": torch.tensor([1.0]),
        "layers.1.mixer.conv1d.bias": torch.tensor([2.0]),
    }
    agreement = compare.compare(reference, found)
    assert set(agreement["layer"]) == {"embedding", "layers.0", "layers.1"}
    assert set(agreement["kind"]) == {"embedding", "A_log", "conv1d", "norm"}
    assert agreement["layer"]["embedding"].cosine == pytest.approx(0, abs=1e-12)
    assert agreement["layer"]["embedding"].relative_error == pytest.approx(math.sqrt(2))
    assert agreement["kind"]["A_log"].relative_error == pytest.approx(1 / 2)
    assert agreement["kind"]["conv1d"].cosine == pytest.approx(3 / math.sqrt(2 * 5))
    assert agreement["kind"]["norm"] == compare.Agreement(None, 0.0)
    overall = agreement["overall"]["overall"]
    assert overall.relative_error == pytest.approx(math.sqrt((50 + 1 + 1) / (25 + 4 + 2)))
    assert overall.cosine == pytest.approx((4 + 3) / math.sqrt(31 * (25 + 4 + 1 + 5)))


def test_what_is_not_finite_has_no_agreement() -> None:
    agreement = compare.compare({"D": torch.ones(2)}, {"D": torch.tensor([1.0, math.nan])})
    assert agreement["overall"]["overall"] == compare.Agreement(None, None)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mamba, MLP, untied", "mamba2"])
def test_rows_agree_with_gradients_compared_by_hand(variant: str) -> None:
    model, batches = make_model(variant), [make_ids(2, 20, seed=seed) for seed in range(2)]
    comparison = Comparison(model, batches, chunk_size=7, precision="float64")
    row = comparison.row("truncated", 3)
    errors = []
    for ids in batches:
        found = []
        for method in (Backprop(), Truncated(window=3, chunk_size=7)):
            model.zero_grad()
            model(ids, labels=ids, method=method).loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        errors.append(((found[1] - found[0]).norm() / found[0].norm()).item())
        model.zero_grad()
    assert min(errors) > 1e-3  # a window of 3 is not the gradient
    assert row["relative_error_of_batches"] == pytest.approx(errors, rel=1e-9)
    assert row["relative_error"] == pytest.approx(sum(errors) / 2, rel=1e-9)
    assert row["seconds"] > 0
    assert comparison.row("truncated", None)["relative_error"] < 1e-12
    assert comparison.row("backprop", None)["relative_error"] == 0
    last = f"layers.{model.config.n_layer - 1}"
    local = comparison.row("layer-local", None)["layer"]
    assert local[last]["relative_error"] < 1e-12 < 1e-2 < local["layers.0"]["relative_error"]


def test_exact_stands_in_for_backprop() -> None:
    model, batches = make_model(), [make_ids(1, 24)]
    rows = [
        Comparison(model, batches, baseline, precision="float64").row("layer-local", 4)
        for baseline in ("backprop", "exact")
    ]
    assert rows[0]["relative_error"] == pytest.approx(rows[1]["relative_error"], rel=1e-9)
    assert rows[0]["kind"]["A_log"]["cosine"] == pytest.approx(rows[1]["kind"]["A_log"]["cosine"], rel=1e-9)


def test_methods_are_built_with_what_they_take() -> None:
    assert compare.build("truncated", None, 32, 8) == Truncated(window=32, chunk_size=8)
    assert compare.build("layer-local", 4, 32, None) == LayerLocal(window=4)
    assert compare.build("truncated", "auto", 32, 8, 0.1) == Truncated("auto", 8, tolerance=0.1)
    assert compare.build("exact", None, 32, 8) == Exact(chunk_size=8)
    assert compare.build("backprop", None, 32, 8) == Backprop()


def test_backprop_fits_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(), make_ids(1, 64)
    assert compare.backprop_fits(model, ids)
    monkeypatch.setattr(compare, "memory_left", lambda device: 10_000)  # a token keeps more than 64 bytes
    assert not compare.backprop_fits(model, ids)


def test_smallest_window_looks_at_all_longer_ones_too() -> None:
    def row(window: int | None, error: float | None, kind: float) -> dict[str, Any]:
        kinds = {"D": {"relative_error": 0.0}, "A_log": {"relative_error": kind}}
        return {"window": window, "relative_error": error, "kind": kinds}

    rows = [row(64, 0.001, 0.5), row(None, 0.0, 0.0), row(1, 0.005, 0.9), row(16, 0.02, 0.9)]
    said = sweep_report.conclusion("truncated", rows)
    assert said == "truncated: error below 1% from window 64, for each kind of parameter from full"
    assert "from window full" in sweep_report.conclusion("truncated", [*rows, row(256, None, 0.0)])
    assert "no measured window" in sweep_report.conclusion("truncated", [row(None, 0.3, 0.3)])


def test_peak_memory_sees_what_comes_and_goes() -> None:
    size, cpu = 64 * 2**20, torch.device("cpu")
    with PeakMemory(cpu) as peak:
        torch.ones(size // 4).sum()
    if peak.bytes is None:
        pytest.skip("the peak of resident memory cannot be reset here")
    assert 0.9 * size < peak.bytes < 1.5 * size
    with PeakMemory(cpu) as peak:
        torch.ones(16).sum()
    assert peak.bytes is not None and peak.bytes < size / 4
    assert memory_left(cpu) > size
    assert environment(cpu)["versions"]["torch"] == torch.__version__


# ------------------------------------------------------------------------------------------------ the command


def test_sweep_of_a_fresh_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path) == 0
    shown = capsys.readouterr().out
    result = results(tmp_path)
    rows = by_key(result)
    assert list(rows) == [
        ("backprop", None),
        *(("truncated", w) for w in (1, 4, None)),
        *(("layer-local", w) for w in (1, 4, None)),
    ]
    assert rows["backprop", None]["relative_error"] == 0
    assert rows["truncated", None]["relative_error"] < 1e-5 < rows["truncated", 1]["relative_error"]
    assert rows["truncated", 1]["kind"]["A_log"]["relative_error"] > 0.1
    assert rows["truncated", 4]["vjps"] == compare.counted_vjps("truncated", [4, 4], 32)
    assert result["settings"]["baseline"] == "backprop"
    assert {"date", "cpu", "versions"} <= set(result["environment"])
    assert result["config"]["model"]["d_model"] == 8
    assert all(word in shown for word in ("truncated", "layer-local", "A_log", "layers.1", "below 1%"))
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "out" / "sweep.csv", newline="") as stream:
        lines = list(csv.DictReader(stream))
    line = next(r for r in lines if (r["method"], r["window"], r["name"]) == ("layer-local", "4", "layers.0"))
    expected = rows["layer-local", 4]["layer"]["layers.0"]["relative_error"]
    assert float(line["relative_error"]) == expected and line["scope"] == "layer"


@pytest.mark.slow
def test_sweep_of_a_trained_model_without_its_configuration(tmp_path: Path) -> None:
    assert train_tiny(tmp_path, training__steps=2, training__sample_tokens=0) == 0
    assert sweep(tmp_path, model=tmp_path / "run", windows="2") == 0
    result = results(tmp_path)
    assert result["settings"]["model"]["d_model"] == 16
    assert result["settings"]["weights"] != "fresh"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert result["model"] == str(checkpoint)
    # the same weights by another name: nothing is left to measure
    assert sweep(tmp_path, model=checkpoint, windows="2") == 0
    assert results(tmp_path)["rows"] == result["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, flag",
    [("transformers", "model.from_pretrained"), pytest.param("mamba-ssm", "model", marks=pytest.mark.slow)],
)
def test_sweep_of_a_pretrained_folder(
    layout: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an exported run what a sweep of the run gives."""
    train_tiny(tmp_path, training__steps=2, training__sample_tokens=0)
    run_folder, exported = tmp_path / "run", tmp_path / "exported"
    assert run(["export", str(run_folder), "--to", str(exported), "--format", layout]) == 0
    assert sweep(tmp_path, model=run_folder, windows="2", batches=1) == 0
    given: dict[str, Any] = {flag: exported, "windows": "2", "batches": 1}
    assert sweep(tmp_path, out="again", **given) == 0
    first, second = by_key(results(tmp_path)), by_key(results(tmp_path, "again"))
    for key, row in first.items():
        assert second[key]["relative_error"] == pytest.approx(row["relative_error"], rel=1e-4, abs=1e-7)
        assert second[key]["kind"].keys() == row["kind"].keys()
    capsys.readouterr()
    assert sweep(tmp_path, "--model", "x", **{"model.from_pretrained": "y"}) == 2
    assert "the same as --model" in capsys.readouterr().err


def test_sweep_of_a_wrapped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sweep a folder, and a run of it: keys and values are dropped with the states, the head is exact."""
    pytest.importorskip("transformers")
    from tests.hf.hf_models import make

    folder = tmp_path / "model"
    make("BambaForCausalLM", torch.float32, vocab_size=256).save_pretrained(folder)
    options: dict[str, Any] = {"data.batch": 2, "batches": 1, "training.precision": "float64"}
    assert sweep(tmp_path, model=folder, **options | {"windows": "4,8,full"}) == 0
    assert "end at fixed edges, one window apart" in capsys.readouterr().out
    rows = by_key(results(tmp_path))
    assert list(rows) == [("backprop", None), ("truncated", 4), ("truncated", 8), ("truncated", None)]
    assert rows["truncated", None]["relative_error"] < 1e-6
    assert 1e-3 < rows["truncated", 8]["relative_error"] < rows["truncated", 4]["relative_error"] < 1
    kinds, layers = rows["truncated", 4]["kind"], rows["truncated", 4]["layer"]
    assert kinds["mamba.A_log"]["relative_error"] > 0.01 > 1e-6 > kinds["lm_head"]["relative_error"]
    assert {"layers.0", "layers.1", "embed_tokens", "lm_head"} <= layers.keys()
    assert (tmp_path / "out" / "sweep.png").is_file()

    words = f"train --model.from_pretrained {folder} --data.path {tmp_path}/text.txt --run.dir {tmp_path}/run"
    words += f" --data.seqlen 32 --training.steps 1 --training.threads 1 --data.cache_dir {tmp_path}/cache"
    assert run(words.split()) == 0
    assert sweep(tmp_path, out="run's", model=tmp_path / "run", windows="full", **options) == 0
    assert by_key(results(tmp_path, "run's"))["truncated", None]["relative_error"] < 1e-6
    capsys.readouterr()
    for flags, message in [
        ({"windows": "1"}, "--windows 1: a wrapped model's chunks have two tokens at least"),
        ({"windows": "auto"}, "--windows auto: a wrapped model takes Truncated(window) with a window in"),
        ({"methods": "layer-local"}, "--methods layer-local, --windows 4: a wrapped model takes Exact()"),
    ]:
        assert sweep(tmp_path, out="refused", model=folder, **{"windows": "4", **flags}) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert message in line


def test_a_sweep_goes_on_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, int | None]] = []
    row, stop = Comparison.row, 3

    def counted(self: Comparison, name: str, window: int | None) -> dict[str, Any]:
        if len(measured) == stop:
            raise KeyboardInterrupt
        measured.append((name, window))
        return row(self, name, window)

    monkeypatch.setattr(sweep_report, "draw", lambda result, path: None)  # half a second each
    monkeypatch.setattr(Comparison, "row", counted)
    given = {"data": "random", "batches": 1}
    assert sweep(tmp_path, **given) == 130
    shown = capsys.readouterr()
    assert "against backprop" in shown.out and "run the same command to continue" in shown.err
    kept = by_key(results(tmp_path))
    assert list(kept) == measured == [("backprop", None), ("truncated", 1), ("truncated", 4)]
    assert (tmp_path / "out" / "sweep.csv").exists()

    stop = -1
    measured.clear()
    assert sweep(tmp_path, **given) == 0
    whole = by_key(results(tmp_path))
    assert measured == [key for key in whole if key not in kept] and len(measured) == 4
    assert {key: whole[key] for key in kept} == kept

    measured.clear()
    assert sweep(tmp_path, **given, windows="2,4", methods="truncated") == 0  # one more window
    assert measured == [("truncated", 2)] and len(results(tmp_path)["rows"]) == 8
    capsys.readouterr()

    assert sweep(tmp_path, **given, seed=1) == 2
    error = capsys.readouterr().err
    assert "has other settings; name another folder" in error and error.count("\n") == 1
    assert len(results(tmp_path)["rows"]) == 8
    assert sweep(tmp_path, "--fresh", **given, seed=1, windows="1", methods="truncated") == 0
    assert len(results(tmp_path)["rows"]) == 2


@pytest.mark.slow
def test_exact_is_the_baseline_where_backprop_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows against another reference are kept apart."""
    monkeypatch.setattr(sweep_report, "draw", lambda result, path: None)
    monkeypatch.setattr(compare, "backprop_fits", lambda model, ids: False)
    flags = {"data": "random", "windows": "4", "methods": "truncated"}
    assert sweep(tmp_path, **flags) == 0
    assert "Exact, equal to rounding, is used instead" in capsys.readouterr().out
    rows = results(tmp_path)["rows"]
    assert [row["method"] for row in rows] == ["exact", "truncated"]
    assert sweep(tmp_path, **flags, baseline="backprop") == 0
    assert [row["method"] for row in results(tmp_path)["rows"]] == ["backprop", "truncated"]
    assert sweep(tmp_path, **flags) == 0
    assert results(tmp_path)["rows"] == rows


def test_running_out_of_memory_is_told_and_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Comparison.row

    def greedy(self: Comparison, name: str, window: int | None) -> dict[str, Any]:
        if window == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return row(self, name, window)

    monkeypatch.setattr(Comparison, "row", greedy)
    assert sweep(tmp_path, data="random") == 2
    *_, row_, error = capsys.readouterr().err.splitlines()
    assert row_.endswith("truncated, window 4") and error.startswith("error: out of memory")
    assert list(by_key(results(tmp_path))) == [("backprop", None), ("truncated", 1)]


@pytest.mark.slow
def test_auto_is_a_row_with_a_window_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"windows": "4,auto", "seqlen": 300, "tolerance": 0.9, "batches": 1, "data": "random"}
    assert sweep(tmp_path, **flags) == 0
    result = results(tmp_path)
    rows = by_key(result)
    assert list(rows) == [("backprop", None), ("truncated", 4), ("truncated", "auto"), ("layer-local", 4)]
    auto = rows["truncated", "auto"]
    assert len(auto["windows"]) == 2 and all(15 < w < 300 for w in auto["windows"])
    assert 0 < auto["relative_error"] < rows["truncated", 4]["relative_error"]
    assert auto["vjps"] == compare.counted_vjps("truncated", auto["windows"], 300)
    assert "; auto: " in capsys.readouterr().out
    with open(tmp_path / "out" / "sweep.csv", newline="") as stream:
        windows = {r["name"]: r["window"] for r in csv.DictReader(stream) if r["vjps"] == str(auto["vjps"])}
    assert windows["layers.1"] == str(auto["windows"][1]) and windows["overall"] == "auto"
    assert sweep(tmp_path, **flags) == 0  # the row is kept
    assert results(tmp_path)["rows"] == result["rows"]


def test_a_trained_vocabulary_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("\x01\x02\x03" * 500)
    assert train_tiny(tmp_path, training__steps=1, training__sample_tokens=0, model__vocab_size=8) == 0
    other = write_text(tmp_path / "other.txt")
    capsys.readouterr()
    assert sweep(tmp_path, "--data.path", str(other), model=tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "out of range for model.vocab_size 8" in error and error.count("\n") == 1
    assert run(["eval", str(tmp_path / "run"), "--path", str(other), "--lengths", "40"]) == 2
    remedy = "name another text with --path, or a run with --model.vocab_size 256"
    assert f"out of range for the 8 embeddings of the model: {remedy}\n" in capsys.readouterr().err
    assert sweep(tmp_path, model=tmp_path / "run", data="random", windows="1", methods="truncated") == 0


def test_a_model_that_has_diverged_is_told(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.layers[0].mixer.D.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="is not finite on this data"):
        Comparison(model, [make_ids(1, 8)], precision="float64").row("truncated", 2)


@pytest.mark.slow
def test_lengths_may_be_written_with_a_suffix(tmp_path: Path) -> None:
    flags = {"windows": "0.5K,2K", "seqlen": "1K", "data": "random", "batches": 1, "methods": "truncated"}
    assert sweep(tmp_path, **flags) == 0
    result = results(tmp_path)
    assert result["settings"]["seqlen"] == 1024
    assert [row["window"] for row in result["rows"]] == [None, 512, None]  # 2,048 covers all there is
