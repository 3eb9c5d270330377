"""The long-context benchmark's tables and picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row

# Okabe and Ito's palette, as in the memory benchmark.
COLOURS = {"exact": "#D55E00", "backprop": "#000000", "backprop-checkpoint": "#7A7A7A"}
COLUMNS = ("method", "tokens", "chunk", "peak memory", "reserved", "host", "tokens/s", "MFU", "of data sheet",
           "HFU", "forward", "backward", "optimizer")  # fmt: skip
CHECK_COLUMNS = ("check", "tokens", "chunks", "precision", "Exact", "Backprop", "between", "may be", "passed")
CHECKS = """\
Gradients: relative L2 distance, over all parameters, of Exact and of Backprop from Backprop in
float64; between: of Exact from Backprop in that precision, or from itself with other chunks.
"""
PHASES = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#F0E442"}


def show(rows: Sequence[Row], payload: Row, stem: Path) -> None:
    """Print the tables, write them to stem.md and draw stem.png (where matplotlib is installed)."""
    text = markdown(rows, payload)
    stem.with_name(f"{stem.name}.md").write_text(text)
    print(text)
    written = f"wrote {stem}.json, .csv, .md"
    if any(row["status"] == "measured" for row in rows):
        try:
            draw(rows, payload, stem.with_name(f"{stem.name}.png"))
            written += " and .png"
        except ImportError:
            print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    print(written)


def markdown(rows: Sequence[Row], payload: Row) -> str:
    """What was measured on what, the steps' table and the checks'."""
    parts = ["# A training step at long context\n", heading(payload) + "\n"]
    parts.append(common.markdown_table(COLUMNS, map(step_cells, rows)))
    slow = sorted({name for row in rows for name, of in row.get("backends", {}).items() if of == "reference"})
    if slow:
        parts.append(f"Plain PyTorch ran {', '.join(slow)}: `adjoint doctor` says why.\n")
    notes = [row for row in rows if row["status"] != "measured"]
    if notes:
        parts.append("".join(
            f"- {row['label']} at {row['length']:,} tokens: {row['status']}; {row['note']}\n" for row in notes
        ))  # fmt: skip
    if payload["checks"]:
        checks = common.markdown_table(CHECK_COLUMNS, map(check_cells, payload["checks"]), left=(0, 8))
        parts += [CHECKS, checks]
    return "\n".join(parts)


def step_cells(row: Row) -> list[str]:
    """A row of the steps' table, in the order of COLUMNS."""
    cells = [row["label"], f"{row['length']:,}"]
    if row["status"] != "measured":
        return [*cells, row["status"], *[""] * (len(COLUMNS) - 3)]
    sheet = row["mfu_data_sheet"]
    return [
        *cells,
        f"{row['chunk_size']:,}" if row["chunk_size"] else "–",
        _size(row["memory_bytes"]),
        _size(row["reserved_bytes"]) if "reserved_bytes" in row else "–",
        _size(row["host_bytes"]),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
        f"{sheet:.1%}" if sheet else "–",
        f"{row['hfu']:.1%}",
        *(f"{row[f'{phase}_seconds']:.3g} s" for phase in PHASES),
    ]


def check_cells(row: Row) -> list[str]:
    """A row of the checks' table, in the order of CHECK_COLUMNS."""
    numbers = [row.get(key) for key in ("exact", "backprop", "between", "limit")]
    return [
        row["check"],
        f"{row['length']:,}",
        row["chunks"],
        row["precision"],
        *("–" if number is None else f"{number:.1e}" for number in numbers),
        row.get("note") or ("yes" if row["passed"] else "**no**"),
    ]


def heading(payload: Row) -> str:
    """One paragraph: model, machine, versions, date, rates."""
    environment, model, sheet = payload["environment"], payload["model"], payload["data_sheet_flops"]
    versions = environment["versions"]
    where = environment["gpu"] or f"{environment['cores']} cores of {environment['cpu']}"
    return (
        f"{payload['config']} (d_model {model.get('d_model')}, {model.get('n_layer')} layers, vocabulary "
        f"{model.get('vocab_size')}), batch 1, {payload['precision']}, AdamW, keep={payload['keep']}, on "
        f"{where}: {payload['matmul_flops'] / 1e12:,.4g} TFLOP/s in a large matrix product, measured in this "
        f"run{f'; data sheet {sheet / 1e12:,.4g}' if sheet else ''}. torch {versions.get('torch')}, "
        f"triton {versions.get('triton', 'none')}, Python {environment['python']}, "
        f"{environment['date'][:10]}, {environment['commit']}"
        f"{'' if payload['complete'] else '; stopped before the end'}."
    )


def draw(rows: Sequence[Row], payload: Row, path: Path) -> None:
    """Peak memory, tokens a second and the split of Exact's time, against tokens; written to `path`."""
    figure, (memory, speed, split) = common.pyplot().subplots(1, 3, figsize=(13, 4.2))
    _draw_curves(memory, rows, "memory_bytes", 2**30)
    memory.set_title("Peak memory, GiB")
    memory.legend(fontsize=8)
    _draw_curves(speed, rows, "tokens_per_second", 1)
    speed.set_title("Tokens a second")
    _draw_split(split, [row for row in rows if row["method"] == "exact" and row["status"] == "measured"])
    for axes in (memory, speed, split):
        axes.set_xlabel("tokens in the sequence")
    conditions = f"{payload['config']}, batch 1, {payload['precision']}, AdamW"
    common.save(figure, path, common.footer(payload["environment"], conditions))


def _draw_curves(axes: Any, rows: Sequence[Row], field: str, unit: int) -> None:
    """`field` in `unit` against tokens, a curve a method; of memory, where a curve ends."""
    for method, colour in COLOURS.items():
        mine = [row for row in rows if row["method"] == method]
        curve = [(row["length"], row[field] / unit) for row in mine if row["status"] == "measured"]
        if not curve:
            continue
        thick = 2.6 if method == "exact" else 1.6
        axes.plot(*zip(*curve, strict=True), "-o", color=colour, linewidth=thick, label=mine[0]["label"])
        ended = [row["length"] for row in mine if row["status"] == "out of memory"]
        if ended and field == "memory_bytes":
            axes.annotate(f"out of memory\nat {ended[0]:,}", curve[-1], xytext=(6, 4), color=colour,
                          textcoords="offset points", fontsize=7.5)  # fmt: skip
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(common.tokens, lengths))
    highest = max(row[field] / unit for row in rows if row["status"] == "measured")
    axes.set_ylim(0, 1.1 * highest or 1)


def _draw_split(axes: Any, rows: Sequence[Row]) -> None:
    """The phases' shares of the time, a bar a length, under its MFU."""
    places, bottom = range(len(rows)), [0.0] * len(rows)
    for phase, colour in PHASES.items():
        share = [row[f"{phase}_seconds"] * row["tokens_per_second"] / row["length"] for row in rows]
        axes.bar(places, share, bottom=bottom, color=colour, label=phase)
        bottom = [a + b for a, b in zip(bottom, share, strict=True)]
    for place, row in zip(places, rows, strict=True):
        axes.text(place, 1.01, f"MFU\n{row['mfu']:.0%}", ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(places, [common.tokens(row["length"]) for row in rows])
    axes.set_ylim(0, 1.0)
    axes.grid(False)
    axes.set_title("Exact: where the time goes", pad=24)
    axes.legend(frameon=True, fontsize=8, loc="lower right")


def _size(value: int) -> str:
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"
