"""A step as a Gantt chart: a row a worker, a bar a tile, gaps where a worker waits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.cluster.simulate import Span, Timeline
from adjoint.files import save_figure

COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "head": "tab:purple",
    "task": "tab:green",
    "embedding": "tab:brown",
}
SIGNS = {"forward": "▸", "backward": "◂", "head": "h", "task": "■", "embedding": "e"}


def plot_timeline(timeline: Timeline, labels: Sequence[str], path: str | Path, title: str = "") -> None:
    """Draws a simulated step; idle time is white.

    Args:
        timeline: with its spans.
        labels: of each worker, such as "shard 0, layers 0-5".
        path: the picture, replaced in one piece; its suffix gives the format.
        title: a line above the picture.

    Raises:
        ValueError: the timeline has no spans.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not timeline.spans:
        raise ValueError("nothing to draw: simulate with spans=True")
    workers, (unit, scale) = len(timeline.busy), _unit(timeline.seconds)
    height = min(max(1.6 + 0.42 * workers, 2.6), 16)
    figure = Figure(figsize=(11, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    narrow = timeline.seconds / 250  # some pixels: lines between shorter bars would cover them
    drawn = joined_spans(timeline.spans, narrow, timeline.seconds / 2000)
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in drawn:
        key = span.worker, span.run.kind
        rows.setdefault(key, []).append((span.start * scale, (span.stop - span.start) * scale))
    for (worker, kind), bars in rows.items():
        lines = [0.5 if length > narrow * scale else 0.0 for _, length in bars]
        axes.broken_barh(
            bars,
            (worker - 0.4, 0.8),
            facecolors=COLOURS.get(kind, "tab:gray"),
            edgecolors="white",
            linewidths=lines,
        )
    _label(axes, timeline.spans, scale, timeline.seconds * scale, workers)
    axes.set_xlim(0, timeline.seconds * scale)
    axes.set_ylim(workers - 0.5, -0.5)  # the first worker on top
    shown = range(0, workers, -(-workers // 40))
    axes.set_yticks(list(shown), [labels[i] for i in shown], fontsize=8 if workers > 16 else 9)
    axes.set_xlabel(f"time ({unit})")
    kinds = [kind for kind in COLOURS if any(k == kind for _, k in rows)]
    handles = [Patch(facecolor=COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="tab:gray", label=caption(timeline)))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def caption(timeline: Timeline) -> str:
    """The share of time that workers wait, in words."""
    return f"idle: {timeline.idle_share:.1%} of all workers' time"


def joined_spans(spans: Sequence[Span], narrow: float, gap: float) -> list[Span]:
    """Tiles as they can be drawn: where those of a worker and kind are mostly shorter than `narrow` seconds,
    those with no more than `gap` between them as one."""
    lengths: dict[tuple[int, str], list[float]] = {}
    for span in spans:
        lengths.setdefault((span.worker, span.run.kind), []).append(span.stop - span.start)
    short = {key for key, found in lengths.items() if statistics.median(found) < narrow}
    drawn: list[Span] = []
    latest: dict[int, int] = {}  # of each worker, where in `drawn` its last bar is
    for span in spans:
        at = latest.get(span.worker)
        last = None if at is None else drawn[at]
        same = last is not None and last.run.kind == span.run.kind and span.start - last.stop <= gap
        if at is not None and last is not None and same and (span.worker, span.run.kind) in short:
            drawn[at] = Span(span.worker, last.start, span.stop, last.run)
        else:
            latest[span.worker] = len(drawn)
            drawn.append(span)
    return drawn


def text_timeline(timeline: Timeline, labels: Sequence[str], width: int = 100, most: int = 64) -> str:
    """The same in characters: a row a worker, a column the kind of tile that took most of its time.

    Args:
        width: columns in all. most: rows; of more workers evenly chosen ones are shown.
    """
    workers = len(timeline.busy)
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 1, 20)
    shown = range(0, workers, -(-workers // most))
    each = timeline.seconds / columns if timeline.seconds else 1.0
    shares: dict[int, list[dict[str, float]]] = {w: [{} for _ in range(columns)] for w in shown}
    for span in timeline.spans:
        if span.worker not in shares or span.stop <= span.start:
            continue
        for column in range(int(span.start / each), min(int(span.stop / each) + 1, columns)):
            part = min(span.stop, (column + 1) * each) - max(span.start, column * each)
            cell = shares[span.worker][column]
            cell[span.run.kind] = cell.get(span.run.kind, 0.0) + max(part, 0.0)
    rows = ["".join(_sign(cell, each) for cell in shares[w]) for w in shown]
    lines = [f"{labels[w]:<{margin}}{row}".rstrip() for w, row in zip(shown, rows, strict=True)]
    kinds = {span.run.kind for span in timeline.spans}
    unit, scale = _unit(timeline.seconds)
    end = f"{timeline.seconds * scale:.3g} {unit}"
    lines.append(" " * margin + "0" + end.rjust(columns - 1))
    legend = [f"{SIGNS[kind]} {kind}" for kind in SIGNS if kind in kinds]
    return "\n".join([*lines, f"{', '.join(legend)}; {caption(timeline)}"])


def _sign(cell: dict[str, float], each: float) -> str:
    """Of the kind that took most of a column, a blank where waiting took more than all of them."""
    if sum(cell.values()) < each / 2:
        return " "
    return SIGNS.get(max(cell, key=lambda kind: cell[kind]), "?")


def _label(axes: Any, spans: Sequence[Span], scale: float, whole: float, workers: int) -> None:
    """A chunk's number on each bar that is wide and high enough for it; a task's layer before it."""
    if workers > 24:
        return
    for span in spans:
        run = span.run
        text = str(run.chunk) if run.layer is None else f"{run.layer}·{run.chunk}"
        length = (span.stop - span.start) * scale
        if length > whole * 0.0065 * (len(text) + 0.3):
            middle = (span.start + span.stop) / 2 * scale
            axes.text(middle, span.worker, text, ha="center", va="center", color="white", fontsize=7.5)


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6
