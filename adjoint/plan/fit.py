"""Layers to shards within the shards' memories, and what would fit where they do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError
from adjoint.plan.memory import PARTS, Setup, layer_bytes, needs
from adjoint.plan.partition import GB, named, partition

LONGEST = 1 << 33  # tokens; no sequence is longer
ATTEMPTS = 3  # at cutting the layers such that they fit, each from what the last one took


@dataclass(frozen=True)
class Fit:
    """What is to be put where.

    Args:
        limits: bytes of each shard's device, None for no limits.
        speeds: of each shard's device, relative to each other; equal where None.
    """

    setup: Setup
    limits: Sequence[float] | None = None
    speeds: Sequence[float] | None = None

    def of(self, **changes: Any) -> Fit:
        """The same of another setup."""
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, **changes))

    def of_method(self, **changes: Any) -> Fit:
        """The same with another argument of the method."""
        return self.of(method=dataclasses.replace(self.setup.method, **changes))

    def without_margin(self) -> Fit:
        """The same where only what tensors hold counts."""
        return self.of(machine=dataclasses.replace(self.setup.machine, reserve=False))

    def fastest(self, **limited: Any) -> list[range]:
        """Each shard's layers as their times would have it; `limited` as `partition`'s."""
        return partition(self.setup.model.costs, self.setup.layout.shards, self.speeds, **limited)

    def spans(self) -> list[range] | None:
        """Each shard's layers: the fastest cut within the limits that is found; None where none is."""
        spans, limits = self.fastest(), self.limits
        for attempt in range(ATTEMPTS):
            if limits is None:
                return spans
            totals = [need.total for need in needs(self.setup, spans)]
            if all(total <= limit for total, limit in zip(totals, limits, strict=True)):
                return spans
            if len(spans) == 1 or attempt + 1 == ATTEMPTS:
                break
            sizes = [layer_bytes(self.setup, k) for k in range(len(self.setup.model.costs))]
            each = zip(limits, totals, spans, strict=True)
            room = [limit - total + sum(sizes[k] for k in span) for limit, total, span in each]
            if min(room) <= 0:
                break
            try:
                spans = self.fastest(memory=sizes, limits=room)
            except UserError:
                break
        return None

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
        """The power of two for a chunk's tokens with which the fullest shard takes least: short chunks have
        many edges, long ones much work at a time. With it, what that shard takes; None where that does not
        fit, or the method has no chunks."""
        most = max(64, min(self.setup.seqlen, 1 << 17))

        @functools.cache
        def fullest(size: int) -> float:
            if not 64 <= size <= most:
                return math.inf
            try:
                other = self.of_method(chunk_size=size)
            except ValueError:  # unbiased: chunks must be shorter than the window
                return math.inf
            return max(need.total for need in needs(other.setup, other.spans() or other.fastest()))

        if not hasattr(self.setup.method, "chunk_size"):
            return None
        size = 1 << (max(64, min(self.setup.scheme.chunk_size, most)).bit_length() - 1)
        step = 2 if fullest(2 * size) < fullest(size) else 0.5
        while fullest(int(size * step)) < fullest(size):
            size = int(size * step)
        fits = fullest(size) < math.inf and self.of_method(chunk_size=size).spans()
        return (size, int(fullest(size))) if fits else None

    def shortage(self) -> str:
        """Which shard is too small for its layers, and what most of it is."""
        assert self.limits is not None
        spans = self.fastest()
        each = zip(needs(self.setup, spans), self.limits, spans, range(len(spans)), strict=True)
        need, limit, span, worst = max(each, key=lambda one: one[0].total - one[1])
        names = {**PARTS, "chunk": f"the work on a chunk of {self.setup.window[1]:,} tokens"}
        parts = sorted(need.parts.items(), key=lambda part: -part[1])[:2]
        what = " and ".join(f"{size / GB:.2f} GB for {names[name]}" for name, size in parts)
        has = f"needs {need.total / GB:.2f} GB and its device has {limit / GB:.2f}"
        return f"shard {worst} ({named(span)}) {has}: {what}"

    def refusal(self) -> str:
        """One line: the shortage, and what would fit."""
        return f"{self.shortage()}; what fits: {', or '.join(self._remedies())}"

    def _remedies(self) -> list[str]:
        limits, method, found = self.limits, self.setup.method, []
        assert limits is not None
        layout, same, most = self.setup.layout, len(set(limits)) == 1, self.setup.model.n_layer
        chunked = hasattr(method, "chunk_size")
        if not chunked:
            found.append("--method.name exact")
        elif (other := self.leanest_chunk()) is not None:
            found.append(f"--method.chunk_size {other[0]}")
        if getattr(method, "keep", "offload") != "offload" and self.setup.machine.kind == "cuda":
            found += ["--method.keep offload"] * bool(self.of_method(keep="offload").spans())

        def wider(shards: int) -> Fit:
            other = dataclasses.replace(layout, shards=shards)
            return Fit(self.of(layout=other).setup, [limits[0]] * other.shards)

        if same and chunked and layout.shards < most and wider(most).spans():
            enough, few = most, layout.shards
            while enough - few > 1:
                middle = (enough + few) // 2
                few, enough = (few, middle) if wider(middle).spans() else (middle, enough)
            found.append(f"{wider(enough).setup.layout.world} such devices")

        def suffices(factor: float) -> bool:
            return bool(dataclasses.replace(self, limits=[limit * factor for limit in limits]).spans())

        factor = _turn(suffices, 1, 2, 2**20, 0.01)[1]
        if same:
            size = f"{-(-limits[0] * factor // (GB / 100)) / 100:.2f} GB"
            return [*found, f"{layout.world} {'device' if layout.world == 1 else 'devices'} of {size}"]
        return [*found, f"{factor:.2f} times the memory on each of the {layout.world}"]


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
