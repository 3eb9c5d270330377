"""Windowed over unwindowed time of the backward, for every window: `python -m benchmarks.window_time`.

A window of W tokens bounds the sums of the accumulated adjoint state; it must not make the backward slower as
it grows or shrinks. For each scan and window the same inputs go through both backwards alternately, in one
process: a pair is one unwindowed and one windowed call, and its ratio is what counts, so that a machine that
slows down slows both. Published is the median of the pairs' ratios, with the smallest and the largest.

- Scans: selective (d_inner 512, d_state 16), SSD (8 heads of 64, d_state 64), and the generic recurrence of
  d_state 16 with scalar, diagonal and dense matrices; float32, batch 1, no resets.
- Timed is the backward alone, through autograd, outputs allocated: as training runs it.
- Windows: 1, the powers of two up to the length, and some that divide nothing.
- A pair is a fraction of a millisecond for the smallest scans: those are repeated more often.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.kernels import operations
from benchmarks.timing import repeated

LIMIT = 2.5  # what no ratio may pass
SCANS = {
    "selective": "selective scan, 512 channels × 16",
    "ssd": "SSD, 8 heads × 64 × 64",
    "scalar": "linear scan, scalar × 16",
    "diagonal": "linear scan, diagonal 16",
    "dense": "linear scan, dense 16 × 16",
}
OPERATIONS = {
    "selective": ("selective_scan", {"d_inner": 512, "d_state": 16}),
    "ssd": ("ssd_scan", {"nheads": 8, "headdim": 64, "d_state": 64}),
    **{kind: (f"linear_scan_{kind}", {"d_state": 16}) for kind in ("scalar", "diagonal", "dense")},
}
# Okabe and Ito's palette, readable with every kind of colour vision.
COLOURS = {
    "selective": "#D55E00",
    "ssd": "#CC79A7",
    "scalar": "#E69F00",
    "diagonal": "#009E73",
    "dense": "#0072B2",
}
REPEAT_S = 1.0  # pairs go on until they have taken this long, at least `--repeats`, at most 50 times as many


def windows_of(seqlen: int) -> list[int]:
    """1, the powers of two below `seqlen`, and lengths that divide nothing, up to and with `seqlen`."""
    powers = [2**i for i in range(seqlen.bit_length()) if 2**i <= seqlen]
    odd = [3, 7, 33, 100, 1000, seqlen // 3, seqlen // 2 + 1, 3 * seqlen // 4, seqlen - 1, seqlen]
    return sorted({w for w in [*powers, *odd] if 1 <= w <= seqlen})


def measure(name: str, window: int, seqlen: int, repeats: int, device: str, repeat_s: float) -> list[Any]:
    """[seconds unwindowed, seconds windowed] of each pair of backwards."""
    op_name, shape = OPERATIONS[name]
    op = operations.OPS[op_name]
    inputs, cotangent = operations.draw(op, {"batch": 1, "seqlen": seqlen, **shape}, device, torch.float32)
    leaves = {key: x.requires_grad_() for key, x in inputs.items()}
    outputs = [op.ours(**leaves, window=w, backend=None) for w in (None, window)]

    def seconds(output: Any) -> float:
        def backward() -> None:
            torch.autograd.grad(output, list(leaves.values()), cotangent, retain_graph=True)

        return repeated(backward, device, 0.0, least=1)[0]

    for output in outputs:  # loads, compiles, starts threads
        seconds(output)
    pairs: list[Any] = []
    began = time.perf_counter()
    while len(pairs) < repeats or (time.perf_counter() - began < repeat_s and len(pairs) < 50 * repeats):
        pairs.append([seconds(output) for output in outputs])
    return pairs


def summarise(name: str, window: int, pairs: Sequence[Sequence[float]]) -> Row:
    """One row of the results: the pairs' median, smallest and largest ratio, and median milliseconds."""
    ratios = sorted(windowed / whole for whole, windowed in pairs)
    return {
        "scan": name,
        "window": window,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
        "unwindowed_ms": round(statistics.median(whole for whole, _ in pairs) * 1e3, 4),
        "windowed_ms": round(statistics.median(windowed for _, windowed in pairs) * 1e3, 4),
        "pairs": len(pairs),
    }


