"""Layers to shards within the shards' memories, and what would fit where they do not."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Sequence
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
        low: float = self.setup.seqlen if self.spans() else 0  # shorter ones need not be counted
        high = 2 * low or 64
        while high < LONGEST and self.of(seqlen=high).spans():
            low, high = high, 2 * high
        while high - low > low / 32 > 0:
            middle = (low + high) / 2
            low, high = (middle, high) if self.of(seqlen=int(middle)).spans() else (low, middle)
        return int(low) // 1024 * 1024 if low >= 32768 else int(low)

    def fitting_chunk(self) -> int | None:
        """The power of two for a chunk's tokens, nearest to what they are, with which everything fits; None
        where there is none. Short chunks have many edges, long ones a lot of work at a time."""
        now = self.setup.spec.chunk_size.bit_length()
        for size in sorted((1 << i for i in range(6, 18)), key=lambda size: abs(size.bit_length() - now)):
            with contextlib.suppress(ValueError):  # unbiased: chunks must be shorter than the window
                if size <= self.setup.seqlen and self.of_method(chunk_size=size).spans():
                    return size
        return None

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
        limits, setup, found = self.limits, self.setup, []
        assert limits is not None
        if not (chunked := hasattr(setup.method, "chunk_size")):
            found.append("--method.name exact")
        elif (size := self.fitting_chunk()) is not None:
            found.append(f"--method.chunk_size {size}")
        if getattr(setup.method, "keep", "offload") != "offload" and setup.machine.kind == "cuda":
            # a budget is for keep="edges" alone
            given = {} if getattr(setup.method, "memory", None) is None else {"memory": None}
            if self.of_method(keep="offload", **given).spans():
                found.append("--method.keep offload" + " --method.memory null" * bool(given))

        def wider(shards: int) -> Fit:
            other = self.of(layout=dataclasses.replace(setup.layout, shards=shards))
            return Fit(other.setup, [limits[0]] * shards)

        if len(set(limits)) == 1 and chunked:
            counts = range(setup.layout.shards + 1, setup.model.n_layer + 1)
            enough = bisect.bisect_left(counts, True, key=lambda count: bool(wider(count).spans()))
            found += [f"{wider(count).setup.layout.world} such devices" for count in counts[enough:][:1]]
        most = max(need.total for need in needs(setup, self.fastest()))
        return [*found, f"devices of {math.ceil(most / GB * 100) / 100:.2f} GB"]
