"""The kernel benchmark's tables, Markdown and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import kernels_ops

Row = dict[str, Any]
BASE = "adjoint"  # what the ratios are against
PASSES = {"forward": "forward", "both": "forward + backward"}
COLOURS = {True: "#D55E00", False: "#0072B2"}  # ours and others; Okabe and Ito's


def show(rows: Sequence[Row], payload: dict[str, Any], stem: Path) -> None:
    """Print a table an operation, and write stem.md and stem.png."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, 110)  # a narrower table would be cut, also in a log
    for op in operations(rows):
        mine = [row for row in rows if row["op"] == op]
        table = Table(title=title(op, mine), title_justify="left", caption_justify="left")
        table.add_column("")
        for name in PASSES.values():
            table.add_column(name, justify="right")
            table.add_column("÷ adjoint", justify="right")
            table.add_column("of the roof", justify="right")
        table.add_column("error", justify="right")
        for label, cells, ours in lines(mine):
            table.add_row(label, *cells, style="bold" if ours and label == mine[0]["label"] else "")
        table.caption = "\n".join(notes(mine)) or None
        console.print(table)
    text = markdown(rows, payload)
    stem.with_suffix(".md").write_text(text)
    for line in conditions(payload):
        console.print(line, soft_wrap=True)
    if any(row["status"] == "measured" for row in rows):
        draw(rows, payload, stem.with_suffix(".png"))
    console.print(f"wrote {stem}.json, .csv, .md and .png", soft_wrap=True)


def operations(rows: Sequence[Row]) -> list[str]:
    """The operations of `rows`, in order, each once."""
    return list(dict.fromkeys(row["op"] for row in rows))


def title(op: str, rows: Sequence[Row]) -> str:
    """The operation with its size and its roof."""
    size = ", ".join(f"{key} {value:,}" for key, value in rows[0]["size"].items())
    roof = "; ".join(
        f"{PASSES[row['pass']]} {milliseconds(row['roof_ms'])} ({row['bound']})"
        for row in rows[:2]
        if "roof_ms" in row
    )
    return f"{kernels_ops.OPS[op].label}: {size}" + (f". Roof: {roof}" if roof else "")


def lines(rows: Sequence[Row]) -> list[tuple[str, list[str], bool]]:
    """(label, cells, ours) of each contender: of both passes time, ratio, share of the roof; the error."""
    found = []
    for key in dict.fromkeys(row["contender"] for row in rows):
        cells: list[str] = []
        for name in PASSES:
            row = find(rows, key, name)
            base = find(rows, BASE, name)
            if row is None or row["status"] != "measured":
                cells += [row["status"] if row else "", "", ""]
                continue
            compared = base is not None and base["status"] == "measured" and key != BASE
            share = f"{row['roof_share']:.0%}" if "roof_share" in row else ""
            cells += [
                milliseconds(row["ms"]),
                f"{row['ms'] / base['ms']:.3g}×" if base and compared else "",
                share,
            ]
        row = next(row for row in rows if row["contender"] == key)
        errors = row.get("errors") or {}
        cells.append(f"{max(errors.values()):.0e}" if errors else "")
        found.append((row["label"], cells, row["ours"]))
    return found


