"""Layers within the memory of their shards: what fits, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from adjoint import Backprop, Exact, LayerLocal, StackConfig, Truncated
from adjoint.cluster import training as cluster_training
from adjoint.cluster.assign import make_specs
from adjoint.cluster.devices import Device
from adjoint.cluster.placement import resources
from adjoint.errors import UserError
from adjoint.plan.capacity import Fit
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Machine, Setup, needs
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.config import TrainingConfig, load_config
from adjoint.train.layout import Layout

MODEL = StackConfig(vocab_size=64, d_model=64, n_layer=6, tie_embeddings=False)
HALVES = [range(0, 3), range(3, 6)]


def setup_of(shards: int, **changes: Any) -> Setup:
    """Of so many shards, the margin for libraries left out."""
    machine = Machine(reserve=False)
    setup = Setup(PLANNED, Exact(chunk_size=512), 1, 8192, Layout(shards), machine)
    return dataclasses.replace(setup, **changes)


PLANNED = model_of(MODEL)


def totals(setup: Setup, spans: list[range]) -> list[int]:
    return [need.total for need in needs(setup, spans)]


def test_without_limits_it_is_the_fastest_partition() -> None:
    assert Fit(setup_of(3)).assign() == [range(0, 2), range(2, 4), range(4, 6)]


def test_limits_move_layers_to_where_there_is_room() -> None:
    even = totals(setup_of(2), HALVES)
    limits = [0.8 * even[0], 2.0 * even[1]]
    spans = Fit(setup_of(2), limits).assign()
    assert len(spans[0]) < len(spans[1])
    assert all(total <= limit for total, limit in zip(totals(setup_of(2), spans), limits, strict=True))


@pytest.mark.parametrize(
    "method", [Exact(512), Exact(512, keep="inputs"), Truncated(256, 512), LayerLocal(None, 512)], ids=str
)
def test_every_layer_adds_to_its_shard(method: Any) -> None:
    setup = setup_of(2, method=method)
    sizes = [totals(setup, [range(0, n), range(n, 6)])[0] for n in range(1, 6)]
    assert sizes == sorted(set(sizes))


def test_a_refusal_says_why_and_each_remedy_works() -> None:
    """Every remedy is tried: with it the same request goes through."""
    setup = setup_of(2, method=Exact(chunk_size=4096))
    limit = 0.6 * max(totals(setup, HALVES))
    small = Fit(setup, [limit] * 2)
    with pytest.raises(UserError, match=r"shard \d \(layers \d-\d\) needs .* the work on a chunk") as refused:
        small.assign()
    message = str(refused.value)
    assert "\n" not in message
    chunk = re.search(r"--method.chunk_size (\d+)", message)
    devices = re.search(r"(\d+) such devices", message)
    assert chunk and devices
    small.with_method(chunk_size=int(chunk[1])).assign()
    more = int(devices[1])
    assert len(Fit(setup_of(more, method=setup.method), [limit] * more).assign()) == more
    assert Fit(setup_of(more - 1, method=setup.method), [limit] * (more - 1)).spans() is None


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    fit = Fit(setup_of(2), [1.3 * max(totals(setup_of(2), HALVES))] * 2)
    found = fit.longest()
    assert found > 8192
    assert fit.with_changes(seqlen=found).spans()
    assert fit.with_changes(seqlen=int(found * 1.1)).spans() is None


def test_backprop_is_told_of_exact() -> None:
    setup = setup_of(1, method=Backprop())
    with pytest.raises(UserError, match=r"--method.name exact"):
        Fit(setup, [totals(setup, [range(0, 6)])[0] / 2]).assign()


def look(node: str, gpu: Device | None, memory: int = 10**12) -> dict[str, Any]:
    device = "cpu" if gpu is None else "cuda"
    return {"node": node, "gpu": gpu, "device": device, "precision": "float32", "cores": 2, "memory": memory}


def gpu(memory: float, number: int = 0) -> Device:
    return Device(f"MIG-{number}", "A", 0, int(memory), "1g.5gb")


def test_a_group_refuses_a_slice_too_small_for_its_shard() -> None:
    method, ids = Exact(chunk_size=512), (1, 8192)
    found = [look("a", gpu(10e6)), look("a", gpu(10e6, 1))]
    with pytest.raises(UserError, match=r"cluster.shards: shard .* its device has 9\.54 MiB.*what fits"):
        make_specs(ShardedStack(MODEL), TrainingConfig(), method, Layout(2), found, ids)
    roomy = [look("a", gpu(4e9)), look("a", gpu(4e9, 1))]
    _, spans, _ = make_specs(ShardedStack(MODEL), TrainingConfig(), method, Layout(2), roomy, ids)
    assert spans == tuple(HALVES)


def test_a_group_lets_the_margin_go_where_only_that_is_missing() -> None:
    need = max(totals(setup_of(2, machine=Machine("cuda", reserve=False)), HALVES))
    found = [look("a", gpu(1.02 * need)), look("a", gpu(1.02 * need, 1))]
    _, spans, _ = make_specs(
        ShardedStack(MODEL), TrainingConfig(), Exact(chunk_size=512), Layout(2), found, (1, 8192)
    )
    assert spans == tuple(HALVES)


@pytest.mark.parametrize(
    "flags, cpus, threads",
    [
        ("", 1, [1, 1, 3]),  # a node's shards share its three cores out
        ("--cluster.cpus 4", 4, [4, 4, 4]),
        ("--cluster.cpus 4 --training.threads 2", 4, [2, 2, 2]),
    ],
)
def test_cpus_that_are_given_are_the_threads_of_a_shard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, cpus: int, threads: list[int]
) -> None:
    group = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(cluster_training, "Group", group)
    trainer: Any = object.__new__(cluster_training.ShardedTrainer)
    trainer.config = load_config(["--cluster.shards", "2", *flags.split()])
    trainer.whole = trainer.weights = None
    trainer.method, trainer.failures, trainer.preemptions = None, 0, 0
    trainer.folder = Mock(path=tmp_path)
    with pytest.raises(InterruptedError):
        trainer._make_group(None)
    _, training, _, cluster, *_ = group.call_args.args
    assert resources(training.device, cluster.cpus).cpus == cpus
    found = [look(node, None) | {"cores": 3} for node in "aab"]
    specs = make_specs(ShardedStack(MODEL), training, Exact(chunk_size=512), Layout(3), found)[2]
    assert [spec.threads for spec in specs] == threads


def test_shards_on_cpus_are_refused_only_where_their_node_is_too_small() -> None:
    training, method, ids = TrainingConfig(), Exact(chunk_size=512), (1, 8192)
    both = sum(totals(setup_of(2), HALVES))
    small = int(0.75 * both)
    apart = [look("a", None, small), look("b", None, small)]
    assert make_specs(ShardedStack(MODEL), training, method, Layout(2), apart, ids)[1] == tuple(HALVES)
    together = [look("a", None, small), look("a", None, small)]
    with pytest.raises(UserError, match=r"2 shards on a node of [\d.]+ [MG]iB need"):
        make_specs(ShardedStack(MODEL), training, method, Layout(2), together, ids)
    assert make_specs(ShardedStack(MODEL), training, method, Layout(2), together)[1] == tuple(
        HALVES
    )  # nothing to count


def test_workers_in_turn_each_take_their_memory() -> None:
    layout = Layout(sequence=2)
    each = totals(setup_of(1, layout=layout), [range(0, 6)])[0]
    given = ShardedStack(MODEL), TrainingConfig(), Exact(512), layout
    assert make_specs(*given, [look("a", None, int(2.1 * each))] * 2, (1, 8192))[1] == (range(0, 6),)
    with pytest.raises(UserError, match=r"2 shards on a node of [\d.]+ [MG]iB need"):
        make_specs(*given, [look("a", None, int(1.9 * each))] * 2, (1, 8192))


@pytest.mark.parametrize("memory", ["auto", "30GB"])
def test_a_budget_that_does_not_fit_is_refused_with_what_would(memory: str) -> None:
    setup = setup_of(1, method=Exact(512, memory=memory), machine=Machine("cuda", memory=1e6))
    assert "what fits:" in Fit(setup, [1e6]).refusal()
