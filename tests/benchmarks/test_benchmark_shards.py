"""Runs of shards against their simulation: what is taken from a trace, and what is made of it."""

from __future__ import annotations

import itertools
import json
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from adjoint.cluster.shard import Traced
from adjoint.engine.grid import Tile
from adjoint.engine.program import Plan, Recv, Run, Send
from adjoint.engine.simulate import simulate, uniform
from benchmarks.scaling import command as scaling
from benchmarks.scaling import measured
from benchmarks.shards import command, measure, report
from tests.cluster.threads import local_transports

RUN: dict[str, Any] = {
    "name": "exact, 2 shards",
    "method": "exact",
    "shards": 2,
    "sequence": 1,
    "chunks": 3,
    "layers": [[0, 2], [2, 4]],
    "seqlen": 12,
    "chunk_size": 4,
    "window": None,
    "d_conv": 4,
    "slots": 2,
    "latency_seconds": 0.0,
    "message_seconds": {"y": 0.0, "dy": 0.0},
    "message_whole_seconds": 0.001,
    "memory_bytes": 3 << 20,
    "environment": {
        "cores": 2,
        "cpu": "a processor",
        "gpu": None,
        "versions": {"torch": "2", "ray": "3"},
        "date": "2026-01-02T03:04:05",
        "commit": "abc",
    },
}


def traces_of(made: Plan, seconds: Any, slots: int | None = 2, later: float = 5.0) -> list[list[Traced]]:
    """What workers trace whose tiles take `seconds(worker, tile)` and whose messages take nothing."""
    found = simulate(made, seconds, slots=slots, spans=True)
    times = {span.tile: (later + span.start, later + span.stop) for span in found.spans}
    traces: list[list[Traced]] = []
    for worker, program in enumerate(made.programs):
        now, trace = later, []
        for action in program:
            if isinstance(action, Run):
                begun, now = times[action.tile]
                trace.append(Traced(str(action), begun, now, seconds(worker, action.tile)))
            else:
                trace.append(Traced(str(action), now, now, 0.0))
        traces.append(trace)
    return traces


def uneven(worker: int, tile: Tile) -> float:
    return uniform(worker, tile) + 0.5 * worker + 0.25 * tile.chunk


