"""Runs of torchrun whose processes split the weights of our own model: `cluster.tensor`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from adjoint.formats.checkpoint_files import list_checkpoints
from tests.cluster.processes import started, torchrun
from tests.training_helpers import metrics, same_training, tiny, train_tiny, weights

pytestmark = pytest.mark.xdist_group("tensor_parallel")
FLAGS: dict[str, Any] = {
    "model__mixer": "[mamba2, attention]",
    "model__headdim": 8,
    "model__num_attention_heads": 4,
    "model__d_intermediate": 24,
    "data__batch": 2,
    "training__grad_accumulation": 2,
    "training__precision": "float64",
    "training__steps": 4,
    "training__lr": 1e-3,
    "training__weight_decay": 0.1,
    "training__grad_clip": 0.3,
    "method__chunk_size": 9,
}


@pytest.mark.parametrize(
    "world, flags",
    [
        pytest.param(2, {"cluster__tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"cluster__tensor": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"cluster__tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"cluster__tensor": 2, "cluster__sequence": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_processes_train_as_one(
    world: int, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and sample are those of one process; a resumed run has the same bits, and one
    process goes on from the processes' checkpoint."""
    environments = [torchrun(rank, world) for rank in range(world)]
    assert train_tiny(tmp_path, **FLAGS, run__dir=tmp_path / "one") == 0
    assert started(environments, tiny(tmp_path, **FLAGS, **flags), monkeypatch) == [0] * world
    same_training(tmp_path / "run", tmp_path / "one")
    first = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    again = tiny(tmp_path, **FLAGS, **flags, run__dir=tmp_path / "again", run__resume=first)
    assert started(environments, again, monkeypatch) == [0] * world
    assert weights(tmp_path / "again", 4) == weights(tmp_path / "run", 4)
    assert train_tiny(tmp_path, **FLAGS, run__dir=tmp_path / "alone", run__resume=first) == 0
    assert metrics(tmp_path / "alone")[-1]["loss"] == pytest.approx(metrics(tmp_path / "one")[-1]["loss"])


@pytest.mark.slow
def test_a_killed_process_stops_all_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run ends with the bits of one that nobody killed."""
    flags = {**FLAGS, "cluster__tensor": 2, "training__steps": 12, "training__save_every": 2}
    environments = [torchrun(rank, 2) for rank in range(2)]
    undisturbed = tiny(tmp_path, **flags, run__dir=tmp_path / "undisturbed")
    assert started(environments, undisturbed, monkeypatch) == [0, 0]

    def kill(children: list[int]) -> None:
        folder = tmp_path / "run" / "checkpoints"
        while not (folder.is_dir() and list_checkpoints(folder)):
            time.sleep(0.01)
        os.kill(children[1], signal.SIGKILL)

    codes = started(environments, tiny(tmp_path, **flags), monkeypatch, kill)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, 70)
    resumed = tiny(tmp_path, **flags, run__resume="auto")
    assert started(environments, resumed, monkeypatch) == [0, 0]
    assert weights(tmp_path / "run", 12) == weights(tmp_path / "undisturbed", 12)


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
def test_what_is_refused(
    flags: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = tiny(tmp_path, **{**FLAGS, "cluster__tensor": 2, **flags})
    assert started([torchrun(rank, 2) for rank in range(2)], argv, monkeypatch) == [2, 2]
    assert message in capfd.readouterr().err
