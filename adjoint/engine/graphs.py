"""CUDA graphs: the kernel launches of a chunk's tiles are recorded once and replayed for similar chunks.

A layer makes tens of launches per chunk, and with short chunks the GPU waits for the host between them. All
chunks of one length make the same launches on tensors of the same shapes. So a piece, consecutive tiles of
one chunk, runs eagerly the first time (anything compiled, tried or tuned on first use happens then), is
recorded the second time, and is one launch from then on. A recorded piece has memory of its own: its inputs
are copied in before a replay, its results copied out after.

A graph repeats the same work on other values, so what depends on more is not recorded: stages that use a
chunk's position (`Stage.replayable`), append-only states, documents, the sequence's first and last chunk.
These run eagerly, as does everything once a recording has failed, and where messages wait on the device, for
which a recording would wait. Graphs live for one run of a program, like
the sums of gradients to whose memory they add."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.grid import Grid, Key, Tile
from adjoint.engine.schedule import Action, Run, keys_of
from adjoint.engine.storage import PerChunk, room
from adjoint.engine.tile import Pullback

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]  # runs a function once; its result repeats the launches


def recorder(device: torch.device) -> Recorder | None:
    """What records graphs on this device; None if it has none."""
    return _record if device.type == "cuda" else None


def _record(function: Callable[[], None]) -> Replay:
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads, such as a data loader's or Ray's, may call CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A piece's graph.

    Attributes:
        ids, targets: (batch, tokens), the graph's own inputs.
        reads, writes: values (tensors, tuples of them, tapes) by keys with chunks relative to the piece's.
        loss: the chunk's summed loss, if the piece computes it.
    """

    replay: Replay
    ids: Tensor
    targets: Tensor
    reads: dict[Key, Any]
    writes: dict[Key, Any]
    loss: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Tape:
    """A tape in a graph's memory, which every replay writes again. The pullback is called once, while the
    piece that calls it is recorded; replays repeat its launches."""

    pullback: Pullback

    def __call__(self, *given: Any) -> Any:
        return self.pullback(*given)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive actions; those of a recordable piece are tiles of one chunk."""

    actions: list[Action]
    recordable: bool

    @property
    def tiles(self) -> list[Tile]:
        return [a.tile for a in self.actions if isinstance(a, Run)]

    @property
    def work(self) -> tuple[tuple[str, int], ...]:
        """The kind and stage of each tile: the same for all chunks with the same work."""
        return tuple((t.kind, t.stage) for t in self.tiles)


class Graphs:
    """The graphs of one run of a worker's program."""

    def __init__(self, record: Recorder) -> None:
        self.record, self.failed = record, False
        self.found: dict[Any, _Recorded | None] = {}  # by kind of piece; None: it has run eagerly once

    def replay(self, worker: Any, actions: Sequence[Action]) -> Iterator[Action]:
        """Runs recordable pieces in order, and yields the other actions for the caller to run eagerly.

        Raises:
            RuntimeError: a recording fails when tapes are in graphs already.
        """
        pieces = list(_pieces(worker, actions))
        pulls = {("tape", t.stage, t.chunk): p.work for p in pieces for t in p.tiles if t.kind == "backward"}
        for piece in pieces:
            if not (piece.recordable and self._run(worker, piece, pulls)):
                yield from piece.actions

    def _run(self, worker: Any, piece: _Piece, pulls: dict[Key, Any]) -> bool:
        """Replays a piece, or records it the second time it is seen; False if it must run eagerly. `pulls`
        has, for each tape's key, the work of the piece that pulls it back."""
        c = piece.tiles[0].chunk
        reads, writes = _reads_and_writes(worker.grid, piece)
        given = {_relative(key, c): worker.value(key) for key in reads}
        tapes = [value for key, value in given.items() if key[0] == "tape"]
        if not all(isinstance(tape, _Tape) for tape in tapes):
            return False
        shapes = tuple((key, _shapes(value)) for key, value in given.items())
        handed_on = tuple(pulls[key] for key in writes if key[0] == "tape")
        kind = piece.work, worker.grid.tokens(c), shapes, handed_on
        if kind not in self.found and not tapes:
            self.found[kind] = None
            return False
        recorded = self.found.get(kind)
        if recorded is None:
            if self.failed:
                return False
            try:
                recorded = self.found[kind] = self._recorded(worker, piece, c, given, writes)
            except RuntimeError as error:
                self._fail(error)
                return False
        chunk = worker.chunks[c]
        _copy([recorded.ids, recorded.targets, recorded.reads], [chunk.ids, chunk.targets, given])
        recorded.replay()
        self._hand_out(worker, recorded, c)
        for action in piece.actions:
            worker.free(action)
        return True

    def _fail(self, error: RuntimeError) -> None:
        reason = f"chunks cannot be recorded as CUDA graphs ({str(error).splitlines()[0]})"
        if any(key[0] == "tape" for r in self.found.values() if r is not None for key in r.writes):
            raise RuntimeError(f"{reason}: leave out cuda_graphs=True") from error
        warnings.warn(
            f"{reason}: they are launched one by one, as without cuda_graphs=True; leave it out here",
            stacklevel=4,
        )
        self.failed = True

    def _recorded(
        self, worker: Any, piece: _Piece, c: int, given: dict[Key, Any], writes: list[Key]
    ) -> _Recorded:
        """Records a piece on chunk c; `given` has its inputs, `writes` the keys of its results."""
        chunk, sums = worker.chunks[c], worker.gradients.sums
        ids, targets = chunk.ids.clone(), chunk.targets.clone()
        reads = {key: _empty_like(value, worker.device) for key, value in given.items()}
        _copy([reads], [given])
        # A copy of the worker with its own store: if recording fails, only the sums have been touched.
        other = copy.copy(worker)
        other.host, other.total, other.losses = False, None, PerChunk(worker.grid.chunks)
        other.store = {_absolute(key, c): value for key, value in reads.items()}
        other.chunks = list(worker.chunks)
        other.chunks[c] = dataclasses.replace(chunk, ids=ids, targets=targets)
        other.passed_on = {key for key in writes if key[0] == "S"}  # into tensors of their own

        def function() -> None:
            for action in piece.actions:
                other.tile(action.tile)  # type: ignore[union-attr]
                other.free(action)

        before = set(sums)
        replay = self.record(function)
        if new := set(sums) - before:
            for parameter in new:
                del sums[parameter]
            raise RuntimeError("a parameter has its first gradient after the first chunks")
        made = {_relative(key, c): other.store[key] for key in writes}
        made = {key: _Tape(value) if key[0] == "tape" else value for key, value in made.items()}
        return _Recorded(replay, ids, targets, reads, made, other.losses.get(c))

    def _hand_out(self, worker: Any, recorded: _Recorded, c: int) -> None:
        """Copies a replay's results for chunk c from the graph's memory into the worker's store."""
        rooms: dict[Key, Any] = {}
        for key, value in recorded.writes.items():
            name, k, _ = key
            held: Any = None
            if name == "tape":
                rooms[key] = value
            elif name == "S":
                held, rooms[key] = worker.destination(_absolute(key, c))
            elif name == "y" and worker.host and worker.grid.first_of_segment(k + 1):
                rooms[key] = room(value.shape, value.dtype, worker.device, host=True)
            else:
                rooms[key] = _empty_like(value, worker.device)
            worker.store[_absolute(key, c)] = rooms[key] if held is None else held
        _copy([rooms], [recorded.writes])
        if recorded.loss is not None:
            worker.add_loss(c, recorded.loss.clone())