def grid(options: argparse.Namespace) -> list[Point]:
    """Every (scan, window), with what else a measurement depends on."""
    shared = {"seqlen": options.seqlen, "repeats": options.repeats, "device": options.device}
    return [{"scan": name, "window": w, **shared} for name in options.scans for w in options.windows]


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Measure every point that is not in the journal yet, all in this process."""

    def measured(point: Point) -> Point:
        scan, window = point["scan"], point["window"]
        return {
            "pairs": measure(scan, window, options.seqlen, options.repeats, options.device, options.repeat_s)
        }

    common.run_points(grid(options), journal, measured, lambda p: f"{p['scan']} {p['window']:,}")


def markdown(rows: Sequence[Row], seqlen: int) -> str:
    """The ratios as a Markdown table: a window a line, a scan a column, median (smallest to largest)."""
    names = list(dict.fromkeys(row["scan"] for row in rows))
    title = f"Time of the windowed backward over the unwindowed one at {seqlen:,} tokens"
    cells = {
        (row["scan"], row["window"]): f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
        for row in rows
    }
    table = common.markdown_table(
        ["window", *(SCANS[name] for name in names)],
        [
            [f"{window:,}", *(cells.get((name, window), "–") for name in names)]
            for window in sorted({row["window"] for row in rows})
        ],
        left=(),
    )
    return f"{title}: median of alternating pairs (smallest–largest).\n\n{table}"


def draw(rows: Sequence[Row], environment: dict[str, Any], seqlen: int, path: Path) -> None:
    """The ratio against the window, a line a scan, with a rule at the limit; written to `path`."""
    figure, axes = common.pyplot().subplots(figsize=(7, 4))
    for name, label in SCANS.items():
        curve = sorted((row["window"], row["ratio"]) for row in rows if row["scan"] == name)
        if curve:
            axes.plot(*zip(*curve, strict=True), "-o", markersize=3, color=COLOURS[name], label=label)
    axes.axhline(LIMIT, color="#7A7A7A", linestyle="--", linewidth=1)
    axes.text(1, LIMIT, f" {LIMIT}×", va="bottom", color="#7A7A7A", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max(LIMIT * 1.15, 1.05 * max(row["ratio"] for row in rows)))
    axes.set(xlabel="window, tokens", ylabel="windowed ÷ unwindowed")
    axes.set_title(f"Time of the backward at {seqlen:,} tokens")
    axes.legend(fontsize=8, loc="lower right")
    common.save(figure, path, common.footer(environment, "float32, batch 1"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("window_time", __doc__)
    add, size = parser.add_argument, common.parse_size
    add("--seqlen", type=size, default=16384, help="tokens, as 16K (the default)")
    common.add_choice(parser, "--scans", SCANS)
    add("--windows", type=size, nargs="+", help="tokens (default: powers of two and others)")
    add("--repeats", type=int, default=7, help="pairs a window, at least (default 7)")
    add("--settle", type=float, dest="repeat_s", default=REPEAT_S, metavar="SECONDS",
        help=f"go on with pairs for this long (default {REPEAT_S:g})")  # fmt: skip
    add("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(arguments)
    if options.seqlen < 2 or options.repeats < 1 or options.repeat_s < 0:
        parser.error("--seqlen must be at least 2, --repeats at least 1 and --settle not negative")
    options.windows = sorted(set(options.windows)) if options.windows else windows_of(options.seqlen)
    if options.windows[0] < 1 or options.windows[-1] > options.seqlen:
        parser.error(f"--windows must lie between 1 and --seqlen ({options.seqlen})")
    common.is_gpu(parser, options.device)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: no ratio passes the limit; 1: one does; 130: Ctrl-C."""
    options = parse(arguments)
    environment, folder = common.environment(), options.out or common.RESULTS
    name = "window_time" if options.device == "cpu" else "window_time-cuda"
    journal = common.open_journal(folder, name, Path(__file__), environment, fresh=options.fresh)
    complete = common.completed(lambda: run(options, journal))
    found = [(point, journal.get(point)) for point in grid(options)]
    rows = [summarise(point["scan"], point["window"], kept["pairs"]) for point, kept in found if kept]
    if not rows:
        return 130
    payload = {"benchmark": "window_time", "environment": environment, "complete": complete}
    payload |= {"seqlen": options.seqlen, "device": options.device, "scans": SCANS, "limit": LIMIT}
    common.write_results(folder, name, payload, rows)
    table = markdown(rows, options.seqlen)
    (folder / f"{name}.md").write_text(table)
    draw(rows, environment, options.seqlen, folder / f"{name}.png")
    print(table)
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"largest: {worst['ratio']:.2f}× ({worst['scan']}, window {worst['window']:,}); limit {LIMIT}×")
    print(f"wrote {folder / name}.json, .csv, .md and .png")
    return journal.end(complete=complete, failed=worst["ratio"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
