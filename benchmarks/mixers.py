"""Time per token by `Backprop`, `Exact`, and `Exact` with room, by mixer: `python -m benchmarks.mixers`.

Forward + backward of a language model (d_model 256, 4 layers, a byte vocabulary, float32, batch 1) on random
tokens. A process has one mixer and length, and goes through the methods alternately, so that a machine that
slows down slows all of them; processes are repeated, and published is the median, and of the methods' ratios
to `Backprop` the median over the rounds. `Exact(memory="8GB")` has room for the whole sequence.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable

import torch

import adjoint
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

MIXERS = ("mamba", "mamba2", "mamba3", "gated_deltanet")
METHODS = {
    "backprop": {"method": "Backprop"},
    "exact": {"method": "Exact"},
    "exact 8GB": {"method": "Exact", "memory": "8GB"},
}


def measure(point: Point) -> Point:
    """Return the seconds of each round, forward + backward of one model, by method."""
    torch.manual_seed(0)
    config = adjoint.StackConfig(vocab_size=256, d_model=256, n_layer=4, mixer=point["mixer"])
    model, ids = adjoint.Stack(config), torch.randint(256, (1, point["length"]))

    def run(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        model.zero_grad(set_to_none=True)
        loss_of(ids).backward()

    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(run, steps.loss_by(model, way)) for name, way in METHODS.items()
    }
    return dict(steps.alternating(runs, point["rounds"]))


class Mixers(Benchmark):
    name = "mixers"
    module = "benchmarks.mixers"
    limiting_options = ("mixers",)
    document = "docs/which_method.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--mixers", MIXERS)
        runner.add_counts(parser, lengths=([4096, 16384], "tokens"), repeats=(3, "processes a point"),
                          rounds=(5, "of each method in a process, after the first"))  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        """The repeats are outermost."""
        combinations = itertools.product(range(options.repeats), options.lengths, options.mixers)
        return [{"mixer": m, "length": n, "rounds": options.rounds, "repeat": r} for r, n, m in combinations]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """A row a mixer, length and method."""
        rows = []
        groups = steps.grouped(runner.successes(measurements), "mixer", "length")
        for mixer, n in itertools.product(options.mixers, options.lengths):
            results = groups.get((mixer, n), [])
            for name in results[0] if results else ():
                first = next(iter(results[0]))  # what the others are compared with
                seconds = [statistics.median(r[name]) for r in results]
                ratios = [a / b for r in results for a, b in zip(r[name], r[first], strict=True)]
                times = {"ms_per_token": round(statistics.median(seconds) / n * 1e3, 4)}
                times["ratio"] = round(statistics.median(ratios), 3)
                rows.append({"mixer": mixer, "length": n, "method": name, **times})
        return rows

    def shown(self, result: Row) -> str:
        """The longest sequences alone."""
        return self.markdown(result | {"rows": report.longest(result["rows"])})

    def markdown(self, result: Row) -> str:
        """A line a mixer and method, a column a length."""
        title = "time per token · ratio to the mixer's first line"
        return report.pivot(
            [title], result["rows"], "{mixer}, {method}".format_map, "length",
            lambda row: f"{row['ms_per_token']:.3f} ms · {row['ratio']:.2f}",
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(Mixers().main())