def milliseconds(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def notes(rows: Sequence[Row]) -> list[str]:
    """Why a contender has no time, a line each."""
    said = {(row["label"], row["note"]): None for row in rows if row.get("note")}
    return [f"{label}: {note}" for label, note in said]


def conditions(payload: dict[str, Any]) -> list[str]:
    """How it was measured: the machine, the rates of its roof, versions."""
    environment = payload["environment"]
    machine = environment["gpu"] or f"{environment['threads']} threads on {environment['cpu']}"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    rates = payload["roof"]
    roof = (
        f"Roof: copy {rates['bytes'] / 1e9:.3g} GB/s, {rates['flops'] / 1e9:.3g} GFLOP/s of multiply-adds, "
        f"{rates['exps'] / 1e9:.3g} G exponentials/s, "
        f"{rates['matmul_flops'] / 1e9:.3g} GFLOP/s in matrix products."
        if rates
        else "Roof: not measured."
    )
    complete = "" if payload["complete"] else " Stopped before it was complete."
    measured = (
        f"{machine}, {payload['dtype']}, allocator {payload['allocator']}, median of {payload['repeats']} "
        f"processes, {environment['date'][:10]}, commit {environment['commit']}.{complete}"
    )
    error = (
        "Error: the largest ‖error‖ / ‖value‖ of the output and the gradients against float64; above "
        f"{payload['limit']:.0e} a contender is wrong and not timed."
    )
    software = f"{environment['system']}, Python {environment['python']}, {versions}."
    return [measured, roof, error, software]


def markdown(rows: Sequence[Row], payload: dict[str, Any]) -> str:
    """Everything as one Markdown document."""
    parts = ["# Kernels\n"]
    for op in operations(rows):
        mine = [row for row in rows if row["op"] == op]
        columns = [column for name in PASSES.values() for column in (name, "÷ adjoint", "of the roof")]
        table = [f"| | {' | '.join(columns)} | error |", "| --- |" + " ---: |" * 7]
        for label, cells, ours in lines(mine):
            table.append(f"| {f'**{label}**' if ours else label} | " + " | ".join(cells) + " |")
        parts.append(f"## {title(op, mine)}\n\n" + "\n".join(table) + "\n")
        if notes(mine):
            parts.append("\n".join(f"- {note}" for note in notes(mine)) + "\n")
    parts.append("\n".join(f"- {line}" for line in conditions(payload)) + "\n")
    return "\n".join(parts)


def find(rows: Sequence[Row], contender: str, name: str) -> Row | None:
    """The row of one contender and pass, or None."""
    return next((row for row in rows if row["contender"] == contender and row["pass"] == name), None)


def draw(rows: Sequence[Row], payload: dict[str, Any], path: Path) -> None:
    """A panel an operation and pass: bars of time on a log scale, the roof as a line; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    shown = [op for op in operations(rows) if any(r["op"] == op and r["status"] == "measured" for r in rows)]
    bars = {op: [r for r in rows if r["op"] == op and r["status"] == "measured"] for op in shown}
    heights = [1.2 + len({r["contender"] for r in bars[op]}) for op in shown]
    figure, panels = plt.subplots(
        len(shown),
        2,
        figsize=(11, 0.25 * sum(heights) + 0.5 * len(shown)),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes_row, op in zip(panels, shown, strict=True):
        for axes, (key, pass_label) in zip(axes_row, PASSES.items(), strict=True):
            mine = sorted((r for r in bars[op] if r["pass"] == key), key=lambda r: -r["ms"])
            if not mine:
                axes.set_axis_off()
                continue
            colours = [COLOURS[r["ours"]] for r in mine]
            axes.barh([r["label"] for r in mine], [r["ms"] for r in mine], color=colours, height=0.7)
            for place, row in enumerate(mine):
                axes.annotate(
                    milliseconds(row["ms"]),
                    (row["ms"], place),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
            axes.set_xscale("log")
            low = min([r["ms"] for r in mine] + [r["roof_ms"] for r in mine if "roof_ms" in r])
            axes.set_xlim(low / 2, max(r["ms"] for r in mine) * 4)
            if "roof_ms" in mine[0]:
                axes.axvline(mine[0]["roof_ms"], color="#000000", linewidth=1, linestyle=":")
                axes.annotate(
                    f"roof ({mine[0]['bound']})",
                    (mine[0]["roof_ms"], 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(3, 1),
                    textcoords="offset points",
                    fontsize=6.5,
                )
            name = f"{kernels_ops.OPS[op].label}, {pass_label}"
            axes.set_title(name, loc="left", fontweight="bold", fontsize=8.5, pad=12)
            axes.tick_params(axis="y", length=0)
            axes.grid(True, axis="x", which="major", color="#E6E6E6", linewidth=0.8)
            axes.set_axisbelow(True)
    for axes in panels[-1]:
        axes.set_xlabel("milliseconds")
    figure.text(0.005, -0.03, "\n".join(conditions(payload)[:2]), fontsize=7, color="#666666", va="top")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
