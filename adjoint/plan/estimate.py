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

from adjoint.engine.grid import Grid, Key, Tile
from adjoint.engine.schedule import Send
from adjoint.engine.tile import Gradients
from adjoint.plan.memory import Setup, weights
from adjoint.plan.model import EMBEDDING, HEAD
from adjoint.plan.rounds import RoundSimulator, seen_pairs, step_bytes
from adjoint.plan.simulate import Timeline, simulate
from adjoint.plan.stage_memory import Conditions, example
from adjoint.stack import Stack
from adjoint.train.machine import autocast

NAMES = {"cpu": "processor", "cuda": "GPU"}
LATENCY = 50e-6  # seconds of a message, besides its bytes
ENOUGH_S = 1.0  # of calls that are timed
MOST_TILES = 12_000  # a longer sequence's times are extrapolated; as many take seconds to plan


@dataclass(frozen=True)
class Costs:
    """Seconds per token of every sequence of the batch, on a device of speed 1.

    Attributes:
        forward, backward: of each layer; the backward without the forward pass that it recomputes.
        head: of norm, head and loss without gradients; with them, forward and backward, it is
            `head_backward`.
        source: what they rest on, a phrase.
        pairs: of each layer, of a pair of tokens that look at each other, forward; () of none.
        serial: of each layer, forward, what is between the state before a token and the one after it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: float
    head_backward: float
    source: str
    pairs: tuple[float, ...] = ()
    serial: tuple[float, ...] = ()

    def slower_by(self, factor: float) -> Costs:
        """The costs on a device that takes `factor` times as long for everything."""
        given = self.forward, self.backward, self.pairs, self.serial
        forward, backward, pairs, serial = (tuple(factor * t for t in times) for times in given)
        head = factor * self.head, factor * self.head_backward
        return Costs(forward, backward, *head, self.source, pairs, serial)


@dataclass(frozen=True)
class Estimate:
    """A step's times and what goes over the network.

    Attributes:
        timeline: of one batch, tile by tile; of a part of it where the rest is extrapolated.
        seconds: of an optimizer step: all batches whose gradients it adds up.
        reduce_seconds: of these, the sum of gradients over workers that have the same layers.
        busy: of each worker, seconds of its tiles. idle_share: the part of all workers' time on a batch in
            which they wait.
        bytes_sent: of all messages of a step; per_link: of the link that carries most of them.
    """

    timeline: Timeline
    seconds: float
    reduce_seconds: float
    busy: tuple[float, ...]
    idle_share: float
    bytes_sent: int
    per_link: int


# --------------------------------------------------------------------------------------------- times of tiles


def counted(setup: Setup, flops: float, source: str) -> Costs:
    """Costs from operations; backward twice as many. A device of speed 1 keeps up `flops` a second."""
    rate, layers = flops / setup.batch, setup.model.layers
    forward, head = tuple(layer.flops / rate for layer in layers), setup.model.head_flops / rate
    pairs = tuple(layer.pairs / rate for layer in layers) if any(layer.pairs for layer in layers) else ()
    serial = tuple(layer.serial / rate for layer in layers)
    return Costs(forward, tuple(2 * f for f in forward), head, 3 * head, source, pairs, serial)


def measured(
    setup: Setup,
    tokens: int,
    threads: int | None,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Costs:
    """Costs of one real layer of each kind, and of the head, on a short chunk on this machine.

    Args:
        tokens: of the chunk; times grow in proportion to it.
        threads: CPU threads; None leaves PyTorch's choice.
        progress: is told how many pieces have been timed, and of how many.
    """
    config, precision = setup.model.given, setup.machine.precision
    on = Conditions(setup.batch, tokens, precision=precision)

    def both(kind: str, head: bool = False) -> tuple[float, float]:
        """Seconds per token, forward and forward with backward."""
        gradients = Gradients()
        with torch.device(device):
            stack = Stack(dataclasses.replace(config, mixer=kind, n_layer=1), 0).to(on.dtype)
            stage, state = stack.stages()[-1 if head else 1], stack.initial_state(setup.batch)[0]
            assert stage is not None
            one = example(stage, () if head else state, on, config.d_model, "last" if head else "")
        with autocast(precision, device):
            forward, whole = _seconds(one.forward, device), _seconds(lambda: one.pull(gradients), device)
        return forward / tokens, whole / tokens

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        kinds = [*dict.fromkeys(config.mixers)]
        found = {}
        for done, kind in enumerate(kinds):
            progress(done, len(kinds) + 1)
            found[kind] = both(kind)
        progress(len(kinds), len(kinds) + 1)
        head, head_backward = both(config.mixers[0], head=True)
    finally:
        torch.set_num_threads(before)
    forward, whole = zip(*(found[kind] for kind in config.mixers), strict=True)
    backward = tuple(max(w - f, f) for f, w in zip(forward, whole, strict=True))
    source = f"measured on this machine's {NAMES[device.type]}, one layer of each kind, {tokens:,} tokens"
    sizes = zip(forward, setup.model.layers, strict=True)
    serial = tuple(f * size.serial / size.flops if size.flops else 0.0 for f, size in sizes)
    return Costs(forward, backward, head, head_backward, source, (), serial)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median of some calls, after one that loads and compiles; of fewer where they take long."""
    found: list[float] = []
    while len(found) < 2 or (len(found) <= repeats and sum(found) < ENOUGH_S):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def tile_seconds(setup: Setup, pieces: Sequence[int], costs: Costs, grid: Grid, t: Tile) -> float:
    """Seconds of a tile on a device of speed 1; `pieces`: its stage's."""
    start, stop = grid.cuts[t.chunk], grid.cuts[t.chunk + t.count]
    seconds = 0.0  # the embedding's: rows are looked up, or added up
    for piece in pieces:
        if piece == HEAD:  # what the loss's gradient is made of is made with the loss
            per_token = {"forward": costs.head, "backward": 0.0}.get(t.kind, costs.head_backward)
            seconds += (stop - start) * per_token
        elif t.kind == "windowed":
            left, _, _, halo_stop = grid.extent(t)
            seconds += (halo_stop - left) * (costs.forward[piece] + costs.backward[piece])
        elif piece != EMBEDDING:
            seconds += _layer_seconds(setup, costs, piece, t.kind, start, stop)
    return seconds


