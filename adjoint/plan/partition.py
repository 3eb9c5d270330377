"""Partition layers over shards: contiguous ranges whose largest load is as small as possible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from adjoint.errors import UserError
from adjoint.memory import size_text


def partition(
    costs: Sequence[float],
    shards: int,
    capacities: Sequence[float] | None = None,
    *,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[range]:
    """Return a range of layers per shard that minimises max_s (Σ costs of s) / capacity of s.

    Ranges are in order, and none is empty.

    Among those it takes the one with the smallest sum of squares, so that the shards that are not the slowest
    are balanced as well. Exact: dynamic programming over all cuts, O(shards × layers²). The order of the
    shards is kept: the caller decides which worker is next to which.

    Args:
        costs: time of each layer, measured or estimated, in any unit. costs[0] includes the embedding,
            costs[-1] norm and head.
        shards: number of shards.
        capacities: relative speed of each shard; None if equal.
        memory: bytes that each layer needs, with embedding and head as in `costs`.
        limits: bytes that each shard has.

    Raises:
        UserError: more shards than layers; no partition keeps to the limits.
    """
    layers = len(costs)
    if shards > layers:
        raise UserError(
            f"{shards} shards for {layers} layers: a shard needs a layer; use at most {layers} shards"
        )
    load, need = _sums(costs), _sums(memory or [0.0] * layers)
    speed, room = capacities or [1.0] * shards, limits or [np.inf] * shards

    def time(shard: int) -> np.ndarray:
        return np.where(need <= room[shard], load / speed[shard], np.inf)

    def square(shard: int) -> np.ndarray:
        times = time(shard)
        return np.where(times <= slowest, times**2, np.inf)

    _, slowest = _cut(shards, time, np.maximum)
    if np.isinf(slowest):
        raise UserError(
            f"{layers} layers of {size_text(sum(memory or ()))} in all do not fit on {shards} shards"
        )
    cuts, _ = _cut(shards, square, np.add)
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def named(span: range) -> str:
    """Return a span as text: layer 3, or layers 0-5."""
    return f"layer {span.start}" if len(span) == 1 else f"layers {span.start}-{span.stop - 1}"


def _sums(values: Sequence[float]) -> np.ndarray:
    """Return (layers + 1, layers + 1) sums: at [b, a] that of the layers [a, b), infinite if empty."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(np.tri(len(ends), k=-1, dtype=bool), ends[:, None] - ends[None, :], np.inf)


def _cut(shards: int, load: Callable[[int], np.ndarray], combine: np.ufunc) -> tuple[list[int], float]:
    """Return the cuts that minimise the shards' combined loads, and that minimum.

    Args:
        load: gives a shard's matrix, which has at [b, a] the load of the layers [a, b).
    """
    best = load(0)[:, 0]  # loads of the first shard alone, by its end
    choices = []
    for shard in range(1, shards):
        through = combine(load(shard), best)
        starts = through.argmin(axis=1)
        choices.append(starts)
        best = np.take_along_axis(through, starts[:, None], axis=1)[:, 0]
    cuts = [len(best) - 1]
    for starts in reversed(choices):
        cuts.append(int(starts[cuts[-1]]))
    return [0, *reversed(cuts)], float(best[-1])
