"""The gated product and its linear map: what autograd gets from the formula, with less kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import gated as kernels
from adjoint.kernels.gated import gated, gated_linear, products_kept
from adjoint.kernels.unread import unread


@pytest.fixture(params=[0, kernels.MIN_ELEMENTS_ON_CPU], ids=["operator", "small"], autouse=True)
def min_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kernels, "MIN_ELEMENTS_ON_CPU", request.param)
    return int(request.param)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 37, 12, generator=generator).to(dtype).requires_grad_() for _ in range(2)]


def kept(call: Callable[[], Tensor]) -> int:
    """How many tensors as large as the inputs autograd keeps for a backward through it."""
    held = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == 2 * 37 * 12:
            held.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    return len(held)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_those_of_the_formula(bias: bool, frozen: bool) -> None:
    linear = nn.Linear(12, 5, bias=bias).double()
    linear.weight.requires_grad_(not frozen)
    leaves = [*inputs(), *(p for p in linear.parameters() if p.requires_grad)]
    gate, value = leaves[:2]
    dy = torch.randn(2, 37, 5, dtype=torch.float64)
    expected = torch.autograd.grad(linear(F.silu(gate) * value), leaves, dy)
    for found in (gated_linear(gate, value, linear), linear(gated(gate, value))):
        for ours, theirs in zip(torch.autograd.grad(found, leaves, dy), expected, strict=True):
            assert (ours - theirs).norm() <= 1e-14 * theirs.norm()


@pytest.mark.parametrize("shapes", [((12,), (12,)), ((2, 37, 1), (2, 37, 12)), ((2, 37, 12), (12,))], ids=str)
def test_shapes_of_one_dimension_and_broadcast_ones(shapes: tuple[tuple[int, ...], ...]) -> None:
    linear = nn.Linear(12, 5).double()
    gate, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    leaves = [gate, value, *linear.parameters()]
    expected = torch.autograd.grad(linear(F.silu(gate) * value).square().sum(), leaves)
    gradients = torch.autograd.grad(gated_linear(gate, value, linear).square().sum(), leaves)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-14 * theirs.norm()


def test_a_backward_in_an_autocast_of_its_own() -> None:
    """Autograd's product is in bfloat16 there, and its memory half as large."""
    linear = nn.Linear(12, 5)
    leaves = [*inputs(torch.float32), *linear.parameters()]
    gate, value = leaves[:2]
    outputs = gated_linear(gate, value, linear), linear(F.silu(gate) * value)
    with torch.autocast("cpu", torch.bfloat16):
        gradients, expected = (torch.autograd.grad(y, leaves, torch.ones_like(y)) for y in outputs)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - theirs).norm() <= 1e-2 * theirs.norm()


def test_forward_mode_differentiates_it() -> None:
    gate, value = (t.detach() for t in inputs())
    linear = nn.Linear(12, 5).double()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(gate, value)
        derivative, expected = (
            torch.autograd.forward_ad.unpack_dual(y).tangent
            for y in (gated_linear(dual, value, linear), linear(F.silu(dual) * value))
        )
    assert derivative is not None and torch.allclose(derivative, expected, rtol=1e-14)


def test_torch_func_differentiates_it() -> None:
    gate, value = (t.detach() for t in inputs())
    linear = nn.Linear(12, 5).double()

    def ours(gate: Tensor) -> Tensor:
        return gated_linear(gate, value[0, :2], linear)

    def theirs(gate: Tensor) -> Tensor:
        return linear(F.silu(gate) * value[0, :2])

    assert torch.allclose(*(torch.func.jacrev(f)(gate[0, :2]) for f in (ours, theirs)), rtol=1e-12)


def test_keeps_gate_and_value_alone(min_elements: int) -> None:
    gate, value = inputs()
    linear = nn.Linear(12, 12).double()
    assert kept(lambda: linear(F.silu(gate) * value)) == 4
    assert kept(lambda: linear(gated(gate, value))) == (4 if min_elements else 3)
    assert kept(lambda: gated_linear(gate, value, linear)) == 2
    with products_kept():  # what is computed again is kept by others
        assert kept(lambda: gated_linear(gate, value, linear)) == (4 if min_elements else 3)


def test_other_modules_are_called_as_they_are() -> None:
    gate, value = inputs(torch.float32)
    linear, seen = nn.Linear(12, 12), []
    linear.register_forward_hook(lambda *_: seen.append("hook"))
    gated_linear(gate, value, linear)
    with torch.autocast("cpu", torch.bfloat16):
        assert gated_linear(gate, value, nn.Linear(12, 12)).dtype == torch.bfloat16
    assert seen == ["hook"]
    assert torch.equal(gated_linear(gate, value, nn.Identity()), gated(gate, value))


class _Quantised(Tensor):
    """Knows `F.linear` and nothing else, as weights of int8 do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return func(x, weight.as_subclass(Tensor), *rest)
        if func in (Tensor.matmul, torch.matmul, Tensor.mm):
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_map_with_a_quantised_weight_is_called_as_it_is() -> None:
    linear, gate, value = nn.Linear(5, 3, bias=False), torch.randn(2, 5), torch.randn(2, 5)
    expected = linear(F.silu(gate) * value)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(_Quantised), requires_grad=False)
    gate.requires_grad_()
    y = gated_linear(gate, value, linear)
    y.sum().backward()
    assert torch.allclose(y, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map_whose_result_is_not_read_has_its_gradients(bias: bool) -> None:
    """Alone and after the gated product; a hook that would see the zeros has it computed."""
    linear = nn.Linear(12, 5, bias=bias).double()
    gate, value = inputs()
    cotangent = torch.randn(2, 37, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for call in (lambda: gated_linear(gate, value, linear), lambda: linear(gate * value)):
        leaves = [gate, value, *linear.parameters()]
        expected = torch.autograd.grad(call(), leaves, cotangent)
        with unread(linear):
            zeros = call()
        assert not zeros.any()
        torch.testing.assert_close(torch.autograd.grad(zeros, leaves, cotangent), expected)
    handle = linear.register_forward_hook(lambda *_: None)
    with unread(linear):
        assert linear(gate * value).any()
    handle.remove()
