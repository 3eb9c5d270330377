"""Tensors that are split over ranks, as weights are by tensor parallelism: DTensors.

Other tensors are whole on every rank; these functions return them as they are."""

from __future__ import annotations

from torch import Tensor


def is_split(tensor: Tensor) -> bool:
    """Whether ranks have different parts of the tensor."""
    return any(not placement.is_replicate() for placement in getattr(tensor, "placements", ()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor put together from its ranks' parts; all of them must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def split_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, split as another tensor of its shape is; every rank has the whole tensor."""
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)
