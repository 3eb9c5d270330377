"""Layers that read in both directions, by chunks and by checkpointing: `python -m benchmarks.bidirectional`.

Every point is forward + backward of a masked-token model with the widths of Caduceus, tied projections and a
quarter of its layers: d_model 256, 4 layers, expand 2, d_state 16, 16 token ids, float32, batch 1, in a fresh
process on the CPU. All ways run the same scans. Plain backpropagation is not taken beyond 32K tokens. Peaks
are above what is resident after a pass of 64 tokens. Before a way is timed its gradients are compared with
plain backpropagation's, on the same weights.
"""

from __future__ import annotations

import argparse
from typing import ClassVar

from adjoint.tools.measure.process import Point
from benchmarks import runner, steps
from benchmarks.report import Row
from benchmarks.runner import Found

MODEL: Point = {
    **{"mixer": "mamba", "bidirectional": "tied", "d_model": 256, "n_layer": 4, "d_state": 16, "expand": 2},
    **{"vocab_size": 16, "tie_embeddings": True},
}


# Name → label in the table, way of `benchmarks.steps`, the longest of the default lengths.
WAYS: dict[str, tuple[str, Point, int]] = {
    "exact": ("**Exact**", {"method": "Exact"}, 131072),
    "checkpoints": ("Backprop + checkpointing", {"method": "Backprop", "checkpoint": True}, 131072),
    "backprop": ("Backprop", {"method": "Backprop"}, 32768),
}


class Bidirectional(steps.StepBenchmark):
    name = "bidirectional"
    lengths: ClassVar = [8192, 32768, 131072]
    limiting_options = ("lengths", "ways", "allocators")
    ratios = (("memory_bytes", "ms_per_token"), {"way": "exact"}, ("allocator", "length"))
    document = "docs/which_method.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--ways", WAYS)
        super().arguments(parser)

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        return [
            steps.Curve({"way": name}, name, MODEL, way, longest, self.lengths[:1])
            for name, (_, way, longest) in WAYS.items() if name in options.ways
        ]  # fmt: skip

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"model": MODEL, "repeats": options.repeats} | super().payload(options, measurements)

    def named(self, row: Row) -> str:
        return WAYS[row["way"]][0]


if __name__ == "__main__":
    raise SystemExit(Bidirectional().main())
