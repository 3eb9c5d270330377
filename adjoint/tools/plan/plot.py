"""A step as a Gantt chart: a row a worker, a bar a tile, gaps where a worker waits. Where tiles are too short
to be seen, colours mix by the share of time that each kind takes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adjoint.files import new_figure, save_figure
from adjoint.plan.budget_curve import CurvePoint
from adjoint.plan.simulate import Span, Timeline

NAMES = {
    "forward": "forward",
    "linearize": "forward and linearize",
    "recompute": "recompute",
    "backward": "backward",
    "windowed": "windowed vjp",
}
COLOURS = dict(zip(NAMES, ("tab:blue", "tab:cyan", "tab:purple", "tab:orange", "tab:green"), strict=True))
COLUMNS = 2000  # more than are drawn: to scale an image down does not alias


def plot_timeline(timeline: Timeline, labels: Sequence[str], path: str | Path, title: str = "") -> None:
    """Draw a simulated step; idle time is white, numbers are chunks (of a windowed vjp: layer·chunk).

    Args:
        labels: of each worker, such as "shard 0, layers 0-5".
        path: the picture, replaced in one piece; its suffix gives the format.
        title: a line above the picture.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    workers, seconds = len(timeline.busy), timeline.seconds
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    figure = new_figure(11, min(max(1.6 + 0.42 * workers, 2.6), 16))
    axes = figure.add_subplot()
    image, kinds = np.ones((workers, COLUMNS, 3)), set()
    for (worker, kind), share in shares_of(timeline, COLUMNS).items():
        image[worker] -= share[:, None] * (1 - np.array(to_rgb(COLOURS[kind])))
        kinds.add(kind)
    end = seconds * scale
    image = image.clip(0, 1).repeat(1 + 600 // workers, axis=0)  # else rows would be blended, too
    axes.imshow(image, aspect="auto", extent=(0, end, workers - 0.5, -0.5))
    axes.hlines(np.arange(workers - 1) + 0.5, 0, end, color="white", linewidth=60 / (workers + 20))
    for bar in joined_spans(timeline.spans, seconds / 2000) if workers <= 24 else ():
        text = (
            f"{bar.tile.stage - 1}·{bar.tile.chunk}" if bar.tile.kind == "windowed" else str(bar.tile.chunk)
        )
        if bar.stop - bar.start > seconds * 0.0065 * (len(text) + 0.3):  # there is room for it
            at = {"color": "white", "ha": "center", "va": "center", "fontsize": 7.5}
            axes.text((bar.start + bar.stop) / 2 * scale, bar.worker, text, **at)
            axes.vlines(bar.start * scale, bar.worker - 0.5, bar.worker + 0.5, color="white", lw=0.8)
    shown = range(0, workers, -(-workers // 40))
    axes.set_yticks(list(shown), [labels[i] for i in shown], fontsize=8 if workers > 16 else 9)
    axes.set_xlabel(f"time ({unit})")
    handles = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in NAMES if kind in kinds]
    note = f"idle: {timeline.idle_share:.1%} of all workers' time"
    handles.append(Patch(facecolor="white", edgecolor="tab:gray", label=note))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.spines[:].set_visible(False)
    save_figure(figure, path)


def plot_curve(curve: Sequence[CurvePoint], path: str | Path, title: str = "") -> None:
    """Draw the seconds of a step against its memory: `Exact` as a line, backpropagation as points."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    chunked = [point for point in curve if point.way.startswith("Exact")]
    axes.plot(*_memory_and_seconds(chunked), "o-", label="Exact, without and with a budget")
    for point, marker in zip((p for p in curve if p not in chunked), "s^", strict=False):
        axes.plot(*_memory_and_seconds([point]), marker, label=point.way)
    axes.set(xlabel="memory on the device (GB)", ylabel="seconds a step", title=title)
    axes.legend(frameon=False)
    save_figure(figure, path)


def _memory_and_seconds(points: Sequence[CurvePoint]) -> tuple[list[float], list[float]]:
    return [point.memory_bytes / 1e9 for point in points], [point.seconds for point in points]


def joined_spans(spans: Sequence[Span], gap: float) -> list[Span]:
    """Tiles as they can be drawn: a worker's layers on one chunk as one, if no more than `gap` seconds lie
    between them."""

    def name(span: Span) -> tuple[str, int, int]:
        return span.tile.kind, span.tile.chunk, span.tile.stage if span.tile.kind == "windowed" else 0

    drawn: list[Span] = []
    latest: dict[int, int] = {}  # of each worker, where in `drawn` its last bar is
    for span in spans:
        at = latest.get(span.worker)
        if span.stop == span.start:
            continue
        if at is not None and span.start - drawn[at].stop <= gap and name(span) == name(drawn[at]):
            drawn[at] = dataclasses.replace(drawn[at], stop=span.stop)
        else:
            latest[span.worker] = len(drawn)
            drawn.append(span)
    return drawn


def shares_of(timeline: Timeline, columns: int) -> dict[tuple[int, str], np.ndarray]:
    """Return the share of each column's time, (columns,), that each worker spends on each kind of tile."""
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.worker, span.tile.kind].append((span.start, span.stop))
    edges, shares = np.linspace(0, timeline.seconds, columns + 1), {}
    for key, busy_times in spans.items():
        times = np.array(busy_times)
        done = np.diff(times).cumsum()  # so many seconds at each stop, and as many at the next start
        worked = np.stack([np.insert(done, 0, 0)[:-1], done], axis=1)
        shares[key] = np.diff(np.interp(edges, times.ravel(), worked.ravel())) * columns / timeline.seconds
    return shares
