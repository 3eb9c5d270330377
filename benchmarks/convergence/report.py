"""The convergence benchmark's tables and picture."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row
from benchmarks.convergence.tasks import ALPHABET

# Okabe and Ito's palette; windows of one method from light to dark, the methods that are exact in black.
_FIXED = {
    "backprop": ("#000000", "-", 3.2),
    "exact": ("#F0E442", ":", 1.8),
    "truncated-auto": ("#D55E00", "--", 1.8),
    "layer-local": ("#009E73", "-", 1.8),
}
_BY_WINDOW = {
    "truncated": ("-", ("#9CCBEC", "#3C9FDD", "#0A4F8A", "#062F52")),
    "unbiased": ("-.", ("#CC79A7", "#8A3F6B", "#5A2145")),
    "layer-local": ("--", ("#5CC9A7", "#00694B", "#003F2D")),
}


def show(result: Row, stem: Path, *, to_docs: bool) -> None:
    """Print the tables of `result` (what convergence.json holds), write stem.md and draw stem.png.

    With `to_docs` the picture is copied to docs/ and the tables put into docs/convergence.md.
    """
    for task, about in result["tasks"].items():
        heads, lines = columns(result, task, short=True)
        common.print_table(f"{about['label']}, {about['steps']} steps", heads, lines, bold=["Backprop"])
    text = f"{markdown(result)}\n{provenance(result)}\n"
    stem.with_suffix(".md").write_text(f"# Does training still converge?\n\n{text}")
    print(f"wrote {stem}.json, .csv and .md")
    if result["curves"]:
        draw(result, stem.with_suffix(".png"))
        print(f"wrote {stem}.png")
        if to_docs:
            document = common.ROOT / "docs" / "convergence.md"
            common.to_docs(stem.with_suffix(".png"), document, "convergence", text)


def label(method: str) -> str:
    """`truncated-16` → "Truncated(16)", as a reader of the API would write it."""
    match = re.fullmatch(r"(.*?)-(\d+|auto)", method)
    kind, window = (match[1], match[2]) if match else (method, None)
    name = {"backprop": "Backprop", "exact": "Exact", "layer-local": "LayerLocal"}.get(kind, "Truncated")
    if window is None:
        return name
    return f"{name}({window}, unbiased)" if kind == "unbiased" else f"{name}({window})"


def provenance(result: Row) -> str:
    """One paragraph: what was run, where, when."""
    where, model, tasks = result["environment"], result["model"], result["tasks"]
    steps = ", ".join(f"{name} {task['steps']}" for name, task in tasks.items())
    return (
        f"{result['seeds']} seeds; d_model {model['d_model']}, {model['n_layer']} Mamba-1 layers, d_state "
        f"{model['d_state']}, float32; {result['batch']} sequences of {result['seqlen']:,} tokens a step; "
        f"steps: {steps}. {where['cores']} cores of {where['cpu']}, {where['system']}, Python "
        f"{where['python']}, torch {where['versions'].get('torch')}, NumPy {where['versions'].get('numpy')}, "
        f"commit {where['commit'] or 'unknown'}, {where['date'][:10]}. `{result['command']}`"
        + ("" if result["complete"] else " (stopped before its end)")
    )


# ---------------------------------------------------------------------------------------------------- tables


def columns(result: Row, task: str, *, short: bool = False) -> tuple[list[str], list[list[str]]]:
    """(headings, lines of cells) of one task's table: medians, in brackets the range over the seeds.

    With `short`, for a terminal, the gap's range is left out.
    """
    rows = [row for row in result["rows"] if row["task"] == task]
    keys = {key for row in rows for key in row}
    distances = sorted(int(match[1]) for key in keys if (match := re.fullmatch(r"accuracy_(\d+)", key)))
    if short:
        heads = ["method", "held-out loss", "gap", "apart, 10 steps", "all steps"]
    else:
        heads = ["method", "held-out loss", "gap to Backprop", "curves apart, 10 steps", "all steps"]
    heads += ["half learned at step"] * bool(distances) + [f"at {d}" for d in distances]
    curves = {curve["method"]: curve for curve in _of(result, task)}
    before = before_training(result, task)
    lines = [["before", *"–––––", *(f"{before[d]:.0%}" for d in distances)]] if before else []
    for row in rows:
        if not row["seeds"]:
            lines.append([label(row["method"]), row["note"]] + [""] * (len(heads) - 2))
            continue
        cells = [label(row["method"]), _ranged(row, "held_out", ".3f")]
        if "gap" in row and row["method"] != "backprop":
            cells += [_signed(row["gap"], "+.3f") if short else _ranged(row, "gap", "+.3f")]
            cells += [f"{row['curve_distance_first']:.1g}", f"{row['curve_distance']:.1g}"]
        else:
            cells += ["–", "–", "–"]
        if distances:
            cells.append(_steps_text(half_learned(result, curves[row["method"]])))
        accuracies = (row.get(f"accuracy_{d}") for d in distances)
        lines.append(cells + ["" if value is None else f"{value:.0%}" for value in accuracies])
    return heads, lines


def markdown(result: Row) -> str:
    """The tables in Markdown, one a task, and what the window "auto" was."""
    parts = [
        f"**{about['label']}**, {about['steps']} steps\n\n{common.markdown_table(*columns(result, task))}"
        for task, about in result["tasks"].items()
    ]
    chosen = picked_windows(result)
    if chosen:
        lines = [
            [result["tasks"][task]["label"], str(layer)]
            + [f"{windows[i]:,.0f}" for i in (0, len(windows) // 4, len(windows) // 2, -1)]
            for (task, layer), windows in chosen.items()
        ]
        table = common.markdown_table(["task", "layer", "first step", "a quarter", "half", "last"], lines)
        parts.append(f"**Windows that `auto` picked**, tokens, median over the seeds\n\n{table}")
    return "\n".join(parts)


def picked_windows(result: Row) -> dict[tuple[str, int], list[float]]:
    """(task, layer from 1) → median over the seeds of the window picked there, every `block_steps` steps."""
    found = {}
    for curve in result["curves"]:
        seeds = list(curve.get("windows", {}).values())
        for layer in range(len(seeds[0][0]) if seeds else 0):
            found[curve["task"], layer + 1] = _medians([[at[layer] for at in seed] for seed in seeds])
    return found


def half_learned(result: Row, curve: Row) -> list[int | None]:
    """Of each seed, the step from which a block's mean training loss of recall first was below half of
    guessing's, ln(ALPHABET); None where it never was."""
    found: list[int | None] = []
    for losses in curve["losses"].values():
        first = next((i for i, loss in enumerate(losses, 1) if loss < math.log(ALPHABET) / 2), None)
        found.append(None if first is None else first * result["block_steps"])
    return found


