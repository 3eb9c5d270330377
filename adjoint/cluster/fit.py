"""Layers to shards within the shards' memories, and what would fit where they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adjoint.cluster.memory import PARTS, Memory, Setup, memory
from adjoint.cluster.partition import GB, partition
from adjoint.errors import UserError
from adjoint.layers import StackConfig

LONGEST = 1 << 33  # tokens; no sequence is longer


def make_setup(model: Any, *arguments: Any, **keywords: Any) -> Setup:
    """The setup of a StackConfig or a `Pretrained`; the rest as `Setup`'s.

    Raises:
        UserError: see `PretrainedSetup`.
    """
    if isinstance(model, StackConfig):
        return Setup(model, *arguments, **keywords)
    from adjoint.cluster.pretrained_memory import PretrainedSetup, Spans

    return PretrainedSetup(Spans(model), *arguments, **keywords)


def needs(setup: Setup, spans: Sequence[range]) -> list[Memory]:
    """What each worker of each shard takes."""
    last = len(spans) - 1
    return [memory(setup, span, len(spans), rank == 0, rank == last) for rank, span in enumerate(spans)]


@dataclass(frozen=True)
class Fit:
    """What is to be put where.

    Args:
        costs, shards, capacities: as `partition`'s.
        limits: bytes of each shard's device, None for no limits.
    """

    setup: Setup
    costs: Sequence[float]
    shards: int
    capacities: Sequence[float] | None = None
    limits: Sequence[float] | None = None

    def of(self, **changes: Any) -> Fit:
        """The same of another setup."""
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, **changes))

    def of_method(self, **changes: Any) -> Fit:
        """The same with another argument of the method."""
        return self.of(method=dataclasses.replace(self.setup.method, **changes))

    def spans(self) -> list[range] | None:
        """`partition`, such that each shard's memory is within its limit; None where nothing fits."""
        spans = partition(self.costs, self.shards, self.capacities)  # the fastest
        if self.limits is None or self._within(spans):
            return spans
        if self.shards == 1:
            return None
        sizes, overhead = self._by_layer()
        room = [limit - overhead for limit in self.limits]
        if min(room) <= 0:
            return None
        try:
            spans = partition(self.costs, self.shards, self.capacities, memory=sizes, limits=room)
        except UserError:
            return None
        return spans if self._within(spans) else None

    def assign(self) -> list[range]:
        """`spans`.

        Raises:
            UserError: nothing fits; the message says what would.
        """
        spans = self.spans()
        if spans is None:
            raise UserError(self.refusal())
        return spans

    def longest(self) -> int:
        """The most tokens a sequence may have, to within a thirty-second; 0 where not even 64 fit."""
        known = self.setup.seqlen if self.spans() else 0  # shorter ones need not be counted
        bounds = (known, 2 * known) if known else (0, 64)
        low = int(_turn(lambda n: not self.of(seqlen=int(n)).spans(), *bounds, LONGEST, 1 / 32)[0])
        return low // 1024 * 1024 if low >= 32768 else low

    def leanest_chunk(self) -> tuple[int, int] | None:
        """The power of two for a chunk's tokens with which the fullest shard takes least, of those that fit:
        short chunks have many edges, long ones much work at a time. With it, what that shard takes; None
        where none fits, or the method has no chunks."""
        found, size = [], 64
        while hasattr(self.setup.method, "chunk_size") and size <= max(64, min(self.setup.seqlen, 1 << 17)):
            try:
                other = self.of_method(chunk_size=size)
            except ValueError:  # unbiased: chunks must be shorter than the window
                break
            spans = other.spans()
            if spans is not None:
                found.append((max(need.total for need in needs(other.setup, spans)), size))
            size *= 2
        return None if not found else min(found)[::-1]

    def refusal(self) -> str:
        """One line: which shard is too small for its layers, what most of it is, and what would fit."""
        assert self.limits is not None
        spans = partition(self.costs, self.shards, self.capacities)
        found = needs(self.setup, spans)
        worst = int(np.argmax([need.total - limit for need, limit in zip(found, self.limits, strict=True)]))
        names = {**PARTS, "chunk": f"the work on a chunk of {self.setup.window[1]:,} tokens"}
        parts = sorted(found[worst].parts.items(), key=lambda part: -part[1])[:2]
        what = " and ".join(f"{size / GB:.2f} GB for {names[name]}" for name, size in parts)
        span = spans[worst]
        layers = f"layer {span.start}" if len(span) == 1 else f"layers {span.start}-{span.stop - 1}"
        return (
            f"shard {worst} ({layers}) needs {found[worst].total / GB:.2f} GB and its device has "
            f"{self.limits[worst] / GB:.2f}: {what}; what fits: {', or '.join(self._remedies())}"
        )

    def _remedies(self) -> list[str]:
        limits, method, found = self.limits, self.setup.method, []
        assert limits is not None
        chunked, same = hasattr(method, "chunk_size"), len(set(limits)) == 1
        if not chunked:
            found.append("--method.name exact")
        elif (other := self.leanest_chunk()) is not None:
            found.append(f"--method.chunk_size {other[0]}")
        if getattr(method, "keep", "offload") != "offload" and self.setup.device == "cuda":
            found += ["--method.keep offload"] * bool(self.of_method(keep="offload").spans())
        if same and chunked:
            for more in range(self.shards + 1, len(self.costs) + 1):
                if Fit(self.setup, self.costs, more, None, [limits[0]] * more).spans():
                    found.append(f"{more} such devices")
                    break

        def enough(factor: float) -> bool:
            return bool(dataclasses.replace(self, limits=[limit * factor for limit in limits]).spans())

        factor = _turn(enough, 1, 2, 2**20, 0.01)[1]
        if same:
            size = f"{-(-limits[0] * factor // (GB / 100)) / 100:.2f} GB"
            return [*found, f"{self.shards} {'device' if self.shards == 1 else 'devices'} of {size}"]
        return [*found, f"{factor:.2f} times the memory on each of the {self.shards}"]

    def _within(self, spans: Sequence[range]) -> bool:
        assert self.limits is not None
        return all(n.total <= limit for n, limit in zip(needs(self.setup, spans), self.limits, strict=True))

    def _by_layer(self) -> tuple[list[float], float]:
        """What each layer adds to its shard, embedding and head with the first and the last; and what a shard
        takes however few layers it has. From the difference that a layer makes to a shard with one like it:
        only the transients of the largest layer, in the overhead, are not exact, too high rather than too
        low."""

        def total(*layers: int, first: bool = False, last: bool = False) -> int:
            return memory(self.setup, layers, self.shards, first, last).total

        kinds = self.setup.kinds
        base = {kind: total(kinds.index(kind)) for kind in kinds}
        added = {kind: float(total(k := kinds.index(kind), k) - base[kind]) for kind in base}
        sizes = [added[kind] for kind in kinds]
        sizes[0] += max(0, total(0, first=True) - base[kinds[0]])
        sizes[-1] += max(0, total(len(kinds) - 1, last=True) - base[kinds[-1]])
        return sizes, max(base[kind] - added[kind] for kind in added)


def _turn(
    holds: Callable[[float], bool], low: float, high: float, most: float, share: float
) -> tuple[float, float]:
    """Two numbers no more than a `share` apart, of which something holds for the higher one alone. It is
    looked for from `high` on, up to `most`; where it holds there at once and `low` is 0, these two are given
    back."""
    while high < most and not holds(high):
        low, high = high, 2 * high
    while low and high - low > share * low:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low, high
