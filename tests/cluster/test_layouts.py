"""Shards, workers of a sequence, replicas and their products in the threads of one process: the same weights,
losses, gradients and training as a `Stack` in one piece."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adjoint import Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.checkpoint import verify_checkpoint
from adjoint.cluster.shard import PipelineWorker
from adjoint.cluster.spec import ShardSpec
from adjoint.cluster.training import StackInShards
from adjoint.engine.executor import Executor
from adjoint.engine.grid import Tile
from adjoint.engine.schedule import Owners, Send
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.errors import UserError
from adjoint.layers import WINDOWED
from adjoint.parallel import transport as transport_module
from adjoint.parallel.transport import sum_gradients
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train import machine
from adjoint.train.checkpoint import load_checkpoint, save_checkpoint
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from adjoint.train.optimizer import make_optimizer
from tests.cluster import threads
from tests.cluster.threads import (
    TRAINING,
    DeviceTransport,
    ThreadGroup,
    disturbed_shards,
    disturbed_stack,
    local_transports,
    make_shards,
    split,
    together,
    train_shards,
    train_stack,
)
from tests.model_helpers import HEADS, SIZES, VARIANTS, assert_same, error, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = StackConfig(**{**SIZES, **VARIANTS["mixed, untied"]})
TIED = dataclasses.replace(MIXED, tie_embeddings=True)
PAIRS = {"n_layer": 4, "mixer": ["mamba2", "attention", "mamba", "attention"]}
HYBRID = StackConfig(**{**SIZES, **HEADS, **PAIRS})


def weights_of(shards: list[PipelineWorker]) -> dict[str, torch.Tensor]:
    return {name: p for shard in shards for name, p in shard.named_weights().items()}


def trained(
    config: StackConfig,
    method: Any,
    layout: Layout,
    batches: list[torch.Tensor],
    training: TrainingConfig = TRAINING,
) -> None:
    """Losses, gradients and weights are those of one process: to rounding, and bit for bit where every sum is
    taken in the same order. They have the same bits on all workers of a shard, and when run again."""
    stack = disturbed_stack(config)
    losses, expected = train_stack(stack, method, training, batches)
    workers = disturbed_shards(config, layout, method, training)
    found_losses, gradients = train_shards(workers, training, batches)
    weights, stack_weights = weights_of(workers), dict(stack.named_parameters())
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert_same(gradients, expected, 1e-12)
    assert_same(weights, stack_weights, 1e-11)
    alone = layout.world == layout.shards and training.grad_accumulation == 1
    if alone and isinstance(method, Exact) and (layout.shards == 1 or not config.tie_embeddings):
        assert found_losses == losses
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert all(torch.equal(weights[name], stack_weights[name]) for name in stack_weights)
    again = disturbed_shards(config, layout, method, training) if layout.world > layout.shards else workers
    if again is not workers:
        assert train_shards(again, training, batches)[0] == found_losses
    for shard in (*workers, *again):
        assert all(torch.equal(p, weights[name]) for name, p in shard.named_weights().items())
        assert shard.table is None or torch.equal(shard.table, weights["embedding.weight"])


# ------------------------------------------------------------------------------------------ the same training

LAYOUTS = [Layout(shards) for shards in (1, 2, 4)]
LAYOUTS += [Layout(*numbers) for numbers in ((1, 2), (1, 3), (2, 2), (3, 3), (2, 1, 3), (1, 1, 2), (1, 1, 3))]
LAYOUTS += [Layout(*numbers) for numbers in ((3, 1, 2), (1, 2, 2), (2, 2, 2))]
METHODS = [
    *(Exact(5, keep=keep) for keep in ("inputs", "offload")),
    *(Truncated(window, 8) for window in (5, 11, 40)),
    *(LayerLocal(window, 8) for window in (None, 5, 40)),
]
TWO = [(5, 24), (5, 25)]  # neither 7 tokens nor 3 replicas divide these
HELPED = StackConfig(**{**SIZES, "n_layer": 4, **VARIANTS["mamba2"]})
# model, method, layout, (batch, seqlen) of each step
CASES: list[tuple[StackConfig, Any, Layout, list[tuple[int, int]]]] = [
    *((config, Exact(7), layout, TWO) for config in (MIXED, TIED) for layout in LAYOUTS),
    *((TIED, method, layout, [(3, 29)]) for layout in LAYOUTS[1::2] for method in METHODS),
    *((HELPED, LayerLocal(w, 8), Layout(2, 1, 2, n), [(3, 29), (3, 29)]) for w in (None, 5) for n in (2, 3)),
    # chunks shorter than the convolution; some workers with one chunk more than others
    *((MIXED, Exact(size), Layout(1, n), [(2, t)]) for t, size in ((31, 7), (22, 2), (3, 1)) for n in (2, 3)),
    # a shard computes its states again by itself
    *(
        (config, Exact(3, checkpoints=n), Layout(*layout), [(2, 31)])
        for config, n in ((MIXED, 2), (HYBRID, 1), (MIXED, 20))
        for layout in ((1,), (2,), (3, 1, 2))
    ),
    # attention: keys and values stay with the worker that made them
    *(
        (dataclasses.replace(HYBRID, **more), method, Layout(*layout), [(2, 31), (2, 24)])
        for layout in ((1, 2), (1, 3), (2, 2), (4, 2), (2, 3), (2, 2, 2))
        for method, more in (
            (Exact(5), {}),
            (Exact(4, keep="inputs"), {"tie_embeddings": False}),
            (LayerLocal(None, 5), {"sliding_window": 7}),
        )
    ),
]


def name_of(value: Any) -> str | None:
    """Return a layout's name as a test parameter, such as 2x1x3."""
    return "x".join(map(str, dataclasses.astuple(value))) if isinstance(value, Layout) else None


