"""Runs of torchrun whose processes split the weights of a pretrained model: `cluster.tensor`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import StoredTensors, list_checkpoints
from adjoint.cli import main
from adjoint.train.layout import Layout
from tests.cluster.processes import started, torchrun, wait_for
from tests.hf.hf_models import float64_throughout, make, transformers
from tests.model_helpers import assert_same
from tests.training_helpers import metrics, same_training, tiny, train_tiny, weights

pytest.importorskip("transformers.distributed.configuration_utils")
pytestmark = pytest.mark.xdist_group("tensor_parallel")

LLAMA = "LlamaForCausalLM"
FLAGS: dict[str, Any] = {
    "data__batch": 3,
    "training__grad_accumulation": 2,
    "training__precision": "float64",
    "training__steps": 2,
    "training__lr": 1e-3,
    "training__weight_decay": 0.1,
    "training__grad_clip": 0.3,
    "data__seqlen": 23,
    "data__eval_tokens": 69,
    "method__chunk_size": 9,
    "training__sample_tokens": 3,
}
SHORT = {"data__batch": 1, "training__grad_accumulation": 1, "method__chunk_size": 6}
LORA = {"model__lora__rank": 3, "training__lr": 1e-2, "training__steps": 3}
BACKPROP = {"method__name": "backprop", "method__chunk_size": "null"}


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, world, flags",
    [
        (LLAMA, 2, {}),
        pytest.param(LLAMA, 4, {"data__documents": "packed"}, marks=pytest.mark.slow, id="2 replicas"),
        pytest.param(LLAMA, 4, SHORT | {"cluster__sequence": 2}, marks=pytest.mark.slow, id="sequence"),
        # weights of norms, whose gradients each rank has a part of
        pytest.param("Qwen3ForCausalLM", 2, {}, marks=pytest.mark.slow, id="Qwen3"),
        pytest.param("Qwen3_5ForCausalLM", 2, {}, marks=pytest.mark.slow, id="Qwen3.5"),
        pytest.param(LLAMA, 2, LORA, marks=pytest.mark.slow, id="adapters"),
        pytest.param("Phi3ForCausalLM", 2, LORA, marks=pytest.mark.slow, id="adapters on gathered outputs"),
        pytest.param("Phi3ForCausalLM", 2, BACKPROP, marks=pytest.mark.slow, id="Phi3, backprop"),
    ],
)
def test_processes_that_split_weights_train_as_one(
    name: str, world: int, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and sample are those of one process."""
    flags = options(name, tmp_path, **flags)
    environments = [torchrun(rank, world) for rank in range(world)]
    split = {"cluster__tensor": 2, "cluster__sequence": flags.pop("cluster__sequence", 1)}
    with float64_throughout():
        assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "one") == 0
        assert started(environments, tiny(tmp_path, **flags, **split), monkeypatch) == [0] * world
        same_training(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_a_killed_run_goes_on_and_one_process_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed; the resumed run ends with the bits of an undisturbed one. One process evaluates and
    exports it, and goes on from its checkpoint with its optimizer state."""
    flags = options(LLAMA, tmp_path, training__precision="float32", training__steps=7, training__save_every=2)
    split, environments = {"cluster__tensor": 2}, [torchrun(rank, 2) for rank in range(2)]
    undisturbed = tiny(tmp_path, **flags, **split, run__dir=tmp_path / "undisturbed")
    assert started(environments, undisturbed, monkeypatch) == [0, 0]

    def kill(children: list[int]) -> None:
        wait_for(lambda: list_checkpoints(tmp_path / "run" / "checkpoints"))
        os.kill(children[1], signal.SIGKILL)

    argv = tiny(tmp_path, **flags, **split)
    assert started(environments, argv, monkeypatch, kill) == [2, -signal.SIGKILL]
    assert len(metrics(tmp_path / "run")) < 7
    assert started(environments, [*argv, "--run.resume", "auto"], monkeypatch) == [0, 0]
    assert weights(tmp_path / "run", 7) == weights(tmp_path / "undisturbed", 7)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]
    run_dir = str(tmp_path / "run")
    assert main(["eval", run_dir, "--lengths", "64", "--tokens", "256"]) == 0
    assert main(["export", run_dir, "--to", str(tmp_path / "exported")]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    stored = StoredTensors(list_checkpoints(tmp_path / "run" / "checkpoints")[-1], "model")
    assert all(torch.equal(exported[name], stored[name]) for name in stored.files_by_name)
    first = list_checkpoints(tmp_path / "undisturbed" / "checkpoints")[0]
    alone = tiny(tmp_path, **flags, run__dir=tmp_path / "alone", run__resume=first)
    assert main(alone) == 0
    last = StoredTensors(list_checkpoints(tmp_path / "alone" / "checkpoints")[-1], "model")
    assert_same(
        {n: last[n] for n in stored.files_by_name}, {n: stored[n] for n in stored.files_by_name}, 1e-4
    )


@pytest.mark.parametrize(
    "name, flags, said",
    [
        (
            "Mamba2ForCausalLM",
            {},
            "transformers has no plan by which the weights of Mamba2ForCausalLM are split",
        ),
        (
            LLAMA,
            {"cluster__tensor": 4},
            "cluster.tensor: 4 ranks cannot share the 2 heads of Llama",
        ),
        (LLAMA, {"cluster__sequence": 2}, "2 processes cannot be divided into groups of 2 x 2 = 4"),
        (
            LLAMA,
            {"method__memory": "1GB"},
            "method.memory: ranks that split weights must keep",
        ),
        (LLAMA, {"training__optimizer": "muon"}, "cluster.tensor: training.optimizer muon needs whole matri"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    name: str, flags: Any, said: str, refused_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in torchrun(0, 2).items():
        monkeypatch.setenv(variable, value)
    refused_run(said, **options(name, tmp_path, **{"cluster__tensor": 2, **flags}))
