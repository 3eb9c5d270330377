"""Replicas of a pipeline of shards in one process: the same training as without, and all of them alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adjoint import Exact, LayerLocal, StackConfig, Truncated
from adjoint.cluster import replicas as replicas_module
from adjoint.cluster.replicas import rows_of, sum_gradients
from adjoint.cluster.shard import Shard
from adjoint.errors import UserError
from adjoint.train.config import TrainingConfig
from tests.cluster.threads import (
    TRAINING,
    disturbed_shards,
    disturbed_stack,
    local_transports,
    together,
    train_shards,
    train_stack,
)
from tests.model_helpers import SIZES, VARIANTS, assert_same, make_ids

MIXED = ["mamba", "mamba2", "dense"]


def weights_of(shards: list[Shard], replica: int) -> dict[str, torch.Tensor]:
    own = [shard for shard in shards if shard.spec.replica == replica]
    return {name: p for shard in own for name, p in shard.named_weights().items()}


def check(
    config: StackConfig,
    shards: int,
    replicas: int,
    method: Any,
    training: TrainingConfig,
    batches: list[torch.Tensor],
    helpers: int = 0,
) -> None:
    """Losses, gradients and weights are those of one process to rounding, the same bits in every replica and
    from run to run."""
    stack = disturbed_stack(config)
    losses, gradients = train_stack(stack, method, training, batches)
    runs = []
    for _ in range(2):
        made = disturbed_shards(config, shards, method, training, helpers=helpers, replicas=replicas)
        runs.append((made, *train_shards(made, training, batches)))
    (made, found_losses, found), (again, again_losses, _) = runs
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, gradients, 1e-12)
    weights = weights_of(made, 0)
    assert_same(weights, dict(stack.named_parameters()), 1e-11)
    assert again_losses == found_losses
    for replica in range(replicas):
        for name, parameter in weights_of(made, replica).items():
            assert torch.equal(parameter, weights[name]), f"replica {replica} differs in {name}"
            assert torch.equal(weights_of(again, replica)[name], parameter), f"{name} differs when run again"
    if config.tie_embeddings:
        tables = [shard.part.embedding.weight for shard in made if shard.part.is_first]
        assert all(torch.equal(table, weights["embedding.weight"]) for table in tables)


@pytest.mark.parametrize(
    "shards, replicas, tied", [(1, 2, True), (1, 3, False), (2, 2, False), (2, 3, True), (3, 2, True)]
)
def test_exact(shards: int, replicas: int, tied: bool, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "mixer": MIXED, "tie_embeddings": tied})
    batches = [make_ids(5, 24, seed=step) for step in range(2)]  # neither divides 5
    check(config, shards, replicas, Exact(7), TRAINING, batches)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", [Truncated(5, 8), LayerLocal(5, 8), LayerLocal(None, 8)], ids=str)
@pytest.mark.parametrize("shards, replicas", [(1, 2), (2, 3), (3, 2)])
def test_windowed_methods(shards: int, replicas: int, method: Any, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "mixer": MIXED})
    check(config, shards, replicas, method, TRAINING, [make_ids(3, 29, seed=step) for step in range(2)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("helpers", [2, 3])
def test_every_replica_has_helpers_of_its_own(window: int | None, helpers: int, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 4, **VARIANTS["mamba2"]})
    batches = [make_ids(3, 29, seed=step) for step in range(2)]
    check(config, 2, 2, LayerLocal(window, 8), TRAINING, batches, helpers)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_summed_once_after_the_last_batch(
    tied: bool, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 2, "tie_embeddings": tied})
    training = TrainingConfig(steps=2, warmup_steps=1, lr=0.05, grad_accumulation=3)
    sums = []

    def counted(gradients: Any, transport: Any, ranks: Any) -> None:
        sums.append(tuple(ranks))
        sum_gradients(gradients, transport, ranks)

    monkeypatch.setattr("adjoint.cluster.shard.sum_gradients", counted)
    check(config, 2, 2, Exact(5), training, [make_ids(9, 17, seed=step) for step in range(2)])
    layers, table = [(0, 2), (1, 3)] * 2, [(0, 1, 2, 3)] * 4 * tied  # a tied table's over both its shards
    assert sorted(sums) == sorted([*layers, *table] * 2 * 2)  # of each step and run


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_evaluation_adds_up_whatever_rows_there_are(rows: int, one_thread: None) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 2})
    ids = make_ids(rows, 25)
    made = disturbed_shards(config, 2, Exact(7), TRAINING, replicas=3)
    found = together(made, lambda shard: shard.evaluate(ids))
    assert [part is None for part in found] == [True, False] * 3
    stack = disturbed_stack(config)
    with torch.no_grad():
        loss = stack(ids, labels=ids, method=Exact(7)).loss.item()
    assert sum(part for part in found if part is not None) == pytest.approx(loss, rel=1e-12)


def test_a_batch_with_fewer_rows_than_replicas_is_refused(one_thread: None) -> None:
    made = disturbed_shards(StackConfig(**SIZES), 1, Exact(7), TRAINING, replicas=3)
    with pytest.raises(
        UserError, match=r"3 replicas for a batch of 2.*--data.batch 3, or --cluster.replicas 2"
    ):
        together(made, lambda shard: shard.accumulate(make_ids(2, 20)))


@pytest.mark.parametrize("batch, counts", [(3, [2, 1]), (5, [2, 2, 1]), (4, [1, 1, 1, 1]), (1, [1, 0])])
def test_rows_are_shared_out_without_remainder(batch: int, counts: list[int]) -> None:
    ids = make_ids(batch, 4)
    parts = [rows_of(ids, replica, len(counts)) for replica in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert torch.equal(torch.cat(parts), ids)


def test_small_gradients_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets, large ones by themselves and in place; sums end up where they belong."""
    monkeypatch.setattr(replicas_module, "BUCKET", 10)
    sizes = [(2, 3), (4,), (1,), (11,), (3, 2), (2, 5), (12,)]
    transport = local_transports(1)[0]
    sent: list[int] = []

    def doubled(tensor: torch.Tensor, ranks: Any) -> torch.Tensor:
        sent.append(tensor.numel())
        return tensor.mul_(2)

    monkeypatch.setattr(transport, "all_reduce", doubled)
    gradients = [torch.randn(size) for size in sizes]
    gradients[-1] = torch.randn(24)[::2]  # not contiguous
    before = [gradient.clone() for gradient in gradients]
    sum_gradients(gradients, transport, [0])
    assert all(torch.equal(g, 2 * b) for g, b in zip(gradients, before, strict=True))
    assert sent == [10, 11, 10, 7, 12]
