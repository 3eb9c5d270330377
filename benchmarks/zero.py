"""Models of transformers under DeepSpeed's ZeRO-3, wrapped and not: `python -m benchmarks.zero`.

Forward + backward on two processes of this machine (gloo), each with a row of random tokens: the models of
`benchmarks.wrapped`. Compared are plain ZeRO-3 with gradient checkpointing and `adjoint.wrap`. Memory is the
larger of the two processes' peaks above what they hold after 64 tokens; every point has processes of its own.
DeepSpeed must be importable: `make test-versions ROWS=deepspeed` installs it into a folder for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from adjoint.tools.measure.passes import Passes
from adjoint.tools.measure.process import Point
from benchmarks import steps
from benchmarks.fsdp import PROCESSES, Fsdp, measured_alike
from benchmarks.ranks import on_ranks
from benchmarks.report import Row

LONGEST_CHECKPOINTED = 8192  # tokens, in a few gigabytes
# Nothing stays gathered but what runs, and buckets are as small as a layer: the default ones hold all of a
# small model.
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 1_000_000,
    },
}


def measure(point: Point) -> Point:
    """A point of `steps.measure`, of the process with the higher peak, with the weights gathered at once."""
    return max(on_ranks(measure_rank, point, PROCESSES), key=lambda result: result["memory_bytes"])


def measure_rank(point: Point) -> Point:
    """Measure in one of the processes."""
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(PROCESSES)}
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for which a compiler would run
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    fetch, gathered = PartitionedParameterCoordinator.fetch_sub_module, [0, 0]

    def counting(self: Any, module: Any, forward: bool) -> None:
        fetch(self, module, forward)
        available = (p for p in model.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE)
        gathered[0] = max(gathered[0], sum(p.ds_numel for p in available))

    PartitionedParameterCoordinator.fetch_sub_module = counting
    torch.manual_seed(0)
    model = steps.builder(point["model"])()

    def prepare() -> Passes:
        steps.loss_by(model, point["way"])  # wraps it, or switches its checkpointing on
        engine = deepspeed.initialize(model=model, config=CONFIG)[0]
        gathered[1] = sum(p.ds_numel for p in model.parameters())
        return Passes(model, lambda ids: engine(input_ids=ids, labels=ids).loss)

    result = measured_alike(prepare, point)
    return result | {"gathered": gathered[0] / gathered[1]}


class Zero(Fsdp):
    name = "zero"
    module = "benchmarks.zero"
    uses = ("wrapped", "ranks", "fsdp")
    title = f"{Fsdp.title} · weights gathered at once"
    ways: ClassVar = {name: Fsdp.ways[name] for name in ("checkpointing", "wrapped")}
    lengths: ClassVar = [2048, 8192, 32768]
    models: ClassVar = ["Mamba-2"]

    def requirements(self, options: argparse.Namespace) -> Mapping[str, str]:
        return {"deepspeed": "make test-versions ROWS=deepspeed, then PYTHONPATH with its folder"}

    def points(self, options: argparse.Namespace) -> list[Point]:
        points = super().points(options)
        return [p for p in points if p["by"] != "checkpointing" or p["length"] <= LONGEST_CHECKPOINTED]

    def summary(self, results: Sequence[Point], length: int) -> Row:
        return super().summary(results, length) | {
            name: share for name, share in results[0].items() if name == "gathered"
        }

    def cell(self, row: Row) -> str:
        gathered = f" · {row['gathered']:.0%}" if "gathered" in row else ""
        return super().cell(row) + gathered


if __name__ == "__main__":
    raise SystemExit(Zero().main())
