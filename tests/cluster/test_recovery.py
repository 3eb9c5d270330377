"""Shards that die, are killed, hang or fail: which cause is named, and a run that ends as if undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint.checkpoint import list_checkpoints
from adjoint.cluster import group as group_module
from adjoint.cluster.recovery import Cause, ShardFailure, cause_of
from adjoint.cluster.training import ShardedTrainer
from adjoint.errors import UserError
from adjoint.train.config import Config
from tests.cluster import faults
from tests.cluster.faults import FLAGS, MOMENTS, assert_undisturbed, told
from tests.training_helpers import tiny, train_tiny


def recovers(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str], after: int = 0, **flags: Any
) -> str:
    """Trains, and compares from step `after` on; the line that tells of the failure."""
    assert train_tiny(tmp_path, **{**FLAGS, **flags}) == 0
    assert_undisturbed(tmp_path / "run", undisturbed, after)
    (line,) = capsys.readouterr().err.splitlines()
    return line


# how, the shard, and what is said of it
WAYS = [
    ("exit", 0, "died"),
    ("kill", 1, "died"),
    ("stop", 0, "hung"),
    ("stop", 1, "hung"),
    ("limit", 0, "out of memory"),
]
EARLY = [  # before step 5: point, time, shard, way, and what is said
    ("backward", 4 * 2 + 3, 1, "kill", "failure 1 of at most 3 at step 3: shard 1: died", "after step 2"),
    ("forward", 6, 0, "exit", "at step 2: shard 0: died", "after step 0"),
    ("build", 1, 1, "kill", "at step 1: shard 1: died", "(during build); going on after step 0"),
]


STUCK = "shard 1: hung: no progress of any shard for 10 s (cluster.progress_timeout), it is at: "


@pytest.mark.slow
@pytest.mark.parametrize(
    "point, call, rank, how, said, going_on",
    [
        *EARLY,
        *((*moment, r, how, f"shard {r}: {kind}", "") for how, r, kind in WAYS for moment in MOMENTS),
        # one sleeps while the other waits for it: both have heartbeats
        *((*moment, 1, "sleep", STUCK, "") for moment in MOMENTS if moment[0] != "save"),
    ],
)
def test_a_failure_changes_nothing(
    undisturbed: Path,
    faulty: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    point: str,
    call: int,
    rank: int,
    how: str,
    said: str,
    going_on: str,
) -> None:
    faults.ask_for(point, rank, call, how)
    flags = {"cluster__progress_timeout": 10} if how == "sleep" else {}
    line = recovers(tmp_path, undisturbed, capsys, **flags)
    assert said in line and line.endswith(going_on)


HYBRID = {"model__mixer": "[mamba2, attention]", "model__headdim": 16}
# flags, and moments at which a shard is killed; four chunks a batch
RUNS: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]]]] = {
    "replicas": ({"cluster__replicas": 2}, [("backward", 3, 2 * 4 + 3), ("step", 2, 3), ("forward", 2, 1)]),
    "sequence": (
        {"cluster__shards": 1, "cluster__sequence": 3},
        [("forward", 1, 3), ("backward", 1, 3), ("step", 1, 3)],  # the second chunk of each batch is its
    ),
    "attention over a sequence": (
        {"cluster__shards": 1, "cluster__sequence": 3} | HYBRID,
        [("forward", 1, 3), ("backward", 1, 3), ("step", 1, 3)],
    ),
    "carried states": ({"training__carry_state": "previous"}, [("backward", 1, 2 * 4 + 3)]),
    "dropout": (
        {"model__d_model": 24, "model__n_layer": 4, "training__grad_accumulation": 2},
        [
            ("build", 1, 1),
            ("forward", 1, 3 * 8 + 2),
            ("backward", 1, 3 * 8 + 2),
            ("step", 1, 4),
            ("save", 1, 2),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_lost_worker_of_any_run_changes_nothing(
    name: str, faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, moments = RUNS[name]
    flags = {"data__batch": 3, "training__precision": "float64", "training__steps": 4} | flags
    if name == "dropout":
        from tests.hf.hf_models import make

        options = {"attention_dropout": 0.2, "num_hidden_layers": 4, "attn_layer_indices": [1]}
        model = make("BambaForCausalLM", torch.float32, vocab_size=256, **options)
        model.save_pretrained(tmp_path / "model")
        flags["model__from_pretrained"] = tmp_path / "model"
    (tmp_path / "undisturbed").mkdir()
    assert train_tiny(tmp_path / "undisturbed", **{**FLAGS, **flags}) == 0
    capsys.readouterr()
    for point, rank, call in moments:
        (tmp_path / point).mkdir()
        faults.ask_for(point, rank, call, "kill")
        said = recovers(tmp_path / point, tmp_path / "undisturbed" / "run", capsys, **flags)
        assert f"shard {rank}: died" in said


@pytest.mark.slow
def test_a_run_that_went_on_from_another_one_falls_back_on_it(
    undisturbed: Path, faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.ask_for("backward", rank=0, call=2, how="kill")  # before it has a checkpoint of its own
    beginning = undisturbed / "checkpoints" / "step-00000004"
    said = recovers(tmp_path, undisturbed, capsys, after=4, run__resume=beginning)
    assert "at step 5: shard 0: died" in said
    assert "going on after step 4" in said


@pytest.mark.slow
def test_a_step_that_always_fails_stops_the_run_with_its_cause(
    faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.ask_for("backward", rank=1, call=3, how="exit", again=True)
    assert train_tiny(tmp_path, **FLAGS, cluster__max_failures=1) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines  # the first was recovered from
    assert "shard 1: died" in lines[1]
    assert "that is failure 2 and cluster.max_failures is 1" in lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("point, call", [("build", 1), MOMENTS[1]])
def test_an_exception_of_the_code_is_a_bug_and_not_tried_again(
    faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], point: str, call: int
) -> None:
    faults.ask_for(point, 1, call, "error")  # once: tried again, it would pass
    with pytest.raises(ShardFailure, match="shard 1: error: ZeroDivisionError: division by zero") as raised:
        train_tiny(tmp_path, **FLAGS)
    assert '"error": lambda: 1 / 0' in str(raised.value.__cause__)  # the shard's own traceback
    assert "failure 1" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_is_told_at_once_in_one_line(
    faulty: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.ask_for("save", rank=1, call=1, how="disk")
    assert train_tiny(tmp_path, **FLAGS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "shard 1: environment: runs/x: No space left on device (during save), at step 3; it would" in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_hangup_of_the_whole_session_has_the_run_saved(tmp_path: Path, number: int) -> None:
    """A shell hands SIGHUP on to all processes of a job, Ray's among them, and Slurm its SIGUSR1."""
    argv = [sys.executable, "train.py", *tiny(tmp_path, **FLAGS | {"training__steps": 10000})[1:]]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        argv, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any("tokens/s" in line for line in process.stdout)
            os.killpg(process.pid, number)
            said = process.stdout.read()
            assert process.wait(timeout=120) == 128 + number
        finally:
            process.kill()
    last = told(tmp_path / "run")[-1]["step"]
    assert f"stopped after step {last}; continue with: " in said
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{last:08d}"


