"""A prompt with several answers, computed once or with each row: `python -m benchmarks.shared_prefixes`.

A forward and backward of G rows that share P tokens and have R of their own, whose labels alone count, of a
`Stack` and of wrapped models with random weights; each point in a fresh process on one thread. Time is the
median of `--passes` after a short one. Memory is the peak above imports, so the weights count. Loss and norm
of the gradient are compared between the two ways.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

import adjoint
from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark
from benchmarks.steps import builder
from benchmarks.wrapped import WIDTHS

FIRST = 512  # tokens of a row in a pass that does not count
SHOWN = 8  # answers of which the document shows the results
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

    def passes(run: Callable[[], object]) -> list[float]:
        return [seconds for _ in range(point["passes"]) for seconds in repeated(run, "cpu", 0.0)]

    return measured(prepare, ids, FIRST, passes, above="imports")


class SharedPrefixes(Benchmark):
    name = "shared_prefixes"
    module = "benchmarks.shared_prefixes"
    limiting_options = ("models", "answers", "ratios", "rest", "passes")
    uses = ("wrapped",)
    document = "docs/recipes.md"
    one_thread = True

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", MODELS)
        runner.add_counts(parser, answers=([2, 8, 16], "rows with the prompt"),
                          ratios=([1, 4, 16], "tokens of the prompt per token of an answer"),
                          rest=(512, "tokens of an answer"), passes=(3, "passes of each way"))  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [
            {"model": model, "answers": answers, "prompt": ratio * options.rest, "rest": options.rest,
             "shares": shares, "passes": options.passes}
            for model in options.models for answers in options.answers for ratio in options.ratios
            for shares in (False, True)
        ]  # fmt: skip

    def describe(self, point: Point) -> str:
        way = "once" if point["shares"] else "with each row"
        return f"{point['model']}, {point['answers']} answers to {point['prompt']:,} tokens {way}"

    def shown(self, result: Row) -> str:
        return self.markdown(result | {"rows": [row for row in result["rows"] if row["answers"] == SHOWN]})

    def markdown(self, result: Row) -> str:
        """A line for each model and number of answers, a column for each length of the prompt."""
        by_size: dict[tuple[str, int, int], dict[bool, Row]] = {}
        for row in result["rows"]:
            if "error" not in row:
                by_size.setdefault((row["model"], row["answers"], row["prompt"]), {})[row["shares"]] = row
        pairs = [(ways[False], ways[True]) for ways in by_size.values() if len(ways) == 2]
        cells = [full | {"cell": _cell(full, once)} for full, once in pairs]
        differences = [abs(once["gradient_norm"] / full["gradient_norm"] - 1) for full, once in pairs]
        table = report.pivot(["model", "answers"], cells, ("model", "answers"), "prompt",
                             lambda row: str(row["cell"]), "prompt of {:,}".format)  # fmt: skip
        rests = sorted({full["rest"] for full, _ in pairs})
        return (
            f"{table}\nSeconds of a forward and backward with each row in full → with the prompt once, and "
            f"MiB; answers of {', '.join(f'{rest:,}' for rest in rests)} tokens. Norms of the gradient "
            f"differ by at most {max(differences, default=0):.0e}.\n"
        )


def _cell(full: Row, once: Row) -> str:
    """Time and memory of both ways, and how many times faster the prompt once is."""
    seconds = [statistics.median(way["seconds"]) for way in (full, once)]
    memory = [way["memory_bytes"] / 2**20 for way in (full, once)]
    return (
        f"{seconds[0]:.2f} → {seconds[1]:.2f} s ({seconds[0] / seconds[1]:.1f}×), "
        f"{memory[0]:,.0f} → {memory[1]:,.0f} MiB"
    )


if __name__ == "__main__":
    raise SystemExit(SharedPrefixes().main())
