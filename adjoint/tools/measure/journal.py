"""Finished points, kept as they are finished; and how far a run of points has come."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from adjoint.data.progress import has_bar
from adjoint.files import write_atomically
from adjoint.tools.measure.process import Point


class Journal:
    """Finished points, a line of JSON each, under a first line with the fingerprint they belong to.

    A journal of another fingerprint is not continued: `discarded` says so, and the first point that is added
    takes the place of its own. Lines that cannot be read are left out, and their points measured again.
    """

    def __init__(self, path: Path, mark: str, *, fresh: bool = False) -> None:
        self.path, self.head = path, json.dumps({"fingerprint": mark})
        written = path.exists() and not fresh
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if written else [self.head]
        self.discarded = lines[:1] != [self.head]
        self.done: dict[str, Point] = {}
        for line in [] if self.discarded else lines[1:]:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if isinstance(entry["key"], str) and isinstance(entry["result"], dict):
                    self.done[entry["key"]] = entry["result"]
        path.parent.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def key(point: Mapping[str, object]) -> str:
        """Return the string that identifies a point, whatever the order of its fields."""
        return json.dumps(dict(point), sort_keys=True)

    def get(self, point: Mapping[str, object]) -> Point | None:
        """Return the result kept for `point`, or None."""
        return self.done.get(self.key(point))

    def add(self, point: Mapping[str, object], result: Point) -> None:
        """Keep `result` for `point`, on disk at once."""
        self.done[self.key(point)] = result
        entries = ({"key": key, "result": stored} for key, stored in self.done.items())
        write_atomically(self.path, "\n".join([self.head, *map(json.dumps, entries)]) + "\n")


def completed(measure: Callable[[], object]) -> bool:
    """Whether all was measured; False after Ctrl-C."""
    try:
        measure()
    except KeyboardInterrupt:
        print("interrupted; run the same command to continue", file=sys.stderr)
        return False
    return True


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], object]]:
    """Takes lines to be written, and how many points they begin; a bar where tqdm is there and stderr is a
    terminal."""
    if has_bar():
        from tqdm import tqdm

        with tqdm(total=total, unit="point", dynamic_ncols=True, smoothing=0) as bar:
            yield lambda words, new: bar.update(new) if new else bar.write(words, file=sys.stderr)
        return
    begun = 0

    def tell(words: str, new: int) -> None:
        nonlocal begun
        begun += new
        if words:
            print(f"[{begun}/{total}] {words}", file=sys.stderr, flush=True)

    yield tell
