"""Tensors of which each rank has a part: DTensors, and parts of a split `Stack`'s weights.

Gradients and an optimizer's moments are split as their parameter is, so each function takes this, too. A
tensor that is not split is whole on every rank; these functions return it as it is."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class WeightSplit(Protocol):
    """The split of a parameter over ranks, of a kind that DTensors do not have.

    Attributes:
        shape: of the whole.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor on every rank; all must call this."""

    def split(self, full: Tensor) -> Tensor:
        """Return this rank's part of the whole, copied."""

    def owned(self, local: Tensor) -> Tensor:
        """Return the elements of this rank's part that no rank before it has."""


splits: MutableMapping[Tensor, WeightSplit] = WeakTensorKeyDictionary()  # by parameter


def imported_class(module: str, name: str) -> type | tuple[()]:
    """Return a class of a module; () if the module has not been imported: then nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def dtensors(model: nn.Module) -> list[DTensor]:
    """Return the parameters of a model that are DTensors."""
    kind = imported_class("torch.distributed.tensor", "DTensor")
    return [cast("DTensor", p) for p in model.parameters() if isinstance(p, kind)]


def is_split(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether ranks have different parts of a tensor of a parameter's shape."""
    if parameter in splits:
        return True
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor put together from its ranks' parts; all of them must call this."""
    weight_split = splits.get(parameter)
    if weight_split is not None and tensor.shape == parameter.shape:
        return weight_split.gather(tensor)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor, split as a parameter of its shape is; every rank has the whole tensor."""
    weight_split = splits.get(parameter)
    if weight_split is not None:
        return weight_split.split(tensor) if tensor.shape == weight_split.shape else tensor
    if not hasattr(parameter, "placements") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(tensor.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)


def squared_norm(tensor: Tensor, parameter: Tensor, is_first: bool) -> Tensor:
    """Return this rank's term of a tensor's squared L2 norm, in float64: each element counts on one rank.

    Args:
        is_first: whether this is the first of the ranks, which counts what all have.
    """
    weight_split, counted = splits.get(parameter), local(tensor)
    if weight_split is not None:
        counted = weight_split.owned(counted)
    elif not is_split(tensor, parameter) and not is_first:
        counted = counted.flatten()[:0]
    return torch.linalg.vector_norm(counted).double() ** 2
