"""Who gets which layers: the specification of every worker, from what their processes have."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from adjoint.cluster.count import Uncountable
from adjoint.cluster.devices import Device, shares
from adjoint.cluster.fit import Fit, make_setup, needs
from adjoint.cluster.memory import Setup
from adjoint.cluster.partition import GB, layer_costs, partition
from adjoint.cluster.spec import ShardSpec
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.stack import Stack
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout


def make_specs(
    model: Any,
    training: TrainingConfig,
    method: Any,
    layout: Layout,
    found: list[dict[str, Any]],
    ids: tuple[int, int] | None = None,
) -> tuple[str, tuple[range, ...], list[ShardSpec]]:
    """Layers by the devices' shares, within their memory; one precision for all; cores shared among the
    workers of a node.

    Args:
        found: what each worker's process has, by rank: see `ShardActor.describe`.
        ids: (batch, seqlen), to see whether the memory suffices; None to leave that out.

    Returns:
        The first worker's device, each shard's layers, and every worker's specification.

    Raises:
        UserError: a GPU or slice is too small for its shard, or a node for all of its shards that compute on
            CPUs; the message says what would fit.
    """
    precisions = {look["precision"] for look in found}
    precision = precisions.pop() if len(precisions) == 1 else "float32"
    shards, owners = layout.shards, [found[rank] for rank in layout.everyone]
    # of each shard the smallest device of the workers that have its layers; None where one of them is a CPU
    alike = [[found[rank]["gpu"] for rank in layout.ranks(shard)] for shard in range(shards)]
    gpus: list[Device | None] = [
        None if None in each else min(each, key=lambda gpu: gpu.memory_bytes) for each in alike
    ]
    sizes = [gpu.memory_bytes for gpu in gpus if gpu is not None]
    rows, seqlen = (1, 1) if ids is None else (layout.rows(ids[0]), ids[1])
    given = (
        method, rows, seqlen, precision, "cuda" if sizes else "cpu", min(sizes, default=None),
        training.grad_accumulation,
    )  # fmt: skip
    limits = sizes if ids is not None and len(sizes) == shards else None
    try:
        more = {"sequence": layout.sequence, "helpers": layout.helpers, "optimizer": training.optimizer}
        setup = make_setup(model, *given, **more)
        fit = Fit(setup, _costs(model), shards, shares(gpus), limits)
        # where only the margin for libraries is missing, the shards get their way
        bare = fit.of(reserve=False)
        try:
            spans = tuple(fit.spans() or bare.spans() or fit.assign())
        except Uncountable:
            raise
        except UserError as error:
            raise UserError(f"cluster.shards: {error}") from None
        if ids is not None and limits is None:
            _check_nodes(bare.setup, spans, owners)
    except Uncountable:  # then nobody knows
        spans = tuple(partition(_costs(model), shards, shares(gpus)))
    nodes = [look["node"] for look in found]
    specs = [
        ShardSpec(
            model,
            training,
            method,
            layout,
            spans,
            rank,
            device=look["device"],
            precision=precision,
            threads=training.threads or max(1, look["cores"] // nodes.count(look["node"])),
        )
        for rank, look in enumerate(found)
    ]
    return found[0]["device"], spans, specs


def _costs(model: Any) -> list[float]:
    if not isinstance(model, StackConfig):
        return list(model.costs)
    with torch.device("meta"):
        return layer_costs(Stack(model))


def _check_nodes(setup: Setup, spans: Sequence[range], owners: Sequence[dict[str, Any]]) -> None:
    """Raises a UserError where a node's memory is too small for all of its shards."""
    each = [need.total for need in needs(setup, spans) for _ in range(setup.sequence)]
    taken = collections.Counter[str]()
    for i, look in enumerate(owners):
        taken[look["node"]] += each[i % len(each)]
    for name, memory in {look["node"]: look["memory"] for look in owners}.items():
        if taken[name] > memory:
            count = sum(look["node"] == name for look in owners)
            raise UserError(
                f"cluster.shards: {count} shards on a node of {memory / GB:.1f} GB need "
                f"{taken[name] / GB:.1f} GB; shorten --data.seqlen, or take more nodes or a smaller model"
            )
