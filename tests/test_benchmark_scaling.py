"""The scaling benchmark: its counts, and measured runs against their simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adjoint.engine.simulate import simulate
from adjoint.errors import UserError
from adjoint.tools.sweep.compare import truncated_products
from benchmarks import scaling, scaling_measured


def test_figure_6_rests_on_the_papers_counts() -> None:
    a = scaling.Assumptions(layers=12, gpus=4)
    rows = scaling.figure6(a, [10_000], [2_000], 256)
    days = {(row["method"], row["devices"].partition(" ")[0]): row["days"] for row in rows}
    pairs = 2 * truncated_products(10_000)
    assert days["paper, all pairs", "1"] / days["backpropagation", "1"] == pytest.approx(
        (3 * 10_000 + pairs + 10_000) / (6 * 10_000) / 280
    )
    saved = 1 - days["paper, window 2000", "1"] / days["paper, all pairs", "1"]
    assert saved == pytest.approx(0.64, abs=0.001)  # the forward and the vjps of 𝒞 hardly count
    assert days["Exact", "1"] / days["backpropagation", "1"] == pytest.approx(1.5)
    for method in ("Exact", "Truncated, window 256", "LayerLocal, window 256"):
        assert days["Exact", "1"] / 4 < days[method, "4"] < days["Exact", "1"]


def test_56_slices_speed_up_no_more_than_their_share() -> None:
    a = scaling.Assumptions(layers=56)
    for row in scaling.slices56(a, 20_000, 64):
        assert 0 < row["speedup"] < row["most"]
        assert row["most"] == pytest.approx(row["shards"] * (1 + row["helpers"]) * row["worker_speed"])


_LAYERS = {"layers": [[0, 2], [2, 4]], "seqlen": 30, "chunk_size": 8, "d_conv": 4}
MEASURED = {
    "exact": {"method": "exact", "shards": 2, "chunks": 3},
    "windowed": {"method": "truncated", "window": 5, **_LAYERS},
    "local": {"method": "layer-local", "window": None, "helpers": [0, 1], **_LAYERS},
}


@pytest.mark.parametrize("name", list(MEASURED))
def test_measured_runs_are_compared(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {**MEASURED[name], "slots": 2, "message_seconds": {"y": 0.5}}
    schedule = scaling_measured.schedule_of(run)
    tiles = [(worker, tile) for worker in range(schedule.workers) for tile in schedule.runs(worker)]
    if "helpers" in run:  # whoever ran them
        tiles += [(2 + w, t) for w in (0, 1) for unit in schedule.pool(w).units for t in runs_of(unit)]
    run["tiles"] = [[worker, t.kind, t.chunk, t.layer, 1.0 + worker] for worker, t in tiles]
    times = {t if t.layer is not None else (worker, t): 1.0 + worker for worker, t in tiles}
    found = simulate(
        schedule,
        lambda worker, run: times[run if run.layer is not None else (worker, run)],
        lambda send, w: 0.5 * (send.what == "y"),
        slots=2,
    )
    assert scaling_measured.predicted(run) == found.seconds
    path = tmp_path / "run.json"
    for factor, code in ((1.1, 0), (0.9, 0), (1.4, 1)):
        path.write_text(json.dumps({**run, "wall_seconds": [found.seconds * factor] * 3}))
        assert scaling.main(["--measured", str(path)]) == code
    assert "-28.6%" in capsys.readouterr().out
    run["tiles"].pop()
    with pytest.raises(UserError, match="no time for the tile"):
        scaling_measured.predicted(run)


def test_command_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "1K", "2K", "--slice-length", "2K", "--layers", "56", "--windows", "15"]
    assert scaling.main([*small, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["assumptions"]["layers"] == 56 and {r["context"] for r in written["rows"]} == {1024, 2048}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "LayerLocal, window 256" in capsys.readouterr().out