@pytest.mark.sampled(71)
@pytest.mark.parametrize("config, method, layout, shapes", CASES, ids=name_of)
def test_training_is_that_of_one_process(
    config: StackConfig, method: Any, layout: Layout, shapes: Any
) -> None:
    trained(config, method, layout, [make_ids(*shape, seed=step) for step, shape in enumerate(shapes)])


# attention, windows picked after the forward, tiles shared with helpers
FIRST_USES = [
    (StackConfig(**{**SIZES, "mixer": ["mamba2", "attention"], "n_layer": 2}), Exact(7), Layout(2)),
    (MIXED, Exact(7, keep="inputs"), Layout(2, 2)),
    (MIXED, Exact(5, checkpoints=1), Layout(2)),
    (MIXED, Truncated(window="auto", chunk_size=7), Layout(2)),
    (HELPED, LayerLocal(5, 8), Layout(2, 1, 1, 2)),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("config, method, layout", FIRST_USES, ids=name_of)
def test_kernels_are_first_used_before_messages_wait_on_the_device(
    config: StackConfig, method: Any, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, tile = set(), Executor.tile

    def tuned(worker: Executor, t: Tile) -> None:
        transport, tokens = worker.transport, worker.grid.tokens(t.chunk)
        if isinstance(transport, DeviceTransport) and (transport.rank, t.kind, t.stage, tokens) not in used:
            transport.synchronize()
            used.add((transport.rank, t.kind, t.stage, tokens))
        tile(worker, t)

    monkeypatch.setattr(Executor, "tile", tuned)
    monkeypatch.setattr(threads, "LocalTransport", DeviceTransport)
    trained(config, method, layout, [make_ids(4, 28, seed=step) for step in range(2)])
    assert used


class Spare(nn.Module):
    """A mixer with a weight that nothing reads: it has no gradient, so the optimizer leaves it as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.value, self.spare = (nn.Linear(config.d_model, config.d_model) for _ in range(2))

    def reset_parameters(self) -> None:
        self.value.reset_parameters()
        self.spare.reset_parameters()

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, self.value.out_features, dtype=dtype, device=device),)

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        h = state[0][:, None] + self.value(x).cumsum(1)
        return h, (h[:, -1],)


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(2, 2)], ids=name_of)
def test_weights_that_nothing_reads_stay_as_they_are(layout: Layout) -> None:
    config = StackConfig(**{**SIZES, "mixer": f"{__name__}:Spare", "tie_embeddings": False})
    trained(config, Exact(7), layout, [make_ids(4, 24)] * 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_several_batches_are_averaged_and_summed_once(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[tuple[int, ...]] = []

    def counted(gradients: Any, transport: Any, ranks: Any) -> None:
        sums.append(tuple(ranks))
        sum_gradients(gradients, transport, ranks)

    monkeypatch.setattr("adjoint.cluster.shard.sum_gradients", counted)
    config = StackConfig(**{**SIZES, "n_layer": 2, "tie_embeddings": tied})
    training = TrainingConfig(steps=2, warmup_steps=1, lr=0.05, grad_accumulation=3)
    trained(config, Exact(5), Layout(2, 1, 2), [make_ids(9, 17, seed=step) for step in range(2)], training)
    layers, table = [(0, 2), (1, 3)] * 2, [(0, 1, 2, 3)] * 4 * tied  # a tied table's over both its shards
    assert sorted(sums) == sorted([*layers, *table] * 2 * 2)  # of each step and run


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 2)], ids=name_of)
def test_workers_with_the_same_layers_whose_settings_differ(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch compares them and refuses; workers that agree are compared once."""
    make = functools.partial(disturbed_shards, StackConfig(**SIZES), layout, Exact(5), TRAINING)
    ids, shards = make_ids(2, 17), make()
    shards[-1].part.layers[-1].norm.eps *= 2
    layers = shards[-1].spec.spans[-1]
    said = rf"workers of layers {layers.start}-{layers.stop - 1}: .* differ in layers\.\d+\.norm\.eps"
    with pytest.raises(UserError, match=said):
        together(shards, lambda shard: shard.accumulate(ids))
    compared: list[object] = []
    monkeypatch.setattr(
        "adjoint.cluster.shard.first_difference_among", lambda *arguments: compared.append(arguments)
    )
    shards = make()
    for _ in range(2):
        together(shards, lambda shard: shard.accumulate(ids))
    assert len(compared) == len(shards)


def test_trainable_tensors_that_no_module_lists_are_refused() -> None:
    """Each shard would have a part of their gradients."""
    shards = disturbed_shards(StackConfig(**SIZES), Layout(2), Exact(5), TRAINING)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    mixer = shards[0].part.layers[0].mixer
    mixer.register_forward_hook(lambda module, inputs, output: (output[0] * scale, *output[1:]))
    with pytest.raises(UserError, match="requires a gradient and is no parameter of a module"):
        together(shards, lambda shard: shard.accumulate(make_ids(2, 17)))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", WINDOWED)
def test_lower_precisions_are_as_near_as_in_one_process(variant: str, precision: str) -> None:
    """Over shards the same bits, over a sequence's workers no farther from float64."""
    config = StackConfig(**{**SIZES, **VARIANTS[variant], "tie_embeddings": False})
    batches = [make_ids(2, 40)]
    losses, exact = train_stack(disturbed_stack(config), Exact(8), TRAINING, batches)
    with machine.autocast(precision, torch.device("cpu")):
        alone, stack_gradients = train_stack(
            disturbed_stack(config, torch.float32), Exact(8), TRAINING, batches
        )
    for layout in (Layout(2), Layout(1, 3)):
        workers = disturbed_shards(config, layout, Exact(8), TRAINING, precision)
        found_losses, gradients = train_shards(workers, TRAINING, batches)
        assert found_losses == pytest.approx(losses, rel=1e-5 if precision == "float32" else 0.02)
        if layout.sequence == 1:
            assert found_losses == alone
            assert all(torch.equal(gradients[name], stack_gradients[name]) for name in stack_gradients)
        distances = [
            error({n: g.double() for n, g in each.items()}, exact) for each in (gradients, stack_gradients)
        ]
        assert distances[0] <= 1.5 * distances[1]


# ------------------------------------------------------------------------------------ weights and checkpoints


@pytest.mark.sampled(7)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_shards_have_the_weights_of_the_whole(variant: str, tied: bool, shards: int) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 5, **VARIANTS[variant], "tie_embeddings": tied})
    torch.manual_seed(7)
    stack_weights = dict(Stack(config).named_parameters())
    generator, shard_weights = torch.get_rng_state(), dict[str, torch.Tensor]()
    for rank in range(shards):
        spans = tuple(split(config.n_layer, shards))
        shard = PipelineWorker(
            ShardSpec(ShardedStack(config), TrainingConfig(seed=7), Exact(7), Layout(shards), spans, rank)
        )
        named = shard.named_weights()
        assert not shard_weights.keys() & named.keys()
        shard_weights |= named
        if shard.table is not None:
            assert torch.equal(shard.table, stack_weights["embedding.weight"])
        if shard.part.is_last and tied:
            head = shard.part.head_parameters()[1]
            assert torch.equal(head, stack_weights["embedding.weight"])
            assert shards > 1 or head is shard.part.embedding.weight
            groups = shard.optimizer.param_groups
            assert all(g["weight_decay"] == 0 for g in groups if any(p is head for p in g["params"]))
        assert not list(shard.part.buffers())
    assert shard_weights.keys() == stack_weights.keys()
    assert all(torch.equal(shard_weights[name], parameter) for name, parameter in stack_weights.items())
    assert torch.equal(torch.get_rng_state(), generator), "drawing a part's weights moves the generator"


