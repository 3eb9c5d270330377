"""Models of transformers under DeepSpeed's ZeRO-3, wrapped and not: `python -m benchmarks.zero`.

Forward + backward on two processes of this machine (gloo), each with a row of random tokens: the models of
`benchmarks.wrapped`. Compared are plain ZeRO-3 with gradient checkpointing and `adjoint.wrap`. Memory is the
larger of the two processes' peaks above what they hold after 64 tokens; every point has processes of its own.
DeepSpeed must be importable: `make test-versions ROWS=deepspeed` installs it into a folder for PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

PROCESSES = 2
WAYS: dict[str, Point] = {"checkpointing": {"checkpointing": True}, "wrapped": {"method": "Exact"}}
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
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure_rank, (folder, point), nprocs=PROCESSES)  # type: ignore[attr-defined]
        results = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(PROCESSES)]
    return max(results, key=lambda result: result["memory_bytes"])


def _measure_rank(rank: int, folder: str, point: Point) -> None:
    """Measure one of the processes, and write its result into the folder."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(PROCESSES)
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for which a compiler would run
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]))
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

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, "cpu", 0.0, least=2)  # as many in each process

    result = measured(prepare, ids, point["first"], repeat, "step")
    result["gathered"] = gathered[0] / gathered[1]
    Path(folder, str(rank)).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


class Zero(Benchmark):
    name = "zero"
    module = "benchmarks.zero"
    uses = ("wrapped",)
    limiting_options = ("lengths", "models")
    ratios = (("memory_bytes",), {"way": "checkpointing"}, ("model", "length"))
    document = "docs/which_layout.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, lengths=([2048, 8192, 32768], "tokens"))
        runner.add_choice(parser, "--models", ["Mamba-2"])

    def requirements(self, options: argparse.Namespace) -> Mapping[str, str]:
        return {"deepspeed": "make test-versions ROWS=deepspeed, then PYTHONPATH with its folder"}

    def points(self, options: argparse.Namespace) -> list[Point]:
        combinations = itertools.product(options.lengths, options.models, WAYS)
        return [
            {"name": name, "by": way, "length": n, "first": 64, "way": WAYS[way],
             "model": wrapped.WIDTHS | wrapped.MODELS[name][0]}
            for n, name, way in combinations
            if way != "checkpointing" or n <= LONGEST_CHECKPOINTED
        ]  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        groups = steps.grouped(measurements, "name", "by", "length")
        keys = itertools.product(options.models, WAYS, options.lengths)
        return [
            {
                **dict(zip(("model", "way", "length"), key, strict=True)),
                **steps.medians(groups[key], key[2]),
                **({"gathered": groups[key][0]["gathered"]} if "gathered" in groups[key][0] else {}),
            }
            for key in keys
            if key in groups
        ]

    def failed(self, result: Row) -> bool:
        """Whether wrapping takes more memory than checkpointing somewhere."""
        return any(row.get("memory_bytes_ratio", 0) > 1 for row in result["rows"] if row["way"] == "wrapped")

    def markdown(self, result: Row) -> str:
        title = "peak memory of a process above a short pass · time per token · weights gathered at once"
        name = "{model}, {way}".format_map

        def cell(row: Row) -> str:
            gathered = f" · {row['gathered']:.0%}" if "gathered" in row else ""
            return report.memory_and_time(row) + gathered

        return report.pivot([title], result["rows"], name, "length", cell)


if __name__ == "__main__":
    raise SystemExit(Zero().main())
