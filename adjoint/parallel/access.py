"""The one place that looks how a model's weights are held, and picks its `ParameterAccess`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from adjoint.engine.host_weights import HostWeightsAccess, device_of
from adjoint.engine.parameter_access import ContextFactory, ParameterAccess
from adjoint.errors import UserError
from adjoint.parallel import zero
from adjoint.parallel.fsdp import FSDPAccess, FSDPUnitAccess, units
from adjoint.parallel.split_tensors import dtensors
from adjoint.parallel.tensor import SPLIT_AND_SHARDED, TensorParallelAccess
from adjoint.parallel.zero import ZeROAccess

# Those that are asked, in this order, whether they hold a model's weights; plain tensors hold any. An access
# of one's own goes before them.
KINDS: list[type[ParameterAccess]] = [
    ZeROAccess,
    FSDPAccess,
    FSDPUnitAccess,
    TensorParallelAccess,
    HostWeightsAccess,
    ParameterAccess,
]
TENSOR_PARALLEL_NAMES = ("tp", "ep", "tensor", "expert")  # beginnings of names of a mesh's dimensions
OTHERS = "shard its layers and what adjoint.wrap is given with fully_shard, or use DistributedDataParallel"


class Holding(NamedTuple):
    """The way in which a model's weights are held, for code that has no access to them yet.

    Attributes:
        kind: the class of the access.
        device: on which the model computes.
        tensor_parallel_groups: over whose ranks tensor parallelism splits weights.
        why_not: why no access reaches the weights, or None.
        is_plain: whether all weights are plain tensors of this process.
    """

    kind: type[ParameterAccess]
    device: torch.device
    tensor_parallel_groups: Sequence[dist.ProcessGroup]
    why_not: str | None
    is_plain: bool


def holding_of(model: nn.Module, root: nn.Module) -> Holding:
    """Return how a model's weights are held; `root` as in `ParameterAccess`.

    Raises:
        UserError: a stack is split by tensor parallelism and sharded as well.
    """
    kind, groups, reason = access_kind(model), tensor_parallel_groups(model), why_not(model, root)
    is_plain = kind is ParameterAccess and not groups and reason is None
    return Holding(kind, device_of(model), groups, reason, is_plain)


def access_kind(model: nn.Module) -> type[ParameterAccess]:
    """Return the class of `access_of`, whose attributes say what is asked of code that runs the model.

    Raises:
        UserError: a stack is split by tensor parallelism and sharded as well.
    """
    if TensorParallelAccess.holds(model):
        refuse_sharded(model)
    return next(kind for kind in KINDS if kind.holds(model))


def access_of(
    model: nn.Module,
    root: nn.Module | None = None,
    backward_context: ContextFactory = contextlib.nullcontext,
) -> ParameterAccess:
    """Return a new access to a model's weights, for one call; arguments as in `ParameterAccess`."""
    return access_kind(model)(model, root, backward_context)


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
    """Return why no access reaches the weights of a model that is distributed over processes, or None.

    Args:
        root: as in `ParameterAccess`.
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
