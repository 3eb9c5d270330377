"""The picture of a sweep: error of the gradient against window."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adjoint.tools.sweep.compare import smallest_window, worst
from adjoint.tools.sweep.report import TOLERANCE, error_text, layers_of, span, swept, window_text

_FLOOR = 1e-6  # smaller errors are drawn here: the exact ends must not press the rest together
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink")


def plot_sweep(result: dict[str, Any], path: str | Path) -> None:
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
            _draw_method(axes, rows, name, colour, seqlen)
            ends.append((rows[-1]["relative_error"], name, colour))
        ticks |= {_place(r["window"], seqlen): _tick(r["window"]) for r in rows}
    axes.axhline(TOLERANCE, color="tab:gray", linestyle=":", linewidth=1.2, zorder=2)
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
    path = Path(path)
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, format=path.suffix.removeprefix(".") or "png")
    os.replace(unfinished, path)


def _draw_method(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, colour: str, seqlen: int) -> None:
    at = [_place(row["window"], seqlen) for row in rows]
    error = [_height(row["relative_error"]) for row in rows]
    layers = [[_height(v["relative_error"]) for v in layers_of(row).values()] for row in rows]
    low, high = [min(e) for e in layers], [max(e) for e in layers]
    axes.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0, zorder=1)
    axes.plot(at, error, "o-", color=colour, linewidth=2.2, markersize=4.5, zorder=3)
    kinds = [worst(row["kind"]) for row in rows]
    if smallest_window(rows, name, TOLERANCE)[1]:  # else its error is not a matter of the window
        height = [_height(value) for _, value in kinds]
        axes.plot(at, height, "--", color=colour, linewidth=1.3, zorder=3)
        middle = (len(rows) - 1) // 2
        _say(axes, kinds[middle][0], at[middle], height[middle], (4, 7), colour)
        _mark(axes, rows, name, at, height, colour, every_kind=True)
    _mark(axes, rows, name, at, error, colour, every_kind=False)


def _draw_auto(axes: Any, row: Mapping[str, Any], colour: str) -> None:
    """A star at the longest window picked, a line to the shortest."""
    height, windows = _height(row["relative_error"]), row["windows"]
    axes.plot([min(windows), max(windows)], [height] * 2, "-", color=colour, linewidth=1.5, zorder=3)
    axes.plot(max(windows), height, "*", color=colour, markersize=15, markeredgecolor="white", zorder=6)
    _say(axes, f"auto: {span(windows)}", max(windows), height, (-8, -11), colour, ha="right")


def _mark(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    at: Sequence[int],
    height: Sequence[float],
    colour: str,
    every_kind: bool,
) -> None:
    """A ring where a line has come below the tolerance, and what that means."""
    window, found = smallest_window(rows, name, TOLERANCE, every_kind)
    if not found:
        return
    index = [row["window"] for row in rows].index(window)
    axes.plot(at[index], height[index], "o", color=colour, markersize=11, markerfacecolor="none",
              markeredgewidth=1 if every_kind else 2, zorder=4)  # fmt: skip
    what = "every kind of parameter" if every_kind else "all together"
    text = f"{what} below {TOLERANCE:.0%}:\n{window_text(window)}"
    if index == 0:
        _say(axes, text, at[index], height[index], (4, -26), colour)
    else:
        _say(
            axes,
            text,
            at[index],
            height[index],
            (-10, -14 if height[index] > 10 * _FLOOR else 14),
            colour,
            ha="right",
        )


def _say(
    axes: Any, text: str, x: float, y: float, offset: tuple[int, int], colour: str, ha: str = "left"
) -> None:
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=colour, fontsize=8.5, ha=ha,
                  va="center", zorder=5, annotation_clip=False)  # fmt: skip


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], x: int) -> None:
    """Names each line at its right end, labels that would overlap pushed apart."""
    bottom, top = map(math.log, axes.get_ylim())
    lowest = -math.inf
    for error, name, colour in sorted(ends):
        level = max(math.log(_height(error)), lowest)
        lowest = level + 0.1 * (top - bottom)
        axes.annotate(
            f"{name}\n{error_text(error)} at the end", (x, math.exp(level)), xytext=(12, 0),
            textcoords="offset points", color=colour, fontsize=9.5, fontweight="bold", va="center",
            annotation_clip=False,
        )  # fmt: skip


def _place(window: int | None, seqlen: int) -> int:
    return seqlen if window is None else window


def _tick(window: int | None) -> str:
    return "full" if window is None else f"{window:,}"


def _height(error: float | None) -> float:
    """An error on the axis; what is not finite is as far off as can be."""
    return 1.0 if error is None else max(error, _FLOOR)
