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
from adjoint.hf.verify.trial_copy import make_trial_copy
from adjoint.parallel.split_tensors import split_like
from adjoint.train.pretrained import tensor_parallel_config
from tests.hf.hf_models import VOCAB, float64_throughout, make, since, to_float64, transformers
from tests.model_helpers import assert_same
from tests.ranks import on_ranks

pytest.importorskip("transformers.distributed.configuration_utils")
from transformers.distributed.configuration_utils import DistributedConfig

pytestmark = [
    pytest.mark.xdist_group("tensor_parallel"),
    since(5, 21, "its tensor parallelism has no experts, no FSDP2 beside it and no heads of uneven size"),
]
METHOD = adjoint.Exact(chunk_size=8)
LLAMA = "LlamaForCausalLM"
QWEN = "Qwen3_5ForCausalLM"  # with norms of each head
CLASSES = [QWEN, LLAMA, "Gemma3ForCausalLM", "NemotronHForCausalLM"]  # the first one runs each time
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


def load(folder: str, config: Any = None) -> Any:
    """Load a model in float64, sharded where there is a configuration."""
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size())}
    sharded = {} if config is None else {"distributed_config": config}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", **sharded
    )  # the other implementations of experts compute in float32
    return to_float64(model).train()


def as_one_process(
    folder: str,
    sizes: dict[str, Any],
    seqlens: list[int],
    method: Any = METHOD,
    shares_sequence: bool = False,
    **options: Any,
) -> None:
    """Compare loss and gradients of a sharded model by a method with those of the unsharded by autograd.

    Args:
        shares_sequence: whether the groups of tp_size ranks share each sequence.
    """
    config, group, tp_size = DistributedConfig(**sizes), None, sizes.get("tp_size", 1)
    if shares_sequence:
        config = tensor_parallel_config(tp_size)
        groups = [dist.new_group(range(i, dist.get_world_size(), tp_size)) for i in range(tp_size)]
        group = groups[dist.get_rank() % tp_size]
    with float64_throughout():
        plain, model = load(folder), load(folder, config)
        adjoint.wrap(model, method, sequence_group=group)
        for seed, seqlen in enumerate(seqlens):
            inputs = batch(seqlen, seed=seed)
            expected = loss_and_gradients(plain, inputs, **options)
            assert_same(loss_and_gradients(model, inputs, **options), expected, 1e-10)
            peers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(peers, float(expected["loss"]))
            assert len(set(peers)) == 1


# transformers has no plan for Bamba: this one splits attention and MLPs, and leaves Mamba-2 layers whole.
PLAN = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
PLAN |= {f"model.layers.*.feed_forward.{name}_proj": "colwise" for name in ("gate", "up")}
PLAN |= {f"model.layers.*.{name}_proj": "rowwise" for name in ("self_attn.o", "feed_forward.down")}
ROUTED = {"output_router_logits": True}
# (class, ranks, sizes of the configuration, options of `as_one_process`)
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *((name, 2, {"tp_size": 2}, {}) for name in CLASSES),
    ("BambaForCausalLM", 2, {"tp_size": 2, "tp_plan": PLAN}, {}),
    *((EXPERTS, 2, sizes, ROUTED) for sizes in ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2})),
    # FSDP2 gathers what tensor parallelism leaves each rank; HSDP; experts on ranks of their own
    *((name, 4, {"tp_size": 2, "fsdp_size": 2}, {}) for name in (*CLASSES, EXPERTS)),
    (LLAMA, 4, {"tp_size": 2, "dp_replicate_size": 2}, {}),
    (LLAMA, 4, {"fsdp_size": 2, "dp_replicate_size": 2}, {}),
    (EXPERTS, 4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, {}),
    (EXPERTS, 4, {"fsdp_size": 4, "ep_size": 2}, {}),
    *((name, 4, {"tp_size": 2}, {"shares_sequence": True}) for name in (LLAMA, QWEN)),
    (EXPERTS, 4, {"tp_size": 2}, {"shares_sequence": True, **ROUTED}),
]


