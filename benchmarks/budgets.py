"""Time against memory, from the least to backpropagation's: `python -m benchmarks.budgets`.

Every point is forward + backward of 8,192 random tokens in a fresh process, in float32, batch 1: of a
`Stack` of eight Mamba-2 layers, and of a Bamba of transformers with one layer of attention in four, both with
d_model 256. `Exact()` picks chunks and segments of layers, and takes the least memory; `Exact(memory=…)`
keeps as many of their tapes as its budget allows, until nothing is computed twice. Compared are one segment
in the chunks that are its default, plain backpropagation and checkpointing of each layer.

- Gradients of all ways, on the same weights, are compared before any is timed.
- Memory: peak resident size above what the process holds once it has run 64 tokens. Time: the median pass,
  after that one; processes are repeated and alternate, published is the median.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from adjoint.tools.measure.process import Point
from benchmarks import report, steps
from benchmarks.report import Row
from benchmarks.runner import Found
from benchmarks.wrapped import MODELS as WRAPPED
from benchmarks.wrapped import WIDTHS

STACK: Point = {
    "vocab_size": 256,
    "n_layer": 8,
    "mixer": "mamba2",
    "d_model": 256,
    "headdim": 64,
    "d_state": 64,
}
BAMBA: Point = WIDTHS | WRAPPED["Bamba-like"][0] | {"num_hidden_layers": 8, "attn_layer_indices": [3, 7]}
# Name → the model, plain backpropagation of it, the chunks of one segment.
MODELS: dict[str, tuple[Point, Point, int]] = {
    "Stack of Mamba-2": (STACK, {"method": "Backprop"}, 1408),
    "Bamba-like": (BAMBA, {}, 832),
}
BUDGETS = ("150MB", "300MB", "600MB", "1GB", "4GB")
UNSHOWN = ("150MB", "300MB", "600MB")  # in the document's table
LEAST, ONE_SEGMENT, PLAIN, CHECKPOINTING = "`Exact()`", "one segment", "backpropagation", "checkpointing"


class Budgets(steps.StepBenchmark):
    name = "budgets"
    lengths: ClassVar = [8192]
    limiting_options = ("lengths", "allocators")
    ratios = (("memory_bytes", "ms_per_token"), {"way": PLAIN}, ("model", "allocator", "length"))
    document, caption = "docs/which_method.md", "Time of a step against its memory"

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        """Return a point for each model and way, repeated in several processes."""
        budgets: dict[str, Point] = {
            f'`Exact(memory="{size}")`': {"method": "Exact", "memory": size} for size in BUDGETS
        }
        ways: dict[str, Point] = {
            LEAST: {"method": "Exact"},
            **budgets,
            CHECKPOINTING: {"checkpointing": True},
        }
        return [
            steps.Curve({"model": model, "way": way}, way, point, arguments, repeated=options.lengths)
            for model, (point, plain, tokens) in MODELS.items()
            for way, arguments in {
                PLAIN: plain,
                ONE_SEGMENT: {"method": "Exact", "chunk_size": tokens},
                **ways,
            }.items()
        ]

    def named(self, row: Row) -> str:
        return f"{row['model']}, {row['way']}"

    def fits(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Return no rows: one length is measured."""
        return []

    def shown(self, result: Row) -> str:
        rows = [row for row in result["rows"] if not any(size in row["way"] for size in UNSHOWN)]
        return self.table(result | {"rows": rows})

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        rows = [row for row in result["rows"] if "memory_bytes" in row]
        if rows:
            conditions = "8,192 tokens, d_model 256, 8 layers, float32, batch 1"
            yield "", draw(rows), report.footer(result["environment"], conditions)


def draw(rows: Sequence[Row]) -> Any:
    """Time relative to backpropagation's against memory relative to it, a panel for each model."""
    others = {ONE_SEGMENT: report.GREEN, CHECKPOINTING: report.BLUE, PLAIN: report.GREY}
    figure, panels = report.pyplot().subplots(1, len(MODELS), figsize=(10, 4), squeeze=False)
    for axes, (model, of_model) in zip(
        panels[0], itertools.groupby(rows, lambda row: row["model"]), strict=False
    ):
        points = {row["way"]: (row["memory_bytes"] / 2**20, row["ms_per_token"]) for row in of_model}
        budgets = sorted(point for way, point in points.items() if way not in others)
        axes.plot(
            *zip(*budgets, strict=True), "o-", color=report.ORANGE, label="Exact, least memory to all of it"
        )
        for way, colour in others.items():
            if way in points:
                axes.plot(*points[way], "s", color=colour, label=way)
        axes.set(title=model, xlabel="peak memory above a short pass, MiB")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[0][0].set_ylabel("forward + backward, ms per token")
    panels[0][0].legend(loc="lower right")
    return figure


if __name__ == "__main__":
    raise SystemExit(Budgets().main())
