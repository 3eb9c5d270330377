"""Operands that are columns of one tensor: values and gradients are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.columns import SplitOnce, split_columns, with_one_gradient
from adjoint.kernels.rms_norm import rms_norm
from adjoint.kernels.ssd_scan import ssd_scan

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


# ---------------------------------------------------------------------- gradients that kernels write in place

HEADS, HEADDIM, STATE = 4, 16, 32
PROJECTED = (HEADS * HEADDIM, HEADS * HEADDIM + 2 * STATE, HEADS)


class Copies(TorchDispatchMode):
    """Counts concatenations and copies."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copying = torch.ops.aten.cat.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default
        self.number += func in copying
        return func(*args, **(kwargs or {}))


def _mixer(parts: Any, split: Callable[..., tuple[Tensor, ...]], weights: dict[str, Tensor]) -> Tensor:
    gate, xBC, dt = parts
    xBC, _ = causal_conv1d(xBC, weights["conv"], silu=True)
    x, B, C = split(xBC, [PROJECTED[0], STATE, STATE])
    x, B, C = x.unflatten(-1, (HEADS, HEADDIM)), B.unsqueeze(2), C.unsqueeze(2)
    y, _ = ssd_scan(x, dt, weights["A"], B, C, dt_softplus=True)
    return rms_norm(y.flatten(2), weights["norm"], gate=gate)


def _weights(generator: torch.Generator) -> dict[str, Tensor]:
    shapes = {"conv": (PROJECTED[1], 4), "A": (HEADS,), "norm": (PROJECTED[0],)}
    values = {
        name: torch.rand(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()
    }
    return {**values, "A": -values["A"]}


def _plain_split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    return x.split(sizes, dim=-1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 65, 300])
def test_kernels_write_gradients_of_columns_in_place(batch: int, tokens: int) -> None:
    """The bits are those of autograd's concatenation, and nothing is concatenated or copied."""
    generator = torch.Generator().manual_seed(0)
    weights = _weights(generator)
    leaf = torch.randn(batch, tokens, sum(PROJECTED), dtype=torch.float64, generator=generator)
    cotangent = torch.randn(batch, tokens, PROJECTED[0], dtype=torch.float64, generator=generator)
    leaf.requires_grad_()

    def gradient(split: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, int]:
        y = _mixer(split(leaf * 3, PROJECTED), split, weights)
        with Copies() as copies:
            (result,) = torch.autograd.grad(y, leaf, cotangent)
        return result, copies.number

    (expected, usual), (ours, fewer) = gradient(_plain_split), gradient(split_columns)
    assert torch.equal(ours, expected)
    if tokens >= 65 and "cpu" in adjoint.backends():
        assert (usual, fewer) == (2, 0)


def test_gradients_of_columns_that_are_read_twice_or_held() -> None:
    """A second gradient of the same columns is added; one that somebody holds keeps its values."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(2, 40, 48, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.rand(16, dtype=torch.float64, generator=generator)

    def loss(split: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        x, gate, other = split(leaf * 3, [16, 16, 16])
        twice = rms_norm(x, weight, gate=gate) + 2 * rms_norm(other, weight, gate=gate)
        return twice.square().sum(), gate

    plain, plain_gate = loss(_plain_split)
    ours, gate = loss(split_columns)
    (of_gate,) = torch.autograd.grad(ours, gate, retain_graph=True)
    (expected,) = torch.autograd.grad(plain, plain_gate, retain_graph=True)
    torch.testing.assert_close(of_gate, expected, rtol=1e-14, atol=1e-14)
    for factor in (3.0, 5.0):
        (gradient,) = torch.autograd.grad(factor * ours, leaf, retain_graph=True)
        (of_plain,) = torch.autograd.grad(factor * plain, leaf, retain_graph=True)
        torch.testing.assert_close(gradient, of_plain, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_gate, expected, rtol=1e-14, atol=1e-14)


def test_compiled_code_gets_contiguous_gradients() -> None:
    """Compiled code calls the operators by itself, and was told the gradients' strides."""
    leaf = torch.randn(1, 40, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(16, dtype=torch.float64)
    norm = torch.compile(lambda x, gate: rms_norm(x, weight, gate=gate).exp(), backend="aot_eager")
    strides = []

    def gradient(norm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x, gate = split_columns(leaf * 3, [16, 16])
        gate.register_hook(lambda g: strides.append(g.stride(1)))
        return torch.autograd.grad(norm(x, gate).sum(), leaf)[0]

    ours = gradient(norm)
    torch.testing.assert_close(ours, gradient(lambda x, gate: rms_norm(x, weight, gate=gate).exp()))
    assert strides == [16, 32 if "cpu" in adjoint.backends() else 16]


def test_a_tensor_that_is_split_once() -> None:
    """Splits give columns with one gradient; whatever else reads the tensor gets a plain one."""
    leaf = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    y = (leaf * 2).as_subclass(SplitOnce)
    parts: Any = y.split([4, 8], dim=-1)
    halves: Any = y.transpose(1, 2).chunk(2, dim=1)
    for views, names in ((parts, "_TakeColumnsBackward"), (halves, "TransposeBackward0")):
        assert all(type(view) is Tensor and view.grad_fn.name() == names for view in views)
    assert [tuple(view.shape) for view in (*parts, *halves)] == [(2, 5, 4), (2, 5, 8), (2, 6, 5), (2, 6, 5)]
    assert torch.equal(torch.cat(halves, 1).transpose(1, 2), leaf * 2)
    for other in (y + 1, y[:, 1:], y.split(3, dim=-1)[0], y.transpose(0, 1)):
        assert type(other) is Tensor
    total = (parts[0] ** 2).sum() + halves[1].sum()
    expected = torch.zeros_like(leaf)
    expected[..., :4] = 8 * leaf.detach()[..., :4]
    expected[..., 6:] += 2
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], expected)
