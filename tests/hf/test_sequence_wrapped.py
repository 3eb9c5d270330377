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
    skip_if_broken,
)
from tests.model_helpers import assert_same, nothing_held
from tests.ranks import THOROUGH, on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
HYBRID = "BambaForCausalLM"  # a recurrence beside attention
RECURRENT = ["MambaForCausalLM", "Mamba2ForCausalLM"]
ATTENDING = ["LlamaForCausalLM", "BambaForCausalLM", "Gemma3ForCausalLM", "ZambaForCausalLM"]
ROUTED = ["MixtralForCausalLM", "Qwen3NextForCausalLM"]


def rows(batch: int = 2, seqlen: int = 53) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(5))


def run_in_group(model: Any, method: Any, group: Any, **inputs: Any) -> tuple[float, Any]:
    adjoint.wrap(model, method, sequence_group=group)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), current_gradients(model)


def check_exact(name: str, thorough: bool) -> None:
    """Compare a group with one process, and that with the untouched model."""
    ids, group, model = rows(), dist.group.WORLD, make(name)
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    mask = torch.arange(53)[None] < torch.tensor([[53], [40]])
    routed = {"output_router_logits": True} if name in ROUTED else {}
    with float64_throughout():
        plain = loss_and_gradients(make(name), input_ids=ids, labels=ids, **routed)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (adjoint.Exact(7), {}),
        (adjoint.Exact(7), {"attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}),
        (adjoint.Exact(7), {"position_ids": positions, "input_ids": ids[:1], "labels": ids[:1]}),
        (adjoint.Exact(), {}),
        (adjoint.Exact(9, recompute="full"), {}),
        (adjoint.Truncated(16, 8), {}),
        (adjoint.Exact(7), {"input_ids": ids[:, :5], "labels": ids[:, :5]}),  # a rank has no chunk
    ]
    for method, inputs in calls if thorough else calls[:3]:
        is_plain_call = not inputs and isinstance(method, adjoint.Exact)
        inputs = {"input_ids": ids, "labels": ids, **inputs, **routed}
        with float64_throughout():
            shared, alone = (run_in_group(model, method, g, **inputs) for g in (group, None))
        assert_exact(shared, alone)
        if is_plain_call:
            assert_exact(shared, plain)


def test_a_model_over_ranks(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, check_exact, HYBRID, False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*RECURRENT, *ATTENDING, *ROUTED])
def test_models_over_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, check_exact, name, True)


def check_call(name: str) -> None:
    """Compare the loss of a group with that of one process."""
    inputs = {"input_ids": rows(), "labels": rows()}
    shared, alone = (
        run_in_group(make(name), adjoint.Exact(7), group, **inputs)[0] for group in (dist.group.WORLD, None)
    )
    assert shared.item() == pytest.approx(alone.item(), rel=1e-5)


def test_processes_that_were_started_apart_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_call, "Mamba2ForCausalLM", start="spawn")


def check_nothing_held(group: Any) -> None:
    """Assert that a step leaves no tensors behind, nor does the first call, which compares gradients."""
    ids = rows()
    for recompute in ("none", "full"):
        model = adjoint.wrap(make(HYBRID), adjoint.Exact(7, recompute=recompute), sequence_group=group)
        with float64_throughout(), nothing_held():
            model(input_ids=ids, labels=ids).loss.backward()
            model(input_ids=ids, labels=ids)


@pytest.mark.slow
def test_a_step_is_gone_when_it_is_done(tmp_path: Path) -> None:
    check_nothing_held(None)
    on_ranks(2, tmp_path, lambda: check_nothing_held(dist.group.WORLD))


