"""Models of transformers under `fully_shard` (FSDP2), wrapped and not: `python -m benchmarks.fsdp`.

Forward + backward on two processes of this machine (gloo), each with a row of random tokens: the models of
`benchmarks.wrapped`, their layers and the whole sharded. Compared are plain FSDP2 with gradient checkpointing
and `adjoint.wrap`, with gradients reduced at each chunk or once a call. Memory is the larger of the two
processes' peaks above what they hold after 64 tokens; every point has processes of its own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps, wrapped
from benchmarks.ranks import on_ranks
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

PROCESSES = 2


def measure(point: Point) -> Point:
    """A point of `steps.measure` with one thing more, `each`: whether gradients are reduced at each chunk."""
    return max(on_ranks(measure_rank, point, PROCESSES), key=lambda result: result["memory_bytes"])


def measure_rank(point: Point) -> Point:
    """Measure in one of the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from adjoint.hf.model_parts import backbone_of, layers_of

    mesh = init_device_mesh("cpu", (PROCESSES,))

    def prepare() -> Passes:
        torch.manual_seed(0)
        model = steps.builder(point["model"])()
        loss = steps.loss_by(model, point["way"])
        for layer in layers_of(backbone_of(model)).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh).set_requires_gradient_sync(point["each"])
        return Passes(model, loss)

    return measured_alike(prepare, point)


def measured_alike(prepare: Callable[[], Passes], point: Point) -> Point:
    """Return memory and time of passes, of which each process runs as many."""
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]))

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, "cpu", 0.0, least=2)

    return measured(prepare, ids, point["first"], repeat, "step")


class Fsdp(Benchmark):
    name = "fsdp"
    module = "benchmarks.fsdp"
    uses: tuple[str, ...] = ("wrapped", "ranks")
    limiting_options = ("lengths", "models")
    ratios = (("memory_bytes",), {"way": "checkpointing"}, ("model", "length"))
    document = "docs/which_layout.md"
    title = "peak memory of a process above a short pass · time per token"
    ways: ClassVar[dict[str, tuple[Point, bool]]] = {  # of `steps`, and whether each backward reduces
        "checkpointing": ({"checkpointing": True}, True),
        "wrapped": ({"method": "Exact"}, True),
        "wrapped, reduced once": ({"method": "Exact"}, False),
    }
    lengths: ClassVar = [2048, 8192]
    models: ClassVar = ["Mamba-2", "Bamba-like"]

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, lengths=(self.lengths, "tokens"))
        runner.add_choice(parser, "--models", self.models)

    def points(self, options: argparse.Namespace) -> list[Point]:
        combinations = itertools.product(options.lengths, options.models, self.ways.items())
        return [
            {"name": name, "by": by, "length": n, "first": 64, "way": way, "each": each,
             "model": wrapped.WIDTHS | wrapped.MODELS[name][0]}
            for n, name, (by, (way, each)) in combinations
        ]  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        groups = steps.grouped(measurements, "name", "by", "length")
        keys = itertools.product(options.models, self.ways, options.lengths)
        return [
            {**dict(zip(("model", "way", "length"), key, strict=True)), **self.summary(groups[key], key[2])}
            for key in keys
            if key in groups
        ]

    def summary(self, results: Sequence[Point], length: int) -> Row:
        """Return what a row has of the results of its points."""
        return steps.medians(results, length)

    def failed(self, result: Row) -> bool:
        """Whether wrapping takes more memory than checkpointing somewhere."""
        return any(row.get("memory_bytes_ratio", 0) > 1 for row in result["rows"] if row["way"] == "wrapped")

    def cell(self, row: Row) -> str:
        """Return a cell of the table."""
        return report.memory_and_time(row)

    def markdown(self, result: Row) -> str:
        return report.pivot([self.title], result["rows"], "{model}, {way}".format_map, "length", self.cell)


if __name__ == "__main__":
    raise SystemExit(Fsdp().main())
