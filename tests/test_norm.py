"""rms_norm: gradients against autograd over the formula, every backend, odd sizes, strided gates."""

import pytest
import torch
import torch.nn.functional as F

import adjoint
from adjoint.kernels.rms_norm import rms_norm

BACKENDS = [name for name in ("reference", "cpu") if name in adjoint.backends()]


def formula(x, weight, eps, gate, group_size):
    v = x if gate is None else x * F.silu(gate)
    groups = v.unflatten(-1, (-1, group_size))
    return weight * (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)


def inputs(shape, gated, dtype=torch.float64):
    x, wide = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)
    weight = torch.rand(shape[-1], dtype=dtype) + 0.5
    gate = wide[..., : shape[-1]] if gated else None  # a view of a wider projection, as the mixers have it
    return [None if t is None else t.requires_grad_() for t in (x, weight, gate.detach() if gated else None)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"), [((2, 5, 24), 24), ((1, 7, 30), 10), ((3, 33), 33), ((4, 300, 64), 16)]
)
def test_gradients(backend, gated, shape, group):
    torch.manual_seed(0)
    x, weight, gate = inputs(shape, gated)
    given = [t for t in (x, weight, gate) if t is not None]
    expected, got = (
        f()
        for f in (
            lambda: formula(x, weight, 1e-5, gate, group),
            lambda: rms_norm(x, weight, 1e-5, gate, group, backend),
        )
    )
    dy = torch.randn(shape, dtype=torch.float64)
    assert (got - expected).norm() <= 1e-12 * expected.norm()
    for a, b in zip(
        torch.autograd.grad((got * dy).sum(), given),
        torch.autograd.grad((expected * dy).sum(), given),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_and_half_precision(backend):
    torch.manual_seed(0)
    x, weight, gate = inputs((2, 9, 48), True)
    exact = rms_norm(x, weight, 1e-5, gate)
    dy = torch.randn_like(exact)
    truth = torch.autograd.grad((exact * dy).sum(), (x, weight, gate))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        narrow = [t.detach().to(dtype).requires_grad_() for t in (x, weight, gate)]
        y = rms_norm(*narrow[:2], 1e-5, narrow[2], backend=backend if dtype == torch.float32 else None)
        assert y.dtype == dtype and (y.double() - exact).norm() <= tolerance * exact.norm()
        for a, b in zip(torch.autograd.grad((y * dy.to(dtype)).sum(), narrow), truth, strict=True):
            assert a.dtype == dtype and (a.double() - b).norm() <= tolerance * b.norm()


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 6)
    for message, arguments in (
        ("weight", (x, torch.ones(5))),
        ("gate", (x, torch.ones(6), 1e-5, torch.ones(2, 5))),
        ("group_size must divide the 6 channels, got 4", (x, torch.ones(6), 1e-5, None, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            rms_norm(*arguments)


def test_operator():
    x, weight, gate = inputs((2, 3, 8), True)
    torch.library.opcheck(torch.ops.adjoint.rms_norm, (x, weight, gate, 1e-5, 4, None))
