"""Models of transformers under `fully_shard` (FSDP2), wrapped and not: `python -m benchmarks.fsdp`.

Forward + backward on two processes of this machine (gloo), each with a row of random tokens: the models of
`benchmarks.wrapped`, their layers and the whole sharded. Compared are plain FSDP2 with gradient checkpointing
and `adjoint.wrap`, with gradients reduced at each chunk or once a call. Memory is the larger of the two
processes' peaks above what they hold after 64 tokens; every point has processes of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

PROCESSES = 2
WAYS: dict[str, tuple[Point, bool]] = {  # a way of `steps`, and whether each backward reduces
    "checkpointing": ({"checkpointing": True}, True),
    "wrapped": ({"method": "Exact"}, True),
    "wrapped, reduced once": ({"method": "Exact"}, False),
}


def measure(point: Point) -> Point:
    """A point of `steps.measure` with one thing more, `each`: whether gradients are reduced at each chunk."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one, (folder, point), nprocs=PROCESSES)  # type: ignore[attr-defined]
        results = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(PROCESSES)]
    return max(results, key=lambda result: result["memory_bytes"])


def _one(rank: int, folder: str, point: Point) -> None:
    """Measure one of the processes, and write its result into the folder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from adjoint.hf.model_parts import backbone_of, layers_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]))

    def prepare() -> Passes:
        torch.manual_seed(0)
        model = steps.builder(point["model"])()
        loss = steps.loss_by(model, point["way"])
        for layer in layers_of(backbone_of(model)).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh).set_requires_gradient_sync(point["each"])
        return Passes(model, loss)

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, "cpu", 0.0, least=2)  # as many in each process

    Path(folder, str(rank)).write_text(json.dumps(measured(prepare, ids, point["first"], repeat, "step")))
    dist.barrier()
    dist.destroy_process_group()


class Fsdp(Benchmark):
    name = "fsdp"
    module = "benchmarks.fsdp"
    uses = ("wrapped",)
    limiting_options = ("lengths", "models")
    ratios = (("memory_bytes",), {"way": "checkpointing"}, ("model", "length"))
    document = "docs/which_layout.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, lengths=([2048, 8192], "tokens"))
        runner.add_choice(parser, "--models", ["Mamba-2", "Bamba-like"])

    def points(self, options: argparse.Namespace) -> list[Point]:
        combinations = itertools.product(options.lengths, options.models, WAYS)
        return [
            {"name": name, "by": way, "length": n, "first": 64, "way": WAYS[way][0], "each": WAYS[way][1],
             "model": wrapped.WIDTHS | wrapped.MODELS[name][0]}
            for n, name, way in combinations
        ]  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        groups = steps.grouped(measurements, "name", "by", "length")
        keys = itertools.product(options.models, WAYS, options.lengths)
        return [
            {**dict(zip(("model", "way", "length"), key, strict=True)), **steps.medians(groups[key], key[2])}
            for key in keys
            if key in groups
        ]

    def failed(self, result: Row) -> bool:
        """Whether wrapping takes more memory than checkpointing somewhere."""
        return any(row.get("memory_bytes_ratio", 0) > 1 for row in result["rows"] if row["way"] == "wrapped")

    def markdown(self, result: Row) -> str:
        title = "peak memory of a process above a short pass · time per token"
        name = "{model}, {way}".format_map
        return report.pivot([title], result["rows"], name, "length", report.memory_and_time)


if __name__ == "__main__":
    raise SystemExit(Fsdp().main())
