"""The convergence benchmark's table and picture."""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Row = dict[str, Any]
TABLE_MARKS = ("<!-- convergence table -->", "<!-- end of convergence table -->")  # in docs/convergence.md
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


def show(result: dict[str, Any], stem: Path, *, to_docs: bool) -> None:
    """Print the table of `result` (what convergence.json holds), write stem.md and draw stem.png.

    With `to_docs` the picture is copied to docs/ and the table put into docs/convergence.md.
    """
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 132)
    for table in tables(result):
        console.print(table)
    text = markdown(result)
    stem.with_suffix(".md").write_text(f"# Does training still converge?\n\n{text}\n{provenance(result)}\n")
    console.print(f"wrote {stem}.json, .csv and .md", highlight=False, soft_wrap=True)
    picture = stem.with_suffix(".png")
    if result["curves"]:
        draw(result, picture)
        console.print(f"wrote {picture}", highlight=False, soft_wrap=True)
    if to_docs and result["curves"]:
        shutil.copyfile(picture, common.ROOT / "docs" / picture.name)
        document = common.ROOT / "docs" / "convergence.md"
        document.write_text(with_table(document.read_text(), f"{text}\n{provenance(result)}\n"))
        console.print("docs/ shows these results now", highlight=False)


def label(method: str) -> str:
    """`truncated-16` → "Truncated(16)", as a reader of the API would write it."""
    match = re.fullmatch(r"(.*?)-(\d+|auto)", method)
    kind, window = (match[1], match[2]) if match else (method, None)
    name = {"backprop": "Backprop", "exact": "Exact", "layer-local": "LayerLocal"}.get(kind, "Truncated")
    if window is None:
        return name
    return f"{name}({window}, unbiased)" if kind == "unbiased" else f"{name}({window})"


def provenance(result: dict[str, Any]) -> str:
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


def columns(
    result: dict[str, Any], task: str, *, short: bool = False
) -> tuple[list[str], list[tuple[Row, list[str]]]]:
    """(headings, [(row, cells)]) of one task's table: medians, in brackets the range over the seeds.

    With `short`, for a terminal, the gap's range is left out.
    """
    rows = [row for row in result["rows"] if row["task"] == task]
    distances = sorted(
        {int(m[1]) for row in rows for key in row if (m := re.fullmatch(r"accuracy_(\d+)", key))}
    )
    heads = ["method", "held-out loss", "gap to Backprop", "curves apart, 10 steps", "all steps"]
    heads = [head.replace(" to Backprop", "").replace("curves ", "") for head in heads] if short else heads
    heads += ["half learned at step"] * bool(distances) + [f"at {d}" for d in distances]
    curves = {curve["method"]: curve for curve in _of(result, task)}
    lines = []
    before = before_training(result, task)
    if before:
        lines.append(({"method": ""}, ["before", *"–––––", *(f"{before[d]:.0%}" for d in distances)]))
    for row in rows:
        if not row["seeds"]:
            lines.append((row, [label(row["method"]), row["note"]] + [""] * (len(heads) - 2)))
            continue
        cells = [label(row["method"]), _ranged(row, "held_out", ".3f")]
        if "gap" in row and row["method"] != "backprop":
            cells += [_signed(row["gap"], "+.3f") if short else _ranged(row, "gap", "+.3f")]
            cells += [f"{row['curve_distance_first']:.1g}", f"{row['curve_distance']:.1g}"]
        else:
            cells += ["–", "–", "–"]
        if distances:
            cells.append(_steps_text(half_learned(result, curves[row["method"]])))
        for d in distances:
            value = row.get(f"accuracy_{d}")
            cells.append("" if value is None else f"{value:.0%}")
        lines.append((row, cells))
    return heads, lines


def tables(result: dict[str, Any]) -> list[Any]:
    """A rich table a task."""
    from rich.table import Table

    made = []
    for task, about in result["tasks"].items():
        heads, lines = columns(result, task, short=True)
        table = Table(title=f"{about['label']}, {about['steps']} steps", title_justify="left")
        for i, head in enumerate(heads):
            table.add_column(head, justify="right" if i else "left")
        for row, cells in lines:
            table.add_row(*cells, style="bold" if row["method"] == "backprop" else "")
        made.append(table)
    return made


