"""One command for a GPU's first half hour: `python -m benchmarks.gpu` (docs/gpu.md says how to read it).

In stages that can be run one by one, each with a budget of seconds:

    a  versions, copy and matmul rates, every kernel as training runs it against float64
    b  times of the kernels, by the GPU's own clock, beside other libraries'
    c  a layer of mamba-1.27b on a chunk: the GPU's time, the wall's, and kernels launched
    d  `Exact` beside `Backprop`: gradients, time and memory; `Exact` at 65,536 tokens
    e  a training step of mamba-1.27b at 1,048,576 tokens under 40 GB
    f  pytest -m gpu
    g  whole steps at many lengths by several methods, as far as they fit; only where asked for
    h  wrapped hybrids of transformers beside gradient checkpointing, at 32K to 1M tokens

The last stage ends in one table. With `--simulated` it runs at full size on a GPU that is simulated: that
counts memory and launches, and measures no time.

Every point is written to the results at once, and kept in a journal: a run that was cut off goes on where it
was. An operation that falls back to plain PyTorch is an error here. The checkout, PyTorch, Triton and NumPy
are enough; `--dry-run` goes through all of it on a CPU, with tiny sizes, in two minutes.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from adjoint.layers import StackConfig
from adjoint.plan.planned_stack import StackModel
from adjoint.tools.doctor import cuda_devices
from adjoint.tools.measure.journal import Journal
from adjoint.tools.measure.process import Point
from adjoint.train.gpus import peak_flops
from benchmarks import report, runner
from benchmarks.gpu.points import METHODS, OPPONENT, SIMULATED, STAGES, WAYS, WRAPPED, groups, sizes_of
from benchmarks.gpu.report import compared, comparison
from benchmarks.kernels import roof
from benchmarks.kernels.operations import OPS
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

DRIVER = "driver_version,power.limit,clocks.max.sm,clocks.max.memory --format=csv,noheader"
STATES = ("error", "out_of_memory", "stopped", "missing", "under_way", "skipped")
ENDED = ("measured", "wrong")  # what a later call does not try again
FINE = ("measured", "missing", "out of memory")
UNTIMED = ("a", "f")  # stages whose points may run beside each other, but for the rates of stage a
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
        add("--stages", nargs="+", choices=STAGES, default=list("abcdefh"), metavar="STAGE", help="a to h")
        add("--budget-s", type=runner.count, metavar="S", help="seconds for each stage, if not its own")
        add("--jobs", type=runner.count, default=1, metavar="N", help="points at a time, of stages a and f")
        add("--dry-run", action="store_true", help="tiny sizes on the CPU")
        add("--simulated", action="store_true", help="stage h at full size on a simulated GPU: no times")
        add("--lengths", type=runner.count, nargs="+", help="of stages g and h, if not 32K to 1M")
        add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help="of stage g")
        hybrids, ways = [name for name in WRAPPED if name != "Llama"], [OPPONENT, "adjoint"]
        add("--models", nargs="+", choices=WRAPPED, default=hybrids, metavar="NAME", help="of stage h")
        add("--ways", nargs="+", choices=WAYS, default=ways, metavar="NAME", help="of stage h")

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
            options.sizes.wrapped_curve = options.sizes.simulated_curve
            options.budgets["h"] = options.budget_s or 20 * STAGES["h"][1]
        for curve in ("curve", "wrapped_curve"):
            setattr(options.sizes, curve, sorted(set(options.lengths or getattr(options.sizes, curve))))
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
                "model": options.sizes.model, "budgets": options.budgets}  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Return the points of every stage, since the results also show what other calls measured."""
        every = [group for stage in STAGES for group in groups(stage, options.sizes)]
        options.groups = {Journal.key(point): group for group in every for point in group}
        return [point for group in every for point in group]

    def describe(self, point: Point) -> str:
        return f"{point['stage']}: {point['name']}"

    def skip(self, point: Point, measurements: Found, options: argparse.Namespace) -> str | None:
        """Return why a point does not run: it is not requested, another of its group came to its end, a
        shorter one of stage g did not fit, or its stage's time is over."""
        stage, states_by_key = point["stage"], {Journal.key(p): status(r) for p, r in measurements}
        if not is_requested(point, options) or (options.jobs > 1 and point["kind"] == "roof"):
            return ""
        group = options.groups[Journal.key(point)]
        states = [states_by_key.get(Journal.key(other)) for other in group]
        before = states[: group.index(point)]
        if any(state in ENDED for state in states) or any(
            s not in ("out of memory", "stopped") for s in before
        ):
            return ""
        for other, result in measurements if stage == "g" else ():
            free = {"length": point["length"], "name": point["name"]}
            if {**other, **free} == point and other["length"] < point["length"] and "out_of_memory" in result:
                return f"out of memory at {other['length']:,} tokens"
        if self._left(point, options) < AFTER_S:
            return f"the stage's {options.budgets[stage]} s were over"
        return None

    def _left(self, point: Point, options: argparse.Namespace) -> float:
        """Seconds that are left of its stage's budget, which begins with its first point."""
        stage, seconds_now = point["stage"], time.monotonic()
        return options.deadlines.setdefault(stage, seconds_now + options.budgets[stage]) - seconds_now

    def limit_s(self, point: Point, options: argparse.Namespace) -> float:
        left = self._left(point, options)
        return left if point["device"] == SIMULATED else min(left, point.get("limit_s", left))

    def shared(self, point: Point) -> str | None:
        """Return a process per stage, with a GPU's memory as it was; stages g and h have one per point, stage
        h also on a CPU, where resident memory counts."""
        stage = point["stage"]
        if stage == "h" or (stage == "g" and point["device"] != "cpu"):
            return None
        return "dry" if point["device"] == "cpu" else stage

    def settled(self, result: Point) -> bool:
        return status(result) in (*ENDED, "out of memory") and "lacking" not in result

    def noted(self, result: Point, seconds: float) -> Point:
        return result | {"took_s": round(seconds, 2)}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        rates = next((r for p, r in measurements if p["kind"] == "roof" and "bytes" in r), None)
        rows = []
        for point, result in measurements:
            complete = result | compared(point, result, measurements)
            derived = shares(point, result, rates)
            head = {"stage": point["stage"], "name": point["name"], "status": status(complete)}
            rows.append({**head, **derived, **complete, "point": point})
        return rows

    def broken(self, options: argparse.Namespace, measurements: Found) -> bool:
        """Whether of a group that was asked for the last one tried is not fine."""
        last: dict[str, tuple[Point, str]] = {}
        for row in self.rows(options, measurements):
            first = options.groups[Journal.key(row["point"])][0]
            last[Journal.key(first)] = row["point"], row["status"]
        return any(is_requested(point, options) and state not in FINE for point, state in last.values())

    def markdown(self, result: Row) -> str:
        """Return the conditions; for each stage a table per kind of point, and why points have no numbers."""
        environment, parts = result["environment"], ["# A GPU's first half hour\n"]
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
            notes = dict.fromkeys(why(row) for row in rows if row["status"] not in ENDED)
            parts += ["".join(notes)] if notes else []
        return "\n".join(parts)


