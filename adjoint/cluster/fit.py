"""Layers to shards within the shards' memories, and what would fit where they do not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from adjoint.cluster import memory as plan
from adjoint.cluster.devices import Device
from adjoint.cluster.memory import Memory, Setup, chunking
from adjoint.cluster.partition import GB, partition
from adjoint.errors import UserError

LONGEST = 1 << 33  # tokens; no sequence is longer


def needs(setup: Setup, spans: Sequence[range]) -> list[Memory]:
    """What each shard takes."""
    last = len(spans) - 1
    return [
        plan.memory(setup, span, len(spans), first=rank == 0, last=rank == last)
        for rank, span in enumerate(spans)
    ]


def assign(
    setup: Setup,
    costs: Sequence[float],
    shards: int,
    capacities: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[range]:
    """`partition`, such that each shard's memory is within its limit.

    Args:
        costs, capacities: as `partition`'s. limits: bytes of each shard's device, None for no limits.

    Raises:
        UserError: nothing fits; the message says what would.
    """
    spans = fitting(setup, costs, shards, capacities, limits)
    if spans is None:
        assert limits is not None
        raise UserError(refusal(setup, costs, capacities, limits))
    return spans


def assign_on(
    setup: Setup,
    costs: Sequence[float],
    capacities: Sequence[float],
    devices: Sequence[Device | None],
    nodes: Sequence[tuple[str, int]],
) -> list[range]:
    """`partition` within the memory that shards have found where they are.

    Where only the margin for libraries and the allocator is missing, the shards get their way.

    Args:
        devices: of each shard; None is a CPU. nodes: of each, its name and its memory in bytes; with replicas
            of each of theirs, one replica after the other.

    Raises:
        UserError: a GPU or slice is too small for its shard, or a node for all of its shards that compute on
            CPUs; the message says what would fit.
    """
    limits = [device.memory_bytes for device in devices if device is not None]
    if len(limits) == len(devices):
        spans = fitting(setup, costs, len(limits), capacities, limits)
        spans = spans or fitting(_bare(setup), costs, len(limits), capacities, limits)
        if spans is None:
            raise UserError(f"cluster.shards: {refusal(setup, costs, capacities, limits)}")
        return spans
    spans = partition(costs, len(devices), capacities)
    taken: dict[str, int] = {}
    for (name, _), need in zip(nodes, itertools.cycle(needs(_bare(setup), spans)), strict=False):
        taken[name] = taken.get(name, 0) + need.total
    for name, memory in dict(nodes).items():
        if taken[name] > memory:
            count = [other for other, _ in nodes].count(name)
            there = f"a node of {memory / GB:.1f} GB need {taken[name] / GB:.1f} GB"
            raise UserError(
                f"cluster.shards: {count} shards on {there}; shorten --data.seqlen, or take more nodes or a "
                "smaller model"
            )
    return spans


def _bare(setup: Setup) -> Setup:
    return dataclasses.replace(setup, reserve=False)


def fitting(
    setup: Setup,
    costs: Sequence[float],
    shards: int,
    capacities: Sequence[float] | None,
    limits: Sequence[float] | None,
) -> list[range] | None:
    """As `assign`, and None where nothing fits."""
    spans = partition(costs, shards, capacities)  # the fastest
    if limits is None or _within(setup, spans, limits):
        return spans
    if shards == 1:
        return None
    memory, overhead = _by_layer(setup, shards)
    room = [limit - overhead for limit in limits]
    if min(room) <= 0:
        return None
    try:
        spans = partition(costs, shards, capacities, memory=memory, limits=room)
    except UserError:
        return None
    return spans if _within(setup, spans, limits) else None


def longest(
    setup: Setup,
    costs: Sequence[float],
    shards: int,
    limits: Sequence[float],
    capacities: Sequence[float] | None,
) -> int:
    """The most tokens a sequence may have, to within a thirty-second; 0 where not even 64 fit."""

    def fits(seqlen: int) -> bool:
        longer = dataclasses.replace(setup, seqlen=seqlen)
        return fitting(longer, costs, shards, capacities, limits) is not None

    low, high = 0, 64
    while high <= LONGEST and fits(high):
        low, high = high, 2 * high
    while low and high - low > max(low // 32, 1) and high <= LONGEST:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low // 1024 * 1024 if low >= 32768 else low


def refusal(
    setup: Setup, costs: Sequence[float], capacities: Sequence[float] | None, limits: Sequence[float]
) -> str:
    """One line: which shard is too small for its layers, what most of it is, and what would fit."""
    shards = len(limits)
    spans = partition(costs, shards, capacities)
    found = needs(setup, spans)
    over = [one.total - limit for one, limit in zip(found, limits, strict=True)]
    worst = int(np.argmax(over))
    parts = sorted(found[worst].parts.items(), key=lambda part: -part[1])[:2]
    what = " and ".join(f"{size / GB:.2f} GB for {_name(setup, name, shards)}" for name, size in parts)
    span = spans[worst]
    layers = f"layer {span.start}" if len(span) == 1 else f"layers {span.start}-{span.stop - 1}"
    message = (
        f"shard {worst} ({layers}) needs {found[worst].total / GB:.2f} GB and its device has "
        f"{limits[worst] / GB:.2f}: {what}"
    )
    remedies = _remedies(setup, costs, capacities, limits)
    return f"{message}; what fits: {', or '.join(remedies) or 'a smaller model'}"


def _name(setup: Setup, part: str, shards: int) -> str:
    if part == "chunk":
        return f"the work on a chunk of {chunking(setup, shards).task:,} tokens"
    return plan.PARTS[part]


def _remedies(
    setup: Setup, costs: Sequence[float], capacities: Sequence[float] | None, limits: Sequence[float]
) -> list[str]:
    shards, found = len(limits), []
    if not hasattr(setup.method, "chunk_size"):
        found.append("--method.name exact")
    else:
        other = leanest_chunk(setup, costs, capacities, limits)
        if other is not None:
            found.append(f"--method.chunk_size {other[0]}")
    if getattr(setup.method, "keep", "") in ("edges", "inputs") and setup.device == "cuda":
        stowed = dataclasses.replace(setup, method=dataclasses.replace(setup.method, keep="offload"))
        if fitting(stowed, costs, shards, capacities, limits):
            found.append("--method.keep offload")
    same = len(set(limits)) == 1
    if same and hasattr(setup.method, "chunk_size"):
        for more in range(shards + 1, len(costs) + 1):
            if fitting(setup, costs, more, None, [limits[0]] * more):
                found.append(f"{more} such devices")
                break
    low, high = 1.0, 2.0
    while high < 2**20 and not _scaled(setup, costs, capacities, limits, high):
        low, high = high, 2 * high
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _scaled(setup, costs, capacities, limits, middle) else (middle, high)
    if same:
        size = f"{-(-limits[0] * high // (GB / 100)) / 100:.2f} GB"
        found.append(f"{shards} {'device' if shards == 1 else 'devices'} of {size}")
    else:
        found.append(f"{high:.2f} times the memory on each of the {shards}")
    return found


def leanest_chunk(
    setup: Setup, costs: Sequence[float], capacities: Sequence[float] | None, limits: Sequence[float]
) -> tuple[int, int] | None:
    """The power of two for a chunk's tokens with which the fullest shard takes least, of those that fit:
    short chunks have many edges, long ones much work at a time. With it, what that shard takes; None where
    none fits, or the method has no chunks."""
    if not hasattr(setup.method, "chunk_size"):
        return None
    found = []
    size = 64
    while size <= max(64, min(setup.seqlen, 1 << 17)):
        with_it = _with_chunk(setup, size)
        spans = None if with_it is None else fitting(with_it, costs, len(limits), capacities, limits)
        if with_it is not None and spans is not None:
            found.append((max(one.total for one in needs(with_it, spans)), size))
        size *= 2
    return None if not found else min(found)[::-1]


def _with_chunk(setup: Setup, size: int) -> Setup | None:
    try:
        return dataclasses.replace(setup, method=dataclasses.replace(setup.method, chunk_size=size))
    except ValueError:  # unbiased: chunks must be shorter than the window
        return None


def _scaled(
    setup: Setup,
    costs: Sequence[float],
    capacities: Sequence[float] | None,
    limits: Sequence[float],
    factor: float,
) -> bool:
    return fitting(setup, costs, len(limits), capacities, [limit * factor for limit in limits]) is not None


def _within(setup: Setup, spans: Sequence[range], limits: Sequence[float]) -> bool:
    return all(one.total <= limit for one, limit in zip(needs(setup, spans), limits, strict=True))


def _by_layer(setup: Setup, shards: int) -> tuple[list[float], float]:
    """What each layer adds to its shard, embedding and head with the first and the last; and what a shard
    takes however few layers it has. From the difference that a layer makes to a shard with one like it: only
    the transients of the largest layer, in the overhead, are not exact, too high rather than too low."""
    kinds = setup.model.mixers
    added: dict[str, float] = {}
    base: dict[str, int] = {}
    for k, kind in enumerate(kinds):
        if kind not in added:
            base[kind] = plan.memory(setup, [k], shards, first=False, last=False).total
            two = plan.memory(setup, [k, k], shards, first=False, last=False).total
            added[kind] = float(two - base[kind])
    memory = [added[kind] for kind in kinds]
    for at, ends in ((0, {"first": True, "last": False}), (-1, {"first": False, "last": True})):
        k = at % len(kinds)
        memory[at] += max(0, plan.memory(setup, [k], shards, **ends).total - base[kinds[k]])
    return memory, max(base[kind] - added[kind] for kind in added)