def _layer_seconds(setup: Setup, costs: Costs, k: int, kind: str, start: int, stop: int) -> float:
    seconds = (stop - start) * (costs.backward[k] if kind == "backward" else costs.forward[k])
    if not costs.pairs or not costs.pairs[k]:
        return seconds
    pairs = float(seen_pairs(setup.model.layers[k].window, start, stop))
    return seconds + (2 if kind == "backward" else 1) * costs.pairs[k] * pairs


# ------------------------------------------------------------------------------------------------ simulation


def estimate(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speeds: Sequence[float] | None = None,
    tiles: int = MOST_TILES,
) -> Estimate:
    """Simulates one step.

    Args:
        spans: each shard's layers.
        speeds: of each shard's devices, relative; 1 where None. A helper is as fast as the slowest.
        tiles: that are simulated at most; the time of more is extrapolated.
    """
    turns, helpers = setup.layout.sequence, setup.layout.helpers
    speed = [s for s in speeds or [1.0] * len(spans) for _ in range(turns)]
    speed += [min(speed)] * helpers
    if setup.context_parallel:
        line = walk(setup, spans, costs, bytes_per_second, speed[::turns], tiles).run()
        sent = step_bytes(setup, spans)
        return _step(setup, spans, bytes_per_second, line, line.busy, line.idle_share, sent)
    # attention takes a time that grows with the length's square
    counts = setup.counted_chunks(spans, tiles, 3 if costs.pairs else 2)
    lengths = [min(setup.seqlen, n * setup.spec.chunk_size) for n in counts]
    found = [_batch(setup, n, spans, costs, bytes_per_second, speed) for n in counts]

    def at(value: Callable[[Timeline, Counter[tuple[int, int]]], float]) -> float:
        """`value` of a timeline at the full length, extrapolated from the simulated shorter ones: it grows as
        a polynomial of the length (Lagrange's form)."""
        return sum(
            value(*f) * math.prod((setup.seqlen - m) / (n - m) for m in lengths if m != n)
            for n, f in zip(lengths, found, strict=True)
        )

    busy = [at(lambda line, _, w=w: line.busy[w]) for w in range(len(speed))]  # type: ignore[misc]
    mean = sum(busy) / len(busy)
    # waits by themselves, so that what is extrapolated is not the small difference of two large numbers
    waits = max(0.0, max(busy) - mean, at(lambda line, _: line.idle_share * line.seconds))
    idle = waits / (mean + waits) if mean else 0.0
    bytes_sent = at(lambda _, sent: sent.total()), at(lambda _, sent: max(sent.values(), default=0))
    return _step(setup, spans, bytes_per_second, found[-1][0], busy, idle, bytes_sent)


