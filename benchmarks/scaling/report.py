"""Tables and picture of `benchmarks.scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row

# Okabe and Ito's palette; the package's methods drawn thick, the paper's enumeration in thin greys.
OURS = {"Exact": "#D55E00", "Truncated": "#0072B2", "LayerLocal": "#009E73"}


def show(figure: Sequence[Row], claim: Sequence[Row], a: dict[str, Any], stem: Path) -> None:
    """Print both tables and draw stem.png.

    Args:
        a: the assumptions.
    """
    curves, lengths = curves_of(figure), list(dict.fromkeys(row["context"] for row in figure))
    common.print_table(
        f"Days of an epoch of {a['epoch_tokens']:.3g} tokens, {a['layers']} layers, by context",
        ["method", "devices", *map(common.tokens, lengths)],
        [[*name, *(f"{points[length]:.3g}" for length in lengths)] for name, points in curves.items()],
    )
    numbers = ("shards", "helpers", "worker_speed", "most", "speedup")
    common.print_table(
        f"Speed-up over one whole GPU, {common.tokens(claim[0]['context'])} tokens, {a['layers']} layers",
        ["method", "devices", "shards", "helpers of each", "speed of each", "at most", "simulated"],
        [[_name(row), row["devices"], *(f"{row[key]:.3g}" for key in numbers)] for row in claim],
    )
    draw(figure, a, stem.with_suffix(".png"))
    print(f"wrote {stem}.json, .csv and .png")


def _name(row: Row) -> str:
    return row["method"] if row["window"] is None else f"{row['method']}, window {row['window']}"


def curves_of(figure: Sequence[Row]) -> dict[tuple[str, str], dict[int, float]]:
    """Days by context of each method and devices."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in figure:
        curves.setdefault((row["method"], row["devices"]), {})[row["context"]] = row["days"]
    return curves


def draw(figure: Sequence[Row], a: dict[str, Any], path: Path) -> None:
    """The first table as curves over context, both axes logarithmic."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure_, axes = common.pyplot().subplots(figsize=(10, 5))
    curves = curves_of(figure)
    greys = [c for c in curves if c[0].startswith("paper")]
    for (name, devices), points in curves.items():
        ours = OURS.get(name.partition(",")[0])
        style: dict[str, Any]
        if ours:
            style = {"color": ours, "linewidth": 2.2, "linestyle": ":" if devices == "1 GPU" else "-"}
        elif (name, devices) in greys:
            shade = 0.15 + 0.6 * greys.index((name, devices)) / max(1, len(greys) - 1)
            style = {"color": str(shade), "linewidth": 1.0, "linestyle": "--"}
        else:
            style = {"color": "black", "linewidth": 1.6, "linestyle": ":"}
        axes.plot(*zip(*points.items(), strict=True), label=f"{name} ({devices})", marker=".", **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["context"] for row in figure}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: common.tokens(int(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("days an epoch")
    axes.set_title(
        f"{a['layers']} layers, epochs of {a['epoch_tokens']:.3g} tokens: counted and simulated, not run"
    )
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    common.save(figure_, path, "")