def _pieces(worker: Any, actions: Sequence[Action]) -> Iterator[_Piece]:
    """The actions as pieces, in order: consecutive forward, or backward, tiles of one chunk are a piece."""
    grid, last = worker.grid, worker.grid.chunks - 1
    alike = not (grid.document_starts or grid.dropped or grid.adjoint_scale or worker.decays)
    alike = alike and worker.batch.seq_idx is None and not worker.batch.inputs
    alike = alike and not worker.batch.ids.is_floating_point()

    def name(action: Action) -> tuple[int, bool] | None:
        if not alike or not isinstance(action, Run) or action.tile.kind in ("linearize", "windowed"):
            return None
        k, c = action.tile.stage, action.tile.chunk
        recordable = 0 < c < last and worker.stages[k].replayable and k not in worker.slabs
        return (c, action.tile.kind == "forward") if recordable else None

    for found, piece in itertools.groupby(actions, name):
        yield _Piece(list(piece), found is not None)


def _reads_and_writes(grid: Grid, piece: _Piece) -> tuple[list[Key], list[Key]]:
    """The keys that a piece reads from other pieces, and those that it leaves behind."""
    reads, writes = dict[Key, None](), dict[Key, None]()
    for action in piece.actions:
        read, written = keys_of(grid, action)
        reads |= dict.fromkeys(key for key in read if key not in writes)
        writes |= dict.fromkeys(written)
        for key in action.frees:
            writes.pop(key, None)
    return list(reads), list(writes)


def _relative(key: Key, c: int) -> Key:
    return key[0], key[1], key[2] - c


def _absolute(key: Key, c: int) -> Key:
    return key[0], key[1], key[2] + c


def _shapes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shapes, value))
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value  # None, or a tape


def _empty_like(value: Any, device: torch.device) -> Any:
    """The value with empty tensors in place of its tensors."""
    if isinstance(value, tuple):
        return tuple(_empty_like(v, device) for v in value)
    return room(value.shape, value.dtype, device) if isinstance(value, Tensor) else value


def _copy(rooms: Any, values: Any) -> None:
    """Copies the tensors of nested lists, tuples and dictionaries of one structure, by few launches."""
    pairs = list(zip(_tensors(rooms), _tensors(values), strict=True))
    if pairs:  # .data: autograd must not notice that a replay overwrites what a tape holds
        to, values = [place.data for place, _ in pairs], [value for _, value in pairs]
        torch._foreach_copy_(to, values, non_blocking=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(branch)
