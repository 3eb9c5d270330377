"""Assign layers to shards within the shards' memories, or say what would fit instead."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import size_text
from adjoint.plan.host_traffic import in_host_memory
from adjoint.plan.partition import named, partition
from adjoint.plan.run_memory import PARTS, Setup, layer_bytes, needs

LONGEST = 1 << 33  # tokens; no sequence is longer
ANY_LINK = 1.0  # bytes per second: whether weights in host memory fit does not depend on it
ATTEMPTS = 3  # to cut the layers such that they fit, each based on the memory of the one before


@dataclass(frozen=True)
class Fit:
    """A setup, and the devices that its shards must fit.

    Args:
        limits: bytes of each shard's device, None for no limits.
        speeds: relative speed of each shard's device; None if equal.
    """

    setup: Setup
    limits: Sequence[float] | None = None
    speeds: Sequence[float] | None = None

    def with_changes(self, **changes: Any) -> Fit:
        """Return the same devices with another setup, changed by its fields."""
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, **changes))

    def with_method(self, **changes: Any) -> Fit:
        """Return the same devices and setup with another method, changed by its arguments."""
        return self.with_changes(method=dataclasses.replace(self.setup.method, **changes))

    def without_margin(self) -> Fit:
        """Return the same devices and setup, counting only the memory of tensors."""
        return self.with_changes(machine=dataclasses.replace(self.setup.machine, reserve=False))

    def fastest(self, **limited: Any) -> list[range]:
        """Return each shard's layers in the fastest cut; `limited` are arguments of `partition`."""
        return partition(self.setup.model.costs, self.setup.layout.shards, self.speeds, **limited)

    def spans(self) -> list[range] | None:
        """Return each shard's layers in the fastest cut found within the limits; None if none is found."""
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
            shards = zip(limits, totals, spans, strict=True)
            room = [limit - total + sum(sizes[k] for k in span) for limit, total, span in shards]
            if min(room) <= 0:
                break
            try:
                spans = self.fastest(memory=sizes, limits=room)
            except UserError:
                break
        return None

    def assign(self) -> list[range]:
        """Return `spans`, or raise.

        Raises:
            UserError: nothing fits; the message says what would.
        """
        spans = self.spans()
        if spans is None:
            raise UserError(self.refusal())
        return spans

    def longest(self) -> int:
        """Return the most tokens a sequence may have, to within a thirty-second; 0 if not even 64 fit."""
        low: float = self.setup.seqlen if self.spans() else 0  # shorter ones need not be counted
        high, growth = 2 * low or 64, 1.0
        if low and (expected := self._expected_longest()) > high:
            if self.fits(expected * 63 / 64):
                low, high, growth = expected * 63 / 64, expected * 65 / 64, 1 / 32
            else:
                high = expected * 63 / 64
        while high < LONGEST and self.fits(high):
            low, high, growth = high, (1 + growth) * high, min(2 * growth, 1)
        while high - low > low / 31 > 0:
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return int(low) // 1024 * 1024 if low >= 32768 else int(low)

    def fits(self, seqlen: float) -> bool:
        """Whether sequences of another length fit."""
        return self.with_changes(seqlen=int(seqlen)).spans() is not None

    def _expected_longest(self) -> float:
        """Return the length at which the first shard is full if memory grows evenly; 0 if it does not.

        The growth per token is that from this length to twice as many tokens, then that from this length to
        the one so found."""
        assert self.limits is not None
        spans, setup, length = self.fastest(), self.setup, 2.0 * self.setup.seqlen
        totals = [need.total for need in needs(setup, spans)]
        for _ in range(2):
            more = needs(self.with_changes(seqlen=int(length)).setup, spans)
            shards = [
                (t, (need.total - t) / (int(length) - setup.seqlen))
                for t, need in zip(totals, more, strict=True)
            ]
            length = setup.seqlen + min(
                (limit - total) / growth if growth > 0 else LONGEST
                for limit, (total, growth) in zip(self.limits, shards, strict=True)
            )
            if not 2 * setup.seqlen < length < LONGEST:
                return 0
        return length

    def fitting_chunk(self) -> int | None:
        """Return the power of two nearest to the chunk size with which everything fits, or None.

        Short chunks have many edges, long ones a lot of work at a time."""
        current_bits = self.setup.spec.chunk_size.bit_length()
        for size in sorted(
            (1 << i for i in range(6, 18)), key=lambda size: abs(size.bit_length() - current_bits)
        ):
            with contextlib.suppress(ValueError):  # unbiased: chunks must be shorter than the window
                if size <= self.setup.seqlen and self.with_method(chunk_size=size).spans():
                    return size
        return None

    def shortage(self) -> str:
        """Say which shard is too small for its layers, and which two parts take most of it."""
        assert self.limits is not None
        spans = self.fastest()
        shards = zip(needs(self.setup, spans), self.limits, spans, range(len(spans)), strict=True)
        need, limit, span, worst = max(shards, key=lambda shard: shard[0].total - shard[1])
        names = {**PARTS, "chunk": f"the work on a chunk of {self.setup.window[1]:,} tokens"}
        largest_parts = sorted(need.parts.items(), key=lambda entry: -entry[1])[:2]
        contents = " and ".join(f"{size_text(size)} for {names[name]}" for name, size in largest_parts)
        has = f"needs {size_text(need.total)} and its device has {size_text(limit)}"
        return f"shard {worst} ({named(span)}) {has}: {contents}"

    def refusal(self) -> str:
        """Return one line: the shortage, and what would fit."""
        return f"{self.shortage()}; what fits: {', or '.join(self._remedies())}"

    def _remedies(self) -> list[str]:
        limits, setup, remedies = self.limits, self.setup, []
        assert limits is not None
        if not (chunked := setup.method.has_chunks):
            remedies.append("--method.name exact")
        elif (size := self.fitting_chunk()) is not None:
            remedies.append(f"--method.chunk_size {size}")
        has_offload = "keep" in {field.name for field in dataclasses.fields(setup.method)}
        can_offload = has_offload and not setup.spec.storage.offload and setup.machine.kind == "cuda"
        if can_offload and self.with_method(keep="offload").spans():
            remedies.append("--method.keep offload")

        is_cut = getattr(setup.model.source, "bidirectional", None) is None  # or in one process alone
        offloadable = setup.host_link is None and setup.machine.kind == "cuda" and setup.layout.workers == 1
        if chunked and offloadable and is_cut and Fit(in_host_memory(setup, ANY_LINK), limits).spans():
            remedies.append("--model.offload weights")

        def wider(shards: int) -> Fit:
            other = self.with_changes(layout=dataclasses.replace(setup.layout, shards=shards))
            return Fit(other.setup, [limits[0]] * shards)

        if len(set(limits)) == 1 and chunked and is_cut:
            counts = range(setup.layout.shards + 1, setup.model.n_layer + 1)
            enough = bisect.bisect_left(counts, True, key=lambda count: bool(wider(count).spans()))
            remedies += [f"{wider(count).setup.layout.world} such devices" for count in counts[enough:][:1]]
        most = max(need.total for need in needs(setup, self.fastest()))
        return [*remedies, f"devices of {size_text(most, round_up=True)}"]
