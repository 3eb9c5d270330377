"""How long a step takes: times of tiles, counted or measured, put through the programs that would run.

Not in it: the optimizer's step, the sum of a tied table's gradients over its two shards, reading data,
what helpers are sent. Times that rest on counted operations are relative ones: they say how long one plan
takes next to another, if a device keeps the rate assumed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adjoint.cluster.count import example
from adjoint.cluster.fit import needs
from adjoint.cluster.memory import Setup
from adjoint.engine.grid import Grid, Key, Tile
from adjoint.engine.program import Plan, Send
from adjoint.engine.simulate import Span, Timeline, simulate
from adjoint.engine.tile import Gradients
from adjoint.plan.schedule import forward_plan, grid_of, owners_of, step_plan
from adjoint.train.machine import autocast

LATENCY = 50e-6  # seconds of a message, besides its bytes
MOST_TILES = 30_000  # a longer sequence's times are extrapolated; as many take some seconds to plan


@dataclass(frozen=True)
class Costs:
    """Seconds a token of every sequence of the batch, on a device of speed 1.

    Attributes:
        forward, backward: of each layer; the backward without the forward pass that it recomputes.
        head: of norm, head and loss without gradients; with them, forward and backward, it is
            `head_backward`.
        source: what they rest on, a phrase.
        pairs, windows: as `Flops`'; the backward takes twice as much a pair of tokens.
        spans: where a stage is a span of layers, embedding and head among them.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: float
    head_backward: float
    source: str
    pairs: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    spans: tuple[range, ...] | None = None

    def of(self, grid: Grid, t: Tile) -> float:
        """Seconds of a tile."""
        tokens = grid.tokens(t.chunk, t.count)
        if self.spans is not None:
            return self._of_span(self.spans[t.stage], t.kind, *grid.cuts[t.chunk : t.chunk + 2])
        k = t.stage - 1
        if k < 0:
            return 0.0  # the embedding: rows are looked up, or added up
        if k == len(self.forward):  # what the loss's gradient is made of is made with the loss
            return tokens * {"F": self.head, "B": 0.0}.get(t.kind, self.head_backward)
        if t.kind == "W":
            left, _, _, halo_stop = grid.span(t)
            return (halo_stop - left) * (self.forward[k] + self.backward[k])
        return self._of_layer(k, t.kind, *grid.cuts[t.chunk : t.chunk + 2])

    def _of_layer(self, k: int, kind: str, start: int, stop: int) -> float:
        seconds = (stop - start) * (self.backward[k] if kind == "B" else self.forward[k])
        if not self.pairs or not self.pairs[k]:
            return seconds
        window = self.windows[k] or stop
        edge = min(max(window, start), stop)  # until there a token sees all before it
        pairs = (edge**2 - start**2) / 2 + (stop - edge) * window
        return seconds + (2 if kind == "B" else 1) * self.pairs[k] * pairs

    def _of_span(self, layers: range, kind: str, start: int, stop: int) -> float:
        seconds = sum(self._of_layer(k, kind, start, stop) for k in layers)
        if layers.stop == len(self.forward):
            head = {"F": self.head, "B": 0.0}.get(kind, self.head_backward)
            seconds += (stop - start) * head
        return seconds


@dataclass(frozen=True)
class Estimate:
    """A step's times and what goes over the network.

    Attributes:
        timeline: of one batch, tile by tile if they were asked for.
        seconds: of an optimizer step: all batches whose gradients it adds up.
        busy: of each worker, the same.
        bytes_sent: of all messages of a step; per_link: of the link that carries most of them.
    """

    timeline: Timeline
    seconds: float
    busy: tuple[float, ...]
    bytes_sent: int
    per_link: int


def counted(setup: Setup, flops: float, source: str) -> Costs:
    """Costs from operations, `Setup.flops`; backward twice as many. `flops` a second is what a device of
    speed 1 keeps up."""
    found = setup.flops()
    rate = flops / setup.batch
    forward, head = tuple(n / rate for n in found.layers), found.head / rate
    pairs = tuple(n / rate for n in found.pairs)
    twice = tuple(2 * f for f in forward)
    return Costs(forward, twice, head, 3 * head, source, pairs, found.windows)


