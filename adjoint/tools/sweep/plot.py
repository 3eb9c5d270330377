"""The picture of a sweep: error of the gradient against window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adjoint.files import save_figure
from adjoint.tools.sweep.report import (
    SMALL,
    error_text,
    heading,
    layers_of,
    smallest_window,
    span,
    swept,
    window_text,
    worst,
)

_FLOOR = 1e-6  # smaller errors are drawn here: the exact ends must not press the rest together
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink")


def plot_sweep(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw relative error against window, both logarithmic: a line a method, its layers' spread as a band.

    "full", the window over the whole sequence, is the right end. A ring marks the smallest window from which
    on the error stays below 1%. The dashed line is the kind of parameter that is furthest off.

    Args:
        result: what sweep.json holds.
        path: the picture, replaced in one piece; its suffix gives the format.

    Raises:
        ValueError: no method in it has a window.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    methods, settings = swept(result), result["settings"]
    if not methods:
        raise ValueError("nothing to draw: no row has a window")
    seqlen = settings["seqlen"]
    figure = Figure(figsize=(9, 5.2), dpi=130, layout="constrained")  # no pyplot: nothing global, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.1, y=0.08)
    ends: list[tuple[float, str, str]] = []
    ticks: dict[int, str] = {}
    for name, colour in zip(methods, _COLOURS, strict=False):
        rows = [r for r in result["rows"] if r["method"] == name and r["relative_error"] is not None]
        for row in (r for r in rows if r["window"] == "auto"):
            _draw_auto(axes, row, colour)
        rows = [r for r in rows if r["window"] != "auto"]
        if rows:
            at = [seqlen if row["window"] is None else row["window"] for row in rows]
            _draw_method(axes, rows, at, name, colour)
            ends.append((rows[-1]["relative_error"], name, colour))
            ticks |= {x: heading(row["window"]) for x, row in zip(at, rows, strict=True)}
    axes.axhline(SMALL, color="tab:gray", linestyle=":", linewidth=1.2, zorder=2)
    _label_ends(axes, ends, max(ticks, default=seqlen))
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: ticks.get(round(x), "")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y * 100:.6g}%" if y > 1.5 * _FLOOR else f"≤ {y * 100:.6g}%")
    )
    axes.set_xlabel(f"window: tokens that a layer's recurrence reaches back (full: {seqlen:,})")
    axes.set_ylabel(f"relative error of the gradient, against {settings['baseline']}")
    weights = "fresh" if settings["weights"] == "fresh" else "trained"
    axes.set_title(
        f"How long a window? {weights} model, {settings['model']['n_layer']} layers, {seqlen:,} tokens, "
        f"{settings['batches']} batches\nline: all parameters; band: the layers, nearest to furthest; "
        "dashed: the kind of parameter furthest off",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _draw_method(
    axes: Any, rows: Sequence[Mapping[str, Any]], at: Sequence[int], name: str, colour: str
) -> None:
    """A method's line and band; where a window is long enough, also its kind furthest off, and rings."""
    error = [_height(row["relative_error"]) for row in rows]
    layers = [[_height(v["relative_error"]) for v in layers_of(row).values()] for row in rows]
    axes.fill_between(
        at, list(map(min, layers)), list(map(max, layers)), color=colour, alpha=0.13, linewidth=0, zorder=1
    )
    axes.plot(at, error, "o-", color=colour, linewidth=2.2, markersize=4.5, zorder=3)
    if not smallest_window(rows, name)[1]:
        return  # the error is not a matter of the window
    kinds, middle = [worst(row["kind"]) for row in rows], (len(rows) - 1) // 2
    furthest = [_height(value) for _, value in kinds]
    axes.plot(at, furthest, "--", color=colour, linewidth=1.3, zorder=3)
    _say(axes, kinds[middle][0], at[middle], furthest[middle], (4, 7), colour)
    for what, every_kind, height in (
        ("every kind of parameter", True, furthest),
        ("all together", False, error),
    ):
        window, found = smallest_window(rows, name, every_kind=every_kind)
        if not found:
            continue
        index = [row["window"] for row in rows].index(window)
        x, y, width = at[index], height[index], 1 if every_kind else 2
        axes.plot(
            x, y, "o", color=colour, markersize=11, markerfacecolor="none", markeredgewidth=width, zorder=4
        )
        text = f"{what} below {SMALL:.0%}:\n{window_text(window)}"
        if index == 0:
            _say(axes, text, x, y, (4, -26), colour)
        else:
            _say(axes, text, x, y, (-10, -14 if y > 10 * _FLOOR else 14), colour, ha="right")


def _draw_auto(axes: Any, row: Mapping[str, Any], colour: str) -> None:
    """A star at the longest window picked, a line to the shortest."""
    height, windows = _height(row["relative_error"]), row["windows"]
    axes.plot([min(windows), max(windows)], [height] * 2, "-", color=colour, linewidth=1.5, zorder=3)
    axes.plot(max(windows), height, "*", color=colour, markersize=15, markeredgecolor="white", zorder=6)
    _say(axes, f"auto: {span(windows)}", max(windows), height, (-8, -11), colour, ha="right")


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], x: int) -> None:
    """Names each line at its right end, labels that would overlap pushed apart."""
    bottom, top = map(math.log, axes.get_ylim())
    lowest = -math.inf
    for error, name, colour in sorted(ends):
        level = max(math.log(_height(error)), lowest)
        lowest = level + 0.1 * (top - bottom)
        text = f"{name}\n{error_text(error)} at the end"
        _say(axes, text, x, math.exp(level), (12, 0), colour, fontsize=9.5, fontweight="bold", zorder=3)


def _say(axes: Any, text: str, x: float, y: float, offset: tuple[int, int], colour: str, **how: Any) -> None:
    """Text beside a point, offset by so many points of print."""
    how = {"fontsize": 8.5, "zorder": 5, "va": "center", "annotation_clip": False, **how}
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=colour, **how)


def _height(error: float | None) -> float:
    """An error on the axis; what is not finite is as far off as can be."""
    return 1.0 if error is None else max(error, _FLOOR)
