"""The runner of benchmarks: processes, journal, what is left out and published; a dry run of each one."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.tools.measure import journal, passes, process, show
from adjoint.tools.measure.process import ROOT
from benchmarks import (
    bidirectional,
    checkpoints,
    earlier,
    host_weights,
    hyena,
    memory,
    mixers,
    recall,
    report,
    rows_on_ranks,
    runner,
    sequence,
    sources,
    steps,
    wrapped,
)
from benchmarks.convergence.command import Convergence
from benchmarks.gpu.command import Gpu
from benchmarks.kernels.command import Kernels
from benchmarks.runner import Benchmark

# --------------------------------------------------------------------------------------------------- dry runs

SLOW_DRY_RUNS = ("host_weights", "rows_on_ranks")
# Each benchmark, its smallest arguments, how many rows they give, and columns of the results.
DRY: list[tuple[Benchmark, str, int, str]] = [
    (memory.Memory(),
     "--lengths 128 256 --methods exact backprop --repeats 1 --repeat-s 0 --allocators default",
     4, "method label allocator length status memory_bytes ms_per_token processes"),
    (wrapped.Wrapped(), "--lengths 128 --models Llama --repeats 1 --repeat-s 0",
     3, "model way allocator length memory_bytes ms_per_token kept_bytes"),
    (bidirectional.Bidirectional(), "--lengths 128 256 --ways exact checkpoints --repeats 1 --repeat-s 0",
     4, "way allocator length memory_bytes ms_per_token gradients_apart"),
    (hyena.Hyena(), "--lengths 128 256 --repeats 1 --repeat-s 0",
     6, "way allocator length memory_bytes ms_per_token gradients_apart"),
    (checkpoints.Checkpoints(), "--lengths 128 256 --ways all 8",
     4, "way length memory_bytes ms_per_token gradients_apart"),
    (mixers.Mixers(), "--mixers mamba --lengths 64 --rounds 1 --repeats 1",
     3, "mixer length method ms_per_token ratio"),
    (recall.Recall(), "--mixers mamba --seqlen 64 --steps 2", 1, "mixer seqlen steps loss recall needle"),
    (rows_on_ranks.RowsOnRanks(), "--documents 8 --answers 2 --prompt 300 --models Llama",
     4, "batch model weights apart_cpu_seconds together_cpu_seconds gradient_difference"),
    (sources.Sources(), "--tables figure-1 --lengths 4K", 5, "table method tokens bytes"),
    (host_weights.HostWeights(), "--models Bamba-9B --tokens 32K",
     1, "model tokens memory_bytes host_bytes seconds whole_seconds link_bytes hiding_chunks"),
    (Convergence(),
     "--methods backprop truncated-auto --tasks recall-fast --seeds 1 --steps 2 --seqlen 32 --jobs 1",
     2, "task method seeds held_out train core_seconds gap curve_distance accuracy_4 note"),
    (Kernels(), "--op rms_norm --peers torch --size small --repeats 1 --settle 0.001",
     6, "op contender pass size errors status ms roof_ms roof_share"),
]  # fmt: skip
UNDRAWN = (
    "bidirectional",
    "hyena",
    "mixers",
    "rows_on_ranks",
    "sources",
    "host_weights",
    "kernels",
)


@pytest.mark.sampled(53)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("benchmark", "given", "count", "columns"),
    [
        pytest.param(*row, id=row[0].name, marks=pytest.mark.slow if row[0].name in SLOW_DRY_RUNS else ())
        for row in DRY
    ],
)
def test_a_dry_run(
    benchmark: Benchmark, given: str, count: int, columns: str, here: list[Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arguments = [*given.split(), "--out", str(tmp_path)]
    stem = tmp_path / benchmark.name
    assert benchmark.main(arguments) in (0, 1)  # 1: slower, or larger, than it may be
    told = capsys.readouterr().out
    written = json.loads(stem.with_suffix(".json").read_text())
    assert written["benchmark"] == benchmark.name and written["complete"]
    assert written["environment"]["versions"]["torch"] and written["environment"]["commit"]
    assert len(written["rows"]) == count and set(columns.split()) <= set().union(*written["rows"])
    assert stem.with_suffix(".md").read_text() in told
    picture = stem.with_suffix(".png")
    assert picture.exists() != (benchmark.name in UNDRAWN)
    assert benchmark.name in UNDRAWN or picture.stat().st_size > 5_000
    assert not (tmp_path / "partial").exists()
    del here[:]
    assert benchmark.main([*arguments, "--redraw"]) in (0, 1)
    assert capsys.readouterr().out == told and not here


REFUSED = [
    (memory.Memory(), ["--repeats", "0"], "invalid count value: '0'"),
    (memory.Memory(), ["--lengths", "12 Q"], "invalid count value: '12 Q'"),
    (memory.Memory(), ["--max-memory", "lots"], "invalid size value"),
    (memory.Memory(), ["--methods", "magic"], "invalid choice"),
    (memory.Memory(), ["--publish", "--methods", "exact"], "leave out --methods"),
    (memory.Memory(), ["--out", str(runner.RESULTS / "exact-growth")], "with --publish only"),
    (Kernels(), ["--device", "tpu"], "invalid device value"),
    (Kernels(), ["--peers", "magic"], "invalid choice"),
    (Convergence(), ["--methods", "exact-4"], "unknown method 'exact-4'"),
    (Convergence(), ["--methods", "truncated-0"], "window"),
    (Convergence(), ["--seqlen", "16"], "at least 32"),
    (Gpu(), ["--dry-run", "--stages", "z"], "invalid choice"),
]


@pytest.mark.parametrize(("benchmark", "arguments", "line"), REFUSED)
def test_wrong_options_end_with_exit_code_2(
    benchmark: Benchmark, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.parse(arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and line in said.splitlines()[-1] and "Traceback" not in said


def test_a_missing_package_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        memory.Memory().parse([])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and 'mambapy is not installed: pip install -e ".[bench]", or leave' in line
    assert line.endswith("hf-mamba, hf-mamba-checkpoint out of --methods")
    assert memory.Memory().parse(["--methods", "exact"])


# -------------------------------------------------------------------------------------------------- processes


FAILED = [
    ("os.abort()", {"error": "its process ended by SIGABRT"}),
    ("(_ for _ in ()).throw(OSError('disk full\\nmore'))", {"error": "OSError: disk full more"}),
    ("time.sleep(60)", {"error": "took longer than 2 s"}),
    ("sys.exit('all is lost')", {"error": "its process ended with exit code 1: all is lost"}),
    ("torch.empty(1 << 55)", {"out_of_memory": "[enforce fail"}),
]


@pytest.mark.parametrize("points", [FAILED[:1], pytest.param(FAILED[1:], marks=pytest.mark.slow)])
def test_a_point_that_fails_gives_one_line_and_costs_only_itself(
    points: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "1")  # a setting of the shell is not measured
    told: list[Any] = []
    one = process.Process("tests.benchmarks.points", partial=told.append)
    try:
        first = one.measure({})
        assert first["pid"] != os.getpid() and first["heap"] is None
        for do, expected in points:
            assert one.measure({}) == first, "one process serves many points"
            ((kind, said),) = one.measure({"do": do}, 2 if "sleep" in do else 30).items()
            assert {kind} == expected.keys() and said.startswith(expected[kind]) and "\n" not in said
            before, first = first, one.measure({})
            assert (first == before) == do.startswith(("(_", "torch"))
        assert told == [{"n": 1}] * (1 + 3 * len(points))
    finally:
        one.close()


# ----------------------------------------------------------------------------------------------------- runner


class Squares(Benchmark):
    """A benchmark of numbers, in whose measuring something may go wrong."""

    name, module, whole, document, mark = "squares", __name__, ("n",), "docs/squares.md", "squares"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 3])

    def points(self, options: argparse.Namespace) -> list[dict[str, Any]]:
        return [{"n": n} for n in options.n]

    def more_points(self, options: argparse.Namespace, found: runner.Found) -> list[dict[str, Any]]:
        return [{"n": max(result["square"] for _, result in found)}]

    def rows(self, options: argparse.Namespace, found: runner.Found) -> list[dict[str, Any]]:
        return [{**p, "square": r["square"]} for p, r in found if "square" in r]

    def markdown(self, result: dict[str, Any]) -> str:
        return "".join(f"{row['n']}² = {row['square']}\n" for row in result["rows"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with results and a document that show squares of before."""
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "RUNS", tmp_path / "runs")
    (tmp_path / "docs").mkdir()
    marked = "before\n<!-- squares table -->\nold\n<!-- end of squares table -->\nafter\n"
    (tmp_path / "docs" / "squares.md").write_text(marked)
    return tmp_path


