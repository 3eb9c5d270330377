"""Time of a step where ranks share the sequence of a model with attention (`adjoint.parallel.context`).

They go through it in rounds: each rank has one chunk, all run layer by layer in the same order. They meet at
attention, where queries travel and each rank does as much of the round's work as any other; recurrent states
go from rank to rank while the layers run. Which tile comes when is fixed so, and its time follows from a few
maxima: no program is made, and a thousand ranks are planned in a moment.

A recurrent layer's states cross in a wave: each rank waits for the state before its chunk when its recurrence
begins (docs/decisions.md says what an affine exchange of states would save).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adjoint.engine.grid import Tile, TileKind
from adjoint.plan.memory import Setup
from adjoint.plan.model import HEAD
from adjoint.plan.simulate import Span, Timeline

Times = Any  # a NumPy array, a time of each of a round's ranks


def asked_bytes(setup: Setup, k: int, tokens: Any) -> tuple[Any, Any]:
    """Bytes, questions and answers together, for each rank that `tokens` queries of attention layer k reach:
    of a forward pass, and of a backward pass. None where a window bounds what they see."""
    if not _travels(setup, k):
        return 0 * tokens, 0 * tokens
    query, log = setup.query(k)
    return (2 * query + log) * tokens, (4 * query + log) * tokens


def fetched_bytes(setup: Setup, k: int, start: Any) -> Any:
    """Bytes of the keys and values before token `start` that a chunk of layer k fetches, where its queries do
    not travel; as many of their cotangents go back."""
    if _travels(setup, k):
        return 0 * start
    window = setup.model.layers[k].window
    return setup.grown(k) * (start if window is None else np.minimum(start, window - 1))


def _travels(setup: Setup, k: int) -> bool:
    layer = setup.model.layers[k]
    return bool(layer.pairs) and layer.window is None


def seen_pairs(window: int | None, start: Any, stop: Any) -> Any:
    """Pairs of one of the tokens [start, stop) and one that it sees, of `window` tokens at most."""
    edge = np.clip(window or math.inf, start, stop)  # until there a token sees all before it
    return (edge**2 - start**2) / 2 + (stop - edge) * (window or 0)


def step_bytes(setup: Setup, spans: Sequence[range]) -> tuple[int, int]:
    """Bytes of all messages of a step but the sum of gradients, and of those on the link with most."""
    ranks, chunks, size = setup.layout.sequence, setup.chunks, setup.spec.chunk_size
    c = np.arange(chunks)
    start, reached = c * size, np.minimum(c, ranks - 1)  # by queries: other ranks that have keys before
    tokens = np.minimum(size, setup.seqlen - start)
    forwards = 1 + (c < chunks - ranks)  # again for all but each rank's last chunk
    total, most = 0, 0
    for span in spans:
        asked = 0
        for k in span:
            if setup.model.layers[k].grown:
                forward, backward = asked_bytes(setup, k, tokens)
                each = reached * (forward * forwards + backward)
                asked += int(each.sum() + (fetched_bytes(setup, k, start) * (1 + forwards)).sum())
        states = 2 * (chunks - 1) * sum(map(setup.state, span))  # there and back, once an edge
        total += asked + states
        most = max(most, asked // (ranks * (ranks - 1)) + states // ranks)
    between = setup.y(setup.seqlen)  # one shard and the next, one way
    total += 2 * (len(spans) - 1) * between
    return total, max(most, between // ranks if len(spans) > 1 else 0)


@dataclass
class RoundSimulator:
    """Goes through a step's rounds.

    Args:
        setup: whose layout shares sequences. spans: each shard's layers.
        seconds: (layer, kind) → seconds per token, without attention's pairs; the head's under -1.
        serial: (layer, kind) → of these the recurrence's. pairs: (layer, kind) → of a pair of tokens.
        bytes_per_second, latency: of messages. speed: of each shard's devices.
        most: spans of the timeline that are noted.
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
        first = -chunks % n  # the last round is whole
        self.ranks, self.cuts = n, cuts
        self.rounds = [(max(0, r * n - first), (r + 1) * n - first) for r in range(-(-chunks // n))]
        self.clock = np.zeros((len(self.spans), n))
        self.busy = np.zeros((len(self.spans), n))
        stages = enumerate(setup.model.stages(self.spans))
        self.stage_of = {piece: stage for stage, pieces in stages for piece in pieces}
        self.edge: dict[int, float] = {}  # of each layer, when the state at the last round's edge is there

    def run(self) -> Timeline:
        """Forward and backward."""
        last = len(self.rounds) - 1
        for r in range(len(self.rounds)):
            arrived: Times = 0.0
            for s, span in enumerate(self.spans):
                now = self._layers(s, span, "forward", r, np.maximum(self._free(s, r), arrived))
                if s + 1 == len(self.spans):
                    now = self._head(
                        s, r, "forward", now, self.seconds[-1, "linearize" if r == last else "forward"]
                    )
                arrived = self._passed(s, r, now)
        self.edge = {}
        for r in reversed(range(len(self.rounds))):
            arrived = 0.0
            for s in reversed(range(len(self.spans))):
                now = self._free(s, r)
                if r < last:
                    now = self._layers(s, self.spans[s], "recompute", r, now)
                    if s + 1 == len(self.spans):
                        now = self._head(s, r, "recompute", now, self.seconds[-1, "linearize"])
                now = self._layers(s, self.spans[s][::-1], "backward", r, np.maximum(now, arrived))
                arrived = self._passed(s, r, now)
        spans = tuple(sorted(self.notes, key=lambda span: (span.start, span.worker)))
        return Timeline(float(self.clock.max()), tuple(self.busy.ravel().tolist()), spans)

    # ------------------------------------------------------------------------------------------ a round

    def _places(self, r: int) -> slice:
        """The ranks that have a chunk in a round."""
        start, stop = self.rounds[r]
        return slice(self.ranks - (stop - start), self.ranks)

    def _tokens(self, r: int) -> Times:
        start, stop = self.rounds[r]
        return np.diff(self.cuts[start : stop + 1])

    def _free(self, s: int, r: int) -> Times:
        return self.clock[s, self._places(r)].copy()

    def _passed(self, s: int, r: int, now: Times) -> Times:
        """Notes that the round is done on shard s; gives when its outputs are at the next one."""
        self.clock[s, self._places(r)] = now
        if len(self.spans) == 1:
            return now
        sizes = np.array([self.setup.y(int(n)) for n in self._tokens(r)])
        return now + sizes / self.bytes_per_second + self.latency

    def _head(self, s: int, r: int, kind: TileKind, now: Times, per_token: float) -> Times:
        took = self._tokens(r) * per_token / self.speed[s]
        self.busy[s, self._places(r)] += took
        self._note(s, r, Tile(kind, self.stage_of[HEAD], 0), now, now + took)
        return now + took

    def _layers(self, s: int, span: Sequence[int], kind: TileKind, r: int, now: Times) -> Times:
        for stage, layers in itertools.groupby(span, self.stage_of.__getitem__):
            began = now
            for k in layers:
                now = self._layer(s, k, kind, r, now)
            self._note(s, r, Tile(kind, stage, 0), began, now)
        return now

    def _layer(self, s: int, k: int, kind: TileKind, r: int, now: Times) -> Times:
        layer, tokens = self.setup.model.layers[k], self._tokens(r)
        whole = tokens * self.seconds[k, kind] / self.speed[s]
        if layer.grown:
            meets = now + whole / 2
            shared = self._attention(s, k, kind, r)
            self.busy[s, self._places(r)] += whole + shared
            return np.full_like(now, meets.max()) + max(shared, self._exchanged(k, kind, r)) + whole / 2
        if kind == "recompute" or not layer.state:  # states are kept
            self.busy[s, self._places(r)] += whole
            return now + whole
        own = tokens * self.serial[k, kind] / self.speed[s]
        self.busy[s, self._places(r)] += whole
        return self._recurrence(k, kind, now + (whole - own) / 2, own) + (whole - own) / 2

    def _recurrence(self, k: int, kind: TileKind, ready: Times, own: Times) -> Times:
        """When each rank's recurrence is done."""
        hop = self.latency + self.setup.state(k) / self.bytes_per_second
        if kind == "backward":  # the last rank comes first
            ready, own = ready[::-1], own[::-1]
        before = self.edge.get(k)
        arrives = -math.inf if before is None else before + hop
        ends = np.cumsum(own + hop) - hop
        ready = np.concatenate([np.maximum(ready[:1], arrives), ready[1:]])
        done = ends + np.maximum.accumulate(ready + own - ends)
        self.edge[k] = float(done[-1])
        return done[::-1] if kind == "backward" else done

    def _attention(self, s: int, k: int, kind: TileKind, r: int) -> float:
        """Seconds of a round's pairs on each of its ranks."""
        start, stop = self.rounds[r]
        a, b = self.cuts[start:stop].astype(float), self.cuts[start + 1 : stop + 1].astype(float)
        pairs = seen_pairs(self.setup.model.layers[k].window, a, b)
        return float(pairs.mean()) * self.pairs.get((k, kind), 0.0) / self.speed[s]

    def _exchanged(self, k: int, kind: TileKind, r: int) -> float:
        """Seconds for which each rank's messages of a round keep its port busy."""
        c = np.arange(*self.rounds[r])
        each = asked_bytes(self.setup, k, self._tokens(r)[0])[kind == "backward"]
        sent = each * np.minimum(c, self.ranks - 1) + fetched_bytes(self.setup, k, self.cuts[c])
        return float(sent.mean()) / self.bytes_per_second + 2 * self.latency * bool(sent.any())

    def _note(self, s: int, r: int, tile: Tile, start: Times, stop: Times) -> None:
        """Notes a tile of each of the round's chunks."""
        for i, c in enumerate(range(*self.rounds[r])) if len(self.notes) < self.most else ():
            worker = s * self.ranks + self._places(r).start + i
            own = dataclasses.replace(tile, chunk=c)
            self.notes.append(Span(worker, float(start[i]), float(stop[i]), own))