def markdown(result: dict[str, Any]) -> str:
    """The tables in Markdown, one a task, and what the window "auto" was."""
    parts = []
    for task, about in result["tasks"].items():
        heads, lines = columns(result, task)
        part = [f"**{about['label']}**, {about['steps']} steps", "", "| " + " | ".join(heads) + " |"]
        part.append("| --- |" + " ---: |" * (len(heads) - 1))
        part += ["| " + " | ".join(cells) + " |" for _, cells in lines]
        parts.append("\n".join(part))
    chosen = picked_windows(result)
    if chosen:
        lines_ = ["**Windows that `auto` picked**, tokens, median over the seeds", ""]
        lines_ += [
            "| task | layer | first step | a quarter | half | last |",
            "| --- | ---: |" + " ---: |" * 4,
        ]
        lines_ += [
            f"| {result['tasks'][task]['label']} | {layer} | "
            + " | ".join(f"{at[i]:,.0f}" for i in (0, len(at) // 4, len(at) // 2, -1))
            + " |"
            for (task, layer), (_, at) in chosen.items()
        ]
        parts.append("\n".join(lines_))
    return "\n\n".join(parts) + "\n"


def picked_windows(result: dict[str, Any]) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """(task, layer from 1) → (steps, median over the seeds of the window that was picked there)."""
    found = {}
    for curve in result["curves"]:
        seeds = list(curve.get("windows", {}).values())
        for layer in range(len(seeds[0][0]) if seeds else 0):
            columns_ = zip(*([at[layer] for at in seed] for seed in seeds), strict=True)
            medians = [float(statistics.median(c)) for c in columns_]
            steps = [1 + i * result["block_steps"] for i in range(len(medians))]
            found[curve["task"], layer + 1] = steps, medians
    return found


def half_learned(result: dict[str, Any], curve: dict[str, Any]) -> list[int | None]:
    """Of each seed, the step from which a block's mean training loss of recall first was below half of
    guessing's, ln(ALPHABET); None where it never was."""
    from benchmarks.recall_tasks import ALPHABET

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


def before_training(result: dict[str, Any], task: str) -> dict[int, float]:
    """Accuracy by distance of the weights that all methods started from, median over the seeds, if known."""
    curve = next((curve for curve in _of(result, task) if "before" in curve), None)
    if curve is None:
        return {}
    seeds = list(curve["before"].values())
    return {int(d): statistics.median(seed[d] for seed in seeds) for d in seeds[0]}


def with_table(document: str, table: str) -> str:
    """`document` with what stands between its table marks replaced. Raises ValueError without the marks."""
    before, begin, rest = document.partition(TABLE_MARKS[0])
    _, end, after = rest.partition(TABLE_MARKS[1])
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {TABLE_MARKS[0]} and {TABLE_MARKS[1]}")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def _ranged(row: Row, name: str, form: str) -> str:
    middle, low, high = (_signed(row[key], form) for key in (name, f"{name}_min", f"{name}_max"))
    return middle if row["seeds"] < 2 else f"{middle} ({low} … {high})"


def _signed(value: float, form: str) -> str:
    """`value` in `form`, which has three decimals; what rounds to zero is not negative."""
    return f"{round(value, 3) + 0.0:{form}}"


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


def draw(result: dict[str, Any], path: Path) -> None:
    """A column a task: above, training loss against steps (median over the seeds and each of them);
    below, accuracy against distance, or for text what the methods lose on the held-out split."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    tasks = list(result["tasks"])
    style = styles(list(dict.fromkeys(row["method"] for row in result["rows"])))
    n = len(tasks)
    figure, panels = plt.subplots(
        2, n, figsize=(4.1 * max(n, 2) + 0.6, 7.4), layout="constrained", squeeze=False
    )
    for (above, below), task in zip(panels.T, tasks, strict=True):
        _draw_losses(above, result, task, style)
        above.set_title(result["tasks"][task]["label"], loc="left", fontweight="bold", fontsize=10.5)
        if any("accuracy" in curve for curve in _of(result, task)):
            _draw_accuracy(below, result, task, style)
        else:
            _draw_held_out(below, result, task, style)
    figure.legend(
        handles=[Line2D([], [], **look, label=label(method)) for method, look in style.items()],
        loc="outside upper center",
        ncols=5,
        frameon=False,
        fontsize=10,
        title="thick: median over the seeds; thin: each seed",
    )
    figure.supxlabel(_footer(result), x=0.005, ha="left", fontsize=7.5, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _draw_losses(axes: Any, result: dict[str, Any], task: str, style: dict[str, Any]) -> None:
    block, steps = result["block_steps"], result["tasks"][task]["steps"]
    for curve in _of(result, task):
        seeds = list(curve["losses"].values())
        middle = _medians(seeds)
        at = [min((i + 0.5) * block, steps) for i in range(len(middle))]
        look = style[curve["method"]]
        front = 5 if curve["method"] == "exact" else 3
        axes.plot(at, middle, **look, zorder=front)
        _draw_seeds(axes, at, seeds, look)
    axes.set(xlabel="step", ylabel="training loss, nats a token", yscale="linear")
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_accuracy(axes: Any, result: dict[str, Any], task: str, style: dict[str, Any]) -> None:
    from benchmarks.recall_tasks import ALPHABET

    distances: list[int] = []
    for curve in _of(result, task):
        distances = sorted(map(int, curve["questions"]))
        seeds = [[100 * s[str(d)] for d in distances] for s in curve["accuracy"].values()]
        look = style[curve["method"]]
        axes.plot(distances, _medians(seeds), **look, marker="o", markersize=3.5,
                  zorder=5 if curve["method"] == "exact" else 3)  # fmt: skip
        _draw_seeds(axes, distances, seeds, look)
    before = before_training(result, task)
    if before:
        axes.plot(distances, [100 * before[d] for d in distances], color="#888888", linewidth=1.2,
                  linestyle=(0, (5, 2)))  # fmt: skip
        axes.annotate("before", (distances[0], 100 * before[distances[0]]), xytext=(0, 4),
                      textcoords="offset points", fontsize=8, color="#666666")  # fmt: skip
    axes.axhline(100 / ALPHABET, color="#888888", linewidth=1, linestyle=":")
    axes.annotate("chance", (distances[-1], 100 / ALPHABET), xytext=(0, 3), textcoords="offset points",
                  ha="right", fontsize=8, color="#666666")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(d) for d in distances])
    axes.set(xlabel="distance, tokens from the value to the question", ylabel="right answers, %",
             ylim=(-3, 104))  # fmt: skip
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_held_out(axes: Any, result: dict[str, Any], task: str, style: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if row["task"] == task and row["seeds"]][::-1]
    for height, row in enumerate(rows):
        look = style[row["method"]]
        axes.plot([row["held_out_min"], row["held_out_max"]], [height] * 2, color=look["color"], linewidth=2)
        axes.plot(row["held_out"], height, "o", color=look["color"], markersize=7, markeredgecolor="black",
                  markeredgewidth=0.5)  # fmt: skip
        text = f"{row['held_out']:.3f}" + (
            f" ({_signed(row['gap'], '+.3f')})" if row.get("gap") is not None else ""
        )
        axes.annotate(text, (row["held_out_max"], height), xytext=(8, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(rows)), [label(row["method"]) for row in rows])
    axes.set_xlabel("loss on held-out text, nats a byte (gap to Backprop)")
    axes.margins(x=0.35)
    axes.set_xlim(left=axes.dataLim.x0 - 0.08 * axes.dataLim.width)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def _of(result: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return [curve for curve in result["curves"] if curve["task"] == task]


def _medians(seeds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(place) for place in zip(*seeds, strict=True)]


def _draw_seeds(
    axes: Any, at: Sequence[float], seeds: Sequence[Sequence[float]], look: dict[str, Any]
) -> None:
    """Each seed by itself: a seed that never learns would make a band of the whole picture."""
    for seed in seeds if len(seeds) > 1 else ():
        axes.plot(at, seed, color=look["color"], linestyle=look["linestyle"], linewidth=0.8, alpha=0.45)


def _footer(result: dict[str, Any]) -> str:
    where, model = result["environment"], result["model"]
    return " · ".join(
        (
            f"{model['n_layer']} Mamba-1 layers, d_model {model['d_model']}",
            f"{result['batch']} × {result['seqlen']} tokens a step, {result['seeds']} seeds, AdamW, float32",
            f"{where['cores']} cores of {where['cpu']}",
            f"torch {where['versions'].get('torch')}",
            where["date"][:10],
            where["commit"],
        )
    )
