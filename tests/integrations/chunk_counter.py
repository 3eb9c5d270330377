"""Counts the chunks of wrapped models: in a test, or in a program of somebody else's.

    python -m tests.integrations.chunk_counter MODULE ARGUMENTS

runs a module as `python -m MODULE ARGUMENTS` does, and prints the Trainer's losses with all their digits (the
frameworks print four) and, when it ends, the count. Where the framework's command starts another process,
`report_until_exit` does it there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback, trainer

from adjoint.hf.chunk_context import ChunkRandomness

LINE = "chunks computed:"
LOSS = "loss of the step:"
_until_exit = contextlib.ExitStack()


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


class PrintLosses(TrainerCallback):
    """A callback that prints the loss of each step with all its digits."""

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "loss" in logs and os.environ.get("RANK", "0") == "0":
            print(LOSS, float(logs["loss"]), flush=True)


def report_until_exit() -> None:
    """Print losses from now on, and the number of chunks when the process ends."""
    trainer.DEFAULT_CALLBACKS.append(PrintLosses)
    counter = _until_exit.enter_context(count_chunks())
    atexit.register(lambda: print(LINE, counter.chunks, flush=True))


def main() -> None:
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    report_until_exit()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
