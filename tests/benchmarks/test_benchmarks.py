"""The benchmarks' own machinery: what they predict, keep, leave out and publish."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adjoint import memory as meter
from benchmarks import common, window_time
from benchmarks.memory import command as memory
from benchmarks.memory import report as memory_report


def options(**changes: object) -> argparse.Namespace:
    chosen = memory.parse(["--lengths", "1K", "4K", "--methods", "exact", "hf-mamba2", "--repeats", "2",
                           "--allocator", "default", "--max-memory", "1GB"])  # fmt: skip
    vars(chosen).update(changes)
    return chosen


def result(mib: float, seconds: float = 1.0) -> dict[str, object]:
    return {"memory_bytes": int(mib * 2**20), "baseline_bytes": 0, "seconds": [9.0, seconds], "loss": 5.5}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16384", 16384),
        ("16K", 16384),
        ("1M", 2**20),
        ("18GB", 18 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("7b", 7),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert common.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1e3", "16 Q"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        common.parse_size(text)


def test_wrong_options_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--repeats", "0"],
        ["--lengths", "64"],
        ["--methods", "magic"],
        ["--max-memory", "lots"],
    ):
        with pytest.raises(SystemExit) as stop:
            memory.parse(arguments)
        assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_peak_follows_an_allocation_and_is_reset() -> None:
    code = (
        "from adjoint import memory as meter\n"
        "meter.reset_peak_rss(); now, _ = meter.rss_bytes()\n"
        "block = bytearray(200 << 20); block[::4096] = b'x' * len(block[::4096]); del block\n"
        "peak = meter.rss_bytes()[1] - now\n"
        "meter.reset_peak_rss()\n"
        "print(peak >> 20, meter.rss_bytes()[1] - now >> 20)\n"
    )
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak can be reset on Linux only")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True, check=True
    )
    peak, after = map(int, done.stdout.split())
    assert 195 <= peak <= 230
    assert after < 50


def test_journal_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = common.Journal(path, "mark")
    journal.add({"length": 1, "method": "a"}, {"value": 1})
    journal.add({"length": 2, "method": "a"}, {"value": 2})
    path.write_text(path.read_text()[:-5])  # killed while it wrote the second
    again = common.Journal(path, "mark")
    assert again.get({"method": "a", "length": 1}) == {"value": 1}
    assert again.get({"method": "a", "length": 2}) is None
    again.add({"length": 2, "method": "a"}, {"value": 3})
    assert common.Journal(path, "mark").get({"length": 2, "method": "a"}) == {"value": 3}
    other = common.Journal(path, "another mark")
    assert other.discarded
    assert not other.done


def test_prediction_is_linear_in_the_last_two() -> None:
    assert common.predicted_bytes([], 4096) is None
    assert common.predicted_bytes([(1024, 100)], 4096) == 400
    assert common.predicted_bytes([(256, 5), (4096, 1300), (1024, 100)], 8192) == 1300 + 4096 * 1200 // 3072
    assert common.predicted_bytes([(1024, 100), (4096, 90)], 8192) == 90  # noise never predicts less
    assert common.predicted_bytes([(8192, 100)], 4096) is None


def test_points_that_would_not_fit_are_left_out(tmp_path: Path) -> None:
    chosen = options()
    journal = common.Journal(tmp_path / "j", "m")
    points = {(p["method"], p["length"], p["repeat"]): p for p in memory.grid(chosen)}
    assert len(points) == 8
    journal.add(points["hf-mamba2", 1024, 0], result(300))
    journal.add(points["exact", 1024, 0], result(60))
    assert memory.reason_to_skip(points["exact", 4096, 0], journal, chosen.max_memory) is None
    reason = memory.reason_to_skip(points["hf-mamba2", 4096, 0], journal, chosen.max_memory)
    assert reason is not None
    assert "1.2 GiB predicted, the limit is 1.0" in reason
    journal.add(points["exact", 1024, 0], {"error": "ended by SIGKILL"})
    assert "SIGKILL" in str(memory.reason_to_skip(points["exact", 4096, 0], journal, chosen.max_memory))


def test_points_alternate_methods_before_they_repeat() -> None:
    order = [(p["repeat"], p["length"], p["method"]) for p in memory.grid(options())]
    assert order[:4] == [
        (0, 1024, "exact"),
        (0, 1024, "hf-mamba2"),
        (0, 4096, "exact"),
        (0, 4096, "hf-mamba2"),
    ]
    assert [repeat for repeat, _, _ in order] == [0] * 4 + [1] * 4


def test_summary_takes_medians_and_says_why_not(tmp_path: Path) -> None:
    chosen = options(repeats=3)
    journal = common.Journal(tmp_path / "j", "m")
    for point in memory.grid(chosen):
        if point["method"] == "exact":
            journal.add(point, result((10, 30, 20)[point["repeat"]], (1.0, 4.0, 2.0)[point["repeat"]]))
        else:
            journal.add(point, {"skipped": "too large"} if point["length"] == 4096 else {"error": "broke"})
    rows = {(row["method"], row["length"]): row for row in memory.summarise(chosen, journal)}
    exact = rows["exact", 1024]
    assert exact["memory_bytes"] == 20 * 2**20
    assert exact["ms_per_token"] == pytest.approx(2.0 / 1024 * 1e3, rel=1e-4)
    assert exact["processes"] == 3
    assert (rows["hf-mamba2", 1024]["status"], rows["hf-mamba2", 1024]["note"]) == ("failed", "broke")
    assert (rows["hf-mamba2", 4096]["status"], rows["hf-mamba2", 4096]["note"]) == ("skipped", "too large")


def test_a_failing_child_is_one_line() -> None:
    failed = common.run_child("benchmarks.memory.measure", {"method": "no such method"})
    assert "no such method" in failed["error"]
    assert "\n" not in failed["error"]


def test_readme_shows_the_published_results_and_no_others() -> None:
    published = common.RESULTS / "memory.json"
    readme = (common.ROOT / "README.md").read_text()
    if published.exists():
        rows = json.loads(published.read_text())["rows"]
        table = memory_report.markdown([row for row in rows if row["allocator"] == rows[0]["allocator"]])
    else:
        table = ""
    assert common.with_table(readme, "memory", table) == readme


def test_one_point_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--lengths", "128", "256", "--methods", "exact", "--out", str(tmp_path)]
    assert memory.main([*arguments, "--max-memory", str(meter.total_memory_bytes())]) == 0
    written = json.loads((tmp_path / "memory.json").read_text())
    assert written["complete"]
    assert [row["length"] for row in written["rows"]] == [128, 256]
    for row in written["rows"]:
        assert 2**20 < row["memory_bytes"] < 2**30
        assert row["ms_per_token"] > 0
    assert written["environment"]["versions"]["torch"]
    assert (tmp_path / "memory.csv").read_text().count("\n") == 3
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert "Exact" in capsys.readouterr().out
    assert not os.listdir(tmp_path / "partial")


def test_windows_reach_from_one_to_the_length() -> None:
    windows = window_time.windows_of(16384)
    assert {2**i for i in range(15)} <= set(windows)
    assert {1, 3, 5461, 16383, 16384} <= set(windows)
    assert window_time.windows_of(2) == [1, 2]


def test_ratio_is_the_median_over_pairs_not_of_medians() -> None:
    row = window_time.summarise("dense", 4, [(1.0, 2.0), (10.0, 30.0), (2.0, 2.0)])
    assert (row["ratio_min"], row["ratio"], row["ratio_max"]) == (1.0, 2.0, 3.0)
    assert (row["unwindowed_ms"], row["windowed_ms"], row["pairs"]) == (2000.0, 2000.0, 3)


def test_window_time_refuses_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--windows", "0"], ["--seqlen", "64", "--windows", "65"], ["--repeats", "0"]):
        with pytest.raises(SystemExit) as stop:
            window_time.parse(arguments)
        assert stop.value.code == 2
    assert "between 1 and --seqlen (64)" in capsys.readouterr().err


def test_window_time_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seqlen", "64", "--windows", "1", "7", "64", "--repeats", "2", "--settle", "0"]
    code = window_time.main([*arguments, "--out", str(tmp_path)])
    written = json.loads((tmp_path / "window_time.json").read_text())
    rows = written["rows"]
    assert [(row["scan"], row["window"]) for row in rows] == [
        (scan, window) for scan in window_time.SCANS for window in (1, 7, 64)
    ]
    assert all(row["pairs"] == 2 and 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"] for row in rows)
    assert code == int(max(row["ratio"] for row in rows) > written["limit"])
    assert written["complete"] and written["environment"]["versions"]["torch"]
    assert (tmp_path / "window_time.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "window_time.png").stat().st_size > 10_000
    assert not os.listdir(tmp_path / "partial")


def test_window_time_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seqlen", "8", "--scans", "diagonal", "--windows", "1", "2", "--repeats", "1"]
    measured: list[int] = []

    def stopped(name: str, window: int, *_: object) -> list[list[float]]:
        if window in measured or (window == 2 and not measured[1:]):
            measured.append(-1)
            raise KeyboardInterrupt
        measured.append(window)
        return [[1.0, 1.5]]

    monkeypatch.setattr(window_time, "measure", stopped)
    assert window_time.main([*arguments, "--out", str(tmp_path)]) == 130
    assert not json.loads((tmp_path / "window_time.json").read_text())["complete"]
    assert window_time.main([*arguments, "--out", str(tmp_path)]) == 0
    assert measured == [1, -1, 2]  # the finished window was not measured again
    assert json.loads((tmp_path / "window_time.json").read_text())["complete"]
    assert "Going on: 1 points" in capsys.readouterr().err
