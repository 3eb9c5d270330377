"""Does training still converge? `python -m benchmarks.convergence`.

The same small model, from the same initial weights and over the same batches in the same order, trained with
each method: two Mamba-1 layers of d_model 64 in float32 on the CPU, AdamW, linear warm-up and cosine decay,
the gradient clipped to norm 1. Tasks (`benchmarks.convergence.tasks`): text; recall at known distances from
two initialisations, one whose states remember for up to a thousand tokens, one whose states forget within
ten, so that long memory has to be learned; and recall of far distances only, by models that know it of near
ones. Everything is repeated with several seeds, which change weights and data. Times are not measured: runs
share the machine.

A run is one (task, method, seed); each finished one is kept at once, and a benchmark that was stopped goes on
after the last.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import usable_cores
from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.convergence import report
from benchmarks.convergence.tasks import TASKS, distances_within
from benchmarks.convergence.train import BATCH, METHOD_NAMES, MODEL, SEQLEN, make_method, train
from benchmarks.convergence.workers import Workers

BLOCK = 10  # steps whose losses are averaged into one point of a published curve
DEFAULT_METHODS = (
    "backprop",
    "exact",
    "truncated-4",
    "truncated-16",
    "truncated-64",
    "truncated-auto",
    "unbiased-64",
    "layer-local",
    "layer-local-16",
)


def grid(options: argparse.Namespace) -> list[Point]:
    """Every run; methods innermost, so that what was finished when it was stopped can be compared."""
    return [
        {"task": task, "method": method, "seed": seed, "steps": options.steps or TASKS[task].steps,
         "seqlen": options.seqlen}
        for seed in range(options.seeds) for task in options.tasks for method in options.methods
    ]  # fmt: skip


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Train every run that is not in the journal yet. A failing one is recorded, not raised."""
    from tqdm import tqdm

    points = grid(options)
    left = [point for point in points if journal.get(point) is None]
    if not left:
        return
    workers = Workers(train, min(options.jobs, len(left)), options.threads)
    total, ahead = (sum(point["steps"] for point in of) for of in (points, left))
    finished = len(points) - len(left)
    try:
        with tqdm(total=total, initial=total - ahead, unit="step", dynamic_ncols=True, smoothing=0.05) as bar:
            for point, kind, content in workers.run(left):
                if kind == "step":
                    bar.update()
                    continue
                journal.add(point, content)
                finished += 1
                bar.set_description(f"{finished}/{len(points)} runs")
                if "error" in content:
                    name = f"{point['task']}, {point['method']}, seed {point['seed']}"
                    bar.write(f"{name}: {content['error']}", file=sys.stderr)
    finally:
        workers.close()


# ---------------------------------------------------------------------------------------------------- results


def summarise(options: argparse.Namespace, journal: common.Journal) -> tuple[list[Row], list[Row]]:
    """(rows, curves): a row a (task, method) of numbers, medians over the seeds; and what is to be drawn."""
    good: dict[tuple[str, str], dict[int, Row]] = {}
    errors: dict[tuple[str, str], str] = {}
    for point in grid(options):
        key, result = (point["task"], point["method"]), journal.get(point)
        results = good.setdefault(key, {})
        if result is not None and "error" in result:
            errors.setdefault(key, result["error"])
        elif result is not None:
            results[point["seed"]] = result
    rows, curves = [], []
    for key, results in good.items():
        row: Row = {"task": key[0], "method": key[1], "seeds": len(results)}
        rows.append(row)
        if not results:
            row["note"] = errors.get(key, "not run")
            continue
        row["note"] = errors.get(key, "")
        row |= _spread("held_out", [r["held_out"] for r in results.values()])
        row |= _spread("train", [statistics.fmean(r["losses"][-BLOCK:]) for r in results.values()])
        row |= _gap(results, good.get((key[0], "backprop"), {}))
        first = next(iter(results.values()))
        for distance in first.get("accuracy") or ():
            row |= _spread(f"accuracy_{distance}", [r["accuracy"][distance] for r in results.values()])
        curves.append(_curve(row, results, first))
    return rows, curves