def measured(setup: Setup, tokens: int, threads: int | None, device: torch.device) -> Costs:
    """Costs of one real layer of each kind, and of the head, on a short chunk on this machine.

    Args:
        tokens: of the chunk; times grow in proportion to it.
        threads: CPU threads; None leaves PyTorch's choice.
    """

    def both(k: int, head: bool = False) -> tuple[float, float]:
        """Seconds a token, forward and forward with backward."""
        config = setup.model if head else setup.kind(k)
        one, gradients = example(config, setup.batch, tokens, setup.precision, str(device), head), Gradients()
        with autocast(setup.precision, device):
            return (
                _seconds(one.forward, device) / tokens,
                _seconds(lambda: one.pull(gradients), device) / tokens,
            )

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        kinds = setup.model.mixers
        found = {kind: both(kinds.index(kind)) for kind in kinds}
        head, head_backward = both(0, head=True)
    finally:
        torch.set_num_threads(before)
    forward, whole = zip(*(found[kind] for kind in kinds), strict=True)
    backward = tuple(max(w - f, f) for f, w in zip(forward, whole, strict=True))
    source = f"measured here on {device.type}, one layer of each kind, {tokens:,} tokens, {setup.precision}"
    return Costs(forward, backward, head, head_backward, source)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median of some calls, after one that loads and compiles."""
    found = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


# ----------------------------------------------------------------------------------------------- simulation


def estimate(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speeds: Sequence[float] | None = None,
    replicas: int = 1,
    drawn: bool = False,
) -> Estimate:
    """Simulates one step.

    Args:
        spans: each shard's layers.
        speeds: of each shard's devices, relative; 1 where None. A helper is as fast as the slowest.
        replicas: over which gradients are summed.
        drawn: whether the timeline lists every tile, for a drawing.
    """
    speed = [s for s in speeds or [1.0] * len(spans) for _ in range(setup.sequence)]
    speed += [min(speed)] * setup.helpers
    if setup.stages_are_spans:
        costs = dataclasses.replace(costs, spans=tuple(spans))
    size, stages = setup.scheme.chunk_size, len(setup.stage_states(spans))
    lengths, most = [setup.seqlen], MOST_TILES // (3 * stages)
    if setup.chunks > most and most * size > 8 * (setup.window[0] or 0) and not drawn:
        # attention takes a time that grows with the length's square
        lengths = [most // part * size for part in ((4, 2, 1) if any(costs.pairs) else (2, 1))]
    found = [_batch(setup, n, spans, costs, bytes_per_second, speed, drawn) for n in lengths]

    def at(value: Callable[[tuple[Timeline, Counter]], float]) -> float:
        """What grows with the sequence as a polynomial does, at its full length (Lagrange's form)."""
        return sum(
            value(f) * math.prod((setup.seqlen - m) / (n - m) for m in lengths if m != n)
            for n, f in zip(lengths, found, strict=True)
        )

    steps, copies = setup.grad_accumulation, replicas * setup.sequence
    weights = [need.parts["weights"] for need in needs(setup, spans)]
    each = [2 * (copies - 1) / copies * size for size in weights]  # what a worker sends in an all-reduce
    batch = at(lambda f: f[0].seconds)
    busy = tuple(at(lambda f, w=w: f[0].busy[w]) for w in range(len(speed)))  # type: ignore[misc]
    timeline = found[-1][0] if drawn else Timeline(batch, busy)
    return Estimate(
        timeline,
        steps * batch + max(each) / bytes_per_second,
        tuple(steps * b for b in busy),
        int(steps * at(lambda f: f[1].total()) + setup.sequence * sum(each)),
        int(max(steps * at(lambda f: max(f[1].values(), default=0)), *each)),
    )


def _batch(
    setup: Setup,
    seqlen: int,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speed: Sequence[float],
    drawn: bool,
) -> tuple[Timeline, Counter[tuple[int, int]]]:
    """One batch, as a `Shard` goes about it, and the bytes over each link."""
    owners = owners_of(setup.model, spans, setup.sequence)
    crew = tuple(i % len(spans) for i in range(setup.helpers))
    scheme, model = setup.scheme, setup.model
    windows = None if scheme.window != "auto" else [setup.window[0] or seqlen] * model.n_layer
    grid = grid_of(model, scheme, seqlen, owners, crew, setup.stage_costs(spans), windows)
    states = setup.stage_states(spans)

    def size(key: Key) -> int:
        if key[0] in ("S", "dS"):
            return states[key[1]]
        return setup.y(grid.reach if key[0] == "spill" else grid.tokens(key[2]))

    def run(made: Plan) -> Timeline:
        return simulate(
            made,
            lambda worker, tile: costs.of(grid, tile) / speed[worker],
            lambda key: size(key) / bytes_per_second,
            latency=LATENCY,
            helpers=crew,
            spans=drawn,
        )

    plans = [forward_plan(grid, owners)] if windows else []
    plans.append(step_plan(scheme, grid, owners, crew))
    sent = Counter[tuple[int, int]]()
    for made in plans:
        for worker, program in enumerate(made.programs):
            for action in program:
                if isinstance(action, Send):
                    sent[worker, action.to] += size(action.key)
    first, *rest = map(run, plans)
    for then in rest:  # after windows were picked
        later = [Span(s.worker, first.seconds + s.start, first.seconds + s.stop, s.tile) for s in then.spans]
        busy = tuple(a + b for a, b in zip(first.busy, then.busy, strict=True))
        first = Timeline(first.seconds + then.seconds, busy, (*first.spans, *later))
    return first, sent
