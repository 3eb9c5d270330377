"""Does a wrong gradient cost more in a deeper model? `python -m benchmarks.depth`.

The text of `benchmarks.convergence`, learned as there, by stacks of 2, 8, 24 and 48 Mamba-1 layers that are
thin enough (d_model 32) for one core: from the same initial weights and over the same batches with each
method, with three seeds. `LayerLocal` hands every layer the gradient of the last layer's output, so that its
error can grow with the layers above; `Truncated(16)` cuts what each layer's recurrence gives back.

A run is one (layers, method, seed); each finished one is kept at once, and a benchmark that was stopped goes
on after the last. How long all of them took is noted.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.convergence.command import summaries
from benchmarks.convergence.pictures import looks
from benchmarks.convergence.tables import label, ranged
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.train import MODEL, make_method
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

THIN = {"d_model": 32}
EXACT = "exact"


class Depth(Benchmark):
    name = "depth"
    module = "benchmarks.convergence.train"
    limiting_options = ("methods", "layers", "seeds", "steps", "seqlen", "batch")
    document = "docs/convergence.md"
    caption = "Loss above Exact's against the number of layers"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--methods", nargs="+", default=[EXACT, "truncated-16", "layer-local"], metavar="NAME",
            help="as of benchmarks.convergence",
        )  # fmt: skip
        runner.add_counts(parser, layers=([2, 8, 24, 48], "of the models"), seeds=(5, "runs of each model"),
                          steps=(600, "optimizer steps a run"), seqlen=(256, "tokens"),
                          batch=(4, "sequences a step"))  # fmt: skip

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        try:
            for method in options.methods:
                make_method(method)
        except ValueError as error:
            parser.error(str(error))

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Seeds outermost, so that what was finished when it was stopped can be compared."""
        sizes = {"task": "text", "steps": options.steps, "seqlen": options.seqlen, "batch": options.batch}
        return [
            {"layers": layers, "method": method, "seed": seed, "model": THIN | {"n_layer": layers}, **sizes}
            for seed in range(options.seeds) for layers in options.layers
            for method in dict.fromkeys(options.methods)
        ]  # fmt: skip

    def describe(self, point: Point) -> str:
        return f"{point['layers']} layers, {label(point['method'])}, seed {point['seed']}"

    def shared(self, point: Point) -> str:
        return "all"

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        """The runs' sizes, how many tokens each has seen, and the processor's seconds for all of them."""
        sizes = {name: getattr(options, name) for name in ("seeds", "steps", "batch", "seqlen")}
        tokens = options.steps * options.batch * options.seqlen
        seconds = sum(result["core_seconds"] for _, result in measurements)
        return {"model": MODEL | THIN | {"n_layer": options.layers}, "lr": TASKS["text"].lr,
                "tokens": tokens, "core_seconds": seconds, **sizes}  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return summaries(measurements, "layers", baseline=EXACT)

    def markdown(self, result: Row) -> str:
        """A line a model and method; below, what was run and where."""
        model = result["model"]
        heads = ["layers", "method", "held-out loss", "gap to Exact"]
        lines = [
            [str(row["layers"]), label(row["method"])]
            + ([ranged(row, "held_out", ".3f")] if row["seeds"] else [row["note"]])
            + (["–"] if row["method"] == EXACT or "gap" not in row else [ranged(row, "gap", "+.3f")])
            for row in result["rows"]
        ]
        seeds, steps, tokens, lr = (result[name] for name in ("seeds", "steps", "tokens", "lr"))
        about = (
            f"{seeds} seeds: median (least … most), nats per byte; d_model {model['d_model']}, d_state "
            f"{model['d_state']}, float32; {steps} steps of {result['batch']} × {result['seqlen']} tokens, "
            f"{tokens:,} in all; learning rate {lr:g} for every depth. "
            f"{result['core_seconds'] / 60:.0f} minutes of one core, one thread: `python -m "
            "benchmarks.depth`\n"
        )
        return f"{report.markdown_table(heads, lines, left=(0, 1))}\n{about}"

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """The gap to `Exact` against the depth, the median and each seed's range; beside it the loss."""
        figure, panels = report.pyplot().subplots(1, 2, figsize=(9, 3.6))
        style = looks(dict.fromkeys(row["method"] for row in result["rows"]))
        style[EXACT] = looks(["backprop"])["backprop"]  # the baseline here
        for (method, look), field in itertools.product(style.items(), ("gap", "held_out")):
            axes = panels[int(field == "held_out")]
            rows = [row for row in result["rows"] if row["method"] == method and field in row]
            depths = [row["layers"] for row in rows]
            median, low, high = (
                [row[name] for row in rows] for name in (field, f"{field}_min", f"{field}_max")
            )
            axes.plot(depths, median, **look, marker="o", markersize=4, label=label(method))
            axes.fill_between(depths, low, high, color=look["color"], alpha=0.15, linewidth=0)
        for axes, title in zip(panels, ("above Exact's, same seed", "itself"), strict=True):
            axes.set(xscale="log", xlabel="layers", title=f"held-out loss {title}")
            axes.set_xticks(result["model"]["n_layer"], [str(n) for n in result["model"]["n_layer"]])
            axes.minorticks_off()
        panels[0].set_ylabel("nats per byte")
        panels[1].legend(fontsize=8)
        sizes = f"{result['steps']} steps of {result['batch']} × {result['seqlen']} tokens"
        yield (
            "",
            figure,
            report.footer(
                result["environment"],
                f"d_model {result['model']['d_model']}",
                sizes,
                f"{result['seeds']} seeds: median and range",
            ),
        )


if __name__ == "__main__":
    raise SystemExit(Depth().main())
