"""Partitions of layers against all partitions there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adjoint import StackConfig
from adjoint.cluster.devices import Device, shares
from adjoint.errors import UserError
from adjoint.plan.partition import partition
from adjoint.plan.planned_stack import model_of


def every_partition(layers: int, shards: int) -> Iterator[list[range]]:
    for inner in itertools.combinations(range(1, layers), shards - 1):
        yield [range(a, b) for a, b in itertools.pairwise([0, *inner, layers])]


def loads(ranges: Sequence[range], costs: Sequence[float], capacities: Sequence[float]) -> list[float]:
    return [sum(costs[k] for k in own) / c for own, c in zip(ranges, capacities, strict=True)]


def within(ranges: Sequence[range], memory: Sequence[float], limits: Sequence[float]) -> bool:
    return all(sum(memory[k] for k in own) <= limit for own, limit in zip(ranges, limits, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Costs and memory of up to 8 layers, capacities and limits of up to 4 shards: whole numbers, so that
    sums are exact and equal to brute force's whatever the order."""
    layers = draw(st.integers(1, 8))
    shards = draw(st.integers(1, min(4, layers)))
    ints = lambda low, high, n: st.lists(st.integers(low, high), min_size=n, max_size=n)  # noqa: E731
    capacities = [2**k for k in draw(ints(0, 3, shards))]  # and quotients too
    return draw(ints(0, 9, layers)), capacities, draw(ints(0, 9, layers)), draw(ints(1, 40, shards))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equals_brute_force(problem: tuple[list[int], list[int], list[int], list[int]]) -> None:
    costs, capacities, memory, limits = problem
    candidates = [p for p in every_partition(len(costs), len(limits)) if within(p, memory, limits)]
    if not candidates:
        with pytest.raises(UserError, match="do not fit"):
            partition(costs, len(limits), capacities, memory=memory, limits=limits)
        return

    def worth(ranges: list[range]) -> tuple[float, float]:
        each = loads(ranges, costs, capacities)
        return max(each), sum(x**2 for x in each)

    found = partition(costs, len(limits), capacities, memory=memory, limits=limits)
    assert [k for own in found for k in own] == list(range(len(costs)))
    assert all(found) and within(found, memory, limits)
    assert worth(found) == min(map(worth, candidates))


def test_slices_take_layers_by_their_memory() -> None:
    sizes = [4864, 4864, 9856, 19968]  # 1g, 1g, 2g and 3g of an A100-40
    slices = [Device(f"MIG-{i}", "A100", 0, mib << 20, "x") for i, mib in enumerate(sizes)]
    assert [len(own) for own in partition([1.0] * 48, 4, shares(slices))] == [6, 6, 12, 24]


def test_more_shards_than_layers() -> None:
    with pytest.raises(UserError, match=r"5 shards for 4 layers.*at most 4"):
        partition([1.0] * 4, 5)


def test_estimated_costs_count_matrices_and_put_the_head_last() -> None:
    small = {"vocab_size": 50, "d_model": 16, "n_layer": 3, "mixer": "mamba", "d_state": 4}
    costs = model_of(StackConfig(**small)).costs
    assert costs[0] == costs[1] > 0
    assert costs[2] - costs[0] == 50 * 16
    wider = model_of(StackConfig(**small, d_intermediate=64)).costs
    assert wider[0] - costs[0] >= 2 * 16 * 64
