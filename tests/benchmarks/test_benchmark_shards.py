"""Real shards: what is taken from traces, predicted and shown."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from adjoint.cluster.shard import Traced
from adjoint.engine.grid import Tile
from adjoint.engine.schedule import TIMES, HelperTasks, Recv, Run, Send
from adjoint.errors import UserError
from adjoint.plan.simulate import simulate
from benchmarks.shards import command, replay

RUN: dict[str, Any] = {
    **{"name": "exact, 2 shards", "method": "exact", "chunks": 3, "seqlen": 12, "chunk_size": 4},
    **{"window": None, "d_conv": 4, "slots": 2, "memory_bytes": 3 << 20},
    **{"latency_seconds": 0.0, "message_seconds": {"y": 0.0, "dy": 0.0}},
}
ENVIRONMENT = {"cores": 2, "cpu": "a processor", "gpu": None, "versions": {"torch": "2", "ray": "3"},
               "date": "2026-01-02T03:04:05", "commit": "abc"}  # fmt: skip


def uneven(worker: int, tile: Tile) -> float:
    return TIMES[tile.kind] * tile.count + 0.5 * worker + 0.25 * tile.chunk


def traces_of(run: dict[str, Any], slow: float) -> list[list[Traced]]:
    """What workers trace whose tiles take `slow` times `uneven` and whose messages take nothing."""
    made = replay.plan_of(run)
    found = simulate(made, lambda w, t: slow * uneven(w, t), slots=2)
    times = {span.tile: (5 + span.start, 5 + span.stop) for span in found.spans}
    traces: list[list[Traced]] = []
    for worker, program in enumerate(made.programs):
        now, trace = 5.0, []
        for action in program:
            begun, used = now, 0.0
            if isinstance(action, Run):
                (begun, now), used = times[action.tile], slow * uneven(worker, action.tile)
            trace.append(Traced(str(action), begun, now, used))
        traces.append(trace)
    return traces


def a_run(factor: float = 1.0, others: float = 0.0, workers: int = 2, in_turn: int = 1) -> dict[str, Any]:
    """Of `workers` shards, or so many in turn of each; calibration repeats are `uneven`, test repeats took
    `factor` times as long."""
    shards = workers // in_turn
    layers = [[a, b] for a, b in itertools.pairwise(4 * s // shards for s in range(shards + 1))]
    run = {**RUN, "shards": shards, "sequence": in_turn, "layers": layers}
    found = []
    for slow in (1.0, factor, 1.0, factor):
        traces = traces_of(run, slow)
        processes = sum(done.processor for trace in traces for done in trace) * 1.25
        call = replay.wall_seconds(traces) + 1.0
        machine = processes + others * call
        found.append({"traces": traces, "call": call, "processes": processes, "machine": machine})
    return run | replay.summary(run, found)


def test_a_tile_pays_for_the_messages_it_needs_and_makes() -> None:
    forward, backward = Tile("forward", 1, 0), Tile("backward", 1, 0)
    program: list[Any] = [Recv(("y", 0, 0), 0), Run(forward), Send(("y", 1, 0), 2), Send(("S", 1, 0), 2)]
    program += [Recv(("dy", 1, 0), 2), Run(backward), Recv(("dS", 1, 0), 2)]
    used = [1.0, 10.0, 2.0, 3.0, 4.0, 20.0, 5.0]
    trace = [Traced(str(a), 0.0, 99.0, s) for a, s in zip(program, used, strict=True)]
    tiles = replay.tile_seconds(program, trace)
    assert tiles == [(forward, 1 + 10 + 2 + 3), (backward, 4 + 20 + 5)]
    assert sum(seconds for _, seconds in tiles) == sum(used), "nothing is lost, nothing counts twice"
    for other in (trace[:-1], trace[::-1]):
        with pytest.raises(ValueError, match="not the program's"):
            replay.tile_seconds(program, other)


@pytest.mark.parametrize("workers, in_turn", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_workers_that_do_what_the_simulator_says_are_predicted_to_the_last_bit(
    workers: int, in_turn: int
) -> None:
    run = a_run(workers=workers, in_turn=in_turn)
    row = replay.row_of(run)
    assert row["error"] == pytest.approx(0, abs=1e-12)
    assert row["measured_least"] == row["measured_most"]
    made = enumerate(replay.plan_of(run).programs)
    tiles = {str(a.tile): uneven(w, a.tile) for w, program in made for a in program if isinstance(a, Run)}
    assert dict(run["tiles"]) == pytest.approx(tiles)


def test_tiles_come_from_other_repeats_than_wall_times() -> None:
    row = replay.row_of(a_run(factor=1.5))
    assert row["error"] == pytest.approx(1 / 1.5 - 1), "the slow repeats must not have made the prediction"


def test_cores_that_others_use_are_counted() -> None:
    assert replay.row_of(a_run(others=0.5, workers=4))["others_cores"] == pytest.approx(0.5)


def test_runs_are_shown_and_compared_with_their_simulation(tmp_path: Path) -> None:
    runs = [a_run(), a_run(factor=1.5, workers=4), a_run(workers=2, in_turn=2)]
    shards = command.Shards()
    payload = shards.payload(shards.parse([]), [({}, run) for run in runs])
    rows = [replay.row_of(json.loads(json.dumps(run))) for run in runs]
    result = {**payload, "environment": ENVIRONMENT, "rows": rows}
    shards.save(result, tmp_path / "shards")
    assert shards.main(["--redraw", "--out", str(tmp_path)]) == 1
    table = (tmp_path / "shards.md").read_text()
    assert "Not predicted within 20%: exact on 4." in table and "2 cores of a processor" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(runs) and len({line.count("|") for line in lines}) == 1
    assert "-33.3%" in lines[-2] and "2 in turn" in lines[-1]


def test_one_shard_is_run_for_the_first_method_alone() -> None:
    shards = command.Shards()
    points = shards.points(shards.parse(["--shards", "1", "2", "--methods", "truncated", "exact"]))
    groups = [("truncated", 1, 1), ("truncated", 2, 1), ("exact", 2, 1), ("exact", 1, 2)]
    assert [(p["method"], p["shards"], p["sequence"]) for p in points] == groups


@pytest.mark.parametrize("what", [{"method": "truncated", "window": 5, "sequence": 2},
                                  {"method": "layer-local", "helpers": [0, 1]}], ids=str)  # fmt: skip
def test_the_prediction_is_the_simulators(what: dict[str, Any]) -> None:
    run = {**RUN, "layers": [[0, 2], [2, 4]], "seqlen": 30, "chunk_size": 8, "message_seconds": {"y": 0.5}}
    run |= what
    made = replay.plan_of(run)
    actions = [action for program in made.programs for action in program]
    tiles = [a.tile for a in actions if isinstance(a, Run)]
    tiles += [tile for a in actions if isinstance(a, HelperTasks) for unit in a.units for tile in unit]
    times = {tile: 1.0 + 0.25 * (i % 3) for i, tile in enumerate(tiles)}
    run["tiles"] = [[str(tile), seconds] for tile, seconds in times.items()]
    cost, send = lambda worker, tile: times[tile], lambda key: 0.5 * (key[0] == "y")
    expected = simulate(made, cost, send, slots=2, helpers=what.get("helpers", ()))
    assert replay.simulated(run).seconds == expected.seconds
    run["tiles"].pop()
    with pytest.raises(UserError, match="no time for the tile"):
        replay.simulated(run)
