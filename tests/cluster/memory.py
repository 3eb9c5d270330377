"""How much memory two steps take, in a process of its own: peak resident sets, above those after imports.

    python -m tests.cluster.memory SIZES SEQLEN SHARDS

SIZES are those of `StackConfig`, as JSON; 0 SHARDS is one process without Ray. Prints a JSON list of bytes, a
number a process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch

from adjoint import Exact, Stack, StackConfig
from adjoint.cluster import group as group_module
from adjoint.cluster.group import Group, ShardActor
from adjoint.kernels.cpu import build as cpu_build
from adjoint.memory import peak_memory_bytes
from adjoint.train.config import ClusterConfig, TrainingConfig
from adjoint.train.optimizer import make_optimizer
from tests.model_helpers import make_ids

METHOD = Exact(512)
TRAINING = TrainingConfig(device="cpu", threads=1, precision="float32")
CPU = torch.device("cpu")


class WatchedActor(ShardActor):
    """A shard's actor that remembers what its imports took."""

    def build(self, *arguments: Any) -> None:
        self.baseline = peak_memory_bytes(CPU)
        super().build(*arguments)

    def above_imports(self) -> int:
        return peak_memory_bytes(CPU) - self.baseline


def one_process(sizes: dict[str, Any], seqlen: int) -> list[int]:
    import torch._dynamo  # which optimizers import

    torch.set_num_threads(1)
    cpu_build.load()
    baseline = peak_memory_bytes(CPU)
    stack = Stack(StackConfig(**sizes))
    optimizer = make_optimizer(stack, TRAINING)
    for step in (1, 2):
        ids = make_ids(1, seqlen, 256, seed=step)
        stack(ids, labels=ids, method=METHOD).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [peak_memory_bytes(CPU) - baseline]


def shards(sizes: dict[str, Any], seqlen: int, count: int) -> list[int]:
    import ray

    ray.init(
        address="local",
        num_cpus=count,
        include_dashboard=False,
        object_store_memory=150 << 20,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}},
    )
    group_module.ShardActor = WatchedActor  # type: ignore[misc]
    group = Group(StackConfig(**sizes), TRAINING, METHOD, ClusterConfig(count))
    try:
        for step in (1, 2):
            group.all("accumulate", make_ids(1, seqlen, 256, seed=step).numpy())
            group.all("step", 1e-3, 1.0)
            group.all("zero_grad")
        return group.all("above_imports", direct=True)
    finally:
        group.kill()
        ray.shutdown()


if __name__ == "__main__":
    sizes, seqlen, count = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(shards(sizes, seqlen, count) if count else one_process(sizes, seqlen)))
