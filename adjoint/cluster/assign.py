"""Who gets which layers: the specification of every worker, from what their processes have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adjoint.cluster import fit
from adjoint.cluster.devices import shares
from adjoint.cluster.memory import Setup
from adjoint.cluster.partition import layer_costs, partition
from adjoint.cluster.spec import ShardSpec
from adjoint.stack import Stack
from adjoint.train.config import TrainingConfig


def make_specs(
    model: Any,
    training: TrainingConfig,
    method: Any,
    found: list[dict[str, Any]],
    shards: int,
    ids: tuple[int, int] | None = None,
    replicas: int = 1,
    sequence: int = 1,
) -> tuple[str, tuple[range, ...], list[ShardSpec]]:
    """Layers by the devices' shares, within their memory; one precision for all; cores shared among the
    workers of a node.

    Args:
        found: what each worker's process has, by rank: see `ShardActor.look`.
        ids: (batch, seqlen), to see whether the memory suffices; None to leave that out.
        sequence: workers of a shard, to whom the chunks are dealt out in turn.

    Returns:
        The first worker's device, each shard's layers, and every worker's specification.

    Raises:
        UserError: the layers do not fit; the message says what would.
    """
    with torch.device("meta"):
        costs = layer_costs(Stack(model))
    precisions = {look["precision"] for look in found}
    precision = precisions.pop() if len(precisions) == 1 else "float32"
    workers = len(found) // replicas
    owners = [look for rank, look in enumerate(found) if rank % workers < shards * sequence]
    # of each shard the looks of all workers that have its layers
    alike = [[o for i, o in enumerate(owners) if i // sequence % shards == shard] for shard in range(shards)]
    gpus = [_smallest([look["gpu"] for look in looks]) for looks in alike]
    capacities = shares(gpus)
    if ids is None:
        spans = tuple(partition(costs, shards, capacities))
    else:
        least = min((gpu.memory_bytes for gpu in gpus if gpu is not None), default=None)
        device = "cpu" if least is None else "cuda"
        rows = -(-ids[0] // replicas)  # of the replica that has most
        setup = Setup(
            model, method, rows, ids[1], precision, device, least, training.grad_accumulation, sequence=sequence
        )
        places = [(look["node"], look["memory"]) for look in owners]
        spans = tuple(fit.assign_on(setup, costs, capacities, gpus, places))
    nodes = [look["node"] for look in found]
    specs = [
        ShardSpec(
            model,
            training,
            method,
            spans,
            rank,
            helpers=tuple(i % shards for i in range(workers - shards * sequence)),
            replicas=replicas,
            sequence=sequence,
            device=look["device"],
            precision=precision,
            threads=training.threads or max(1, look["cores"] // nodes.count(look["node"])),
        )
        for rank, look in enumerate(found)
    ]
    return found[0]["device"], spans, specs


def _smallest(gpus: Sequence[Any]) -> Any:
    """The device with the least memory; None where there is a CPU among them."""
    return None if None in gpus else min(gpus, key=lambda gpu: gpu.memory_bytes)
