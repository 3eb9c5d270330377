"""Estimate the time of a step: times of tiles, counted or measured, in the programs that would run.

It leaves out the optimizer's step, the sum of a tied table's gradients over its two shards, reading data, and
messages to helpers. Times that rest on counted operations are relative: they compare plans, if a device keeps
the assumed rate.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adjoint.engine import binomial
from adjoint.engine.grid import Grid, Key, Tile
from adjoint.engine.schedule import Send
from adjoint.engine.tile import Gradients
from adjoint.plan.host_traffic import adding_seconds, copy_seconds
from adjoint.plan.links import Links, Rates, rates_of
from adjoint.plan.model_sizes import EMBEDDING, HEAD
from adjoint.plan.roofline import least_seconds
from adjoint.plan.rounds import RoundSimulator, seen_pairs, step_bytes
from adjoint.plan.run_memory import Setup, needs, owned_weights
from adjoint.plan.simulate import Timeline, simulate
from adjoint.plan.stage_memory import Conditions, example
from adjoint.plan.tensor_rank import bytes_per_token, collectives_of
from adjoint.stack import Stack
from adjoint.train.gpus import Gpu
from adjoint.train.machine import autocast

NAMES = {"cpu": "processor", "cuda": "GPU"}
LATENCY = 50e-6  # seconds of a message, besides its bytes
ENOUGH_S = 1.0  # seconds of calls after which no more are timed
COUNTED_TOKENS = 1 << 14  # of a chunk on which a GPU's times are counted; per token longer ones take the same
# Seconds for which a GPU's host queues an operator, Python, autograd and views included: beside an H200, in
# short chunks of `mamba-1.27b`.
OPERATOR_QUEUE_S = 150e-6
SAMPLED_CHUNKS = 64  # of which times are added up, where those of the others lie between them
MOST_TILES = 12_000  # simulated at most, which takes seconds; longer sequences are extrapolated


@dataclass(frozen=True)
class Costs:
    """Seconds per token of every sequence of the batch, on a device of speed 1.

    Attributes:
        forward, backward: each layer's time; the backward without the forward pass that it recomputes.
        head, head_backward: time of norm, head and loss: without gradients, and of forward and backward.
        source: a phrase that says what the times rest on.
        pairs: each layer's forward time per pair of tokens that attend to each other; () without attention.
        serial: each layer's forward time between the state before a token and the one after it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: float
    head_backward: float
    source: str
    pairs: tuple[float, ...] = ()
    serial: tuple[float, ...] = ()

    def slower_by(self, factor: float) -> Costs:
        """Return the costs on a device that takes `factor` times as long for everything."""
        layer_times = self.forward, self.backward, self.pairs, self.serial
        forward, backward, pairs, serial = (tuple(factor * t for t in times) for times in layer_times)
        head = factor * self.head, factor * self.head_backward
        return Costs(forward, backward, *head, self.source, pairs, serial)

    def at_least(self, other: Costs) -> Costs:
        """Return the costs where a layer that takes less than in `other` takes as long as there."""
        forward = tuple(map(max, self.forward, other.forward))
        backward = tuple(map(max, self.backward, other.backward))
        return dataclasses.replace(self, forward=forward, backward=backward)


