"""The convergence benchmark's picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import report
from benchmarks.convergence.tables import before_training, curves_of, label, medians, signed
from benchmarks.convergence.tasks import ALPHABET
from benchmarks.report import Row

# Colour, dash and width: windows of one kind from light to dark, the methods that are exact in black.
LOOKS: dict[str, tuple[str, str, float]] = {
    "backprop": ("#000000", "-", 3.2),
    "exact": ("#F0E442", ":", 1.8),
    "truncated-4": ("#9CCBEC", "-", 1.8),
    "truncated-16": ("#3C9FDD", "-", 1.8),
    "truncated-64": ("#0A4F8A", "-", 1.8),
    "truncated-auto": ("#D55E00", "--", 1.8),
    "unbiased-64": ("#CC79A7", "-.", 1.8),
    "layer-local": ("#009E73", "-", 1.8),
    "layer-local-16": ("#5CC9A7", "--", 1.8),
}
OTHER = ("#7A7A7A", "-", 1.2)


def looks(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each method."""
    names = ("color", "linestyle", "linewidth")
    return {m: dict(zip(names, LOOKS.get(m, OTHER), strict=True)) for m in methods}


def draw(result: Row) -> Any:
    """Return a row per task.

    On the left, training loss against steps (median over the seeds and each of them), for text minus
    Backprop's, as the losses coincide; on the right, accuracy against distance, or for text what the methods
    lose on the held-out split."""
    plt = report.pyplot()
    tasks = list(result["tasks"])
    style = looks(dict.fromkeys(row["method"] for row in result["rows"]))
    figure, panels = plt.subplots(len(tasks), 2, figsize=(9, 3.3 * len(tasks) + 1.2), squeeze=False)
    for (left, right), task in zip(panels, tasks, strict=True):
        recall = any("accuracy" in curve for curve in curves_of(result, task))
        _draw_losses(left, result, task, style, apart=not recall)
        left.set_title(result["tasks"][task]["label"], fontsize=10.5)
        (_draw_accuracy if recall else _draw_held_out)(right, result, task, style)
    figure.legend(
        handles=[plt.Line2D([], [], **look, label=label(method)) for method, look in style.items()],
        loc="outside upper center",
        ncols=3,
        fontsize=10,
        title="thick: median over the seeds; thin: each seed",
    )
    return figure


def _draw_curve(
    axes: Any, at: Sequence[float], seeds: Sequence[Sequence[float]], look: Row, method: str, **more: Any
) -> None:
    """The median and each seed by itself: a seed that never learns would make a band of the whole picture."""
    axes.plot(at, medians(seeds), **look, **more, zorder=5 if method == "exact" else 3)
    for seed in seeds if len(seeds) > 1 else ():
        axes.plot(at, seed, color=look["color"], linestyle=look["linestyle"], linewidth=0.8, alpha=0.45)


def _draw_losses(axes: Any, result: Row, task: str, style: Row, apart: bool) -> None:
    """Draw each seed's losses; with `apart`, their differences from Backprop's with the same seed."""
    block, steps = result["block_steps"], result["tasks"][task]["steps"]
    curves = {curve["method"]: curve["losses"] for curve in curves_of(result, task)}
    baseline = curves.get("backprop") if apart else None
    for method, losses in curves.items():
        seeds = list(losses.values())
        if baseline is not None:
            pairs = ((losses[seed], baseline[seed]) for seed in losses.keys() & baseline.keys())
            seeds = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        at = [min((i + 0.5) * block, steps) for i in range(len(seeds[0]))]
        _draw_curve(axes, at, seeds, style[method], method)
    label = "training loss" if baseline is None else "training loss above Backprop's"
    axes.set(xlabel="step", ylabel=f"{label}, nats per token")


def _draw_accuracy(axes: Any, result: Row, task: str, style: Row) -> None:
    curves = curves_of(result, task)
    distances = sorted(map(int, curves[0]["questions"]))
    for curve in curves:
        seeds = [[100 * s[str(d)] for d in distances] for s in curve["accuracy"].values()]
        _draw_curve(
            axes, distances, seeds, style[curve["method"]], curve["method"], marker="o", markersize=3.5
        )
    lowest = {
        curve["method"]: min(medians([[s[str(d)] for d in distances] for s in curve["accuracy"].values()]))
        for curve in curves
    }
    if right := [method for method, share in lowest.items() if share >= 0.97]:  # they coincide
        names = "all methods" if len(right) == len(curves) else ", ".join(map(label, right))
        text = textwrap.fill(f"lowest median {min(lowest[m] for m in right):.0%}: {names}", 60)
        axes.set_title(text, fontsize=8, fontweight="normal")
    small: Row = {"textcoords": "offset points", "fontsize": 8, "color": "#666666"}
    before = before_training(result, task)
    if before:
        percentages = [100 * before[d] for d in distances]
        axes.plot(distances, percentages, color="#888888", linewidth=1.2, linestyle=(0, (5, 2)))
        axes.annotate("before", (distances[0], percentages[0]), xytext=(0, 4), **small)
    axes.axhline(100 / ALPHABET, color="#888888", linewidth=1, linestyle=":")
    axes.annotate("chance", (distances[-1], 100 / ALPHABET), xytext=(0, 3), ha="right", **small)
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(d) for d in distances])
    axes.set(
        xlabel="distance, tokens from the value to the question", ylabel="right answers, %", ylim=(-3, 104)
    )


def _draw_held_out(axes: Any, result: Row, task: str, style: Row) -> None:
    rows = [row for row in result["rows"] if row["task"] == task and row["seeds"]][::-1]
    for height, row in enumerate(rows):
        colour = style[row["method"]]["color"]
        axes.plot([row["held_out_min"], row["held_out_max"]], [height] * 2, color=colour, linewidth=2)
        axes.plot(row["held_out"], height, "o", color=colour, markersize=7, mec="black", mew=0.5)
        gap = f" ({signed(row['gap'], '+.3f')})" if "gap" in row else ""
        axes.annotate(f"{row['held_out']:.3f}{gap}", (row["held_out_max"], height), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(rows)), [label(row["method"]) for row in rows])
    axes.set_xlabel("loss on held-out text, nats per byte (gap to Backprop)")
    axes.margins(x=0.35)
    axes.set_xlim(left=axes.dataLim.x0 - 0.08 * axes.dataLim.width)
    axes.grid(False, axis="y")
