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

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence


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
    start: int, stop: int, states: int, stored: Iterable[int] = ()
) -> Iterator[tuple[int, list[int]]]:
    """Yield the chunks of [start, stop) from the last to the first, each with those computed again before it.

    Args:
        states: places for states, besides the one before `start`.
        stored: chunks before which the state is stored at the beginning: the first ones of `first_stored`.
    """
    places = [start, *stored]  # chunks before which the state is stored
    for chunk in reversed(range(start, stop)):
        while places[-1] > chunk:
            places.pop()
        again: list[int] = []
        while (last := places[-1]) < chunk:
            next_place = last + distance(chunk + 1 - last, states + 1 - len(places))
            again += range(last, next_place)
            places.append(next_place)
        yield chunk, again


def reversals(starts: Sequence[int], chunks: int, states: int, taped: int | None) -> dict[int, list[int]]:
    """Map each chunk to those computed again before it, for a sequence of documents.

    Each document is reversed by itself. The forward stores states for the last document first, and as far as
    places are left for those before it.

    Args:
        starts: first chunks of the documents, rising, from 0.
        taped: the first chunk whose tape the forward keeps, or `chunks` if it keeps none; all later tapes are
            kept too, with their states in places of their own. None: no forward has stored anything.
    """
    again: dict[int, list[int]] = {}
    left = 0 if taped is None else states
    end = chunks if taped is None else min(chunks, taped + 1)
    for start, stop in reversed([*itertools.pairwise([*starts, chunks])]):
        if start < end:
            stored = first_stored(start, min(stop, end), states)[:left]
            left -= len(stored)
            again |= reversal(start, min(stop, end), states, stored)
    return again
