"""How long a window the gradients of trained models need: `python -m benchmarks.trained_windows`.

The default model of `adjoint train` (Mamba-1, d_model 128, 200 steps of 16,384 bytes of the standard library)
and the same of more layers are trained; then `adjoint sweep` compares the gradients of `Truncated` at windows
from 1 token on, and of `LayerLocal`, with backpropagation's, on three training sequences of 16,384 bytes
in float32, at the initialisation and after training. The error is |g - r| / |r|, the mean of the three.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adjoint.tools.measure.process import ROOT, Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import RUNS, Benchmark, Found

KINDS = ("embedding", "in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj", "norm")
LIMIT = 0.01  # the error that a window is to stay below
WHOLE = "layer-local"


def adjoint(*arguments: str) -> None:
    """Runs a command; its last lines are the error where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "adjoint", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-5:]))


def measure(point: Point) -> Point:
    """The sweep's rows of one model, trained first where it has steps. A training that was stopped is
    resumed."""
    run, out = (Path(point["folder"]) / f"{name}-{point['n_layer']}" for name in ("run", "sweep"))
    shape = ["--model.n_layer", str(point["n_layer"])]
    if point["steps"]:
        flags = ["--training.steps", str(point["steps"]), "--run.dir", str(run), "--resume", "auto"]
        adjoint("train", *shape, *flags)
        shape = ["--model", str(run)]
    shutil.rmtree(out, ignore_errors=True)
    shared = [*shape, "--out", str(out), "--seqlen", str(point["seqlen"]), "--batches", str(point["batches"])]
    windows = ",".join(map(str, point["windows"]))
    adjoint("sweep", *shared, "--methods", "truncated", "--windows", f"{windows},auto")
    adjoint("sweep", *shared, "--methods", WHOLE, "--windows", "full")
    sweep = json.loads((out / "sweep.json").read_text())
    return {"rows": sweep["rows"], "loss": _held_out(run) if point["steps"] else None}


def _held_out(run: Path) -> float:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return min(row["eval_loss"] for row in rows if "eval_loss" in row)


class TrainedWindows(Benchmark):
    name = "trained_windows"
    module = "benchmarks.trained_windows"
    document = "docs/convergence.md"
    caption = "Error of the gradient by window, before and after training"
    limiting_options = ("layers", "windows", "seqlen", "steps", "batches")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(
            parser,
            layers=([2, 8], "of the models"),
            windows=([4**k for k in range(7)], "tokens"),
            seqlen=(16384, "tokens of a sequence"),
            steps=(200, "of training"),
            batches=(3, "sequences"),
        )

    def points(self, options: argparse.Namespace) -> list[Point]:
        shared = {name: getattr(options, name) for name in ("windows", "seqlen", "batches")}
        shared["folder"] = str(options.out or RUNS / self.name)
        return [{"n_layer": n, "steps": s, **shared} for n in options.layers for s in (0, options.steps)]

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"seqlen": options.seqlen, "losses": {
            str(p["n_layer"]): r["loss"] for p, r in measurements if r.get("loss") is not None}}  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Return errors per model and window, of all parameters and of each kind."""
        return [
            {
                "n_layer": point["n_layer"],
                "steps": point["steps"],
                "method": row["method"],
                "window": row["window"],
                "picked": max(row["windows"], default=None) if row["windows"] else None,
                "cosine": row["cosine"],
                "error": row["relative_error"],
                **{kind: row["kind"][kind]["relative_error"] for kind in KINDS},
            }
            for point, result in measurements
            for row in result.get("rows", ())
            if row["method"] in ("truncated", WHOLE)
        ]

    def markdown(self, result: Row) -> str:
        """Errors by window, a column a model; and the least window for each kind of parameter."""
        rows = [row | {"model": _model(row)} for row in sorted(result["rows"], key=_order)]
        least = [
            {"model": model, "kind": kind, "least": _least([r for r in rows if r["model"] == model], kind)}
            for kind in ("error", *KINDS)
            for model in dict.fromkeys(row["model"] for row in rows)
        ]
        errors = report.pivot(["window"], rows, _label, "model", lambda row: f"{row['error']:.1%}", str)
        needed = report.pivot(
            ["parameters"], least, lambda row: "all" if row["kind"] == "error" else row["kind"], "model",
            lambda row: row["least"], str,
        )  # fmt: skip
        return f"{errors}\nThe least measured window with an error below {LIMIT:.0%}:\n\n{needed}"

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """The errors of all parameters and of A_log against the window, a line a model."""
        figure, both = report.pyplot().subplots(1, 2, figsize=(9, 3.6), sharey=True)
        colours = [report.BLUE, report.ORANGE, report.GREEN, report.PURPLE]
        models = dict.fromkeys(map(_model, result["rows"]))
        for axes, field, title in zip(both, ("error", "A_log"), ("all parameters", "A_log"), strict=True):
            for colour, model in zip(colours, models, strict=False):
                model_rows = [row for row in result["rows"] if _model(row) == model and _tokens(row)]
                curve = sorted((row["window"], row[field]) for row in model_rows)
                axes.plot(*zip(*curve, strict=True), "-o", markersize=3, color=colour, label=model)
            axes.axhline(LIMIT, color=report.GREY, linestyle="--", linewidth=1)
            axes.set(xscale="log", yscale="log", xlabel="window, tokens", title=title)
        both[0].set_ylabel("error of the gradient")
        both[0].legend(fontsize=8)
        yield "", figure, report.footer(result["environment"], "float32, batch 1")


def _model(row: Row) -> str:
    return f"{row['n_layer']} layers, {'trained' if row['steps'] else 'fresh'}"


def _tokens(row: Row) -> bool:
    return row["method"] != WHOLE and isinstance(row["window"], int)


def _order(row: Row) -> tuple[bool, bool, int]:
    return row["method"] == WHOLE, not _tokens(row), row["window"] if _tokens(row) else 0


def _label(row: Row) -> str:
    if row["method"] == WHOLE:
        return WHOLE
    return f"{row['window']:,}" if _tokens(row) else f"{row['window']}"


def _least(rows: list[Row], field: str) -> str:
    windows = sorted((row["window"], row[field]) for row in rows if _tokens(row))
    reached = (f"{window:,}" for window, error in windows if error < LIMIT)
    return next(reached, f"> {windows[-1][0]:,}" if windows else "–")


if __name__ == "__main__":
    raise SystemExit(TrainedWindows().main())
