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
from typing import Any

import torch

from adjoint.tools.measure.passes import repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.kernels import operations
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

LIMIT = 2.5  # what no ratio may pass
# scan → what tables call it, the operation, its widths
SCANS: dict[str, tuple[str, str, dict[str, int]]] = {
    "selective": ("selective scan, 512 channels × 16", "selective_scan", {"d_inner": 512, "d_state": 16}),
    "ssd": ("SSD, 8 heads × 64 × 64", "ssd_scan", {"nheads": 8, "headdim": 64, "d_state": 64}),
    "scalar": ("linear scan, scalar × 16", "linear_scan_scalar", {"d_state": 16}),
    "diagonal": ("linear scan, diagonal 16", "linear_scan_diagonal", {"d_state": 16}),
    "dense": ("linear scan, dense 16 × 16", "linear_scan_dense", {"d_state": 16}),
}  # fmt: skip


def windows_of(seqlen: int) -> list[int]:
    """1, the powers of two below `seqlen`, and lengths that divide nothing, up to and with `seqlen`."""
    powers = [2**i for i in range(seqlen.bit_length()) if 2**i <= seqlen]
    odd = [3, 7, 33, 100, 1000, seqlen // 3, seqlen // 2 + 1, 3 * seqlen // 4, seqlen - 1, seqlen]
    return sorted({w for w in [*powers, *odd] if 1 <= w <= seqlen})


def measure(point: Point) -> Point:
    """[seconds unwindowed, seconds windowed] of each pair of backwards. Pairs go on until they have taken
    repeat_s, at least `repeats`, at most 50 times as many."""
    _, op_name, widths = SCANS[point["scan"]]
    op, least = operations.OPS[op_name], point["repeats"]
    shape = {"batch": 1, "seqlen": point["seqlen"], **widths}
    inputs, cotangent = operations.draw(op, shape, point["device"], torch.float32)
    leaves = {key: x.requires_grad_() for key, x in inputs.items()}
    outputs = [op.ours(**leaves, window=w, backend=None) for w in (None, point["window"])]

    def seconds(output: Any) -> float:
        def backward() -> None:
            torch.autograd.grad(output, list(leaves.values()), cotangent, retain_graph=True)

        return repeated(backward, point["device"], 0.0, least=1)[0]

    for output in outputs:  # loads, compiles, starts threads
        seconds(output)
    pairs: list[Any] = []
    until = time.perf_counter() + point["repeat_s"]
    while len(pairs) < least or (time.perf_counter() < until and len(pairs) < 50 * least):
        pairs.append([seconds(output) for output in outputs])
    return {"pairs": pairs}


class WindowTime(Benchmark):
    name = "window_time"
    module = "benchmarks.window_time"
    uses = ("kernels",)
    limiting_options = ("scans", "windows", "seqlen")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        runner.add_counts(parser, seqlen=(16384, "tokens"), repeats=(7, "pairs a window, at least"))
        runner.add_choice(parser, "--scans", SCANS)
        add("--windows", type=runner.count, nargs="+", help="tokens, if not powers of two and others")
        add("--settle", type=float, dest="repeat_s", default=1.0, help="seconds for which pairs go on")
        add("--device", type=runner.device, default="cpu", help="cpu or cuda")

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.windows = sorted(set(options.windows or windows_of(options.seqlen)))

    def points(self, options: argparse.Namespace) -> list[Point]:
        names = ("seqlen", "repeats", "repeat_s", "device")
        shared = {name: getattr(options, name) for name in names}
        return [{"scan": scan, "window": w, **shared} for scan in options.scans for w in options.windows]

    def shared(self, point: Point) -> str:
        return "all"

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"seqlen": options.seqlen, "device": options.device, "limit": LIMIT,
                "scans": {name: scan[0] for name, scan in SCANS.items()}}  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [summary(p["scan"], p["window"], r["pairs"]) for p, r in measurements if "pairs" in r]

    def failed(self, result: Row) -> bool:
        return any(row["ratio"] > LIMIT for row in result["rows"])

    def markdown(self, result: Row) -> str:
        """A window a line, a scan a column, median (smallest to largest)."""
        rows = sorted(result["rows"], key=lambda row: row["window"])
        table = report.pivot(
            ["window"], rows, ["window"], "scan",
            lambda row: f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})",
            lambda name: SCANS[name][0],
        )  # fmt: skip
        title = f"Time of the windowed backward over the unwindowed one at {result['seqlen']:,} tokens"
        return f"{title}: median of alternating pairs (smallest–largest).\n\n{table}"


def summary(scan: str, window: int, pairs: Sequence[Sequence[float]]) -> Row:
    """The pairs' median, smallest and largest ratio, and median milliseconds."""
    ratios = report.spread("ratio", [windowed / full for full, windowed in pairs])
    full, windowed = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    return {
        "scan": scan,
        "window": window,
        **{name: round(value, 3) for name, value in ratios.items()},
        "unwindowed_ms": round(full, 4),
        "windowed_ms": round(windowed, 4),
        "pairs": len(pairs),
    }


if __name__ == "__main__":
    raise SystemExit(WindowTime().main())
