"""Processes that each work on one point after another, for benchmarks that do not time anything.

Importing torch anew for every point would cost more than a short point does. Where memory or time is
measured, `common.run_child` is the right one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Point = dict[str, Any]
# Yields the number of each step done, at last the result.
Function = Callable[[Point], Iterator["int | dict[str, Any]"]]


def _work(function: Function, pipe: Connection, threads: int) -> None:
    """A worker: receives points until its pipe closes; sends what `_messages` yields for each."""
    import torch

    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            for message in _messages(function, pipe.recv()):
                pipe.send(message)


def _messages(function: Function, point: Point) -> Iterator[tuple[str, Any]]:
    """("step", n) for each step and ("result", …) at last: {"error": one line} if it raises."""
    try:
        for message in function(point):
            yield "step" if isinstance(message, int) else "result", message
    except Exception as error:
        what = (str(error).strip() or "no message").splitlines()[0]
        yield "result", {"error": f"{type(error).__name__}: {what}"}


class Workers:
    """`count` processes of `threads` threads each, ended by `close`.

    A point that raises, or whose process dies, gives {"error": one line}; the others go on.
    """

    def __init__(self, function: Function, count: int, threads: int) -> None:
        self.function, self.threads = function, threads
        self.context = multiprocessing.get_context("spawn")
        self.busy: dict[Connection, tuple[Any, Point]] = {}
        self.idle = [self._start() for _ in range(count)]

    def _start(self) -> tuple[Any, Connection]:
        here, there = self.context.Pipe()
        process = self.context.Process(target=_work, args=(self.function, there, self.threads), daemon=True)
        with _inherited(self.threads):
            process.start()
        there.close()  # or the end of the worker would not close the pipe
        return process, here

    def run(self, points: Sequence[Point]) -> Iterator[tuple[Point, str, Any]]:
        """Work on every point; yields (point, "step", n) and (point, "result", result) as they come."""
        waiting = list(reversed(points))
        while waiting or self.busy:
            while waiting and self.idle:
                process, pipe = self.idle.pop()
                self.busy[pipe] = process, waiting.pop()
                with contextlib.suppress(OSError):  # it died idle: reading says so, below
                    pipe.send(self.busy[pipe][1])
            ready = wait(list(self.busy))
            for pipe in [pipe for pipe in self.busy if pipe in ready]:
                process, point = self.busy[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    kind, content = "result", {"error": f"the process ended with code {process.exitcode}"}
                if kind == "result":
                    del self.busy[pipe]
                    self.idle.append((process, pipe) if process.is_alive() else self._start())
                yield point, kind, content

    def close(self) -> None:
        """End every process, at once."""
        processes = [process for process, _ in self.idle] + [process for process, _ in self.busy.values()]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextlib.contextmanager
def _inherited(threads: int) -> Iterator[None]:
    """What a process started here is to inherit: few threads that sleep while they wait, and no Ctrl-C.

    Ctrl-C reaches every process of a terminal; it is for the parent to end its workers.
    """
    wanted = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
