"""How far the paper's layer-local gradient is from the true one: `python -m benchmarks.layer_local`.

Cosine of `LayerLocal()`'s gradient (Proposition 3, equation 6) with backpropagation's over all mixers'
parameters, in float64, of stacks of the paper's own layers with random weights: 24 tokens, d_model 8,
d_state 4, the mean of 8 seeds. The share is how much the first layer adds to what it receives, ‖ỹ₁‖ / ‖y₀‖.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint import Backprop, LayerLocal, Stack, StackConfig
from adjoint.tools.measure.process import Point
from benchmarks import report
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

DEPTHS, SHARES, STRUCTURES = (1, 2, 4, 8), (0.1, 0.3, 1.0), ("diagonal", "scalar")
VOCAB = 11


@torch.no_grad()
def model_with_share(structure: str, n_layer: int, share: float, ids: Tensor, seed: int) -> Stack:
    """Random weights, embeddings of size 1; the first layer adds an output `share` times as large as they."""
    torch.manual_seed(seed)
    config = StackConfig(VOCAB, 8, n_layer, structure, d_state=4, tie_embeddings=False, initializer_range=1.0)
    model = Stack(config).double()
    mixers: list[Any] = [block.mixer for block in model.layers]
    for mixer in mixers:
        torch.nn.init.zeros_(mixer.A_proj.bias)  # decays around one half
        torch.nn.init.normal_(mixer.A_proj.weight, std=0.5)
    y, block = model.embed(ids), model.layers[0]
    size = (block(y, model.initial_state(len(ids))[0])[0] - y).norm() / y.norm()
    for mixer in mixers:
        mixer.C_proj.weight *= share / size
        mixer.C_proj.bias *= share / size
    return model


def mean_cosine(structure: str, n_layer: int, share: float, seqlen: int = 24, seeds: int = 8) -> float:
    """Cosine of the layer-local gradient with the true one, over all mixers' parameters."""
    cosines = []
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        ids, labels = (torch.randint(VOCAB, (1, seqlen), generator=draw) for _ in range(2))
        model = model_with_share(structure, n_layer, share, ids, seed)
        mixers = [p for name, p in model.named_parameters() if ".mixer." in name]
        flat = []
        for method in (LayerLocal(), Backprop()):
            loss = model(ids, labels=labels, method=method).loss
            flat.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, mixers)]))
        cosines.append(float(F.cosine_similarity(flat[0], flat[1], dim=0)))
    return sum(cosines) / seeds


def measure(point: Point) -> Row:
    """The cosines of one structure and share, by number of layers."""
    return {**point, "cosines": [mean_cosine(point["structure"], n, point["share"]) for n in DEPTHS]}


class LayerLocalCosine(Benchmark):
    name = "layer_local"
    module = "benchmarks.layer_local"
    document, mark = "docs/paper.md", "layer-local"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [{"structure": structure, "share": share} for structure in STRUCTURES for share in SHARES]

    def shared(self, point: Point) -> str:
        return "all"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [result for _, result in measurements if "cosines" in result]

    def markdown(self, result: Row) -> str:
        """A line a structure and share, a column a depth."""
        lines = (
            [f"{row['structure']}, share {row['share']:g}", *(f"{value:.2f}" for value in row["cosines"])]
            for row in result["rows"]
        )
        return report.markdown_table(["layers", *map(str, DEPTHS)], lines)


if __name__ == "__main__":
    raise SystemExit(LayerLocalCosine().main())
