"""Runs on clusters of their own: nodes that are lost or taken back, and memory that runs out for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import StoredTensors
from tests.cluster import faults
from tests.cluster.faults import FLAGS, MOMENTS, assert_undisturbed, files, told
from tests.training_helpers import tiny, train_tiny

pytestmark = pytest.mark.slow  # half a minute each, most of it Ray's
REPOSITORY = Path(__file__).parents[2]
LEAST = 6 << 30  # bytes of free memory, half of which may be filled; Ray and two shards take about one GiB
SAID = ("failure", "preemption", "error:")


def on_nodes(folder: Path, settings: dict[str, Any], code: int = 0, **flags: Any) -> list[str]:
    """Trains on a cluster of its own, and ends with `code`; what was said of failures."""
    ended, said = until_the_end(folder, settings, **flags)
    assert ended == code, said
    return [line for line in said.splitlines() if line.startswith(SAID)]


def until_the_end(
    folder: Path, settings: dict[str, Any], limit: float = 300, **flags: Any
) -> tuple[int | None, str]:
    """The exit code and output of such a run, None where it got no further for `limit` seconds: on a busy
    machine it takes its time. None of its processes is left."""
    program = [sys.executable, "-m", "tests.cluster.nodes", json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), faults.VARIABLE: str(fault(folder))}
    environment.pop("RAY_ADDRESS", None)
    written, metrics = folder / "output.txt", folder / "run" / "metrics.jsonl"
    with open(written, "w") as output:
        process = subprocess.Popen(
            [*program, *tiny(folder, **{**FLAGS, **flags})],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        so_far, since = [0, 0], time.monotonic()
        while process.poll() is None and time.monotonic() - since < limit:
            time.sleep(0.1)
            sizes = [file.stat().st_size if file.exists() else 0 for file in (written, metrics)]
            if sizes != so_far:
                so_far, since = sizes, time.monotonic()
        code = process.poll()
    finally:
        end(process)
    return code, written.read_text()


def end(process: subprocess.Popen[bytes]) -> None:
    """A cluster's process, and whatever it has started."""
    if process.poll() is None:
        process.terminate()  # it takes its cluster down
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
    for _ in range(600):  # what has been killed takes a moment to go, and may have started more
        if not (left := of_session(process.pid)):
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    process.wait()


def of_session(session: int) -> list[int]:
    """The processes of a session, without those that have ended and wait for their parent to ask."""
    listed = subprocess.run(["ps", "-eo", "pid=,sess=,stat="], capture_output=True, text=True, check=True)
    rows = map(str.split, listed.stdout.splitlines())
    return [int(pid) for pid, session_id, state in rows if int(session_id) == session and state[0] != "Z"]


def test_a_run_that_gets_no_further_leaves_no_process(
    ask_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    ask_for("backward", rank=1, call=3, how="sleep")
    assert until_the_end(tmp_path, {"nodes": [1, 1]}, limit=30)[0] is None
    assert len(started) > 1 and not of_session(started[0].pid)


def fault(folder: Path) -> Path:
    return folder / "fault.json"


@pytest.fixture
def ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`faults.ask_for`, of this test's cluster."""
    monkeypatch.setenv(faults.VARIABLE, str(fault(tmp_path)))
    return faults.ask_for


@pytest.mark.parametrize("point, call", MOMENTS)
def test_another_node_takes_the_place_of_a_lost_one(
    undisturbed: Path, ask_for: Any, tmp_path: Path, point: str, call: int
) -> None:
    ask_for(point, rank=1, call=call, how="node")
    said = on_nodes(tmp_path, {"nodes": [1, 1, 1]})
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert len(said) == 1
    assert "failure 1 of at most 3 at step 5: shard 1: node lost: Node Id: " in said[0]


def test_a_node_that_comes_later_will_do(undisturbed: Path, ask_for: Any, tmp_path: Path) -> None:
    ask_for("backward", rank=0, call=18, how="node")
    said = on_nodes(tmp_path, {"nodes": [1, 1], "replace": 3})
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert len(said) == 1
    assert "shard 0: node lost: Node Id: " in said[0]


def test_a_node_that_is_taken_back_is_no_failure(undisturbed: Path, ask_for: Any, tmp_path: Path) -> None:
    ask_for("backward", rank=1, call=18, how="node")
    said = on_nodes(tmp_path, {"nodes": [1, 1, 1], "lose": "preempted"}, cluster__max_failures=0)
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert len(said) == 1
    assert said[0].startswith("preemption 1 at step 5: shard 1: preempted: its node was taken back")


def test_without_a_place_the_run_stops_and_says_how_to_go_on(ask_for: Any, tmp_path: Path) -> None:
    ask_for("forward", rank=1, call=18, how="node")
    said = on_nodes(tmp_path, {"nodes": [1, 1]}, code=2, cluster__start_timeout=30)
    assert len(said) == 2
    assert "2 workers with 1 CPU each are asked for, but the cluster has" in said[1]
    assert "what fits: 1;" in said[1] and said[1].endswith("; then continue with --resume auto")


def test_auto_goes_on_with_the_nodes_that_are_left(ask_for: Any, tmp_path: Path) -> None:
    """A run goes on with fewer nodes, to the last bit in float64 where no table is tied."""
    flags = {"model__n_layer": 3, "model__tie_embeddings": "false", "training__precision": "float64"}
    undisturbed = tmp_path / "whole"
    undisturbed.mkdir()
    assert train_tiny(undisturbed, **{**FLAGS, **flags, "cluster__shards": 0}) == 0
    ask_for("backward", rank=2, call=18, how="node")
    said = on_nodes(tmp_path, {"nodes": [1, 1, 1]}, cluster__shards="auto", **flags)
    assert len(said) == 1
    assert "shard 2: node lost" in said[0]
    weights, theirs = (
        StoredTensors(r / "run/checkpoints/step-00000006", "model") for r in (tmp_path, undisturbed)
    )
    assert sorted(files(tmp_path / "run"))[0].endswith("of-00002.safetensors")
    assert weights.files_by_name.keys() == theirs.files_by_name.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in weights.files_by_name)
    assert told(tmp_path / "run") == told(undisturbed / "run")


@pytest.mark.parametrize("point, call", MOMENTS)
def test_a_shard_that_takes_all_memory_is_killed_and_made_anew(
    undisturbed: Path, ask_for: Any, tmp_path: Path, point: str, call: int
) -> None:
    """Killed by Ray's memory monitor, which has been given a low limit."""
    free = next(s for s in Path("/proc/meminfo").read_text().splitlines() if s.startswith("MemAvailable"))
    room = (int(free.split()[1]) << 10) // 2  # much, for others use this machine's memory too
    if room < LEAST // 2:
        pytest.skip("needs 6 GiB of free memory")
    ask_for(point, rank=1, call=call, how="fill")
    said = on_nodes(tmp_path, {"nodes": [2], "room": room}, cluster__max_failures=5)
    assert_undisturbed(tmp_path / "run", undisturbed)
    assert said, "nobody was killed"
    assert all("out of memory: killed by Ray, its node's memory was full" in line for line in said), said