@pytest.mark.sampled(11)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("before, after", [(2, 2), (3, 1), (1, 3)])
def test_a_checkpoint_goes_on_bit_for_bit_under_any_number_of_shards(
    tied: bool, before: int, after: int, tmp_path: Path
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 3, "tie_embeddings": tied})
    training = TrainingConfig(steps=9, warmup_steps=1, lr=0.05, grad_clip=0.5)
    workers = make_shards(config, before, Exact(7), training)
    train_shards(workers, training, [make_ids(2, 20, seed=step) for step in range(2)])

    def write(folder: Path) -> dict[str, Any]:
        return {name: entry for shard in workers for name, entry in shard.save(str(folder)).items()}

    path = save_checkpoint(tmp_path, 2, write, {})
    verify_checkpoint(path)
    others = make_shards(config, after, Exact(7), training, drawn=False)
    for shard in others:
        shard.load(str(path))
    stack = Stack(config).double()
    optimizer = make_optimizer(stack, training)
    load_checkpoint(path, stack, optimizer)
    more = [make_ids(2, 20, seed=step) for step in (2, 3)]
    losses, _ = train_shards(workers, training, more)
    found_losses, _ = train_shards(others, training, more)
    whole_losses, _ = train_stack(stack, Exact(7), training, more, optimizer)
    weights, other_weights, stack_weights = (
        weights_of(workers),
        weights_of(others),
        dict(stack.named_parameters()),
    )
    if before == after or not tied:
        assert found_losses == losses
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)
    assert found_losses == pytest.approx(losses, rel=1e-12)
    assert whole_losses == pytest.approx(losses, rel=1e-12)
    assert_same(other_weights, weights, 1e-12)
    assert_same(stack_weights, weights, 1e-12)


