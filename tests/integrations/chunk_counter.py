"""Counts the chunks of wrapped models: in a test, or in a program of somebody else's.

    python -m tests.integrations.chunk_counter MODULE ARGUMENTS

runs a module as `python -m MODULE ARGUMENTS` does, and prints the count when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import runpy
import sys
from collections.abc import Iterator
from typing import Any

from adjoint.hf.randomness import ChunkRandomness

LINE = "chunks computed:"


class ChunkCounter:
    """The number of chunks that wrapped models have computed, those of the comparison on first use aside.

    Attributes:
        chunks: forward and recomputation each count.
    """

    def __init__(self) -> None:
        self.chunks = 0


@contextlib.contextmanager
def count_chunks() -> Iterator[ChunkCounter]:
    """Count chunks for the time of the context."""
    counter, at_chunk = ChunkCounter(), ChunkRandomness.at_chunk

    def counting(self: ChunkRandomness, *arguments: Any) -> Any:
        counter.chunks += 1
        return at_chunk(self, *arguments)

    ChunkRandomness.at_chunk = counting  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        ChunkRandomness.at_chunk = at_chunk  # type: ignore[method-assign]


def main() -> None:
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    with count_chunks() as counter:
        atexit.register(lambda: print(LINE, counter.chunks, flush=True))
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
