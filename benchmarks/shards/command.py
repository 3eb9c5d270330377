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
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adjoint.engine.schedule import Run
from adjoint.files import write_atomically
from adjoint.memory import usable_cores
from adjoint.plan.simulate import Span
from adjoint.tools.measure.process import Point
from adjoint.tools.plan.plot import COLOURS, NAMES, joined_spans
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
        return {"tolerance": TOLERANCE, **{name: getattr(options, name) for name in SIZES},
                "runs": [result for _, result in measurements if "tiles" in result]}  # fmt: skip

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

    def save(self, result: Row, stem: Path) -> None:
        """Each run besides, as stem/METHOD-WORKERS.json."""
        super().save({key: value for key, value in result.items() if key != "runs"}, stem)
        stem.mkdir(parents=True, exist_ok=True)
        for run in result["runs"]:
            suffix = run["shards"] if run["sequence"] == 1 else f"in-turn-{run['sequence']}"
            path = stem / f"{run['method']}-{suffix}.json"
            write_atomically(path, json.dumps(run | {"environment": result["environment"]}) + "\n")

    def load(self, stem: Path) -> Row:
        runs = [json.loads(path.read_text()) for path in sorted(stem.glob("*.json"))]
        return super().load(stem) | {"runs": runs}

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

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """Yield a picture of the `exact` run of the most shards."""
        drawn = [run for run in result["runs"] if run["method"] == "exact"] or result["runs"]
        if drawn:
            yield "", draw(max(drawn, key=lambda run: run["shards"])), footer(result["environment"])


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


def draw(run: Point) -> Any:
    """A run's measured timeline above its simulated one, on one axis of time."""
    from matplotlib.patches import Patch

    tiles = {str(a.tile): a.tile for p in replay.plan_of(run).programs for a in p if isinstance(a, Run)}
    tile_spans = [Span(worker, start, stop, tiles[name]) for worker, name, start, stop in run["spans"]]
    simulated = replay.simulated(run)
    last = max(span.stop for span in tile_spans)
    panels = (("measured", tile_spans, last), ("simulated", simulated.spans, simulated.seconds))
    end, number = max(last, simulated.seconds), len(simulated.busy)
    figure, axes = report.pyplot().subplots(
        2, 1, sharex=True, figsize=(11, 2.2 + 0.7 * number), squeeze=False
    )
    for ax, (label, all_spans, seconds) in zip(axes[:, 0], panels, strict=True):
        for span in joined_spans(sorted(all_spans, key=lambda s: s.start), end / 500):
            length, middle = span.stop - span.start, (span.start + span.stop) / 2
            ax.barh(span.worker, length, left=span.start, height=0.8, color=COLOURS[span.tile.kind],
                    edgecolor="white", linewidth=0.4)  # fmt: skip
            if length > 0.018 * end:  # room for two digits
                ax.text(middle, span.worker, str(span.tile.chunk), ha="center", va="center", fontsize=6)
        ax.axvline(seconds, color="#444444", linewidth=0.8, linestyle="--")
        ax.set_title(f"{label}: {seconds:.3f} s")
        ax.set_yticks(range(number), [f"worker {worker}" for worker in range(number)])
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_xlim(0, 1.02 * end)
    kinds = dict.fromkeys(span.tile.kind for span in simulated.spans)
    axes[0, 0].legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds],
        ncols=len(kinds), loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8,
    )  # fmt: skip
    axes[1, 0].set_xlabel("seconds; numbers are chunks")
    figure.suptitle(f"{run['name']} on {run['slots']} cores", x=0.01, ha="left")
    return figure
