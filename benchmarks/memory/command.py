"""Peak memory and time a token against sequence length: `python -m benchmarks.memory`.

Every point is forward + backward of a whole language model on random tokens, in a fresh process: d_model 256,
4 layers, expand 2, d_state 16, a byte vocabulary with tied embeddings, float32, batch 1. Mamba-2 has headdim
64 and d_state 16 too, so that the widths are equal. Compared are `Exact`, backpropagation through the same
scan with and without checkpointing (the honest opponents) and transformers' Mamba and Mamba-2.

- Memory: peak resident size above what is resident after the imports; on a GPU, the peak torch allocated.
- Time: of a forward + backward, after one at 128 tokens that loads libraries and starts threads. Passes are
  repeated inside a process for some seconds, processes `--repeats` times; published is the median of those.
- Points of different methods alternate, so that a machine that slows down slows all of them.
- A length is left out when the memory predicted from the last two exceeds `--max-memory`; the results say so.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from adjoint import memory
from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.memory import report
from benchmarks.memory.measure import METHODS, MODEL

LENGTHS = (1024, 4096, 16384, 65536, 262144)
QUICK_LENGTHS = (1024, 4096)
REPEAT_S = 4.0  # how long a process repeats its pass, so that a short one is not a single draw


def grid(options: argparse.Namespace) -> list[Point]:
    """Every point, in the order of measuring: methods alternate innermost, repeats are outermost."""
    return [
        {"method": name, "length": length, "allocator": allocator, "device": options.device, "repeat": repeat,
         "repeat_s": options.repeat_s}
        for repeat, length, allocator, name in itertools.product(
            range(options.repeats), options.lengths, options.allocators, options.methods
        )
        if length <= max(METHODS[name].max_length or length, min(options.lengths))
        and repeat < (METHODS[name].max_repeats or options.repeats)
    ]  # fmt: skip


def reason_to_skip(point: Point, journal: common.Journal, max_memory: int) -> str | None:
    """Why `point` is not to be run: it would not fit, or a shorter one of its curve did not. None: run it."""
    curve = journal.curve(point, "length", "repeat")
    for other, result in curve:
        if "memory_bytes" not in result and other["length"] <= point["length"] and other != point:
            return f"at {other['length']:,} tokens: {result.get('skipped') or result.get('error')}"
    measured = [(p["length"], r["memory_bytes"]) for p, r in curve if "memory_bytes" in r]
    return common.too_large(measured, point["length"], max_memory)


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Measure every point that is not in the journal yet. A failing point is recorded, not raised."""

    def measured(point: Point) -> Point:
        reason = reason_to_skip(point, journal, options.max_memory)
        if reason:
            return {"skipped": reason}
        return common.run_child("benchmarks.memory.measure", point, common.ALLOCATORS[point["allocator"]])

    common.run_points(
        grid(options), journal, measured, lambda p: f"{p['method']} {p['length']:,} {p['allocator']}"
    )


def summarise(options: argparse.Namespace, journal: common.Journal) -> list[Row]:
    """One row a (method, length, allocator): medians over the processes, or why there is none."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for point in grid(options):
        result = journal.get(point)
        if result:
            found.setdefault((point["allocator"], point["method"], point["length"]), []).append(result)
    rows = []
    for key in itertools.product(options.allocators, options.methods, options.lengths):
        if key in found:
            allocator, name, length = key
            row = {"method": name, "label": METHODS[name].label, "allocator": allocator, "length": length}
            rows.append(row | _summary(found[key], length))
    return rows


def _summary(results: list[Point], length: int) -> Row:
    good = [r for r in results if "memory_bytes" in r]
    if not good:
        error = results[0].get("error")
        return {"status": "failed" if error else "skipped", "note": error or results[0]["skipped"]}
    # The first pass of several also paid for touching memory for the first time.
    times = [statistics.median(r["seconds"][1:] or r["seconds"]) / length * 1e3 for r in good]
    return {
        "status": "measured",
        "memory_bytes": int(statistics.median(r["memory_bytes"] for r in good)),
        "ms_per_token": round(statistics.median(times), 6),
        "ms_per_token_min": round(min(times), 6),
        "ms_per_token_max": round(max(times), 6),
        "processes": len(good),
        "note": "",
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("memory", __doc__)
    add, size = parser.add_argument, common.parse_size
    add("--lengths", type=size, nargs="+", help=f"tokens, as 16K (default {LENGTHS})")
    common.add_choice(parser, "--methods", METHODS)
    add("--repeats", type=int, help="processes a point (default 3)")
    add("--allocator", type=common.parse_allocator, choices=[*common.ALLOCATORS, "both"],
        help="default, retain or both of these (default both), no-tcache, jemalloc")  # fmt: skip
    add("--device", default="cpu", help="cpu or cuda")
    add("--max-memory", type=size, help="as 18GB (default 75%% of the machine's, or of the GPU's)")
    add("--quick", action="store_true", help="two short lengths once, into benchmarks/results/partial")
    options = parser.parse_args(arguments)
    options.lengths = sorted(set(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)))
    options.repeats = options.repeats if options.repeats is not None else (1 if options.quick else 3)
    if options.repeats < 1 or min(options.lengths) < 128:
        parser.error("--repeats must be at least 1 and every one of --lengths at least 128")
    total = memory.total_memory_bytes()
    allocator = options.allocator or ("default" if options.quick else "both")
    if common.is_gpu(parser, options.device):
        total = torch.cuda.get_device_properties(options.device).total_memory
        allocator = "default"  # glibc's settings do not reach the GPU's memory
    options.allocators = ["default", "retain"] if allocator == "both" else [allocator]
    options.max_memory = options.max_memory or int(0.75 * total)
    options.repeat_s = 0.5 if options.quick else REPEAT_S
    if options.quick and options.out is None:
        options.out = common.RESULTS / "partial" / "quick"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: every point was run or would not fit; 1: one failed; 130: Ctrl-C."""
    options = parse(arguments)
    environment = common.environment()
    folder = options.out or common.RESULTS
    journal = common.open_journal(
        folder, f"memory-{options.device}", Path(__file__).parent, environment, fresh=options.fresh
    )
    complete = common.completed(lambda: run(options, journal))
    rows = summarise(options, journal)
    name = "memory" if options.device == "cpu" else "memory-cuda"
    payload = {"benchmark": "memory", "environment": environment, "model": MODEL, "complete": complete}
    payload |= {"max_memory_bytes": options.max_memory, "repeats": options.repeats, "device": options.device}
    common.write_results(folder, name, payload, rows)
    whole = options.methods == list(METHODS) and tuple(options.lengths) == LENGTHS
    failed = any(row["status"] == "failed" for row in rows)
    to_docs = whole and complete and not failed and options.out is None and options.device == "cpu"
    report.show(rows, environment, folder / name, to_docs=to_docs)
    return journal.end(complete=complete, failed=failed)
