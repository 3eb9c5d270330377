"""Tensors of which each rank has a part: DTensors, and parts of a split `Stack`'s weights.

Gradients and an optimizer's moments are split as their parameter is, so each function takes this, too. A
tensor that is not split is whole on every rank; these functions return it as it is."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Part(Protocol):
    """A rank's part of a parameter, of a kind that DTensors do not have.

    Attributes:
        shape: of the whole.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole tensor on every rank; all must call this."""

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's part of the whole, copied."""

    def owned(self, local: Tensor) -> Tensor:
        """Return the elements of this rank's part that no rank before it has."""


parts: MutableMapping[Tensor, Part] = WeakTensorKeyDictionary()  # by parameter


def is_split(parameter: Tensor) -> bool:
    """Whether ranks have different parts of a parameter."""
    if parameter in parts:
        return True
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor put together from its ranks' parts; all of them must call this."""
    part = parts.get(parameter)
    if part is not None and tensor.shape == parameter.shape:
        return part.whole(tensor)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor, split as a parameter of its shape is; every rank has the whole tensor."""
    part = parts.get(parameter)
    if part is not None:
        return part.part(tensor) if tensor.shape == part.shape else tensor
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
    part, counted = parts.get(parameter), local(tensor)
    if part is not None:
        counted = part.owned(counted)
    elif not is_split(parameter) and not is_first:
        counted = counted.flatten()[:0]
    return torch.linalg.vector_norm(counted).double() ** 2
