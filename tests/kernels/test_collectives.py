"""The differentiable collectives against the same mathematics in one process: values and gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import collectives
from adjoint.kernels.collectives import (
    copy_to_ranks,
    gather_tokens,
    keeping_local_tokens,
    local_tokens,
    reduce_scatter_tokens,
    split_tokens,
    sum_over_ranks,
)
from tests.model_helpers import relative
from tests.ranks import on_ranks

BATCH, CHANNELS, OUTPUTS = 2, 3, 5
SEQLENS = (1, 7, 12)  # with fewer tokens than ranks, odd, and a multiple of both numbers of ranks


def draw(*shape: int) -> Tensor:
    """Return random numbers that are the same on every rank."""
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def split(x: Tensor) -> list[Tensor]:
    """Return each rank's tokens, with zeros where there are no more."""
    ranks = dist.get_world_size()
    size = local_tokens(x.shape[1], ranks)
    return list(F.pad(x, (0, 0, 0, ranks * size - x.shape[1])).split(size, dim=1))


def compare(ours: Callable[..., Tensor], inputs: list[list[Tensor]], outputs: list[Tensor]) -> None:
    """Assert that this rank's output is its entry of `outputs`, and its gradients those of all outputs.

    Args:
        ours: called with this rank's inputs.
        inputs: every rank's, the same on every rank.
        outputs: every rank's, computed from all inputs in this process; a single one for all ranks if the
            gradient of an output is the gradient of all its copies.
    """
    rank = dist.get_rank()
    cotangents = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, inputs[rank], cotangents, retain_graph=True)
    y, dy = (tensors[rank % len(outputs)] for tensors in (outputs, cotangents))
    got = ours(*inputs[rank])
    assert got.shape == y.shape and relative(got, y) <= 1e-12
    for gradient, reference in zip(torch.autograd.grad(got, inputs[rank], dy), expected, strict=True):
        assert relative(gradient, reference) <= 1e-12
    ones = torch.autograd.grad(outputs, inputs[rank], [torch.ones_like(y) for y in outputs])
    got = ours(*inputs[rank])
    for gradient, reference in zip(torch.autograd.grad(got.sum(), inputs[rank]), ones, strict=True):
        assert relative(gradient, reference) <= 1e-12, "a gradient whose elements share memory"


@contextlib.contextmanager
def contiguous_tensors_only() -> Iterator[None]:
    """Fail where a collective gets a tensor with gaps: gloo copies it, NCCL reads across the gaps."""

    def checked(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, **options: Any) -> Any:
            assert all(tensor.is_contiguous() for tensor in tensors), "NCCL takes the address alone"
            return collective(*tensors, **options)

        return call

    with contextlib.ExitStack() as stack:
        for module, name in (
            (collectives, "all_gather_single"),
            (collectives, "reduce_scatter_single"),
            (dist, "all_reduce"),
        ):
            stack.enter_context(mock.patch.object(module, name, checked(getattr(module, name))))
        yield


def every_function() -> None:
    for seqlen in SEQLENS:
        for batch in (1, BATCH):
            torch.manual_seed(seqlen)
            with contiguous_tensors_only():
                each_function(batch, seqlen)


def each_function(batch: int, seqlen: int) -> None:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    x = draw(batch, seqlen, CHANNELS)
    compare(lambda x: copy_to_ranks(x, group), [[x]] * ranks, [x.clone() for _ in range(ranks)])
    xs = [[draw(batch, seqlen, CHANNELS)] for _ in range(ranks)]
    total = torch.stack([x for (x,) in xs]).sum(0)
    compare(lambda x: sum_over_ranks(x, group), xs, [total])
    compare(lambda x: split_tokens(x, group), [[x]] * ranks, split(x))
    compare(lambda x: reduce_scatter_tokens(x, group), xs, split(total))
    xs = [[draw(batch, local_tokens(seqlen, ranks), CHANNELS)] for _ in range(ranks)]
    sequence = torch.cat([x for (x,) in xs], dim=1)[:, :seqlen]
    compare(lambda x: gather_tokens(x, group, seqlen), xs, [sequence.clone() for _ in range(ranks)])
    compare(lambda x: gather_tokens(x, group, seqlen, complete=True), xs, [sequence])
    linears = [[x, draw(OUTPUTS, CHANNELS)] for (x,) in xs]
    compare(
        lambda x, weight: linear_of_local_tokens(x, weight, seqlen),
        linears,
        [F.linear(sequence, weight) for _, weight in linears],
    )


def linear_of_local_tokens(x: Tensor, weight: Tensor, seqlen: int) -> Tensor:
    gathered = gather_tokens(x, dist.group.WORLD, seqlen)
    with keeping_local_tokens(x, gathered, dist.group.WORLD):
        return F.linear(gathered, weight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_values_and_gradients_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, every_function)


def what_a_linear_stores(seqlen: int) -> None:
    group = dist.group.WORLD
    x, weight = draw(BATCH, local_tokens(seqlen, 2), CHANNELS), draw(OUTPUTS, CHANNELS)
    for keeping, stays in ((contextlib.nullcontext(), True), (None, False)):
        gathered = gather_tokens(x, group, seqlen)
        with keeping or keeping_local_tokens(x, gathered, group):
            y = F.linear(gathered, weight)
        reference = weakref.ref(gathered)
        del gathered
        assert (reference() is not None) == stays and y.requires_grad


def test_linears_of_gathered_tokens_store_this_rank_s_tokens_alone(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, what_a_linear_stores, 7)


def in_bfloat16() -> None:
    group = dist.group.WORLD
    x = torch.full((1, 4, 2), 1.5, dtype=torch.bfloat16)
    for y, value in (
        (sum_over_ranks(x, group), 3.0),
        (reduce_scatter_tokens(x, group), 3.0),
        (gather_tokens(x[:, :2], group, 4), 1.5),
    ):
        assert y.dtype == torch.bfloat16 and (y == value).all()


def test_dtypes_are_those_of_plain_operators(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, in_bfloat16)
