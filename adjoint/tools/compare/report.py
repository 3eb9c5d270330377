"""Results of a comparison: a table on the terminal, and compare.png."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adjoint.files import new_figure, save_figure
from adjoint.memory import size_text, size_unit
from adjoint.tools.measure.passes import typical
from adjoint.tools.measure.show import (
    fits_text,
    plain_ticks,
    print_table,
    ticks_of_lengths,
    tokens,
)

STYLES = {
    "transformers": ("tab:gray", "-"),
    "checkpointing": ("tab:blue", "--"),
    "wrapped": ("tab:orange", "-"),
}


def show(result: Mapping[str, Any]) -> None:
    """Print the table and the conclusion."""
    settings, rows = result["settings"], result["rows"]
    lengths = sorted({row["length"] for row in rows})
    table = []
    for way, fits in result["fits"].items():
        cells = {row["length"]: _cell(row) for row in rows if row["way"] == way}
        table.append((way, *(cells.get(n, "") for n in lengths), fits_text(fits)))
    head = ("", *map(tokens, lengths), f"fits in {size_text(settings['limit'])}")
    print_table(head, table, "peak memory · time of forward + backward")
    hardware = result["environment"]["gpu"] or f"{result['environment']['cores']} cores"
    print(
        "memory: a step's peak above the imports, weights and gradients included, without an "
        f"optimizer; time: median of {settings['repeat']} steps; ~: by a line through the last two; "
        f"{hardware}"
    )
    for line in conclusion(result):
        print(line)


def conclusion(result: Mapping[str, Any]) -> list[str]:
    """Say how far gradients differ, and what is gained at the longest length that both ways ran."""
    lines, gradients = [], result["gradients"]
    if gradients is not None:
        lines.append(
            f"gradients of {gradients['length']:,} tokens differ by {gradients['difference']:.1e} at most "
            f"({gradients['parameter']}, {result['settings']['dtype']})"
            if "difference" in gradients
            else "gradients were not compared: both ways together do not fit"
        )
    runs = {(row["way"], row["length"]): row for row in result["rows"] if row.get("memory_bytes")}
    for way in ("transformers", "checkpointing"):
        both = [n for w, n in runs if w == way and ("wrapped", n) in runs]
        if both:
            theirs, ours = runs[way, max(both)], runs["wrapped", max(both)]
            memory, time = (ours[field] / theirs[field] for field in ("memory_bytes", "seconds_per_step"))
            lines.append(
                f"at {tokens(max(both))} tokens, wrapped takes {memory:.0%} of the memory of {way} and "
                f"{time:.0%} of its time"
            )
    return lines


def row_text(answer: Mapping[str, Any]) -> str:
    """Say what a point has found, as soon as it is measured."""
    if "difference" in answer:
        return f"differ by {answer['difference']:.1e} at most ({answer['parameter']})"
    if "memory_bytes" in answer:
        return _cell({**answer, "seconds_per_step": typical(answer["seconds"])})
    return f"does not fit ({next(iter(answer.values()))})"


def _cell(row: Mapping[str, Any]) -> str:
    if "memory_bytes" not in row:
        return "does not fit"
    return f"{size_text(row['memory_bytes'])} · {row['seconds_per_step']:.2f} s"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Memory and time against length, a line per way; the limit of memory is dotted."""
    figure = new_figure(9, 3.8)
    rows = [row for row in result["rows"] if "memory_bytes" in row]
    lengths = sorted({row["length"] for row in result["rows"]})
    unit, scale = size_unit(max(row["memory_bytes"] for row in rows))
    panels = (
        ("memory_bytes", scale, f"peak memory of a step, {unit}"),
        ("seconds_per_step", 1, "forward + backward, seconds"),
    )
    for place, (field, divisor, label) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, place)
        for way, (colour, dash) in STYLES.items():
            points = [(row["length"], row[field] / divisor) for row in rows if row["way"] == way]
            if points:
                axes.plot(*zip(*points, strict=True), "o", linestyle=dash, color=colour, label=way)
        axes.set_yscale("log")
        plain_ticks(axes)
        axes.set(xlabel="tokens", ylabel=label)
        ticks_of_lengths(axes, lengths)
        axes.grid(alpha=0.25)
    limit = result["settings"]["limit"]
    figure.axes[0].axhline(limit / scale, color="tab:red", linestyle=":", label=f"limit, {size_text(limit)}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # below both panels, where no line crosses it
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(f"{result['settings']['name']}: {'; '.join(conclusion(result)[-1:])}", fontsize=9)
    save_figure(figure, path)
