"""Tiles and the arrows between them: plain data, without tensors.

The model is cut into stages, the sequence into chunks. A stage is a worker's run of layers, or embedding, a
layer, head (`EngineSpec.tasks_are_layers`). A tile is a stage on a chunk:

    kind         reads                                 writes
    forward      y[k-1,c], S[k,c-1]                    y[k,c], S[k,c]
    linearize    the same: forward, its tape kept      and tape[k,c]
    recompute    y or z[k-1,c], S[k,c-1]               tape[k,c], z[k,c]
    advance      the same                              S[k,c], z[k,c]
    backward     tape[k,c], dy[k,c], dS[k,c]           dy[k-1,c], dS[k,c-1]
    windowed     y[k-1] to the halo's end, S[k,c-1],   dy[k-1,c], spill[k-1,c',c] into chunks
    (vjp)        dy[k] to the halo's end               c' before

backward and windowed also add to the gradients of the stage's parameters.

y is a stage's output, S its state at the chunk's right edge; dy and dS are their cotangents, dS being the
accumulated adjoint state (docs/method.md §2). A tape is what a stage's backward needs of its forward. A
segment is a run of stages of which only the first one's input is stored: recompute runs through it from
there, and z is a y that it computes again inside a segment. With checkpoints only some S are stored, and
advance computes the others again (`binomial`); a tape then holds S[k,c-1] until its backward.

A method decides which of these arrows the backward has (`EngineSpec`), and which stages form a segment.
`schedule` decides who owns a tile and in which order tiles run."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

Key = tuple  # names what a tile writes: (name, stage, chunk); a spill also has the chunk it comes from
TileKind = Literal["forward", "linearize", "recompute", "advance", "backward", "windowed"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A stage on `count` chunks, the first of which is `chunk`; only a windowed vjp has more than one."""

    kind: TileKind
    stage: int
    chunk: int
    count: int = 1

    @property
    def is_forward(self) -> bool:
        """Whether the tile is the first to compute its stage's output, with its tape kept or not."""
        return self.kind in ("forward", "linearize")

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.chunk}{f'+{self.count}' if self.count > 1 else ''})"


@dataclasses.dataclass(frozen=True)
class BackwardSpec:
    """The arrows between tiles that the backward has.

    Attributes:
        dy_from: source of a layer's cotangent: "above", the layer above; "head", dL/dy_K for every layer.
        window: tokens that an output's gradient reaches back through each layer's recurrence; "auto" picks a
            window per layer by `tolerance` after the forward; None: no limit, the adjoint state is carried.
        drop_probability: with which the adjoint state is dropped at a chunk's edge; otherwise it is divided
            by 1 - drop_probability.
        drop_every: tokens between the edges at which the adjoint state is dropped for certain: a multiple of
            the chunk size, counted from the document's start; None drops it nowhere.
    """

    dy_from: Literal["above", "head"] = "above"
    window: int | Literal["auto"] | None = None
    tolerance: float = 0.0
    drop_probability: float = 0.0
    drop_every: int | None = None


