"""Packed documents that are much shorter than a chunk: as rows of a few calls.

Layers of transformers do not know where documents begin, so chunks end there. A packed row of documents of
300 tokens would run in chunks of 300 tokens, each of which costs as many launches, reads of all weights and
additions to all gradients as one of thousands. But documents do not depend on each other: those of similar
length are laid side by side, as rows of one call that has as many tokens as a chunk. What fills a row up to
the length of the longest one has no targets, and no token before it sees it.

    A A A B B B B C C D D D        B B B B        C C
                                   A A A ·
                                   D D D ·
"""

from __future__ import annotations

from collections.abc import Sequence

from adjoint.engine.shared_prefix import Segment

MIN_SHARE_OF_LONGEST = 3 / 4  # of a call's rows, so that at most a quarter of it is filled up
MIN_TOKENS = 2  # of a call: transformers takes a single token for decoding


def side_by_side(lengths: Sequence[int], chunk_tokens: int) -> list[Segment]:
    """Return calls of all documents, each once: of short ones together, of the others one by one.

    Args:
        lengths: tokens of each document.
        chunk_tokens: tokens that a call of several documents may have.
    """
    segments: list[Segment] = []
    together: list[int] = []
    longest = 0
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        length = lengths[document]
        fits = (len(together) + 1) * longest <= chunk_tokens and length >= MIN_SHARE_OF_LONGEST * longest
        if together and not fits:
            segments.append(_segment(together, longest))
            together = []
        longest = longest if together else length
        together.append(document)
    return [*segments, _segment(together, longest)]


def _segment(documents: Sequence[int], longest: int) -> Segment:
    return Segment(0, max(longest, MIN_TOKENS), [[document] for document in documents])
