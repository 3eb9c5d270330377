"""A point measured on several processes of this machine, joined by gloo, with one thread each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adjoint.tools.measure.process import Point


def on_ranks(measure_rank: Callable[[Point], Point], point: Point, processes: int) -> list[Point]:
    """Return the result of each rank of so many processes, where a function of a module measures the point.
    The default process group is there when it is called."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, measure_rank, point, processes)
        mp.spawn(_run_rank, arguments, nprocs=processes)  # type: ignore[attr-defined]
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(processes)]


def _run_rank(
    rank: int, folder: str, measure_rank: Callable[[Point], Point], point: Point, processes: int
) -> None:
    """Run one of the processes, and write its result into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    Path(folder, str(rank)).write_text(json.dumps(measure_rank(point)))
    dist.barrier()
    dist.destroy_process_group()
