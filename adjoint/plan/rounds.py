"""Time of a step whose ranks share the sequence of a model with attention (`adjoint.parallel.context`).

Ranks go through the sequence in rounds: each rank has one chunk, all run layer by layer in the same order.
They meet at attention, where queries travel and each rank does as much of the round's work as any other;
recurrent states go from rank to rank while the layers run. So the order of tiles is fixed, and their times
follow from a few maxima: no program is made, and a thousand ranks are planned in a moment.

A recurrent layer's states cross in a wave: each rank waits for the state before its chunk when its recurrence
begins (docs/decisions.md says what an affine exchange of states would save).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from adjoint.engine.grid import Tile, TileKind
from adjoint.plan.model_sizes import HEAD
from adjoint.plan.run_memory import Setup
from adjoint.plan.simulate import Span, Timeline

Tokens = TypeVar("Tokens", int, np.ndarray)  # of one chunk, or of several

Times = np.ndarray  # a NumPy array with a time for each rank of a round


def query_bytes(setup: Setup, k: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Return the bytes of queries and answers for each rank that `tokens` queries of attention layer k reach.

    They are those of a forward pass, and of a backward pass; 0 if a window bounds attention, as keys travel
    then."""
    if not _travels(setup, k):
        return 0 * tokens, 0 * tokens
    query, log = setup.query(k)
    return (2 * query + log) * tokens, (4 * query + log) * tokens


def fetched_bytes(setup: Setup, k: int, start: Tokens) -> Tokens:
    """Return the bytes of the keys and values before token `start` that a chunk of layer k fetches.

    They are 0 if its queries travel. As many bytes of cotangents go back."""
    if _travels(setup, k):
        return 0 * start
    window = setup.model.layers[k].window
    return setup.grown(k) * (start if window is None else np.minimum(start, window - 1))


def _travels(setup: Setup, k: int) -> bool:
    layer = setup.model.layers[k]
    return bool(layer.pairs) and layer.window is None


def seen_pairs(window: int | None, start: Tokens, stop: Tokens) -> Tokens:
    """Return the number of pairs (token of [start, stop), token in its window)."""
    edge = np.clip(window or math.inf, start, stop)  # up to this token, each sees all before it
    return (edge**2 - start**2) / 2 + (stop - edge) * (window or 0)


