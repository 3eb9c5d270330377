"""Shards that fail on request, and the run they disturb, for the tests of recovery: a file says which shard,
where, when and how."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from adjoint.checkpoint import list_checkpoints
from adjoint.cluster import shard as shard_module
from adjoint.cluster.group import ShardActor
from adjoint.cluster.shard import PipelineWorker
from adjoint.engine.executor import Executor
from tests.training_helpers import metrics

FLAGS: dict[str, Any] = {
    "cluster__shards": 2,
    "cluster__hang_timeout": 8,
    "method__chunk_size": 20,  # four chunks of a sequence
    "training__eval_every": 0,
    "training__sample_tokens": 0,
    "training__save_every": 2,
    "training__steps": 6,
    "data__eval_tokens": 0,
}
# (point, which time it is passed): all in step 5, but for the second checkpoint, after step 4
MOMENTS = [("forward", 4 * 4 + 2), ("backward", 4 * 4 + 2), ("step", 5), ("save", 4)]
VARIABLE = "ADJOINT_TEST_FAULT"  # the file's path; in the environment before Ray starts


def lose_node() -> None:
    """Asks `nodes` to take this node away, and stays where it is until that has happened."""
    import ray

    request = Path(os.environ[VARIABLE]).with_suffix(".node")
    request.write_text(ray.get_runtime_context().get_node_id())
    time.sleep(600)


def fill_node() -> None:
    """Takes memory until somebody ends this process."""
    blocks = []
    while True:
        blocks.append(b"1" * (128 << 20))
        time.sleep(0.02)  # Ray looks several times a second


def fill_process() -> None:
    """Takes more memory than the kernel lets this process have."""
    import resource

    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    torch.empty(1 << 30)


def no_space_left() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x")


HOW = {
    "exit": lambda: os._exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "error": lambda: 1 / 0,
    "disk": no_space_left,
    "sleep": lambda: time.sleep(600),  # its heart beats on
    "node": lose_node,
    "fill": fill_node,
    "limit": fill_process,
}


def ask_for(point: str, rank: int, call: int, how: str, again: bool = False) -> None:
    """The `call`-th time that shard `rank` comes to `point` it fails; once only, unless `again`."""
    fault = {"point": point, "rank": rank, "call": call, "how": how, "again": again}
    Path(os.environ[VARIABLE]).write_text(json.dumps(fault))


def files(run: Path) -> dict[str, bytes]:
    """Everything of a run's last checkpoint that does not tell the time."""
    last = list_checkpoints(run / "checkpoints")[-1]
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def told(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, but for what the machine has to do with."""
    machine = {"tokens_per_second", "peak_memory_bytes", "time"}
    return [{k: v for k, v in row.items() if k not in machine} for row in metrics(run)]


def assert_undisturbed(run: Path, expected: Path, after: int = 0) -> None:
    """A run has ended, from step `after` on, as one in which nothing failed, with nothing half-written."""
    assert told(run) == told(expected)[after:]
    assert files(run) == files(expected)
    assert not list((run / "checkpoints").glob(".*"))


class FaultyActor(ShardActor):
    """A shard's actor that comes to grief where the file says."""

    def build(self, spec: Any, *arguments: Any) -> None:
        counts: dict[str, int] = {}

        def at(point: str) -> None:
            file = Path(os.environ[VARIABLE])
            if not file.exists():
                return
            fault = json.loads(file.read_text())
            if (fault["point"], fault["rank"]) != (point, spec.rank):
                return
            counts[point] = counts.get(point, 0) + 1
            if counts[point] == fault["call"]:
                if not fault["again"]:
                    file.unlink()
                HOW[fault["how"]]()

        at("build")
        super().build(spec, *arguments)
        share_table, write_file, run_tile = PipelineWorker.share_table, shard_module.write_file, Executor.tile

        def faulty_tile(worker: Executor, tile: Any) -> None:
            first = next(k for k, stage in enumerate(worker.stages) if stage is not None and stage.stateful)
            if tile.stage == first and tile.kind != "recompute":  # once a chunk
                at("forward" if tile.is_forward else "backward")
            run_tile(worker, tile)

        def faulty_share(shard: PipelineWorker) -> None:
            at("step")  # after the optimizer's step
            share_table(shard)

        def faulty_write(path: Path, tensors: Any) -> Any:
            at("save")
            return write_file(path, tensors)

        Executor.tile = faulty_tile  # type: ignore[method-assign]
        PipelineWorker.share_table = faulty_share  # type: ignore[method-assign]
        shard_module.write_file = faulty_write  # type: ignore[attr-defined]
