"""What a sweep found: tables on the terminal, and sweep.csv."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adjoint.files import write_atomically
from adjoint.tools.sweep.compare import Window, window_order

SMALL = 0.01  # the relative error that the summary and the picture mark
_MOST_LAYERS = 8  # in the table; sweep.csv has them all


def swept(result: Mapping[str, Any]) -> list[str]:
    """The methods that were measured with a window, in the order of the rows."""
    return list(dict.fromkeys(row["method"] for row in result["rows"] if row["window"] is not None))


def layers_of(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Cosine and relative error of the layers proper, without embedding, last norm and head."""
    return {name: values for name, values in row["layer"].items() if name.startswith("layers.")}


def worst(parts: Mapping[str, Mapping[str, Any]]) -> tuple[str, float | None]:
    """The name and relative error of the part furthest off; None, not finite, is furthest of all."""
    name = max(parts, key=lambda name: _distance(parts[name]))
    return name, parts[name]["relative_error"]


def _distance(part: Mapping[str, Any]) -> float:
    return math.inf if part["relative_error"] is None else part["relative_error"]


def smallest_window(
    rows: Iterable[Mapping[str, Any]], name: str, every_kind: bool = False
) -> tuple[int | None, bool]:
    """The smallest measured window of a method from which on its relative error stays below `SMALL`.

    Args:
        every_kind: look at the kind of parameter with the largest error instead of at all of them together,
            where the many that a window leaves nearly untouched outweigh the few that it does not.

    Returns:
        (window, found), "auto" left out: window is None for the whole sequence; found is False where even
        that is not enough.
    """
    own = [row for row in rows if row["method"] == name and row["window"] != "auto"]
    best: tuple[int | None, bool] = (None, False)
    for row in sorted(own, key=lambda row: window_order(row["window"]), reverse=True):
        error = worst(row["kind"])[1] if every_kind else row["relative_error"]
        if error is None or error >= SMALL:
            break
        best = row["window"], True
    return best


def conclusion(result: Mapping[str, Any]) -> list[str]:
    """One line per method that has a window: how long it must be."""
    lines, tolerance = [], result["settings"]["tolerance"]
    for name in swept(result):
        rows = [row for row in result["rows"] if row["method"] == name]
        lines += [
            f"{name}, auto: error {error_text(row['relative_error'])} with windows of {span(row['windows'])} "
            f"for a tolerance of {tolerance:g}"
            for row in rows
            if row["window"] == "auto"
        ]
        rows = [row for row in rows if row["window"] != "auto"]
        (window, found), (each, every) = smallest_window(rows, name), smallest_window(rows, name, True)
        if found:
            kinds = f"each kind of parameter by itself: {window_text(each)}"
            kinds = kinds if every else "not every kind of parameter"
            lines.append(f"{name}: error below {SMALL:.0%} from {window_text(window)}; {kinds}")
        elif rows:
            best = min(rows, key=_distance)
            at = f"{error_text(best['relative_error'])}, {window_text(best['window'])}"
            lines.append(f"{name}: no measured window brings the error below {SMALL:.0%} (best: {at})")
    return lines


def row_name(method: str, window: Window) -> str:
    """A row in words."""
    return f"{method}, {'window ' if isinstance(window, int) else ''}{heading(window)}"


def heading(window: Window) -> str:
    """A window over a column: 1,024, full, auto."""
    return "full" if window is None else window if window == "auto" else f"{window:,}"


def window_text(window: int | None) -> str:
    """A window in words."""
    return "full" if window is None else f"{window:,} token{'s' * (window != 1)}"


def span(windows: list[int]) -> str:
    """The windows of all layers in words: 127 to 1,535 tokens."""
    low, high = min(windows), max(windows)
    return window_text(high) if low == high else f"{low:,} to {window_text(high)}"


