"""Units of work that a shard and its helpers share: which there are, and in which order each side takes them.

Plain data, used alike by whoever carries a schedule out, checks it or simulates it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Units for each worker of a crew: more even out slower workers better, and send more sums of gradients.
UNITS_EACH = 4


@dataclass(frozen=True, slots=True)
class Unit:
    """Tasks of one layer that one worker carries out one after the other; it sums their gradients from zero.

    Attributes:
        chunks: in the order of the tasks.
    """

    layer: int
    chunks: range

    @property
    def stealable(self) -> bool:
        """The first layer's tasks stay with their shard: the embedding needs what they hand down."""
        return self.layer > 0

    def __str__(self) -> str:
        first, last = self.chunks[0], self.chunks[-1]
        return f"layer {self.layer} chunk{f' {first}' if first == last else f's {first} to {last}'}"


def units_of(own: range, chunks: int, crew: int, windowed: bool) -> tuple[Unit, ...]:
    """The units of a shard's layers, in the order in which their owner takes them: those that it has to carry
    out itself first, so that what is left at the end can be taken by anyone.

    Args:
        own: the shard's layers.
        crew: workers that share them, the owner among them.
        windowed: whether a layer's chunks are independent of each other: then a layer is cut into groups of
            consecutive chunks, for about `UNITS_EACH` units a worker. Else a layer is one unit, last chunk
            first.
    """
    shared = sum(layer > 0 for layer in own)
    units = []
    for layer in own:
        if not windowed:
            units.append(Unit(layer, range(chunks - 1, -1, -1)))
            continue
        groups = 1 if layer == 0 else min(chunks, -(-UNITS_EACH * crew // shared))
        cuts = [chunks * group // groups for group in range(groups + 1)]
        units += [Unit(layer, range(a, b)) for a, b in itertools.pairwise(cuts)]
    return tuple(units)


@dataclass(frozen=True, slots=True)
class Pool:
    """Carry out `units` together with `helpers`, who `Steal`: whoever is free takes the next unit, this
    worker from the front, helpers from the back (`Bag`). A unit's gradients are summed from zero by
    whoever carries it out, and these sums are added in the order of the units: the result does not depend on
    who took what."""

    units: tuple[Unit, ...]
    helpers: tuple[int, ...]

    def __str__(self) -> str:
        return f"share with {', '.join(map(str, self.helpers))}: {'; '.join(map(str, self.units))}"


@dataclass(frozen=True, slots=True)
class Steal:
    """Take units of worker `owner`'s pool until none is left."""

    owner: int

    def __str__(self) -> str:
        return f"steal from {self.owner}"


class Bag:
    """Units that nobody has taken yet. Not safe for threads by itself.

    The owner takes them in their order; helpers steal from the other end, layer by layer from the last, but
    in each layer in order too: sums are added in the order of a layer's units, so that few of them are early
    and have to be held.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.taken: set[Unit] = set()
        self.front = collections.deque(units)
        by_layer: dict[int, list[Unit]] = collections.defaultdict(list)
        for unit in units:
            if unit.stealable:
                by_layer[unit.layer].append(unit)
        self.back = collections.deque(unit for layer in reversed(by_layer) for unit in by_layer[layer])

    def take(self) -> Unit | None:
        """The owner's next unit; None when there are none left."""
        return self._next(self.front)

    def steal(self) -> Unit | None:
        """A helper's next unit."""
        return self._next(self.back)

    def _next(self, order: collections.deque[Unit]) -> Unit | None:
        while order:
            unit = order.popleft()
            if unit not in self.taken:
                self.taken.add(unit)
                return unit
        return None


def in_turn(owner: int, pool: Pool) -> Iterator[tuple[int, Unit]]:
    """A pool's units by workers who take them in turn: one of the ways in which it can go."""
    bag, crew = Bag(pool.units), collections.deque([owner, *pool.helpers])
    while crew:
        unit = bag.take() if crew[0] == owner else bag.steal()
        if unit is None:
            crew.popleft()
        else:
            yield crew[0], unit
            crew.rotate(-1)
