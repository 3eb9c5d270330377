"""The scaling benchmark: its counts, and measured runs against their simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adjoint.engine.program import Run, Share
from adjoint.engine.simulate import simulate
from adjoint.errors import UserError
from adjoint.tools.sweep.compare import truncated_products
from benchmarks.scaling import command, measured


def test_figure_6_rests_on_the_papers_counts() -> None:
    a = command.Assumptions(layers=12, gpus=4)
    rows = command.figure6(a, [10_000], [2_000], 256)
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
    a = command.Assumptions(layers=56)
    for row in command.slices56(a, 10_000, 64):
        assert 0 < row["speedup"] < row["most"]
        assert row["most"] == pytest.approx(row["shards"] * (1 + row["helpers"]) * row["worker_speed"])


LAYERS = {"layers": [[0, 2], [2, 4]], "seqlen": 30, "chunk_size": 8, "d_conv": 4}
MEASURED = {
    "exact": {"method": "exact", "window": None, **LAYERS},
    "in turn": {"method": "exact", "window": None, **LAYERS, "sequence": 2},
    "windowed": {"method": "truncated", "window": 5, **LAYERS},
    "local": {"method": "layer-local", "window": None, "helpers": [0, 1], **LAYERS},
}


@pytest.mark.parametrize("name", list(MEASURED))
def test_measured_runs_are_compared(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {**MEASURED[name], "slots": 2, "message_seconds": {"y": 0.5}}
    made = measured.plan_of(run)
    actions = [action for program in made.programs for action in program]
    tiles = [a.tile for a in actions if isinstance(a, Run)]
    tiles += [tile for a in actions if isinstance(a, Share) for unit in a.units for tile in unit]
    times = {tile: 1.0 + 0.25 * (i % 3) for i, tile in enumerate(tiles)}
    run["tiles"] = [[str(tile), seconds] for tile, seconds in times.items()]
    found = simulate(
        made,
        lambda worker, tile: times[tile],
        lambda key: 0.5 * (key[0] == "y"),
        slots=2,
        helpers=run.get("helpers", ()),
    )
    assert measured.predicted(run) == found.seconds
    path = tmp_path / "run.json"
    for factor, code in ((1.1, 0), (0.9, 0), (1.4, 1)):
        path.write_text(json.dumps({**run, "wall_seconds": [found.seconds * factor] * 3}))
        assert command.main(["--measured", str(path)]) == code
    assert "-28.6%" in capsys.readouterr().out
    run["tiles"].pop()
    with pytest.raises(UserError, match="no time for the tile"):
        measured.predicted(run)


def test_command_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "1K", "2K", "--slice-length", "2K", "--layers", "56", "--windows", "15"]
    assert command.main([*small, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["assumptions"]["layers"] == 56 and {r["context"] for r in written["rows"]} == {1024, 2048}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "LayerLocal, window 256" in capsys.readouterr().out
