"""Folders of torch.distributed.checkpoint (DCP), in and out of runs: bit for bit, whoever wrote them."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from adjoint.checkpoint import StoredTensors, verify_trained_state
from adjoint.errors import UserError
from adjoint.files.distributed_checkpoint import METADATA, DistributedTensors
from adjoint.files.remote import RemotePath
from adjoint.train.checkpoint import load_checkpoint
from tests.cluster.threads import train_in_threads
from tests.model_helpers import assert_same
from tests.ranks import on_ranks
from tests.training_helpers import metrics, run, tiny, train_tiny, weights

transformers = pytest.importorskip("transformers")
LAYOUTS = ("nested", "torchtitan", "app", "weights", "nested weights")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama whose sizes no two ranks can share evenly."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 25, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=257, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(base: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def complete(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def train_by_fsdp(base: Path, folder: Path) -> None:
    """Train two steps in a loop with FSDP2; write a DCP folder in each layout, and what is in them."""
    model = loaded(base)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    for step in range(2):
        ids = torch.arange(24).view(2, 12) * (step + 3) % 257
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    contents: dict[str, dict[str, Any]] = {
        "nested": {"model": weights, "optimizer": state},
        "torchtitan": {**weights, **flattened, "train_state": {"step": torch.tensor(2)}},
        "app": {"app": {"model": weights, "optim": state}},
        "weights": weights,
        "nested weights": {"model": weights},
    }
    for layout, content in contents.items():
        dcp.save(content, checkpoint_id=folder / layout)
    moments = {name: complete(entries) for name, entries in state["state"].items()}
    gathered = {"model": complete(weights), "optimizer": moments}
    if dist.get_rank() == 0:
        torch.save(gathered, folder / "whole.pt")


@pytest.fixture(scope="module")
def foreign(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that two ranks have written, each with a part of each tensor."""
    folder = tmp_path_factory.mktemp("foreign")
    on_ranks(2, folder, train_by_fsdp, base, folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_loops_folder_fills_a_model_and_its_optimizer(
    layout: str, foreign: Path, base: Path
) -> None:
    """Written by two ranks of FSDP2, read by one process."""
    model = loaded(base)
    optimizer = optimizer_of(model)
    (lost,) = verify_trained_state(foreign / layout)
    assert "has no trainer.json" in lost
    trainer, rng = load_checkpoint(foreign / layout, model, optimizer)
    assert trainer["step"] == 0 and not rng
    expected = torch.load(foreign / "whole.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected["model"][name]), name
    for name, parameter in model.named_parameters():
        entries = expected["optimizer"][name] if "weights" not in layout else {}
        assert optimizer.state[parameter].keys() == entries.keys()
        for key, tensor in entries.items():
            assert torch.equal(optimizer.state[parameter][key], tensor), (name, key)


@pytest.mark.parametrize("layout", ["nested", pytest.param("torchtitan", marks=pytest.mark.slow)])
def test_runs_go_on_from_a_training_loops_folder_whatever_their_layout(
    layout: str, foreign: Path, base: Path, tmp_path: Path
) -> None:
    """Layer shards, each of which reads its own tensors alone, train as one process does."""
    flags = of_base(base) | {"run__resume": foreign / layout, "training__steps": 3}
    assert train_tiny(tmp_path, **flags) == 0
    shards = {"run__dir": tmp_path / "shards", "cluster__shards": 2, "cluster__cpus": 1}
    train_in_threads(tiny(tmp_path, **flags, **shards))
    for row, other in zip(metrics(tmp_path / "shards"), metrics(tmp_path / "run"), strict=True):
        assert (row["loss"], row["grad_norm"]) == pytest.approx(
            (other["loss"], other["grad_norm"]), rel=1e-10
        )
    tensors, others = (
        StoredTensors(tmp_path / name / "checkpoints/step-00000003", "model") for name in ("shards", "run")
    )
    names = others.files_by_name
    assert_same({name: tensors[name] for name in names}, {name: others[name] for name in names}, 1e-9)
    assert train_tiny(tmp_path, **(flags | {"run__resume": "never"}), run__dir=tmp_path / "fresh") == 0
    assert metrics(tmp_path / "run")[0]["loss"] != metrics(tmp_path / "fresh")[0]["loss"]


def of_base(base: Path) -> dict[str, Any]:
    """Flags of a run in float64 that begins with the folder."""
    return {
        "model__from_pretrained": base,
        "model__d_model": 12,
        "model__n_layer": 3,
        "training__precision": "float64",
        "training__sample_tokens": 0,
    }


def load_by_fsdp(base: Path, folder: Path, checkpoint: Path) -> None:
    """Three ranks of a training loop with FSDP2 read an exported folder, each its own parts."""
    model = loaded(base)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    weights, state = get_state_dict(model, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["lr"] == 0.01  # the loop's own
    stored = {stem: StoredTensors(checkpoint, stem) for stem in ("model", "optimizer")}
    gathered = complete(get_model_state_dict(model))
    for name in stored["model"].files_by_name:
        assert torch.equal(gathered[name], stored["model"][name].double()), name
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert len(stored["optimizer"].files_by_name) == sum(map(len, states.values())) > 0
    for name, entries in states.items():
        for key, tensor in complete(entries).items():
            assert torch.equal(tensor, stored["optimizer"][f"{name}|{key}"].to(tensor.dtype)), (name, key)


def test_an_exported_run_is_read_by_a_training_loop_with_fsdp(base: Path, tmp_path: Path) -> None:
    assert train_tiny(tmp_path, **of_base(base), training__steps=3) == 0
    assert run(["export", str(tmp_path / "run"), "--to", str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    on_ranks(3, tmp_path, load_by_fsdp, base, tmp_path / "dcp", checkpoint)


@pytest.mark.parametrize("place", [pytest.param("folder", marks=pytest.mark.slow), "memory://bucket/dcp"])
def test_a_run_goes_on_from_its_exported_folder_bit_for_bit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, optimizer, carried states, random numbers and the place in the text, from an address too."""
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache-of-runs"))
    target = str(tmp_path / "dcp") if place == "folder" else place
    flags: dict[str, Any] = {"training__carry_state": "previous"}
    assert train_tiny(tmp_path, **flags) == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    assert run(["export", str(checkpoint), "--to", target, "--format", "dcp"]) == 0
    assert "parameters and the optimizer's state for torch.distributed.checkpoint" in capsys.readouterr().out
    again = {"run__resume": target, "run__dir": tmp_path / "again"}
    assert train_tiny(tmp_path, **flags, **again) == 0
    assert weights(tmp_path / "again", 8) == weights(tmp_path / "run", 8)
    monkeypatch.chdir(tmp_path)
    assert run(["eval", target, "--lengths", "64", "--tokens", "128"]) == 0
    assert (tmp_path / "eval/eval.json").is_file()


def test_damaged_and_other_folders_are_refused_in_one_line(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(argv: list[str]) -> str:
        capsys.readouterr()
        assert run(argv) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ")
        return error

    folder = shutil.copytree(foreign / "nested", tmp_path / "folder")
    argv = tiny(tmp_path, **of_base(base), run__resume=folder)
    assert "has no trainer.json, which says what model it is of" in error_of(["eval", str(folder)])
    other = tiny(tmp_path, run__resume=folder)
    assert "its weights do not fit this model" in error_of(other)
    wider = shutil.copytree(base, tmp_path / "wider")
    config = transformers.LlamaConfig.from_pretrained(base)
    config.intermediate_size = 26
    transformers.LlamaForCausalLM(config).save_pretrained(wider)
    shards = of_base(wider) | {"cluster__shards": 2, "cluster__cpus": 1, "run__dir": tmp_path / "wide"}
    with pytest.raises(UserError, match=r"_proj\.weight does not fit this model"):
        train_in_threads(tiny(tmp_path, **shards, run__resume=folder))
    model = loaded(base)
    adagrad = torch.optim.Adagrad(model.parameters())
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    adagrad.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, adagrad), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "adagrad", no_dist=True)
    other = tiny(tmp_path, **of_base(base), run__resume=tmp_path / "adagrad")
    assert "has step, sum for it, which is not the state of AdamW" in error_of(other)
    file = folder / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "__1_0.distcp is cut short" in error_of(argv)
    file.unlink()
    assert "__1_0.distcp is missing" in error_of(argv)
    file.write_bytes(content)
    metadata = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(metadata[:100])
    assert ".metadata cannot be read" in error_of(argv)
    for harmful in (Path.unlink, print, torch.load):
        (folder / METADATA).write_bytes(pickle.dumps(harmful))
        assert "which is no part of it" in error_of(argv)
    (folder / METADATA).write_bytes(pickle.dumps(torch.Size([1])))
    assert "it is no metadata" in error_of(argv)
    assert not (tmp_path / "run").exists()
    run_folder, target = tmp_path / "run", ["--to", str(tmp_path / "dcp"), "--format", "dcp"]
    assert train_tiny(tmp_path, training__steps=1) == 0
    assert "keeps the run's" in error_of(["export", str(run_folder), *target, "--dtype", "bfloat16"])
    pth = ["--to", str(tmp_path / "model.pth"), "--format", "dcp"]
    assert "writes a folder" in error_of(["export", str(run_folder), *pth])


def test_tensors_are_read_by_themselves_at_an_address_too(foreign: Path) -> None:
    pytest.importorskip("fsspec")
    place = RemotePath("memory://bucket/dcp-pieces")
    place.upload_folder(foreign / "nested", METADATA)
    in_folder, in_bucket = DistributedTensors(foreign / "nested"), DistributedTensors(place)
    in_bucket.verify()
    assert in_folder.by_stem == in_bucket.by_stem and in_folder.by_stem["optimizer"]
    for key in in_folder.entries:
        assert torch.equal(in_bucket.get_tensor(key), in_folder.get_tensor(key))
    place.remove_folder(METADATA)