# ------------------------------------------------------------------------------------------- causes alone


def test_the_cause_that_explains_the_others_is_named() -> None:
    kinds = "connection", "error", "died", "hung", "node lost", "out of memory"
    failure = ShardFailure([Cause(kind, rank, "why") for rank, kind in enumerate(kinds)], "accumulate")
    assert str(failure) == "shard 5: out of memory: why (during accumulate)"
    assert [c.kind for c in failure.causes] == [*kinds[:3:-1], "died", "hung", "error", "connection"]


def failing_trainer(folder: Path) -> ShardedTrainer:
    """Return a trainer that can only decide what to do about a failure."""
    trainer = object.__new__(ShardedTrainer)
    trainer.config, trainer.folder = Config(), SimpleNamespace(path=folder)  # type: ignore[assignment]
    trainer.step, trainer.failures, trainer.preemptions = 4, 0, 0
    return trainer


def test_what_would_come_again_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, collateral = failing_trainer(tmp_path), Cause("connection", 0, "Connection closed by peer")
    for kind in ("died", "node lost", "out of memory", "preempted", "hung", "unreachable", "connection"):
        trainer._count_failure(ShardFailure([Cause(kind, 1, ""), collateral], "accumulate"), None)
        assert "going on after step 0" in capsys.readouterr().err
        trainer.failures = 0
    full = Cause("environment", 1, "/runs/x: No space left on device")
    with pytest.raises(
        UserError, match=r"shard 1: environment: /runs/x: No space left .* happen again: .* correct"
    ):
        trainer._count_failure(ShardFailure([full, collateral], "save"), None)
    bug = Cause("error", 1, "TypeError: no", TypeError("no"))
    with pytest.raises(ShardFailure, match="shard 1: error: TypeError: no") as raised:
        trainer._count_failure(ShardFailure([bug, collateral], "accumulate"), None)
    assert raised.value.__cause__ is bug.error
    # what a dead shard does to the code of others is no bug
    trainer._count_failure(ShardFailure([bug, Cause("died", 0, "")], "accumulate"), None)
    assert capsys.readouterr().err.count("shard 0: died") == 1


