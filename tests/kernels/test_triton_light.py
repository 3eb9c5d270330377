"""The Triton linear scan, convolution and RMSNorm, interpreted, against the float64 reference: values and
gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.triton_helpers import (
    INTERPRETED,
    SKIPPED,
    assert_close,
    assert_documents_apart,
    assert_no_worse,
    bfloat16_as_hardware_has_it,  # noqa: F401
    generator,
    poisoned,  # noqa: F401
    resets,
    slow,
    sparse,
    strided,
)

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip(SKIPPED, allow_module_level=True)

from adjoint.kernels import reference
from adjoint.kernels.rms_norm import rms_norm
from adjoint.kernels.triton import common
from adjoint.kernels.triton import conv1d as conv
from adjoint.kernels.triton import linear_scan as linear
from adjoint.kernels.triton import rms_norm as norm

# ------------------------------------------------------------------------------------------------ linear scan


def run_linear(backend, a, b, dh, initial, reset, window, halo):
    """(h, da, db, dinitial_state)."""
    h = backend.linear_scan_forward(a, b, initial, reset)
    return h, *backend.linear_scan_backward(dh, a, h, initial, reset, window, halo)


def linear_inputs(seqlen, scalar, batch=2, size=37):
    randn = generator(seqlen)
    a = torch.sigmoid(randn(batch, seqlen, 1 if scalar else size)).float().double()
    return a, randn(batch, seqlen, size), randn(batch, seqlen, size), randn(batch, size)


def check_linear(seqlen, window=None, halo=0, scalar=False, state=True):
    a, b, dh, initial = linear_inputs(seqlen, scalar)
    initial = initial if state else None
    reset = resets(seqlen, 2, seqlen)
    expected = run_linear(reference, a, b, dh, initial, reset, window, halo)
    views = (a.float() if scalar else strided(a.float()), strided(b.float()), strided(dh.float()))
    first = initial.float() if state else None
    got = run_linear(linear, *views, first, reset, window, halo)
    assert_close(got, expected, 1e-5, ("h", "a", "b", "initial_state"))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    ("seqlen", "window", "halo"),
    [
        (1, None, 0),
        (19, None, 0),
        slow(19, 1, 2),
        (19, 5, 7),
        slow(19, 19, 0),
        (19, 20, 3),
        slow(5, 40, 0),
        (19, None, 4),
    ],
)
def test_linear_scan(seqlen, window, halo, scalar):
    check_linear(seqlen, window, halo, scalar)


def test_linear_scan_from_zero():
    check_linear(9, state=False)
    check_linear(9, window=4, state=False)


@pytest.fixture
def many_splits(monkeypatch):
    """Cut sequences into as many splits as their length allows, as a big device would a long one."""
    monkeypatch.setattr(common, "wanted_programs", lambda x, per_multiprocessor: 10**6)
    monkeypatch.setattr(linear, "SHORTEST_SPLIT", 1)


@pytest.mark.parametrize(("window", "halo"), [(None, 0), (3, 2)])
def test_linear_scan_in_splits(window, halo, many_splits, monkeypatch):
    monkeypatch.setattr(linear, "UNIT", 8)
    check_linear(19, window, halo)


@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"))])
@pytest.mark.parametrize(
    ("window", "halo"), [(None, 0), (5, 2), slow(1, 0), slow(2, 0), slow(9, 0), slow(None, 4)]
)
@pytest.mark.parametrize("scalar", [False, slow(True)])
@pytest.mark.parametrize("split", [True, slow(False)])
def test_documents_of_a_linear_scan_are_apart(scalar, window, halo, split, value, request, monkeypatch):
    if split:
        request.getfixturevalue("many_splits")
        monkeypatch.setattr(linear, "UNIT", 8)
    a, b, dh, initial = (v.float() for v in linear_inputs(29, scalar, batch=1, size=3))

    def run(given, reset):
        return run_linear(linear, *given.values(), reset, window, halo)

    given = {"a": a, "b": b, "dh": dh, "initial_state": initial}
    assert_documents_apart(run, given, ("h", "da", "db", "d initial_state"), [3, 1, 9, 2, 8, 1, 5], value)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "halo"), [(None, 0), (3, 0), (16, 40), (None, 70)])
@pytest.mark.parametrize("scalar", [False, True])
def test_linear_scan_in_splits_of_full_size(window, halo, scalar, many_splits):
    check_linear(131, window, halo, scalar)


@pytest.mark.parametrize("scalar", [False, True])
def test_linear_scan_of_bfloat16_is_no_worse_than_autograd(scalar):
    a, b, dh, initial = linear_inputs(24, scalar, size=5)
    a, b, dh = (v.bfloat16().double() for v in (a, b, dh))

    def autograd(dtype):
        leaves = [v.to(dtype).requires_grad_() for v in (a, b, initial)]
        h, states = leaves[2], []
        for t in range(24):
            h = leaves[0][:, t] * h + leaves[1][:, t]
            states.append(h)
        out = torch.stack(states, 1)
        return out, *torch.autograd.grad((out * dh.to(dtype)).sum(), leaves)

    half = [v.bfloat16() for v in (a, b, dh)]
    got = run_linear(linear, *half, initial.float(), None, None, 0)
    assert_no_worse(got, autograd(torch.float64), autograd(torch.bfloat16), ("h", "a", "b", "initial_state"))
    assert [v.dtype for v in got] == [torch.bfloat16] * 3 + [torch.float32]


# ------------------------------------------------------------------------------------------------ convolution


def run_conv(backend, dy, *args):
    """(y, dx, dweight, dbias, dinitial_state)."""
    return backend.causal_conv1d_forward(*args), *backend.causal_conv1d_backward(dy, *args)


def conv_inputs(seqlen, d_conv, batch=2, channels=5):
    randn = generator(seqlen)
    x, weight, bias = randn(batch, seqlen, channels), randn(channels, d_conv), randn(channels)
    return randn(batch, seqlen, channels), x, weight, bias, randn(batch, channels, d_conv - 1)


@pytest.mark.parametrize(
    ("seqlen", "d_conv", "silu", "with_resets", "state"),
    [
        (1, 4, True, True, True),
        (5, 3, False, False, True),
        (33, 4, True, True, False),
        (41, 4, True, False, True),
        slow(150, 2, False, True, True),
        (5, 1, True, False, False),
    ],
)
def test_causal_conv1d(seqlen, d_conv, silu, with_resets, state):
    dy, x, weight, bias, past = conv_inputs(seqlen, d_conv)
    reset = resets(seqlen, 2, seqlen) if with_resets else None
    past = past if state else None
    expected = run_conv(reference, dy, x, weight, bias, past, silu, reset)
    first = past.float() if state else None
    args = (strided(x.float()), weight.float(), sparse(bias.float()), first, silu, reset)
    got = run_conv(conv, strided(dy.float()), *args)
    if not state:  # given all the same: the gradient at zeros
        assert got[-1].isfinite().all()
        got, expected = got[:-1], expected[:-1]
    assert_close(got, expected, 1e-5, ("y", "x", "weight", "bias", "initial_state")[: len(got)])


def test_causal_conv1d_of_bfloat16_is_no_worse_than_autograd():
    dy, x, weight, bias, past = conv_inputs(30, 4)
    dy, x, past = (v.bfloat16().double() for v in (dy, x, past))

    def autograd(dtype):
        leaves = [v.to(dtype).requires_grad_() for v in (x, weight, bias, past)]
        padded = torch.cat([leaves[3], leaves[0].transpose(1, 2)], 2)
        y = F.silu(F.conv1d(padded, leaves[1][:, None], leaves[2], groups=5)).transpose(1, 2)
        return y, *torch.autograd.grad((y * dy.to(dtype)).sum(), leaves)

    args = (x.bfloat16(), weight.float(), bias.float(), past.bfloat16(), True, None)
    got = run_conv(conv, dy.bfloat16(), *args)
    names = ("y", "x", "weight", "bias", "initial_state")
    assert_no_worse(got, autograd(torch.float64), autograd(torch.bfloat16), names)
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [v.dtype for v in got] == [bf16, bf16, fp32, fp32, bf16]


# ------------------------------------------------------------------------------------------------ RMSNorm


def norm_loop(x, weight, residual, gate, group_size):
    s = x if residual is None else x + residual
    v = s if gate is None else s * F.silu(gate)
    groups = v.unflatten(-1, (-1, group_size or v.shape[-1]))
    scale = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (groups * scale).flatten(-2) * weight, s


def norm_inputs(width):
    randn = generator(width)
    return [randn(2, 5, width) for _ in range(5)], randn(width)


def norm_autograd(x, weight, residual, gate, dy, ds, group_size, dtype):
    """(y, s, dx, dweight, dgate), the last where there is a gate; dx is dresidual too."""
    leaves = [v.to(dtype).requires_grad_() for v in (x, weight, *([] if gate is None else [gate]))]
    other = None if residual is None else residual.to(dtype)
    y, s = norm_loop(leaves[0], leaves[1], other, None if gate is None else leaves[2], group_size)
    loss = (y * dy.to(dtype)).sum() + (0 if ds is None else (s * ds.to(dtype)).sum())
    return y, s, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("group_size", "residual", "gated"),
    [(None, True, False), (8, True, True), (None, False, True), (5, False, False)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), slow(torch.float64, 1e-12)])
def test_rms_norm(group_size, residual, gated, dtype, tolerance):
    (x, r, z, dy, ds), weight = norm_inputs(25 if group_size == 5 else 24)
    r, z, ds = r if residual else None, z if gated else None, ds if residual else None
    expected = norm_autograd(x, weight, r, z, dy, ds, group_size, torch.float64)
    x, r, z, dy, ds = (None if v is None else strided(v.to(dtype)) for v in (x, r, z, dy, ds))
    w = sparse(weight.to(dtype))
    y, s, rstd = norm.rms_norm_forward(x, w, z, r, 1e-5, group_size)
    assert (s is None) == (r is None)
    s = x if s is None else s
    *got, dx = norm.rms_norm_backward(dy, ds, s, w, z, rstd, group_size)
    assert dx is None
    got = (y, s, *(got if gated else got[:2]))
    assert_close(got, expected, tolerance, ("y", "s", "x", "weight", "gate")[: len(got)])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm_of_bfloat16_is_no_worse_than_autograd(gated, residual):
    (x, r, z, dy, ds), weight = norm_inputs(24)
    x, r, z, dy, ds = (v.bfloat16().double() for v in (x, r, z, dy, ds))
    r, z, ds = r if residual else None, z if gated else None, ds if residual else None
    exact, rounded = (
        norm_autograd(x, weight, r, z, dy, ds, None, d) for d in (torch.float64, torch.bfloat16)
    )
    x, r, z, dy, ds = (None if v is None else v.bfloat16() for v in (x, r, z, dy, ds))
    y, s, rstd = norm.rms_norm_forward(x, weight.float(), z, r)
    s = x if s is None else s
    *got, dx = norm.rms_norm_backward(dy, ds, s, weight.float(), z, rstd)
    assert dx is None
    got = (y, s, *(got if gated else got[:2]))
    names = ("y", "s", "x", "weight", "gate")[: len(got)]
    assert_no_worse(got, exact, rounded, names)
    assert [v.dtype for v in got] == [
        torch.float32 if n == "weight" else torch.bfloat16 for n in names
    ]  # fmt: skip


def test_rms_norm_keeps_a_float32_residual_stream():
    """bfloat16 in and out, the stream and its gradient in float32, and x's in bfloat16, from one pass."""
    (x, r, _, dy, ds), weight = norm_inputs(24)
    x, dy = x.bfloat16().double(), dy.bfloat16().double()
    expected = norm_autograd(x, weight, r, None, dy, ds, None, torch.float64)
    y, s, rstd = norm.rms_norm_forward(x.bfloat16(), weight.float(), None, r.float())
    dr, dweight, _, dx = norm.rms_norm_backward(dy.bfloat16(), ds.float(), s, weight.float(), None, rstd)
    assert_close((s, dr, dweight), expected[1:], 1e-5, ("s", "residual", "weight"))
    assert_close((y,), expected[:1], 2**-8, ("y",))
    assert (y.dtype, s.dtype, dr.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(dx, dr.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_writes_half_precision_of_a_float32_stream(dtype):
    """As under autocast: y is the float32 result rounded once, dy is in half precision, dx in float32."""
    (x, _, _, dy, _), weight = norm_inputs(25)
    x, weight, dy = x.float(), weight.float(), dy.to(dtype)
    expected = norm_autograd(x.double(), weight, None, None, dy, None, None, torch.float64)
    wide, _, _ = norm.rms_norm_forward(strided(x), weight, None, None)
    y, s, rstd = norm.rms_norm_forward(strided(x), weight, None, None, dtype=dtype)
    dx, dweight, *rest = norm.rms_norm_backward(strided(dy), None, x, weight, None, rstd, None, x.dtype)
    assert (y.dtype, dx.dtype, s, *rest) == (dtype, torch.float32, None, None, None)
    assert torch.equal(y, wide.to(dtype))
    assert_close((wide, dx, dweight), (expected[0], *expected[2:]), 1e-5, ("y", "x", "weight"))


def test_rms_norm_as_autograd_sees_it():
    """The public function: bfloat16 next to a float32 stream, either output unused, each input's gradient."""
    (x, r, z, dy, ds), weight = norm_inputs(24)
    x, z, dy = (v.bfloat16().double() for v in (x, z, dy))
    leaves = x.bfloat16(), r.float(), z.bfloat16(), weight.float()
    for use_y, use_s in ((True, True), (True, False), (False, True)):
        wide = [v.double().requires_grad_() for v in leaves]
        narrow = [v.detach().requires_grad_() for v in leaves]
        results = []
        for (x_, r_, z_, w_), backend in ((wide, "reference"), (narrow, "triton")):
            y, s = rms_norm(x_, w_, 1e-5, z_, backend=backend, residual=r_)
            outputs = [y] * use_y + [s] * use_s
            cotangents = [dy.to(y.dtype)] * use_y + [ds.to(s.dtype)] * use_s
            results.append(torch.autograd.grad(outputs, (x_, r_, z_, w_), cotangents, allow_unused=True))
            assert (y.dtype, s.dtype) == (x_.dtype, r_.dtype)
        for of, a, b in zip((x, r, z, weight), results[1], results[0], strict=True):
            assert a.shape == of.shape and (a.double() - b).norm() <= 1e-2 * b.norm()
        assert [g.dtype for g in results[1]] == [v.dtype for v in leaves]
