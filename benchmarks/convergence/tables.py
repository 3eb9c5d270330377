"""The convergence benchmark's tables."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from benchmarks import report
from benchmarks.convergence.tasks import ALPHABET
from benchmarks.report import Row


def label(method: str) -> str:
    """`truncated-16` → "Truncated(16)", as a reader of the API would write it."""
    match = re.fullmatch(r"(.*?)-(\d+|auto)", method)
    kind, window = (match[1], match[2]) if match else (method, None)
    name = {"backprop": "Backprop", "exact": "Exact", "layer-local": "LayerLocal"}.get(kind, "Truncated")
    if window is None:
        return name
    return f"{name}({window}, unbiased)" if kind == "unbiased" else f"{name}({window})"


def provenance(result: Row) -> str:
    """Return a paragraph on what was run."""
    model, tasks = result["model"], result["tasks"]
    steps = ", ".join(f"{name} {task['steps']}" for name, task in tasks.items())
    return (
        f"{result['seeds']} seeds; d_model {model['d_model']}, {model['n_layer']} Mamba-1 layers, d_state "
        f"{model['d_state']}, float32; {result['batch']} sequences of {result['seqlen']:,} tokens a step; "
        f"steps: {steps}. `{result['command']}`" + ("" if result["complete"] else " (stopped before its end)")
    )


# ---------------------------------------------------------------------------------------------------- tables


def columns(result: Row, task: str) -> tuple[list[str], list[list[str]]]:
    """(headings, lines of cells) of one task's table: medians, and the range of gaps over the seeds."""
    rows = [row for row in result["rows"] if row["task"] == task]
    keys = {key for row in rows for key in row}
    distances = sorted(int(match[1]) for key in keys if (match := re.fullmatch(r"accuracy_(\d+)", key)))
    heads = ["method", "held-out loss", "gap to Backprop", "curves apart, 10 steps"]
    heads += ["half learned at step", "right at the worst distance"] if distances else []
    curves = {curve["method"]: curve for curve in curves_of(result, task)}
    before = before_training(result, task)
    lines = [["before", *"––––", f"{min(before.values()):.0%}"]] if before else []
    for row in rows:
        if not row["seeds"]:
            lines.append([label(row["method"]), row["note"]] + [""] * (len(heads) - 2))
            continue
        cells = [label(row["method"]), signed(row["held_out"], ".3f")]
        if "gap" in row and row["method"] != "backprop":
            cells += [ranged(row, "gap", "+.3f"), f"{row['curve_distance_first']:.1g}"]
        else:
            cells += ["–", "–"]
        if distances:
            cells.append(steps_text(half_learned(result, curves[row["method"]])))
            cells.append(f"{min(row[f'accuracy_{d}'] for d in distances):.0%}")
        lines.append(cells)
    return heads, lines


def markdown(result: Row) -> str:
    """The tables in Markdown, one a task, and what the window "auto" was."""
    parts = [
        f"**{about['label']}**, {about['steps']} steps\n\n{report.markdown_table(*columns(result, task))}"
        for task, about in result["tasks"].items()
    ]
    chosen = picked_windows(result)
    if chosen:
        lines = [
            [result["tasks"][task]["label"], str(layer)]
            + [f"{windows[i]:,.0f}" for i in (0, len(windows) // 4, len(windows) // 2, -1)]
            for (task, layer), windows in chosen.items()
        ]
        table = report.markdown_table(["task", "layer", "first step", "a quarter", "half", "last"], lines)
        parts.append(f"**Windows that `auto` picked**, tokens, median over the seeds\n\n{table}")
    return "\n".join(parts)


def overview(result: Row) -> str:
    """Return one table of all tasks: each method's gap to Backprop and, of recall, how often it is right."""
    lines: dict[str, list[str]] = {}
    for task in result["tasks"]:
        for row in (row for row in result["rows"] if row["task"] == task):
            accuracy = [value for key, value in row.items() if re.fullmatch(r"accuracy_\d+", key)]
            cells = [signed(row["gap"], "+.3f")] if "gap" in row else [row["note"]]
            cells += [f"{min(accuracy):.0%}"] if accuracy else []
            lines.setdefault(label(row["method"]), []).append(" · ".join(cells))
    heads = ("gap to Backprop · right at the worst distance", *result["tasks"])
    return report.markdown_table(heads, ([method, *cells] for method, cells in lines.items()))


def picked_windows(result: Row) -> dict[tuple[str, int], list[float]]:
    """(task, layer from 1) → median over the seeds of the window picked there, every `block_steps` steps."""
    windows = {}
    for curve in result["curves"]:
        seeds = list(curve.get("windows", {}).values())
        for layer in range(len(seeds[0][0]) if seeds else 0):
            windows[curve["task"], layer + 1] = medians([[at[layer] for at in seed] for seed in seeds])
    return windows


def half_learned(result: Row, curve: Row) -> list[int | None]:
    """Return each seed's step at which recall was half learned, None if it never was.

    It is the first step from which a block's mean training loss is below half of guessing's, ln(ALPHABET).
    """
    steps: list[int | None] = []
    for losses in curve["losses"].values():
        first = next((i for i, loss in enumerate(losses, 1) if loss < math.log(ALPHABET) / 2), None)
        steps.append(None if first is None else first * result["block_steps"])
    return steps


def steps_text(steps: Sequence[int | None]) -> str:
    """Median and range of `half_learned`; a seed that never got there counts as later than all others."""
    ordered = sorted(steps, key=lambda step: math.inf if step is None else step)
    shown = ["never" if step is None else str(step) for step in ordered]
    middle = shown[len(shown) // 2]
    return middle if len(shown) < 2 else f"{middle} ({shown[0]} … {shown[-1]})"


def before_training(result: Row, task: str) -> dict[int, float]:
    """Accuracy by distance of the weights that all methods started from, median over the seeds, if known."""
    curve = next((curve for curve in curves_of(result, task) if "before" in curve), None)
    if curve is None:
        return {}
    seeds = list(curve["before"].values())
    return {int(d): statistics.median(seed[d] for seed in seeds) for d in seeds[0]}


def ranged(row: Row, name: str, form: str) -> str:
    """Median and range over the seeds of the field `name`."""
    middle, low, high = (signed(row[key], form) for key in (name, f"{name}_min", f"{name}_max"))
    return middle if row["seeds"] < 2 else f"{middle} ({low} … {high})"


def signed(value: float, form: str) -> str:
    """`value` in `form`, which has three decimals; what rounds to zero is not negative."""
    return f"{round(value, 3) + 0.0:{form}}"


def curves_of(result: Row, task: str) -> list[Row]:
    return [curve for curve in result["curves"] if curve["task"] == task]


def medians(seeds: Sequence[Sequence[float]]) -> list[float]:
    return [float(statistics.median(place)) for place in zip(*seeds, strict=True)]
