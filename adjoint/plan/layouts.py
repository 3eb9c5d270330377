"""Which layout is the fastest that fits so many devices: shards × workers of a sequence × replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError
from adjoint.plan.capacity import Fit
from adjoint.plan.estimate import Costs, Estimate, estimate, reduced_bytes
from adjoint.plan.memory import COUNTED_TILES, Setup, needs, weights
from adjoint.plan.partition import GB
from adjoint.train.layout import Layout


@dataclass(frozen=True)
class Request:
    """What is to be laid out.

    Attributes:
        setup: with the whole batch; its layout does not count.
        devices: how many. limits: bytes of each, in the order of the workers' ranks; None where not known.
        costs: (setup) → times of its tiles. bytes_per_second: from device to device.
    """

    setup: Setup
    devices: int
    limits: Sequence[float] | None
    costs: Callable[[Setup], Costs]
    bytes_per_second: float

    def fit(self, layout: Layout) -> Fit:
        """What goes where in a layout. Of the devices of a shard the smallest counts.

        Raises:
            UserError: the run cannot be laid out so.
        """
        given = self.setup
        layout.check(given.model.given, given.method)
        layout.check_rows(given.batch)
        setup = dataclasses.replace(given, layout=layout, batch=layout.rows(given.batch))
        layout.check_chunks(setup.method, setup.seqlen, setup.spec.chunk_size)
        if self.limits is None:
            return Fit(setup)
        limits = [min(self.limits[rank] for rank in layout.ranks(s)) for s in range(layout.shards)]
        return Fit(setup, limits, [limit / max(limits) for limit in limits])

    def estimate(self, fit: Fit, spans: Sequence[range], **tiles: Any) -> Estimate:
        """How long a step of a layout takes."""
        costs = self.costs(fit.setup)
        return estimate(fit.setup, spans, costs, self.bytes_per_second, fit.speeds, **tiles)


@dataclass(frozen=True)
class Ranked:
    """A layout next to others.

    Attributes:
        memory: bytes of the shard that is fullest for its device; None where it was not counted.
        fits: whether every shard fits its device; None where that was not counted.
        estimate: of its time; None where that was not simulated: it does not fit, or `least` is enough to
            know that others are faster.
        least: seconds that a step takes at least.
        why: why the first one is ahead of it; "" of the first.
    """

    layout: Layout
    memory: int | None
    fits: bool | None
    estimate: Estimate | None
    least: float
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of a step; at least so many where it was not simulated."""
        return self.least if self.estimate is None else self.estimate.seconds

    def as_dict(self) -> dict[str, Any]:
        """In plain types."""
        found = self.estimate
        return {
            "shards": self.layout.shards,
            "sequence": self.layout.sequence,
            "replicas": self.layout.replicas,
            "fits": self.fits,
            "memory_bytes": self.memory,
            "seconds": None if found is None else found.seconds,
            "idle_share": None if found is None else found.idle_share,
            "why_not": self.why or None,
        }


def candidates(devices: int) -> Iterator[Layout]:
    """All layouts of so many workers, those of one replica and of no shared sequence first."""
    for replicas in range(1, devices + 1):
        for sequence in range(1, devices // replicas + 1):
            if devices % (replicas * sequence) == 0:
                yield Layout(devices // (replicas * sequence), sequence, replicas)


def rank(request: Request, progress: Callable[[int, int], None] = lambda done, of: None) -> list[Ranked]:
    """The layouts that are possible, the fastest that fits first.

    What cannot fit or cannot be fastest is not simulated: weights alone may be too much, and a layout takes
    at least the work shared out evenly, or that of its slowest layer, and the sum of its gradients.

    Args:
        progress: is told of every layout that is done, and of how many there are.

    Raises:
        UserError: the run cannot be laid out over so many devices.
    """
    fits: list[tuple[float, Fit]] = []
    refused: list[str] = []
    for layout in candidates(request.devices):
        try:
            fit = request.fit(layout)
        except UserError as error:
            refused.append(str(error))
            continue
        fits.append((_least(request, fit), fit))
    if not fits:
        raise UserError(f"--devices {request.devices}: no layout works: {refused[0]}")
    found: list[Ranked] = []
    best = float("inf")
    for done, (least, fit) in enumerate(sorted(fits, key=lambda one: one[0])):
        found.append(_ranked(request, fit, least, best))
        if found[-1].fits:
            best = min(best, found[-1].seconds)
        progress(done + 1, len(fits))
    found.sort(key=lambda one: (one.fits is False, one.seconds))
    return [found[0], *(dataclasses.replace(one, why=one.why or _why(one, found[0])) for one in found[1:])]


def _least(request: Request, fit: Fit) -> float:
    """Seconds that a step takes at least."""
    setup, costs = fit.setup, request.costs(fit.setup)
    work = sum(costs.forward) + sum(costs.backward) + costs.head_backward
    for k, pair in enumerate(costs.pairs):  # of a token with half of those it may see, on average
        window = setup.model.layers[k].window or setup.seqlen
        work += 3 * pair * min(window, setup.seqlen) / 2
    steps, workers = setup.training.grad_accumulation, setup.layout.workers
    # a layer's chunks follow one another, forward; and back, where states' cotangents are carried; of layers
    # whose ranks meet only what is between two states does, if anything
    whole = setup.window[0] is None and setup.spec.backward.drop_every is None
    carried = costs.backward if whole else [0.0] * len(costs.forward)
    in_order = 0.0
    if not setup.context_parallel:
        in_order = max(f + b for f, b in zip(costs.forward, carried, strict=True))
    reduce = max(reduced_bytes(setup, fit.fastest())) / request.bytes_per_second
    return steps * max(work / workers, in_order) * setup.seqlen + reduce


def _ranked(request: Request, fit: Fit, least: float, best: float) -> Ranked:
    setup, spans = fit.setup, fit.fastest()
    fixed = [sum(weights(setup, span, False, False).values()) for span in spans]
    if fit.limits is not None and sum(fixed) > sum(fit.limits):
        why = f"weights and optimizer alone take {max(fixed) / GB:.2f} GB of a device"
        return Ranked(setup.layout, None, False, None, least, why)
    if least > best:
        return Ranked(setup.layout, None, None, None, least)
    found = fit.spans()
    totals = [need.total for need in needs(setup, found or spans)]
    fullest = totals[0]
    if fit.limits is not None:
        pairs = zip(totals, fit.limits, strict=True)
        fullest = max(pairs, key=lambda pair: pair[0] / pair[1])[0]
    if found is None:
        return Ranked(setup.layout, fullest, False, None, least, fit.shortage())
    return Ranked(setup.layout, fullest, True, request.estimate(fit, found, tiles=COUNTED_TILES), least)


def _why(one: Ranked, first: Ranked) -> str:
    """What makes it slower than the first."""
    slower = f"{one.seconds / first.seconds - 1:.0%} slower"
    if one.estimate is None or first.estimate is None:
        return f"{slower} at least, of which {one.least:.3g} s"
    a, b = one.estimate, first.estimate
    waits = [e.idle_share * (e.seconds - e.reduce_seconds) for e in (a, b)]
    works = [e.seconds - e.reduce_seconds - w for e, w in zip((a, b), waits, strict=True)]
    reasons = {
        a.reduce_seconds - b.reduce_seconds: f"its sum of gradients takes {a.reduce_seconds:.3g} s",
        waits[0] - waits[1]: f"its workers wait {a.idle_share:.1%} of the time",
        works[0] - works[1]: f"its tiles take {works[0] / works[1] - 1:.1%} longer",
    }
    return f"{slower}: {reasons[max(reasons)]}"
