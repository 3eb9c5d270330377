"""A sequence over several workers, its chunks dealt out in turn: the same training as in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, StackConfig, Truncated
from adjoint.engine.program import Owners, Send
from adjoint.errors import UserError
from adjoint.plan.schedule import grid_of, step_plan
from adjoint.train.config import TrainingConfig
from tests.cluster.threads import (
    TRAINING,
    disturbed_shards,
    disturbed_stack,
    make_shards,
    together,
    train_shards,
    train_stack,
)
from tests.model_helpers import ALL_MIXERS, SIZES, VARIANTS, assert_same, error, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = StackConfig(**{**SIZES, **VARIANTS["mixed, untied"]})


def trained_twice(
    config: StackConfig,
    method: Any,
    training: TrainingConfig,
    batches: list[torch.Tensor],
    shards: int,
    sequence: int,
    replicas: int = 1,
) -> None:
    """Losses, gradients and weights are those of one process to rounding, the same bits on all workers of a
    shard and when run again."""
    stack = disturbed_stack(config)
    losses, expected = train_stack(stack, method, training, batches)
    runs = []
    for _ in range(2):
        made = disturbed_shards(config, shards, method, training, replicas=replicas, sequence=sequence)
        runs.append((made, *train_shards(made, training, batches)))
    (made, found_losses, found), (again, again_losses, _) = runs
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, expected, 1e-12)
    assert again_losses == found_losses
    weights = {name: p for shard in made for name, p in shard.named_weights().items()}
    assert_same(weights, dict(stack.named_parameters()), 1e-11)
    for shard in (*made, *again):
        assert all(torch.equal(p, weights[name]) for name, p in shard.named_weights().items())
    if config.tie_embeddings:
        tables = [shard.table for shard in (*made, *again) if shard.table is not None]
        assert all(torch.equal(table, weights["embedding.weight"]) for table in tables)


WAYS = [  # shards, workers of each, replicas, whether the table is tied
    (1, 2, 1, True),
    (1, 3, 1, False),
    (1, 2, 2, True),
    (2, 2, 1, False),
    (2, 2, 2, True),
    (3, 3, 1, True),
]


@pytest.mark.parametrize(
    "shards, sequence, replicas, tied",
    [way if way == (2, 2, 1, False) else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS],
)
def test_training_is_that_of_one_process(shards: int, sequence: int, replicas: int, tied: bool) -> None:
    config = dataclasses.replace(MIXED, tie_embeddings=tied)
    training = dataclasses.replace(TRAINING, grad_accumulation=2)
    batches = [make_ids(6, 24 + step, seed=step) for step in range(2)]  # 3 rows at a time, over 2 replicas
    trained_twice(config, Exact(5), training, batches, shards, sequence, replicas)


METHODS = [Exact(5, keep="inputs"), Truncated(4, 5), Truncated(12, 5), LayerLocal(None, 5), LayerLocal(9, 5)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("shards", [1, 2])
def test_every_method_may_be_dealt_out(method: Any, shards: int) -> None:
    trained_twice(MIXED, method, TRAINING, [make_ids(2, 29)], shards, sequence=2)


@pytest.mark.parametrize("seqlen, chunk_size", [(31, 7), (22, 2), (3, 1), (9, 3)])
@pytest.mark.parametrize("workers", [2, 3])
def test_any_length_over_any_number_of_workers(seqlen: int, chunk_size: int, workers: int) -> None:
    """Chunks shorter than the convolution; some workers with one chunk more than others."""
    batches = [make_ids(2, seqlen)]
    stack = disturbed_stack(MIXED)
    losses, expected = train_stack(stack, Exact(chunk_size), TRAINING, batches)
    made = disturbed_shards(MIXED, 1, Exact(chunk_size), TRAINING, sequence=workers)
    found_losses, found = train_shards(made, TRAINING, batches)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, expected, 1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ALL_MIXERS)
def test_lower_precisions_are_as_near_as_in_one_process(variant: str, precision: str) -> None:
    config = StackConfig(**{**SIZES, **VARIANTS[variant]})
    batches = [make_ids(2, 40)]
    losses, expected = train_stack(disturbed_stack(config), Exact(8), TRAINING, batches)
    errors = []
    for sequence in (1, 3):
        made = disturbed_shards(config, 1, Exact(8), TRAINING, precision, sequence=sequence)
        found_losses, found = train_shards(made, TRAINING, batches)
        assert found_losses == pytest.approx(losses, rel=1e-5 if precision == "float32" else 0.02)
        errors.append(error({name: gradient.double() for name, gradient in found.items()}, expected))
    assert errors[1] <= 1.5 * errors[0]


def test_decays_near_one_and_near_nothing() -> None:
    """Of 1 - 1e-13 a token in one half of the channels, of 1e-300 in the other."""

    def make_extreme(named: dict[str, torch.Tensor]) -> None:
        for name, parameter in named.items():
            if name.endswith("A_log"):
                parameter.zero_()
            elif name.endswith(("dt_proj.bias", "dt_bias")):
                parameter[::2], parameter[1::2] = -30.0, 690.0
            elif name.endswith("A_proj.bias"):
                n = 1 if parameter.numel() == 1 else SIZES["d_state"]
                parameter[:n:2], parameter[1:n:2] = -30.0, 690.0

    stack, batches = disturbed_stack(MIXED), [make_ids(2, 29)]
    made = disturbed_shards(MIXED, 1, Exact(4), TRAINING, sequence=3)
    with torch.no_grad():
        for named in (dict(stack.named_parameters()), *(shard.named_weights() for shard in made)):
            make_extreme(named)
    losses, expected = train_stack(stack, Exact(8), TRAINING, batches)
    assert all(gradient.isfinite().all() for gradient in expected.values())
    found_losses, found = train_shards(made, TRAINING, batches)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(found, expected, 1e-12)


# ----------------------------------------------------------------------------------------------- evaluation


def test_the_loss_of_any_length_adds_up() -> None:
    made = disturbed_shards(MIXED, 2, Exact(7), TRAINING, replicas=2, sequence=3)
    stack = disturbed_stack(MIXED)
    for rows, seqlen in ((3, 31), (1, 31), (2, 5)):  # a replica without rows; workers without a chunk
        ids = make_ids(rows, seqlen)
        found = together(made, lambda shard, ids=ids: shard.evaluate(ids))
        with torch.no_grad():
            loss = stack(ids, labels=ids, method=Exact(7)).loss.item()
        assert [part is None for part in found] == [shard.spec.shard == 0 for shard in made]
        assert sum(part for part in found if part is not None) == pytest.approx(loss, rel=1e-12)
    assert all(p.grad is None for shard in made for p in shard.part.parameters())


def test_a_sample_is_that_of_one_process() -> None:
    """One worker of each shard takes part."""
    prompt, found = make_ids(2, 9), []
    for shards, sequence in ((1, 1), (1, 2), (2, 2)):
        made = disturbed_shards(MIXED, shards, Exact(7), TRAINING, sequence=sequence)
        firsts = made[::sequence]
        (*_, tokens) = together(firsts, lambda shard: shard.generate(prompt, 6, 1.0, 0, chunk_size=4))
        found.append(tokens)
    assert found[0].shape == (2, 15) and all(torch.equal(tokens, found[0]) for tokens in found)


# ---------------------------------------------------------------------------------------- chunks and messages


@pytest.mark.parametrize("workers", [2, 3])
def test_chunks_are_so_short_that_each_worker_has_two(workers: int) -> None:
    """One, of a handful of tokens; unless the method says how long they are."""
    (shard, *_), (asked, *_) = (
        make_shards(StackConfig(**SIZES), 1, Exact(size), TRAINING, sequence=workers) for size in (None, 50)
    )
    for seqlen in (61, 1000):
        assert -(-seqlen // shard.chunk_size(2, seqlen)) == 2 * workers
    assert all(-(-seqlen // shard.chunk_size(2, seqlen)) >= workers for seqlen in range(workers, 60))
    assert asked.chunk_size(2, 1000) == 50


def test_what_cannot_be_dealt_out_is_refused() -> None:
    config = StackConfig(**SIZES)
    cases: list[tuple[Any, str]] = [
        (Backprop(), r"^cluster\.sequence: backprop has one chunk.* use exact, or more --cluster\.shards$"),
        (Truncated("auto"), r'^cluster\.sequence: window "auto" needs .* or use more --cluster\.shards$'),
    ]
    for method, message in cases:
        with pytest.raises(UserError, match=message):
            make_shards(config, 1, method, TRAINING, sequence=2)
    with pytest.raises(UserError, match=r"^cluster\.helpers: go without cluster\.sequence"):
        make_shards(config, 1, LayerLocal(None, 4), TRAINING, sequence=2, helpers=1)


@pytest.mark.parametrize("seqlen, chunk_size, workers", [(11, 7, 3), (8, 8, 2), (20, 5, 7)])
def test_fewer_chunks_than_workers_are_refused_in_one_line(
    seqlen: int, chunk_size: int, workers: int
) -> None:
    made = make_shards(StackConfig(**SIZES), 1, Exact(chunk_size), TRAINING, sequence=workers)
    chunks = -(-seqlen // chunk_size)
    with pytest.raises(UserError) as raised:
        made[0].accumulate(make_ids(2, seqlen))
    words = f"{workers} workers, and {chunks} chunks of {chunk_size} tokens"
    assert words in str(raised.value) and "\n" not in str(raised.value)
    advised = int(str(raised.value).split("--method.chunk_size to ")[1].split()[0])
    assert -(-seqlen // advised) >= workers


def test_a_message_does_not_grow_with_the_sequence() -> None:
    """States and their cotangents cross each edge, layer by layer, and nothing else does."""
    owners = Owners.of((range(MIXED.n_layer),), 3)
    for seqlen in (30, 300):
        scheme = Exact(10).scheme(seqlen, 10)
        made = step_plan(scheme, grid_of(MIXED, scheme, seqlen, owners), owners)
        sent = [a.key for program in made.programs for a in program if isinstance(a, Send)]
        edges = [(k, c) for k in range(1, MIXED.n_layer + 1) for c in range(seqlen // 10 - 1)]
        assert sorted(sent) == sorted((name, *edge) for name in ("S", "dS") for edge in edges)
