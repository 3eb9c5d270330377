"""What a sweep found: tables on the terminal, and sweep.csv."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adjoint.tools.sweep.compare import Window, smallest_window, worst

TOLERANCE = 0.01  # the relative error that the summary and the picture mark
_MOST_LAYERS = 8  # in the table; sweep.csv has them all
_COLUMNS = (
    "method",
    "window",
    "scope",
    "name",
    "cosine",
    "relative_error",
    "vjps",
    "seconds",
    "peak_memory_bytes",
)


def layers_of(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Cosine and relative error of the layers proper, without embedding, last norm and head."""
    return {name: values for name, values in row["layer"].items() if name.startswith("layers.")}


def row_name(method: str, window: Window) -> str:
    """A row in words."""
    return f"{method}, {f'window {window:,}' if isinstance(window, int) else heading(window)}"


def heading(window: Window) -> str:
    """A window over a column: 1,024, full, auto."""
    return "full" if window is None else window if window == "auto" else f"{window:,}"


def error_text(error: float | None) -> str:
    """A relative error as a reader wants it: 12%, 0.40%, 3.1e-07."""
    if error is None:
        return "not finite"
    if error >= 0.001:
        return f"{error:.0%}" if error >= 0.1 else f"{error:.2%}"
    return f"{error:.1e}" if error else "0"


def conclusion(result: dict[str, Any]) -> list[str]:
    """One line a method that has a window: how long a one is needed."""
    lines = []
    for name in swept(result):
        auto = [row for row in result["rows"] if row["method"] == name and row["window"] == "auto"]
        own = [row for row in result["rows"] if row["method"] == name and row["window"] != "auto"]
        lines += [
            f"{name}, auto: error {error_text(row['relative_error'])} with windows of {span(row['windows'])} "
            f"for a tolerance of {result['settings']['tolerance']:g}"
            for row in auto
        ]
        if not own:
            continue
        best = min(own, key=lambda row: math.inf if row["relative_error"] is None else row["relative_error"])
        whole = smallest_window(own, name, TOLERANCE)
        if not whole[1]:
            at = f"{error_text(best['relative_error'])}, {window_text(best['window'])}"
            said = f"no measured window brings the error below {TOLERANCE:.0%} (best: {at})"
        else:
            every = smallest_window(own, name, TOLERANCE, every_kind=True)
            kind = (
                f"each kind of parameter by itself: {window_text(every[0])}"
                if every[1]
                else "not every kind of parameter"
            )
            said = f"error below {TOLERANCE:.0%} from {window_text(whole[0])}; {kind}"
        lines.append(f"{name}: {said}")
    return lines


def span(windows: list[int]) -> str:
    """The windows of all layers in words: 127 to 1,535 tokens."""
    low, high = min(windows), max(windows)
    return window_text(high) if low == high else f"{low:,} to {window_text(high)}"


def window_text(window: int | None) -> str:
    """A window in words."""
    return "full" if window is None else f"{window:,} token{'s' * (window != 1)}"


def swept(result: dict[str, Any]) -> list[str]:
    """The methods that were measured with a window, in the order of the rows."""
    return list(dict.fromkeys(row["method"] for row in result["rows"] if row["window"] is not None))


def show(result: dict[str, Any]) -> None:
    """Prints the tables and the conclusion."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width of its own
    console.print(_overall_table(result, console.width))
    for name in dict.fromkeys(row["method"] for row in result["rows"]):
        if name != result["settings"]["baseline"]:
            console.print(_parts_table(result, name, console.width))
    settings, environment = result["settings"], result["environment"]
    device = environment["gpu"] or f"{environment['cpu']}, threads: {environment['threads']}"
    console.print(
        f"error: |g − r| / |r|, and cosine against {settings['baseline']}, mean of "
        f"{settings['batches']} batches; vjps: what the paper's algorithm evaluates a batch (here they are "
        f"{3 * settings['seqlen'] * settings['model']['n_layer']:,} for every window); seconds: forward and "
        f"backward of a batch, median; memory: {result['memory']}; {device}"
    )
    for line in conclusion(result):
        console.print(line, style="bold")


def write_csv(result: dict[str, Any], folder: Path) -> str:
    """Writes sweep.csv, a line a (row, part of the model); returns its name.

    scope is overall, layer or kind, name the part. window is empty for the whole sequence; where it is auto,
    the lines of layers have the window of that layer.
    """
    unfinished = folder / ".sweep.csv"
    with unfinished.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_csv_lines(result))
    os.replace(unfinished, folder / "sweep.csv")
    return "sweep.csv"


def _csv_lines(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["rows"]:
        shared = {key: row[key] for key in ("method", "window", "vjps", "seconds", "peak_memory_bytes")}
        parts = [("overall", "overall", row)]
        parts += [(scope, name, values) for scope in ("layer", "kind") for name, values in row[scope].items()]
        for scope, name, values in parts:
            numbers = {key: values[key] for key in ("cosine", "relative_error")}
            line = {**shared, "scope": scope, "name": name, **numbers}
            if row["windows"] is not None and name.startswith("layers."):
                line["window"] = row["windows"][int(name.removeprefix("layers."))]
            yield line


def _overall_table(result: dict[str, Any], width: int) -> Any:
    from rich.table import Table

    table = Table(title="gradients side by side")
    # The tables by part say the same at length: a narrow terminal does without.
    parts = ("worst layer", "worst kind") if width >= 112 else ()
    for title in ("method", "window", "error", "cosine", *parts, "vjps", "seconds", "memory"):
        left = title == "method" or title in parts
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in result["rows"]:
        reference = row["method"] == result["settings"]["baseline"]
        memory = row["peak_memory_bytes"]
        furthest = [
            "" if reference else f"{name.removeprefix('layers.')}: {error_text(error)}"
            for name, error in (worst(layers_of(row)), worst(row["kind"]))
        ]
        table.add_row(
            row["method"],
            heading(row["window"]) if row["windows"] is None else f"auto ≤ {max(row['windows']):,}",
            "reference" if reference else error_text(row["relative_error"]),
            "" if reference or row["cosine"] is None else f"{row['cosine']:.6f}",
            *furthest[: len(parts)],
            "" if row["vjps"] is None else f"{row['vjps']:,}" if row["vjps"] < 1e8 else f"{row['vjps']:.3e}",
            f"{row['seconds']:.2f}",
            "–" if memory is None else f"{memory / 2**20:,.0f} MiB",
        )
    return table


def _parts_table(result: dict[str, Any], method: str, width: int) -> Any:
    """Relative error of one method: parts of the model down, windows across."""
    from rich.table import Table

    rows = [row for row in result["rows"] if row["method"] == method]
    most = max(2, (width - 20) // 13)
    shown = [rows[i] for i in _evenly(len(rows), most)]
    table = Table(title=f"relative error of {method}, by window")
    table.add_column("part")
    for row in shown:
        table.add_column(heading(row["window"]), justify="right")
    layers = list(layers_of(rows[0]))
    layers = [layers[i] for i in _evenly(len(layers), _MOST_LAYERS)]
    for scope, names in (("layer", layers), ("kind", list(rows[0]["kind"]))):
        for name in names:
            table.add_row(name, *(error_text(row[scope][name]["relative_error"]) for row in shown))
        table.add_section()
    return table


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` of the indices below count: the first, the last and evenly between."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
