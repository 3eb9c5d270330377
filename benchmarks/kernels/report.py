"""The kernel benchmark's tables, Markdown and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row
from benchmarks.kernels.measure import PASSES
from benchmarks.kernels.operations import OPS

BASE = "adjoint"  # what the ratios are against
COLOURS = {True: "#D55E00", False: "#0072B2"}  # ours and others; Okabe and Ito's


def show(rows: Sequence[Row], payload: Row, stem: Path) -> None:
    """Print a table an operation, and write stem.md and stem.png."""
    for op, mine in by_operation(rows).items():
        ours = {row["label"] for row in mine if row["ours"]}
        common.print_table(title(op, mine), HEADS, lines(mine), bold=ours, notes=notes(mine))
    stem.with_suffix(".md").write_text(markdown(rows, payload))
    print("\n".join(conditions(payload)))
    if any(row["status"] == "measured" for row in rows):
        draw(rows, payload, stem.with_suffix(".png"))
    print(f"wrote {stem}.json, .csv, .md and .png")


def by_operation(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each operation."""
    return {op: [row for row in rows if row["op"] == op] for op in dict.fromkeys(row["op"] for row in rows)}


def title(op: str, rows: Sequence[Row]) -> str:
    """The operation with its size and its roof."""
    size = ", ".join(f"{key} {value:,}" for key, value in rows[0]["size"].items())
    roof = "; ".join(
        f"{PASSES[row['pass']]} {milliseconds(row['roof_ms'])} ({row['bound']})"
        for row in rows[:2]
        if "roof_ms" in row
    )
    return f"{OPS[op].label}: {size}" + (f". Roof: {roof}" if roof else "")


HEADS = ["", *(head for name in PASSES.values() for head in (name, "÷ adjoint", "of the roof")), "error"]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Each contender's cells, in the order of HEADS: of both passes time, ratio and share of the roof."""
    by_key = {(row["contender"], row["pass"]): row for row in rows}
    found = []
    for key in dict.fromkeys(row["contender"] for row in rows):
        cells = [by_key[key, "forward"]["label"]]
        for name in PASSES:
            row, base = by_key[key, name], by_key.get((BASE, name), {})
            if row["status"] != "measured":
                cells += [row["status"], "", ""]
                continue
            compared = key != BASE and base.get("status") == "measured"
            cells += [
                milliseconds(row["ms"]),
                f"{row['ms'] / base['ms']:.3g}×" if compared else "",
                f"{row['roof_share']:.0%}" if "roof_share" in row else "",
            ]
        errors = by_key[key, "forward"].get("errors")
        found.append([*cells, f"{max(errors.values()):.0e}" if errors else ""])
    return found


def milliseconds(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def notes(rows: Sequence[Row]) -> list[str]:
    """Why a contender has no time, a line each."""
    return list(dict.fromkeys(f"{row['label']}: {row['note']}" for row in rows if row.get("note")))


def conditions(payload: Row) -> list[str]:
    """How it was measured: the machine, the rates of its roof, versions."""
    environment, rates = payload["environment"], payload["roof"]
    where = environment["gpu"] or f"{environment['threads']} threads on {environment['cpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    roof = "Roof: not measured."
    if rates:
        roof = (
            f"Roof: copy {rates['bytes'] / 1e9:.3g} GB/s, {rates['flops'] / 1e9:.3g} GFLOP/s of "
            f"multiply-adds, {rates['exps'] / 1e9:.3g} G exponentials/s, "
            f"{rates['matmul_flops'] / 1e9:.3g} GFLOP/s in matrix products."
        )
    measured = (
        f"{where}, {payload['dtype']}, allocator {payload['allocator']}, median of {payload['repeats']} "
        f"processes, {environment['date'][:10]}, commit {environment['commit']}."
        f"{'' if payload['complete'] else ' Stopped before it was complete.'}"
    )
    error = (
        "Error: the largest ‖error‖ / ‖value‖ of the output and the gradients against float64; above "
        f"{payload['limit']:.0e} a contender is wrong and not timed."
    )
    return [measured, roof, error, f"{environment['system']}, Python {environment['python']}, {versions}."]


def markdown(rows: Sequence[Row], payload: Row) -> str:
    """Everything as one Markdown document."""
    parts = ["# Kernels\n"]
    for op, mine in by_operation(rows).items():
        ours = {row["label"] for row in mine if row["ours"]}
        table = ([f"**{name}**" if name in ours else name, *cells] for name, *cells in lines(mine))
        parts.append(f"## {title(op, mine)}\n\n{common.markdown_table(HEADS, table)}")
        if notes(mine):
            parts.append("".join(f"- {note}\n" for note in notes(mine)))
    parts.append("".join(f"- {line}\n" for line in conditions(payload)))
    return "\n".join(parts)


def draw(rows: Sequence[Row], payload: Row, path: Path) -> None:
    """A panel an operation and pass: bars of time on a log scale, the roof as a line; written to `path`."""
    bars = by_operation([row for row in rows if row["status"] == "measured"])
    heights = [1.2 + len({row["contender"] for row in mine}) for mine in bars.values()]
    figure, panels = common.pyplot().subplots(
        len(bars),
        2,
        figsize=(11, 0.25 * sum(heights) + 0.5 * len(bars)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes_row, (op, mine) in zip(panels, bars.items(), strict=True):
        for axes, (name, pass_label) in zip(axes_row, PASSES.items(), strict=True):
            of_pass = sorted((row for row in mine if row["pass"] == name), key=lambda row: -row["ms"])
            axes.set_title(f"{OPS[op].label}, {pass_label}", fontsize=8.5, pad=12)
            _draw_bars(axes, of_pass) if of_pass else axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("milliseconds")
    common.save(figure, path, "\n".join(conditions(payload)[:2]))


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}
    colours = [COLOURS[row["ours"]] for row in rows]
    axes.barh([row["label"] for row in rows], [row["ms"] for row in rows], color=colours, height=0.7)
    for place, row in enumerate(rows):
        axes.annotate(milliseconds(row["ms"]), (row["ms"], place), xytext=(3, 0), va="center", **small)
    axes.set_xscale("log")
    low = min(min(row["ms"], row.get("roof_ms", row["ms"])) for row in rows)
    axes.set_xlim(low / 2, max(row["ms"] for row in rows) * 4)
    if "roof_ms" in rows[0]:
        roof = rows[0]["roof_ms"]
        axes.axvline(roof, color="#000000", linewidth=1, linestyle=":")
        axes.annotate(
            f"roof ({rows[0]['bound']})",
            (roof, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 1),
            **small,
        )
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.grid(False, axis="y")