def check_meshes(thorough: bool) -> None:
    """Share rows over one dimension of a mesh, sequences over the other; DDP or FSDP2 reduces gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row, method = rows(), mesh.get_local_rank("data"), adjoint.Exact(7)
    with float64_throughout():
        expected = loss_and_gradients(make(HYBRID), input_ids=ids, labels=ids)[1]
    names = "fully_shard over data", "ddp", "fully_shard", "ddp over data"
    for name in names if thorough else names[:1]:
        model = adjoint.wrap(make(HYBRID), method, sequence_group=mesh["sequence"])
        called: Any = model
        data = mesh["data"] if name.endswith("data") else None
        if name.startswith("ddp"):
            called = DistributedDataParallel(model, process_group=data and data.get_group())
        else:
            called = fully_shard(model, mesh=data or dist.init_device_mesh("cpu", (4,)))
        own_row = ids[row : row + 1]
        with float64_throughout():
            called(input_ids=own_row, labels=own_row).loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        gradients = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
        assert_same(gradients, expected, 1e-10)
    model = adjoint.wrap(make(HYBRID), method, sequence_group=mesh["sequence"])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(UserError, match="sequence_group: layers under fully_shard"):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("thorough", THOROUGH)
def test_replicas_and_sequences_on_a_mesh(thorough: bool, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, check_meshes, thorough)


def check_sharded_layers(name: str) -> None:
    """Shard layers over rows: FSDP reduces gradients over these, and they are summed over the sequence
    once."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row, data = rows(), mesh.get_local_rank("data"), mesh["data"]
    own_row = ids[row : row + 1]
    model = adjoint.wrap(make(name), adjoint.Exact(7), sequence_group=mesh["sequence"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    for seqlen in (53, 5):  # of which a rank has no chunk
        with float64_throughout():
            expected = loss_and_gradients(make(name), input_ids=ids[:, :seqlen], labels=ids[:, :seqlen])[1]
            model(input_ids=own_row[:, :seqlen], labels=own_row[:, :seqlen]).loss.backward()
        assert_same({n: p.grad.full_tensor() for n, p in model.named_parameters()}, expected, 1e-10)
        model.zero_grad()


@pytest.mark.parametrize("name", [pytest.param("LlamaForCausalLM", marks=pytest.mark.slow), HYBRID])
def test_layers_under_fully_shard(name: str, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, check_sharded_layers, name)


def check_eager_attention() -> None:
    """Run a model's own attention, whose keys must be in one process."""
    ids = rows()
    model = make("LlamaForCausalLM")
    model.set_attn_implementation("eager")
    with float64_throughout():
        shared, alone = (
            run_in_group(model, adjoint.Exact(7), group, input_ids=ids, labels=ids)
            for group in (dist.group.WORLD, None)
        )
    assert_exact(shared, alone)


def test_attention_of_another_kind(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_eager_attention)


def check_refusals() -> None:
    group, ids = dist.group.WORLD, rows(1)
    inputs = {"input_ids": ids, "labels": ids}
    model = make("Mamba2ForCausalLM")
    for method in (adjoint.MiniSequence(), adjoint.Backprop()):
        with refused("has no chunks to share"):
            adjoint.wrap(model, method, sequence_group=group)
    with refused("got 'world'"):
        adjoint.wrap(model, sequence_group="world")
    adjoint.wrap(model, adjoint.Exact(7), sequence_group=group)
    with pytest.raises(
        ValueError, match="sequence_group: no rank has the hidden states of the whole sequence"
    ):
        model.backbone(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="sequence_group: logits beside a loss"):
        model(**inputs, logits_to_keep=3)
    with refused("the number of tokens: 53 and 52"):
        unequal_rows = ids[:, : 52 + dist.get_rank()]
        model(input_ids=unequal_rows, labels=unequal_rows)
    with refused("num_items_in_batch"):
        model(**inputs, num_items_in_batch=10 + dist.get_rank())
    reads_types = adjoint.wrap(make("GPT2LMHeadModel").eval(), adjoint.Exact(7), sequence_group=group)
    with refused("further inputs"):
        reads_types(**inputs, token_type_ids=torch.full_like(ids, dist.get_rank()))


def test_what_a_wrapped_model_cannot_share(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_refusals)


DEEPSEEK = "DeepseekV3ForCausalLM"
BIAS, ROTARY, NORM = (
    "layers.1.mlp.gate.e_score_correction_bias",
    "rotary_emb.inv_freq",
    "layers.1.input_layernorm",
)


def scaled_by(factor: float) -> Any:
    return lambda module, inputs, output: output * factor


def change_hook(model: Any, factor: float) -> None:
    handle = vars(model).pop("handle", None)
    if handle is not None:
        handle.remove()
    vars(model)["handle"] = model.model.layers[1].mlp.register_forward_hook(scaled_by(factor))


# By what is said of it: (model, 1.0 or another number) → None, which makes a difference of the number.
DIFFERENCES: dict[str, Any] = {
    f"model.{BIAS}": lambda model, x: model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(x),
    f"model.{ROTARY}": lambda model, x: model.model.rotary_emb.inv_freq.fill_(x),
    f"model.{NORM}.variance_epsilon": lambda model, x: setattr(
        model.get_submodule(f"model.{NORM}"), "variance_epsilon", 1e-3 * x
    ),
    "config.routed_scaling_factor": lambda model, x: setattr(model.config, "routed_scaling_factor", x),
    "a hook of model.layers.1.mlp": change_hook,
    "model.embed_tokens.weight": lambda model, x: model.model.embed_tokens.weight[0].fill_(x),
}


def check_differences(names: list[str]) -> None:
    """Refuse ranks whose models differ, at the first call and later, on all ranks; else go on."""
    inputs = {"input_ids": rows(1), "labels": rows(1)}
    model: Any = make(DEEPSEEK, first_k_dense_replace=1)
    model.model.embed_tokens.requires_grad_(False)
    vars(model.model.layers[0].mlp)["longest"] = 0
    lengths = model.model.layers[0].mlp.register_forward_hook(  # which differ from rank to rank
        lambda module, args, output: vars(module).update(longest=args[0].shape[1] + 100 * dist.get_rank())
    )
    for name in names:
        change = DIFFERENCES[name]
        for is_first_use in (True, False):
            with torch.no_grad():
                change(model, 1.0 + dist.get_rank())
            if is_first_use:
                adjoint.wrap(model, adjoint.Exact(7), sequence_group=dist.group.WORLD)
            with refused("every rank must have the same model", "rank 1 and rank 0", f"differ in {name}:"):
                model(**inputs)
            with torch.no_grad():
                change(model, 1.0)
            for _ in range(2):
                model(**inputs).loss.backward()
    lengths.remove()


@pytest.mark.parametrize(
    "names",
    [list(DIFFERENCES)[:1], pytest.param([*DIFFERENCES], marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_ranks_whose_models_differ(names: list[str], tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_differences, names)


def check_frozen() -> None:
    inputs, model = {"input_ids": rows(1), "labels": rows(1)}, make("LlamaForCausalLM").requires_grad_(False)
    with torch.no_grad(), float64_throughout():
        expected = model(**inputs).loss
        adjoint.wrap(model, adjoint.Exact(7), sequence_group=dist.group.WORLD)
        assert model(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_an_evaluation_in_which_nothing_is_trained(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, check_frozen)


def result_or_refusal(model: Any, method: Any, group: Any, **inputs: Any) -> Any:
    """Return the result of `run_in_group`, or the line by which it is refused."""
    try:
        return run_in_group(model, method, group, **inputs)
    except ValueError as error:
        text = str(error)
        assert "\n" not in text, text
        return text


def check_inputs(name: str) -> None:
    """Compare a group with one process, or expect a refusal by name; if one process refuses, the group
    does."""
    ids, group = rows(), dist.group.WORLD
    mask = torch.arange(53)[None] < torch.tensor([[53], [40]])
    positions = torch.cat([torch.arange(20), torch.arange(33)])[None]
    for method, inputs in [
        (adjoint.Exact(7), {}),
        (adjoint.Exact(9, recompute="full"), {}),
        (adjoint.Truncated(16, 8), {}),
        (adjoint.Exact(7), {"attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}),
        (adjoint.Exact(7), {"position_ids": positions, "input_ids": ids[:1], "labels": ids[:1]}),
    ]:
        inputs = {"input_ids": ids, "labels": ids, **inputs}
        with float64_throughout():
            shared, alone = (result_or_refusal(make(name), method, g, **inputs) for g in (group, None))
        if isinstance(alone, str):
            assert isinstance(shared, str), alone
        elif isinstance(shared, str):
            assert "sequence_group: " in shared, shared
        else:
            assert_exact(shared, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *REFUSED, *OTHERS])
def test_every_class_over_two_ranks(name: str, tmp_path: Path) -> None:
    skip_if_broken(name)
    on_ranks(2, tmp_path, check_inputs, name)
