"""Wrapped models whose sequences the ranks of a process group share, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import adjoint
from adjoint.errors import UserError
from tests.hf.hf_models import (
    MODELS,
    OTHERS,
    REFUSED,
    VOCAB,
    assert_exact,
    current_gradients,
    float64_throughout,
    loss_and_gradients,
    make,
)
from tests.model_helpers import assert_same, nothing_held
from tests.ranks import on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
RECURRENT = ["MambaForCausalLM", "Mamba2ForCausalLM"]
ATTENDING = ["LlamaForCausalLM", "BambaForCausalLM", "Gemma3ForCausalLM", "ZambaForCausalLM"]
ROUTED = ["MixtralForCausalLM", "Qwen3NextForCausalLM"]


def rows(batch: int = 2, seqlen: int = 53) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(5))


def over(model: Any, method: Any, group: Any, **given: Any) -> tuple[float, Any]:
    adjoint.wrap(model, method, sequence_group=group)
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def exact(name: str) -> None:
    """Over the group, in one process, and of the untouched model."""
    ids, group, model = rows(), dist.group.WORLD, make(name)
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    mask = torch.arange(53)[None] < torch.tensor([[53], [40]])
    routed = {"output_router_logits": True} if name in ROUTED else {}
    with float64_throughout():
        plain = loss_and_gradients(make(name), input_ids=ids, labels=ids, **routed)
    for method, given in [
        (adjoint.Exact(7), {}),
        (adjoint.Exact(), {}),
        (adjoint.Exact(9, recompute="full"), {}),
        (adjoint.Truncated(16, 8), {}),
        (adjoint.Exact(7), {"attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}),
        (adjoint.Exact(7), {"position_ids": positions, "input_ids": ids[:1], "labels": ids[:1]}),
        (adjoint.Exact(7), {"input_ids": ids[:, :5], "labels": ids[:, :5]}),  # a rank has no chunk
    ]:
        whole = not given and isinstance(method, adjoint.Exact)
        given = {"input_ids": ids, "labels": ids, **given, **routed}
        with float64_throughout():
            shared, alone = (over(model, method, g, **given) for g in (group, None))
        assert_exact(shared, alone)
        if whole:
            assert_exact(shared, plain)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*RECURRENT, *ATTENDING, *ROUTED])
def test_models_over_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, exact, name)


def held(group: Any) -> None:
    """Also by the first call, which compares gradients on few tokens."""
    ids = rows()
    for name in ("LlamaForCausalLM", "BambaForCausalLM"):
        for recompute in ("none", "full"):
            model = adjoint.wrap(make(name), adjoint.Exact(7, recompute=recompute), sequence_group=group)
            with float64_throughout(), nothing_held():
                model(input_ids=ids, labels=ids).loss.backward()
                model(input_ids=ids, labels=ids)


def test_a_step_is_gone_when_it_is_done(tmp_path: Path) -> None:
    held(None)
    on_ranks(2, tmp_path, lambda: held(dist.group.WORLD))


def meshes() -> None:
    """Rows over one dimension of a mesh, sequences over the other; gradients are reduced by DDP or FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row, method = rows(), mesh.get_local_rank("data"), adjoint.Exact(7)
    with float64_throughout():
        whole = loss_and_gradients(make("BambaForCausalLM"), input_ids=ids, labels=ids)[1]
    for name in ("ddp", "ddp over data", "fully_shard", "fully_shard over data"):
        model = adjoint.wrap(make("BambaForCausalLM"), method, sequence_group=mesh["sequence"])
        called: Any = model
        data = mesh["data"] if name.endswith("data") else None
        if name.startswith("ddp"):
            called = DistributedDataParallel(model, process_group=data and data.get_group())
        else:
            called = fully_shard(model, mesh=data or dist.init_device_mesh("cpu", (4,)))
        own = ids[row : row + 1]
        with float64_throughout():
            called(input_ids=own, labels=own).loss.backward()
        found = {n: p.grad for n, p in model.named_parameters()}
        found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
        assert_same(found, whole, 1e-10)
    model = adjoint.wrap(make("BambaForCausalLM"), method, sequence_group=mesh["sequence"])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(UserError, match="sequence_group: layers under fully_shard"):
        model(input_ids=ids, labels=ids)


