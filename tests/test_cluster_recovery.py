"""Shards that die, are killed, hang or fail: which cause is named, and a run that ends as if undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cluster_faults
import pytest
import torch
from training_helpers import metrics, train_tiny

from adjoint.checkpoint import list_checkpoints
from adjoint.cluster import group as group_module
from adjoint.cluster.recovery import Cause, ShardFailure, cause_of, rank_causes

FLAGS: dict[str, Any] = {
    "cluster__shards": 2,
    "cluster__hang_timeout": 8,
    "method__chunk_size": 20,  # four chunks of a sequence
    "training__eval_every": 0,
    "training__sample_tokens": 0,
    "training__save_every": 2,
    "training__steps": 6,
    "data__eval_tokens": 0,
}


def files(run: Path) -> dict[str, bytes]:
    """Everything of the last checkpoint that does not tell the time."""
    last = list_checkpoints(run / "checkpoints")[-1]
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def told(run: Path) -> list[dict[str, Any]]:
    machine = {"tokens_per_second", "peak_memory_bytes"}
    return [{k: v for k, v in row.items() if k not in machine} for row in metrics(run)]


@pytest.fixture(scope="module")
def undisturbed(ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_tiny(folder, **FLAGS) == 0
    return folder / "run"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "ShardActor", cluster_faults.FaultyActor)


def recovers(tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert train_tiny(tmp_path, **FLAGS) == 0
    run = tmp_path / "run"
    assert told(run) == told(undisturbed)
    assert files(run) == files(undisturbed)
    assert not list((run / "checkpoints").glob(".*"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_shard_killed_in_backward_is_made_anew(
    undisturbed: Path, faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_faults.ask_for("backward", rank=1, call=4 * 2 + 3, how="kill")  # in step 3
    said = recovers(tmp_path, undisturbed, capsys)
    assert "failure 1 of at most 3 at step 3: shard 1: died" in said
    assert "going on after step 2" in said


# (point, how often it is passed before)
MOMENTS = [("forward", 4 * 4 + 2), ("backward", 4 * 4 + 2), ("step", 5), ("save", 4)]


@pytest.mark.slow
@pytest.mark.parametrize("how, rank", [("exit", 0), ("kill", 1), ("stop", 0), ("stop", 1), ("error", 1)])
@pytest.mark.parametrize("point, call", MOMENTS)
def test_any_failure_at_any_moment_changes_nothing(
    undisturbed: Path,
    faulty: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    how: str,
    point: str,
    call: int,
) -> None:
    cluster_faults.ask_for(point, rank, call, how)
    said = recovers(tmp_path, undisturbed, capsys)
    kind = {"exit": "died", "kill": "died", "stop": "hung", "error": "error"}[how]
    assert f"shard {rank}: {kind}" in said


@pytest.mark.slow
def test_before_the_first_checkpoint_the_run_begins_again(
    undisturbed: Path, faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_faults.ask_for("forward", rank=0, call=6, how="exit")
    assert "going on after step 0" in recovers(tmp_path, undisturbed, capsys)


@pytest.mark.slow
def test_a_step_that_always_fails_stops_the_run_with_its_cause(
    ray_on_loopback: None, faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_faults.ask_for("backward", rank=1, call=3, how="error", again=True)
    assert train_tiny(tmp_path, **FLAGS, cluster__max_failures=1) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines  # the first was recovered from
    assert "shard 1: error: ZeroDivisionError: division by zero" in lines[1]
    assert "that is failure 2 and cluster.max_failures is 1" in lines[1]


# ------------------------------------------------------------------------------------------- causes alone


def test_the_cause_that_explains_the_others_is_named() -> None:
    causes = [
        Cause("connection", 0, "RuntimeError: Connection closed by peer"),
        Cause("hung", 3, ""),
        Cause("died", 2, "SIGKILL"),
        Cause("error", 1, "ZeroDivisionError"),
    ]
    assert [c.rank for c in rank_causes(causes)] == [2, 3, 1, 0]
    failure = ShardFailure(causes, "accumulate")
    assert str(failure) == "shard 2: died: SIGKILL (during accumulate)"
    assert not failure.preempted
    worse = [*causes, Cause("out of memory", 0, ""), Cause("node lost", 5, "")]
    assert rank_causes(worse)[0] == Cause("out of memory", 0, "")


def test_exceptions_of_ray_are_told_apart() -> None:
    exceptions = pytest.importorskip("ray.exceptions")

    def task_error(cause: Exception) -> Any:
        return exceptions.RayTaskError("call", "Traceback\n", cause)

    assert cause_of(exceptions.OutOfMemoryError("memory"), 1).kind == "out of memory"
    assert cause_of(exceptions.ActorDiedError(), 1).kind == "died"
    assert cause_of(exceptions.NodeDiedError("gone"), 1).kind == "node lost"
    assert cause_of(task_error(RuntimeError("[gloo] Connection closed by peer")), 1).kind == "connection"
    assert cause_of(task_error(ZeroDivisionError("division by zero")), 1).kind == "error"
    assert cause_of(task_error(torch.OutOfMemoryError("CUDA out of memory")), 1).kind == "out of memory"
    assert "\n" not in str(cause_of(task_error(ValueError("two\nlines")), 1))