@pytest.mark.sampled(len(CASES))
@pytest.mark.parametrize(("name", "ranks", "sizes", "options"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    name: str, ranks: int, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Compare experts with their routers' loss, too, and layouts with FSDP2, replicas or shared sequences."""
    make(name).save_pretrained(tmp_path / "model")
    case = functools.partial(as_one_process, **options)
    on_ranks(ranks, tmp_path, case, str(tmp_path / "model"), sizes, [37, 8] if ranks == 2 else [37, 19])


def every_call(folder: str) -> None:
    """Compare calls of several kinds, accumulated: each kind is compared on first use."""
    with float64_throughout():
        plain, model = load(folder), adjoint.wrap(load(folder, DistributedConfig(tp_size=2)), METHOD)
        mask = torch.arange(19)[None] < torch.tensor([[19], [12]])
        padded = batch(19) | {"attention_mask": mask.long()}
        padded["labels"] = padded["labels"].masked_fill(~mask, -100)
        for inputs in (batch(19), padded, batch(11)):
            for each in (plain, model):
                each(**inputs).loss.backward()
            gradients = [{n: full(p.grad) for n, p in each.named_parameters()} for each in (model, plain)]
            assert_same(*gradients, 1e-10)
        copied: Any = make_trial_copy(model)
        before = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        adjoint.unwrap(copied)(**batch(11)).loss.backward()
        assert all(p.grad is not None for p in copied.parameters())
        assert_same({name: full(p.grad) for name, p in model.named_parameters()}, before, 0.0)


def ranks_differ(folder: str) -> None:
    model: Any = adjoint.wrap(load(folder, DistributedConfig(tp_size=2)), METHOD)
    model(**batch(19)).loss.backward()
    norm = model.model.layers[0].input_layernorm
    norm.variance_epsilon = 1e-3 * (1 + dist.get_rank())
    with pytest.raises(
        ValueError, match=r"ranks? must have the same model.*layers\.0\.input_layernorm\.variance_eps"
    ):
        model(**batch(19))
    norm.variance_epsilon = 1e-3
    rank, inputs = dist.get_rank(), batch(19)
    for name, change in (
        ("input_ids", {"input_ids": (inputs["input_ids"] + rank) % VOCAB}),
        ("input_ids", batch(19 + rank)),
        ("labels", {"labels": inputs["labels"] + rank * (inputs["labels"] >= 0)}),
        ("num_items_in_batch", {"num_items_in_batch": 7} if rank else {}),  # which is tried on first use
        ("num_items_in_batch", {"num_items_in_batch": 7 + rank}),
    ):
        remedy = ": shuffle alike on all ranks, with one seed" if name == "input_ids" else ""
        message = rf"same rows and method, but rank 1 and rank 0 of the group differ in {name}{remedy}$"
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, **change})
    model(**batch(19)).loss.backward()
    adjoint.wrap(model, adjoint.Exact(chunk_size=8 + rank))
    with pytest.raises(ValueError, match=r"differ in the method$"):
        model(**inputs)


@pytest.mark.slow
def test_ranks_whose_parts_differ(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, ranks_differ, str(tmp_path / "model"))


@pytest.mark.slow
def test_gradients_of_norms_on_each_ranks_heads(tmp_path: Path) -> None:
    """Sums over ranks are taken once, whatever calls come before; and first use compares a copy."""
    make("Qwen3ForCausalLM").save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, every_call, str(tmp_path / "model"))


def test_weights_that_are_no_dtensors_are_refused() -> None:
    """Before 5.16 transformers split weights into plain tensors, which say nothing of ranks."""
    model = make("Qwen3ForCausalLM")

    def hook(*_: object) -> None:
        """Stand for transformers' own."""

    hook.__qualname__ = "ReplicatedWithGradAllReduce.prepare_module_tp.<locals>._backward_hook"
    model.model.layers[0].self_attn.q_norm.register_full_backward_hook(hook)
    with pytest.raises(
        adjoint.errors.UserError, match=r"its weights are no DTensors: install transformers 5\.21"
    ):
        adjoint.wrap(model, METHOD)


def after_a_plain_call(folder: str, sizes: dict[str, Any]) -> None:
    """Compare a model that is called, and registers transformers' hooks, before it is wrapped."""
    with float64_throughout():
        plain, model, inputs = load(folder), load(folder, DistributedConfig(**sizes)), batch(19)
        expected = loss_and_gradients(plain, inputs)
        for prepare in (lambda m: m, lambda m: adjoint.wrap(m, METHOD), lambda m: m, adjoint.unwrap):
            prepared: Any = prepare(model)
            assert_same(loss_and_gradients(prepared, inputs), expected, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "fsdp_size": 2}], ids=str)
def test_wrapped_after_a_plain_call(sizes: dict[str, Any], tmp_path: Path) -> None:
    make("Qwen3ForCausalLM").save_pretrained(tmp_path / "model")
    ranks = sizes["tp_size"] * sizes.get("fsdp_size", 1)
    on_ranks(ranks, tmp_path, after_a_plain_call, str(tmp_path / "model"), sizes)


def with_adapters(folder: str) -> None:
    """Compare with one process: PEFT's adapters of weights that are split by columns."""
    peft = pytest.importorskip("peft")
    settings = {"r": 3, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    with float64_throughout():
        plain, model = (
            peft.get_peft_model(each, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).double()
            for each in (load(folder), load(folder, DistributedConfig(tp_size=2)))
        )
        drawn = dict(model.named_parameters())
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(full(drawn[name].detach()))  # PEFT draws a part on each rank
        adjoint.wrap(model, METHOD)
        inputs = batch(37)
        assert_same(loss_and_gradients(model, inputs), loss_and_gradients(plain, inputs), 1e-10)


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, with_adapters, str(tmp_path / "model"))


