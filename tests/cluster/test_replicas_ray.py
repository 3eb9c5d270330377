"""Replicas in Ray actors, from the command line: what they train, what is refused, and what they survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adjoint.cluster import group as group_module
from adjoint.cluster import placement
from adjoint.cluster.placement import Resources
from adjoint.errors import UserError
from adjoint.train.config import ClusterConfig
from adjoint.train.layout import Layout
from tests.cluster import faults
from tests.cluster.faults import files, told
from tests.training_helpers import same_training, train_tiny

FLAGS: dict[str, Any] = {"data__batch": 3, "training__precision": "float64", "training__steps": 4}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-process")
    assert train_tiny(folder, **FLAGS) == 0
    return folder / "run"


@pytest.mark.slow
def test_two_replicas_of_two_shards_train_as_one_process(
    ray_on_loopback: None, in_one_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_tiny(tmp_path, **FLAGS, cluster__shards=2, cluster__replicas=2) == 0
    assert "layers 0-0, 1-1, on cpu, replicas of all this: 2" in capsys.readouterr().out
    same_training(tmp_path / "run", in_one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"cluster__shards": 1, "cluster__replicas": 3},
        {"cluster__shards": "auto", "cluster__replicas": 2},
    ],
    ids=str,
)
def test_other_numbers(
    ray_on_loopback: None, in_one_process: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    assert train_tiny(tmp_path, **FLAGS, **flags) == 0
    same_training(tmp_path / "run", in_one_process)


@pytest.mark.slow
def test_replicas_with_helpers(ray_on_loopback: None, tmp_path: Path) -> None:
    flags = {**FLAGS, "method__name": "layer-local", "method__window": 16, "method__chunk_size": 16}
    (tmp_path / "one").mkdir()
    assert train_tiny(tmp_path / "one", **flags) == 0
    assert train_tiny(tmp_path, **flags, cluster__shards=1, cluster__helpers=1, cluster__replicas=2) == 0
    same_training(tmp_path / "run", tmp_path / "one" / "run")


@pytest.mark.slow
def test_a_run_may_change_its_number_of_replicas(ray_on_loopback: None, tmp_path: Path) -> None:
    (tmp_path / "alike").mkdir()
    settings = ((2, 2, 2), (3, 1, 3), (5, 0, 1), (6, 2, 1))
    for steps, shards, replicas in settings:
        more = {"training__steps": steps, "run__resume": "auto"}  # the learning rate depends on the steps
        cluster = {"cluster__shards": shards, "cluster__replicas": replicas}
        assert train_tiny(tmp_path, **{**FLAGS, **more, **cluster}) == 0
        assert train_tiny(tmp_path / "alike", **{**FLAGS, **more}) == 0
    same_training(tmp_path / "run", tmp_path / "alike" / "run")


# ----------------------------------------------------------------------------------------------- failures


FAILING = {
    **FLAGS,
    "cluster__shards": 2,
    "cluster__replicas": 2,
    "method__chunk_size": 20,  # four chunks of a sequence
    "training__save_every": 2,
    "training__sample_tokens": 0,
}


@pytest.fixture(scope="module")
def undisturbed(ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_tiny(folder, **FAILING) == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank", "call"), [("backward", 3, 2 * 4 + 3), ("step", 2, 3), ("forward", 2, 1)]
)
def test_a_lost_shard_of_the_second_replica_changes_nothing(
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    point: str,
    call: int,
) -> None:
    monkeypatch.setattr(group_module, "ShardActor", faults.FaultyActor)
    faults.ask_for(point, rank, call, "kill")
    assert train_tiny(tmp_path, **FAILING) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert f"shard {rank}: died" in lines[0]
    assert told(tmp_path / "run") == told(undisturbed)
    assert files(tmp_path / "run") == files(undisturbed)


# --------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"cluster__replicas": 3, "cluster__shards": 2},
            "3 replicas of 2 shards with 1 CPU each asked for, but the cluster has 4 CPUs, 0 GPUs; what fits",
        ),
        (
            {"cluster__replicas": 4, "cluster__shards": 1},
            "4 replicas for a batch of 3, and each needs a row; --data.batch 4, or --cluster.replicas 3",
        ),
        ({"cluster__replicas": 2}, "give --cluster.shards 1 or more, or --cluster.replicas 1"),
        (
            {"cluster__replicas": 0, "cluster__shards": 1},
            "--cluster.replicas: expected a whole number",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    ray_on_loopback: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Any, said: str
) -> None:
    assert train_tiny(tmp_path, **FLAGS, **flags) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert said in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("shards", "replicas", "would"),
    [
        (3, 3, "--cluster.replicas 2 or --cluster.shards 2"),
        (1, 8, "--cluster.replicas 6"),
        (8, 2, "--cluster.shards 3"),
        (8, 8, "--cluster.shards 6 --cluster.replicas 1"),
    ],
)
def test_what_would_fit_does(shards: int, replicas: int, would: str) -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 2.0}]
    with pytest.raises(UserError) as refusal:
        placement.check_feasible(Layout(shards, replicas=replicas), Resources(1), nodes)
    assert str(refusal.value).endswith(f"what fits: {would}")
    for choice in would.split(" or "):
        words = choice.replace("--cluster.", "").split()
        asked = {"shards": shards, "replicas": replicas}
        asked |= {key: int(n) for key, n in zip(words[::2], words[1::2], strict=True)}
        placement.check_feasible(Layout(**asked), Resources(1), nodes)


def test_one_process_has_no_replicas() -> None:
    assert ClusterConfig().replicas == 1
    with pytest.raises(UserError, match="processes of their own"):
        ClusterConfig(replicas=2)
