"""Runs of shards against their simulation: what is taken from a trace, and what is made of it."""

from __future__ import annotations

import json
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from adjoint.cluster import schedule as schedules
from adjoint.cluster.schedule import Recv, Run, Schedule, Send
from adjoint.cluster.shard import Tile
from adjoint.cluster.simulate import simulate
from adjoint.cluster.transport import local_transports
from benchmarks import scaling, scaling_measured, shards, shards_report

RUN: dict[str, Any] = {
    "name": "exact, 2 shards",
    "method": "exact",
    "shards": 2,
    "chunks": 3,
    "slots": 2,
    "latency_seconds": 0.0,
    "message_seconds": {"y": 0.0, "dy": 0.0},
    "message_whole_seconds": 0.001,
    "environment": {
        "cores": 2,
        "cpu": "a processor",
        "versions": {"torch": "2", "ray": "3"},
        "date": "2026-01-02T03:04:05",
        "commit": "abc",
    },
}


def traces_of(
    schedule: Schedule, seconds: Any, slots: int | None = 2, later: float = 5.0
) -> list[list[Tile]]:
    """What shards trace whose tiles take `seconds(worker, run)` and whose messages take nothing."""
    found = simulate(schedule, seconds, slots=slots, spans=True)
    times = {(span.worker, span.run): (later + span.start, later + span.stop) for span in found.spans}
    traces: list[list[Tile]] = []
    for worker, program in enumerate(schedule.programs):
        now, trace = later, []
        for action in program:
            if isinstance(action, Run):
                begun, now = times[worker, action]
                trace.append(Tile(str(action), begun, now, seconds(worker, action)))
            else:
                trace.append(Tile(str(action), now, now, 0.0))
        traces.append(trace)
    return traces


def uneven(worker: int, run: Run) -> float:
    return 1.0 + 0.5 * worker + 0.25 * run.chunk + (2.0 if run.kind == "backward" else 0.0)


# ------------------------------------------------------------------------------------------------ from traces


def test_a_tile_pays_for_the_messages_it_needs_and_makes() -> None:
    program: list[Any] = [Recv(0, "y", 0), Run("forward", 0), Send(2, "y", 0), Send(2, "y", 1)]
    program += [Recv(2, "dy", 0), Run("backward", 0), Recv(2, "table", 0)]
    used = [1.0, 10.0, 2.0, 3.0, 4.0, 20.0, 5.0]
    trace = [Tile(str(a), 0.0, 99.0, s) for a, s in zip(program, used, strict=True)]
    tiles = scaling_measured.tile_seconds(program, trace)
    assert tiles == [(Run("forward", 0), 1 + 10 + 2 + 3), (Run("backward", 0), 4 + 20 + 5)]
    assert sum(seconds for _, seconds in tiles) == sum(used), "nothing is lost, nothing counts twice"


def test_a_trace_of_another_program_is_refused() -> None:
    program = schedules.exact(1, 2).programs[0]
    trace = [Tile(str(action), 0.0, 1.0, 1.0) for action in program]
    with pytest.raises(ValueError, match="not the program's"):
        scaling_measured.tile_seconds(program, trace[:-1])
    with pytest.raises(ValueError, match="not the program's"):
        scaling_measured.tile_seconds(program, trace[::-1])


def test_tiles_are_means_over_repeats() -> None:
    schedule = schedules.exact(2, 3)
    repeats = [traces_of(schedule, lambda w, r, f=f: f * uneven(w, r)) for f in (1.0, 2.0)]
    for worker, kind, chunk, layer, seconds in scaling_measured.mean_tiles(schedule, repeats):
        assert seconds == pytest.approx(1.5 * uneven(worker, Run(kind, chunk, layer)))


# -------------------------------------------------------------------------------------------- the prediction


