"""A sequence split over Ray actors, by command: what they train, what they survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, StackConfig
from adjoint.cluster import group as group_module
from adjoint.train.config import ClusterConfig, TrainingConfig
from tests.cluster import faults
from tests.cluster.faults import files, told
from tests.training_helpers import same_training, train_tiny

TWO: dict[str, Any] = {"cluster__shards": 1, "cluster__sequence": 2}
FLAGS: dict[str, Any] = {"data__batch": 2, "training__precision": "float64", "training__steps": 4}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-process")
    assert train_tiny(folder, **FLAGS) == 0
    return folder / "run"


@pytest.mark.slow
def test_two_workers_on_one_sequence_train_as_one_process(
    ray_on_loopback: None, in_one_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_tiny(tmp_path, **FLAGS, cluster__shards=1, cluster__sequence=2) == 0
    assert "each sequence over 2 workers in turn" in capsys.readouterr().out
    same_training(tmp_path / "run", in_one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"cluster__sequence": 4},
        {"cluster__sequence": 3, "cluster__transport": "gloo"},
        {"cluster__sequence": 2, "cluster__replicas": 2, "method__keep": "offload"},
        {"cluster__sequence": 2, "cluster__shards": 2},
    ],
    ids=str,
)
def test_other_numbers(
    ray_on_loopback: None, in_one_process: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    assert train_tiny(tmp_path, **{**FLAGS, "cluster__shards": 1, **flags}) == 0
    same_training(tmp_path / "run", in_one_process)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "call"), [("forward", 5), ("backward", 6), ("step", 3)])
def test_a_lost_worker_changes_nothing(
    ray_on_loopback: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    call: int,
) -> None:
    flags = {**FLAGS, "cluster__shards": 1, "cluster__sequence": 3, "method__chunk_size": 10}
    flags |= {"training__save_every": 2, "training__sample_tokens": 0}
    (tmp_path / "undisturbed").mkdir()
    assert train_tiny(tmp_path / "undisturbed", **flags) == 0
    monkeypatch.setattr(group_module, "ShardActor", faults.FaultyActor)
    faults.ask_for(point, 1, call, "kill")
    assert train_tiny(tmp_path, **flags) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "shard 1: died" in lines[0]
    assert told(tmp_path / "run") == told(tmp_path / "undisturbed" / "run")
    assert files(tmp_path / "run") == files(tmp_path / "undisturbed" / "run")


@pytest.mark.slow
def test_the_sequence_may_be_as_much_longer_as_there_are_workers(ray_on_loopback: None) -> None:
    """A worker keeps the edges of its own chunks: memory is that of one process with its share of tokens."""
    config = StackConfig(vocab_size=256, d_model=128, n_layer=4)
    training = TrainingConfig(device="cpu", threads=1, precision="float32")

    def peak(workers: int, seqlen: int) -> int:
        group = group_module.Group(config, training, Exact(512), ClusterConfig(1, sequence=workers))
        try:
            group.all("accumulate", torch.zeros(1, seqlen, dtype=torch.int64).numpy())
            return max(group.all("peak_memory_bytes"))
        finally:
            group.kill()

    tokens = 24576  # a worker's
    one, two, four = peak(1, tokens), peak(2, 2 * tokens), peak(4, 4 * tokens)
    assert two <= 1.15 * one and four <= 1.15 * one, (one, two, four)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cluster__sequence": 2}, "give --cluster.shards 1"),
        (
            {"cluster__sequence": 0, "cluster__shards": 1},
            "--cluster.sequence: expected a whole number",
        ),
        (
            {"cluster__sequence": 3, "cluster__shards": 1, "method__chunk_size": 40},
            "3 workers, and 2 chunks of 40 tokens to deal out; lower --method.chunk_size to 21 or less",
        ),
        (
            {
                "cluster__sequence": 2,
                "cluster__shards": 1,
                "method__name": "truncated",
                "method__window": "auto",
            },
            "needs the decays of the whole sequence",
        ),
        (
            {
                "cluster__sequence": 2,
                "cluster__shards": 1,
                "method__name": "layer-local",
                "cluster__helpers": 1,
            },
            "go without cluster.sequence",
        ),
        (
            {"cluster__sequence": 5, "cluster__shards": 1},
            "asked for, but the cluster has 4 CPUs, 0 GPUs; what fits: --cluster.sequence 4",
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


@pytest.mark.slow
def test_a_run_may_change_its_number_of_workers(ray_on_loopback: None, tmp_path: Path) -> None:
    (tmp_path / "alike").mkdir()
    for steps, cluster in ((2, (1, 3)), (3, (2, 1)), (4, (1, 2)), (5, (0, 1))):
        more = {"training__steps": steps, "run__resume": "auto"}  # the learning rate depends on the steps
        shards, workers = cluster
        split = {"cluster__shards": shards, "cluster__sequence": workers}
        assert train_tiny(tmp_path, **{**FLAGS, **more, **split}) == 0
        assert train_tiny(tmp_path / "alike", **{**FLAGS, **more}) == 0
    same_training(tmp_path / "run", tmp_path / "alike" / "run")
