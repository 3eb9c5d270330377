"""Rank layouts of a number of devices by speed: shards × sequence workers × tensor ranks × replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import size_text
from adjoint.plan.capacity import Fit
from adjoint.plan.estimate import Costs, Estimate, estimate, reduced_bytes
from adjoint.plan.links import Links, rates_of
from adjoint.plan.run_memory import COUNTED_TILES, Setup, needs, weights
from adjoint.plan.tensor_rank import why_not_split
from adjoint.train.layout import Layout

MUCH_IDLE = 0.25  # of all devices' time


@dataclass(frozen=True)
class Request:
    """A run and the devices to distribute it over.

    Attributes:
        setup: the run, with the batch of all replicas; its layout is not read.
        devices: number of devices.
        limits: bytes of each, in the order of the workers' ranks; None if unknown.
        costs: (setup) → times of its tiles.
        links: how fast devices send to each other; a number is bytes per second of all links.
    """

    setup: Setup
    devices: int
    limits: Sequence[float] | None
    costs: Callable[[Setup], Costs]
    links: Links | float

    def fit(self, layout: Layout) -> Fit:
        """Return the setup of a layout with its devices; a shard counts as large as its smallest device.

        Raises:
            UserError: the run cannot be laid out so.
        """
        request_setup = self.setup
        layout.check(request_setup.model.source, request_setup.method)
        layout.check_rows(request_setup.batch)
        if why := why_not_split(request_setup.model.source, layout.tensor):
            raise UserError(f"cluster.tensor: {why}")
        layout.check_tensor(request_setup.method, request_setup.training.optimizer)
        if layout.tensor > 1 and request_setup.spec.backward.window is not None:
            raise UserError("cluster.tensor: a plan does not count windows on split layers; leave it out")
        if request_setup.host_link is not None and layout.workers > 1:
            raise UserError(
                "model.offload: weights in host memory are planned for whole models and sequences; set "
                "cluster.shards and cluster.sequence to 1, or leave model.offload out"
            )
        setup = dataclasses.replace(request_setup, layout=layout, batch=layout.rows(request_setup.batch))
        layout.check_chunks(setup.method, setup.seqlen, setup.spec.chunk_size)
        if self.limits is None:
            return Fit(setup)
        limits = [min(self.limits[rank] for rank in layout.ranks(s)) for s in range(layout.shards)]
        return Fit(setup, limits, [limit / max(limits) for limit in limits])

    def estimate(self, fit: Fit, spans: Sequence[range], slower: float = 1.0, **tiles: Any) -> Estimate:
        """Estimate the time of a step of a layout, on devices that take `slower` times as long for tiles."""
        costs = self.costs(fit.setup).slower_by(slower)
        return estimate(fit.setup, spans, costs, self.links, fit.speeds, **tiles)


@dataclass(frozen=True)
class Ranked:
    """A layout in the ranking.

    Attributes:
        memory: bytes of the shard that is fullest for its device; None if not counted.
        fits: whether every shard fits its device; None if not counted.
        estimate: estimate of its time; None if not simulated: it does not fit, or `least` shows that others
            are faster.
        least: lower bound of a step's seconds.
        why: why the first one is ahead of it; "" for the first.
    """

    layout: Layout
    memory: int | None
    fits: bool | None
    estimate: Estimate | None
    least: float
    why: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of a step; the lower bound if it was not simulated."""
        return self.least if self.estimate is None else self.estimate.seconds

    def as_dict(self) -> dict[str, object]:
        """Return the entry in plain types, for JSON."""
        estimate = self.estimate
        return {
            "shards": self.layout.shards,
            "sequence": self.layout.sequence,
            "replicas": self.layout.replicas,
            "tensor": self.layout.tensor,
            "fits": self.fits,
            "memory_bytes": self.memory,
            "seconds": None if estimate is None else estimate.seconds,
            "idle_share": None if estimate is None else estimate.idle_share,
            "why_not": self.why or None,
        }


def candidates(devices: int, source: object) -> Iterator[Layout]:
    """Yield all layouts of so many workers; whole weights, one replica and unshared sequences come first.

    Args:
        source: of the model; weights are split where its heads and channels divide.
    """
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, replicas, sequence in itertools.product(divisors, divisors, divisors):
        shards, rest = divmod(devices, tensor * replicas * sequence)
        if shards and not rest and why_not_split(source, tensor) is None:
            yield Layout(shards, sequence, replicas, tensor=tensor)