def _gap(results: dict[int, Row], baseline: dict[int, Row]) -> Row:
    """How far runs are from those of Backprop with the same seeds: in held-out loss, and at most between the
    training curves, over all steps and over the first ones, before rounding has grown."""
    pairs = [(results[seed], baseline[seed]) for seed in sorted(results.keys() & baseline.keys())]
    if not pairs:
        return {}
    apart = [[abs(a - b) for a, b in zip(r["losses"], b["losses"], strict=True)] for r, b in pairs]
    return _spread("gap", [r["held_out"] - b["held_out"] for r, b in pairs]) | {
        "curve_distance_first": max(max(distances[:BLOCK]) for distances in apart),
        "curve_distance": max(map(max, apart)),
    }


def _curve(row: Row, results: dict[int, Row], first: Row) -> Row:
    """What is drawn of a row, by seed. `first`: one of the results, which says what there is."""

    def by_seed(name: str) -> dict[str, Any]:
        return {str(seed): result[name] for seed, result in results.items()}

    curve = {"task": row["task"], "method": row["method"]}
    curve["losses"] = {seed: blocks(losses) for seed, losses in by_seed("losses").items()}
    if first.get("accuracy"):
        curve |= {"accuracy": by_seed("accuracy"), "questions": first["questions"]}
    if first.get("before"):
        curve["before"] = by_seed("before")
    if first["windows"]:
        curve["windows"] = {seed: windows[::BLOCK] for seed, windows in by_seed("windows").items()}
    return curve


def blocks(losses: Sequence[float]) -> list[float]:
    """Means of `BLOCK` steps each, the last of what is left."""
    return [round(statistics.fmean(losses[i : i + BLOCK]), 6) for i in range(0, len(losses), BLOCK)]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


# ----------------------------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("convergence", __doc__, fresh="train again what a stopped run had finished")
    add = parser.add_argument
    add("--methods", nargs="+", default=list(DEFAULT_METHODS), metavar="NAME",
        help=f"among {METHOD_NAMES} (default: {' '.join(DEFAULT_METHODS)})")  # fmt: skip
    common.add_choice(parser, "--tasks", TASKS)
    add("--seeds", type=int, default=3, help="runs of each method and task (default 3)")
    steps = ", ".join(f"{name} {task.steps}" for name, task in TASKS.items())
    add("--steps", type=int, help=f"optimizer steps a run (default: {steps})")
    add("--seqlen", type=common.parse_size, default=SEQLEN, help=f"tokens (default {SEQLEN})")
    add("--threads", type=int, default=1, help="of each process (default 1)")
    add("--jobs", type=int, help="processes at a time (default: one a core)")
    options = parser.parse_args(arguments)
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    options.command = f"python -m benchmarks.convergence {given}".strip()
    options.methods, options.tasks = list(dict.fromkeys(options.methods)), list(dict.fromkeys(options.tasks))
    for name in ("seeds", "steps", "threads", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}: it must be at least 1")
    if options.jobs is None:
        options.jobs = max(1, usable_cores() // options.threads)
    try:
        for method in options.methods:
            make_method(method)
        for task in (TASKS[name] for name in options.tasks if TASKS[name].recall):
            distances_within(options.seqlen, task.distances)
    except (UserError, ValueError) as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: every run finished; 1: one failed; 130: Ctrl-C."""
    options = parse(arguments)
    environment = common.environment() | {"threads": options.threads, "jobs": options.jobs}
    folder = options.out or common.RESULTS
    journal = common.open_journal(
        folder, "convergence", Path(__file__).parent, environment, fresh=options.fresh
    )
    complete = common.completed(lambda: run(options, journal))
    rows, curves = summarise(options, journal)
    steps = {name: options.steps or TASKS[name].steps for name in options.tasks}
    payload = {
        "benchmark": "convergence",
        "command": options.command,
        "environment": environment,
        "complete": complete,
        "model": MODEL,
        "batch": BATCH,
        "seqlen": options.seqlen,
        "seeds": options.seeds,
        "tasks": {name: vars(TASKS[name]) | {"steps": count} for name, count in steps.items()},
        "block_steps": BLOCK,
        "curves": curves,
    }
    common.write_results(folder, "convergence", payload, rows)
    default = parse([])
    whole = all(
        vars(options)[n] == vars(default)[n] for n in ("methods", "tasks", "seeds", "steps", "seqlen")
    )
    to_docs = whole and complete and options.out is None
    report.show(payload | {"rows": rows}, folder / "convergence", to_docs=to_docs)
    return journal.end(complete=complete, failed=any(row["note"] for row in rows))
