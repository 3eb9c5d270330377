"""The picture of a sweep: error of the gradient against window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adjoint.files import new_figure, save_figure
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
    """Draw relative error against window, both logarithmic: a line per method, its layers' spread as a band.

    "full", the window over the whole sequence, is the right end. A ring marks the smallest window from which
    on the error stays below 1%. The dashed line is the kind of parameter that is furthest off.

    Args:
        result: what sweep.json holds.
        path: the picture, replaced in one piece; its suffix gives the format.

    Raises:
        ValueError: no method in it has a window.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    methods, settings = swept(result), result["settings"]
    if not methods:
        raise ValueError("nothing to draw: no row has a window")
    seqlen, ticks = settings["seqlen"], dict[int, str]()
    figure = new_figure(9, 5.2)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, colour in zip(methods, _COLOURS, strict=False):
        rows = [r for r in result["rows"] if r["method"] == name and r["relative_error"] is not None]
        for row in (r for r in rows if r["window"] == "auto"):
            windows, height = row["windows"], [_height(row["relative_error"])]
            label = f"{name}, auto: {error_text(row['relative_error'])}, {span(windows)}"
            axes.plot([min(windows), max(windows)], height * 2, "*-", color=colour, ms=12, label=label)
        rows = [r for r in rows if r["window"] != "auto"]
        if rows:
            at = [seqlen if row["window"] is None else row["window"] for row in rows]
            _draw_method(axes, rows, at, name, colour)
            ticks |= {x: heading(row["window"]) for x, row in zip(at, rows, strict=True)}
    axes.axhline(SMALL, color="tab:gray", linestyle=":", linewidth=1.2, zorder=2)
    axes.xaxis.set_major_locator(FixedLocator(_apart(sorted(ticks))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: ticks.get(round(x), "")))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: f"{y * 100:.6g}%" if y > 1.5 * _FLOOR else f"≤ {y * 100:.6g}%")
    )
    weights = "fresh" if settings["weights"] == "fresh" else "trained"
    axes.set(
        xlabel=f"window: tokens that a layer's recurrence reaches back (full: {seqlen:,})",
        ylabel=f"relative error of the gradient, against {settings['baseline']}",
    )
    axes.set_title(
        f"How long a window? {weights} model, {settings['model']['n_layer']} layers, {seqlen:,} tokens, "
        f"{settings['batches']} batches\nline: all parameters; band: the layers, nearest to furthest; "
        f"ring: from here on below {SMALL:.0%}",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, path)


def _apart(windows: list[int]) -> list[int]:
    """Those of the windows, in their order, whose names have room on the axis; the last one, full, always."""
    room, kept = math.log2(windows[-1] / windows[0]) / 18 if windows else 0.0, windows[-1:]
    for window in reversed(windows):
        if math.log2(kept[0] / window) > room:
            kept.insert(0, window)
    return kept


def _draw_method(
    axes: Any, rows: Sequence[Mapping[str, Any]], at: Sequence[int], name: str, colour: str
) -> None:
    """A method's line and band; where a window is long enough, also the kind furthest off, and rings."""
    error = [_height(row["relative_error"]) for row in rows]
    layers = [[_height(v["relative_error"]) for v in layers_of(row).values()] for row in rows]
    axes.fill_between(at, list(map(min, layers)), list(map(max, layers)), color=colour, alpha=0.13, lw=0)
    lines = [(error, False, "o-", f"{name}: {error_text(rows[-1]['relative_error'])} at the end")]
    if smallest_window(rows, name)[1]:  # else the error is not a matter of the window
        kinds = [worst(row["kind"]) for row in rows]
        furthest = f"{name}, the kind furthest off: {kinds[(len(rows) - 1) // 2][0]}"
        lines.append(([_height(value) for _, value in kinds], True, "--", furthest))
    for heights, every_kind, style, label in lines:
        window, found = smallest_window(rows, name, every_kind)
        label += f" (below {SMALL:.0%} from {window_text(window)})" if found else ""
        axes.plot(at, heights, style, color=colour, linewidth=1.3 if every_kind else 2.2, ms=4.5, label=label)
        if found:
            index = [row["window"] for row in rows].index(window)
            axes.plot(at[index], heights[index], "o", color=colour, ms=11, markerfacecolor="none")


def _height(error: float | None) -> float:
    """An error on the axis; what is not finite is as far off as can be."""
    return 1.0 if error is None else max(error, _FLOOR)
