"""StripedHyena 2 by chunks and by FFT convolutions with checkpointing: `python -m benchmarks.hyena`.

Every point is forward + backward of a language model: d_model 64, 6 layers (hyena_se, hyena_mr, hyena_li,
twice), gated MLPs of width 176, 512 token ids, float32, batch 1, in a fresh process on the CPU. The FFT
convolutions are plain PyTorch's, of the whole sequence, each layer recomputed in the backward. Peaks are
above what is resident after a pass of 64 tokens. Before a way is timed its gradients are compared with plain
backpropagation's, on the same weights.
"""

from __future__ import annotations

import argparse
from typing import ClassVar

from adjoint.tools.measure.process import Point
from benchmarks import steps
from benchmarks.report import Row
from benchmarks.runner import Found, add_choice

LAYERS = ["hyena_se", "hyena_mr", "hyena_li"]
MODEL: Point = {
    **{"mixer": LAYERS * 2, "d_model": 64, "n_layer": 6, "d_intermediate": 176, "d_conv": 3},
    **{"conv_bias": False, "vocab_size": 512, "tie_embeddings": True},
}
# Name → label in the table, and way of `benchmarks.steps`.
WAYS: dict[str, tuple[str, Point]] = {
    "exact": ("**Exact**", {"method": "Exact"}),
    "fft": ("FFT convolutions + checkpointing", {"fft": "all modes"}),
    "fft mode by mode": ("the same, filters summed mode by mode", {"fft": "mode by mode"}),
}


class Hyena(steps.StepBenchmark):
    name = "hyena"
    lengths: ClassVar = [32768, 131072]
    limiting_options = ("lengths", "ways", "allocators")
    ratios = (("memory_bytes", "ms_per_token"), {"way": "exact"}, ("allocator", "length"))
    document = "docs/kernels.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add_choice(parser, "--ways", WAYS)
        super().arguments(parser)

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        return [
            steps.Curve({"way": name}, name, MODEL, way)
            for name, (_, way) in WAYS.items() if name in options.ways
        ]  # fmt: skip

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"model": MODEL, "repeats": options.repeats} | super().payload(options, measurements)

    def named(self, row: Row) -> str:
        return WAYS[row["way"]][0]


if __name__ == "__main__":
    raise SystemExit(Hyena().main())
