"""A whole training step at up to a million tokens on one GPU: `python -m benchmarks.long_context`.

Forward, backward, clipping and AdamW of a model of `configs/` on random tokens, batch 1, after a step on few
tokens that compiles and allocates; each point in a fresh process. By default mamba-1.27b in bfloat16
(autocast over float32 weights) at 32,768 to 1,048,576 tokens, by `Exact` with the chunk it picks itself, and
by backpropagation with and without checkpointing as far as they fit: a point that runs out of memory is
reported as such, and its curve ends there.

- Memory: the most that tensors held on the GPU, weights and optimizer included, and what was reserved for
  them; on a CPU the peak of the resident set above what the libraries take.
- MFU: FLOPs that the step asks for (`benchmarks.long_context.flops` counts them; recomputation does not
  count) a second, over the rate of a large matrix product measured in the same run, and over the GPU's data
  sheet. HFU: the same with what is recomputed.
- Gradients: `Exact` and `Backprop` against `Backprop` in float64 at few tokens, and at many tokens `Exact`
  against itself with other chunks. Passed: in float64 1e-10; in other precisions `Exact` is at most
  1.5 times as far from the float64 gradient as Backprop is, and two chunk sizes are at most twice as far
  from each other.

Finished points are kept: a run that was stopped goes on, and `--lengths` can split a run over several calls,
whose points all end up in the results. `--fresh` measures anew.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from adjoint import memory
from adjoint.layers import StackConfig
from adjoint.train import machine
from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.long_context import report
from benchmarks.long_context.flops import Forward, data_sheet, forward_flops
from benchmarks.long_context.model import read_model

CONFIG, QUICK_CONFIG = "configs/mamba-1.27b.yaml", "configs/mamba-32m.yaml"
LENGTHS = tuple(2**k for k in range(15, 21))
QUICK_LENGTHS = (1024, 2048)
CHECK_LENGTH, QUICK_CHECK_LENGTH = 2048, 256
CHUNKS_LENGTH = 2**18  # of the comparison of chunk sizes, at most
METHODS = {
    "exact": "Exact",
    "backprop": "Backprop",
    "backprop-checkpoint": "Backprop + checkpointing",
}
FLOAT64_LIMIT = 1e-10
AS_GOOD_AS_BACKPROP, TWICE_ROUNDED = 1.5, 2.0

# -------------------------------------------------------------------------------------------------- points


def grid(options: argparse.Namespace) -> list[Point]:
    """Every point in the order of measuring: the roof, the checks, then length by length all methods."""
    points: list[Point] = [{"kind": "roof"}]
    if options.check:
        precisions = list(dict.fromkeys(("float64", "float32", options.setting["precision"])))
        chunk = max(1, options.check_length * 2 // 9)  # five chunks, the last one shorter
        points += [
            {
                "kind": "gradient",
                "length": options.check_length,
                "precisions": precisions,
                "chunk_size": chunk,
            },
            {"kind": "chunks", "length": options.chunks_length},
        ]
    points += [
        {"kind": "step", "method": method, "length": length, "steps": options.steps}
        for length in options.lengths
        for method in options.methods
    ]
    return [{**options.setting, **point} for point in points]


def end_of_curve(point: Point, journal: common.Journal, limit: int | None) -> str | None:
    """Why a step is not to be run: a shorter one of its curve did not fit, or it would pass `limit` bytes."""
    curve = journal.curve(point, "length")
    for other, result in curve:
        if "out_of_memory" in result and other["length"] < point["length"]:
            return f"out of memory at {other['length']:,} tokens"
    measured = [(p["length"], r["memory_bytes"]) for p, r in curve if "memory_bytes" in r]
    return common.too_large(measured, point["length"], limit)


def run(options: argparse.Namespace, journal: common.Journal, after: Callable[[], object]) -> None:
    """Measure every point that is not in the journal yet or failed, and call `after` after each. A failure is
    recorded, not raised."""
    points = grid(options)
    for number, point in enumerate(points, 1):
        if "error" not in (journal.get(point) or {"error": "not yet tried"}):
            continue
        name = " ".join(
            f"{point[k]:,}" if k == "length" else point[k] for k in ("kind", "method", "length") if k in point
        )
        reason = end_of_curve(point, journal, options.max_memory) if point["kind"] == "step" else None
        ending = f": left out, {reason}" if reason else ""
        print(f"[{number}/{len(points)}] {name}{ending}", file=sys.stderr, flush=True)
        if reason:  # not kept: a later call may know better
            options.left_out[journal.key(point)] = {"left_out": reason}
            continue
        result = common.run_child("benchmarks.long_context.measure", point)
        if result.get("error") == "ended by SIGKILL":  # what a system short of memory sends
            result = {"out_of_memory": "the process was killed (SIGKILL)"}
        journal.add(point, result)
        after()
        for trouble in ("error", "out_of_memory"):
            if trouble in result:
                print(f"    {trouble.replace('_', ' ')}: {result[trouble]}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------- rows


def summarise(options: argparse.Namespace, journal: common.Journal) -> tuple[list[Row], list[Row], float]:
    """Rows of the steps and of the checks of these settings, whichever call measured them, and the rate of a
    matrix product, FLOPs a second (nan where it failed)."""
    setting = {k: v for k, v in options.setting.items() if k != "chunk_size"}
    found = [(json.loads(key), result) for key, result in (journal.done | options.left_out).items()]
    mine = [(p, r) for p, r in found if {**p, **setting} == p]
    peak = next((r["matmul_flops"] for p, r in mine if p["kind"] == "roof" and "matmul_flops" in r), math.nan)
    forward = forward_flops(StackConfig(**options.setting["model"]))
    steps = [
        step_row(point, result, forward, peak, options.data_sheet)
        for point, result in mine
        if point["kind"] == "step" and point["chunk_size"] == options.setting["chunk_size"]
    ]
    steps.sort(key=lambda row: (row["length"], list(METHODS).index(row["method"])))
    return steps, check_rows([pair for pair in mine if pair[0]["kind"] in ("gradient", "chunks")]), peak


def step_row(point: Point, result: Point, forward: Forward, peak: float, data_sheet: float | None) -> Row:
    """One line of the table; the fastest of the measured steps."""
    row = {"method": point["method"], "label": METHODS[point["method"]], "length": point["length"]}
    for status in ("out_of_memory", "left_out", "error"):
        if status in result:
            return {**row, "status": status.replace("_", " "), "note": result[status]}
    phases = min(result["seconds"], key=lambda seconds: sum(seconds.values()))
    rate = point["length"] / sum(phases.values())
    executed = forward.executed(point["method"], point["keep"], point["length"], result["chunk_size"])
    return {
        **row,
        "status": "measured",
        **{key: value for key, value in result.items() if key != "seconds"},
        **{f"{phase}_seconds": round(seconds, 6) for phase, seconds in phases.items()},
        "tokens_per_second": round(rate, 3),
        "model_flops_per_token": forward.model,
        "executed_flops_per_token": round(executed),
        "mfu": round(forward.model * rate / peak, 5),
        "hfu": round(executed * rate / peak, 5),
        "mfu_data_sheet": round(forward.model * rate / data_sheet, 5) if data_sheet else None,
        "note": "",
    }


def check_rows(found: list[tuple[Point, Point]]) -> list[Row]:
    """One row a precision of a gradient check, and one a comparison of chunk sizes: what was off by how much,
    next to what it may be."""
    rows: list[Row] = []
    rounding: dict[str, float] = {}  # of Backprop, by precision
    for point, result in sorted(found, key=lambda pair: (pair[0]["kind"] != "gradient", pair[0]["length"])):
        row = {"check": point["kind"], "length": point["length"], "precision": point["precision"]}
        if "errors" in result:
            for precision, errors in result["errors"].items():
                rounding[precision] = errors["backprop"]
                limit = FLOAT64_LIMIT if precision == "float64" else AS_GOOD_AS_BACKPROP * errors["backprop"]
                row |= {"precision": precision, "chunks": str(result["chunk_size"]), **errors}
                rows.append(row | {"limit": limit, "passed": errors["exact"] <= limit})
        elif "distance" in result:
            chunks = " and ".join(f"{size:,}" for size in result["chunk_sizes"])
            bound = {precision: TWICE_ROUNDED * error for precision, error in rounding.items()}
            limit = (bound | {"float64": FLOAT64_LIMIT}).get(point["precision"], math.inf)
            rows.append(row | {"chunks": chunks, "between": result["distance"],
                               "limit": None if limit == math.inf else limit,
                               "passed": result["distance"] <= limit})  # fmt: skip
        else:
            why = result.get("out_of_memory") or result.get("error")
            rows.append(row | {"chunks": "", "note": why, "passed": "out_of_memory" in result})
    return rows


# -------------------------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("long_context", __doc__, fresh="measure again what was measured before")
    add, size = parser.add_argument, common.parse_size
    add("--config", type=Path, help=f"whose model: section is taken (default {CONFIG})")
    add("--lengths", type=size, nargs="+", help=f"tokens, as 64K (default {LENGTHS})")
    common.add_choice(parser, "--methods", METHODS)
    add("--device", help="cuda, cuda:1 or cpu (default cuda)")
    add("--precision", choices=["auto", "float32", "bfloat16", "float64"], default="auto",
        help="auto: bfloat16 where the GPU has it, else float32")  # fmt: skip
    add("--chunk-size", type=size, help="tokens (default: what Exact picks)")
    add("--keep", choices=["edges", "inputs", "offload"], default="edges", help="Exact's keep")
    add("--steps", type=int, default=1, help="steps a point; the fastest counts (default 1)")
    add("--no-check", dest="check", action="store_false", help="leave the gradients unchecked")
    add("--check-length", type=size, help=f"tokens of the float64 check (default {CHECK_LENGTH})")
    add("--quick", action="store_true",
        help="mamba-32m at two short lengths, into benchmarks/results/partial")  # fmt: skip
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = common.is_gpu(parser, options.device)
    if not cuda and not options.quick and not (options.config and options.lengths):
        parser.error("mamba-1.27b wants a GPU; on a CPU say --config and --lengths, or --quick")
    options.config = options.config or common.ROOT / (QUICK_CONFIG if options.quick else CONFIG)
    options.lengths = sorted(set(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)))
    if min(*options.lengths, options.check_length or 16) < 16:
        parser.error("every one of --lengths, and --check-length, must be at least 16")
    if options.steps < 1 or options.chunk_size == 0:
        parser.error("--steps and --chunk-size must be at least 1")
    try:
        model = read_model(options.config)
        forward_flops(StackConfig(**model))
    except (ValueError, TypeError) as error:
        parser.error(f"--config {options.config}: {error}")
    precision = machine.pick_precision(options.precision, torch.device(options.device))
    options.setting = {"model": model, "device": options.device, "precision": precision,
                       "chunk_size": options.chunk_size, "keep": options.keep}  # fmt: skip
    check_length = options.check_length or (QUICK_CHECK_LENGTH if options.quick else CHECK_LENGTH)
    options.check_length, options.chunks_length = (
        min(length, options.lengths[-1]) for length in (check_length, CHUNKS_LENGTH)
    )
    # A GPU refuses what it cannot hold; a CPU's system would kill other programs first.
    options.max_memory = None if cuda else int(0.75 * memory.total_memory_bytes())
    name = torch.cuda.get_device_name(options.device) if cuda else None
    options.data_sheet = data_sheet(name, precision)
    options.left_out = {}  # {"left_out": why} by point, of this call
    options.out = options.out or (common.RESULTS / "partial" / "quick" if options.quick else common.RESULTS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: every point was run or did not fit, and every check passed; 1: not so; 130:
    Ctrl-C."""
    options = parse(arguments)
    environment = common.environment()
    name = "long-context-cpu" if options.device == "cpu" else "long-context"
    journal = common.open_journal(options.out, name, Path(__file__).parent, environment, fresh=options.fresh)
    payload = {"benchmark": "long_context", "environment": environment, "complete": False,
               "config": options.config.name, **options.setting,
               "data_sheet_flops": options.data_sheet}  # fmt: skip

    def publish() -> list[Row]:
        steps, checks, peak = summarise(options, journal)
        payload.update(checks=checks, matmul_flops=peak)
        common.write_results(options.out, name, payload, steps)
        return steps

    # whoever is killed has published what was finished
    payload["complete"] = common.completed(lambda: run(options, journal, publish))
    steps = publish()
    report.show(steps, payload, options.out / name)
    if not payload["complete"]:
        return 130
    failed = any(row["status"] == "error" for row in steps) or math.isnan(payload["matmul_flops"])
    return 1 if failed or not all(row["passed"] for row in payload["checks"]) else 0
