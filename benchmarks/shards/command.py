"""Real shards against their simulation: `python -m benchmarks.shards`.

Starts Ray on loopback and runs groups of 1, 2 and 4 shards on this machine's cores, one thread a shard, and
one of two workers to whom the chunks of a sequence are dealt out in turn. Every repeat is one batch, forward
and backward; after warm-up they are, in turn, calibration and test:

- calibration repeats give the processor time of each tile (what it costs, not how long it took: workers that
  share a core wait for each other) and of each worker's messages;
- `adjoint.plan.simulate` puts the tiles into the programs and on as many slots as there are cores;
- test repeats give the wall time of the phase, from the first action of any worker to the last: what the
  simulation must have found. Nothing is fitted.

Published next to it: how many cores others used at the same time (Ray and the hypervisor included), for a
machine that is not quiet shows in wall times and not in the tiles; and the peak memory of a worker beyond
what it held before, of a batch of its own.

Messages are measured in the same processes: handed over by one, received by the other while neither computes.
Ray runs its workers at niceness 15, so whatever else wants the cores goes first.
"""

from __future__ import annotations

import argparse
from typing import Any

from adjoint.memory import usable_cores
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.shards import replay
from benchmarks.shards.replay import TOLERANCE

METHODS = ("exact", "truncated", "layer-local")
SIZES = ("d_model", "layers", "mixer", "batch", "seqlen", "window", "chunk_size", "slots", "repeats")


class Shards(Benchmark):
    name = "shards"
    module = "benchmarks.shards.measure"
    limiting_options = ("shards", "in_turn", "methods")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--methods", METHODS)
        runner.add_counts(
            parser, shards=([1, 2, 4], "of each group"), in_turn=([2], "workers of a sequence; 1: none"),
            repeats=(4, "batches for calibration, and as many for the test"), d_model=(256, "width"),
            layers=(8, "of the model"), batch=(1, "sequences"), seqlen=(4096, "tokens"),
            chunk_size=(256, "tokens"), window=(128, "tokens, of truncated and layer-local"),
            slots=(usable_cores(), "cores for the simulation"),
        )  # fmt: skip
        parser.add_argument("--mixer", default="mamba", help="of the model")

    def environment(self, options: argparse.Namespace) -> Row:
        return report.environment("ray") | {"threads": 1}

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"tolerance": TOLERANCE, **{name: getattr(options, name) for name in SIZES}}

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Return the points; a single worker runs the first method only, as it waits for nobody by any."""
        groups = [(m, n, 1) for m in options.methods for n in options.shards
                  if n > 1 or m == options.methods[0]]  # fmt: skip
        groups += [("exact", 1, n) for n in options.in_turn if n > 1 and "exact" in options.methods]
        shared = {name: getattr(options, name) for name in SIZES}
        return [{"method": m, "shards": n, "sequence": turn, **shared} for m, n, turn in groups]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [replay.row_of(result) for _, result in measurements if "tiles" in result]

    def failed(self, result: Row) -> bool:
        return any(abs(row["error"]) > TOLERANCE for row in result["rows"])

    def markdown(self, result: Row) -> str:
        """Return a table with a line per run, below what was run on which machine."""
        rows, limit = result["rows"], result["tolerance"]
        windowed = f", window {result['window']:,}" if any(row["method"] != "exact" for row in rows) else ""
        misses = [f"{row['method']} on {workers(row)}" for row in rows if abs(row["error"]) > limit]
        outcome = f"All wall times are predicted within {limit:.0%}."
        if misses:
            outcome = f"Not predicted within {limit:.0%}: {', '.join(misses)}."
        sizes = (
            f"{result['layers']} {result['mixer']} layers, d_model {result['d_model']:,}, "
            f"{result['seqlen']:,} tokens in chunks of {result['chunk_size']:,}{windowed}, "
            f"batch {result['batch']}, float32, one thread a worker; tiles from {result['repeats']} batches, "
            f"wall times from {result['repeats']} others."
        )
        title = f"Wall time of a batch, forward and backward, over real shards and simulated. {outcome}"
        conditions = footer(result["environment"], f"{result['slots']} slots in the simulation")
        lines = [[cell(row) for _, cell in COLUMNS] for row in rows]
        table = report.markdown_table([head for head, _ in COLUMNS], lines)
        return f"{title}\n\n{sizes}\n{conditions}\n\n{table}"


# ---------------------------------------------------------------------------------------------- what is shown


def workers(row: Row) -> str:
    """Return the split of the work over workers, as text."""
    return f"{row['sequence']} in turn" if row["sequence"] > 1 else str(row["shards"])


# heading, and the cell of a row
COLUMNS: list[tuple[str, Any]] = [
    ("method", lambda row: row["method"]),
    ("workers", workers),
    ("tiles, processor s", lambda row: f"{row['tiles_seconds']:.3f}"),
    ("predicted s", lambda row: f"{row['predicted_seconds']:.3f}"),
    ("measured s (least–most)", lambda row: (
        f"{row['measured_seconds']:.3f} ({row['measured_least']:.3f}–{row['measured_most']:.3f})")),
    ("off by", lambda row: f"{row['error']:+.1%}"),
    ("cores others used", lambda row: "–" if row["others_cores"] is None else f"{row['others_cores']:.2f}"),
    ("peak memory of a worker, MiB", lambda row: f"{row['memory_bytes'] / 2**20:.0f}"),
]  # fmt: skip


def footer(environment: Row, *conditions: str) -> str:
    return report.footer(environment, *conditions, f"ray {environment['versions'].get('ray')}")
