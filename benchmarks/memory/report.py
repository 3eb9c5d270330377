"""The memory benchmark's tables, ratios and picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row

BASE = "exact"  # what the ratios are against
# Okabe and Ito's palette, readable with every kind of colour vision; ours are drawn thick, peers dashed.
STYLE: dict[str, tuple[str, str]] = {
    "exact": ("#D55E00", "-"),
    "exact-600MiB": ("#E69F00", "-"),
    "exact-mamba2": ("#CC79A7", "-"),
    "backprop": ("#000000", "-"),
    "backprop-checkpoint": ("#7A7A7A", "-"),
    "hf-mamba": ("#0072B2", "--"),
    "hf-mamba-checkpoint": ("#3C9FDD", "--"),
    "hf-mamba-slow": ("#8C6D1F", "--"),
    "hf-mamba2": ("#00694B", "--"),
    "hf-mamba2-checkpoint": ("#2BB389", "--"),
}
# field of a row: title of its table, title of its panel, and its value in words
FIELDS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "memory_bytes": (
        "peak memory above the imports, MiB",
        "Peak memory above the imports",
        lambda value: f"{value / 2**20:,.0f}",
    ),
    "ms_per_token": (
        "forward + backward, ms a token",
        "Time a token, forward + backward",
        lambda value: f"{value:.3f}",
    ),
}


def show(rows: Sequence[Row], environment: dict[str, Any], stem: Path, *, to_docs: bool) -> None:
    """Print the tables and ratios of `rows` and draw stem.png.

    With `to_docs`, the picture is copied to docs/ and the first allocator's table put into README.md.
    """
    for allocator in dict.fromkeys(row["allocator"] for row in rows):
        chosen = [row for row in rows if row["allocator"] == allocator]
        print_tables(chosen, allocator)
        print("\n".join(growth(chosen)))
        suffix = "" if allocator == rows[0]["allocator"] else f"-{allocator}"
        picture = stem.with_name(f"{stem.name}{suffix}.png")
        if any(row["status"] == "measured" for row in chosen):
            draw(chosen, environment, picture)
            print(f"wrote {picture}")
            if to_docs and not suffix:
                common.to_docs(picture, common.ROOT / "README.md", "memory", markdown(chosen))
    print(f"wrote {stem}.json and {stem}.csv")


def cells(rows: Sequence[Row], text: Callable[[Row], str]) -> tuple[list[int], list[list[str]]]:
    """The lengths, and a line a method: its label, and `text` of its row at each length."""
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = {row["length"]: row for row in rows if row["method"] == name}
        label = next(iter(mine.values()))["label"]
        lines.append([label, *(text(mine[n]) if n in mine else "" for n in lengths)])
    return lengths, lines


def print_tables(rows: Sequence[Row], allocator: str) -> None:
    """Two tables, memory and time: a line a method, a column a length, each cell with its ratio to Exact."""
    bases = {row["length"]: row for row in rows if row["method"] == BASE and row["status"] == "measured"}
    notes = {f"{r['label']} at {r['length']:,}: {r['note']}": None for r in rows if r["status"] != "measured"}
    for field, (title, _, words) in FIELDS.items():

        def text(row: Row, field: str = field, words: Callable[[float], str] = words) -> str:
            if row["status"] != "measured":
                return {"skipped": "–", "failed": "failed"}[row["status"]]
            base = bases.get(row["length"])
            ratio = "" if base is None or base is row else f"\n[dim]{row[field] / base[field]:.3g}×[/dim]"
            return words(row[field]) + ratio

        lengths, lines = cells(rows, text)
        common.print_table(
            f"{title} (× of Exact) · allocator: {allocator}",
            ["", *(f"{n:,}" for n in lengths)],
            lines,
            bold=[row["label"] for row in rows if row["method"] == BASE],
            notes=list(notes) if field == "ms_per_token" else (),
        )


def markdown(rows: Sequence[Row]) -> str:
    """The measured rows as a Markdown table: a method a line, a length a column, MiB and ms a token."""

    def text(row: Row) -> str:
        if row["status"] != "measured":
            return "–"
        return f"{row['memory_bytes'] / 2**20:,.0f} MiB · {row['ms_per_token']:.2f} ms"

    lengths, lines = cells(rows, text)
    bold = next((row["label"] for row in rows if row["method"] == BASE), None)
    heads = ["peak memory above the imports · time a token", *(f"{n:,} tokens" for n in lengths)]
    return common.markdown_table(
        heads, ([f"**{name}**" if name == bold else name, *(c or "–" for c in rest)] for name, *rest in lines)
    )


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The measured rows of each method, by length."""
    measured = sorted((row for row in rows if row["status"] == "measured"), key=lambda row: row["length"])
    return {
        name: [row for row in measured if row["method"] == name]
        for name in dict.fromkeys(row["method"] for row in rows)
    }


def growth(rows: Sequence[Row]) -> list[str]:
    """For each method, how its memory and time a token grow from the middle length to its longest."""
    lines = []
    for curve in curves(rows).values():
        if len(curve) < 2:
            continue
        end = curve[-1]
        begin = next((row for row in curve[:-1] if row["length"] == 16384), curve[len(curve) // 2 - 1])
        memory, time = (end[field] / begin[field] for field in FIELDS)
        lines.append(
            f"{end['label']}: {end['length'] / begin['length']:.0f}× the tokens ({begin['length']:,} → "
            f"{end['length']:,}) take {memory:.2f}× the memory and {time:.2f}× the time a token"
        )
    return lines


def draw(rows: Sequence[Row], environment: dict[str, Any], path: Path) -> None:
    """Memory and time a token against length, log-log, every curve labelled at its end; written to `path`."""
    figure, panels = common.pyplot().subplots(1, 2, figsize=(13, 5.2))
    lengths = sorted({row["length"] for row in rows if row["status"] == "measured"})
    for axes, (field, (_, title, _)) in zip(panels, FIELDS.items(), strict=True):
        ends = []
        for name, curve in curves(rows).items():
            if not curve:
                continue
            (colour, dash), width = STYLE[name], 2.6 if name == BASE else 1.6
            xs, ys = [row["length"] for row in curve], [row[field] for row in curve]
            axes.plot(xs, ys, dash, color=colour, linewidth=width, marker="o", markersize=2.2 * width)
            ends.append((xs[-1], ys[-1], curve[0]["label"], colour))
        axes.set(xscale="log", xlabel="tokens in the sequence")
        axes.set_yscale("log", base=2 if field == "memory_bytes" else 10)  # ticks at whole MiB and GiB
        axes.set_title(title)
        axes.set_xticks(lengths, map(common.tokens, lengths))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(_bytes if field == "memory_bytes" else "{x:g} ms")
        _label_ends(axes, ends, max(lengths))
    conditions = f"d_model 256, 4 layers, d_state 16, float32, batch 1, allocator {rows[0]['allocator']}"
    common.save(figure, path, common.footer(environment, conditions))


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


def _bytes(value: float, _position: int) -> str:
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"
