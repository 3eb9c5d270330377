"""Rows of a batch, or packed documents, that begin with the same tokens: which tokens are computed once, and
the calls that do so.

The state after a common beginning is the same in all its rows, so it is computed with one row and branched:
the rows go on from copies of it, and the cotangents of the copies are summed. Keys and values are not copied:
the rows read those of the beginning where they are, and add their cotangents there. A batch of G rows that
share P tokens and have R more takes P + G·R tokens, and keys and values of as many, instead of G·(P + R).
Rows that share more than the others do are branches of a branch, so the calls form a tree. Documents are rows
here, of different lengths.

    rows              segments
    0: A A A B C D    A A A        for rows 0, 1 and 2
    1: A A A E F G    E F G        of row 1, from the state after A A A
    2: A A A B C H    B C          for rows 0 and 2, from the same state
    3: X Y Z U V W    D, H         of rows 0 and 2, from the state after B C
                      X Y Z U V W  of row 3
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.distribution import Distribution
from adjoint.engine.exchange import BetweenTiles
from adjoint.engine.executor import Connections
from adjoint.engine.grid import Grid
from adjoint.engine.storage import Prefix, Slab, take_rows
from adjoint.errors import LOGGER, is_heard
from adjoint.layers import State

# Tokens that rows must have in common. A branch costs a program of its own, a copy of the states, and a
# recomputation of the beginning: for two rows of a Stack of width 256 on a CPU so many tokens repay it, for
# more rows or wider models fewer.
MIN_SHARED_TOKENS = 256
# Of a batch's tokens. A call of few tokens takes a GPU as long as a call of many: a system prompt in front of
# long rows is not worth one.
MIN_SAVED_SHARE = 1 / 16

# (rows, start, stop) → the ids or shifted labels (rows, stop - start) of these rows, all of which are so long
Take = Callable[[Sequence[int], int, int], Tensor]


class Segment(NamedTuple):
    """Tokens [start, stop) of some rows, which one call computes.

    Attributes:
        start, stop: columns of the batch.
        members: for each row of the call, the rows of the batch that it stands for. Only the first one's
            tokens are computed.
        parent: number of the segment after whose states this one begins; None at the rows' beginnings.
        parent_rows: for each row of the call, the row of the parent's call that it goes on from.
    """

    start: int
    stop: int
    members: list[list[int]]
    parent: int | None = None
    parent_rows: list[int] = []  # noqa: RUF012 - never changed

    @property
    def rows(self) -> list[int]:
        """The batch's rows whose tokens the call computes."""
        return [members[0] for members in self.members]

    @property
    def tokens(self) -> int:
        """Number of tokens that the call computes."""
        return len(self.members) * (self.stop - self.start)

    @property
    def is_shared(self) -> bool:
        return any(len(members) > 1 for members in self.members)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch, as far as they decide which tokens are shared.

    Attributes:
        ids: numbers that are equal where the tokens are.
        targets: None if there is no loss.
        starts: first token of each row after padding at the left.
        stops: number of tokens up to the last one that is no padding, of each row.
        ends: number of tokens of each row.
        least_rest: tokens that must be left of each row after a shared beginning.
    """

    ids: Take
    targets: Take | None
    starts: Sequence[int]
    stops: Sequence[int]
    ends: Sequence[int]
    least_rest: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows, padding at the left left out."""
        return sum(self.ends) - sum(self.starts)

    def agreement(self, rows: Sequence[int], start: int) -> int:
        """Return the number of tokens from `start` on that may be computed once for all these rows.

        A token's target counts, too: rows may ignore it, but may not have two different ones. So the last
        common token, which predicts each row's own next one, is left to the rows."""
        stop = min(self.stops[row] for row in rows) - self.least_rest
        if stop <= start:
            return 0
        ids = self.ids(rows, start, stop)
        agrees = (ids == ids[:1]).all(0)
        if self.targets is not None:
            targets = self.targets(rows, start, stop)
            agrees &= ((targets == targets.amax(0)) | (targets == IGNORE_INDEX)).all(0)
        return int(agrees.long().cumprod(0).sum())

    def groups(self, rows: Sequence[int], start: int) -> list[list[int]]:
        """Return rows that have their next `MIN_SHARED_TOKENS` tokens in common, in lists of two or more."""
        tokens = MIN_SHARED_TOKENS
        long_enough = [row for row in rows if self.stops[row] - start >= tokens + self.least_rest]
        if len(long_enough) < 2:
            return []
        beginnings = self.ids(long_enough, start, start + tokens)
        numbers = torch.unique(beginnings, dim=0, return_inverse=True)[1].tolist()
        rows_by_number = defaultdict[int, list[int]](list)
        for row, number in zip(long_enough, numbers, strict=True):
            rows_by_number[number].append(row)
        return [group for group in rows_by_number.values() if len(group) > 1]


