"""StripedHyena 2 by chunks and by FFT convolutions with checkpointing: `python -m benchmarks.hyena`.

Every point is forward + backward of a language model: d_model 64, 6 layers (hyena_se, hyena_mr, hyena_li,
twice), gated MLPs of width 176, 512 token ids, float32, batch 1, in a fresh process on the CPU. The FFT
convolutions are plain PyTorch's, of the whole sequence, each layer recomputed in the backward. Peaks are
above what is resident after a pass of 64 tokens. Before a way is timed its gradients are compared with plain
backpropagation's, on the same weights.
"""

from __future__ import annotations

import math
from typing import ClassVar

from adjoint.tools.measure.process import Point
from benchmarks import steps


class Hyena(steps.WaysOfAStack):
    name = "hyena"
    lengths: ClassVar = [32768, 131072]
    document = "docs/kernels.md"
    model: ClassVar[Point] = {
        **{"mixer": ["hyena_se", "hyena_mr", "hyena_li"] * 2, "d_model": 64, "n_layer": 6, "d_conv": 3},
        **{"d_intermediate": 176, "conv_bias": False, "vocab_size": 512, "tie_embeddings": True},
    }
    ways: ClassVar = {
        "exact": ("**Exact**", {"method": "Exact"}, math.inf),
        "fft": ("FFT convolutions + checkpointing", {"fft": "all modes"}, math.inf),
        "fft mode by mode": ("the same, filters summed mode by mode", {"fft": "mode by mode"}, math.inf),
    }


if __name__ == "__main__":
    raise SystemExit(Hyena().main())