def square(monkeypatch: pytest.MonkeyPatch, **trouble: Any) -> list[int]:
    """Has the points measured here; lists them. `trouble`: {"two": …} is what becomes of the second."""
    seen: list[int] = []

    def measured(self: Any, point: dict[str, Any], limit_s: float = 0.0) -> dict[str, Any]:
        seen.append(point["n"])
        if point["n"] == 2 and trouble:
            if trouble["two"] is KeyboardInterrupt:
                raise KeyboardInterrupt
            return trouble["two"]
        return {"square": point["n"] ** 2}

    monkeypatch.setattr(process.Process, "measure", measured)
    return seen


def test_a_stopped_run_goes_on_and_only_an_asked_for_whole_one_is_published(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, document = repository / "runs" / "squares", repository / "docs" / "squares.md"
    before = document.read_text()
    square(monkeypatch, two=KeyboardInterrupt)
    assert Squares().main(["--publish"]) == 130
    stopped = json.loads((here / "squares.json").read_text())
    assert not stopped["complete"] and [row["n"] for row in stopped["rows"]] == [1]
    square(monkeypatch, two={"error": "it broke", "square": 0})
    assert Squares().main(["--publish"]) == 1
    assert "Not published" in capsys.readouterr().err
    seen = square(monkeypatch)
    assert Squares().main([]) == 0
    assert seen == [2], "what was finished is not measured again, nor is what it asked for; what failed is"
    assert document.read_text() == before and not (repository / "results").exists()
    assert not (here / "partial").exists()
    assert Squares().main(["--redraw", "--out", str(here), "--publish"]) == 0
    assert seen == [2]
    published = json.loads((repository / "results" / "squares.json").read_text())
    assert [(row["n"], row["square"]) for row in published["rows"]] == [(1, 1), (2, 4), (3, 9), (9, 81)]
    shown = document.read_text()
    run = report.footer(published["environment"])
    assert f"<!-- squares table -->\n\n1² = 1\n2² = 4\n3² = 9\n9² = 81\n\n*{run}*\n<!-- end" in shown
    assert shown.startswith("before\n") and shown.endswith("after\n")


def test_a_journal_is_of_one_code_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = journal.Journal(path, "mark")
    first.add({"length": 1, "method": "a"}, {"value": 1})
    first.add({"length": 2, "method": "a"}, {"value": 2})
    again = journal.Journal(path, "mark")
    assert again.get({"method": "a", "length": 1}) == {"value": 1}
    again.add({"length": 2, "method": "a"}, {"value": 3})
    assert journal.Journal(path, "mark").get({"length": 2, "method": "a"}) == {"value": 3}
    assert not journal.Journal(path, "mark", fresh=True).done
    other = journal.Journal(path, "another mark")
    assert other.discarded and not other.done
    machine: dict[str, Any] = {"versions": {"torch": "1", "x": "1"}, "gpu": None, "cpu": "c"}
    upgraded = machine | {"versions": {"torch": "1", "x": "2"}}
    source = [report.ROOT / "benchmarks" / "timing.py"]
    assert runner.fingerprint(source, machine, ()) != runner.fingerprint(source, upgraded, ())
    assert runner.fingerprint(source, machine, ["torch"]) == runner.fingerprint(source, upgraded, ["torch"])


# ---------------------------------------------------------------------------------------- memory and the rest


def test_prediction_is_linear_in_the_last_two() -> None:
    assert passes.predicted_bytes([], 4096) is None
    assert passes.predicted_bytes([(1024, 100)], 4096) == 400
    assert passes.predicted_bytes([(256, 5), (4096, 1300), (1024, 100)], 8192) == 1300 + 4096 * 1200 // 3072
    assert passes.predicted_bytes([(1024, 100), (4096, 90)], 8192) == 90  # noise never predicts less
    assert passes.predicted_bytes([(8192, 100)], 4096) is None


def test_methods_alternate_and_what_would_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Memory, "requirements", lambda self, options: {})
    benchmark = memory.Memory()
    options = benchmark.parse(["--lengths", "1K", "4K", "--methods", "exact", "hf-mamba", "--repeats", "2",
                               "--allocators", "default", "--max-memory", "1GB"])  # fmt: skip
    mine, other, *points = benchmark.points(options)
    assert [list(p["ways"]) for p in (mine, other)] == [["plain", "exact"], ["hf-mamba"]]
    order = [(p["repeat"], p["length"], p["curve"]["method"]) for p in points]
    assert order[:3] == [(0, 1024, "exact"), (0, 1024, "hf-mamba"), (0, 4096, "exact")]
    assert [repeat for repeat, _, _ in order] == [0] * 4 + [1] * 4
    near, far = ({"difference": apart, "parameter": "A_log"} for apart in (3e-6, 0.2))
    same: runner.Found = [(mine, {"gradients": {"exact": near}}), (other, {"gradients": {"hf-mamba": near}})]
    (ours, theirs), found = points[2:4], [*same, (points[1], {"memory_bytes": 300 << 20})]
    assert benchmark.skip(ours, found, options) is None
    assert "1.2 GiB predicted, the limit is 0.9" in str(benchmark.skip(theirs, found, options))
    found = [*same, (points[0], {"error": "ended by SIGKILL"})]
    assert benchmark.skip(ours, found, options) == "at 1,024 tokens: ended by SIGKILL"
    assert benchmark.skip(ours, [], options) == "gradients could not be compared"
    found = [(mine, {"gradients": {"exact": far}}), *same[1:]]
    assert benchmark.skip(ours, found, options) == "gradients differ by 2.0e-01 (A_log)"
    assert benchmark.skip(theirs, found, options) is None
    found.append((ours, {"skipped": "gradients differ"}))
    assert benchmark.failed({"rows": benchmark.rows(options, found)})


