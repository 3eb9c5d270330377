"""Binomial checkpoints: the backward of many chunks from few stored states, in the fewest recomputations.

The backward takes chunks from the last to the first and needs the state before each. With `states` places to
store them, some states are stored and the others computed again from the nearest one stored before. How far
apart they are stored is the binomial schedule (Griewank 1992, "Achieving logarithmic growth of temporal and
spatial complexity in reverse automatic differentiation"; Griewank & Walther 2000, Revolve, ACM TOMS 799). Let
β(s, r) = (s + r choose s): with s states and no chunk computed again more than r times, β(s, r) chunks can be
reversed. With the smallest such r, the backward of n chunks computes

    r · n − β(s + 1, r − 1)

chunks again, each chunk's tape included, and no schedule computes fewer.

Here are the numbers alone; `schedule` makes actions of them. A place is free again once the chunk after its
state has been reversed. The state before the sequence takes no place, nor does one at a document's start,
where states are zero.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence


def reversible_chunks(states: int, repeats: int) -> int:
    """Return β(states, repeats): the most chunks that can be reversed.

    Args:
        states: places for states. repeats: the most times that a chunk may be computed again.
    """
    return math.comb(states + repeats, states) if repeats >= 0 else 0


def most_repeats(chunks: int, states: int) -> int:
    """Return how often the chunk that is computed again most often is, in the best schedule."""
    repeats = 0
    while reversible_chunks(states, repeats) < chunks:
        repeats += 1
    return repeats


def recomputed_chunks(chunks: int, states: int) -> int:
    """Return the number of chunks that the backward of `chunks` chunks computes again.

    The forward has kept the last chunk's tape, and the states that the backward needs first."""
    repeats = most_repeats(chunks, states)
    return repeats * chunks - reversible_chunks(states + 1, repeats - 1)


def distance(chunks: int, states: int) -> int:
    """Return how many chunks after a stored state the next state is stored.

    Of the optimal distances it is the shortest: then the first states to be stored take all places.

    Args:
        chunks: from the stored state to the end, 2 or more. states: free places, 1 or more.
    """
    repeats = most_repeats(chunks, states)
    return max(1, reversible_chunks(states, repeats - 2), chunks - reversible_chunks(states - 1, repeats))


def first_stored(start: int, stop: int, states: int) -> list[int]:
    """Return the chunks before which the forward stores the state, for the backward of [start, stop)."""
    stored: list[int] = []
    while stop - start > 1:
        start += distance(stop - start, states - len(stored))
        stored.append(start)
    return stored


def reversal(
    start: int, stop: int, states: int, stored: Sequence[int] = ()
) -> Iterator[tuple[int, list[range]]]:
    """Yield the chunks of [start, stop), the last one first, each with runs to compute again before it.

    A run of chunks begins with a stored state, and the state after it is stored.

    Args:
        states: places for states, besides the one before `start`.
        stored: chunks before which the state is stored at the beginning: the first ones of `first_stored`.
    """
    places = [start, *stored]  # chunks before which the state is stored
    for chunk in reversed(range(start, stop)):
        while places[-1] > chunk:
            places.pop()
        runs: list[range] = []
        while (last := places[-1]) < chunk:
            places.append(last + distance(chunk + 1 - last, states + 1 - len(places)))
            runs.append(range(last, places[-1]))
        yield chunk, runs


@dataclasses.dataclass(frozen=True)
class Reversal:
    """The backward's way through a sequence of documents, each of which is reversed by itself.

    The forward stores states for the last document first, and for those before it as far as places are left.

    Args:
        starts: first chunks of the documents, rising, from 0.
        chunks: number of chunks. states: places for states.
        taped: the first chunk whose tape the forward keeps, or `chunks` if it keeps none; all later tapes are
            kept too, with their states in places of their own. None: no forward has stored anything.
    """

    starts: Sequence[int]
    chunks: int
    states: int
    taped: int | None

    def documents(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (first chunk, end, chunks before which the forward stores the state), the last one first."""
        left, end = self.states, self.chunks
        if self.taped is None:
            left = 0
        else:  # the state of the first tape is stored like the others
            end = min(end, self.taped + 1)
        for start, stop in reversed([*itertools.pairwise([*self.starts, self.chunks])]):
            if start < end:
                stored = first_stored(start, min(stop, end), self.states)[:left]
                left -= len(stored)
                yield start, min(stop, end), stored

    def stored(self) -> set[int]:
        """Return the chunks before which the forward stores the state."""
        return {chunk for _, _, stored in self.documents() for chunk in stored}

    def __iter__(self) -> Iterator[tuple[int, list[range]]]:
        """Yield the chunks from the last to the first, each with the runs to compute again before it."""
        for document in self.documents():
            yield from reversal(*document[:2], self.states, document[2])