@dataclasses.dataclass(frozen=True)
class Storage:
    """Storage of the forward's results for the backward: which ones, and in which memory.

    Attributes:
        keep: "edges", the states at chunk edges; "inputs", also each segment's inputs; "offload", the same in
            host memory.
        segment_layers: number of layers of a segment, if the inputs of segments are stored; None if that may
            be picked.
        tapes: number of chunks, counted from the last, whose tapes the forward keeps (linearize in place
            of forward): these are not recomputed.
        recompute: which part of a tape is left out and computed again in the backward (see `methods.Exact`).
        offload: whether stored states, keys and values, and inputs are in host memory, if the device is a
            GPU.
        checkpoints: number of states at chunk edges that each layer stores at a time, besides those of all
            tapes but the first; the backward computes the others again (`binomial`). None: all of them.
        memory: budget, in bytes or "auto", for as many `tapes` as fit; for one process.
        prefer_single_chunk: whether the sequence becomes one chunk, the fastest way, if its tape fits in
            `memory`.
        increments: stages in a row whose outputs are stored as what they add to their inputs, where that
            takes less memory (`storage.Increment`).
        attention_bytes: bytes for outputs of attention that are not computed again (`AttentionOutputs`).
    """

    keep: str = "edges"
    tapes: int = 1
    recompute: str = "none"
    offload: bool = False
    checkpoints: int | None = None
    memory: float | Literal["auto"] | None = None
    prefer_single_chunk: bool = False
    segment_layers: int | None = 1
    increments: int = 0
    attention_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """A method's instructions to the engine: the backward's arrows, the forward's storage, the chunks.

    Attributes:
        chunk_size: tokens per chunk; it need not divide the sequence.
        documents: the documents' first tokens, rising: chunks end there, the next state is zero, and no
            cotangent crosses. Windowed tiles do not support it yet.
        cut_at: further tokens at which chunks end.
        least: the fewest tokens of a chunk that continues a document; a shorter rest joins the chunk
            before it.
    """

    chunk_size: int
    backward: BackwardSpec = BackwardSpec()
    storage: Storage = Storage()
    documents: tuple[int, ...] = (0,)
    cut_at: tuple[int, ...] = ()
    least: int = 1

    @property
    def tasks_are_layers(self) -> bool:
        """Whether each layer is a stage of its own; else a worker's layers are one (`layer_run`).

        They are where the backward cuts each layer's recurrence or cotangent by itself, and where the forward
        stores each layer's input, from which that layer alone is computed again."""
        backward = self.backward
        cuts_layers = backward.window is not None or backward.drop_probability > 0
        return cuts_layers or backward.dy_from != "above" or self.storage.keep != "edges"

    @property
    def layers_of_segments(self) -> int | None:
        """Number of layers of a segment; None if all layers are one."""
        return None if self.storage.keep == "edges" else self.storage.segment_layers

    def in_segments(self, chunk_size: int, layers: int, increments: int = 0) -> EngineSpec:
        """Return the spec with chunks of so many tokens, and segments of so many layers.

        Args:
            increments: as in `Storage`.
        """
        storage = dataclasses.replace(
            self.storage, keep="inputs", segment_layers=layers, increments=increments
        )
        return dataclasses.replace(self, chunk_size=chunk_size, storage=storage)

    def without_tapes(self) -> EngineSpec:
        """Return the spec of a sequence whose backward comes after that of others that go on from it.

        A tape that it kept would add to theirs: the whole would take more memory than one sequence does."""
        return dataclasses.replace(self, storage=dataclasses.replace(self.storage, tapes=0))

    def cuts(self, seqlen: int) -> tuple[int, ...]:
        """Return the cuts of a sequence: chunk c is the tokens [cuts[c], cuts[c + 1])."""
        all_cuts: list[int] = []
        for start, stop in itertools.pairwise((*self.documents, seqlen)):
            document_cuts = list(range(start, stop, self.chunk_size))
            if self.cut_at:
                document_cuts = sorted({*document_cuts, *(cut for cut in self.cut_at if start < cut < stop)})
            if len(document_cuts) > 1 and stop - document_cuts[-1] < self.least:
                document_cuts.pop()
            all_cuts += document_cuts
        return (*all_cuts, seqlen)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles and arrows of one sequence.

    Attributes:
        cuts: chunk c is the tokens [cuts[c], cuts[c + 1]).
        stateful: per stage, whether it carries a state from chunk to chunk.
        segments: per stage, the number of its segment.
        dy_from: as in `EngineSpec`.
        windows: per stage, in tokens; None where the adjoint state is carried from chunk to chunk.
        reach: tokens to the left of its own that a windowed tile reads, besides the state.
        costs: per stage, the relative time of its forward per token; only the order depends on it.
        document_starts: chunks, other than the first, that begin a document and read no state.
        dropped: chunks that read the state before them but hand no cotangent back to it.
        adjoint_scale: per stateful stage and chunk, the factor on the adjoint state as it leaves the chunk;
            empty if all are 1.
        exchanges_within_tiles: whether states and their cotangents cross chunk edges while tiles run, instead
            of between them.
        checkpoints: as in `Storage`.
        head_in_forward: whether the head's backward runs in the forward, as soon as its forward has: its
            cotangent is a number, by which what it has written is multiplied later.
    """

    cuts: tuple[int, ...]
    stateful: tuple[bool, ...]
    segments: tuple[int, ...]
    dy_from: str = "above"
    windows: tuple[int | None, ...] = ()
    reach: int = 0
    costs: tuple[float, ...] = ()
    document_starts: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    adjoint_scale: tuple[tuple[float, ...], ...] = ()
    exchanges_within_tiles: bool = False
    checkpoints: int | None = None
    head_in_forward: bool = False

    @functools.cached_property
    def stages(self) -> int:
        return len(self.stateful)

    @functools.cached_property
    def chunks(self) -> int:
        return len(self.cuts) - 1

    def tokens(self, chunk: int, count: int = 1) -> int:
        """Return the number of tokens in `count` chunks from `chunk` on."""
        return self.cuts[chunk + count] - self.cuts[chunk]

    def window(self, k: int) -> int | None:
        """Return stage k's window in tokens; None if it cuts nothing off, being as long as the sequence."""
        window_tokens = self.windows[k] if self.windows else None
        return window_tokens if window_tokens is not None and window_tokens < self.cuts[-1] else None

    @functools.cached_property
    def has_windows(self) -> bool:
        """Whether any stage's window cuts something off."""
        return any(self.window(k) is not None for k in range(self.stages))

    @functools.cached_property
    def stores_inputs(self) -> bool:
        """Whether there are several segments, whose inputs the forward stores."""
        return len(set(self.segments)) > 1

    @functools.cached_property
    def carried(self) -> bool:
        """Whether any stage carries its adjoint state: then the backward takes chunks from last to first."""
        return any(stateful and self.window(k) is None for k, stateful in enumerate(self.stateful))

    def per_task(self, k: int) -> int:
        """Return the number of chunks in a windowed tile of stage k.

        The tile is as long as the window, so that halos at most double the work."""
        return -(-(self.window(k) or 1) // (self.cuts[1] - self.cuts[0]))

    def extent(self, t: Tile) -> tuple[int, int, int, int]:
        """Return (left, start, stop, halo_stop) of a windowed tile.

        It owns the tokens [start, stop), reads the inputs of [left, halo_stop) and the cotangents of [start,
        halo_stop), and writes the cotangents of [left, stop)."""
        start, stop = self.cuts[t.chunk], self.cuts[t.chunk + t.count]
        return (
            max(0, start - self.reach),
            start,
            stop,
            min(self.cuts[-1], stop + (self.window(t.stage) or 1) - 1),
        )

    def covering(self, start: int, stop: int) -> range:
        """Return the chunks that hold the tokens [start, stop)."""
        return range(bisect.bisect_right(self.cuts, start) - 1, bisect.bisect_left(self.cuts, stop))

    # ------------------------------------------------------------------------------------------------ tiles

    def forward_tiles(self) -> Iterator[Tile]:
        for c in range(self.chunks):
            yield from (Tile("forward", k, c) for k in range(self.stages))

    def head_tiles(self) -> Iterator[Tile]:
        """Yield the backward's tiles that run in the forward."""
        if self.head_in_forward:
            yield from (Tile("backward", self.stages - 1, c) for c in range(self.chunks))

    def backward_tiles(self) -> Iterator[Tile]:
        """Yield the backward's tiles, but for `head_tiles`.

        Stages come from the top, chunks from last to first if `carried`."""
        for k in reversed(range(self.stages - self.head_in_forward)):
            if self.window(k) is None:
                order = range(self.chunks)[:: -1 if self.carried else 1]
                for c in order:
                    yield Tile("recompute", k, c)
                    yield Tile("backward", k, c)
            else:
                n = self.per_task(k)
                yield from (Tile("windowed", k, c, min(n, self.chunks - c)) for c in range(0, self.chunks, n))

    @functools.cached_property
    def chunks_reading_state(self) -> frozenset[int]:
        """The chunks that read the state of the chunk before."""
        return frozenset(range(1, self.chunks)) - self.document_starts

    def reads_state(self, c: int) -> bool:
        """Whether chunk c reads the state of the chunk before."""
        return c in self.chunks_reading_state

    def carries(self, c: int) -> bool:
        """Whether chunk c hands the adjoint state to the chunk before."""
        return self.reads_state(c) and c not in self.dropped

    def passes(self, k: int, c: int) -> float:
        """Return the factor on stage k's adjoint state as it leaves chunk c."""
        return self.adjoint_scale[sum(self.stateful[:k])][c] if self.adjoint_scale else 1.0

    @functools.cached_property
    def documents(self) -> list[tuple[int, int]]:
        """The document that each chunk belongs to: its first token, and the one after its last."""
        spans: list[tuple[int, int]] = []
        for first, after in itertools.pairwise((0, *self._starts, self.chunks)):
            spans += [(self.cuts[first], self.cuts[after])] * (after - first)
        return spans

    def document(self, c: int) -> int:
        """Return the first token of the document that chunk c belongs to."""
        return self.documents[c][0]

    def first_grad_token(self, c: int) -> int:
        """Return the first token that can get a state's cotangent from chunk c.

        It is the document's first, or the one after the last edge at which cotangents are dropped."""
        return self.cuts[max(_last(self._starts, c), _last(self._dropped, c))]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return sorted(self.document_starts)

    @functools.cached_property
    def _dropped(self) -> list[int]:
        return sorted(self.dropped)

    def first_of_segment(self, k: int) -> bool:
        return k == 0 or self.segments[k] != self.segments[k - 1]

    # ----------------------------------------------------------------------------------------------- arrows

    def reads(self, t: Tile) -> list[Key]:
        """Return the keys of the values that a tile waits for.

        Token ids and initial states, which every worker has, are not listed."""
        k, c = t.stage, t.chunk
        crosses = self.stateful[k] and not self.exchanges_within_tiles
        state: list[Key] = [("S", k, c - 1)] if crosses and self.reads_state(c) else []
        if t.kind == "backward":
            carried = [("dS", k, c)] if crosses and self.carries(c + 1) else []
            state = state if self.checkpoints is not None else []  # which the tape holds until then
            return [("tape", k, c), *self.cotangents(k, self.cuts[c], self.cuts[c + 1]), *carried, *state]
        if t.kind == "windowed":
            left, start, _, halo_stop = self.extent(t)
            below = [("y", k - 1, j) for j in self.covering(left, halo_stop)] if k else []
            return below + state + self.cotangents(k, start, halo_stop)
        name = "z" if t.kind in ("recompute", "advance") and not self.first_of_segment(k) else "y"
        return ([(name, k - 1, c)] if k else []) + state

    def cotangents(self, k: int, start: int, stop: int) -> list[Key]:
        """Return the keys of the parts of stage k's output cotangents on the tokens [start, stop).

        They are in the order in which they are summed; the head, whose output is the loss, has none."""
        top = self.stages - 1
        if k == top:
            return []
        if self.dy_from == "head" and k:
            return [("dy", top - 1, j) for j in self.covering(start, stop)]
        keys: list[Key] = []
        for j in self.covering(start, stop):
            keys.append(("dy", k, j))
            if self.window(k + 1) is not None and self.stateful[k + 1]:
                # tiles of the stage above that read to the left far enough
                last = bisect.bisect_left(self.cuts, min(stop, self.cuts[j + 1]) + self.reach)
                starts = range(j + 1, min(last, self.chunks))
                keys += [("spill", k, j, i) for i in starts if i % self.per_task(k + 1) == 0]
        return keys

    def writes(self, t: Tile) -> list[Key]:
        """Return the keys of the values that a tile leaves for other tiles."""
        k, c, top = t.stage, t.chunk, self.stages - 1
        crosses = self.stateful[k] and not self.exchanges_within_tiles
        if t.kind in ("backward", "windowed"):
            down = k > 0 and (self.dy_from == "above" or k in (1, top))
            if t.kind == "backward":
                carried = [("dS", k, c - 1)] if crosses and self.carries(c) else []
                return ([("dy", k - 1, c)] if down else []) + carried
            left, start, stop, _ = self.extent(t)
            owned: list[Key] = [("dy", k - 1, j) for j in self.covering(start, stop)]
            return owned + [("spill", k - 1, j, c) for j in self.covering(left, start)] if down else []
        out: list[Key] = []
        if t.is_forward:
            out += [("y", k, c)] if k < top else []
            last = c + 1 == self.chunks
            out += [("S", k, c)] if crosses and (last or self.reads_state(c + 1)) else []
        if t.kind == "advance":
            out += [("S", k, c)] if crosses and self.reads_state(c + 1) else []
        if t.kind in ("linearize", "recompute"):
            out += [("tape", k, c)]
        if t.kind in ("recompute", "advance") and k < top and not self.first_of_segment(k + 1):
            out += [("z", k, c)]
        return out

    # ------------------------------------------------------------------------------------------------ order

    def order_by_segments(self) -> list[Tile]:
        """Return all tiles in the order in which one worker needs the least memory.

        The backward goes through the segments from the top, and through each one's chunks from the last. So
        sums of gradients, keys and values exist for one segment at a time, and a segment's inputs are freed
        while the cotangents of its inputs take their place."""

        def place(t: Tile) -> tuple[int, ...]:
            within = (0, t.stage) if t.kind == "recompute" else (1, -t.stage)
            return -self.segments[t.stage], -t.chunk, *within

        forward: list[Tile] = []
        for t in self.forward_tiles():
            forward.append(t)
            if self.head_in_forward and t.stage == self.stages - 1:
                forward.append(Tile("backward", t.stage, t.chunk))
        return [*forward, *sorted(self.backward_tiles(), key=place)]

    def order(self, stream: bool = False) -> list[Tile]:
        """Return all tiles in one order that respects all arrows.

        Forward tiles go chunk by chunk. A backward tile comes as soon as the head has done the last chunk
        that it depends on; of several the top one comes first, and a segment's stages stay together.

        Args:
            stream: backward tiles begin before the forward ends, where the arrows allow it.
        """
        C, top, size = self.chunks, self.stages - 1, self.cuts[1] - self.cuts[0]
        # when a key is written, and when a backward tile may run: chunks that the head has done by then
        written_at: dict[Key, int] = {}
        runs_at: dict[Tile, int] = {}
        for t in self.backward_tiles():
            if t.kind == "recompute":
                continue
            head = C - 1 - t.chunk if self.carried else t.chunk
            times = [head + (0 if stream and not self.carried else C)] if t.stage == top else []
            times += [written_at[key] for key in self.reads(t) if key in written_at]
            # as if the sequence continued: else the top stages' last tiles would all go before any below
            if t.kind == "windowed":
                above = self.stateful[t.stage + 1] and self.dy_from == "above"
                ahead = (self.window(t.stage) or 1) - 1 + (self.reach if above else 0)
                first = self.cotangents(t.stage, *self.extent(t)[1:3])[0]
                times.append(written_at[first] + t.count - 1 - -ahead // size)
            runs_at[t] = max(times)
            written_at.update(dict.fromkeys(self.writes(t), runs_at[t]))
        column: dict[tuple[int, int], int] = collections.defaultdict(int)  # when all of a segment may
        for t, time in runs_at.items():
            name = self.segments[t.stage], t.chunk
            column[name] = max(column[name], time)

        def place(t: Tile) -> tuple[int, ...]:
            if t.kind == "forward":
                return t.chunk, 0, 0, 0, t.stage, 0
            segment = self.segments[t.stage]
            chunk = t.chunk if t.kind == "windowed" or not self.carried else -t.chunk
            ahead = (0, t.stage) if t.kind == "recompute" else (1, -t.stage)
            return column[segment, t.chunk], 1, -segment, chunk, *ahead

        return sorted([*self.forward_tiles(), *self.backward_tiles()], key=place)


def _last(rising: list[int], c: int) -> int:
    """Return the largest number that is not above c, or 0."""
    i = bisect.bisect_right(rising, c)  # there may be thousands of documents
    return rising[i - 1] if i else 0


def make_grid(
    spec: EngineSpec,
    seqlen: int,
    stateful: Sequence[bool],
    reach: int,
    shards: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    costs: Sequence[float] = (),
) -> Grid:
    """Return the grid of a spec on `seqlen` tokens. Grids are cached, with what they compute once.

    Args:
        stateful, reach, costs: as in `Grid`.
        shards: per stage, its layer shard: a segment does not span shards. None: one shard.
        windows: per stateful stage, once window="auto" has picked them; until then nothing is cut off.
    """
    stage_windows = None if windows is None else tuple(windows)
    stage_shards = None if shards is None else tuple(shards)
    return _make_grid(spec, seqlen, tuple(stateful), reach, stage_shards, stage_windows, tuple(costs))


def segments_of(shards: Sequence[int], layers: int | None) -> tuple[int, ...]:
    """Return the segment of each stage where a segment is so many layers of one shard.

    The stages are embedding, layers and head. The embedding goes with the first layer, unless each stage is a
    segment; the head is one by itself."""
    if layers is None or layers == 1:
        return tuple(range(len(shards)))
    names = [(shard, max(0, k - 1) // layers) for k, shard in enumerate(shards[:-1])]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return (*map(numbers.__getitem__, names), len(numbers))


@functools.lru_cache(64)
def _make_grid(
    spec: EngineSpec,
    seqlen: int,
    stateful: tuple[bool, ...],
    reach: int,
    shards: tuple[int, ...] | None,
    windows: tuple[int, ...] | None,
    costs: tuple[float, ...],
) -> Grid:
    n = len(stateful)
    window = spec.backward.window
    if window == "auto":
        picked = iter(windows) if windows is not None else None
        windows_by_stage = tuple(next(picked) if picked is not None and s else None for s in stateful)
    else:
        windows_by_stage = tuple(window if s else None for s in stateful)
    shards, segments = shards or (0,) * n, tuple(range(n))
    if window is None:
        segments = (
            shards if spec.storage.keep == "edges" else segments_of(shards, spec.storage.segment_layers)
        )
    cuts, starts = spec.cuts(seqlen), set(spec.documents)
    document_starts = frozenset(c for c, cut in enumerate(cuts[:-1]) if c and cut in starts)
    grid = Grid(
        cuts,
        stateful,
        segments,
        spec.backward.dy_from,
        windows_by_stage,
        reach,
        costs,
        document_starts,
        checkpoints=spec.storage.checkpoints,
    )
    if spec.backward.drop_every is None:
        return grid
    dropped = (c for c in range(grid.chunks) if (cuts[c] - grid.document(c)) % spec.backward.drop_every == 0)
    return dataclasses.replace(grid, dropped=frozenset(dropped))