@dataclass(frozen=True)
class Estimate:
    """A step's times and its bytes over the network.

    Attributes:
        timeline: one batch, tile by tile; its beginning if the rest is extrapolated.
        seconds: time of an optimizer step, with all batches whose gradients it adds up.
        reduce_seconds: the part of it that sums gradients over workers with the same layers.
        busy: each worker's seconds of tiles. idle_share: the part of all workers' time on a batch in which
            they wait.
        bytes_sent: bytes of all messages of a step. per_link: those of the link that carries most of them.
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
    """Return costs from counted operations; a backward takes twice the forward's.

    Args:
        flops: operations per second of a device of speed 1.
    """
    rate, layers = flops / setup.batch, setup.model.layers
    forward, head = tuple(layer.flops / rate for layer in layers), setup.model.head_flops / rate
    pairs = tuple(layer.pairs / rate for layer in layers) if any(layer.pairs for layer in layers) else ()
    serial = tuple(layer.serial / rate for layer in layers)
    return Costs(forward, tuple(2 * f for f in forward), head, 3 * head, source, pairs, serial)


def roofline(setup: Setup, gpu: Gpu, source: str) -> Costs:
    """Return the least costs on a GPU, from counted operations and bytes (`plan.roofline`).

    All rows of a chunk count as one longer row: weights are read once per chunk.
    """
    model, on = setup.model, _counted_chunk(setup)
    tokens = on.tokens
    forward, backward, serial = [], [], []
    chunk_size = min(setup.spec.chunk_size, setup.seqlen)
    rows_read = setup.batch * model.strands
    for k, layer in enumerate(model.layers):
        work, scan_flops = model.work(k, on), layer.serial * tokens / layer.scans
        scans = [operator for operator in work.forward if operator.scan]
        per_token = rows_read / tokens
        forward.append(per_token * least_seconds(work.forward, gpu, scan_flops))
        added = least_seconds(work.added, gpu) / chunk_size
        backward.append(per_token * least_seconds(work.backward, gpu, scan_flops) + added)
        serial.append(per_token * least_seconds(scans, gpu, scan_flops))
    head = model.work(HEAD, on)
    head_forward = rows_read / tokens * least_seconds(head.forward, gpu)
    head_backward = rows_read / tokens * least_seconds((*head.linearized, *head.backward), gpu)
    head_backward += least_seconds(head.added, gpu) / chunk_size
    rate = 1e12 * gpu.peak(setup.machine.precision) / setup.batch
    pairs = tuple(layer.pairs / rate for layer in model.layers)
    times = tuple(forward), tuple(backward), head_forward, head_backward
    return Costs(*times, source, pairs if any(pairs) else (), tuple(serial))


def queued(setup: Setup) -> Costs:
    """Return what a GPU's host takes to queue the operators of a chunk's layers, of any number of rows and
    tokens. The head is left out, whose products are large."""
    model, on = setup.model, _counted_chunk(setup)
    per_token = OPERATOR_QUEUE_S / min(setup.spec.chunk_size, setup.seqlen)
    work = [model.work(k, on) for k in range(len(model.layers))]
    forward = tuple(per_token * len(layer.forward) for layer in work)
    backward = tuple(per_token * len((*layer.backward, *layer.added)) for layer in work)
    return Costs(forward, backward, 0.0, 0.0, "")


def _counted_chunk(setup: Setup) -> Conditions:
    """Return the chunk on which a GPU's operators are counted; its rows are one longer row."""
    machine, spec = setup.machine, setup.spec
    rows = min(setup.batch, max(1, COUNTED_TOKENS // spec.chunk_size))
    tokens = min(rows * spec.chunk_size, rows * setup.seqlen, COUNTED_TOKENS)
    recompute = spec.storage.recompute
    return Conditions(1, tokens, 0, machine.precision, machine.kind, recompute, setup.plain_autograd)


def measured(
    setup: Setup,
    tokens: int,
    threads: int | None,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Costs:
    """Measure the costs of one real layer of each kind, and of the head, on a short chunk on this machine.

    Args:
        tokens: length of the chunk; times are proportional to it.
        threads: CPU threads; None leaves PyTorch's choice.
        progress: called with (number of pieces timed, number of pieces).
    """
    config, precision = setup.model.source, setup.machine.precision
    on = Conditions(setup.batch * setup.model.strands, tokens, precision=precision)

    def forward_and_backward(kind: str, head: bool = False) -> tuple[float, float]:
        """Return the seconds per token: (forward, forward and backward)."""
        gradients = Gradients()
        with torch.device(device):
            one_layer = dataclasses.replace(config, mixer=kind, n_layer=1, complement_map=None)
            stack = Stack(one_layer, 0).to(on.dtype)
            stage, state = stack.all_stages()[-1 if head else 1], stack.initial_state(on.batch)[0]
            assert stage is not None
            stage_example = example(stage, () if head else state, on, config.d_model, "last" if head else "")
        with autocast(precision, device):
            forward, with_backward = (
                _seconds(stage_example.forward, device),
                _seconds(lambda: stage_example.pull(gradients), device),
            )
        return forward / tokens, with_backward / tokens

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        kinds = [*dict.fromkeys(config.mixers)]
        seconds_by_kind = {}
        for done, kind in enumerate(kinds):
            progress(done, len(kinds) + 1)
            seconds_by_kind[kind] = forward_and_backward(kind)
        progress(len(kinds), len(kinds) + 1)
        head, head_backward = forward_and_backward(config.mixers[0], head=True)
    finally:
        torch.set_num_threads(before)
    forward, with_backward = zip(*(seconds_by_kind[kind] for kind in config.mixers), strict=True)
    backward = tuple(max(w - f, f) for f, w in zip(forward, with_backward, strict=True))
    source = f"measured on this machine's {NAMES[device.type]}, one layer of each kind, {tokens:,} tokens"
    sizes = zip(forward, setup.model.layers, strict=True)
    serial = tuple(f * size.serial / size.flops if size.flops else 0.0 for f, size in sizes)
    return Costs(forward, backward, head, head_backward, source, (), serial)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median time of some calls, after one that loads and compiles; of fewer if they take long."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= repeats and sum(seconds) < ENOUGH_S):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def tile_seconds(setup: Setup, pieces: Sequence[int], costs: Costs, grid: Grid, t: Tile) -> float:
    """Return the seconds of a tile on a device of speed 1; `pieces` are those of its stage."""
    start, stop = grid.cuts[t.chunk], grid.cuts[t.chunk + t.count]
    seconds = 0.0  # for the embedding: it looks rows up, or adds them up
    for piece in pieces:
        if piece == HEAD:  # the loss's forward computes its gradient already
            per_token = {"forward": costs.head, "advance": 0.0, "backward": 0.0}
            seconds += (stop - start) * per_token.get(t.kind, costs.head_backward)
            # nothing runs while its weights come; their gradient is made by the forward
            seconds += (t.kind not in ("advance", "backward")) * copy_seconds(setup, setup.model.last)
        elif t.kind == "windowed":
            left, _, _, halo_stop = grid.extent(t)
            seconds += (halo_stop - left) * (costs.forward[piece] + costs.backward[piece])
        elif piece != EMBEDDING:
            seconds += _layer_seconds(setup, costs, piece, t.kind, start, stop)
    return seconds


def _layer_seconds(setup: Setup, costs: Costs, k: int, kind: str, start: int, stop: int) -> float:
    is_backward, layer = kind == "backward", setup.model.layers[k]
    seconds = (stop - start) * (costs.backward[k] if is_backward else costs.forward[k])
    again = is_backward and setup.spec.storage.recompute == "full"  # the layer's forward, once more
    seconds += again * (stop - start) * costs.forward[k]
    if costs.pairs and costs.pairs[k]:
        pairs = float(seen_pairs(layer.window, start, stop))
        is_kept = kind in ("recompute", "advance") and start >= setup.seqlen - setup.kept_attention
        seconds += (2 * is_backward + again + (not is_backward and not is_kept)) * costs.pairs[k] * pairs
    # weights come while the layer before runs; gradients leave, and are added, while the next one runs
    seconds = max(seconds, copy_seconds(setup, layer.weights))
    if not is_backward:
        return seconds
    leaving = layer.weights + (setup.model.last if k + 1 == setup.model.n_layer else 0)
    return max(seconds, copy_seconds(setup, leaving), adding_seconds(setup, leaving))


# ------------------------------------------------------------------------------------------------ simulation


def estimate(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    links: Links | Rates | float,
    speeds: Sequence[float] | None = None,
    tiles: int = MOST_TILES,
) -> Estimate:
    """Simulate one step.

    Args:
        spans: each shard's layers.
        links: how fast devices send to each other; a number is bytes per second of all links.
        speeds: relative speed of each shard's devices; 1 if None. A helper is as fast as the slowest.
        tiles: number of tiles simulated at most; the time of more is extrapolated.
    """
    rates = links if isinstance(links, Rates) else rates_of(links, setup.layout)
    if setup.layout.tensor > 1:
        return _over_tensor_ranks(setup, spans, costs, rates, speeds, tiles)
    turns, helpers = setup.layout.sequence, setup.layout.helpers
    speed = [s for s in speeds or [1.0] * len(spans) for _ in range(turns)]
    speed += [min(speed)] * helpers
    if setup.context_parallel:
        line = walk(setup, spans, costs, rates.messages, speed[::turns], tiles).run()
        sent = step_bytes(setup, spans)
        return _step(setup, spans, rates.sums, line, line.busy, line.idle_share, sent)
    # attention takes a time that grows with the length's square
    counts = setup.counted_chunks(spans, tiles, 3 if costs.pairs else 2)
    lengths = [min(setup.seqlen, n * setup.spec.chunk_size) for n in counts]
    # so does what is computed again for states: it is counted for the full length
    counted_setup = setup if len(counts) == 1 else _with_all_states(setup)
    batches = [_batch(counted_setup, n, spans, costs, rates.messages, speed) for n in counts]

    def at(value: Callable[[Timeline, Counter[tuple[int, int]]], float]) -> float:
        """Return `value` of a timeline, extrapolated from the simulated lengths to the full one.

        It grows as a polynomial of the length (Lagrange's form)."""
        return sum(
            value(*f) * math.prod((setup.seqlen - m) / (n - m) for m in lengths if m != n)
            for n, f in zip(lengths, batches, strict=True)
        )

    busy = [at(lambda line, _, w=w: line.busy[w]) for w in range(len(speed))]  # type: ignore[misc]
    if len(counts) > 1 and setup.spec.storage.checkpoints is not None:
        again = [advance_seconds(setup, span, costs) for span in spans]
        busy = [b + seconds / v for b, seconds, v in zip(busy, again, speed, strict=True)]
    if setup.spec.storage.memory is not None and setup.alone:
        saved = needs(setup, spans)[0].tape_share * recomputed_seconds(setup, costs)
        busy = [b - saved / v for b, v in zip(busy, speed, strict=True)]
    mean = sum(busy) / len(busy)
    # waits are extrapolated by themselves: they are the small difference of two large numbers
    waits = max(0.0, max(busy) - mean, at(lambda line, _: line.idle_share * line.seconds))
    idle = waits / (mean + waits) if mean else 0.0
    bytes_sent = at(lambda _, sent: sent.total()), at(lambda _, sent: max(sent.values(), default=0))
    return _step(setup, spans, rates.sums, batches[-1][0], busy, idle, bytes_sent)


def _over_tensor_ranks(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    rates: Rates,
    speeds: Sequence[float] | None,
    tiles: int,
) -> Estimate:
    """Estimate a step whose weights ranks share: a rank's, with the time of its collectives."""
    ranks, rank_setup = setup.layout.tensor, setup.tensor_rank
    moved = bytes_per_token(setup.model, ranks, setup.batch, setup.machine)
    forward, backward = (n * moved / rates.tensor for n in collectives_of(setup.model.source))
    share = costs.slower_by(1 / ranks)
    collective = moved / rates.tensor
    share = dataclasses.replace(
        share,
        forward=tuple(f + forward for f in share.forward),
        backward=tuple(b + backward for b in share.backward),
        head=share.head + collective,
        head_backward=share.head_backward + 2 * collective,
    )
    rank = estimate(rank_setup, spans, share, rates, speeds, tiles)
    sent = collective_bytes(setup)
    return dataclasses.replace(
        rank,
        busy=tuple(b for b in rank.busy for _ in range(ranks)),
        bytes_sent=ranks * (rank.bytes_sent + sent),
        per_link=max(rank.per_link, sent),
    )


def collective_bytes(setup: Setup) -> int:
    """Return the bytes that a rank sends in a step's collectives among those that share its weights.

    A chunk runs forward, forward again but for the last, and back; with full recomputation layers run forward
    once more. The embedding scatters and the head gathers, and back the other way."""
    per_token = bytes_per_token(setup.model, setup.layout.tensor, setup.batch, setup.machine)
    forward, backward = collectives_of(setup.model.source)
    again = setup.spec.storage.recompute == "full"
    tokens, passes = setup.seqlen, 2 - min(1.0, setup.spec.chunk_size / setup.seqlen)
    layers = setup.model.n_layer * ((passes + again) * forward + backward)
    ends = 2 * passes + 2
    return int(setup.training.grad_accumulation * per_token * tokens * (layers + ends))


def _with_all_states(setup: Setup) -> Setup:
    """Return the setup with the same chunks, whose states are all stored."""
    if setup.method.storage.checkpoints is None:
        return setup
    changes = {"checkpoints": None, "chunk_size": setup.spec.chunk_size}
    return dataclasses.replace(setup, method=dataclasses.replace(setup.method, **changes))


def advance_seconds(setup: Setup, span: range, costs: Costs) -> float:
    """Return the seconds in which a shard computes states again, on a device of speed 1."""
    checkpoints, chunks, size = setup.spec.storage.checkpoints, setup.chunks, setup.spec.chunk_size
    assert checkpoints is not None
    if not any(layer.state for layer in setup.model.layers):  # nothing is stored at edges
        return 0.0
    again = binomial.recomputed_chunks(chunks, checkpoints) - (chunks - 1)  # besides tapes
    seconds = again * size * sum(costs.forward[k] for k in span)
    if not costs.pairs:
        return seconds
    times = np.zeros(chunks)  # that each chunk is computed again
    for _, runs in binomial.Reversal([0], chunks, checkpoints, chunks - 1):
        for run in runs:
            times[run.start : run.stop] += 1
    starts = np.arange(chunks, dtype=float) * size
    times *= starts < setup.seqlen - setup.kept_attention
    for k in span:
        pairs = seen_pairs(setup.model.layers[k].window, starts, starts + size)
        seconds += costs.pairs[k] * float((times * pairs).sum())
    return seconds


def recomputed_seconds(setup: Setup, costs: Costs) -> float:
    """Return the seconds in which chunks are computed again, on a device of speed 1.

    With one segment of layers the last chunk's tape is kept; of several segments only the top one's."""
    in_segments = setup.spec.storage.keep != "edges"
    size, again = setup.spec.chunk_size, setup.chunks - (not in_segments)
    sampled = range(0, again, -(-again // SAMPLED_CHUNKS) or 1)  # attention makes later ones longer
    seconds = sum(
        _layer_seconds(setup, costs, k, "recompute", c * size, (c + 1) * size)
        for c in sampled
        for k in range(setup.model.n_layer)
    )
    return seconds * again / max(len(sampled), 1)


def _step(
    setup: Setup,
    spans: Sequence[range],
    bytes_per_second: float,
    timeline: Timeline,
    busy: Sequence[float],
    idle_share: float,
    sent: tuple[float, float],
) -> Estimate:
    """Return the estimate of a step whose batches are all like one.

    Args:
        busy, idle_share: as in `Estimate`, of one batch.
        sent: bytes of its messages, and of those on the link with most.
    """
    steps, reduced = setup.training.grad_accumulation, reduced_bytes(setup, spans)
    reduce, mean = max(reduced) / bytes_per_second, sum(busy) / len(busy)
    return Estimate(
        timeline,
        steps * mean / (1 - idle_share) + reduce,
        reduce,
        tuple(steps * b for b in busy),
        idle_share,
        int(steps * sent[0] + setup.layout.sequence * sum(reduced)),
        int(max(steps * sent[1], *reduced)),
    )


def walk(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speed: Sequence[float],
    most: int = 0,
) -> RoundSimulator:
    """Return the simulator of a batch whose sequences ranks share; arguments as in `RoundSimulator`."""
    seconds = {(-1, "forward"): costs.head, (-1, "linearize"): costs.head_backward}
    serial, pairs = {}, {}
    for k, (forward, backward) in enumerate(zip(costs.forward, costs.backward, strict=True)):
        for kind in ("forward", "recompute", "backward"):
            seconds[k, kind] = backward if kind == "backward" else forward
            serial_seconds = costs.serial[k] if costs.serial else forward
            serial[k, kind] = serial_seconds * seconds[k, kind] / forward if forward else 0.0
            pairs[k, kind] = costs.pairs[k] * (1 + (kind == "backward")) if costs.pairs else 0.0
    return RoundSimulator(setup, spans, seconds, serial, pairs, bytes_per_second, LATENCY, speed, most=most)


def reduced_bytes(setup: Setup, spans: Sequence[range]) -> list[float]:
    """Return the bytes that a worker of each shard sends in a step's sum of gradients."""
    copies, last = len(setup.layout.ranks(0)), len(spans) - 1
    owned = [owned_weights(setup, span, s == 0, s == last) for s, span in enumerate(spans)]
    sizes = [setup.machine.element * number for number in owned]
    return [2 * (copies - 1) / copies * size for size in sizes]


def _batch(
    setup: Setup,
    chunks: int,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speed: Sequence[float],
) -> tuple[Timeline, Counter[tuple[int, int]]]:
    """Simulate one batch; return its timeline and the bytes over each link."""
    pipeline = setup.pipeline(spans, chunks)
    grid, states, stages = pipeline.grid, setup.stage_states(spans), setup.pieces(spans)

    def size(key: Key) -> int:
        if key[0] in ("S", "dS"):
            return states[key[1]]
        return setup.y(grid.reach if key[0] == "spill" else grid.tokens(key[2]))

    lines, sent = [], Counter[tuple[int, int]]()
    for schedule in pipeline.plans():
        lines.append(
            simulate(
                schedule,
                lambda worker, tile: (
                    tile_seconds(setup, stages[tile.stage], costs, grid, tile) / speed[worker]
                ),
                lambda key: size(key) / bytes_per_second,
                latency=LATENCY,
                helpers=pipeline.helpers,
            )
        )
        for worker, program in enumerate(schedule.programs):
            for action in program:
                if isinstance(action, Send):
                    sent[worker, action.to] += size(action.key)
    first, *rest = lines
    for later in rest:  # after windows were picked
        first = first.followed_by(later)
    return first, sent
