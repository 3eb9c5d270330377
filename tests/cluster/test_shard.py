"""Shards in one process: the same weights, losses, gradients and training as a `Stack` in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.checkpoint import verify_checkpoint
from adjoint.cluster.shard import Shard
from adjoint.cluster.spec import ShardSpec
from adjoint.errors import UserError
from adjoint.train import machine as runtime
from adjoint.train.checkpoint import load_checkpoint, save_checkpoint
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from adjoint.train.optimizer import make_optimizer
from tests.cluster.threads import (
    TRAINING,
    disturbed_shards,
    disturbed_stack,
    make_shards,
    split,
    together,
    train_shards,
    train_stack,
)
from tests.model_helpers import SIZES, VARIANTS, assert_same, make_ids


def alone(config: StackConfig, spans: list[range], worker: int, seed: int, drawn: bool = True) -> Shard:
    training = TrainingConfig(seed=seed)
    spec = ShardSpec(config, training, Exact(7), Layout(len(spans)), tuple(spans), worker)
    return Shard(spec, drawn=drawn)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_shards_have_the_weights_of_the_whole(variant: str, tied: bool, shards: int) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 5, **VARIANTS[variant], "tie_embeddings": tied})
    torch.manual_seed(7)
    whole = dict(Stack(config).named_parameters())
    generator = torch.get_rng_state()
    found: dict[str, torch.Tensor] = {}
    spans = split(config.n_layer, shards)
    for worker in range(shards):
        shard = alone(config, spans, worker, seed=7)
        named = shard.named_weights()
        assert not found.keys() & named.keys()
        found |= named
        if shard.table is not None:
            assert torch.equal(shard.table, whole["embedding.weight"])
        if shard.part.is_last and tied:
            head = shard.part.head_parameters()[1]
            assert torch.equal(head, whole["embedding.weight"])
            assert shards > 1 or head is shard.part.embedding.weight
            assert all(group["weight_decay"] == 0 for group in shard.optimizer.param_groups if any(
                p is head for p in group["params"]))  # fmt: skip
        assert not list(shard.part.buffers())
    assert found.keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(found[name], parameter), name
    assert torch.equal(torch.get_rng_state(), generator), "drawing a part's weights moves the generator"


WINDOWED = [
    *(Truncated(window, 8) for window in (5, 11, 40)),
    *(LayerLocal(window, 8) for window in (None, 5, 40)),
]
CASES = [
    (variant, tied)
    for variant in ("mamba", "mamba2", "diagonal", "scalar", "dense")
    for tied in (True, False)
] + [("mamba, MLP, untied", False), ("mixed, untied", False)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant, tied", CASES)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_exact_over_shards_is_exact_in_one_process(
    variant: str, tied: bool, shards: int, one_thread: None
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 4, **VARIANTS[variant], "tie_embeddings": tied})
    if variant.startswith("mixed"):
        config = StackConfig(**{**SIZES, **VARIANTS[variant]})
    method = Exact(chunk_size=7)
    batches = [make_ids(2, 24, seed=step) for step in range(3)]  # 7 does not divide 24
    stack = disturbed_stack(config)
    losses, gradients = train_stack(stack, method, TRAINING, batches)
    made = disturbed_shards(config, shards, method, TRAINING)
    found_losses, found = train_shards(made, TRAINING, batches)
    weights = {name: p for shard in made for name, p in shard.named_weights().items()}
    expected = dict(stack.named_parameters())
    assert weights.keys() == found.keys() == expected.keys()
    if shards == 1 or not tied:  # then every sum is taken in the same order
        assert found_losses == losses
        for name, parameter in expected.items():
            assert torch.equal(found[name], gradients[name]), name
            assert torch.equal(weights[name], parameter), name
    else:  # the two parts of the table's gradient are summed apart
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert_same(found, gradients, 1e-12)
        assert_same(weights, expected, 1e-12)
    if tied and shards > 1:
        assert torch.equal(made[0].table, weights["embedding.weight"])


@pytest.mark.parametrize("keep", ["inputs", "offload"])
@pytest.mark.parametrize("shards", [1, 3])
def test_keeping_the_inputs_changes_nothing(keep: str, shards: int, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "tie_embeddings": False})
    batches = [make_ids(1, 30)]
    losses, gradients = train_stack(disturbed_stack(config), Exact(8, keep=keep), TRAINING, batches)
    made = disturbed_shards(config, shards, Exact(8, keep=keep), TRAINING)
    found_losses, found = train_shards(made, TRAINING, batches)
    assert found_losses == losses
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_several_batches_are_averaged(tied: bool, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 2, "tie_embeddings": tied})
    training = TrainingConfig(steps=2, warmup_steps=1, lr=0.05, grad_accumulation=3)
    batches = [make_ids(3, 17, seed=step) for step in range(2)]
    stack = disturbed_stack(config)
    losses, gradients = train_stack(stack, Exact(5), training, batches)
    made = disturbed_shards(config, 2, Exact(5), training)
    found_losses, found = train_shards(made, training, batches)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, gradients, 1e-12)
    weights = {name: p for shard in made for name, p in shard.named_weights().items()}
    assert_same(weights, dict(stack.named_parameters()), 1e-12)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_lower_precisions_are_those_of_one_process(precision: str, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "tie_embeddings": False})
    batches = [make_ids(2, 20)]
    with runtime.autocast(precision, torch.device("cpu")):
        losses, gradients = train_stack(disturbed_stack(config, torch.float32), Exact(6), TRAINING, batches)
    found_losses, found = train_shards(
        disturbed_shards(config, 3, Exact(6), TRAINING, precision), TRAINING, batches
    )
    assert found_losses == losses
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("variant", ["mamba", "mamba2", "diagonal", "scalar", "dense"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("method", WINDOWED, ids=str)
def test_windowed_methods_over_shards_are_those_of_one_process(
    variant: str, shards: int, method: Any, one_thread: None
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 4, **VARIANTS[variant]})
    batches = [make_ids(2, 29)]
    stack = disturbed_stack(config)
    losses, gradients = train_stack(stack, method, TRAINING, batches)
    made = disturbed_shards(config, shards, method, TRAINING)
    found_losses, found = train_shards(made, TRAINING, batches)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, gradients, 1e-12)
    weights = {name: p for shard in made for name, p in shard.named_weights().items()}
    assert_same(weights, dict(stack.named_parameters()), 1e-11)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("before, after", [(2, 2), (3, 1), (1, 3)])
def test_a_checkpoint_goes_on_bit_for_bit_under_any_number_of_shards(
    tied: bool, before: int, after: int, tmp_path: Path, one_thread: None
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "tie_embeddings": tied})
    training = TrainingConfig(steps=9, warmup_steps=1, lr=0.05, grad_clip=0.5)
    made = make_shards(config, before, Exact(7), training)
    train_shards(made, training, [make_ids(2, 20, seed=step) for step in range(2)])

    def write(folder: Path) -> dict[str, Any]:
        return {name: entry for shard in made for name, entry in shard.save(str(folder)).items()}

    path = save_checkpoint(tmp_path, 2, write, {})
    verify_checkpoint(path)
    others = make_shards(config, after, Exact(7), training, drawn=False)
    for shard in others:
        shard.load(str(path))
    stack = Stack(config).double()
    optimizer = make_optimizer(stack, training)
    load_checkpoint(path, stack, optimizer)
    more = [make_ids(2, 20, seed=step) for step in (2, 3)]
    losses, _ = train_shards(made, training, more)
    weights = {name: p for shard in made for name, p in shard.named_weights().items()}
    found_losses, _ = train_shards(others, training, more)
    found = {name: p for shard in others for name, p in shard.named_weights().items()}
    whole_losses, _ = train_stack(stack, Exact(7), training, more, optimizer)
    whole = dict(stack.named_parameters())
    if before == after or not tied:
        assert found_losses == losses
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert whole_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, weights, 1e-12)
    assert_same(whole, weights, 1e-12)


@pytest.mark.parametrize("shards", [1, 3])
def test_evaluation_is_the_loss_and_leaves_no_trace(shards: int, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3})
    ids = make_ids(2, 25)
    made = disturbed_shards(config, shards, Exact(7), TRAINING)
    found = together(made, lambda shard: shard.evaluate(ids))
    assert found[:-1] == [None] * (shards - 1)
    stack = disturbed_stack(config)
    with torch.no_grad():
        assert found[-1] == stack(ids, labels=ids, method=Exact(7)).loss.item()
    assert all(p.grad is None for shard in made for p in shard.part.parameters())


def test_helpers_are_for_layer_local_alone() -> None:
    with pytest.raises(UserError, match="has no tasks to share; use layer-local"):
        make_shards(StackConfig(**SIZES), 1, Exact(7), TRAINING, helpers=1)
