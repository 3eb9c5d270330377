"""Runs of torchrun whose processes split the weights of a pretrained model: `cluster.tensor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adjoint.checkpoint import list_checkpoints
from adjoint.train.layout import Layout
from tests.cluster.processes import started, torchrun
from tests.hf.hf_models import float64_throughout, make
from tests.training_helpers import same_training, tiny, train_tiny, weights

pytest.importorskip("transformers.distributed.configuration_utils")
pytestmark = pytest.mark.xdist_group("tensor_parallel")

LLAMA = "LlamaForCausalLM"
FLAGS: dict[str, Any] = {
    "data__batch": 3,
    "training__grad_accumulation": 2,
    "training__precision": "float64",
    "training__steps": 4,
    "training__lr": 1e-3,
    "training__weight_decay": 0.1,
    "training__grad_clip": 0.3,
    "method__chunk_size": 9,
}


def options(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Save a model of a class, and return the flags of a run that trains it."""
    model = make(name, vocab_size=256)
    model.save_pretrained(folder / "model")
    sizes = {"model__d_model": 24, "model__n_layer": model.config.num_hidden_layers}
    return {**sizes, **FLAGS, "model__from_pretrained": folder / "model", **more}


def test_which_ranks_share_weights_sequences_and_gradients() -> None:
    layout = Layout(1, sequence=2, replicas=2, tensor=3)
    assert layout.world == 12
    assert layout.tensor_ranks(4) == [3, 4, 5] and layout.tensor_ranks(11) == [9, 10, 11]
    assert layout.sequence_ranks(4) == [1, 4] and layout.sequence_ranks(8) == [8, 11]
    assert layout.data_ranks(4) == [4, 10] and layout.data_ranks(9) == [3, 9]
    assert [layout.replica(rank) for rank in range(12)] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    "name, world, flags",
    [
        (LLAMA, 2, {}),
    ],
)
def test_processes_that_split_weights_train_as_one(
    name: str, world: int, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and sample are those of one process; a resumed run has the same bits."""
    flags = options(name, tmp_path, **flags)
    environments = [torchrun(rank, world) for rank in range(world)]
    split = {"cluster__tensor": 2}
    with float64_throughout():
        assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "one") == 0
        assert started(environments, tiny(tmp_path, **flags, **split), monkeypatch) == [0] * world
        same_training(tmp_path / "run", tmp_path / "one")
        first = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
        more = tiny(tmp_path, **flags, **split, run__dir=tmp_path / "again", run__resume=first)
        assert started(environments, more, monkeypatch) == [0] * world
    assert weights(tmp_path / "again", 4) == weights(tmp_path / "run", 4)
