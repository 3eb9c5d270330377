"""Hugging Face models in layer shards: the same losses, gradients and training as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import adjoint
from adjoint.checkpoint import StoredTensors
from adjoint.cluster.shard import Microbatch
from adjoint.errors import UserError
from adjoint.hf.split import Pretrained, examine
from adjoint.plan.outline import described_by_files
from adjoint.train import pretrained as train_pretrained
from adjoint.train.layout import Layout
from tests.cluster.faults import FLAGS, told
from tests.cluster.test_layouts import name_of, trained
from tests.cluster.threads import TRAINING, make_shards
from tests.hf.hf_models import float64_throughout, make
from tests.training_helpers import train_tiny

HYBRID = {"num_hidden_layers": 4, "attn_layer_indices": [1]}
CASES = [
    ("BambaForCausalLM", HYBRID),
    ("Mamba2ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    ("GraniteMoeHybridForCausalLM", {}),  # scales embeddings and logits
]


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name, options", CASES)
@pytest.mark.parametrize(
    "layout", [Layout(3), Layout(3, 1, 2), Layout(1, 2), Layout(2, 2), Layout(1, 3)], ids=name_of
)
def test_shards_are_one_process(name: str, options: dict[str, Any], layout: Layout, one_thread: None) -> None:
    method, generator = adjoint.Exact(7), torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 61, (2, 24), generator=generator) for _ in range(3)]  # 7 does not divide 24
    with float64_throughout():
        model = make(name, **options)
        pretrained = examine(model, batches[0][:1, :13])
        trained(pretrained, method, layout, batches, wrapped=adjoint.wrap(model, method))


@pytest.mark.parametrize(
    "name, why",
    [
        ("GPT2LMHeadModel", "changes the embeddings"),
        ("Zamba2ForCausalLM", "hand on more than hidden states"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .*{why}.*--cluster.shards 0"):
        examine(make(name, torch.float32), torch.arange(13)[None] % 61)


def test_every_replica_and_batch_draws_masks_of_its_own(one_thread: None) -> None:
    """The same on every worker that does that batch again, whatever it has drawn before; chunks that are
    recomputed draw what they drew."""
    ids = torch.arange(24)[None].expand(2, -1) % 61  # both replicas have the same row
    with float64_throughout():
        model = make("BambaForCausalLM", attention_dropout=0.5, **HYBRID)
        weights = {n: p.detach() for n, p in model.named_parameters()}
        shards = make_shards(examine(model, ids[:1, :13]), Layout(replicas=2), adjoint.Exact(7), TRAINING)

        def gradient(replica: int, number: int, chunk_size: int = 7) -> torch.Tensor:
            shard = shards[replica]
            shard.agreed = True  # it runs without the other, with which it would compare its layers
            with torch.no_grad():
                for name, parameter in shard.named_weights().items():
                    parameter.copy_(weights[name])
            shard.zero_grad()
            shard.accumulate(ids, chunk_size, step=Microbatch(final=False, number=number))
            return torch.cat([p.grad.flatten() for p in shard.part.parameters()])

        torch.manual_seed(0)
        first = gradient(0, 5)
        gradients = [first, gradient(1, 5), gradient(0, 6), gradient(0, 5), gradient(0, 0)]
    distances = [float((other - first).norm() / first.norm()) for other in gradients]
    assert distances[0] == distances[3] == 0.0
    assert min(distances[1], distances[2], distances[4]) > 0.01, distances


# ------------------------------------------------------------------------------------------- weights in files


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors that are read from files; a whole model may not be."""
    names: list[str] = []
    get = StoredTensors.__getitem__

    def noting(stored: StoredTensors, name: str) -> torch.Tensor:
        names.append(name)
        return get(stored, name)

    monkeypatch.setattr(StoredTensors, "__getitem__", noting)
    monkeypatch.setattr(train_pretrained, "load", lambda *_: pytest.fail("the whole model was loaded"))
    return names


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nobody_reads_more_than_its_part(tied: bool, read: list[str], tmp_path: Path) -> None:
    """The driver a layer of each kind from each third of the model; a shard its own layers."""
    model = make("Mamba2ForCausalLM", torch.bfloat16, num_hidden_layers=7, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    pretrained = described_by_files(str(tmp_path), adjoint.Exact())
    assert pretrained is not None
    layers = {int(name.split(".")[2]) for name in read if ".layers." in name}
    assert layers == {0, 2, 4} and len(read) == len(set(read)) < len(pretrained.names) / 2
    weights, loaded = dict(model.float().named_parameters()), set[str]()
    for shard in make_shards(pretrained, 3, adjoint.Exact(7), TRAINING, "float32", drawn=False):
        read.clear()
        shard.load(str(tmp_path))
        named = shard.named_weights()
        assert set(read) == {*named, *([pretrained.embedding] if shard.table is not None else [])}
        assert all(torch.equal(parameter, weights[name]) for name, parameter in named.items())
        loaded |= named.keys()
    assert loaded == set(pretrained.names) == weights.keys()
    with pytest.raises(FileNotFoundError):  # a node without the folder
        shard.load(str(tmp_path / "nowhere"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, options", [CASES[0], CASES[1], ("GPT2LMHeadModel", {})])
def test_files_say_what_the_loaded_model_says(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    make(name, torch.float32, **options).save_pretrained(tmp_path)
    said: list[Any] = []
    for describe in (described_by_files, lambda *given: train_pretrained.described(*given, None)):
        try:
            said.append(describe(str(tmp_path), adjoint.Exact()))
        except UserError as error:
            said.append(str(error))
    assert said[0] == said[1]
    if isinstance(said[0], Pretrained):
        assert all(torch.equal(said[0].buffers[n], buffer) for n, buffer in said[1].buffers.items())


def test_files_of_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    make("Mamba2ForCausalLM", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name, other in (("lm_head.weight", "head"), ("backbone.norm_f.weight", "norm")):
        save_file({other if n == name else n: tensor for n, tensor in stored.items()}, file)
        assert described_by_files(str(tmp_path), adjoint.Exact()) is None
    file.unlink()
    assert described_by_files(str(tmp_path), adjoint.Exact()) is None


# ------------------------------------------------------------------------------------------------- over Ray


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    make("BambaForCausalLM", torch.float32, vocab_size=256, **HYBRID).save_pretrained(tmp_path / "bamba")
    settings = {"model__from_pretrained": tmp_path / "bamba", "model__d_model": 24, "model__n_layer": 4}
    return {**FLAGS, **settings}


@pytest.mark.slow
def test_a_run_over_shards_is_one_in_one_process(
    ray_on_loopback: None, options: dict[str, Any], tmp_path: Path
) -> None:
    losses = []
    for shards in (0, 2):
        folder = tmp_path / str(shards)
        folder.mkdir()
        assert train_tiny(folder, **options | {"cluster__shards": shards}) == 0
        losses.append([row["loss"] for row in told(folder / "run")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"method__name": "layer-local", "method__chunk_size": 20}, "takes Exact"),
        ({"model__d_model": 32}, "model.d_model: model.from_pretrained has its own; leave 32 out"),
        (
            {"model__from_pretrained": "no/such/model"},
            "there is no no/such/model; name a folder",
        ),
        ({"cluster__shards": 1, "data__documents": "packed"}, "data.documents: packed documents of a pre"),
    ],
)
def test_bad_input_is_one_line(
    flags: dict[str, Any], said: str, options: dict[str, Any], refused_run: Any
) -> None:
    refused_run(said, **{**options, "cluster__shards": 0, **flags})