def plan(rows: Rows) -> list[Segment] | None:
    """Return the segments of a batch, parents before their branches; None if too few tokens are shared.

    Rows of all segments without a branch after them are the batch's rows, each once."""
    segments: list[Segment] = []
    rows_by_start = defaultdict[int, list[int]](list)
    for row, start in enumerate(rows.starts):
        rows_by_start[start].append(row)
    for start, members in rows_by_start.items():
        _branch(rows, [members], start, None, segments)
    saved = rows.tokens - sum(segment.tokens for segment in segments)
    repays_calls = saved >= MIN_SHARED_TOKENS * (len(segments) - 1)
    return segments if repays_calls and saved >= MIN_SAVED_SHARE * rows.tokens else None


def _branch(
    rows: Rows, nodes: Sequence[list[int]], start: int, parent: int | None, segments: list[Segment]
) -> None:
    """Append the segments that begin at `start`, and the branches after them.

    Args:
        nodes: for each row of the parent's call, the rows of the batch that go on from it.
    """
    single_rows: list[tuple[int, int]] = []  # (row, its parent's row)
    shared_by_stop = defaultdict[int, list[tuple[list[int], int]]](list)
    for parent_row, members in enumerate(nodes):
        grouped_rows: set[int] = set()
        for group in rows.groups(members, start):
            tokens = rows.agreement(group, start)
            if tokens >= MIN_SHARED_TOKENS:
                shared_by_stop[start + tokens].append((group, parent_row))
                grouped_rows.update(group)
        single_rows += [(row, parent_row) for row in members if row not in grouped_rows]
    singles_by_end = defaultdict[int, list[tuple[int, int]]](list)
    for row, parent_row in single_rows:
        singles_by_end[rows.ends[row]].append((row, parent_row))
    for end, pairs in singles_by_end.items():
        singles, parent_rows = [[row] for row, _ in pairs], [number for _, number in pairs]
        segments.append(Segment(start, end, singles, parent, parent_rows))
    for stop, group_pairs in sorted(shared_by_stop.items()):
        groups, parent_rows = [group for group, _ in group_pairs], [number for _, number in group_pairs]
        segments.append(Segment(start, stop, groups, parent, parent_rows))
        _branch(rows, groups, stop, len(segments) - 1, segments)


def spans_of(starts: Sequence[Sequence[int]], seqlen: int) -> list[range]:
    """Return the tokens of each document, counted through all rows of a batch.

    Args:
        starts: first tokens of the documents of each row, 0 first.
        seqlen: number of tokens of each row.
    """
    return [
        range(row * seqlen + start, row * seqlen + stop)
        for row, row_starts in enumerate(starts)
        for start, stop in itertools.pairwise((*row_starts, seqlen))
    ]


def take_from(tensor: Tensor, spans: Sequence[range], filler: int = 0) -> Take:
    """Return the function that reads a tensor (batch, seqlen) by documents, which are its rows then.

    Args:
        filler: stands behind the end of a document that is shorter than the others.
    """
    flat = tensor.flatten()

    def take(rows: Sequence[int], start: int, stop: int) -> Tensor:
        pieces = [
            flat[spans[row].start + start : min(spans[row].start + stop, spans[row].stop)] for row in rows
        ]
        length = stop - start
        return torch.stack([nn.functional.pad(t, (0, length - len(t)), value=filler) for t in pieces])

    return take


def targets_of(segment: Segment, targets: Take) -> tuple[Tensor, Tensor | None]:
    """Return a segment's shifted targets and how often each counts, (rows, tokens) each.

    Args:
        targets: as in `Rows`.

    Returns:
        The weights are None if each target counts once.
    """
    if not segment.is_shared:
        return targets(segment.rows, segment.start, segment.stop), None
    by_member = [targets(members, segment.start, segment.stop) for members in segment.members]
    merged = torch.stack([t.amax(0) for t in by_member])
    return merged, torch.stack([(t != IGNORE_INDEX).sum(0) for t in by_member])