def with_dropout(folder: str) -> None:
    """Compare with transformers' own backward on the same ranks, then with finite differences."""
    with float64_throughout():
        model, inputs = load(folder, DistributedConfig(tp_size=2)), batch(37)
        inputs["input_ids"].clamp_(min=1)  # the row of the padding token has no gradient

        def run() -> dict[str, Tensor]:
            torch.manual_seed(5)
            return loss_and_gradients(model, inputs)

        expected = run()
        adjoint.wrap(model, adjoint.Exact(chunk_size=37))
        model(**inputs)  # first use
        assert_same(run(), expected, 1e-10)
        adjoint.wrap(model, METHOD)
        gradients = run()
        assert gradients["loss"] != expected["loss"]
        draw = torch.Generator().manual_seed(0)
        direction = {
            name: torch.randn(p.shape, dtype=p.dtype, generator=draw) for name, p in model.named_parameters()
        }
        slope = sum(float((gradients[name] * d).sum()) for name, d in direction.items())
        losses = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p += step * split_like(direction[name], p)
            losses.append(float(run()["loss"]))
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rates",
    [
        (LLAMA, {"attention_dropout": 0.2}),
        ("GPTNeoXForCausalLM", {"attention_dropout": 0.2, "hidden_dropout": 0.1}),
    ],
)
def test_dropout(name: str, rates: dict[str, float], tmp_path: Path) -> None:
    """Masks are those that transformers draws on the same ranks; chunks that run again draw theirs again."""
    make(name, **rates).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, with_dropout, str(tmp_path / "model"))


def across_a_sequence_group(folder: str, replicas: int | None = None) -> None:
    """Compare with one process: layers sharded along one dimension of a mesh, chunks along another.

    Args:
        replicas: along a third dimension, each with other rows, over which FSDP2 shards the layers too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, replicas or 1, 2), mesh_dim_names=("sequence", "data", "tensor"))
    columns = (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), ColwiseParallel),
        ("mlp", ("gate_proj", "up_proj"), ColwiseParallel),
    )
    rows = ("self_attn", ("o_proj",), RowwiseParallel), ("mlp", ("down_proj",), RowwiseParallel)
    with float64_throughout():
        plain, model = load(folder), load(folder)
        for layer in model.model.layers:
            for module, names, style in (*columns, *rows):
                plan = {name: style() for name in names}
                parallelize_module(layer.get_submodule(module), mesh["tensor"], plan)
        for module in [*model.model.layers, model] if replicas else []:
            fully_shard(module, mesh=mesh["data"])
        adjoint.wrap(model, METHOD, sequence_group=mesh["sequence"])
        inputs, row = batch(37), mesh.get_local_rank("data")
        expected = loss_and_gradients(plain, inputs)
        if replicas:  # FSDP2 takes the mean over replicas of losses that are divided by this
            inputs["num_items_in_batch"] = (inputs["labels"][:, 1:] != -100).sum() / replicas
            inputs |= {name: inputs[name][row : row + 1] for name in ("input_ids", "labels")}
        results = loss_and_gradients(model, inputs)
        assert_same({**results, "loss": expected["loss"]} if replicas else results, expected, 1e-10)


def with_split_tokens(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, tokens = init_device_mesh("cpu", (2,)), Shard(1)
    for name, style in {
        "model.norm": SequenceParallel(),
        "model.layers.1.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        "model.layers.2.mlp": PrepareModuleInput(
            input_layouts=(tokens,), desired_input_layouts=(Replicate(),)
        ),
    }.items():
        model = load(folder)
        parallelize_module(model, mesh, {name: style})
        with pytest.raises(ValueError, match=f"{name}: it splits tokens over ranks") as raised:
            adjoint.wrap(model, METHOD)(**batch(32))
        assert "\n" not in str(raised.value)
    plan = {"model.norm": "sequence_parallel"}
    model = load(folder, DistributedConfig(tp_size=2, tp_plan=plan))
    with pytest.raises(ValueError, match=r"model\.norm: it splits tokens over ranks"):
        adjoint.wrap(model, METHOD)(**batch(32))


@pytest.mark.slow
def test_split_tokens_are_refused(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(2, tmp_path, with_split_tokens, str(tmp_path / "model"))


@pytest.mark.slow
def test_across_a_sequence_group(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(4, tmp_path, across_a_sequence_group, str(tmp_path / "model"))


@pytest.mark.slow
def test_across_a_sequence_group_and_fsdp(tmp_path: Path) -> None:
    make(LLAMA).save_pretrained(tmp_path / "model")
    on_ranks(8, tmp_path, across_a_sequence_group, str(tmp_path / "model"), 2, timeout=300)
