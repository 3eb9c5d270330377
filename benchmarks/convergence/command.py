"""Does training still converge? `python -m benchmarks.convergence`.

The same small model, from the same initial weights and over the same batches in the same order, trained with
each method: two Mamba-1 layers of d_model 64 in float32 on the CPU, AdamW, linear warm-up and cosine decay,
the gradient clipped to norm 1. Tasks (`benchmarks.convergence.tasks`): text; recall at known distances from
two initialisations, one whose states remember for up to a thousand tokens, one whose states forget within
ten, so that long memory has to be learned; and recall of far distances only, by models that know it of near
ones. Everything is repeated with several seeds, which change weights and data. Runs share the machine: of
times only the processor's is noted.

A run is one (task, method, seed); each finished one is kept at once, and a benchmark that was stopped goes on
after the last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import usable_cores
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.convergence import pictures, tables
from benchmarks.convergence.tasks import TASKS, distances_within
from benchmarks.convergence.train import BATCH, METHOD_NAMES, MODEL, SEQLEN, make_method
from benchmarks.report import Row, spread
from benchmarks.runner import Benchmark, Found

BLOCK = 10  # steps whose losses are averaged into one point of a published curve
METHODS = ("backprop", "exact", "truncated-4", "truncated-16", "truncated-64", "truncated-auto",
           "unbiased-64", "layer-local", "layer-local-16")  # fmt: skip


class Convergence(Benchmark):
    name = "convergence"
    module = "benchmarks.convergence.train"
    limiting_options = ("methods", "tasks", "seeds", "steps", "seqlen")
    document = "docs/convergence.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=f"among {METHOD_NAMES}")
        runner.add_choice(parser, "--tasks", TASKS)
        add("--steps", type=runner.count, help="optimizer steps a run, if not the task's own")
        add("--jobs", type=runner.count, help="processes at a time, if not one a core")
        runner.add_counts(parser, seeds=(3, "runs of each method and task"), seqlen=(SEQLEN, "tokens"),
                          threads=(1, "of each process"))  # fmt: skip

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.jobs = options.jobs or max(1, usable_cores() // options.threads)
        try:
            for method in options.methods:
                make_method(method)
            for task in (TASKS[name] for name in options.tasks if TASKS[name].recall):
                distances_within(options.seqlen, task.distances)
        except (UserError, ValueError) as error:
            parser.error(str(error))

    def environment(self, options: argparse.Namespace) -> Row:
        return report.environment() | {"threads": options.threads, "jobs": options.jobs}

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        tasks = {
            name: vars(TASKS[name]) | {"steps": options.steps or TASKS[name].steps} for name in options.tasks
        }
        return {
            "command": shlex.join(["python", "-m", "benchmarks.convergence", *sys.argv[1:]]),
            "model": MODEL,
            "batch": BATCH,
            "seqlen": options.seqlen,
            "seeds": options.seeds,
            "tasks": tasks,
            "block_steps": BLOCK,
            "curves": [
                curve(task, method, by_seed)
                for (task, method), (by_seed, _) in by_run(measurements, "task", "method").items()
                if by_seed
            ],
        }

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Methods innermost, so that what was finished when it was stopped can be compared."""
        return [
            {"task": task, "method": method, "seed": seed, "steps": options.steps or TASKS[task].steps,
             "seqlen": options.seqlen}
            for seed in range(options.seeds) for task in options.tasks
            for method in dict.fromkeys(options.methods)
        ]  # fmt: skip

    def shared(self, point: Point) -> str:
        """Nothing is timed, and importing torch would take longer than a short run."""
        return "all"

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive"}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return summaries(measurements, "task", baseline="backprop")

    def markdown(self, result: Row) -> str:
        return f"{tables.markdown(result)}\n{tables.provenance(result)}\n"

    def shown(self, result: Row) -> str:
        return f"{tables.overview(result)}\n{tables.provenance(result)}\n"

    def page(self, result: Row) -> str:
        return f"# Does training still converge?\n\n{super().page(result)}"

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        if result["curves"]:
            model = result["model"]
            layers = f"{model['n_layer']} Mamba-1 layers, d_model {model['d_model']}"
            sizes = f"{result['batch']} × {result['seqlen']} tokens a step, {result['seeds']} seeds"
            foot = report.footer(result["environment"], layers, f"{sizes}, AdamW, float32")
            yield "", pictures.draw(result), foot


Runs = dict[tuple[Any, ...], tuple[dict[int, Point], str]]


def by_run(measurements: Found, *fields: str) -> Runs:
    """Group results by these fields of their points: each group's results by seed, and its first error."""
    runs: Runs = {}
    for point, result in measurements:
        key = tuple(point[name] for name in fields)
        by_seed, error = runs.get(key, ({}, ""))
        if "losses" in result:
            by_seed[point["seed"]] = result
        runs[key] = by_seed, error or result.get("error", "")
    return runs


def summaries(measurements: Found, field: str, baseline: str) -> list[Row]:
    """A row a (field, method): medians over the seeds, gaps to the method `baseline` with the same seeds."""
    runs = by_run(measurements, field, "method")
    return [
        {field: value, "method": method, **summary(by_seed, runs.get((value, baseline), ({}, ""))[0]),
         "note": error}
        for (value, method), (by_seed, error) in runs.items()
    ]  # fmt: skip


def summary(results: dict[int, Point], baseline: dict[int, Point]) -> Row:
    """Held-out and training loss, the processor's seconds, the gap to the runs of `baseline` with the same
    seeds, and how far the training curves are apart at most: over all steps, and over the first ones, before
    rounding has grown."""
    row: Row = {"seeds": len(results)}
    if not results:
        return row
    row |= spread("held_out", [r["held_out"] for r in results.values()])
    row |= spread("train", [statistics.fmean(r["losses"][-BLOCK:]) for r in results.values()])
    row |= spread("core_seconds", [r["core_seconds"] for r in results.values()])
    pairs = [(results[seed], baseline[seed]) for seed in sorted(results.keys() & baseline.keys())]
    if pairs:
        differences = [[abs(a - b) for a, b in zip(r["losses"], b["losses"], strict=True)] for r, b in pairs]
        row |= spread("gap", [r["held_out"] - b["held_out"] for r, b in pairs])
        row["curve_distance_first"] = max(max(distances[:BLOCK]) for distances in differences)
        row["curve_distance"] = max(map(max, differences))
    for distance in next(iter(results.values())).get("accuracy") or ():
        row |= spread(f"accuracy_{distance}", [r["accuracy"][distance] for r in results.values()])
    return row


def curve(task: str, method: str, results: dict[int, Point]) -> Row:
    """Return the curve that is drawn of a row, for each seed."""
    first = next(iter(results.values()))
    drawn: Row = {"task": task, "method": method}

    def by_seed(name: str) -> dict[str, Any]:
        return {str(seed): result[name] for seed, result in results.items()}

    drawn["losses"] = {seed: blocks(losses) for seed, losses in by_seed("losses").items()}
    if first.get("accuracy"):
        drawn |= {"accuracy": by_seed("accuracy"), "questions": first["questions"]}
    if first.get("before"):
        drawn["before"] = by_seed("before")
    if first["windows"]:
        drawn["windows"] = {seed: windows[::BLOCK] for seed, windows in by_seed("windows").items()}
    return drawn


def blocks(losses: Sequence[float]) -> list[float]:
    """Means of `BLOCK` steps each, the last of what is left."""
    return [round(statistics.fmean(losses[i : i + BLOCK]), 6) for i in range(0, len(losses), BLOCK)]
