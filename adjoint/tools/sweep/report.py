"""Results of a sweep: tables on the terminal, sweep.csv, and sweep.png."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adjoint.files import atomic_file, new_figure, save_figure
from adjoint.memory import size_text
from adjoint.tools.measure.show import print_table
from adjoint.tools.sweep.compare import Window, window_order

SMALL = 0.01  # the relative error that the summary and the picture mark
_MOST_LAYERS = 8  # in the table; sweep.csv has them all
_FLOOR = 1e-6  # smaller errors are drawn here: the exact ends must not press the rest together

Result = Mapping[str, Any]


def _of_methods(result: Result) -> dict[str, list[Result]]:
    """Return the rows of each method that is compared with the reference."""
    rows_by_method: dict[str, list[Result]] = {}
    for row in result["rows"]:
        if row["method"] != result["settings"]["baseline"]:
            rows_by_method.setdefault(row["method"], []).append(row)
    return rows_by_method


def _layers(row: Result) -> dict[str, Result]:
    """Return the layers proper, without embedding, last norm and head."""
    return {name: values for name, values in row["layer"].items() if name.startswith("layers.")}


def _error(agreement: Result) -> float:
    return math.inf if agreement["relative_error"] is None else agreement["relative_error"]


def _worst(row: Result) -> float:
    """Return the largest error of a kind of parameter. The error over all parameters would hide it: the many
    that a window hardly affects outweigh the others."""
    return max(map(_error, row["kind"].values()))


def smallest_window(rows: Iterable[Result], error: Callable[[Result], float] = _error) -> str | None:
    """Return the smallest measured window of a method from which on the error stays below `SMALL`; None where
    not even the longest is enough."""
    best = None
    for row in sorted(rows, key=lambda row: window_order(row["window"]), reverse=True):
        if row["window"] != "auto":
            if error(row) >= SMALL:
                break
            best = window_text(row["window"])
    return best


def conclusion(name: str, rows: Sequence[Result]) -> str:
    """Say how long the window of a method must be."""
    said, overall, each = [], smallest_window(rows), smallest_window(rows, _worst)
    if overall is not None:
        kinds = f"for each kind of parameter from {each}" if each else "not for every kind of parameter"
        said.append(f"error below {SMALL:.0%} from window {overall}, {kinds}")
    elif any(row["window"] != "auto" for row in rows):
        said.append(f"no measured window brings the error below {SMALL:.0%}")
    if rows[-1]["window"] == "auto":
        reach = f"{min(rows[-1]['windows']):,} to {max(rows[-1]['windows']):,}"
        said.append(f"auto: {error_text(rows[-1]['relative_error'])}, windows {reach}")
    return f"{name}: {'; '.join(said)}"


def window_text(window: Window) -> str:
    """Return a window as text: 1,024, full, auto."""
    return "full" if window is None else window if window == "auto" else f"{window:,}"


def error_text(error: float | None) -> str:
    """Return a relative error as short text: 12%, 0.40%, 3.1e-07."""
    if error is None:
        return "not finite"
    if error >= 0.001:
        return f"{error:.0%}" if error >= 0.1 else f"{error:.2%}"
    return f"{error:.1e}" if error else "0"


def show(result: Result) -> None:
    """Print the tables and the conclusions."""
    settings, environment = result["settings"], result["environment"]
    head = ("method", "window", "error", "cosine", "vjps", "seconds", "memory")
    print_table(head, map(_cells, result["rows"]), f"gradients, against {settings['baseline']}")
    methods = _of_methods(result)
    for name, rows in methods.items():
        windows = [window_text(row["window"]) for row in rows]
        layers = [*_layers(rows[0])]
        parts = [("layer", layer) for layer in layers[:: -(-len(layers) // _MOST_LAYERS)]]
        parts += [("kind", kind) for kind in rows[0]["kind"]]
        cells = (
            [name_in_scope, *(error_text(row[scope][name_in_scope]["relative_error"]) for row in rows)]
            for scope, name_in_scope in parts
        )
        print_table(("part", *windows), cells, f"relative error of {name}, by window")
    device = environment["gpu"] or f"{environment['cpu']}, threads: {environment['threads']}"
    vjps = ""
    if any(row["vjps"] is not None for row in result["rows"]):
        vjps = "vjps: what the paper's algorithm evaluates a batch (here they are "
        vjps += f"{3 * settings['seqlen'] * len(_layers(result['rows'][0])):,} for every window); "
    print(
        f"\nerror: |g − r| / |r|, and cosine against {settings['baseline']}, mean of {settings['batches']} "
        f"batches; {vjps}seconds: forward and backward of a batch, median; memory: what that took on top at "
        f"its peak; {device}"
    )
    for name, rows in methods.items():
        print(conclusion(name, rows))


def _cells(row: Result) -> tuple[str, ...]:
    memory, vjps, auto = row["peak_memory_bytes"], row["vjps"], row["windows"]
    return (
        row["method"],
        f"auto ≤ {max(auto):,}" if auto else window_text(row["window"]),
        error_text(row["relative_error"]),
        "" if row["cosine"] is None else f"{row['cosine']:.6f}",
        "" if vjps is None else f"{vjps:,}",
        f"{row['seconds']:.2f}",
        "–" if memory is None else size_text(memory),
    )


def write_csv(result: Result, path: Path) -> None:
    """Write a line per row and part of the model.

    scope is overall, layer or kind, name the part. window is empty for the whole sequence; where it is auto,
    the lines of layers have the window of that layer.
    """
    cost = ("vjps", "seconds", "peak_memory_bytes")
    with atomic_file(path) as unfinished, unfinished.open("w", newline="") as stream:
        write = csv.writer(stream, lineterminator="\n").writerow
        write(("method", "window", "scope", "name", "cosine", "relative_error", *cost))
        for row in result["rows"]:
            parts = [("overall", "overall", row)]
            parts += [
                (scope, name, values) for scope in ("layer", "kind") for name, values in row[scope].items()
            ]
            for scope, name, values in parts:
                window = row["window"]
                if row["windows"] is not None and name.startswith("layers."):
                    window = row["windows"][int(name.removeprefix("layers."))]
                agreement = values["cosine"], values["relative_error"]
                write((row["method"], window, scope, name, *agreement, *(row[key] for key in cost)))


def _height(error: float) -> float:
    """Return the height of an error in the picture; one that is not finite is drawn at the top."""
    return 1.0 if math.isinf(error) else max(error, _FLOOR)


def draw(result: Result, path: Path) -> None:
    """Draw the relative error by window: a line per method, the spread of its layers as a band."""
    settings, methods = result["settings"], _of_methods(result)
    windows = sorted({row["window"] for rows in methods.values() for row in rows}, key=window_order)
    figure = new_figure(9, 5.2)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    for name, rows in methods.items():
        plain = [row for row in rows if row["window"] != "auto"]
        at = [windows.index(row["window"]) for row in plain]
        layers = [[_height(_error(agreement)) for agreement in _layers(row).values()] for row in plain]
        (line,) = axes.plot(at, [_height(_error(row)) for row in plain], "o-", label=conclusion(name, rows))
        colour = line.get_color()
        axes.plot(at, [_height(_worst(row)) for row in plain], "--", color=colour)
        if all(layers):
            axes.fill_between(at, [*map(min, layers)], [*map(max, layers)], color=colour, alpha=0.13)
        for row in rows[len(plain) :]:
            axes.plot(windows.index("auto"), _height(_error(row)), "*", color=colour, markersize=12)
    axes.axhline(SMALL, color="tab:gray", linestyle=":", linewidth=1.2)
    axes.set_xticks(range(len(windows)), map(window_text, windows), rotation=45)
    axes.yaxis.set_major_formatter(lambda y, _: f"{'≤ ' if y < 1.5 * _FLOOR else ''}{100 * y:g}%")
    weights = "fresh" if settings["weights"] == "fresh" else "trained"
    axes.set(
        xlabel=f"window: tokens that a layer's recurrence reaches back (full: {settings['seqlen']:,})",
        ylabel=f"relative error of the gradient, against {settings['baseline']}",
    )
    axes.set_title(
        f"How long a window? {weights} model, {len(_layers(result['rows'][0]))} layers, "
        f"{settings['seqlen']:,} tokens, {settings['batches']} batches\n"
        "line: all parameters; band: the layers, nearest to furthest; dashed: the worst kind of parameter",
        fontsize=10,
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", frameon=False, fontsize=9)
    save_figure(figure, path)
