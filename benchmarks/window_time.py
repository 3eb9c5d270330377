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
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

LIMIT = 2.5  # what no ratio may pass
SCANS = {
    "selective": "selective scan, 512 channels × 16",
    "ssd": "SSD, 8 heads × 64 × 64",
    "scalar": "linear scan, scalar × 16",
    "diagonal": "linear scan, diagonal 16",
    "dense": "linear scan, dense 16 × 16",
}
# Okabe and Ito's palette, readable with every kind of colour vision.
COLOURS = {
    "selective": "#D55E00",
    "ssd": "#CC79A7",
    "scalar": "#E69F00",
    "diagonal": "#009E73",
    "dense": "#0072B2",
}
SETTLE_S = 1.0  # pairs go on until they have taken this long, at least `--repeats`, at most 50 times as many


def windows_of(seqlen: int) -> list[int]:
    """1, the powers of two below `seqlen`, and lengths that divide nothing, up to and with `seqlen`."""
    powers = [2**i for i in range(seqlen.bit_length()) if 2**i <= seqlen]
    odd = [3, 7, 33, 100, 1000, seqlen // 3, seqlen // 2 + 1, 3 * seqlen // 4, seqlen - 1, seqlen]
    return sorted({w for w in [*powers, *odd] if 1 <= w <= seqlen})


def build(name: str, seqlen: int, device: str) -> tuple[list[Any], Callable[[int | None], Any]]:
    """Random inputs of scan `name` that ask for gradients, and `window -> output`."""
    import torch

    import adjoint
    from adjoint.kernels.linear_scan import linear_scan

    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    def decay_rate(*shape: int) -> Any:
        return (-0.1 - torch.rand(*shape, generator=generator)).to(device).requires_grad_()

    if name == "selective":
        u, delta, z = (randn(1, seqlen, 512) for _ in range(3))
        A, D, bias = decay_rate(512, 16), randn(512), randn(512)
        B, C = randn(1, seqlen, 16), randn(1, seqlen, 16)
        return [u, delta, A, B, C, D, z, bias], lambda window: adjoint.selective_scan(
            u, delta, A, B, C, D, z, bias, delta_softplus=True, window=window
        )[0]
    if name == "ssd":
        x, dt, A, D, bias = (
            randn(1, seqlen, 8, 64),
            randn(1, seqlen, 8),
            decay_rate(8),
            randn(8),
            randn(8),
        )
        B, C = randn(1, seqlen, 1, 64), randn(1, seqlen, 1, 64)
        return [x, dt, A, B, C, D, bias], lambda window: adjoint.ssd_scan(
            x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True, window=window
        )[0]
    shape = {"scalar": (1,), "diagonal": (16,), "dense": (16, 16)}[name]
    size = 0.9 / math.sqrt(16) if name == "dense" else 0.9  # states stay bounded
    a = (size * torch.rand(1, seqlen, *shape, generator=generator)).to(device).requires_grad_()
    b, h = randn(1, seqlen, 16), randn(1, 16)
    return [a, b, h], lambda window: linear_scan(a, b, h, window=window)


def measure(name: str, window: int, seqlen: int, repeats: int, device: str, settle_s: float) -> list[Any]:
    """[seconds unwindowed, seconds windowed] of each pair of backwards."""
    import torch

    inputs, scan = build(name, seqlen, device)
    outputs = [scan(None), scan(window)]
    cotangent = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(device)

    def seconds(output: Any) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(output, inputs, cotangent, retain_graph=True)
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for output in outputs:  # loads, compiles, starts threads
        seconds(output)
    pairs: list[Any] = []
    began = time.perf_counter()
    while len(pairs) < repeats or (time.perf_counter() - began < settle_s and len(pairs) < 50 * repeats):
        pairs.append([seconds(output) for output in outputs])
    return pairs


def summarise(name: str, window: int, pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
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


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Measure every (scan, window) that is not in the journal yet."""
    from tqdm import tqdm

    points = [(name, window) for name in options.scans for window in options.windows]
    with tqdm(points, unit="window", dynamic_ncols=True, smoothing=0) as bar:
        for name, window in bar:
            bar.set_description(f"{name} {window:,}")
            point = point_of(options, name, window)
            if journal.get(point) is None:
                pairs = measure(name, window, options.seqlen, options.repeats, options.device, options.settle)
                journal.add(point, {"pairs": pairs})


def point_of(options: argparse.Namespace, name: str, window: int) -> dict[str, Any]:
    """What a measurement is kept under."""
    return {
        "scan": name,
        "window": window,
        "seqlen": options.seqlen,
        "repeats": options.repeats,
        "device": options.device,
    }


def markdown(rows: Sequence[dict[str, Any]], seqlen: int) -> str:
    """The ratios as a Markdown table: a window a line, a scan a column, median (smallest to largest)."""
    names = list(dict.fromkeys(row["scan"] for row in rows))
    title = f"Time of the windowed backward over the unwindowed one at {seqlen:,} tokens"
    lines = [
        f"{title}: median of alternating pairs (smallest–largest).",
        "",
        "| window | " + " | ".join(SCANS[name] for name in names) + " |",
        "| ---: |" + " ---: |" * len(names),
    ]
    for window in sorted({row["window"] for row in rows}):
        cells = []
        for name in names:
            row = next((r for r in rows if (r["scan"], r["window"]) == (name, window)), None)
            cells.append(
                "–" if row is None else f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})"
            )
        lines.append(f"| {window:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]], environment: dict[str, Any], seqlen: int, path: Path) -> None:
    """The ratio against the window, a line a scan, with a rule at the limit; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label in SCANS.items():
        curve = sorted((row["window"], row["ratio"]) for row in rows if row["scan"] == name)
        if curve:
            axes.plot(*zip(*curve, strict=True), "-o", markersize=3, color=COLOURS[name], label=label)
    axes.axhline(LIMIT, color="#7A7A7A", linestyle="--", linewidth=1)
    axes.text(1, LIMIT, f" {LIMIT}×", va="bottom", color="#7A7A7A", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max(LIMIT * 1.15, 1.05 * max(row["ratio"] for row in rows)))
    axes.set(xlabel="window, tokens", ylabel="windowed ÷ unwindowed")
    axes.set_title(f"Time of the backward at {seqlen:,} tokens", loc="left", fontweight="bold")
    axes.grid(True, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    machine = common.machine(environment)
    figure.text(
        0.01,
        -0.03,
        f"float32, batch 1 · {machine} · torch {environment['versions'].get('torch')} · "
        f"{environment['date'][:10]} · {environment['commit']}",
        fontsize=7,
        color="#666666",
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.window_time", description=(__doc__ or "").split("\n")[0]
    )
    size = common.parse_size
    parser.add_argument("--seqlen", type=size, default=16384, help="tokens, as 16K (the default)")
    parser.add_argument("--scans", nargs="+", choices=SCANS, default=list(SCANS), metavar="NAME",
                        help=", ".join(SCANS))  # fmt: skip
    parser.add_argument("--windows", type=size, nargs="+", help="tokens (default: powers of two and others)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs a window, at least (default 7)")
    parser.add_argument("--settle", type=float, default=SETTLE_S, metavar="SECONDS",
                        help=f"go on with pairs for this long (default {SETTLE_S:g})")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="measure again what a stopped run had finished")
    options = parser.parse_args(arguments)
    if options.seqlen < 2 or options.repeats < 1 or options.settle < 0:
        parser.error("--seqlen must be at least 2, --repeats at least 1 and --settle not negative")
    options.windows = sorted(set(options.windows)) if options.windows else windows_of(options.seqlen)
    if options.windows[0] < 1 or options.windows[-1] > options.seqlen:
        parser.error(f"--windows must lie between 1 and --seqlen ({options.seqlen})")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA device here")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: no ratio passes the limit; 1: one does; 130: Ctrl-C."""
    options = parse(arguments)
    environment = common.environment()
    name = "window_time" if options.device == "cpu" else "window_time-cuda"
    mark = common.fingerprint(Path(__file__).read_text(), environment["versions"], environment["cpu"])
    journal = common.Journal(options.out / "partial" / f"{name}.jsonl", mark, fresh=options.fresh)
    if journal.done:
        print(f"Going on: {len(journal.done)} points were finished before (--fresh measures anew).",
              file=sys.stderr)  # fmt: skip
    stopped = False
    try:
        run(options, journal)
    except KeyboardInterrupt:
        stopped = True
        print("Stopped. The same command goes on from here.", file=sys.stderr)
    rows = []
    for scan in options.scans:
        for window in options.windows:
            found = journal.get(point_of(options, scan, window))
            if found:
                rows.append(summarise(scan, window, found["pairs"]))
    if not rows:
        return 130
    payload = {"benchmark": "window_time", "environment": environment, "complete": not stopped}
    payload |= {"seqlen": options.seqlen, "device": options.device, "scans": SCANS, "limit": LIMIT}
    common.write_results(options.out, name, payload, rows)
    table = markdown(rows, options.seqlen)
    (options.out / f"{name}.md").write_text(table)
    draw(rows, environment, options.seqlen, options.out / f"{name}.png")
    print(table)
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"largest: {worst['ratio']:.2f}× ({worst['scan']}, window {worst['window']:,}); limit {LIMIT}×")
    print(f"wrote {options.out / name}.json, .csv, .md and .png")
    if stopped:
        return 130
    journal.path.unlink()  # complete: the next run measures anew
    return 1 if worst["ratio"] > LIMIT else 0


if __name__ == "__main__":
    raise SystemExit(main())