# ------------------------------------------------------------------------------------ evaluation and samples


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "layout", [Layout(1), Layout(3), Layout(2, replicas=3), Layout(2, 3, 2)], ids=name_of
)
def test_evaluation_adds_up_to_the_loss_and_leaves_no_trace(layout: Layout) -> None:
    """Whatever rows and lengths there are: a replica may be without rows, workers without a chunk."""
    workers, stack = disturbed_shards(MIXED, layout, Exact(7), TRAINING), disturbed_stack(MIXED)
    for rows, seqlen in ((3, 31), (5, 25), (1, 31), (2, 5)):
        ids = make_ids(rows, seqlen)
        loss_shares = together(workers, lambda shard, ids=ids: shard.evaluate(ids))
        with torch.no_grad():
            loss = stack(ids, labels=ids, method=Exact(7)).loss.item()
        assert [share is None for share in loss_shares] == [not shard.is_last for shard in workers]
        shares = sum(share for share in loss_shares if share is not None)
        assert shares == loss if layout.world == layout.shards else shares == pytest.approx(loss, rel=1e-12)
    assert all(p.grad is None for shard in workers for p in shard.part.parameters())


def test_a_sample_is_that_of_one_process() -> None:
    """Sampling over shards yields the tokens of one process; one worker of each shard takes part."""
    prompt, samples = make_ids(2, 9), [disturbed_stack(MIXED).generate(make_ids(2, 9), 6, generator=seeded())]
    for layout in (Layout(1, 2), Layout(2, 2, 2)):
        group: Any = object.__new__(ThreadGroup)
        group.made, group.layout = disturbed_shards(MIXED, layout, Exact(7), TRAINING), layout
        samples.append(StackInShards(MIXED, group).generate(prompt, 6, generator=seeded(), chunk_size=4))
    assert samples[0].shape == (2, 15) and all(torch.equal(tokens, samples[0]) for tokens in samples)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# ------------------------------------------------------------------------------------ ranks, chunks, messages