def test_wrapped_models_of_an_earlier_commit_alternate_with_those_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, code = tmp_path / "copy", "def measure(point):\n    return {'file': __file__}\n"
    shutil.copytree(ROOT / "adjoint", copy / "adjoint")
    (copy / "benchmarks").mkdir()
    (copy / "benchmarks" / "steps.py").write_text(code)
    monkeypatch.setattr(earlier, "package_as_of", lambda commit, *_: (commit, copy))
    benchmark = wrapped.Wrapped()
    small = ["--models", "Llama", "--ways", "wrapped", "--lengths", "128", "--repeats", "2"]
    options = benchmark.parse([*small, "--before", "abc", "--out", str(tmp_path)])
    comparison, *points = benchmark.points(options)
    assert [point["curve"]["way"] for point in points] == ["wrapped", "wrapped as of abc"] * 2
    assert [*comparison["ways"]] == ["plain", "wrapped"]
    measured = [(comparison, {"gradients": {"wrapped": {"difference": 0.0, "parameter": "x", "loss": 1.0}}})]
    assert [benchmark.skip(point, measured, options) for point in points] == [None] * 4
    child = process.Process(benchmark.module, benchmark.env(points[1], options))
    assert child.measure(points[1]) == {"file": str(copy / "benchmarks" / "steps.py")}
    child.close()