def measured(factor: float = 1.0, others: float = 0.0, shards_: int = 2, repeats: int = 2) -> dict[str, Any]:
    """A run whose calibration repeats are `uneven` and whose test repeats took `factor` times as long."""
    run = {**RUN, "shards": shards_}
    schedule = scaling_measured.schedule_of(run)
    found = []
    for number in range(2 * repeats):
        slow = factor if number % 2 else 1.0
        traces = traces_of(schedule, lambda w, r, slow=slow: slow * uneven(w, r))
        processes = sum(tile.processor for trace in traces for tile in trace) * 1.25
        call = shards.wall_seconds(traces) + 1.0
        found.append({"traces": traces, "call": call, "processes": processes,
                      "machine": processes + others * call})  # fmt: skip
    return run | shards.summary(run, found)


@pytest.mark.parametrize("shards_", [1, 2, 4])
def test_shards_that_do_what_the_simulator_says_are_predicted_to_the_last_bit(shards_: int) -> None:
    row = shards.row_of(measured(shards_=shards_))
    assert row["error"] == pytest.approx(0, abs=1e-12)
    assert row["measured_least"] == row["measured_most"]
    assert row["call_seconds"] == pytest.approx(row["measured_seconds"] + 1)
    assert row["outside_share"] == pytest.approx(0.2)
    assert row["core_each_seconds"] <= row["predicted_seconds"] + 1e-12
    assert (row["core_each_seconds"] < row["predicted_seconds"]) == (shards_ == 4)


def test_tiles_come_from_other_repeats_than_wall_times() -> None:
    row = shards.row_of(measured(factor=1.5))
    assert row["error"] == pytest.approx(1 / 1.5 - 1), "the slow repeats must not have made the prediction"


def test_cores_that_others_use_are_taken_off() -> None:
    run = measured(others=0.5, shards_=4)
    row = shards.row_of(run)
    assert row["others_cores"] == pytest.approx(0.5)
    assert row["left_seconds"] == pytest.approx(scaling_measured.predicted({**run, "slots": 1.5}))
    assert row["left_seconds"] > row["predicted_seconds"]
    crowded = shards.row_of(measured(others=2.5))
    assert crowded["left_seconds"] is None, "nothing is left"


def test_a_layers_tile_may_be_anyones() -> None:
    layers, parts = [range(0, 1), range(1, 2)], None
    run = {"method": "layer-local", "layers": [[0, 1], [1, 2]], "seqlen": 2, "chunk_size": 1, "window": None}
    schedule = schedules.layer_local(layers, 2, parts)
    tiles = [(w, r) for w in range(2) for r in schedule.runs(w)]
    rows = [[w, r.kind, r.chunk, r.layer, 1.0] for w, r in tiles]
    elsewhere = [[7 if row[3] is not None else row[0], *row[1:]] for row in rows]
    assert scaling_measured.predicted({**run, "tiles": rows}) == scaling_measured.predicted(
        {**run, "tiles": elsewhere}
    )


# ------------------------------------------------------------------------------------------ what is published


def test_a_written_run_is_compared_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = measured(factor=1.5)
    path = tmp_path / "run.json"
    shards.write_run(run, path)
    again = json.loads(path.read_text())
    assert again.keys() == run.keys() and again["environment"] == run["environment"]
    expected = scaling_measured.compared(run)
    for key, value in scaling_measured.compared(again).items():
        assert value == (pytest.approx(expected[key], abs=1e-5) if key != "name" else run["name"])
    assert scaling.main(["--measured", str(path)]) == 1
    assert "-33.3%" in capsys.readouterr().out


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [measured(), measured(factor=1.5, shards_=4)]
    rows = [shards.row_of(run) for run in runs]
    options = shards.parse(["--out", str(tmp_path)])
    payload = {**vars(options), "environment": RUN["environment"], "tolerance": 0.2}
    shards_report.show(rows, runs, payload, tmp_path / "shards")
    table = (tmp_path / "shards.md").read_text()
    assert "Not predicted within 20%: exact on 4." in table and "2 cores of a processor" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows) and len({line.count("|") for line in lines}) == 1
    assert "-33.3%" in lines[-1]
    assert (tmp_path / "shards.png").stat().st_size > 10_000
    assert "All wall times are predicted" in shards_report.markdown(rows[:1], payload)


