"""rms_norm: gradients against autograd over the formula, every backend, odd sizes, strided inputs; the
residual sum that goes on, its cotangent, and the block that uses it."""

import pytest
import torch
import torch.nn.functional as F

import adjoint
from adjoint.kernels.rms_norm import rms_norm
from tests.kernels.triton_helpers import assert_no_worse, poisoned, strided  # noqa: F401

BACKENDS = [name for name in ("reference", "cpu") if name in adjoint.backends()]
OUTPUTS = [(True, True), (True, False), (False, True)]


def formula(x, weight, eps, gate, group_size, residual=None):
    """(y, s)"""
    s = x if residual is None else x + residual
    v = s if gate is None else s * F.silu(gate)
    groups = v.unflatten(-1, (-1, group_size))
    return weight * (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2), s


def inputs(shape, gated, dtype=torch.float64):
    """x, weight and gate, those of a token as views of wider rows, as the mixers' projections give them."""
    x, gate = (strided(torch.randn(shape, dtype=dtype)) for _ in range(2))
    weight = torch.rand(shape[-1], dtype=dtype) + 0.5
    return [None if t is None else t.requires_grad_() for t in (x, weight, gate if gated else None)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("shape", "group"), [((2, 5, 24), 24), ((1, 7, 30), 10), ((3, 33), 33), ((5,), 5), ((4, 300, 64), 16)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradients(backend, gated, residual, shape, group, dtype, tolerance):
    """Each output alone and both; uninitialised memory is NaN."""
    torch.manual_seed(0)
    x, weight, gate = inputs(shape, gated, dtype)
    stream = strided(torch.randn(shape, dtype=dtype)).requires_grad_() if residual else None
    dy, ds = (strided(torch.randn(shape, dtype=dtype)) for _ in range(2))
    given = [t for t in (x, weight, gate, stream) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = iter(wide)
    arguments = [None if t is None else next(exact) for t in (x, weight, gate, stream)]
    expected = formula(*arguments[:2], 1e-5, arguments[2], group, arguments[3])
    got = rms_norm(x, weight, 1e-5, gate, group, backend, residual=stream)
    got = got if residual else (got,)
    for a, b in zip(got, expected, strict=False):
        assert (a - b).norm() <= tolerance * b.norm()
    for used in OUTPUTS if residual else [(True,)]:
        cotangents = [d for d, use in zip((dy, ds), used, strict=False) if use]
        results = [
            torch.autograd.grad(
                [o for o, use in zip(outputs, used, strict=False) if use],
                leaves,
                [d.to(leaves[0].dtype) for d in cotangents],
                retain_graph=True,
                allow_unused=True,
            )
            for outputs, leaves in ((got, given), (expected, wide))
        ]
        for a, b in zip(*results, strict=True):
            if b is None:  # weight and gate have no part in the sum
                assert not a.any()
            else:
                assert (a - b).norm() <= tolerance * b.norm()


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


@pytest.mark.parametrize("gated", [False, True])
def test_a_residual_in_bfloat16_is_no_worse_than_autograd(gated):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 9, 48).bfloat16() for _ in range(5)]
    weight = (torch.rand(48) + 0.5).bfloat16()

    def run(function, dtype):
        x, residual, gate, dy, ds = (t.to(dtype) for t in tensors)
        leaves = [t.requires_grad_() for t in (x, residual, weight.to(dtype), *[gate] * gated)]
        y, s = function(x, leaves[2], 1e-5, gate if gated else None, 48, residual=residual)
        return y, s, *torch.autograd.grad((y, s), leaves, (dy, ds))

    got = run(rms_norm, torch.bfloat16)
    assert {t.dtype for t in got} == {torch.bfloat16}
    names = ("y", "s", "x", "residual", "weight", "gate")[: len(got)]
    assert_no_worse(got, run(formula, torch.float64), run(formula, torch.bfloat16), names)


@pytest.mark.parametrize(
    ("narrow", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str
)
def test_the_stream_keeps_its_own_dtype(narrow, wide):
    torch.manual_seed(0)
    x, r, weight = torch.randn(3, 16).to(narrow), torch.randn(3, 16).to(wide), torch.ones(16)
    for a, b in ((x, r), (r, x)):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        y, s = rms_norm(a, weight, residual=b)
        assert (y.dtype, s.dtype) == (a.dtype, b.dtype)
        assert torch.equal(s, (a.double() + b.double()).to(b.dtype)) or s.dtype == torch.float64
        got = torch.autograd.grad(y.double().sum() + s.double().sum(), (a, b))
        assert [g.dtype for g in got] == [a.dtype, b.dtype]
        assert torch.equal(*(g.to(narrow) for g in got))  # a sum's terms have one gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_of_float32_is_rounded_once(backend, dtype):
    """y and its cotangent in half precision, the others' in float32: bit for bit as with separate casts."""
    torch.manual_seed(0)
    x, weight, _ = inputs((2, 9, 48), False, torch.float32)
    residual, dy = torch.randn(2, 9, 48, requires_grad=True), torch.randn(2, 9, 48).to(dtype)
    for stream in (None, residual):
        given = [t for t in (x, weight, stream) if t is not None]
        wide, got = (rms_norm(x, weight, backend=backend, residual=stream, dtype=to) for to in (None, dtype))
        wide, got = (y if stream is None else y[0] for y in (wide, got))
        assert got.dtype == dtype and torch.equal(got, wide.to(dtype))
        expected = torch.autograd.grad(wide, given, dy.float())
        for a, b in zip(torch.autograd.grad(got, given, dy), expected, strict=True):
            assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
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
    results = []
    for to_linear in (True, False):
        for norm in norms:
            norm.to_linear = to_linear
        with torch.autocast("cpu", dtype):
            loss = model(ids, labels=ids).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
        if to_linear:
            assert read == {dtype}
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    torch.manual_seed(0)
    x, weight, gate = inputs((2, 3, 6), True)
    residual = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def call(x, weight, gate, residual):
        return rms_norm(x, weight, 1e-5, gate, 3, backend, residual=residual)

    assert torch.autograd.gradcheck(call, (x, weight, gate, residual))


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


def test_operator():
    x, weight, gate = inputs((2, 3, 8), True)
    op = torch.ops.adjoint.rms_norm
    stream = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    options = 1e-5, 4, torch.float64
    for residual in (None, stream):
        torch.library.opcheck(op, (x, weight, gate, residual, *options, torch.float64, None))
    torch.library.opcheck(op, (x, weight, None, None, *options, torch.bfloat16, None))


def test_compiled_whole():
    torch.manual_seed(0)
    x, weight, _ = inputs((2, 9, 12), False)
    residual = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)

    def call(x, residual):
        y, s = rms_norm(x, weight, residual=residual)
        return y * 2 + s

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        y = function(x, residual)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, residual, weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


def test_a_second_derivative_is_refused():
    x, weight, _ = inputs((2, 4), False)
    residual = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    y, s = rms_norm(x, weight, residual=residual)
    with pytest.raises(RuntimeError, match="rms_norm is differentiable once"):
        torch.autograd.grad((y * s).sum(), (x, weight, residual), create_graph=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("d_intermediate", [0, 20])
def test_the_block_is_the_same_as_with_a_separate_sum(d_intermediate, autocast):
    torch.manual_seed(0)
    config = adjoint.StackConfig(
        vocab_size=7, d_model=16, n_layer=1, mixer="mamba", d_state=4, d_intermediate=d_intermediate
    )
    dtype, tolerance = (torch.float32, 1e-2) if autocast else (torch.float64, 1e-12)
    model = adjoint.Stack(config).to(dtype)
    (block,), (state,) = model.blocks(), model.initial_state(2)
    y = torch.randn(2, 11, 16, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixed, _ = block.mixer(block.norm(y), state)
        separate = block.feed_forward(y + mixed)
        fused, _ = block(y, state)
    assert fused.dtype == separate.dtype == dtype
    leaves, dy = [y, *block.parameters()], torch.randn_like(y)
    expected, got = (torch.autograd.grad(out, leaves, dy) for out in (separate, fused))
    for a, b in zip((fused, *got), (separate, *expected), strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= tolerance * b.norm()