def test_nobody_getting_on_names_who_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(group_module.time, "monotonic", lambda: clock[0])
    watch = group_module.Watch([], [0, 1])
    watch.said = {0: (7, ("receive y[1,2] from 1", True)), 1: (3, ("F[2,2]", False))}
    clock[0] = 110.0
    assert watch.stuck([0, 1], 10) == []
    clock[0] = 110.5
    (cause,) = watch.stuck([0, 1], 10)
    assert (cause.rank, cause.kind) == (1, "hung")
    assert cause.detail.endswith("for 10 s (cluster.progress_timeout), it is at: F[2,2]")
    watch.said[1] = (3, ("sum of gradients", True))
    assert [cause.rank for cause in watch.stuck([0, 1], 10)] == [0, 1]  # nobody knows who is to blame


def test_exceptions_of_ray_are_told_apart() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    no_room = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes"
    died = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n"
        "The actor died because its node has died. Node Id: 953f461976c281fb83d2f4229aa1f2104417\n"
        "\tthe actor's node was terminated expectedly: received SIGTERM"
    )
    preempted = died.replace("terminated expectedly: received SIGTERM", "preempted: taken back")
    of_ray = {
        exceptions.OutOfMemoryError("memory"): "out of memory: killed by Ray",
        exceptions.ActorDiedError(): "died",
        exceptions.NodeDiedError("gone"): "node lost: gone",
        exceptions.RayActorError(b"0" * 16, died, False): "node lost: Node Id: 953f461976c2",
        exceptions.RayActorError(b"0" * 16, preempted, False): "preempted",
        exceptions.RayActorError(b"0" * 16, "gone", False, preempted=True): "preempted",
        exceptions.ActorUnavailableError("socket closed", b"0" * 16): "unreachable",
        exceptions.ObjectLostError("00", "127.0.0.1", ""): "connection",
        exceptions.RuntimeEnvSetupError("no"): "environment",
    }
    of_code = {
        RuntimeError("[gloo] Connection closed by peer"): "connection",
        ConnectionResetError("by peer"): "connection",
        torch.distributed.DistStoreError("wait timeout, keys: /0"): "connection",
        exceptions.ActorDiedError(): "connection",  # a helper's
        FileNotFoundError(2, "No such file", "/runs/x"): "environment: /runs/x: No such file",
        OSError(None, "I/O error: No space left", "/x"): "environment: /x: I/O error: No space left",
        ModuleNotFoundError("No module named 'torchao'"): "environment",
        torch.OutOfMemoryError("CUDA out of memory"): "out of memory",
        RuntimeError(no_room): "out of memory",
        MemoryError(): "out of memory",
        **dict.fromkeys((ZeroDivisionError("by zero"), TypeError("peer"), ValueError("socket")), "error"),
        RuntimeError("no store\nat all"): "error",
    }
    of_ray |= {exceptions.RayTaskError("call", "Traceback\n", e): said for e, said in of_code.items()}
    for error, said in of_ray.items():
        message = str(cause_of(error, 1))
        assert message.startswith(f"shard 1: {said}") and "\n" not in message, (error, message)