class End(NamedTuple):
    """The results of a segment's call that the segments after it begin with.

    Attributes:
        states: after its last token. If segments follow, keys and values have no tokens there: they stay in
            the slabs.
        slabs: its keys and values, by stage.
    """

    states: list[State]
    slabs: Mapping[int, Sequence[Slab]]


class Beginning(NamedTuple):
    """The states, keys and values that a segment's call begins with.

    Attributes:
        states: before its first token, a row for each of its own: copies, where rows go on from the same one.
        prefix: keys and values of all tokens before it, stored once for rows that go on from the same one.
    """

    states: list[State]
    prefix: Prefix


class AfterPrefix(Distribution):
    """A single process whose sequences go on from tokens that an earlier step has stored.

    Args:
        prefix: these tokens, which are not in the states with which the batch begins.
    """

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix

    def connections(self, grid: Grid) -> Connections:
        return Connections(exchange=BetweenTiles(self.prefix))


def run_segments(
    segments: Sequence[Segment],
    run: Callable[[int, Segment, Beginning | None], End],
    return_states: bool = True,
) -> dict[int, list[State]]:
    """Run all segments, each from the branched states of its parent.

    Args:
        run: computes a segment by its number. None stands for the beginning of a sequence.
        return_states: false frees the states after a segment without branches at once: short documents have
            as many as rows.

    Returns:
        The states after each segment without branches, by the segment's number; none of them without
        `return_states`.
    """
    ends: dict[int, End] = {}
    last_child = {segment.parent: number for number, segment in enumerate(segments)}
    for number, segment in enumerate(segments):
        beginning = None
        if (parent := segment.parent) is not None:
            states, rows = ends[parent].states, segment.parent_rows
            branched = [tuple(take_rows(s, rows) for s in state) for state in states]
            beginning = Beginning(branched, Prefix(ends[parent].slabs, rows))
            if last_child[parent] == number:
                del ends[parent]
        end = run(number, segment, beginning)
        if return_states or number in last_child:
            ends[number] = end
        del end
    return {number: end.states for number, end in ends.items()}


def states_in_batch_order(segments: Sequence[Segment], final: dict[int, list[State]]) -> list[State]:
    """Return the states after all rows, from `run_segments`, in the order of the batch's rows."""
    return [
        tuple(
            _in_batch_order(segments, dict(zip(final, tensors, strict=True)))
            for tensors in zip(*states, strict=True)
        )
        for states in zip(*final.values(), strict=True)
    ]


def _in_batch_order(segments: Sequence[Segment], pieces: dict[int, Tensor]) -> Tensor:
    rows = [row for number in pieces for row in segments[number].rows]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return take_rows(torch.cat(list(pieces.values())), order)


def tokens_in_batch_order(
    segments: Sequence[Segment], pieces: Sequence[Tensor], lengths: Sequence[int]
) -> Tensor:
    """Return what has a value for each token, (tokens of all rows, …), from that of each segment.

    Tokens that no segment has computed, padding at the left, are zero. In the backward the cotangents of a
    token that stands for several rows are summed.

    Args:
        pieces: (rows, tokens, …) of each segment.
        lengths: number of tokens of each row.
    """
    pieces_by_row = defaultdict[int, list[Tensor]](list)
    for segment, piece in zip(segments, pieces, strict=True):
        for values, members in zip(piece, segment.members, strict=True):
            for row in members:
                pieces_by_row[row].append(values[: lengths[row] - segment.start])
    all_pieces = list[Tensor]()  # joined at once: a second copy of all tokens would take as much memory
    for row, length in enumerate(lengths):
        padding = length - sum(len(values) for values in pieces_by_row[row])
        all_pieces += [pieces[0].new_zeros(padding, *pieces[0].shape[2:]), *pieces_by_row[row]]
    return torch.cat(all_pieces)


_announced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def announce(model: nn.Module, segments: Sequence[Segment], tokens: int) -> None:
    """Log once for each model how many of a batch's tokens are computed, at the level INFO.

    Args:
        tokens: of the batch, padding at the left left out.
    """
    if model in _announced or not is_heard():
        return
    _announced.add(model)
    computed = sum(segment.tokens for segment in segments)
    LOGGER.info(
        f"{type(model).__name__}: rows that begin with the same tokens are computed once, {computed:,} of "
        f"{tokens:,} tokens in this batch; Exact(share_prefixes=False) computes each row"
    )
