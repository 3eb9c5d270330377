"""Progress of long tasks on stderr: a bar on a terminal; in a pipe or a file, lines with the time left."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_EVERY_S = 10.0  # seconds between lines where there is no terminal; a shorter task writes none


def duration_text(seconds: float) -> str:
    """Return seconds in words, to two digits or so: 40 s, 12 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def has_bar() -> bool:
    """Whether progress is a bar: stderr is a terminal, and tqdm is installed."""
    return sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None


class Progress:
    """Context in which a task says how far it is.

    Args:
        task: its name, which begins each line.
        total: number of its units; None if it is not known yet.
        unit: a unit's name, in the singular; "B" for bytes.
        expected_s: seconds that the task is expected to take, for one without units.
        bar: further settings of tqdm's bar.
    """

    def __init__(
        self, task: str, total: int | None, unit: str, expected_s: float | None = None, **bar: object
    ) -> None:
        self.task, self.total, self.unit, self.expected_s, self.done = task, total, unit, expected_s, 0
        self._bar: tqdm[NoReturn] | None = None
        self._bar_settings, self._ended = bar, threading.Event()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def has_bar(self) -> bool:
        """Whether progress is shown as a bar."""
        return has_bar()

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self.has_bar():
            from tqdm import tqdm

            settings = {"desc": self.task, "unit": self.unit, "leave": False} | self._bar_settings
            self._bar = tqdm(total=self.total, **settings)  # type: ignore[call-overload]
        else:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            return
        self._ended.set()
        self._thread.join()

    def advance(self, units: int = 1) -> None:
        """Count units that are done."""
        self.done += units
        if self._bar is not None:
            self._bar.update(units)

    def update(self, done: int, total: int) -> None:
        """Set the number of units that are done, and of all."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total
        self.advance(done - self.done)

    def line(self, elapsed: float) -> str:
        """Return what is written after some seconds."""
        words = [f"{self.task}:"]
        left = None if self.expected_s is None else self.expected_s - elapsed
        if self.total and self.unit == "B":
            words.append(f"{self.done / self.total:.0%},")
        elif self.total:
            words.append(f"{self.done:,} of {self.total:,} {self.unit}s,")
        if self.total and self.done:
            left = elapsed * (self.total - self.done) / self.done
        words.append(duration_text(elapsed))
        if left is not None and left > 0:
            words[-1] += f", about {duration_text(left)} left"
        return " ".join(words)

    def _write_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(self.line(time.monotonic() - self._began), file=sys.stderr, flush=True)


class Waiting(Progress):
    """Context of a call without units, which writes lines on a terminal, too."""

    def __init__(self, task: str, expected_s: float | None = None) -> None:
        super().__init__(task, None, "", expected_s)

    def has_bar(self) -> bool:
        return False