def is_requested(point: Point, options: argparse.Namespace) -> bool:
    """Whether the command's options ask for a point; others of its results are only shown."""
    stage = point["stage"]
    if stage == "g":
        return stage in options.stages and point["method"] in options.methods
    if stage == "h":
        return stage in options.stages and point["hybrid"] in options.models and point["by"] in options.ways
    return stage in options.stages


def status(result: Point) -> str:
    """Return the outcome of a point."""
    for key in STATES:
        if key in result:
            return "left out" if key == "skipped" else key.replace("_", " ")
    return "wrong" if result.get("passed") is False else "measured"


def shares(point: Point, result: Point, rates: roof.Rates | None) -> Row:
    """Return how much of the device's rates a point reaches.

    For the times of an operation: the least time possible at the rates of stage a, over the measured one. For
    a step its MFU: required FLOPs per second (recomputation does not count), over the rate of a large matrix
    product of stage a, and over that of the GPU's data sheet.
    """
    if point["kind"] == "times" and rates and "both_ms" in result:
        forward, backward = OPS[point["op"]].work(point["size"])
        itemsize, roof_shares = getattr(torch, point["dtype"]).itemsize, {}
        for name, work in (("forward", forward), ("both", forward + backward)):
            least, _ = roof.seconds(work, rates, itemsize, point["device"])
            roof_shares[f"{name}_of_roof"] = 1e3 * least / result[f"{name}_ms"]
        return roof_shares
    if point["kind"] == "step" and "tokens_per_second" in result:
        flops = _flops(json.dumps(point["model"]))
        sheet = peak_flops(point["precision"], torch.device(point["device"]))
        rates_by_name = {"mfu": rates and rates["matmul_flops"], "mfu_of_data_sheet": sheet}
        return {
            name: flops * result["tokens_per_second"] / rate for name, rate in rates_by_name.items() if rate
        }
    return {}


@functools.cache
def _flops(model: str) -> float:
    """Per token of a step, forward and backward."""
    sized = StackModel(StackConfig(**json.loads(model)))
    return 3 * (sized.head_flops + sum(layer.flops for layer in sized.layers))


def table(rows: Sequence[Row]) -> str:
    """A line a point, or a part of it; the columns are the numbers and words of the results, by their
    names."""
    lines: dict[str, Row] = {}
    for row in rows:
        for detail, values in row.get("parts", {"": {}}).items():
            lines[f"{row['name']}{detail and f': {detail}'}"] = values | {"status": row["status"]} | row
    shown = (key for line in lines.values() for key in line if isinstance(line[key], str | int | float))
    heads = [key for key in dict.fromkeys(shown) if key not in ("name", "stage")]
    cells = ([name, *(_cell(key, line.get(key)) for key in heads)] for name, line in lines.items())
    return report.markdown_table(["", *heads], cells)


def _cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return "–" if value is None else str(value)
    if key.endswith("_bytes"):
        return f"{value / 2**30:,.2f} GiB" if value >= 2**29 else f"{value / 2**20:,.1f} MiB"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def why(row: Row) -> str:
    """Return a line on why a point has no numbers; it is the same for all sizes if a library is missing."""
    said = next(row[key] for key in STATES if key in row)
    name = row["point"].get("contender", row["name"]) if row["status"] == "missing" else row["name"]
    return f"- {name}: {row['status']}; {said}\n"