@pytest.mark.slow
def test_what_processes_that_share_a_sequence_keep_divides() -> None:
    sizes = {"vocab_size": 256, "d_model": 16, "n_layer": 2, "mixer": ["diagonal", "attention"]}
    point = {"model": {**sizes, "num_attention_heads": 2}, "length": 512, "chunk": 32, "first": 64}
    one, two = (sequence.measure({**point, "passes": 1, "workers": workers}) for workers in (1, 2))
    assert one["keys_bytes"] == 2 * two["keys_bytes"] == 4 * 512 * 16 * 4  # k, v and their cotangents
    assert one["edges_bytes"] < 2 * two["edges_bytes"] == one["edges_bytes"] * 16 // 15  # none after the last


def test_the_longest_sequence_that_fits_is_read_off_a_line_and_measured() -> None:
    sizes = [(1024, 200), (4096, 500), (16384, 1100)]
    at = {limit: passes.fits(sizes, limit) for limit in (100, 800, 1100, 3500)}
    assert [show.fits_text(found) for found in at.values()] == ["< 1K", "~ 10K", "~ 16K", "~ 64K"]
    assert [found["through"] for found in at.values()] == [[], [4096, 16384], [4096, 16384], [4096, 16384]]
    assert show.fits_text(passes.fits([(1024, 4), (2048, 8)], 10**6)) == "> 128K"
    for hardly in ([(1024, 8), (2048, 9)], [(1024, 9), (2048, 9), (4096, 11)]):  # no line through these
        assert show.fits_text(passes.fits(hardly, 10)) == "> 2K"
    benchmark = memory.Memory()
    options = benchmark.parse(["--lengths", "4K", "16K", "--methods", "exact", "backprop-checkpoint"])
    bytes_of = {"exact": lambda n: 500_000_000, "backprop-checkpoint": lambda n: 400_000_000 + 20_000 * n}
    points = [(p, bytes_of[p["curve"]["method"]]) for p in benchmark.points(options) if "ways" not in p]
    found = [(p, {"memory_bytes": 1, "resident_bytes": of(p["length"]), "seconds": [1.0]})
             for p, of in points]  # fmt: skip
    (point,) = benchmark.more_points(options, found)
    assert (point["curve"]["method"], point["length"]) == ("backprop-checkpoint", 80_000 // 1024 * 1024)
    assert benchmark.more_points(options, []) == []
    found.append((point, {"memory_bytes": 1, "resident_bytes": 1_900_000_000, "seconds": [1.0]}))
    result = {"rows": benchmark.rows(options, found), **benchmark.payload(options, found)}
    assert {row["length"] for row in result["rows"]} == {4096, 16384}
    table = benchmark.longest(result)
    assert "| **Exact** | > 16K | > 16K | > 16K |" in table
    assert "| Backprop + checkpointing | ~ 83K (16K and 78K) | ~ " in table
    assert "Backprop + checkpointing takes 1.90 GB at 79,872 tokens.\n" in table


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_heads": 2, "head_dim": 64, "chunk_size": 16}


@pytest.mark.parametrize(
    ("model", "own", "other"),
    [
        (
            memory.METHODS["exact"].model | {"n_layer": 2, "d_model": 64},
            {"method": "Backprop"},
            {"segments": 7},
        ),
        (wrapped.WIDTHS | wrapped.MODELS["Mamba-2"][0] | SMALL, {}, {"method": "MiniSequence"}),
    ],
    ids=["Stack", "transformers"],
)
def test_ways_are_compared_in_float64_throughout(
    model: dict[str, Any], own: dict[str, Any], other: dict[str, Any]
) -> None:
    """In what transformers computes in float32 even in a float64 model, too."""
    ways = {"own": own, "other": other, "exact": {"method": "Exact", "chunk_size": 9}}
    point = {"model": model | {"vocab_size": 16}, "ways": ways, "length": 40}
    point |= {"device": "cpu", "dtype": "float64"}
    first, *others = steps.measure(point)["gradients"].values()
    assert first["difference"] == 0 and all(0 < found["difference"] < 1e-10 for found in others)
    assert torch.ones(1).float().dtype == torch.ones(1, dtype=torch.float64).to(torch.float32).dtype


def test_summary_takes_medians_and_says_why_not() -> None:
    results = [
        {"memory_bytes": mib << 20, "resident_bytes": mib << 21, "seconds": [9.0, s]}
        for mib, s in ((10, 1.0), (30, 4.0), (20, 2.0))
    ]
    row = steps.medians(results, 1024)
    assert (row["memory_bytes"], row["memory_bytes_max"], row["processes"]) == (20 << 20, 30 << 20, 3)
    assert row["ms_per_token"] == pytest.approx(2.0 / 1024 * 1e3, rel=1e-4)
    assert steps.medians([{"error": "broke"}], 1) == {"status": "failed", "note": "broke"}
    assert steps.medians([{"skipped": "too large"}], 1) == {"status": "skipped", "note": "too large"}
    rows = [{"m": "a", "n": 1, "x": 2.0}, {"m": "b", "n": 1, "x": 3.0}, {"m": "b", "n": 2, "x": 3.0}]
    report.add_ratios(rows, ["x"], {"m": "a"}, ["n"])
    assert [row.get("x_ratio") for row in rows] == [1.0, 1.5, None]