def error_text(error: float | None) -> str:
    """A relative error as a reader likes it: 12%, 0.40%, 3.1e-07."""
    if error is None:
        return "not finite"
    if error >= 0.001:
        return f"{error:.0%}" if error >= 0.1 else f"{error:.2%}"
    return f"{error:.1e}" if error else "0"


def show(result: Mapping[str, Any]) -> None:
    """Prints the tables and the conclusion."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width of its own
    settings, environment = result["settings"], result["environment"]
    console.print(_overall_table(result))
    for name in dict.fromkeys(row["method"] for row in result["rows"]):
        if name != settings["baseline"]:
            console.print(_parts_table(result, name, console.width))
    device = environment["gpu"] or f"{environment['cpu']}, threads: {environment['threads']}"
    console.print(
        f"error: |g − r| / |r|, and cosine against {settings['baseline']}, mean of "
        f"{settings['batches']} batches; vjps: what the paper's algorithm evaluates a batch (here they are "
        f"{3 * settings['seqlen'] * settings['model']['n_layer']:,} for every window); seconds: forward and "
        f"backward of a batch, median; memory: {result['memory']}; {device}"
    )
    for line in conclusion(result):
        console.print(line, style="bold")


def _overall_table(result: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="gradients side by side")
    for title in ("method", "window", "error", "cosine", "vjps", "seconds", "memory"):
        table.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    for row in result["rows"]:
        reference = row["method"] == result["settings"]["baseline"]
        memory, vjps = row["peak_memory_bytes"], row["vjps"]
        table.add_row(
            row["method"],
            heading(row["window"]) if row["windows"] is None else f"auto ≤ {max(row['windows']):,}",
            "reference" if reference else error_text(row["relative_error"]),
            "" if reference or row["cosine"] is None else f"{row['cosine']:.6f}",
            "" if vjps is None else f"{vjps:,}" if vjps < 1e8 else f"{vjps:.3e}",
            f"{row['seconds']:.2f}",
            "–" if memory is None else f"{memory / 2**20:,.0f} MiB",
        )
    return table


def _parts_table(result: Mapping[str, Any], method: str, width: int) -> Any:
    """Relative error of one method: parts of the model down, windows across."""
    from rich.table import Table

    rows = [row for row in result["rows"] if row["method"] == method]
    shown = _evenly(rows, max(2, (width - 20) // 13))
    table = Table(title=f"relative error of {method}, by window")
    table.add_column("part")
    for row in shown:
        table.add_column(heading(row["window"]), justify="right")
    for scope, names in (("layer", _evenly(layers_of(rows[0]), _MOST_LAYERS)), ("kind", rows[0]["kind"])):
        for name in names:
            table.add_row(name, *(error_text(row[scope][name]["relative_error"]) for row in shown))
        table.add_section()
    return table


def _evenly(values: Iterable[Any], most: int) -> list[Any]:
    """At most `most` of the values: the first, the last and evenly between."""
    values = list(values)
    if len(values) <= most:
        return values
    return [values[i] for i in sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})]


def write_csv(result: Mapping[str, Any], folder: Path) -> str:
    """Writes sweep.csv, a line per row and part of the model; returns its name.

    scope is overall, layer or kind, name the part. window is empty for the whole sequence; where it is auto,
    the lines of layers have the window of that layer.
    """
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    cost = ("vjps", "seconds", "peak_memory_bytes")
    write(("method", "window", "scope", "name", "cosine", "relative_error", *cost))
    for row in result["rows"]:
        parts = [("overall", "overall", row)]
        parts += [(scope, name, values) for scope in ("layer", "kind") for name, values in row[scope].items()]
        for scope, name, values in parts:
            window = row["window"]
            if row["windows"] is not None and name.startswith("layers."):
                window = row["windows"][int(name.removeprefix("layers."))]
            agreement = values["cosine"], values["relative_error"]
            write((row["method"], window, scope, name, *agreement, *(row[key] for key in cost)))
    write_atomically(folder / "sweep.csv", text.getvalue())
    return "sweep.csv"