def step_bytes(setup: Setup, spans: Sequence[range]) -> tuple[int, int]:
    """Return the bytes of all messages of a step, without the sum of gradients, and of the busiest link's."""
    ranks, chunks, size = setup.layout.sequence, setup.chunks, setup.spec.chunk_size
    c = np.arange(chunks)
    start, reached = c * size, np.minimum(c, ranks - 1)  # reached: number of other ranks with earlier keys
    tokens = np.minimum(size, setup.seqlen - start)
    forwards = 1 + (c < chunks - ranks)  # again for all but each rank's last chunk
    total, most = 0, 0
    for span in spans:
        exchanged = 0
        for k in span:
            if setup.model.layers[k].grown:
                forward, backward = query_bytes(setup, k, tokens)
                per_chunk = reached * (forward * forwards + backward)
                exchanged += int(per_chunk.sum() + (fetched_bytes(setup, k, start) * (1 + forwards)).sum())
        states = 2 * (chunks - 1) * sum(map(setup.state, span))  # there and back, once an edge
        total += exchanged + states
        most = max(most, exchanged // (ranks * (ranks - 1)) + states // ranks)
    between = setup.y(setup.seqlen)  # one shard and the next, one way
    total += 2 * (len(spans) - 1) * between
    return total, max(most, between // ranks if len(spans) > 1 else 0)


@dataclass
class RoundSimulator:
    """Simulator of a step's rounds.

    Args:
        setup: a setup whose layout shares sequences. spans: each shard's layers.
        seconds: (layer, kind) → seconds per token, without attention's pairs; the head's under -1.
        serial: (layer, kind) → the part of `seconds` that is the recurrence's.
        pairs: (layer, kind) → seconds per pair of tokens.
        bytes_per_second, latency: of messages. speed: of each shard's devices.
        most: the most tiles that the timeline records.
    """

    setup: Setup
    spans: Sequence[range]
    seconds: dict[tuple[int, str], float]
    serial: dict[tuple[int, str], float]
    pairs: dict[tuple[int, str], float]
    bytes_per_second: float
    latency: float
    speed: Sequence[float]
    most: int = 0
    notes: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup, n = self.setup, self.setup.layout.sequence
        size, chunks = setup.spec.chunk_size, setup.chunks
        cuts = np.minimum(np.arange(chunks + 1) * size, setup.seqlen)
        first = -chunks % n  # the last round is complete
        self.ranks, self.cuts = n, cuts
        self.rounds = [(max(0, r * n - first), (r + 1) * n - first) for r in range(-(-chunks // n))]
        self.clock = np.zeros((len(self.spans), n))
        self.busy = np.zeros((len(self.spans), n))
        stages = enumerate(setup.pieces(self.spans))
        self.stage_of = {piece: stage for stage, pieces in stages for piece in pieces}
        self.edge: dict[int, float] = {}  # when each layer's state after the round before is ready

    def run(self) -> Timeline:
        """Simulate forward and backward."""
        last = len(self.rounds) - 1
        for r in range(len(self.rounds)):
            arrived: Times = np.zeros(())
            for s, span in enumerate(self.spans):
                clock = self._layers(s, span, "forward", r, np.maximum(self._free(s, r), arrived))
                if s + 1 == len(self.spans):
                    clock = self._head(
                        s, r, "forward", clock, self.seconds[-1, "linearize" if r == last else "forward"]
                    )
                arrived = self._passed(s, r, clock)
        self.edge = {}
        for r in reversed(range(len(self.rounds))):
            arrived = np.zeros(())
            for s in reversed(range(len(self.spans))):
                clock = self._free(s, r)
                if r < last:
                    clock = self._layers(s, self.spans[s], "recompute", r, clock)
                    if s + 1 == len(self.spans):
                        clock = self._head(s, r, "recompute", clock, self.seconds[-1, "linearize"])
                clock = self._layers(s, self.spans[s][::-1], "backward", r, np.maximum(clock, arrived))
                arrived = self._passed(s, r, clock)
        spans = tuple(sorted(self.notes, key=lambda span: (span.start, span.worker)))
        return Timeline(float(self.clock.max()), tuple(self.busy.ravel().tolist()), spans)

    # ------------------------------------------------------------------------------------------ a round

    def _places(self, r: int) -> slice:
        """Return the ranks that have a chunk in a round."""
        start, stop = self.rounds[r]
        return slice(self.ranks - (stop - start), self.ranks)

    def _tokens(self, r: int) -> Times:
        start, stop = self.rounds[r]
        return np.diff(self.cuts[start : stop + 1])

    def _free(self, s: int, r: int) -> Times:
        return self.clock[s, self._places(r)].copy()

    def _passed(self, s: int, r: int, clock: Times) -> Times:
        """Note that the round is done on shard s; return when its outputs are at the next one."""
        self.clock[s, self._places(r)] = clock
        if len(self.spans) == 1:
            return clock
        sizes = np.array([self.setup.y(int(n)) for n in self._tokens(r)])
        return clock + sizes / self.bytes_per_second + self.latency

    def _head(self, s: int, r: int, kind: TileKind, clock: Times, per_token: float) -> Times:
        took = self._tokens(r) * per_token / self.speed[s]
        self.busy[s, self._places(r)] += took
        self._note(s, r, Tile(kind, self.stage_of[HEAD], 0), clock, clock + took)
        return clock + took

    def _layers(self, s: int, span: Sequence[int], kind: TileKind, r: int, clock: Times) -> Times:
        for stage, layers in itertools.groupby(span, self.stage_of.__getitem__):
            began = clock
            for k in layers:
                clock = self._layer(s, k, kind, r, clock)
            self._note(s, r, Tile(kind, stage, 0), began, clock)
        return clock

    def _layer(self, s: int, k: int, kind: TileKind, r: int, clock: Times) -> Times:
        layer, tokens = self.setup.model.layers[k], self._tokens(r)
        layer_seconds = tokens * self.seconds[k, kind] / self.speed[s]
        if layer.grown:
            ready = clock + layer_seconds / 2
            attention_seconds = self._attention(s, k, kind, r)
            self.busy[s, self._places(r)] += layer_seconds + attention_seconds
            return (
                np.full_like(clock, ready.max())
                + max(attention_seconds, self._exchanged(k, kind, r))
                + layer_seconds / 2
            )
        if kind == "recompute" or not layer.state:  # states are kept
            self.busy[s, self._places(r)] += layer_seconds
            return clock + layer_seconds
        serial_seconds = tokens * self.serial[k, kind] / self.speed[s]
        self.busy[s, self._places(r)] += layer_seconds
        return (
            self._recurrence(k, kind, clock + (layer_seconds - serial_seconds) / 2, serial_seconds)
            + (layer_seconds - serial_seconds) / 2
        )

    def _recurrence(self, k: int, kind: TileKind, ready: Times, serial_seconds: Times) -> Times:
        """Return when each rank's recurrence is done."""
        hop = self.latency + self.setup.state(k) / self.bytes_per_second
        if kind == "backward":  # the last rank comes first
            ready, serial_seconds = ready[::-1], serial_seconds[::-1]
        previous_round = self.edge.get(k)
        arrives = -math.inf if previous_round is None else previous_round + hop
        ends = np.cumsum(serial_seconds + hop) - hop
        ready = np.concatenate([np.maximum(ready[:1], arrives), ready[1:]])
        done = ends + np.maximum.accumulate(ready + serial_seconds - ends)
        self.edge[k] = float(done[-1])
        return done[::-1] if kind == "backward" else done

    def _attention(self, s: int, k: int, kind: TileKind, r: int) -> float:
        """Return the seconds of a round's pairs on each of its ranks."""
        start, stop = self.rounds[r]
        a, b = self.cuts[start:stop].astype(float), self.cuts[start + 1 : stop + 1].astype(float)
        pairs = seen_pairs(self.setup.model.layers[k].window, a, b)
        return float(pairs.mean()) * self.pairs.get((k, kind), 0.0) / self.speed[s]

    def _exchanged(self, k: int, kind: TileKind, r: int) -> float:
        """Return the seconds for which each rank's messages of a round keep its port busy."""
        c = np.arange(*self.rounds[r])
        per_rank = query_bytes(self.setup, k, self._tokens(r)[0])[kind == "backward"]
        sent = per_rank * np.minimum(c, self.ranks - 1) + fetched_bytes(self.setup, k, self.cuts[c])
        return float(sent.mean()) / self.bytes_per_second + 2 * self.latency * bool(sent.any())

    def _note(self, s: int, r: int, tile: Tile, start: Times, stop: Times) -> None:
        """Record a tile of each of the round's chunks."""
        for i, c in enumerate(range(*self.rounds[r])) if len(self.notes) < self.most else ():
            worker = s * self.ranks + self._places(r).start + i
            chunk_tile = dataclasses.replace(tile, chunk=c)
            self.notes.append(Span(worker, float(start[i]), float(stop[i]), chunk_tile))
