"""Does training still converge? `python -m benchmarks.convergence`.

The same small model, from the same initial weights and over the same batches in the same order, trained with
each method: two Mamba-1 layers of d_model 64 in float32 on the CPU, AdamW, linear warm-up and cosine decay,
the gradient clipped to norm 1. Tasks (`benchmarks.recall_tasks`): text; recall at known distances from two
initialisations, one whose states remember for up to a thousand tokens, one whose states forget within ten, so
that long memory has to be learned; and recall of far distances only, by models that know it of near ones.
Everything is repeated with several seeds, which change weights and data. Times are not measured: runs share
the machine.

A run is one (task, method, seed); each finished one is kept at once, and a benchmark that was stopped goes on
after the last.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.workers import Workers

MODEL: dict[str, Any] = {"d_model": 64, "n_layer": 2, "d_state": 16, "expand": 2, "mixer": "mamba"}
BATCH, SEQLEN, WARMUP = 4, 512, 20
CHUNK = 128  # Exact's and LayerLocal's: several chunks a sequence, or there would be nothing to compare
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
_KNOWN = "backprop, exact, truncated-WINDOW, truncated-auto, unbiased-WINDOW, layer-local, layer-local-WINDOW"


def make_method(name: str) -> Any:
    """The method that `name` stands for, such as "truncated-16" or "layer-local".

    Raises:
        ValueError: no such method, or a window that it does not take.
    """
    import adjoint

    if name == "truncated-auto":
        return adjoint.Truncated(window="auto", tolerance=1e-3)
    match = re.fullmatch(r"(backprop|exact|layer-local|truncated(?=-)|unbiased(?=-))(?:-(\d+))?", name)
    if not match or (match[2] and match[1] in ("backprop", "exact")):
        raise ValueError(f"unknown method {name!r}: choose among {_KNOWN}")
    kind, window = match[1], None if match[2] is None else int(match[2])
    if kind == "backprop":
        return adjoint.Backprop()
    if kind == "exact":
        return adjoint.Exact(chunk_size=CHUNK)
    if kind == "layer-local":
        return adjoint.LayerLocal(window, chunk_size=CHUNK if window is None else None)
    assert window is not None
    return adjoint.Truncated(window, unbiased=kind == "unbiased")


def train(point: dict[str, Any]) -> Iterator[int | dict[str, Any]]:
    """Train one run: yields the number of each step done, at last the result.

    point: task, method, seed, steps, seqlen; model, batch and dtype ("float64") on request. The result holds
    the training loss of every step, the windows that the method picked (a row a step, or None), what the
    task's `evaluate` gives, and, where there were lessons before, the accuracy after them as "before".
    """
    import torch

    import adjoint
    from benchmarks.recall_tasks import TASKS, open_lessons, open_task

    task, sizes = TASKS[point["task"]], (point["seqlen"], point.get("batch", BATCH), point["seed"])
    data, lessons = open_task(point["task"], *sizes), open_lessons(point["task"], *sizes)
    torch.manual_seed(point["seed"])
    shape = MODEL | point.get("model", {})
    stack = adjoint.StackConfig(
        vocab_size=data.vocab_size, dt_min=task.dt_min, dt_max=task.dt_max, tie_embeddings=True, **shape
    )
    model = adjoint.Stack(stack).to(getattr(torch, point.get("dtype", "float32")))
    result: dict[str, Any] = {}
    if lessons is not None:
        for _ in _optimise(model, lessons, adjoint.Backprop(), task.lesson_steps, task.lesson_lr):
            pass
        result["before"] = data.evaluate(model).get("accuracy")
    torch.manual_seed(point["seed"])  # unbiased draws from here on
    losses: list[float] = []
    windows: list[list[int]] = []
    for out in _optimise(model, data, make_method(point["method"]), point["steps"], task.lr):
        losses.append(out.loss.item())
        if out.windows is not None:
            windows.append([int(w) for w in out.windows])
        yield len(losses)
    yield result | {"losses": losses, "windows": windows or None} | data.evaluate(model)


def _optimise(model: Any, data: Any, method: Any, steps: int, lr: float) -> Iterator[Any]:
    """Take so many optimizer steps; yields the model's output of each."""
    import torch

    from adjoint.train.config import TrainingConfig
    from adjoint.train.optimizer import learning_rate, make_optimizer

    config = TrainingConfig(steps=steps, lr=lr, warmup_steps=WARMUP)
    optimizer = make_optimizer(model, config)
    for step, (ids, labels) in zip(range(1, steps + 1), data.train(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.zero_grad(set_to_none=True)
        out = model(ids, labels=labels, method=method)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        yield out


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run; methods innermost, so that what was finished when it was stopped can be compared."""
    from benchmarks.recall_tasks import TASKS

    return [
        {
            "task": task,
            "method": method,
            "seed": seed,
            "steps": options.steps or TASKS[task].steps,
            "seqlen": options.seqlen,
        }
        for seed in range(options.seeds)
        for task in options.tasks
        for method in options.methods
    ]


def run(options: argparse.Namespace, journal: common.Journal) -> None:
    """Train every run that is not in the journal yet. A failing one is recorded, not raised."""
    from tqdm import tqdm

    points = grid(options)
    left = [point for point in points if journal.get(point) is None]
    if not left:
        return
    workers = Workers(train, min(options.jobs, len(left)), options.threads)
    steps = {True: sum(p["steps"] for p in points), False: sum(p["steps"] for p in left)}
    try:
        with tqdm(total=steps[True], initial=steps[True] - steps[False], unit="step", dynamic_ncols=True,
                  smoothing=0.05, mininterval=0.5) as bar:  # fmt: skip
            finished = len(points) - len(left)
            bar.set_description(f"{finished}/{len(points)} runs")
            for point, kind, content in workers.run(left):
                if kind == "step":
                    bar.update()
                    continue
                journal.add(point, content)
                finished += 1
                bar.set_description(f"{finished}/{len(points)} runs")
                if "error" in content:
                    bar.write(f"{describe(point)}: {content['error']}", file=sys.stderr)
    finally:
        workers.close()


def describe(point: dict[str, Any]) -> str:
    """A run in words."""
    return f"{point['task']}, {point['method']}, seed {point['seed']}"


# ---------------------------------------------------------------------------------------------------- results


def summarise(
    options: argparse.Namespace, journal: common.Journal
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, curves): a row a (task, method) of numbers, medians over the seeds; and what is to be drawn."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for point in grid(options):
        result = journal.get(point)
        found.setdefault((point["task"], point["method"]), {})
        if result is not None:
            found[point["task"], point["method"]][point["seed"]] = result
    rows, curves = [], []
    for (task, method), results in found.items():
        row: dict[str, Any] = {"task": task, "method": method}
        good = {seed: r for seed, r in results.items() if "error" not in r}
        if not good:
            errors = [r["error"] for r in results.values()]
            rows.append(row | {"seeds": 0, "note": errors[0] if errors else "not run"})
            continue
        baseline = {s: r for s, r in found.get((task, "backprop"), {}).items() if "error" not in r}
        row |= {"seeds": len(good), "note": next((r["error"] for r in results.values() if "error" in r), "")}
        row |= _spread("held_out", [r["held_out"] for r in good.values()])
        row |= _spread("train", [statistics.fmean(r["losses"][-BLOCK:]) for r in good.values()])
        both = sorted(good.keys() & baseline.keys())
        if both:
            row |= _spread("gap", [good[s]["held_out"] - baseline[s]["held_out"] for s in both])
            # How far apart the training curves are: over all steps, and over the first ten, before
            # rounding has grown.
            apart = [
                [abs(a - b) for a, b in zip(good[s]["losses"], baseline[s]["losses"], strict=True)]
                for s in both
            ]
            row |= {
                "curve_distance_first": max(max(d[:BLOCK]) for d in apart),
                "curve_distance": max(map(max, apart)),
            }
        curve: dict[str, Any] = {"task": task, "method": method}
        curve["losses"] = {str(s): blocks(r["losses"]) for s, r in good.items()}
        accuracy = next(iter(good.values())).get("accuracy")
        if accuracy:
            for distance in accuracy:
                row |= _spread(f"accuracy_{distance}", [r["accuracy"][distance] for r in good.values()])
            curve["accuracy"] = {str(s): r["accuracy"] for s, r in good.items()}
            curve["questions"] = next(iter(good.values()))["questions"]
        if next(iter(good.values())).get("before"):
            curve["before"] = {str(s): r["before"] for s, r in good.items()}
        if next(iter(good.values()))["windows"]:
            curve["windows"] = {str(s): r["windows"][::BLOCK] for s, r in good.items()}
        rows.append(row)
        curves.append(curve)
    return rows, curves


def blocks(losses: Sequence[float]) -> list[float]:
    """Means of `BLOCK` steps each, the last of what is left."""
    return [round(statistics.fmean(losses[i : i + BLOCK]), 6) for i in range(0, len(losses), BLOCK)]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = min(values), max(values)
    return {name: statistics.median(values), f"{name}_min": low, f"{name}_max": high}


# ----------------------------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    from adjoint.errors import UserError
    from benchmarks.recall_tasks import TASKS, distances_within

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), metavar="NAME",
                        help=f"among {_KNOWN} (default: {' '.join(DEFAULT_METHODS)})")  # fmt: skip
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME",
                        help=", ".join(TASKS))  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method and task (default 3)")
    steps = ", ".join(f"{name} {task.steps}" for name, task in TASKS.items())
    parser.add_argument("--steps", type=int, help=f"optimizer steps a run (default: {steps})")
    parser.add_argument("--seqlen", type=common.parse_size, default=SEQLEN, help=f"tokens (default {SEQLEN})")
    parser.add_argument("--out", type=Path, help="folder of the results (default benchmarks/results)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--jobs", type=int, help="processes at a time (default: one a core)")
    parser.add_argument("--fresh", action="store_true", help="train again what a stopped run had finished")
    options = parser.parse_args(arguments)
    options.command = "python -m benchmarks.convergence " + shlex.join(
        sys.argv[1:] if arguments is None else arguments
    )
    options.methods, options.tasks = list(dict.fromkeys(options.methods)), list(dict.fromkeys(options.tasks))
    for name in ("seeds", "steps", "threads", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}: it must be at least 1")
    if options.jobs is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options.jobs = max(1, cores // options.threads)
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
    from benchmarks import convergence_report
    from benchmarks.recall_tasks import TASKS

    environment = common.environment() | {"threads": options.threads, "jobs": options.jobs}
    folder = options.out or common.RESULTS
    code = [(common.ROOT / "benchmarks" / f"{n}.py").read_text() for n in ("convergence", "recall_tasks")]
    mark = common.fingerprint(*code, environment["versions"], environment["cpu"])
    journal = common.Journal(folder / "partial" / "convergence.jsonl", mark, fresh=options.fresh)
    if journal.discarded:
        print("The code has changed since the run that was stopped: training anew.", file=sys.stderr)
    elif journal.done:
        print(f"Going on: {len(journal.done)} runs were finished before (--fresh: anew).", file=sys.stderr)
    stopped = False
    try:
        run(options, journal)
    except KeyboardInterrupt:
        stopped = True
        print("Stopped. The same command goes on from here.", file=sys.stderr)
    rows, curves = summarise(options, journal)
    payload = {
        "benchmark": "convergence",
        "command": options.command.strip(),
        "environment": environment,
        "complete": not stopped,
        "model": MODEL,
        "batch": BATCH,
        "seqlen": options.seqlen,
        "seeds": options.seeds,
        "tasks": {name: vars(TASKS[name]) | {"steps": options.steps or TASKS[name].steps}
                  for name in options.tasks},
        "block_steps": BLOCK,
        "curves": curves,
    }  # fmt: skip
    common.write_results(folder, "convergence", payload, rows)
    default = parse([])
    whole = all(getattr(options, n) == getattr(default, n) for n in ("methods", "tasks", "seeds", "steps"))
    to_docs = whole and not stopped and options.out is None and options.seqlen == SEQLEN
    convergence_report.show(payload | {"rows": rows}, folder / "convergence", to_docs=to_docs)
    if stopped:
        return 130
    journal.path.unlink()  # complete: the next run trains anew
    return 1 if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
