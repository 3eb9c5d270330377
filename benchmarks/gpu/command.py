"""Validate a GPU: `python -m benchmarks.gpu` (docs/gpu.md says how to read it).

In stages that can be run one by one, each with a budget of seconds:

    a  every kernel as training runs it against float64
    f  pytest -m gpu
    h  wrapped hybrids of transformers beside gradient checkpointing, at 32K to 1M tokens

The last stage ends in one table. With `--simulated` it runs at full size on a GPU that is simulated: that
counts memory and launches, and measures no time.

Every point is written to the results at once, and kept in a journal: a run that was cut off goes on where it
was. An operation that falls back to plain PyTorch is an error here. The checkout, PyTorch, Triton and NumPy
are enough for stage a; `--dry-run` goes through all of it on a CPU, with tiny sizes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from adjoint.tools.doctor.installation import cuda_devices
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.gpu.points import OPPONENT, SIMULATED, STAGES, WAYS, WRAPPED, points, sizes_of
from benchmarks.gpu.report import compared, comparison
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

DRIVER = "driver_version,power.limit,clocks.max.sm,clocks.max.memory --format=csv,noheader"
STATES = ("error", "out_of_memory", "stopped", "missing", "under_way", "skipped")
ENDED = ("measured", "wrong")  # what a later call does not try again
FINE = ("measured", "missing", "out of memory")
UNTIMED = ("a", "f")  # stages whose points may run beside each other
AFTER_S = 5  # seconds of a budget below which no further point is begun


class Gpu(Benchmark):
    name = "gpu"
    module = "benchmarks.gpu.measure"
    uses = ("kernels",)
    packages = ("adjoint", "torch", "triton", "numpy")  # others are looked for, and may be installed later
    keeps_journal = True
    quiet = False

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help="a, f or h")
        add("--budget-s", type=runner.count, metavar="S", help="seconds for each stage, if not its own")
        add("--jobs", type=runner.count, default=1, metavar="N", help="points at a time, of stages a and f")
        add("--dry-run", action="store_true", help="tiny sizes on the CPU")
        add("--simulated", action="store_true", help="stage h at full size on a simulated GPU: no times")
        add("--lengths", type=runner.count, nargs="+", help="of stage h, if not 32K to 1M")
        hybrids, ways = [name for name in WRAPPED if name != "Llama"], [OPPONENT, "adjoint"]
        add("--models", nargs="+", choices=WRAPPED, default=hybrids, metavar="NAME",
            help=f"of stage h: {', '.join(WRAPPED)}")  # fmt: skip
        add("--ways", nargs="+", choices=WAYS, default=ways, metavar="NAME",
            help=f"of stage h: {'; '.join(WAYS)}")  # fmt: skip

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.simulated and options.dry_run:
            parser.error("--simulated: does not work with --dry-run; leave one of them out")
        without_gpu = options.simulated or options.dry_run
        timed = sorted(set(options.stages) - set(UNTIMED))
        if options.jobs > 1 and timed:
            parser.error(
                f"--jobs: stage {timed[0]} measures times, which takes the GPU for itself; leave it out"
            )
        if not without_gpu and not torch.cuda.is_available():
            parser.error("torch sees no CUDA device here; --dry-run tries the command on the CPU")
        options.budgets = {name: options.budget_s or seconds for name, (_, seconds) in STAGES.items()}
        options.sizes = sizes_of(dry=options.dry_run)
        if options.simulated:  # takes minutes of a core, whatever the GPU would take
            options.stages, options.sizes.device = ["h"], SIMULATED
            options.sizes.lengths = options.sizes.simulated_lengths
            options.budgets["h"] = options.budget_s or 20 * STAGES["h"][1]
        options.sizes.lengths = sorted(set(options.lengths or options.sizes.lengths))
        options.deadlines, query = {}, f"nvidia-smi --query-gpu={DRIVER} --id=0"
        options.driver = None if without_gpu else subprocess.getoutput(query)

    def stem(self, options: argparse.Namespace) -> str:
        if options.simulated:
            return "gpu-simulated"
        name = "dry run" if options.dry_run else torch.cuda.get_device_name().lower()
        return f"gpu-{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}"

    def environment(self, options: argparse.Namespace) -> Row:
        packages = ("mamba-ssm", "causal-conv1d", "flash-linear-attention", "fla-core", "transformers")
        return report.environment(*packages, "liger-kernel", "pytest")

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"cuda": torch.version.cuda, "driver": options.driver, "hardware": cuda_devices(),
                "budgets": options.budgets}  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Return the points of every stage, since the results also show what other calls measured."""
        return [point for stage in STAGES for point in points(stage, options.sizes)]

    def describe(self, point: Point) -> str:
        return f"{point['stage']}: {point['name']}"

    def skip(self, point: Point, measurements: Found, options: argparse.Namespace) -> str | None:
        """Return why a point does not run: it is not requested, or its stage's time is over."""
        if not is_requested(point, options):
            return ""
        if self._left(point, options) < AFTER_S:
            return f"the stage's {options.budgets[point['stage']]} s were over"
        return None

    def _left(self, point: Point, options: argparse.Namespace) -> float:
        """Seconds that are left of its stage's budget, which begins with its first point."""
        stage, seconds_now = point["stage"], time.monotonic()
        return options.deadlines.setdefault(stage, seconds_now + options.budgets[stage]) - seconds_now

    def limit_s(self, point: Point, options: argparse.Namespace) -> float:
        left = self._left(point, options)
        return left if point["device"] == SIMULATED else min(left, point.get("limit_s", left))

    def shared(self, point: Point) -> str | None:
        """Return a process per stage, with a GPU's memory as it was; stage h has one per point, also on a
        CPU, where resident memory counts."""
        if point["stage"] == "h":
            return None
        return "dry" if point["device"] == "cpu" else str(point["stage"])

    def settled(self, result: Point) -> bool:
        return status(result) in (*ENDED, "out of memory") and "lacking" not in result

    def noted(self, result: Point, seconds: float) -> Point:
        return result | {"took_s": round(seconds, 2)}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        rows = []
        for point, result in measurements:
            complete = result | compared(point, result, measurements)
            head = {"stage": point["stage"], "name": point["name"], "status": status(complete)}
            rows.append({**head, **complete, "point": point})
        return rows

    def broken(self, options: argparse.Namespace, measurements: Found) -> bool:
        """Whether a requested point is not fine."""
        rows = self.rows(options, measurements)
        return any(is_requested(row["point"], options) and row["status"] not in FINE for row in rows)

    def markdown(self, result: Row) -> str:
        """Return the conditions; for each stage its tables, and why points have no numbers."""
        environment, parts = result["environment"], ["# A GPU, validated\n"]
        parts.append(report.footer(environment, f"CUDA {result['cuda']}") + "\n")
        for stage, (title, _) in STAGES.items():
            rows = [row for row in result["rows"] if row["stage"] == stage]
            parts += [f"## {stage}: {title}\n"] if rows else []
            if stage == "h" and rows:
                parts += [comparison(rows)]
                continue
            for kind in dict.fromkeys(row["point"]["kind"] for row in rows):
                done = [r for r in rows if r["point"]["kind"] == kind and r["status"] in ENDED]
                parts += [table(done)] if done else []
            parts += [why(row) for row in rows if row["status"] not in ENDED]
        return "\n".join(parts)


def is_requested(point: Point, options: argparse.Namespace) -> bool:
    """Whether the command's options ask for a point; others of its results are only shown."""
    if point["stage"] == "h" and (point["hybrid"] not in options.models or point["by"] not in options.ways):
        return False
    return point["stage"] in options.stages


def status(result: Point) -> str:
    """Return the outcome of a point."""
    for key in STATES:
        if key in result:
            return "left out" if key == "skipped" else key.replace("_", " ")
    return "wrong" if result.get("passed") is False else "measured"


def table(rows: Sequence[Row]) -> str:
    """A line a point; the columns are the numbers and words of the results, by their names."""
    shown = (key for row in rows for key in row if isinstance(row[key], str | int | float))
    heads = [key for key in dict.fromkeys(shown) if key not in ("name", "stage")]
    return report.markdown_table(
        ["", *heads], ([row["name"], *(_cell(row.get(key)) for key in heads)] for row in rows)
    )


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return "–" if value is None else str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def why(row: Row) -> str:
    """Return a line on why a point has no numbers."""
    return f"- {row['name']}: {row['status']}; {next(row[key] for key in STATES if key in row)}\n"
