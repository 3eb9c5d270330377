"""Estimated time of a comparison's points, from a pilot on short sequences and the points measured since."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

GRADIENTS = "gradients"  # the way of the point that compares gradients: a pass of each of these
COMPARED = ("transformers", "wrapped")


class TimeEstimate:
    """Predicted seconds of points.

    Time grows as a power of the length between the last two lengths of a way, and at least in proportion to
    it; with attention the power is 2 in the end, which short sequences do not show: predictions are then too
    low until longer points are measured.

    Args:
        passes: timed passes of a point.
        overhead: seconds of a point besides its passes: to start a process and make the model.
    """

    def __init__(self, passes: int, overhead: float) -> None:
        self.passes, self.overhead = passes, overhead
        self._seconds: dict[str, dict[int, float]] = defaultdict(dict)  # of a pass, by way and length

    def add(self, way: str, length: int, seconds: float) -> None:
        """Note the seconds of a pass."""
        self._seconds[way][length] = seconds

    def of_pass(self, way: str, length: int) -> float:
        """Predict the seconds of one forward + backward."""
        measured = sorted(self._seconds[way].items())
        if not measured:
            return 0.0
        last, seconds = measured[-1]
        power = 1.0
        if len(measured) > 1 and measured[-2][1] > 0 < seconds:
            before, faster = measured[-2]
            power = min(2.0, max(1.0, math.log(seconds / faster) / math.log(last / before)))
        return seconds * (length / last) ** power

    def of_point(self, way: str, length: int) -> float:
        """Predict the seconds that a point takes."""
        if way == GRADIENTS:
            return self.overhead + sum(self.of_pass(each, length) for each in COMPARED)
        return self.overhead + self.passes * self.of_pass(way, length)

    def of_points(self, points: Iterable[tuple[str, int]]) -> float:
        """Predict the seconds that several points, (way, length), take."""
        return sum(self.of_point(way, length) for way, length in points)
