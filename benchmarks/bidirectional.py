"""Layers that read in both directions, by chunks and by checkpointing: `python -m benchmarks.bidirectional`.

Every point is forward + backward of a masked-token model with the widths of Caduceus, tied projections and a
quarter of its layers: d_model 256, 4 layers, expand 2, d_state 16, 16 token ids, float32, batch 1, in a fresh
process on the CPU. All ways run the same scans. Plain backpropagation is not taken beyond 32K tokens. Peaks
are above what is resident after a pass of 64 tokens. Before a way is timed its gradients are compared with
plain backpropagation's, on the same weights.
"""

from __future__ import annotations

from typing import ClassVar

from adjoint.tools.measure.process import Point
from benchmarks import steps


class Bidirectional(steps.WaysOfAStack):
    name = "bidirectional"
    lengths: ClassVar = [8192, 32768, 131072]
    repeated = (8192,)
    document = "docs/which_method.md"
    model: ClassVar[Point] = {
        **{"mixer": "mamba", "bidirectional": "tied", "d_model": 256, "n_layer": 4, "d_state": 16},
        **{"expand": 2, "vocab_size": 16, "tie_embeddings": True},
    }
    ways: ClassVar = {
        "exact": ("**Exact**", {"method": "Exact"}, 131072),
        "checkpoints": ("Backprop + checkpointing", {"method": "Backprop", "checkpoint": True}, 131072),
        "backprop": ("Backprop", {"method": "Backprop"}, 32768),
    }


if __name__ == "__main__":
    raise SystemExit(Bidirectional().main())