def _step(
    setup: Setup,
    spans: Sequence[range],
    bytes_per_second: float,
    timeline: Timeline,
    busy: Sequence[float],
    idle_share: float,
    sent: tuple[float, float],
) -> Estimate:
    """A step of batches like one.

    Args:
        busy, idle_share: of a batch. sent: bytes of its messages, and of those on the link with most.
    """
    steps, each = setup.training.grad_accumulation, reduced_bytes(setup, spans)
    reduce, mean = max(each) / bytes_per_second, sum(busy) / len(busy)
    return Estimate(
        timeline,
        steps * mean / (1 - idle_share) + reduce,
        reduce,
        tuple(steps * b for b in busy),
        idle_share,
        int(steps * sent[0] + setup.layout.sequence * sum(each)),
        int(max(steps * sent[1], *each)),
    )


def walk(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speed: Sequence[float],
    most: int = 0,
) -> RoundSimulator:
    """The rounds of a batch whose sequences ranks share; arguments as `RoundSimulator`'s."""
    seconds = {(-1, "forward"): costs.head, (-1, "linearize"): costs.head_backward}
    serial, pairs = {}, {}
    for k, (forward, backward) in enumerate(zip(costs.forward, costs.backward, strict=True)):
        for kind in ("forward", "recompute", "backward"):
            seconds[k, kind] = backward if kind == "backward" else forward
            own = costs.serial[k] if costs.serial else forward
            serial[k, kind] = own * seconds[k, kind] / forward if forward else 0.0
            pairs[k, kind] = costs.pairs[k] * (1 + (kind == "backward")) if costs.pairs else 0.0
    return RoundSimulator(setup, spans, seconds, serial, pairs, bytes_per_second, LATENCY, speed, most=most)


def reduced_bytes(setup: Setup, spans: Sequence[range]) -> list[float]:
    """What a worker of each shard sends in a step's sum of gradients."""
    copies, last = len(setup.layout.ranks(0)), len(spans) - 1
    sizes = [weights(setup, span, s == 0, s == last)["weights"] for s, span in enumerate(spans)]
    return [2 * (copies - 1) / copies * size for size in sizes]


def _batch(
    setup: Setup,
    chunks: int,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speed: Sequence[float],
) -> tuple[Timeline, Counter[tuple[int, int]]]:
    """One batch, as workers go about it, and the bytes over each link."""
    pipeline = setup.pipeline(spans, chunks)
    grid, states, stages = pipeline.grid, setup.stage_states(spans), setup.model.stages(spans)

    def size(key: Key) -> int:
        if key[0] in ("S", "dS"):
            return states[key[1]]
        return setup.y(grid.reach if key[0] == "spill" else grid.tokens(key[2]))

    lines, sent = [], Counter[tuple[int, int]]()
    for made in pipeline.plans():
        lines.append(
            simulate(
                made,
                lambda worker, tile: (
                    tile_seconds(setup, stages[tile.stage], costs, grid, tile) / speed[worker]
                ),
                lambda key: size(key) / bytes_per_second,
                latency=LATENCY,
                helpers=pipeline.helpers,
            )
        )
        for worker, program in enumerate(made.programs):
            for action in program:
                if isinstance(action, Send):
                    sent[worker, action.to] += size(action.key)
    first, *rest = lines
    for then in rest:  # after windows were picked
        first = first.followed_by(then)
    return first, sent
