"""The one place that looks how a model's weights are held, and picks its `Weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from adjoint.engine.host_weights import HostWeights, device_of
from adjoint.engine.weights import Weights
from adjoint.errors import UserError
from adjoint.parallel import fsdp, zero
from adjoint.parallel.fsdp import FSDPUnitWeights, FSDPWeights, units
from adjoint.parallel.split_tensors import dtensors
from adjoint.parallel.tensor import SPLIT_AND_SHARDED, TensorParallelWeights
from adjoint.parallel.zero import ZeROWeights

# Those that are asked, in this order, whether they hold a model's weights; plain tensors hold any. A kind of
# one's own goes before them.
KINDS: list[type[Weights]] = [
    ZeROWeights,
    FSDPWeights,
    FSDPUnitWeights,
    TensorParallelWeights,
    HostWeights,
    Weights,
]
TENSOR_PARALLEL_NAMES = ("tp", "ep", "tensor", "expert")  # beginnings of names of a mesh's dimensions
OTHERS = "shard its layers and what adjoint.wrap is given with fully_shard, or use DistributedDataParallel"


class Holding(NamedTuple):
    """The way in which a model's weights are held, to be remembered while it does not change.

    Attributes:
        kind: the class of its `Weights`.
        device: on which the model computes.
        tensor_parallel_groups: over whose ranks tensor parallelism splits weights.
        why_not: why no kind reaches the weights, or None.
        is_plain: whether all weights are plain tensors of this process.
    """

    kind: type[Weights]
    device: torch.device
    tensor_parallel_groups: Sequence[dist.ProcessGroup]
    why_not: str | None
    is_plain: bool


def holding_of(model: nn.Module, root: nn.Module) -> Holding:
    """Return how a model's weights are held; `root` as in `Weights`.

    Raises:
        UserError: a stack is split by tensor parallelism and sharded as well.
    """
    kind, groups, reason = weights_type(model), tensor_parallel_groups(model), why_not(model, root)
    is_plain = kind is Weights and not groups and reason is None
    return Holding(kind, device_of(model), groups, reason, is_plain)


def weights_type(model: nn.Module) -> type[Weights]:
    """Return the class of a model's `Weights`, whose attributes say what is asked of code that runs it.

    Raises:
        UserError: a stack is split by tensor parallelism and sharded as well.
    """
    if TensorParallelWeights.holds(model):
        refuse_sharded(model)
    return next(kind for kind in KINDS if kind.holds(model))


def weights_of(model: nn.Module) -> Weights:
    """Return the `Weights` of a model that is its own root, for one call."""
    return weights_type(model)(model)


def has_gathering_hooks(model: nn.Module) -> bool:
    """Whether every module has hooks that gather its weights and change no result."""
    return zero.uses_zero(model)


def has_all_weights(model: nn.Module) -> bool:
    """Whether this process has all weights of a model now, so that a forward waits for no other process."""
    return fsdp.all_gathered(model) and zero.all_gathered(model)


def refuse_sharded(stack: nn.Module) -> None:
    """Raise a UserError if a stack is sharded, which cannot be split by tensor parallelism, too."""
    if units(stack):
        raise UserError(SPLIT_AND_SHARDED)


def tensor_parallel_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups over whose ranks DTensors split a model's weights, other than FSDP's."""
    groups = []
    for mesh in dict.fromkeys(p.device_mesh for p in dtensors(model)):
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        for dim, name in enumerate(names):
            if name.startswith(TENSOR_PARALLEL_NAMES) or not units(model):
                groups.append(mesh.get_group(dim))
    return groups


def why_not(model: nn.Module, root: nn.Module) -> str | None:
    """Return why nothing reaches the weights of a model that is distributed over processes, or None.

    Args:
        root: as in `Weights`.
    """
    if zero.uses_zero(model):
        return zero.why_not(root)
    enclosing_units, split_parameters = [*units(model), *units(root)[:1]], dtensors(model)
    if not enclosing_units and [m for m in model.modules() if vars(m).get("_is_fsdp_managed_module")]:
        return f"FullyShardedDataParallel (FSDP1), or fully_shard of a module around it, shards it; {OTHERS}"
    unit_parameters = {p for unit in enclosing_units for p in unit.parameters()}
    if enclosing_units and any(p not in unit_parameters for p in split_parameters):
        return "fully_shard was called for a module around it: give that one to adjoint.wrap"
    return None
