"""Runs whose processes torchrun or srun has started: here they are forked, with their environment.

They share rows, sequences and, with `cluster.tensor`, weights of our own model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import list_checkpoints
from adjoint.cluster.torchrun import ProcessRank, gpu_of
from adjoint.errors import UserError
from tests.cluster.processes import started, torchrun
from tests.training_helpers import metrics, same_training, tiny, train_tiny, weights

FLAGS: dict[str, Any] = {
    "data__batch": 3,
    "training__grad_accumulation": 2,
    "training__precision": "float64",
    "training__steps": 6,
}
HYBRID = {"model__mixer": "[mamba2, attention]", "model__headdim": 16}
SPLIT = HYBRID | {"model__headdim": 8, "model__num_attention_heads": 4, "model__d_intermediate": 24}
SPLIT |= {"training__lr": 1e-3, "training__weight_decay": 0.1, "training__grad_clip": 0.3}
SPLIT |= {"method__chunk_size": 9}


def srun(rank: int, world: int) -> dict[str, str]:
    variables = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(world), "SLURM_LOCALID": str(rank)}
    return {**variables, "SLURM_JOB_ID": "1", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "launcher, world, flags, layout",
    [
        (torchrun, 2, {"data__documents": "packed"}, {}),
        (srun, 2, {}, {}),
        (torchrun, 2, {"method__chunk_size": 5}, {"sequence": 2}),
        pytest.param(
            torchrun, 4, {**HYBRID, "method__chunk_size": 5}, {"sequence": 2}, marks=pytest.mark.slow
        ),
        *(
            pytest.param(torchrun, world, SPLIT, layout, marks=pytest.mark.slow)
            for world, layout in [(2, {"tensor": 2}), (4, {"tensor": 4}), (4, {"tensor": 2})]
        ),
        pytest.param(torchrun, 4, SPLIT, {"tensor": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one(
    launcher: Any,
    world: int,
    flags: dict[str, Any],
    layout: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Losses, norms, weights and sample are those of one process; process 0 alone writes.

    Rows are unequal, or sequences or weights are shared. A run that goes on ends with the same bits, and one
    process goes on from the processes' checkpoint.
    """
    assert train_tiny(tmp_path, **FLAGS, **flags, run__dir=tmp_path / "one") == 0
    split = {f"cluster__{name}": number for name, number in layout.items()}
    argv = tiny(tmp_path, **FLAGS, **flags, **split)
    environments = [launcher(rank, world) for rank in range(world)]
    assert started(environments, argv, monkeypatch) == [0] * world
    assert ("; chunks of each sequence shared by 2\n" in capfd.readouterr().out) == (
        layout.get("sequence") == 2
    )
    same_training(tmp_path / "run", tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "one", "run", "text.txt"]
    first = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    more = tiny(tmp_path, **FLAGS, **flags, **split, run__dir=tmp_path / "again", run__resume=first)
    assert started(environments, more, monkeypatch) == [0] * world
    assert weights(tmp_path / "again", 6) == weights(tmp_path / "run", 6)
    assert [row["step"] for row in metrics(tmp_path / "again")] == [4, 5, 6]
    if "tensor" in layout:
        assert train_tiny(tmp_path, **FLAGS, **flags, run__dir=tmp_path / "alone", run__resume=first) == 0
        assert metrics(tmp_path / "alone")[-1]["loss"] == pytest.approx(metrics(tmp_path / "one")[-1]["loss"])


def test_processes_train_at_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 0 uploads, all read the checkpoint from there; the bits are those of a run in a folder."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache-of-runs"))
    for address in (tmp_path / "run", f"file://{tmp_path}/bucket/run"):
        for steps in (4, 6):
            argv = tiny(tmp_path, **FLAGS | {"training__steps": steps}, run__dir=address, run__resume="auto")
            assert started([torchrun(rank, 2) for rank in range(2)], argv, monkeypatch) == [0, 0]
    assert f"resuming after step 4 from file://{tmp_path}/bucket/run/checkpoints" in capfd.readouterr().out
    assert weights(tmp_path / "bucket/run", 6) == weights(tmp_path / "run", 6)
    same_training(tmp_path / "bucket/run", tmp_path / "run")
    assert [path.name for path in (tmp_path / "cache-of-runs/runs").glob("*/*")] == [".lock"]


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"cluster__shards": 1}, "cluster.shards: Ray starts shards by itself"),
        ({"data__batch": 1}, "2 replicas for a data.batch of 1"),
        ({"training__carry_state": "previous"}, "training.carry_state: works in one process"),
        ({"training__profile": 1}, "training.profile: records one process"),
        (
            {
                "training__optimizer_in_backward": "true",
                "training__grad_clip": 0,
                "training__grad_accumulation": 1,
            },
            "training.optimizer_in_backward: works in one process",
        ),
        ({"training__device": "cuda:1"}, "training.device: each process has its own GPU"),
        ({"method__name": "truncated", "method__window": "auto"}, "method.window: auto needs all rows"),
        ({"cluster__sequence": 3}, "cluster.sequence: 2 processes cannot be divided into groups of 3"),
        ({"cluster__sequence": 2, "method__name": "backprop"}, "cluster.sequence: backprop has no chunks"),
        ({"cluster__sequence": 2, "method__memory": "1GB"}, "method.memory: works only if each process"),
    ],
)
def test_what_processes_refuse(
    flags: Any, said: str, refused_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in torchrun(0, 2).items():
        monkeypatch.setenv(name, value)
    refused_run(said, **{**FLAGS, **flags})


@pytest.mark.parametrize("count, local, found", [(4, 3, 3), (1, 0, 0), (1, 3, 0), (2, 2, None)])
def test_a_process_takes_the_gpu_of_its_number_or_the_only_one_it_sees(
    count: int, local: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    refused = pytest.raises(UserError, match="2 GPUs and more processes; start 2")
    with contextlib.nullcontext() if found is not None else refused:
        assert gpu_of(ProcessRank(local, 4, local)) == found


def test_processes_of_torchrun_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="1 GPUs and more processes; start 1"):
        gpu_of(ProcessRank(0, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        ({"model__headdim": 32}, "cluster.tensor: layer 0 (mamba2): 2 ranks must divide the number of heads"),
        ({"training__optimizer": "muon"}, "cluster.tensor: training.optimizer muon needs whole matrices"),
        ({"method__memory": "1GB", "method__chunk_size": "null"}, "method.memory: ranks that split weights"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_split_are_refused(
    flags: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = tiny(tmp_path, **{**FLAGS, **SPLIT, "cluster__tensor": 2, **flags})
    assert started([torchrun(rank, 2) for rank in range(2)], argv, monkeypatch) == [2, 2]
    assert message in capfd.readouterr().err
