"""Differentiable collectives of tensor and sequence parallelism (Korthikanti et al. 2022, section 4.2).

Tensors are (batch, tokens, channels). All ranks of a group must call the same functions in the same order,
and run the same backward: each function communicates in its backward, too. Sums are in the tensor's dtype.

| paper | function | forward | backward |
| --- | --- | --- | --- |
| f | `copy_to_ranks` | identity | all-reduce |
| f̄ | `sum_over_ranks` | all-reduce | identity |
| g | `gather_tokens` | all-gather | reduce-scatter |
| ḡ | `reduce_scatter_tokens` | reduce-scatter | all-gather |

Where every rank runs the same layer on all tokens, its gradients are already complete:

| function | forward | backward |
| --- | --- | --- |
| `gather_tokens(complete=True)` | all-gather | this rank's tokens |
| `split_tokens` | this rank's tokens | all-gather |

Tokens are split evenly: each rank has `local_tokens(seqlen, ranks)` of them, and the last ranks' are filled
up with zeros where the number of ranks does not divide seqlen."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

# torch 2.13 has renamed both and warns of the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local_tokens(seqlen: int, ranks: int) -> int:
    """Return the number of tokens per rank when a sequence is split, padding included."""
    return -(-seqlen // ranks)


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, the same on every rank; its gradient is the sum of all ranks' gradients (the paper's f)."""
    return _Copy.apply(x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' x; each x gets the sum's gradient (the paper's f̄)."""
    return _Sum.apply(x, group)


def split_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, the same on every rank; its gradient is an even share of the result's.

    Where every rank computes the same gradient, the shares add up to it."""
    return _Share.apply(x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup, seqlen: int, complete: bool = False) -> Tensor:
    """Return the sequence whose tokens are split over the ranks (the paper's g).

    Args:
        x: this rank's tokens, (batch, local_tokens(seqlen, ranks), channels).
        complete: whether each rank's gradient of the result is that of the loss; else they are terms of it,
            which are summed over ranks.

    Returns:
        (batch, seqlen, channels), the same on every rank.
    """
    return _Gather.apply(x, group, seqlen, complete)


def split_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of x (batch, seqlen, channels), which is the same on every rank.

    The gradient of x is complete on every rank. For the result see `reduce_scatter_tokens`."""
    return _Split.apply(x, group)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum of all ranks' x (the paper's ḡ).

    Args:
        x: (batch, seqlen, channels).

    Returns:
        (batch, local_tokens(seqlen, ranks), channels), followed by zeros where there are no more tokens.
    """
    return _ReduceScatter.apply(x, group)


@contextlib.contextmanager
def keeping_local_tokens(x: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    """Let autograd keep x in the place of `gathered`, which the backward gathers again.

    So layers that run inside keep a share of their input (Korthikanti et al., end of section 4.2.2). Under
    other hooks on saved tensors, such as those of torch.utils.checkpoint, nothing is changed: they keep less.

    Args:
        x, gathered: the input and the result of `gather_tokens`.
    """
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield
        return
    storage, seqlen, local = gathered.untyped_storage(), gathered.shape[1], x.detach()
    address, latest = storage.data_ptr(), weakref.ref(gathered)

    def pack(t: Tensor) -> Tensor | _View:
        if t.untyped_storage().data_ptr() != address or t.dtype != local.dtype:
            return t
        return _View(t.shape, t.stride(), int(t.storage_offset()))

    def unpack(saved: Tensor | _View) -> Tensor:
        nonlocal latest
        if isinstance(saved, Tensor):
            return saved
        again = latest()
        if again is None:
            again = all_gather_tokens(local, group, seqlen)
            latest = weakref.ref(again)
        return again.as_strided(*saved)

    del storage, gathered
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _View(NamedTuple):
    """Place of a saved tensor in the memory of the gathered one."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Context(FunctionCtx):
    """The attributes of autograd's context that the functions below set or read."""

    group: dist.ProcessGroup
    seqlen: int
    complete: bool


Inputs = tuple[Tensor | None, ...]  # what a backward returns


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, dx: Tensor) -> Inputs:
        return _all_reduce(dx, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> Inputs:
        return dy, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> Inputs:
        return dy / dist.get_world_size(ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup, seqlen: int, complete: bool) -> Tensor:
        ctx.group, ctx.complete = group, complete
        return all_gather_tokens(x, group, seqlen)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> Inputs:
        dx = _local(dy, ctx.group) if ctx.complete else _reduce_scatter(dy, ctx.group)
        return dx, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.seqlen = group, x.shape[1]
        return _local(x, group)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> Inputs:
        return all_gather_tokens(dy, ctx.group, ctx.seqlen), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.seqlen = group, x.shape[1]
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> Inputs:
        return all_gather_tokens(dy, ctx.group, ctx.seqlen), None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather_tokens(x: Tensor, group: dist.ProcessGroup, seqlen: int) -> Tensor:
    """Return the tensor of `gather_tokens`, not differentiable."""
    ranks = dist.get_world_size(group)
    gathered = x.new_empty(ranks * len(x), *x.shape[1:])
    all_gather_single(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (ranks, len(x))).transpose(0, 1).flatten(1, 2)[:, :seqlen].contiguous()


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Return x (batch, seqlen, channels) as (ranks, batch, local tokens, channels), filled up with zeros."""
    size = local_tokens(x.shape[1], ranks)
    padded = F.pad(x, (0, 0, 0, ranks * size - x.shape[1])) if ranks * size > x.shape[1] else x
    return padded.unflatten(1, (ranks, size)).transpose(0, 1)


def _local(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _by_rank(x, dist.get_world_size(group))[dist.get_rank(group)].clone()


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seqlen, channels) on each rank → (batch, local tokens, channels) of the sum."""
    by_rank = _by_rank(x, dist.get_world_size(group))
    local = x.new_empty(by_rank.shape[1:])
    # a view for one row; NCCL reads the memory as if it were contiguous, without an error
    reduce_scatter_single(local, by_rank.flatten(0, 1).contiguous(), group=group)
    return local