def _steps_text(steps: Sequence[int | None]) -> str:
    """Median and range of `half_learned`; a seed that never got there counts as later than all others."""
    ordered = sorted(steps, key=lambda step: math.inf if step is None else step)
    shown = ["never" if step is None else str(step) for step in ordered]
    middle = shown[len(shown) // 2]
    return middle if len(shown) < 2 else f"{middle} ({shown[0]} … {shown[-1]})"


def before_training(result: Row, task: str) -> dict[int, float]:
    """Accuracy by distance of the weights that all methods started from, median over the seeds, if known."""
    curve = next((curve for curve in _of(result, task) if "before" in curve), None)
    if curve is None:
        return {}
    seeds = list(curve["before"].values())
    return {int(d): statistics.median(seed[d] for seed in seeds) for d in seeds[0]}


def _ranged(row: Row, name: str, form: str) -> str:
    middle, low, high = (_signed(row[key], form) for key in (name, f"{name}_min", f"{name}_max"))
    return middle if row["seeds"] < 2 else f"{middle} ({low} … {high})"


def _signed(value: float, form: str) -> str:
    """`value` in `form`, which has three decimals; what rounds to zero is not negative."""
    return f"{round(value, 3) + 0.0:{form}}"


def _of(result: Row, task: str) -> list[Row]:
    return [curve for curve in result["curves"] if curve["task"] == task]


def _medians(seeds: Sequence[Sequence[float]]) -> list[float]:
    return [float(statistics.median(place)) for place in zip(*seeds, strict=True)]


# --------------------------------------------------------------------------------------------------- picture


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, dash and width a method; windows of one kind from light to dark."""
    given: dict[str, dict[str, Any]] = {}
    shades: dict[str, list[str]] = {}
    for method in sorted(methods, key=lambda m: [int(w) for w in re.findall(r"\d+", m)]):
        if method in _FIXED:
            colour, dash, width = _FIXED[method]
        else:
            kind = method.rpartition("-")[0]
            dash, palette = _BY_WINDOW[kind]
            shades.setdefault(kind, []).append(method)
            colour, width = palette[(len(shades[kind]) - 1) % len(palette)], 1.8
        given[method] = {"color": colour, "linestyle": dash, "linewidth": width}
    return {method: given[method] for method in methods}


def draw(result: Row, path: Path) -> None:
    """A column a task: above, training loss against steps (median over the seeds and each of them);
    below, accuracy against distance, or for text what the methods lose on the held-out split."""
    plt = common.pyplot()
    tasks, model = list(result["tasks"]), result["model"]
    style = styles(list(dict.fromkeys(row["method"] for row in result["rows"])))
    figure, panels = plt.subplots(2, len(tasks), figsize=(4.1 * max(len(tasks), 2) + 0.6, 7.4), squeeze=False)
    for (above, below), task in zip(panels.T, tasks, strict=True):
        _draw_losses(above, result, task, style)
        above.set_title(result["tasks"][task]["label"], fontsize=10.5)
        recall = any("accuracy" in curve for curve in _of(result, task))
        (_draw_accuracy if recall else _draw_held_out)(below, result, task, style)
    figure.legend(
        handles=[plt.Line2D([], [], **look, label=label(method)) for method, look in style.items()],
        loc="outside upper center",
        ncols=5,
        fontsize=10,
        title="thick: median over the seeds; thin: each seed",
    )
    conditions = (
        f"{model['n_layer']} Mamba-1 layers, d_model {model['d_model']}",
        f"{result['batch']} × {result['seqlen']} tokens a step, {result['seeds']} seeds, AdamW, float32",
    )
    common.save(figure, path, common.footer(result["environment"], *conditions))


def _draw_curve(
    axes: Any, at: Sequence[float], seeds: Sequence[Sequence[float]], look: Row, method: str, **more: Any
) -> None:
    """The median and each seed by itself: a seed that never learns would make a band of the whole picture."""
    axes.plot(at, _medians(seeds), **look, **more, zorder=5 if method == "exact" else 3)
    for seed in seeds if len(seeds) > 1 else ():
        axes.plot(at, seed, color=look["color"], linestyle=look["linestyle"], linewidth=0.8, alpha=0.45)


def _draw_losses(axes: Any, result: Row, task: str, style: Row) -> None:
    block, steps = result["block_steps"], result["tasks"][task]["steps"]
    for curve in _of(result, task):
        seeds = list(curve["losses"].values())
        at = [min((i + 0.5) * block, steps) for i in range(len(seeds[0]))]
        _draw_curve(axes, at, seeds, style[curve["method"]], curve["method"])
    axes.set(xlabel="step", ylabel="training loss, nats a token")


def _draw_accuracy(axes: Any, result: Row, task: str, style: Row) -> None:
    curves = _of(result, task)
    distances = sorted(map(int, curves[0]["questions"]))
    for curve in curves:
        seeds = [[100 * s[str(d)] for d in distances] for s in curve["accuracy"].values()]
        _draw_curve(
            axes, distances, seeds, style[curve["method"]], curve["method"], marker="o", markersize=3.5
        )
    small: Row = {"textcoords": "offset points", "fontsize": 8, "color": "#666666"}
    before = before_training(result, task)
    if before:
        known = [100 * before[d] for d in distances]
        axes.plot(distances, known, color="#888888", linewidth=1.2, linestyle=(0, (5, 2)))
        axes.annotate("before", (distances[0], known[0]), xytext=(0, 4), **small)
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
        gap = f" ({_signed(row['gap'], '+.3f')})" if "gap" in row else ""
        axes.annotate(f"{row['held_out']:.3f}{gap}", (row["held_out_max"], height), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(rows)), [label(row["method"]) for row in rows])
    axes.set_xlabel("loss on held-out text, nats a byte (gap to Backprop)")
    axes.margins(x=0.35)
    axes.set_xlim(left=axes.dataLim.x0 - 0.08 * axes.dataLim.width)
    axes.grid(False, axis="y")
