"""Which layers go to which shard: contiguous ranges whose largest load is as small as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from adjoint.errors import UserError

GB = 1e9


def partition(
    costs: Sequence[float],
    shards: int,
    capacities: Sequence[float] | None = None,
    *,
    memory: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[range]:
    """One range of layers a shard, in order, none empty, that minimises max_s (Σ costs of s) / capacity of s.

    Among those it takes the one with the smallest sum of squares, so that the shards that are not the slowest
    are balanced as well. Exact: dynamic programming over all cuts, O(shards × layers²). The order of the
    shards is kept: which worker is next to which is for the caller to say.

    Args:
        costs: time of each layer, measured or estimated, in any unit. What comes with the
            first or the last layer counts there: the embedding in costs[0], norm and head in costs[-1].
        shards: how many.
        capacities: of each shard, relative speed; equal where None.
        memory: bytes each layer needs where it lives, counted like `costs`.
        limits: bytes each shard has.

    Raises:
        UserError: more shards than layers; no partition keeps to the limits.
        ValueError: lengths that do not fit, a negative cost, a capacity that is not positive.
    """
    layers = len(costs)
    if shards < 1:
        raise UserError(f"{shards} shards: there must be at least one")
    if shards > layers:
        raise UserError(
            f"{shards} shards for {layers} layers: a shard needs a layer; take at most {layers} shards"
        )
    if (memory is None) != (limits is None):
        raise ValueError("memory and limits go together: give both or neither")
    load, speed = _loads(costs, "costs", layers), _positive(capacities, "capacities", shards)
    need, room = np.zeros_like(load), np.full(shards, np.inf)
    if memory is not None and limits is not None:
        need, room = _loads(memory, "memory", layers), _positive(limits, "limits", shards)

    def time(shard: int) -> np.ndarray:
        return np.where(need <= room[shard], load / speed[shard], np.inf)

    def square(shard: int) -> np.ndarray:
        each = time(shard)
        return np.where(each <= slowest, each**2, np.inf)

    _, slowest = _cut(shards, time, np.maximum)
    if np.isinf(slowest):
        raise UserError(
            f"{layers} layers of {sum(memory or ()) / GB:.2f} GB in all do not fit on {shards} shards"
        )
    cuts, _ = _cut(shards, square, np.add)
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def _loads(values: Sequence[float], name: str, layers: int) -> np.ndarray:
    """(layers + 1, layers + 1): at [b, a] the sum over the layers [a, b), infinite where that is empty."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (layers,):
        raise ValueError(f"{name}: {layers} layers, but {array.size} values")
    if not np.all(array >= 0):
        raise ValueError(f"{name} must be numbers of at least 0, got {min(values)}")
    ends = np.concatenate([[0.0], np.cumsum(array)])
    return np.where(np.tri(layers + 1, k=-1, dtype=bool), ends[:, None] - ends[None, :], np.inf)


def _positive(values: Sequence[float] | None, name: str, shards: int) -> np.ndarray:
    array = np.ones(shards) if values is None else np.asarray(values, dtype=np.float64)
    if array.shape != (shards,):
        raise ValueError(f"{name}: {shards} shards, but {array.size} values")
    if not np.all(array > 0):
        raise ValueError(f"{name} must be greater than 0, got {array.min()}")
    return array


def _cut(shards: int, load: Callable[[int], np.ndarray], combine: np.ufunc) -> tuple[list[int], float]:
    """The cuts that minimise the shards' loads combined, and that minimum; `load` gives a shard's matrix, at
    [b, a] that of the layers [a, b)."""
    best = load(0)[:, 0]  # of the first shard alone, by its end
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
