"""What rms_norm has beside the other operations (test_operations): dtypes that differ between the stream and
what is written."""

import pytest
import torch

import adjoint
from adjoint.kernels.rms_norm import l2_norm, rms_norm
from tests.kernels.helpers import BACKENDS

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("narrow", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str
)
def test_the_stream_keeps_its_own_dtype(narrow, wide, backend):
    """And its gradient: what is narrower has the same one, rounded."""
    torch.manual_seed(0)
    x, r, weight = torch.randn(3, 16).to(narrow), torch.randn(3, 16).to(wide), torch.ones(16)
    for a, b in ((x, r), (r, x)):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        y, s = rms_norm(a, weight, residual=b, backend=backend)
        assert (y.dtype, s.dtype) == (a.dtype, b.dtype)
        exact, _ = rms_norm(a.double(), weight.double(), residual=b.double())
        assert (y.double() - exact).norm() <= torch.finfo(y.dtype).eps * exact.norm()
        assert torch.equal(s, (a.double() + b.double()).to(b.dtype)) or s.dtype == torch.float64
        got = torch.autograd.grad(y.double().sum() + s.double().sum(), (a, b))
        assert [g.dtype for g in got] == [a.dtype, b.dtype]
        assert torch.equal(*(g.to(narrow) for g in got))  # a sum's terms have one gradient


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_of_float32_is_rounded_once(backend, dtype):
    """y and its cotangent in half precision, the others' in float32: bit for bit as with separate casts."""
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 9, 48, requires_grad=True) for _ in range(2))
    weight, dy = (torch.rand(48) + 0.5).requires_grad_(), torch.randn(2, 9, 48).to(dtype)
    for stream in (None, residual):
        given = [t for t in (x, weight, stream) if t is not None]
        wide, got = (rms_norm(x, weight, backend=backend, residual=stream, dtype=to) for to in (None, dtype))
        wide, got = (y if stream is None else y[0] for y in (wide, got))
        assert got.dtype == dtype and torch.equal(got, wide.to(dtype))
        expected = torch.autograd.grad(wide, given, dy.float())
        for a, b in zip(torch.autograd.grad(got, given, dy), expected, strict=True):
            assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mixer", ["mamba2", "attention", "diagonal"])
def test_autocast_changes_no_bit_of_a_model(mixer, dtype):
    """Norms that write what their linear maps read, against norms in float32 and autocast's casts."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "d_model": 32, "n_layer": 2, "d_state": 8, "headdim": 16}
    model = adjoint.Stack(adjoint.StackConfig(**sizes, mixer=mixer, d_intermediate=24))
    norms = [m for m in model.modules() if getattr(m, "to_linear", False)]
    assert len(norms) == (3 if mixer == "diagonal" else 5), "all but the generic mixers', read three times"
    ids, read = torch.randint(11, (2, 9)), set()
    for norm in norms:
        norm.register_forward_hook(lambda module, given, y: read.add((y[0] if type(y) is tuple else y).dtype))
    found = []
    for to_linear in (True, False):
        for norm in norms:
            norm.to_linear = to_linear
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=ids).loss
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        if to_linear:
            assert read == {dtype}
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 6)
    for message, arguments, residual in (
        ("weight", (x, torch.ones(5)), None),
        ("gate", (x, torch.ones(6), 1e-5, torch.ones(2, 5)), None),
        ("residual must have shape \\(2, 6\\)", (x, torch.ones(6)), torch.ones(6)),
        ("group_size must divide the 6 channels, got 4", (x, torch.ones(6), 1e-5, None, 4), None),
    ):
        with pytest.raises(ValueError, match=message):
            rms_norm(*arguments, residual=residual)


def test_the_operator_that_writes_another_dtype():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.ones(8)
    options = 1e-5, 4, 0.5, torch.float32, torch.bfloat16, None
    torch.library.opcheck(torch.ops.adjoint.rms_norm, (x, weight, None, None, *options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_has_an_offset_and_may_be_left_out(backend: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 7, 3, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(24, generator=draw, dtype=torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    around_one = (x * root).flatten(-2) * (1 + weight)
    expected = torch.autograd.grad(around_one, (x, weight), dy.flatten(-2))
    ours = rms_norm(x.flatten(-2), weight, 1e-3, group_size=8, backend=backend, offset=1.0)
    gradients = torch.autograd.grad(ours, (x, weight), dy.flatten(-2))
    for a, b in zip((ours, *gradients), (around_one, *expected), strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()
    unit = 0.3 * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    ours = l2_norm(x, scale=0.3)
    assert (ours - unit).norm() <= 1e-14 * unit.norm()
    difference = torch.autograd.grad(ours, x, dy)[0] - torch.autograd.grad(unit, x, dy)[0]
    assert difference.norm() <= 1e-14 * dy.norm()