def test_replicas_and_sequences_on_a_mesh(tmp_path: Path) -> None:
    on_ranks(4, tmp_path, meshes)


def sharded(name: str) -> None:
    """Weights of layers in shards over rows: FSDP reduces gradients over these, and they are summed over the
    sequence once."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row, data = rows(), mesh.get_local_rank("data"), mesh["data"]
    own = ids[row : row + 1]
    model = adjoint.wrap(make(name), adjoint.Exact(7), sequence_group=mesh["sequence"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    for seqlen in (53, 5):  # of which a rank has no chunk
        with float64_throughout():
            whole = loss_and_gradients(make(name), input_ids=ids[:, :seqlen], labels=ids[:, :seqlen])[1]
            model(input_ids=own[:, :seqlen], labels=own[:, :seqlen]).loss.backward()
        assert_same({n: p.grad.full_tensor() for n, p in model.named_parameters()}, whole, 1e-10)
        model.zero_grad()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BambaForCausalLM"])
def test_layers_under_fully_shard(name: str, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, sharded, name)


def own_attention() -> None:
    """Of a model's own code, which attends to keys that it has."""
    ids = rows()
    model = make("LlamaForCausalLM")
    model.set_attn_implementation("eager")
    with float64_throughout():
        shared, alone = (
            over(model, adjoint.Exact(7), group, input_ids=ids, labels=ids)
            for group in (dist.group.WORLD, None)
        )
    assert_exact(shared, alone)


def test_attention_of_another_kind(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, own_attention)


def wrong() -> None:
    group, ids = dist.group.WORLD, rows(1)
    given = {"input_ids": ids, "labels": ids}
    model = make("Mamba2ForCausalLM")
    for method in (adjoint.MiniSequence(), adjoint.Backprop()):
        with refused("has no chunks to share"):
            adjoint.wrap(model, method, sequence_group=group)
    with refused("got 'world'"):
        adjoint.wrap(model, sequence_group="world")
    adjoint.wrap(model, adjoint.Exact(7), sequence_group=group)
    with pytest.raises(ValueError, match="sequence_group: hidden states are those of the whole sequence"):
        model.backbone(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="sequence_group: logits beside a loss"):
        model(**given, logits_to_keep=3)
    with refused("the number of tokens: 53 and 52"):
        mine = ids[:, : 52 + dist.get_rank()]
        model(input_ids=mine, labels=mine)
    with refused("num_items_in_batch"):
        model(**given, num_items_in_batch=10 + dist.get_rank())


def test_what_a_wrapped_model_cannot_share(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, wrong)


def told(model: Any, method: Any, group: Any, **given: Any) -> Any:
    """`over`'s, or the line by which it is refused."""
    try:
        return over(model, method, group, **given)
    except ValueError as error:
        text = str(error)
        assert "\n" not in text, text
        return text


def swept(name: str) -> None:
    """Over the group as in one process, or refused by name; where one process refuses, the group does."""
    ids, group = rows(), dist.group.WORLD
    mask = torch.arange(53)[None] < torch.tensor([[53], [40]])
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    for method, given in [
        (adjoint.Exact(7), {}),
        (adjoint.Exact(9, recompute="full"), {}),
        (adjoint.Truncated(16, 8), {}),
        (adjoint.Exact(7), {"attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}),
        (adjoint.Exact(7), {"position_ids": positions, "input_ids": ids[:1], "labels": ids[:1]}),
    ]:
        given = {"input_ids": ids, "labels": ids, **given}
        with float64_throughout():
            shared, alone = (told(make(name), method, g, **given) for g in (group, None))
        if isinstance(alone, str):
            assert isinstance(shared, str), alone
        elif isinstance(shared, str):
            assert "sequence_group: " in shared, shared
        else:
            assert_exact(shared, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *REFUSED, *OTHERS])
def test_every_class_over_two_ranks(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, swept, name)
