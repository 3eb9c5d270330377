"""A step as a Gantt chart: a row a worker, a bar a tile, gaps where a worker waits. Of tiles too short to be
seen, the share of time that each kind takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.engine.grid import KINDS
from adjoint.files import new_figure, save_figure
from adjoint.plan.simulate import Span, Timeline

NAMES = {**KINDS, "L": "forward and linearize"}
COLOURS = {"F": "tab:blue", "L": "tab:cyan", "R": "tab:purple", "B": "tab:orange", "W": "tab:green"}
SIGNS = {"F": "▸", "L": "▶", "R": "▹", "B": "◂", "W": "■"}


def plot_timeline(timeline: Timeline, labels: Sequence[str], path: str | Path, title: str = "") -> None:
    """Draws a simulated step; idle time is white.

    Args:
        labels: of each worker, such as "shard 0, layers 0-5".
        path: the picture, replaced in one piece; its suffix gives the format.
        title: a line above the picture.
    """
    from matplotlib.patches import Patch

    workers, (unit, scale) = len(timeline.busy), _unit(timeline.seconds)
    figure = new_figure(11, min(max(1.6 + 0.42 * workers, 2.6), 16))
    axes = figure.add_subplot()
    narrow = timeline.seconds / 250  # some pixels: lines between shorter bars would cover them
    rows: dict[tuple[int, str], list[Span]] = defaultdict(list)
    bars = joined_spans(timeline.spans, timeline.seconds / 2000)
    crowded = bool(bars) and statistics.median(bar.stop - bar.start for bar in bars) < narrow
    for span in bars:
        rows[span.worker, span.tile.kind].append(span)
    if crowded:  # bars of a pixel or two would be a pattern of the picture's own
        _draw_shares(axes, timeline, min(max(max(map(len, rows.values())) // 4, 20), 250), scale)
    for (worker, kind), bars in () if crowded else rows.items():
        axes.broken_barh(
            [(bar.start * scale, (bar.stop - bar.start) * scale) for bar in bars],
            (worker - 0.4, 0.8),
            facecolors=COLOURS[kind],
            edgecolors="white",
            linewidths=[0.5 if bar.stop - bar.start > narrow else 0.0 for bar in bars],
        )
        for bar in bars if workers <= 24 else ():
            # a chunk's number where there is room for it; before it the layer of a windowed vjp
            text = f"{bar.tile.stage - 1}·{bar.tile.chunk}" if kind == "W" else str(bar.tile.chunk)
            if bar.stop - bar.start > timeline.seconds * 0.0065 * (len(text) + 0.3):
                middle = (bar.start + bar.stop) / 2 * scale
                axes.text(middle, worker, text, ha="center", va="center", color="white", fontsize=7.5)
    axes.set_xlim(0, timeline.seconds * scale)
    axes.set_ylim(workers - 0.5, -0.5)  # the first worker on top
    shown = range(0, workers, -(-workers // 40))
    axes.set_yticks(list(shown), [labels[i] for i in shown], fontsize=8 if workers > 16 else 9)
    axes.set_xlabel(f"time ({unit})")
    handles = [
        Patch(facecolor=COLOURS[k], label=NAMES[k]) for k in NAMES if any(k == kind for _, kind in rows)
    ]
    note = caption(timeline) + "; heights are shares of time" * crowded
    handles.append(Patch(facecolor="white", edgecolor="tab:gray", label=note))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def caption(timeline: Timeline) -> str:
    """The share of time that workers wait, in words."""
    return f"idle: {timeline.idle_share:.1%} of all workers' time"


def joined_spans(spans: Sequence[Span], gap: float) -> list[Span]:
    """Tiles as they can be drawn: a worker's layers on one chunk as one, if no more than `gap` seconds lie
    between them."""

    def name(span: Span) -> tuple[str, int, int]:
        return span.tile.kind, span.tile.chunk, span.tile.stage if span.tile.kind == "W" else 0

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


def _draw_shares(axes: Any, timeline: Timeline, columns: int, scale: float) -> None:
    """Of each worker's row, in each of so many columns, as much in a kind's colour as it took of the time."""
    shares, each = shares_of(timeline, columns), timeline.seconds / columns
    edges = [column * each * scale for column in range(columns + 1)]
    for worker in range(len(timeline.busy)):
        below = [worker + 0.4] * columns
        for kind in NAMES:
            above = [y - 0.8 * shares[worker, c][kind] / each for c, y in enumerate(below)]
            drawn = ([*heights, heights[-1]] for heights in (below, above))
            axes.fill_between(edges, *drawn, step="post", color=COLOURS[kind], linewidth=0)
            below = above


def shares_of(timeline: Timeline, columns: int) -> dict[tuple[int, int], Counter[str]]:
    """Of each worker and column of the picture, the seconds of each kind of tile."""
    shares: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    each = timeline.seconds / columns if timeline.seconds else 1.0
    for span in timeline.spans:
        for column in range(int(span.start / each), min(int(span.stop / each) + 1, columns)):
            part = min(span.stop, (column + 1) * each) - max(span.start, column * each)
            shares[span.worker, column][span.tile.kind] += max(part, 0.0)  # type: ignore[assignment]
    return shares


def text_timeline(timeline: Timeline, labels: Sequence[str], width: int = 100, most: int = 64) -> str:
    """The same in characters: a row a worker, a column the kind of tile that took most of its time, a blank
    where waiting took more than all of them.

    Args:
        width: columns in all. most: rows; of more workers evenly chosen ones are shown.
    """
    workers = len(timeline.busy)
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 1, 20)
    shown = range(0, workers, -(-workers // most))
    each, shares = timeline.seconds / columns if timeline.seconds else 1.0, shares_of(timeline, columns)

    def sign(found: Counter[str]) -> str:
        return " " if found.total() < each / 2 else SIGNS[found.most_common(1)[0][0]]

    lines = [
        f"{labels[w]:<{margin}}{''.join(sign(shares[w, c]) for c in range(columns))}".rstrip() for w in shown
    ]
    unit, scale = _unit(timeline.seconds)
    lines.append(" " * margin + "0" + f"{timeline.seconds * scale:.3g} {unit}".rjust(columns - 1))
    kinds = {span.tile.kind for span in timeline.spans}
    legend = ", ".join(f"{SIGNS[kind]} {NAMES[kind]}" for kind in NAMES if kind in kinds)
    return "\n".join([*lines, f"{legend}; {caption(timeline)}"])


def _unit(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "µs", 1e6
