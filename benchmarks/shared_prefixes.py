"""A prompt with several answers, computed once or with each row: `python -m benchmarks.shared_prefixes`.

A forward and backward of G rows that share P tokens and have R of their own, whose labels alone count, of a
`Stack` and of wrapped models with random weights; each point in a fresh process on one thread. Loss and norm
of the gradient are compared between the two ways.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

import torch

import adjoint
from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.steps import builder
from benchmarks.wrapped import WIDTHS

FIRST = 512  # tokens of a row in a pass that does not count
VOCAB = WIDTHS["vocab_size"]
MODELS: dict[str, Point] = {
    "Stack": {"vocab_size": VOCAB, "d_model": WIDTHS["hidden_size"], "n_layer": 4,
              "mixer": ["mamba2", "gated_deltanet", "mamba2", "mamba"]},
    **{name: {**WIDTHS, **model} for name, (model, _, _) in wrapped.MODELS.items()},
}  # fmt: skip


def measure(point: Point) -> Point:
    """Memory, seconds, loss and norm of the gradient of one way at one size."""
    prompt, rest, answers = (point[name] for name in ("prompt", "rest", "answers"))
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (answers, prompt + rest))
    ids[:, :prompt] = ids[0, :prompt]
    method = adjoint.Exact(share_prefixes=point["shares"])

    def prepare() -> Passes:
        torch.manual_seed(1)
        model = builder(MODELS[point["model"]])()
        is_stack = isinstance(model, adjoint.Stack)
        model = model if is_stack else adjoint.wrap(model, method)
        options = {"method": method} if is_stack else {}

        def loss(ids: torch.Tensor) -> torch.Tensor:
            labels = ids.clone()
            labels[:, : prompt if ids.shape[1] > prompt else 0] = -100
            inputs = {"input_ids": ids, "labels": labels}
            return model(**inputs, **options).loss

        return Passes(model, loss)

    return measured(prepare, ids, FIRST, lambda run: repeated(run, "cpu", 0.0), above="imports")


class SharedPrefixes(Benchmark):
    name = "shared_prefixes"
    module = "benchmarks.shared_prefixes"
    limiting_options = ("models", "answers", "ratios", "rest")
    uses = ("wrapped",)

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", MODELS)
        runner.add_counts(parser, answers=([2, 8, 16], "rows with the prompt"),
                          ratios=([1, 4, 16], "tokens of the prompt per token of an answer"),
                          rest=(512, "tokens of an answer"))  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [
            {"model": model, "answers": answers, "prompt": ratio * options.rest, "rest": options.rest,
             "shares": shares}
            for model in options.models for answers in options.answers for ratio in options.ratios
            for shares in (False, True)
        ]  # fmt: skip

    def describe(self, point: Point) -> str:
        way = "once" if point["shares"] else "with each row"
        return f"{point['model']}, {point['answers']} answers to {point['prompt']:,} tokens {way}"

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "ADJOINT_VERBOSITY": "warning"}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{**point, **result} for point, result in measurements]

    def markdown(self, result: Row) -> str:
        heads = ["model", "answers", "prompt", "tokens computed", "seconds", "once", "times faster",
                 "MiB", "once", "gradient norms apart"]  # fmt: skip
        by_size: dict[tuple[str, int, int], dict[bool, Row]] = {}
        for row in result["rows"]:
            if "error" not in row:
                by_size.setdefault((row["model"], row["answers"], row["prompt"]), {})[row["shares"]] = row
        lines = []
        for (model, answers, prompt), ways in by_size.items():
            if len(ways) < 2:
                continue
            full, once = ways[False], ways[True]
            rest = full["rest"]
            computed = f"{prompt - 1 + answers * (rest + 1):,} of {answers * (prompt + rest):,}"
            seconds = [min(way["seconds"]) for way in (full, once)]
            norms = [way["gradient_norm"] for way in (full, once)]
            memory = [f"{way['memory_bytes'] / 2**20:,.0f}" for way in (full, once)]
            lines.append([
                model, str(answers), f"{prompt:,}", computed, *(f"{s:.2f}" for s in seconds),
                f"{seconds[0] / seconds[1]:.1f}", *memory, f"{abs(norms[1] / norms[0] - 1):.0e}",
            ])  # fmt: skip
        return report.markdown_table(heads, lines, left=(0,))


if __name__ == "__main__":
    raise SystemExit(SharedPrefixes().main())
