"""Tables and picture of `benchmarks.scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.scaling import Assumptions

Row = dict[str, Any]
# Okabe and Ito's palette; the package's methods drawn thick, the paper's enumeration in thin greys.
OURS = {"Exact": "#D55E00", "Truncated": "#0072B2", "LayerLocal": "#009E73"}


def show(figure: Sequence[Row], claim: Sequence[Row], a: Assumptions, stem: Path) -> None:
    """Print both tables and draw stem.png."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, 116)
    lengths = list(dict.fromkeys(row["context"] for row in figure))
    table = Table(title=f"Days of an epoch of {a.epoch_tokens:.3g} tokens, {a.layers} layers, by context")
    for column in ("method", "devices", *map(short, lengths)):
        table.add_column(column, justify="left" if column in ("method", "devices") else "right")
    for name, devices in dict.fromkeys((row["method"], row["devices"]) for row in figure):
        chosen = {r["context"]: r["days"] for r in figure if (r["method"], r["devices"]) == (name, devices)}
        table.add_row(name, devices, *(f"{chosen[length]:.3g}" for length in lengths))
    console.print(table)
    table = Table(
        title=f"Speed-up over one whole GPU, {short(claim[0]['context'])} tokens, {a.layers} layers"
    )
    left = ("method", "devices")
    for column in (*left, "shards", "helpers of each", "speed of each", "at most", "simulated"):
        table.add_column(column, justify="left" if column in left else "right")
    for row in claim:
        numbers = f"{row['worker_speed']:.3g}", f"{row['most']:.3g}", f"{row['speedup']:.1f}"
        name = row["method"] if row["window"] is None else f"{row['method']}, window {row['window']}"
        table.add_row(name, row["devices"], str(row["shards"]), str(row["helpers"]), *numbers)
    console.print(table)
    draw(figure, a, stem.with_suffix(".png"))
    console.print(f"wrote {stem}.json, .csv and .png", highlight=False, soft_wrap=True)


def draw(figure: Sequence[Row], a: Assumptions, path: Path) -> None:
    """The first table as curves over context, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure_, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    curves = list(dict.fromkeys((row["method"], row["devices"]) for row in figure))
    greys = [c for c in curves if c[0].startswith("paper")]
    for name, devices in curves:
        points = [(r["context"], r["days"]) for r in figure if (r["method"], r["devices"]) == (name, devices)]
        ours = OURS.get(name.partition(",")[0])
        style: dict[str, Any]
        if ours:
            style = {"color": ours, "linewidth": 2.2, "linestyle": ":" if devices == "1 GPU" else "-"}
        elif (name, devices) in greys:
            shade = 0.15 + 0.6 * greys.index((name, devices)) / max(1, len(greys) - 1)
            style = {"color": str(shade), "linewidth": 1.0, "linestyle": "--"}
        else:
            style = {"color": "black", "linewidth": 1.6, "linestyle": ":"}
        axes.plot(*zip(*points, strict=True), label=f"{name} ({devices})", marker=".", **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["context"] for row in figure}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(int(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("days an epoch")
    axes.set_title(
        f"{a.layers} layers, epochs of {a.epoch_tokens:.3g} tokens: counted and simulated, not run"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_.savefig(path, dpi=130)
    plt.close(figure_)


def short(tokens: int) -> str:
    """1024 as 1K, 1048576 as 1M."""
    for power, letter in ((20, "M"), (10, "K")):
        if tokens >= 1 << power and tokens % (1 << power) == 0:
            return f"{tokens >> power}{letter}"
    return str(tokens)