@pytest.mark.parametrize("numbers", [*itertools.product((1, 2, 3), (1, 2), (1, 2, 3), (0, 2))])
def test_every_rank_has_one_place(numbers: tuple[int, int, int, int]) -> None:
    layout = Layout(*numbers)
    ranks = range(layout.world)
    assert len(ranks) == layout.replicas * (layout.shards * layout.sequence + layout.helpers)
    places = [(layout.replica(r), layout.worker(r)) for r in ranks]
    assert places == list(itertools.product(range(layout.replicas), range(layout.workers)))
    assert sorted(r for s in range(layout.shards) for r in layout.ranks(s)) == layout.everyone
    assert all(layout.shard(r) == s for s in range(layout.shards) for r in layout.ranks(s))
    assert sorted({h for r in layout.everyone for h in layout.helpers_of(r)}) == [
        r for r in ranks if layout.helps(r)
    ]
    assert set(layout.tied(0)) == {*layout.ranks(0), *layout.ranks(layout.shards - 1)}


def test_a_message_does_not_grow_with_the_sequence() -> None:
    """States and their cotangents cross each edge, layer by layer, and nothing else does."""
    owners = Owners.from_spans((range(MIXED.n_layer),), 3)
    for seqlen in (30, 300):
        spec = Exact(10).engine_spec(seqlen, 10)
        schedule = step_plan(spec, grid_of(ShardedStack(MIXED), spec, seqlen, owners), owners)
        sent = [a.key for program in schedule.programs for a in program if isinstance(a, Send)]
        edges = [(k, c) for k in range(1, MIXED.n_layer + 1) for c in range(seqlen // 10 - 1)]
        assert sorted(sent) == sorted((name, *edge) for name in ("S", "dS") for edge in edges)


def test_small_gradients_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gradients are summed in buckets, large ones by themselves and in place."""
    monkeypatch.setattr(transport_module, "BUCKET", 10)
    sizes = [(2, 3), (4,), (1,), (11,), (3, 2), (2, 5), (12,)]
    transport, sent = local_transports(1)[0], list[int]()

    def doubled(tensor: torch.Tensor, ranks: Any) -> torch.Tensor:
        sent.append(tensor.numel())
        return tensor.mul_(2)

    monkeypatch.setattr(transport, "all_reduce", doubled)
    parameters = [torch.zeros(size) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters[-1].grad = torch.randn(24)[::2]  # not contiguous
    before = [parameter.grad.clone() for parameter in parameters]
    sum_gradients(parameters, transport, [0])
    assert all(torch.equal(p.grad, 2 * b) for p, b in zip(parameters, before, strict=True))
    assert sent == [7, 11, 10, 12, 6, 11]  # first, which parameters have gradients
