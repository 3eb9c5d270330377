"""Assignment of layers to workers: every worker's specification, from the hardware of their processes."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from adjoint.cluster.devices import Device, shares
from adjoint.cluster.spec import ProcessDescription, ShardSpec
from adjoint.engine.sharded_model import ShardedModel, layer_costs
from adjoint.errors import UserError
from adjoint.memory import size_text
from adjoint.methods import Method
from adjoint.plan.capacity import Fit
from adjoint.plan.partition import partition
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup, needs
from adjoint.plan.stage_memory import Uncountable
from adjoint.plan.worker_devices import Machine
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout


def make_specs(
    model: ShardedModel,
    training: TrainingConfig,
    method: Method,
    layout: Layout,
    processes: Sequence[ProcessDescription],
    ids: tuple[int, int] | None = None,
) -> tuple[str, tuple[range, ...], list[ShardSpec]]:
    """Assign layers by the devices' shares within their memory, and specify every worker.

    All workers have one precision; the workers of a node share its cores.

    Args:
        processes: the hardware of each worker's process, by rank: see `ShardActor.describe`.
        ids: (batch, seqlen), to see whether the memory suffices; None to leave that out.

    Returns:
        The first worker's device, each shard's layers, and every worker's specification.

    Raises:
        UserError: a GPU or slice is too small for its shard, or a node for all of its shards that compute on
            CPUs; the message says what would fit.
    """
    precisions = {look["precision"] for look in processes}
    precision = precisions.pop() if len(precisions) == 1 else "float32"
    shards, owners = layout.shards, [processes[rank] for rank in layout.everyone]
    # of each shard the smallest device of the workers that have its layers; None where one of them is a CPU
    alike = [[processes[rank]["gpu"] for rank in layout.ranks(shard)] for shard in range(shards)]
    gpus: list[Device | None] = [
        None if None in each else min(filter(None, each), key=lambda gpu: gpu.memory_bytes) for each in alike
    ]
    sizes = [gpu.memory_bytes for gpu in gpus if gpu is not None]
    rows, seqlen = (1, 1) if ids is None else (layout.rows(ids[0]), ids[1])
    machine = Machine("cuda" if sizes else "cpu", precision, min(sizes, default=None))
    limits, speeds = sizes if ids is not None and len(sizes) == shards else None, shares(gpus)
    try:
        setup = Setup(model_of(model.source), method, rows, seqlen, layout, machine, training)
        fit = Fit(setup, limits, speeds)
        # where only the margin for libraries is missing, the shards get their way
        spans = tuple(fit.spans() or fit.without_margin().spans() or fit.assign())
        if ids is not None and limits is None:
            _check_nodes(fit.without_margin().setup, spans, owners)
    except Uncountable:  # then nobody knows
        spans = tuple(partition(layer_costs(model), shards, speeds))
    except UserError as error:
        raise UserError(f"cluster.shards: {error}") from None
    nodes = [look["node"] for look in processes]
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
        for rank, look in enumerate(processes)
    ]
    return processes[0]["device"], spans, specs


def _check_nodes(setup: Setup, spans: Sequence[range], owners: Sequence[ProcessDescription]) -> None:
    """Raise a UserError if a node's memory is too small for all of its shards."""
    each = [need.total for need in needs(setup, spans) for _ in range(setup.layout.sequence)]
    needed = collections.Counter[str]()
    for i, look in enumerate(owners):
        needed[look["node"]] += each[i % len(each)]
    for name, memory in {look["node"]: look["memory"] for look in owners}.items():
        if needed[name] > memory:
            count = sum(look["node"] == name for look in owners)
            raise UserError(
                f"{count} shards on a node of {size_text(memory)} need {size_text(needed[name])}; shorten "
                "--data.seqlen, or use more nodes or a smaller model"
            )