def run_of(workers: int, in_turn: int = 1) -> dict[str, Any]:
    """Of `workers` shards, or so many in turn of each."""
    cuts = [4 * s // (workers // in_turn) for s in range(workers // in_turn + 1)]
    layers = [[a, b] for a, b in itertools.pairwise(cuts)]
    return {**RUN, "shards": len(layers), "sequence": in_turn, "layers": layers}


# ------------------------------------------------------------------------------------------------ from traces


def test_a_tile_pays_for_the_messages_it_needs_and_makes() -> None:
    forward, backward = Tile("F", 1, 0), Tile("B", 1, 0)
    program: list[Any] = [Recv(("y", 0, 0), 0), Run(forward), Send(("y", 1, 0), 2), Send(("S", 1, 0), 2)]
    program += [Recv(("dy", 1, 0), 2), Run(backward), Recv(("dS", 1, 0), 2)]
    used = [1.0, 10.0, 2.0, 3.0, 4.0, 20.0, 5.0]
    trace = [Traced(str(a), 0.0, 99.0, s) for a, s in zip(program, used, strict=True)]
    tiles = measured.tile_seconds(program, trace)
    assert tiles == [(forward, 1 + 10 + 2 + 3), (backward, 4 + 20 + 5)]
    assert sum(seconds for _, seconds in tiles) == sum(used), "nothing is lost, nothing counts twice"


def test_a_trace_of_another_program_is_refused() -> None:
    program = measured.plan_of(run_of(1)).programs[0]
    trace = [Traced(str(action), 0.0, 1.0, 1.0) for action in program]
    with pytest.raises(ValueError, match="not the program's"):
        measured.tile_seconds(program, trace[:-1])
    with pytest.raises(ValueError, match="not the program's"):
        measured.tile_seconds(program, trace[::-1])


def test_tiles_are_means_over_repeats() -> None:
    made = measured.plan_of(RUN)
    repeats = [traces_of(made, lambda w, t, f=f: f * uneven(w, t)) for f in (1.0, 2.0)]
    found = dict(measured.mean_tiles(made, repeats))
    runs = [(w, a.tile) for w, program in enumerate(made.programs) for a in program if isinstance(a, Run)]
    assert found == {str(tile): pytest.approx(1.5 * uneven(w, tile)) for w, tile in runs}


# -------------------------------------------------------------------------------------------- the prediction


def a_run(factor: float = 1.0, others: float = 0.0, workers: int = 2, in_turn: int = 1) -> dict[str, Any]:
    """A run whose calibration repeats are `uneven` and whose test repeats took `factor` times as long."""
    run = run_of(workers, in_turn)
    made = measured.plan_of(run)
    found = []
    for number in range(4):
        slow = factor if number % 2 else 1.0
        traces = traces_of(made, lambda w, t, slow=slow: slow * uneven(w, t))
        processes = sum(done.processor for trace in traces for done in trace) * 1.25
        call = command.wall_seconds(traces) + 1.0
        found.append({"traces": traces, "call": call, "processes": processes,
                      "machine": processes + others * call})  # fmt: skip
    return run | command.summary(run, found)


@pytest.mark.parametrize("workers, in_turn", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_workers_that_do_what_the_simulator_says_are_predicted_to_the_last_bit(
    workers: int, in_turn: int
) -> None:
    row = command.row_of(a_run(workers=workers, in_turn=in_turn))
    assert row["error"] == pytest.approx(0, abs=1e-12)
    assert row["measured_least"] == row["measured_most"]
    assert row["call_seconds"] == pytest.approx(row["measured_seconds"] + 1)
    assert row["outside_share"] == pytest.approx(0.2)
    assert row["core_each_seconds"] <= row["predicted_seconds"] + 1e-12
    assert (row["core_each_seconds"] < row["predicted_seconds"]) == (workers == 4)


def test_tiles_come_from_other_repeats_than_wall_times() -> None:
    row = command.row_of(a_run(factor=1.5))
    assert row["error"] == pytest.approx(1 / 1.5 - 1), "the slow repeats must not have made the prediction"


def test_cores_that_others_use_are_taken_off() -> None:
    run = a_run(others=0.5, workers=4)
    row = command.row_of(run)
    assert row["others_cores"] == pytest.approx(0.5)
    assert row["left_seconds"] == pytest.approx(measured.predicted({**run, "slots": 1.5}))
    assert row["left_seconds"] > row["predicted_seconds"]
    crowded = command.row_of(a_run(others=2.5))
    assert crowded["left_seconds"] is None, "nothing is left"


# ------------------------------------------------------------------------------------------ what is published


def test_a_written_run_is_compared_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(factor=1.5)
    path = tmp_path / "run.json"
    command.write_run(run, path)
    again = json.loads(path.read_text())
    assert again.keys() == run.keys() and again["environment"] == run["environment"]
    expected = measured.compared(run)
    for key, value in measured.compared(again).items():
        assert value == (pytest.approx(expected[key], abs=1e-5) if key != "name" else run["name"])
    assert scaling.main(["--measured", str(path)]) == 1
    assert "-33.3%" in capsys.readouterr().out


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [a_run(), a_run(factor=1.5, workers=4), a_run(workers=2, in_turn=2)]
    rows = [command.row_of(run) for run in runs]
    options = command.parse(["--out", str(tmp_path)])
    payload = {**vars(options), "environment": RUN["environment"], "tolerance": 0.2}
    report.show(rows, runs, payload, tmp_path / "shards")
    table = (tmp_path / "shards.md").read_text()
    assert "Not predicted within 20%: exact on 4." in table and "2 cores of a processor" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows) and len({line.count("|") for line in lines}) == 1
    assert "-33.3%" in lines[-2] and "2 in turn" in lines[-1]
    assert (tmp_path / "shards.png").stat().st_size > 10_000
    assert "All wall times are predicted" in report.markdown(rows[:1], payload)


def test_a_phase_lasts_from_the_first_action_of_any_shard_to_the_last() -> None:
    early = [Traced("F(1,0)", 1.0, 2.0, 1.0), Traced("B(1,0)", 2.0, 5.0, 1.0)]
    late = [Traced("F(2,0)", 3.0, 3.5, 0.5), Traced("B(2,0)", 3.5, 4.0, 0.5)]
    assert command.wall_seconds([early, late]) == command.wall_seconds([late, early]) == 4.0


def test_a_drawing_begins_with_the_first_action() -> None:
    made = measured.plan_of(RUN)
    traces = traces_of(made, uneven, later=100.0)
    drawn = command.spans(made, traces)
    assert len(drawn) == sum(isinstance(a, Run) for program in made.programs for a in program)
    assert min(span[2] for span in drawn) == 0
    assert max(span[3] for span in drawn) == pytest.approx(command.wall_seconds(traces))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--shards", "9"], "--shards must lie between 1 and --layers"),
        (["--in-turn", "17"], "--in-turn must lie between 1 and the number of chunks (16)"),
        (["--repeats", "0"], "--repeats must be 1 or more"),
        (["--window", "4K"], "--window must be smaller than --seqlen"),
        (["--methods", "magic"], "invalid choice"),
    ],
)
def test_wrong_options_end_with_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.parse(arguments)
    assert stop.value.code == 2 and line in capsys.readouterr().err


def test_one_shard_is_run_for_the_first_method_alone() -> None:
    options = command.parse(["--shards", "1", "2", "--methods", "truncated", "exact"])
    assert command.groups(options) == [
        ("truncated", 1, 1),
        ("truncated", 2, 1),
        ("exact", 2, 1),
        ("exact", 1, 2),
    ]


# --------------------------------------------------------------------------------------------------- messages


def test_both_ends_of_the_exchange(one_thread: None) -> None:
    ends: list[Any] = [None, None]

    def end(rank: int, transport: Any) -> None:
        actor = types.SimpleNamespace(shard=types.SimpleNamespace(transport=transport))
        ends[rank] = measure.exchange(actor, rank, (1, 3, 2), 5)

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
    code = command.main(["--shards", "1", "2", "--repeats", "1", "--out", str(tmp_path), *small])
    assert code in (0, 1)  # how long it takes here is not for a test to say
    written = json.loads((tmp_path / "shards.json").read_text())
    groups = [("exact", 1, 1), ("exact", 2, 1), ("truncated", 2, 1), ("layer-local", 2, 1), ("exact", 1, 2)]
    assert [(row["method"], row["shards"], row["sequence"]) for row in written["rows"]] == groups
    for row in written["rows"]:
        assert row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 and row["memory_bytes"] > 0
        assert row["tiles_seconds"] > 0 and row["outside_share"] < 1
    for name in ("exact-2", "exact-in-turn-2"):
        run = json.loads((tmp_path / "shards" / f"{name}.json").read_text())
        programs = enumerate(measured.plan_of(run).programs)
        done = sorted((w, str(a.tile)) for w, program in programs for a in program if isinstance(a, Run))
        assert sorted((w, tile) for w, tile, *_ in run["spans"]) == done
        assert sorted(tile for tile, _ in run["tiles"]) == sorted(tile for _, tile in done)
    assert (tmp_path / "shards.png").stat().st_size > 10_000
    assert "exact, 2 shards: predicted" in capsys.readouterr().err
