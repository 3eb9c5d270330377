"""CUDA graphs: what a chunk's tiles launch is recorded once and replayed for all chunks like it.

A layer takes tens of launches a chunk, and where chunks are short the GPU waits for the host between them.
All chunks of one length launch the same on tensors of the same shapes, so tiles of one chunk that follow each
other, a piece, run eagerly the first time (what is compiled, tried or tuned on first use happens then), are
recorded the second, and from then on are one launch. A recorded piece reads and writes memory of its own:
what it needs is copied there before, what it has made is copied out after.

What a graph would not see is not recorded: stages that know a chunk's place (`Stage.replayable`), states that
grow, documents, the sequence's first and last chunk. These run eagerly, as does everything once a recording
has failed. Graphs live for one run of a program, as do the sums of gradients to whose memory they add."""

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
from adjoint.engine.kept import room
from adjoint.engine.program import Action, Run, keys_of
from adjoint.engine.tile import Pullback

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]  # of a function: its launches, to be made again


def recorder(device: torch.device) -> Recorder | None:
    """None where there are no graphs."""
    return _record if device.type == "cuda" else None


def _record(function: Callable[[], None]) -> Replay:
    graph = torch.cuda.CUDAGraph()
    # other threads, a data loader's or Ray's, may go on calling CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A piece's graph.

    Attributes:
        ids, targets: (batch, tokens), of the chunk.
        reads, writes: of keys whose chunk is counted from the piece's own; tensors, tuples of them, tapes.
        loss: the chunk's summed loss, where the piece makes one.
    """

    replay: Replay
    ids: Tensor
    targets: Tensor
    reads: dict[Key, Any]
    writes: dict[Key, Any]
    loss: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Tape:
    """A tape in a graph's memory, where every replay writes it again. It can be pulled back once: while the
    piece that does it is recorded."""

    pullback: Pullback

    def __call__(self, *given: Any) -> Any:
        return self.pullback(*given)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Actions that follow each other, of one chunk where they may be recorded."""

    actions: list[Action]
    recordable: bool

    @property
    def tiles(self) -> list[Tile]:
        return [a.tile for a in self.actions if isinstance(a, Run)]

    @property
    def work(self) -> tuple[tuple[str, int], ...]:
        """What it does, on whatever chunk."""
        return tuple((t.kind, t.stage) for t in self.tiles)


class Graphs:
    """The graphs of one run of a worker's program."""

    def __init__(self, record: Recorder) -> None:
        self.record, self.failed = record, False
        self.found: dict[Any, _Recorded | None] = {}  # None: has run eagerly once

    def replay(self, worker: Any, actions: Sequence[Action]) -> Iterator[Action]:
        """Runs what it has recorded, and yields the other actions, in their places, to be carried out
        eagerly.

        Raises:
            RuntimeError: a recording fails after tapes are in graphs.
        """
        pieces = list(_pieces(worker, actions))
        pulls = {("tape", t.stage, t.chunk): p.work for p in pieces for t in p.tiles if t.kind == "B"}
        for piece in pieces:
            if not (piece.recordable and self._run(worker, piece, pulls)):
                yield from piece.actions

    def _run(self, worker: Any, piece: _Piece, pulls: dict[Key, Any]) -> bool:
        """Carries a piece out, if it has been seen before; `pulls` says what the piece does that pulls a tape
        back."""
        c = piece.tiles[0].chunk
        reads, writes = _reads_and_writes(worker.grid, piece)
        given = {_from(key, c): worker.store[key] for key in reads}
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
        chunk, sums = worker.chunks[c], worker.gradients.sums
        ids, targets = chunk.ids.clone(), chunk.targets.clone()
        reads = {key: _like(value, worker.device) for key, value in given.items()}
        _copy([reads], [given])
        # The same worker with memory of its own: if recording fails, nothing of its is touched but the sums.
        other = copy.copy(worker)
        other.host, other.total, other.losses = False, None, {}
        other.store = {_back(key, c): value for key, value in reads.items()}
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
        made = {_from(key, c): other.store[key] for key in writes}
        made = {key: _Tape(value) if key[0] == "tape" else value for key, value in made.items()}
        return _Recorded(replay, ids, targets, reads, made, other.losses.get(c))

    def _hand_out(self, worker: Any, recorded: _Recorded, c: int) -> None:
        rooms: dict[Key, Any] = {}
        for key, value in recorded.writes.items():
            name, k, _ = key
            if name == "tape":
                rooms[key] = value
            elif name == "S" and _back(key, c) not in worker.passed_on:
                rooms[key] = worker.edges[k].row()
            elif name == "y" and worker.host and worker.grid.first_of_segment(k + 1):
                rooms[key] = room(value.shape, value.dtype, worker.device, host=True)
            else:
                rooms[key] = _like(value, worker.device)
            worker.store[_back(key, c)] = rooms[key]
        _copy([rooms], [recorded.writes])
        if recorded.loss is not None:
            worker.add_loss(c, recorded.loss.clone())


def _pieces(worker: Any, actions: Sequence[Action]) -> Iterator[_Piece]:
    """Actions in their order, those of one chunk together that go forward, and those that go back."""
    grid, last = worker.grid, worker.grid.chunks - 1
    alike = not (grid.document_starts or grid.dropped or grid.passing or worker.decays)
    alike = alike and worker.batch.seq_idx is None and not worker.batch.inputs
    alike = alike and not worker.batch.ids.is_floating_point()

    def name(action: Action) -> tuple[int, bool] | None:
        if not alike or not isinstance(action, Run) or action.tile.kind not in "FRB":
            return None
        k, c = action.tile.stage, action.tile.chunk
        recordable = 0 < c < last and worker.stages[k].replayable and k not in worker.slabs
        return (c, action.tile.kind == "F") if recordable else None

    for found, piece in itertools.groupby(actions, name):
        yield _Piece(list(piece), found is not None)


def _reads_and_writes(grid: Grid, piece: _Piece) -> tuple[list[Key], list[Key]]:
    """What a piece reads from other pieces, and what is there after it."""
    reads, writes = dict[Key, None](), dict[Key, None]()
    for action in piece.actions:
        read, written = keys_of(grid, action)
        reads |= dict.fromkeys(key for key in read if key not in writes)
        writes |= dict.fromkeys(written)
        for key in action.frees:
            writes.pop(key, None)
    return list(reads), list(writes)


def _from(key: Key, c: int) -> Key:
    return key[0], key[1], key[2] - c


def _back(key: Key, c: int) -> Key:
    return key[0], key[1], key[2] + c


def _shapes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_shapes, value))
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value  # None, or a tape


def _like(value: Any, device: torch.device) -> Any:
    """Empty tensors in the places of tensors."""
    if isinstance(value, tuple):
        return tuple(_like(v, device) for v in value)
    return room(value.shape, value.dtype, device) if isinstance(value, Tensor) else value


def _copy(rooms: Any, values: Any) -> None:
    """Copies tensors in lists, tuples and dictionaries of one shape, by few launches."""
    pairs = list(zip(_tensors(rooms), _tensors(values), strict=True))
    if pairs:  # .data: autograd is not to notice what a tape finds in its place at each replay
        to, values = [place.data for place, _ in pairs], [value for _, value in pairs]
        torch._foreach_copy_(to, values, non_blocking=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(branch)
