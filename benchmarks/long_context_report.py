"""The long-context benchmark's tables and picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

Row = dict[str, Any]
# Okabe and Ito's palette, as in the memory benchmark.
COLOURS = {"exact": "#D55E00", "backprop": "#000000", "backprop-checkpoint": "#7A7A7A"}
COLUMNS = ("method", "tokens", "chunk", "peak memory", "reserved", "host", "tokens/s", "MFU", "of data sheet",
           "HFU", "forward", "backward", "optimizer")  # fmt: skip
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
    lines = ["# A training step at long context", "", heading(payload), ""]
    lines += [
        f"| {' | '.join(COLUMNS)} |",
        "| --- |" + " ---: |" * (len(COLUMNS) - 1),
    ]
    for row in rows:
        cells = [row["label"], f"{row['length']:,}"]
        if row["status"] != "measured":
            lines.append(f"| {' | '.join(cells)} | {row['status']} |" + " |" * (len(COLUMNS) - 3))
            continue
        sheet = row["mfu_data_sheet"]
        cells += [
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
        lines.append(f"| {' | '.join(cells)} |")
    slow = sorted({name for row in rows for name, of in row.get("backends", {}).items() if of == "reference"})
    if slow:
        lines += ["", f"Plain PyTorch ran {', '.join(slow)}: `adjoint doctor` says why."]
    notes = [row for row in rows if row["status"] != "measured"]
    lines += [""] if notes else []
    lines += [
        f"- {row['label']} at {row['length']:,} tokens: {row['status']}; {row['note']}" for row in notes
    ]
    if payload["checks"]:
        lines += [
            "",
            "Gradients: relative L2 distance, over all parameters, of Exact and of Backprop from Backprop in",
            "float64; between: of Exact from Backprop in that precision, or from itself with other chunks.",
            "",
            "| check | tokens | chunks | precision | Exact | Backprop | between | may be | passed |",
            "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for row in payload["checks"]:
            numbers = [f"{row[k]:.1e}" if row.get(k) is not None else "–"
                       for k in ("exact", "backprop", "between", "limit")]  # fmt: skip
            passed = row.get("note") or ("yes" if row["passed"] else "**no**")
            cells = [row["check"], f"{row['length']:,}", row["chunks"], row["precision"], *numbers, passed]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).rstrip() + "\n"


def heading(payload: Row) -> str:
    """One paragraph: model, machine, versions, date, rates."""
    environment, model = payload["environment"], payload["model"]
    sheet = payload["data_sheet_flops"]
    versions = environment["versions"]
    rate = f"{payload['matmul_flops'] / 1e12:,.4g} TFLOP/s in a large matrix product"
    return (
        f"{payload['config']} (d_model {model.get('d_model')}, {model.get('n_layer')} layers, vocabulary "
        f"{model.get('vocab_size')}), batch 1, {payload['precision']}, AdamW, keep={payload['keep']}, on "
        f"{common.machine(environment)}: {rate}, measured in this run"
        f"{f'; data sheet {sheet / 1e12:,.4g}' if sheet else ''}. torch {versions.get('torch')}, "
        f"triton {versions.get('triton', 'none')}, Python {environment['python']}, "
        f"{environment['date'][:10]}, {environment['commit']}"
        f"{'' if payload['complete'] else '; stopped before the end'}."
    )


def draw(rows: Sequence[Row], payload: Row, path: Path) -> None:
    """Peak memory, tokens a second and the split of Exact's time, against tokens; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (memory, speed, split) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    lengths = sorted({row["length"] for row in rows})
    for axes, field, unit in ((memory, "memory_bytes", 2**30), (speed, "tokens_per_second", 1)):
        for method, colour in COLOURS.items():
            mine = [row for row in rows if row["method"] == method]
            curve = [(r["length"], r[field] / unit) for r in mine if r["status"] == "measured"]
            if not curve:
                continue
            thick = 2.6 if method == "exact" else 1.6
            axes.plot(*zip(*curve, strict=True), "-o", color=colour, linewidth=thick, label=mine[0]["label"])
            ended = [r["length"] for r in mine if r["status"] == "out of memory"]
            if ended and axes is memory:
                axes.annotate(f"out of memory\nat {ended[0]:,}", curve[-1], xytext=(6, 4), color=colour,
                              textcoords="offset points", fontsize=7.5)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [_tokens(n) for n in lengths])
        highest = max(row[field] / unit for row in rows if row["status"] == "measured")
        axes.set_ylim(0, 1.1 * highest or 1)
        axes.set_xlabel("tokens in the sequence")
        axes.grid(True, color="#E6E6E6", linewidth=0.8)
        axes.set_axisbelow(True)
    memory.set_title("Peak memory, GiB", loc="left", fontweight="bold")
    memory.legend(frameon=False, fontsize=8)
    speed.set_title("Tokens a second", loc="left", fontweight="bold")
    mine = [row for row in rows if row["method"] == "exact" and row["status"] == "measured"]
    places, bottom = range(len(mine)), [0.0] * len(mine)
    for phase, colour in PHASES.items():
        share = [row[f"{phase}_seconds"] * row["tokens_per_second"] / row["length"] for row in mine]
        split.bar(places, share, bottom=bottom, color=colour, label=phase)
        bottom = [a + b for a, b in zip(bottom, share, strict=True)]
    for place, row in zip(places, mine, strict=True):
        split.text(place, 1.01, f"MFU\n{row['mfu']:.0%}", ha="center", va="bottom", fontsize=7.5)
    split.set_xticks(places, [_tokens(row["length"]) for row in mine])
    split.set_ylim(0, 1.0)
    split.set_title("Exact: where the time goes", loc="left", fontweight="bold", pad=24)
    split.legend(frameon=True, fontsize=8, loc="lower right")
    split.set_xlabel("tokens in the sequence")
    environment = payload["environment"]
    figure.text(
        0.005,
        -0.04,
        f"{payload['config']}, batch 1, {payload['precision']}, AdamW · {common.machine(environment)} · "
        f"torch {environment['versions'].get('torch')} · "
        f"{environment['date'][:10]} · {environment['commit']}",
        fontsize=7.5,
        color="#666666",
    )
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)


def _size(value: int) -> str:
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"


def _tokens(n: int) -> str:
    if n % 2**20 == 0:
        return f"{n // 2**20}M"
    return f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}"