def test_a_phase_lasts_from_the_first_action_of_any_shard_to_the_last() -> None:
    early = [Tile("forward chunk 0", 1.0, 2.0, 1.0), Tile("backward chunk 0", 2.0, 5.0, 1.0)]
    late = [Tile("forward chunk 0", 3.0, 3.5, 0.5), Tile("backward chunk 0", 3.5, 4.0, 0.5)]
    assert shards.wall_seconds([early, late]) == shards.wall_seconds([late, early]) == 4.0


def test_a_drawing_begins_with_the_first_action() -> None:
    schedule = schedules.exact(2, 3)
    traces = traces_of(schedule, uneven, later=100.0)
    drawn = shards.spans(schedule, traces)
    assert len(drawn) == 2 * 2 * 3
    assert min(span[4] for span in drawn) == 0
    assert max(span[5] for span in drawn) == pytest.approx(shards.wall_seconds(traces))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--shards", "9"], "--shards must lie between 1 and --layers"),
        (["--repeats", "0"], "--repeats must be 1 or more"),
        (["--window", "4K"], "--window must be smaller than --seqlen"),
        (["--methods", "magic"], "invalid choice"),
    ],
)
def test_wrong_options_end_with_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        shards.parse(arguments)
    assert stop.value.code == 2 and line in capsys.readouterr().err


def test_one_shard_is_run_for_the_first_method_alone() -> None:
    options = shards.parse(["--shards", "1", "2", "--methods", "truncated", "exact"])
    assert shards.groups(options) == [("truncated", 1), ("truncated", 2), ("exact", 2)]


# --------------------------------------------------------------------------------------------------- messages


def test_both_ends_of_the_exchange(one_thread: None) -> None:
    ends: list[Any] = [None, None]

    def end(rank: int, transport: Any) -> None:
        actor = types.SimpleNamespace(shard=types.SimpleNamespace(transport=transport))
        ends[rank] = shards.exchange(actor, rank, (1, 3, 2), 5)

    threads = [threading.Thread(target=end, args=pair) for pair in enumerate(local_transports(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (begun, handed), (received, _) = ends
    assert len(begun) == len(handed) == len(received) == 5
    for turn in range(5):
        assert begun[turn] <= handed[turn] and begun[turn] <= received[turn]
        assert turn == 4 or received[turn] <= begun[turn + 1], "the next one leaves after the answer"


@pytest.mark.slow
def test_the_command_runs_shards(
    ray_on_loopback: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--d-model", "16", "--layers", "2", "--seqlen", "64", "--chunk-size", "16", "--window", "8"]
    code = shards.main(["--shards", "1", "2", "--repeats", "1", "--out", str(tmp_path), *small])
    assert code in (0, 1)  # how long it takes here is not for a test to say
    written = json.loads((tmp_path / "shards.json").read_text())
    groups = [("exact", 1), ("exact", 2), ("truncated", 2), ("layer-local", 2)]
    assert [(row["method"], row["shards"]) for row in written["rows"]] == groups
    for row in written["rows"]:
        assert row["predicted_seconds"] > 0 and row["measured_seconds"] > 0
        assert row["tiles_seconds"] > 0 and row["outside_share"] < 1
    run = json.loads((tmp_path / "shards" / "exact-2.json").read_text())
    schedule = scaling_measured.schedule_of(run)
    done = sorted((worker, str(r)) for worker in range(2) for r in schedule.runs(worker))
    assert sorted((w, str(Run(kind, chunk, layer))) for w, kind, chunk, layer, _ in run["tiles"]) == done
    assert sorted((w, str(Run(kind, chunk, layer))) for w, kind, chunk, layer, *_ in run["spans"]) == done
    assert (tmp_path / "shards.png").stat().st_size > 10_000
    assert "exact, 2 shards: predicted" in capsys.readouterr().err
