"""Wrapped models whose weights transformers shards by tensor and expert parallelism, against one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import adjoint
from tests.hf.hf_models import VOCAB, float64_throughout, make, to_float64, transformers
from tests.model_helpers import assert_same
from tests.ranks import on_ranks

pytest.importorskip("transformers.distributed.configuration_utils")
from transformers.distributed.configuration_utils import DistributedConfig

pytestmark = pytest.mark.xdist_group("tensor_parallel")
METHOD = adjoint.Exact(chunk_size=8)
LLAMA = "LlamaForCausalLM"
CLASSES = ["Gemma3ForCausalLM", "Qwen3_5ForCausalLM", "NemotronHForCausalLM"]
EXPERTS = "Qwen3MoeForCausalLM"


def batch(seqlen: int, rows: int = 2, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB - 1, (rows, seqlen), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 3, -100)}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def loss_and_gradients(model: Any, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(**inputs, **options)
    output.loss.backward()
    gradients = {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": full(output.loss.detach()).clone()}


def as_one_process(
    folder: str, sizes: dict[str, Any], seqlens: list[int], method: Any = METHOD, **options: Any
) -> None:
    """Compare loss and gradients of a sharded model by a method with those of the unsharded by autograd."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size())}
    # the other implementations of experts compute in float32
    load = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained, experts_implementation="eager"
    )
    with float64_throughout():
        plain = to_float64(load(folder, dtype=torch.float64)).train()
        config = DistributedConfig(**sizes)
        model = to_float64(load(folder, dtype=torch.float64, distributed_config=config)).train()
        adjoint.wrap(model, method)
        for seed, seqlen in enumerate(seqlens):
            inputs = batch(seqlen, seed=seed)
            expected = loss_and_gradients(plain, inputs, **options)
            assert_same(loss_and_gradients(model, inputs, **options), expected, 1e-10)
            peers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peers, float(expected["loss"]))
            assert len(set(peers)) == 1


@pytest.mark.parametrize("name", [LLAMA, *(pytest.param(name, marks=pytest.mark.slow) for name in CLASSES)])
def test_tensor_parallel(name: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, as_one_process, str(tmp_path / "model"), {"tp_size": 2}, [37, 8, 19])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [adjoint.Exact(8, recompute="full"), adjoint.Exact(8, memory="1GB"), adjoint.MiniSequence()],
    ids=str,
)
def test_other_methods(method: Any, tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, as_one_process, str(tmp_path / "model"), {"tp_size": 2}, [37], method)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=str)
def test_experts_with_their_routers_loss(sizes: dict[str, Any], tmp_path: Path) -> None:
    make(EXPERTS).save_pretrained(tmp_path / "model")
    arguments = str(tmp_path / "model"), sizes, [37, 19]
    on_ranks(2, tmp_path, _with_routers_loss, *arguments)


def _with_routers_loss(*arguments: Any) -> None:
    as_one_process(*arguments, output_router_logits=True)


@pytest.mark.parametrize(
    "name", [LLAMA, *(pytest.param(name, marks=pytest.mark.slow) for name in [*CLASSES, EXPERTS])]
)
def test_beside_fsdp(name: str, tmp_path: Path) -> None:
    """FSDP2 gathers what tensor parallelism leaves each rank."""
    make(name).save_pretrained(tmp_path / "model")
    on_ranks(4, tmp_path, as_one_process, str(tmp_path / "model"), {"tp_size": 2, "fsdp_size": 2}, [37, 19])


def across_a_sequence_group(folder: str) -> None:
    """Compare with one process: layers sharded along one dimension of a mesh, chunks along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    columns = (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), ColwiseParallel),
        ("mlp", ("gate_proj", "up_proj"), ColwiseParallel),
    )
    rows = ("self_attn", ("o_proj",), RowwiseParallel), ("mlp", ("down_proj",), RowwiseParallel)
    with float64_throughout():
        plain, model = (
            to_float64(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)).train()
            for _ in range(2)
        )
        for layer in model.model.layers:
            for module, names, style in (*columns, *rows):
                plan = {name: style() for name in names}
                parallelize_module(layer.get_submodule(module), mesh["tensor"], plan)
        adjoint.wrap(model, METHOD, sequence_group=mesh["sequence"])
        inputs = batch(37)
        assert_same(loss_and_gradients(model, inputs), loss_and_gradients(plain, inputs), 1e-10)


def test_across_a_sequence_group(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(4, tmp_path, across_a_sequence_group, str(tmp_path / "model"))
