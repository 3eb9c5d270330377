"""Rounds of ranks that share a hybrid's sequence: their times against the simulator and a clock, their bytes
against those that real ranks send."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adjoint import Exact, StackConfig
from adjoint.engine.grid import Tile
from adjoint.engine.schedule import Action, Recv, Run, Schedule, Send
from adjoint.parallel.transport import GroupTransport
from adjoint.plan.estimate import Costs, walk
from adjoint.plan.layouts import Request, rank
from adjoint.plan.planned_stack import model_of
from adjoint.plan.rounds import step_bytes
from adjoint.plan.run_memory import Machine, Setup, needs
from adjoint.plan.simulate import simulate
from adjoint.train.layout import Layout
from tests.engine.test_sequence import HYBRIDS, hybrid
from tests.model_helpers import make_ids
from tests.ranks import on_ranks

SMALL = StackConfig(d_model=32, n_layer=3, mixer="mamba", tie_embeddings=False)
MIXED = dataclasses.replace(SMALL, n_layer=4, mixer=["mamba2", "mamba", "mamba2", "attention"])


def setup_of(config: StackConfig, ranks: int, chunks: int, shards: int = 1, batch: int = 1) -> Setup:
    layout, machine = Layout(shards, ranks), Machine(precision="float64", reserve=False)
    return Setup(model_of(config), Exact(64), batch, 64 * chunks, layout, machine)


# ---------------------------------------------------------------------------------------------------- times


@pytest.mark.parametrize("ranks, chunks", [(2, 6), (3, 7), (4, 3)])
def test_a_wave_takes_what_its_programs_take(ranks: int, chunks: int) -> None:
    """Written down by hand, where the whole layer is between one state and the next."""
    setup, layers = setup_of(SMALL, ranks, chunks), range(SMALL.n_layer)
    costs = Costs((1e-3, 2e-3, 1.5e-3), (2e-3, 3e-3, 4e-3), 0.0, 0.0, "made up")
    first, programs = -chunks % ranks, []
    for worker in range(ranks):
        mine = [c for c in range(chunks) if (c + first) % ranks == worker]
        program: list[Action] = []

        def add(kind: str, k: int, c: int, name: str, step: int, to: list[Action] = program) -> None:
            """A tile between the state that comes from one rank and that for the next."""
            before, after = c - step, c + step
            if 0 <= before < chunks:
                to.append(Recv((name, k, before), (before + first) % ranks))
            to.append(Run(Tile(kind, k, c)))
            if 0 <= after < chunks:
                to.append(Send((name, k, c), (after + first) % ranks))

        for c in mine:
            for k in layers:
                add("forward", k, c, "S", 1)
        for c in reversed(mine):
            program += [Run(Tile("recompute", k, c)) for k in layers if c != mine[-1]]
            for k in reversed(layers):
                add("backward", k, c, "dS", -1)
        programs.append(tuple(program))
    expected = simulate(
        Schedule(setup.per_rank.pipeline([layers], 2).grid, tuple(programs), buffers=1 << 10),
        lambda _, t: 64 * (costs.backward if t.kind == "backward" else costs.forward)[t.stage],
        lambda key: setup.state(key[1]) / 1e6,
        latency=50e-6,
    )
    found = walk(setup, [layers], costs, 1e6, [1.0], most=1 << 20).run()
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert found.busy == pytest.approx(expected.busy, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_balanced(ranks: int) -> None:
    """Ranks do the same work on every round, whose later chunks see more."""
    config = dataclasses.replace(SMALL, n_layer=1, mixer="attention")
    setup, pair = setup_of(config, ranks, 8), 1e-6
    costs = Costs((0.0,), (0.0,), 0.0, 0.0, "made up", (pair,))
    found = walk(setup, [range(1)], costs, math.inf, [1.0]).run()
    seqlen, again = 64 * 8, 64 * (8 - ranks)  # the last round's forward is the one that is kept
    work = pair * (3 * seqlen**2 + again**2) / 2
    assert found.busy == pytest.approx((work / ranks,) * ranks)
    assert found.idle_share < 0.02  # the latency


def test_a_shard_s_rounds_follow_those_before_it() -> None:
    costs = Costs((1e-3,) * 4, (2e-3,) * 4, 0.0, 0.0, "made up")
    one, two = (
        walk(setup_of(MIXED, 2, 32, shards), spans, costs, 1e9, [1.0] * shards).run()
        for shards, spans in ((1, [range(4)]), (2, [range(2), range(2, 4)]))
    )
    assert sum(two.busy) == pytest.approx(sum(one.busy))
    assert 0.5 * one.seconds < two.seconds < 0.8 * one.seconds


# ------------------------------------------------------------------------------------------- bytes, memory


def counted() -> None:
    """What ranks send is what the plan says."""
    group, start, sent = dist.group.WORLD, GroupTransport._started, list[int]()
    ranks, place = dist.get_world_size(), dist.get_rank()

    def counting(self: Any, to: int, tensor: Any, tag: int = 0) -> Any:
        sent.append(tensor.nbytes)
        return start(self, to, tensor, tag)

    GroupTransport._started = counting  # type: ignore[method-assign]
    for mixer, more in [HYBRIDS[1], HYBRIDS[4]]:
        # heads of whole vectors: compiled attention pads narrower ones
        model = hybrid(mixer, head_dim=8, **more).model
        ids = make_ids(2, 43)
        for length, size in ((43, 5), (40, 5), (11, 4)):
            model(ids[:, :length], ids[:, :length], Exact(size), sequence_group=group).loss.backward()
            total: list[Any] = [None] * ranks
            dist.all_gather_object(total, sum(sent))
            sent.clear()
            machine = Machine(precision="float64")
            setup = Setup(model_of(model.config), Exact(size), 2, length, Layout(1, ranks), machine)
            planned, most = step_bytes(setup, [range(len(mixer))])
            if more.get("sliding_window") is None:
                assert sum(total) == planned, (mixer, length, size, total, planned)
            assert place or most < planned


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_that_ranks_send(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, counted)


def test_keys_and_values_are_shared_out() -> None:
    alone, shared = (needs(setup_of(MIXED, ranks, 32), [range(4)])[0].parts for ranks in (1, 4))
    assert shared["past"] == alone["past"] / 4
    assert shared["states"] == pytest.approx(alone["states"] / 4, rel=0.3)  # with those at both ends
    assert shared["weights"] == alone["weights"] and shared["ids"] == alone["ids"]
    assert shared["messages"] > 0 and sum(shared.values()) < sum(alone.values())


def test_hybrids_are_laid_out_over_a_sequence() -> None:
    setup = setup_of(MIXED, 1, 64)
    costs = Costs((1e-3,) * 4, (2e-3,) * 4, 0.0, 0.0, "made up", (0.0, 0.0, 0.0, 1e-6), (1e-5,) * 4)
    best, *others = rank(Request(setup, 8, None, lambda setup: costs, 1e9))
    assert best.layout == Layout(1, 8) and best.estimate is not None and best.estimate.idle_share < 0.3
    assert {(one.layout.shards, one.layout.sequence) for one in others} == {(2, 4), (4, 2)}
    assert all(one.seconds > best.seconds and one.why for one in others)
