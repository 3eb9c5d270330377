"""The memory benchmark's table, ratios and picture."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Row = dict[str, Any]
BASE = "exact"  # what the ratios are against
TABLE_MARKS = ("<!-- memory table -->", "<!-- end of memory table -->")  # in README.md
# Okabe and Ito's palette, readable with every kind of colour vision; ours are drawn thick, peers dashed.
STYLE: dict[str, tuple[str, str]] = {
    "exact": ("#D55E00", "-"),
    "exact-mamba2": ("#CC79A7", "-"),
    "backprop": ("#000000", "-"),
    "backprop-checkpoint": ("#7A7A7A", "-"),
    "hf-mamba": ("#0072B2", "--"),
    "hf-mamba-checkpoint": ("#3C9FDD", "--"),
    "hf-mamba-slow": ("#8C6D1F", "--"),
    "hf-mamba2": ("#00694B", "--"),
    "hf-mamba2-checkpoint": ("#2BB389", "--"),
}


def show(rows: Sequence[Row], environment: dict[str, Any], stem: Path, *, to_docs: bool) -> None:
    """Print the tables and ratios of `rows` and draw stem.png.

    With `to_docs`, the picture is copied to docs/ and the first allocator's table put into README.md.
    """
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 96)  # a narrower table would be cut, also in a log
    for allocator in dict.fromkeys(row["allocator"] for row in rows):
        chosen = [row for row in rows if row["allocator"] == allocator]
        for table in tables(chosen, allocator):
            console.print(table)
        for line in growth(chosen):
            console.print(line, highlight=False)
        suffix = "" if allocator == rows[0]["allocator"] else f"-{allocator}"
        picture = stem.with_name(f"{stem.name}{suffix}.png")
        if any(row["status"] == "measured" for row in chosen):
            draw(chosen, environment, picture)
            console.print(f"wrote {picture}", highlight=False, soft_wrap=True)
            if to_docs and not suffix:
                shutil.copyfile(picture, common.ROOT / "docs" / picture.name)
                readme = common.ROOT / "README.md"
                readme.write_text(with_table(readme.read_text(), markdown(chosen)))
                console.print("README.md and docs/ show these results now", highlight=False)
    console.print(f"wrote {stem}.json and {stem}.csv", highlight=False, soft_wrap=True)


def tables(rows: Sequence[Row], allocator: str) -> list[Any]:
    """Two rich tables, memory and time: a row a method, a column a length, each cell with its ratio."""
    from rich.table import Table

    lengths = sorted({row["length"] for row in rows})
    made = []
    for field, title, unit in (
        ("memory_bytes", "peak memory above the imports, MiB", 2**20),
        ("ms_per_token", "forward + backward, ms a token", 1),
    ):
        table = Table(title=f"{title} (× of Exact) · allocator: {allocator}", title_justify="left")
        table.add_column("", min_width=28)
        for length in lengths:
            table.add_column(f"{length:,}", justify="right")
        for name in dict.fromkeys(row["method"] for row in rows):
            cells = []
            for length in lengths:
                row = find(rows, name, length)
                if row is None or row["status"] != "measured":
                    cells.append("" if row is None else {"skipped": "–", "failed": "failed"}[row["status"]])
                    continue
                text = f"{row[field] / unit:,.0f}" if unit > 1 else f"{row[field]:.3f}"
                base = find(rows, BASE, length)
                if base is not None and base["status"] == "measured" and name != BASE:
                    text += f"\n[dim]{row[field] / base[field]:.3g}×[/dim]"
                cells.append(text)
            label = next(row["label"] for row in rows if row["method"] == name)
            table.add_row(label, *cells, style="bold" if name == BASE else "")
        made.append(table)
    notes = {(row["label"], row["length"]): row["note"] for row in rows if row["status"] != "measured"}
    made[-1].caption = (
        "\n".join(f"{label} at {length:,}: {note}" for (label, length), note in notes.items()) or None
    )
    made[-1].caption_justify = "left"
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The measured rows as a Markdown table: a method a line, a length a column, MiB and ms a token."""
    lengths = sorted({row["length"] for row in rows})
    lines = [
        "| peak memory above the imports · time a token | "
        + " | ".join(f"{n:,} tokens" for n in lengths)
        + " |",
        "| --- |" + " ---: |" * len(lengths),
    ]
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for length in lengths:
            row = find(rows, name, length)
            measured = row is not None and row["status"] == "measured"
            cells.append(
                f"{row['memory_bytes'] / 2**20:,.0f} MiB · {row['ms_per_token']:.2f} ms"
                if row and measured
                else "–"
            )
        label = next(row["label"] for row in rows if row["method"] == name)
        lines.append(f"| {f'**{label}**' if name == BASE else label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_table(document: str, table: str) -> str:
    """`document` with what stands between its table marks replaced. Raises ValueError without the marks."""
    before, begin, rest = document.partition(TABLE_MARKS[0])
    _, end, after = rest.partition(TABLE_MARKS[1])
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {TABLE_MARKS[0]} and {TABLE_MARKS[1]}")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def growth(rows: Sequence[Row]) -> list[str]:
    """For each method, how its memory and time a token grow from the middle length to its longest."""
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        curve = sorted((r for r in rows if r["method"] == name and r["status"] == "measured"), key=_length)
        if len(curve) < 2:
            continue
        end = curve[-1]
        begin = next((row for row in curve[:-1] if row["length"] == 16384), curve[len(curve) // 2 - 1])
        memory = end["memory_bytes"] / begin["memory_bytes"]
        time = end["ms_per_token"] / begin["ms_per_token"]
        lines.append(
            f"{end['label']}: {end['length'] / begin['length']:.0f}× the tokens ({begin['length']:,} → "
            f"{end['length']:,}) take {memory:.2f}× the memory and {time:.2f}× the time a token"
        )
    return lines


def find(rows: Sequence[Row], name: str, length: int) -> Row | None:
    """The row of one method and length, or None."""
    return next((row for row in rows if row["method"] == name and row["length"] == length), None)


def draw(rows: Sequence[Row], environment: dict[str, Any], path: Path) -> None:
    """Memory and time a token against length, log-log, every curve labelled at its end; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    lengths = sorted({row["length"] for row in rows if row["status"] == "measured"})
    for axes, field, title in (
        (panels[0], "memory_bytes", "Peak memory above the imports"),
        (panels[1], "ms_per_token", "Time a token, forward + backward"),
    ):
        ends = []
        for name, (colour, dash) in STYLE.items():
            curve = sorted(
                (r for r in rows if r["method"] == name and r["status"] == "measured"), key=_length
            )
            if not curve:
                continue
            xs, ys = [row["length"] for row in curve], [row[field] for row in curve]
            width = 2.6 if name == BASE else 1.6
            axes.plot(xs, ys, dash, color=colour, linewidth=width, marker="o", markersize=2.2 * width)
            ends.append((xs[-1], ys[-1], curve[0]["label"], colour))
        axes.set(xscale="log", xlabel="tokens in the sequence")
        axes.set_yscale("log", base=2 if field == "memory_bytes" else 10)  # ticks at whole MiB and GiB
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(_bytes if field == "memory_bytes" else _milliseconds))
        axes.grid(True, which="major", color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
        _label_ends(axes, ends, max(lengths))
    machine = common.machine(environment)
    torch_version, date = environment["versions"].get("torch"), environment["date"][:10]
    figure.text(
        0.005,
        -0.03,
        f"d_model 256, 4 layers, d_state 16, float32, batch 1, allocator {rows[0]['allocator']} · "
        f"{machine} · torch {torch_version} · {date} · {environment['commit']}",
        fontsize=7.5,
        color="#666666",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], longest: float) -> None:
    """Write each curve's name right of the panel, pushed apart where they would overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    low, high = axes.get_ylim()
    to_axes = axes.transAxes.inverted().transform
    heights = [float(to_axes(axes.transData.transform((x, y)))[1]) for x, y, _, _ in ends]
    gap = 0.055
    for _ in range(100):  # neighbours push each other apart until none overlap
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 1e-6:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
        heights = [min(max(height, 0.02), 0.99) for height in heights]
    for (x, y, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            label,
            xy=(x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.5, "shrinkB": 4},
        )
    axes.set_ylim(low, high)
    axes.set_xlim(axes.get_xlim()[0], longest * 1.15)


def _length(row: Row) -> int:
    return int(row["length"])


def _bytes(value: float, _position: int) -> str:
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"


def _milliseconds(value: float, _position: int) -> str:
    return f"{value:g} ms"
