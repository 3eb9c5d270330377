"""Operands that are columns of one tensor: values and gradients are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels.operators import with_one_gradient

TOKENS, WIDTHS = 19, (6, 2, 2)


class _Doubled(torch.autograd.Function):
    """A view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def _parts(rows: Tensor) -> list[Tensor]:
    x, B, C = rows.split(WIDTHS, dim=-1)
    return [x.unflatten(-1, (3, 2)), B, C]


def _cut(y: Tensor) -> list[Tensor]:
    """The parts that a mixer takes of a convolution's outputs, whose first ones it cuts off."""
    return _parts(y.transpose(1, 2)[:, :, -TOKENS:].transpose(1, 2))


def _repeated(y: Tensor) -> list[Tensor]:
    x, B, _ = _cut(y)
    return [x, B, B]


def _doubled(y: Tensor) -> list[Tensor]:
    return _cut(_Doubled.apply(y))


def _one_part(y: Tensor) -> list[Tensor]:
    return _cut(y)[1:]


def _of_other_tensors(y: Tensor) -> list[Tensor]:
    x, B, C = _cut(y)
    return [x, B * 1, C]


def _transposed(y: Tensor) -> list[Tensor]:
    x, B, C = _cut(y)
    return [x.transpose(2, 3), B, C]


CASES: dict[Callable[[Tensor], list[Tensor]], bool] = {  # whether gradients are written into one tensor
    **{_cut: True, _repeated: False, _doubled: False, _one_part: False},
    **{_of_other_tensors: False, _transposed: False},
}


@pytest.mark.parametrize("cut", CASES, ids=lambda cut: cut.__name__)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("unread", [(), (1,), (0, 1, 2)])
def test_gradients_of_columns(
    cut: Callable[[Tensor], list[Tensor]], batch: int, unread: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(batch, TOKENS + 1, sum(WIDTHS), dtype=torch.float64, generator=generator)
    leaf.requires_grad_()
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in cut(leaf)]

    def values_and_gradient(together: bool) -> tuple[list[Tensor], Tensor]:
        operands: Any = cut(leaf * 3)
        if together:
            operands = with_one_gradient(*operands)
            is_one = "_TakeColumns" in operands[0].grad_fn.name()
            assert is_one == CASES[cut]
        total = leaf.sum() * 0
        for k, (x, weight) in enumerate(zip(operands, weights, strict=True)):
            if k not in unread:
                total = total + (x * weight).sum()
        return list(operands), torch.autograd.grad(total, leaf)[0]

    (values, gradient), (ours, our_gradient) = values_and_gradient(False), values_and_gradient(True)
    assert all(torch.equal(a, b) for a, b in zip(values, ours, strict=True))
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-14, atol=1e-14)