def rank(request: Request, progress: Callable[[int, int], None] = lambda done, count: None) -> list[Ranked]:
    """Return the possible layouts, the fastest that fits first.

    A layout that cannot fit or cannot be the fastest is not simulated: weights alone may be too much, and a
    layout takes at least the work shared out evenly, or that of its slowest layer, and the sum of its
    gradients.

    Args:
        progress: called after every layout with (number of layouts done, number of layouts).

    Raises:
        UserError: the run cannot be laid out over so many devices.
    """
    fits: list[tuple[float, Fit]] = []
    refused: list[str] = []
    for layout in candidates(request.devices, request.setup.model.source):
        try:
            fit = request.fit(layout)
        except UserError as error:
            refused.append(str(error))
            continue
        fits.append((_least(request, fit), fit))
    if not fits:
        raise UserError(f"--devices {request.devices}: no layout works: {refused[0]}")
    ranked: list[Ranked] = []
    best = float("inf")
    for done, (least, fit) in enumerate(sorted(fits, key=lambda entry: entry[0])):
        ranked.append(_ranked(request, fit, least, best))
        if ranked[-1].fits:
            best = min(best, ranked[-1].seconds)
        progress(done + 1, len(fits))
    ranked.sort(key=lambda entry: (entry.fits is False, entry.seconds))
    return [
        ranked[0],
        *(dataclasses.replace(entry, why=entry.why or _why(entry, ranked[0])) for entry in ranked[1:]),
    ]


def more_rows(request: Request, planned: Estimate) -> int | None:
    """Return rows of a batch with which devices wait for less than half as long; None where they hardly wait.

    More rows make more replicas, which wait for each other only where gradients are summed."""
    if planned.idle_share < MUCH_IDLE:
        return None
    for replicas in (n for n in range(request.devices, 1, -1) if request.devices % n == 0):
        if replicas <= request.setup.batch:
            break
        setup = dataclasses.replace(request.setup, batch=replicas)
        wider = dataclasses.replace(request, setup=setup)
        with contextlib.suppress(UserError):
            fit = wider.fit(Layout(request.devices // replicas, replicas=replicas))
            if (spans := fit.spans()) is not None:
                idle = wider.estimate(fit, spans, tiles=COUNTED_TILES).idle_share
                if idle < planned.idle_share / 2:
                    return replicas
    return None


def _least(request: Request, fit: Fit) -> float:
    """Return a lower bound of a step's seconds."""
    setup, costs = fit.setup, request.costs(fit.setup)
    work = sum(costs.forward) + sum(costs.backward) + costs.head_backward
    for k, pair in enumerate(costs.pairs):  # a token attends to half of its window on average
        window = setup.model.layers[k].window or setup.seqlen
        work += 3 * pair * min(window, setup.seqlen) / 2
    steps, workers = setup.training.grad_accumulation, setup.layout.workers
    # a layer's chunks follow one another, forward; and back, where states' cotangents are carried; of layers
    # whose ranks meet only what is between two states does, if anything
    carries_cotangents = setup.window[0] is None and setup.spec.backward.drop_every is None
    carried = costs.backward if carries_cotangents else [0.0] * len(costs.forward)
    in_order = 0.0
    if not setup.context_parallel:
        in_order = max(f + b for f, b in zip(costs.forward, carried, strict=True)) / setup.layout.tensor
    reduce = max(reduced_bytes(setup.tensor_rank, fit.fastest())) / rates_of(request.links, setup.layout).sums
    return steps * max(work / workers, in_order) * setup.seqlen + reduce


def _ranked(request: Request, fit: Fit, least: float, best: float) -> Ranked:
    setup, spans = fit.setup, fit.fastest()
    fixed = [sum(weights(setup.tensor_rank, span, False, False).values()) for span in spans]
    if fit.limits is not None and sum(fixed) > sum(fit.limits):
        why = f"weights and optimizer alone take {size_text(max(fixed))} of a device"
        return Ranked(setup.layout, None, False, None, least, why)
    if least > best:
        return Ranked(setup.layout, None, None, None, least)
    fitting_spans = fit.spans()
    totals = [need.total for need in needs(setup, fitting_spans or spans)]
    fullest = totals[0]
    if fit.limits is not None:
        pairs = zip(totals, fit.limits, strict=True)
        fullest = max(pairs, key=lambda pair: pair[0] / pair[1])[0]
    if fitting_spans is None:
        return Ranked(setup.layout, fullest, False, None, least, fit.shortage())
    return Ranked(
        setup.layout, fullest, True, request.estimate(fit, fitting_spans, tiles=COUNTED_TILES), least
    )


def _why(ranked: Ranked, first: Ranked) -> str:
    """Return the main reason why a layout is slower than the first."""
    slower = f"{ranked.seconds / first.seconds - 1:.0%} slower"
    if ranked.estimate is None or first.estimate is None:
        return f"at least {slower}: {ranked.least:.3g} s without a wait"
    a, b = ranked.estimate, first.estimate
    waits = [e.idle_share * (e.seconds - e.reduce_seconds) for e in (a, b)]
    works = [e.seconds - e.reduce_seconds - w for e, w in zip((a, b), waits, strict=True)]
    reasons = {
        a.reduce_seconds - b.reduce_seconds: f"its sum of gradients takes {a.reduce_seconds:.3g} s",
        waits[0] - waits[1]: f"its workers wait {a.idle_share:.1%} of the time",
        works[0] - works[1]: f"its tiles take {works[0] / works[1] - 1:.1%} longer",
    }
    return f"{slower}: {reasons[max(reasons)]}"
