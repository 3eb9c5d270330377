"""Every backend of every scan against a plain loop under autograd, in float64: outputs, states and all
gradients."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from adjoint.kernels import dispatch, reference
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan

BACKENDS = [name for name in ("reference", "cpu") if dispatch.why_not(name) is None]
WINDOWS = (1, 2, 3, 17, 64, 65, 130, 131, 132)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()


def gradients(outputs, inputs):
    """Gradients of a fixed random combination of all outputs."""
    total = sum((y * randn(*y.shape, seed=7)).sum() for y in outputs)
    return torch.autograd.grad(total, inputs, allow_unused=True)


def assert_same(got, expected, tolerance=1e-12):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert relative(a, b) <= tolerance, f"tensor {i}: {relative(a, b):.1e}"


def documents(batch, seqlen):
    return (torch.rand(batch, seqlen, generator=torch.Generator().manual_seed(3)) < 0.08).cumsum(1)


def same_document(seq_idx, t):
    return torch.ones(len(seq_idx), dtype=torch.bool) if t == 0 else seq_idx[:, t] == seq_idx[:, t - 1]


def selective_inputs(batch, seqlen, d_inner, d_state):
    inputs = [
        randn(batch, seqlen, d_inner),
        randn(batch, seqlen, d_inner, seed=1),
        -randn(d_inner, d_state).exp(),
    ]
    inputs += [randn(batch, seqlen, d_state), randn(batch, seqlen, d_state, seed=1), randn(d_inner)]
    inputs += [randn(batch, seqlen, d_inner, seed=2), randn(d_inner, seed=1), randn(batch, d_inner, d_state)]
    return [x.requires_grad_() for x in inputs]


def selective_loop(u, delta, A, B, C, D, z, bias, h, seq_idx):
    outputs = []
    for t in range(u.shape[1]):
        d = F.softplus(delta[:, t] + bias)
        a = torch.exp(d.unsqueeze(-1) * A) * same_document(seq_idx, t)[:, None, None]
        B_t, C_t = (x[:, t] if x.dim() == 4 else x[:, t].unsqueeze(1) for x in (B, C))  # 4: one a channel
        h = a * h + (d * u[:, t]).unsqueeze(-1) * B_t
        outputs.append(((h * C_t).sum(-1) + D * u[:, t]) * F.silu(z[:, t]))
    return torch.stack(outputs, dim=1), h


def run_selective(inputs, **options):
    return selective_scan(*inputs[:8], delta_softplus=True, initial_state=inputs[8], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 131, 19, 5), (1, 300, 40, 16), (3, 1, 8, 16), (1, 2, 9, 33)])
def test_selective_scan_equals_loop(backend, shape):
    inputs = selective_inputs(*shape)
    seq_idx = documents(*shape[:2])
    expected = selective_loop(*inputs, seq_idx)
    got = run_selective(inputs, seq_idx=seq_idx, backend=backend)
    assert_same(got, expected)
    assert_same(gradients(got, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ngroups", [1, 2, 6])
def test_selective_scan_with_groups_equals_loop(backend, ngroups):
    inputs, seq_idx = selective_inputs(2, 67, 12, 5), documents(2, 67)
    inputs[3], inputs[4] = (randn(2, 67, ngroups, 5, seed=seed).requires_grad_() for seed in (5, 6))
    a_channel = [x.repeat_interleave(12 // ngroups, dim=2) for x in inputs[3:5]]
    expected = selective_loop(*inputs[:3], *a_channel, *inputs[5:], seq_idx)
    got = run_selective(inputs, seq_idx=seq_idx, backend=backend)
    assert_same(got, expected)
    assert_same(gradients(got, inputs), gradients(expected, inputs))
    with pytest.raises(ValueError, match="B's ngroups must divide d_inner = 12, got 5"):
        selective_scan(*inputs[:3], *(randn(2, 67, 5, 5) for _ in range(2)))
    with pytest.raises(ValueError, match=rf"C must have shape \(2, 67, {ngroups}, 5\), got \(2, 67, 5\)"):
        selective_scan(*inputs[:4], randn(2, 67, 5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_selective_scan_optional_arguments(backend):
    u, delta, A, B, C, *_ = selective_inputs(2, 37, 11, 16)
    delta = delta.detach().abs().requires_grad_()
    zero = torch.zeros(11, dtype=torch.float64)
    y, final = selective_scan(u, delta, A, B, C, backend=backend)
    a = torch.exp(delta.unsqueeze(-1) * A)
    states = reference.recurrence(a, (delta * u).unsqueeze(-1) * B.unsqueeze(2))
    expected = (states * C.unsqueeze(2)).sum(-1), states[:, -1]
    assert_same((y, final), expected)
    inputs = (u, delta, A, B, C)
    assert_same(gradients((y, final), inputs), gradients(expected, inputs))
    assert torch.equal(y, selective_scan(u, delta, A, B, C, delta_bias=zero, backend=backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_selective_scan_in_two_pieces_equals_one(backend):
    inputs = selective_inputs(2, 131, 19, 16)
    u, delta, A, B, C, D, z, bias, h = inputs
    first, second = slice(0, 70), slice(70, 131)
    outputs, state = [], h
    for s in (first, second):
        y, state = selective_scan(
            u[:, s],
            delta[:, s],
            A,
            B[:, s],
            C[:, s],
            D,
            z[:, s],
            bias,
            True,
            initial_state=state,
            backend=backend,
        )
        outputs.append(y)
    pieces, whole = (torch.cat(outputs, dim=1), state), run_selective(inputs, backend=backend)
    assert_same(pieces, whole)
    assert_same(gradients(pieces, inputs), gradients(whole, inputs))


def brute_window(g, a, window):
    """mu_i as the sum it is defined by, each product of decays multiplied out anew; a[:, 0] leads from the
    virtual token 0."""
    mu = torch.zeros_like(g)
    for i in range(g.shape[1]):
        for t in range(i, min(g.shape[1], i + window)):
            mu[:, i] += a[:, i + 1 : t + 1].prod(1) * g[:, t]
    return mu


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 16, 21, 22, 23, 24, 100])
@pytest.mark.parametrize("special", [None, 1.0, 1 - 1e-12, 1e-300])
def test_accumulated_adjoint_equals_brute_force(window, special):
    g, a = randn(2, 23, 3), torch.sigmoid(randn(2, 23, 3, seed=1))
    if special is not None:
        a = torch.where(randn(2, 23, 3, seed=2) > 0, torch.full_like(a, special), a)
    expected = brute_window(g, a, window)
    assert relative(reference.accumulated_adjoint(g, a, window), expected) <= 1e-10
    for backend in BACKENDS:
        b = torch.zeros_like(g).requires_grad_()
        (mu,) = torch.autograd.grad(linear_scan(a, b, window=window, backend=backend), b, g)
        assert relative(mu, expected) <= 1e-10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("halo", [0, 7])
@pytest.mark.parametrize("window", WINDOWS)
def test_windowed_selective_scan_is_the_same_in_every_backend(window, halo):
    inputs = selective_inputs(2, 131, 19, 16)
    results = []
    for backend in BACKENDS:
        outputs = run_selective(inputs, window=window, halo=halo, seq_idx=documents(2, 131), backend=backend)
        results.append(gradients(outputs, inputs))
    for result in results[1:]:
        assert_same(result, results[0])
    if window > 131 and halo == 0:
        assert_same(results[0], gradients(run_selective(inputs, seq_idx=documents(2, 131)), inputs))


@pytest.mark.parametrize("window", [1, 4, 17])
def test_windowed_gradient_of_the_selective_scan_equals_brute_force(window):
    u, delta, A, B, C, *_ = selective_inputs(1, 17, 3, 4)
    y, _ = selective_scan(u, delta, A, B, C, delta_softplus=True, window=window)
    dy = randn(1, 17, 3, seed=9)
    du, dB, dA = torch.autograd.grad(y, (u, B, A), dy)
    d = F.softplus(delta)
    a = torch.exp(d.unsqueeze(-1) * A)
    h = reference.recurrence(a, (d * u).unsqueeze(-1) * B.unsqueeze(2))
    mu = brute_window(dy.unsqueeze(-1) * C.unsqueeze(2), a, window)
    before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
    assert_same((du,), (d * (mu * B.unsqueeze(2)).sum(-1),))
    assert_same((dB,), ((mu * (d * u).unsqueeze(-1)).sum(2),))
    assert_same((dA,), ((mu * a * before * d.unsqueeze(-1)).sum((0, 1)),))


def ssd_inputs(batch, seqlen, nheads, headdim, ngroups, d_state):
    inputs = [randn(batch, seqlen, nheads, headdim), randn(batch, seqlen, nheads), -randn(nheads).exp()]
    inputs += [randn(batch, seqlen, ngroups, d_state), randn(batch, seqlen, ngroups, d_state, seed=1)]
    inputs += [randn(nheads, seed=1), randn(nheads, seed=2), randn(batch, nheads, headdim, d_state, seed=1)]
    return [x.requires_grad_() for x in inputs]


def ssd_loop(x, dt, A, B, C, D, bias, h, seq_idx):
    repeat, outputs = x.shape[2] // B.shape[2], []
    for t in range(x.shape[1]):
        d = F.softplus(dt[:, t] + bias)
        a = torch.exp(d * A) * same_document(seq_idx, t)[:, None]
        B_t, C_t = (v[:, t].repeat_interleave(repeat, dim=1).unsqueeze(2) for v in (B, C))
        h = a[..., None, None] * h + (d.unsqueeze(-1) * x[:, t]).unsqueeze(-1) * B_t
        outputs.append((h * C_t).sum(-1) + D.unsqueeze(-1) * x[:, t])
    return torch.stack(outputs, dim=1), h


def run_ssd(inputs, **options):
    x, dt, A, B, C, D, bias, h = inputs
    return ssd_scan(x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True, initial_state=h, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 131, 4, 12, 2, 8), (1, 70, 2, 33, 1, 80), (2, 1, 2, 16, 2, 16)])
def test_ssd_scan_equals_loop(backend, shape):
    inputs = ssd_inputs(*shape)
    seq_idx = documents(*shape[:2])
    expected = ssd_loop(*inputs, seq_idx)
    got = run_ssd(inputs, seq_idx=seq_idx, backend=backend)
    assert_same(got, expected)
    assert_same(gradients(got, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("window", WINDOWS)
def test_windowed_ssd_scan_is_the_selective_scan_with_shared_decays(window):
    """Mamba-2 is Mamba-1 whose channels of a head share delta and A: an independent path to the same windowed
    gradient."""
    x, dt, A, B, C, D, bias, h = inputs = ssd_inputs(2, 131, 3, 5, 1, 8)
    z = randn(*x.shape).requires_grad_()
    repeat = {"delta": dt.repeat_interleave(5, 2), "A": A.repeat_interleave(5)[:, None].expand(15, 8)}
    expected = selective_scan(
        x.flatten(2),
        **repeat,
        B=B.squeeze(2),
        C=C.squeeze(2),
        D=D.repeat_interleave(5),
        z=z.flatten(2),
        delta_bias=bias.repeat_interleave(5),
        delta_softplus=True,
        initial_state=h.flatten(1, 2),
        window=window,
        halo=4,
    )
    expected = expected[0].unflatten(2, (3, 5)), expected[1].unflatten(1, (3, 5))
    expected_gradients = gradients(expected, [*inputs, z])
    for backend in BACKENDS:
        got = run_ssd(inputs, z=z, window=window, halo=4, backend=backend)
        assert_same(got, expected)
        assert_same(gradients(got, [*inputs, z]), expected_gradients)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("structure", ["scalar", "diagonal", "dense"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_scan_equals_loop_and_brute_force_windows(backend, structure):
    batch, seqlen, d_state = 2, 45, 11
    shape = {"scalar": (1,), "diagonal": (d_state,), "dense": (d_state, d_state)}[structure]
    a = (0.3 * randn(batch, seqlen, *shape)).requires_grad_()
    b, h0 = randn(batch, seqlen, d_state).requires_grad_(), randn(batch, d_state).requires_grad_()
    matrices = a if structure == "dense" else torch.diag_embed(a.expand(batch, seqlen, d_state))
    seq_idx = documents(batch, seqlen)
    h, states = h0, []
    for t in range(seqlen):
        kept = h * same_document(seq_idx, t).unsqueeze(-1)
        h = (matrices[:, t] @ kept.unsqueeze(-1)).squeeze(-1) + b[:, t]
        states.append(h)
    expected = torch.stack(states, dim=1)
    got = linear_scan(a, b, h0, seq_idx=seq_idx, backend=backend)
    assert_same((got,), (expected,))
    assert_same(gradients((got,), (a, b, h0)), gradients((expected,), (a, b, h0)))
    g = randn(batch, seqlen, d_state, seed=5)
    for window in (1, 2, 10, 44, 45, 46):
        mu = torch.zeros_like(g)
        d_initial = torch.zeros_like(h0)
        for i in range(-1, seqlen):
            for t in range(max(i, 0), min(seqlen, i + window)):
                v = g[:, t]
                for s in range(t, i, -1):
                    v = (matrices[:, s].mT @ v.unsqueeze(-1)).squeeze(-1)
                if i >= 0:
                    mu[:, i] += v
                else:
                    d_initial += v
        _, db, dh0 = torch.autograd.grad(linear_scan(a, b, h0, window=window, backend=backend), (a, b, h0), g)
        assert relative(db, mu) <= 1e-12 and (dh0 - d_initial).norm() <= 1e-12 * g.norm()
        halo = torch.autograd.grad(linear_scan(a, b, h0, window=window, backend=backend, halo=4), b, g)[0]
        assert relative(halo[:, :-4], mu[:, :-4]) <= 1e-12 and not halo[:, -4:].any()


def brute_dense_window(g, A, window):
    """mu and the initial state's cotangent: every g_t carried back a token at a time, `window` - 1 times."""
    carried, mu = g, g.clone()
    dinitial = torch.zeros_like(g[:, 0])
    for _ in range(min(window, g.shape[1] + 1) - 1):
        carried = (A.mT @ carried.unsqueeze(-1)).squeeze(-1)
        dinitial += carried[:, 0]
        carried = torch.cat([carried[:, 1:], torch.zeros_like(g[:, :1])], dim=1)
        mu += carried
    return mu, dinitial


def dense_inputs(batch, seqlen, d_state):
    """Matrices of norm near 1; in between identities, near-identities and ones whose products underflow."""
    A = randn(batch, seqlen, d_state, d_state) / d_state**0.5
    identity = torch.eye(d_state, dtype=torch.float64)
    kind = (torch.rand(batch, seqlen, generator=torch.Generator().manual_seed(5)) * 12).long()
    for i, scale in enumerate((1.0, 1 - 1e-12, 1e-300)):
        A = torch.where((kind == i)[..., None, None], scale * identity, A)
    inputs = A, randn(batch, seqlen, d_state), randn(batch, d_state)
    return [x.requires_grad_() for x in inputs]


DENSE_SHAPES = [(3, 34, 13), (2, 1, 16)]  # the reference steps token by token in Python: short ones for it
DENSE_CASES = [("reference", shape) for shape in DENSE_SHAPES] + [
    ("cpu", shape) for shape in [*DENSE_SHAPES, (1, 131, 16), (3, 67, 4), (1, 77, 8), (1, 35, 32)]
]


@pytest.mark.parametrize("backend, shape", [case for case in DENSE_CASES if case[0] in BACKENDS])
def test_windowed_dense_scan_equals_brute_force(backend, shape):
    batch, seqlen, d_state = shape
    A, b, h0 = inputs = dense_inputs(*shape)
    seq_idx = documents(batch, seqlen)
    kept = torch.stack([same_document(seq_idx, t) for t in range(seqlen)], dim=1)[..., None, None]
    masked = (A * kept).detach()
    h = linear_scan(A, b, h0, seq_idx=seq_idx, backend="reference").detach()
    before = torch.cat([h0.detach().unsqueeze(1), h[:, :-1]], dim=1)
    g = randn(batch, seqlen, d_state, seed=5)
    windows = {1, 2, 3, 7, 12, 13, 17, 24, 25, 64, seqlen // 2, seqlen - 1, seqlen, seqlen + 1}
    for window in sorted(w for w in windows if 0 < w <= seqlen + 1):
        for halo in sorted({0, seqlen // 5}):
            mu, dinitial = brute_dense_window(g, masked, window)
            mu[:, seqlen - halo :] = 0
            got = linear_scan(A, b, h0, window=window, seq_idx=seq_idx, backend=backend, halo=halo)
            dA, db, dh0 = torch.autograd.grad(got, inputs, g)
            assert_same((db, dA), (mu, mu.unsqueeze(-1) * before.unsqueeze(-2) * kept))
            assert (dh0 - dinitial).norm() <= 1e-12 * g.norm()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 2, 9, 300, 699, 700])
def test_dense_scan_gives_the_same_bits_on_any_number_of_threads(batch, window):
    A, b, h0 = inputs = [x.detach().float().requires_grad_() for x in dense_inputs(batch, 700, 32)]
    h = linear_scan(A, b, h0, window=window)
    g = randn(batch, 700, 32, seed=5).float()
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(torch.autograd.grad(h, inputs, g, retain_graph=True))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_conv1d_equals_torch(backend):
    x, weight, bias, state = inputs = [
        v.requires_grad_() for v in (randn(2, 37, 21), randn(21, 4), randn(21), randn(2, 21, 3))
    ]
    padded = torch.cat([state, x.transpose(1, 2)], dim=2)
    expected = (
        F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=21)).transpose(1, 2),
        padded[:, :, -3:],
    )
    got = causal_conv1d(x, weight, bias, state, silu=True, backend=backend)
    assert_same(got, expected)
    assert_same(gradients(got, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_conv1d_never_reaches_into_another_document(backend):
    x, weight, bias, state = inputs = [
        v.requires_grad_() for v in (randn(1, 20, 5), randn(5, 4), randn(5), randn(1, 5, 3))
    ]
    cuts, pieces = [0, 2, 3, 11, 20], []
    for i in range(4):
        before = state if i == 0 else torch.zeros_like(state)
        pieces.append(
            causal_conv1d(x[:, cuts[i] : cuts[i + 1]], weight, bias, before, silu=True, backend=backend)[0]
        )
    seq_idx = torch.tensor([[i for i in range(4) for _ in range(cuts[i], cuts[i + 1])]])
    got = causal_conv1d(x, weight, bias, state, silu=True, seq_idx=seq_idx, backend=backend)[0]
    expected = torch.cat(pieces, dim=1)
    assert_same((got,), (expected,))
    assert_same(gradients((got,), inputs), gradients((expected,), inputs))


def delta_inputs(batch, seqlen, nheads, d_k, d_v):
    inputs = [
        randn(batch, seqlen, nheads, d_k),
        F.normalize(randn(batch, seqlen, nheads, d_k, seed=1), dim=-1),
    ]
    inputs += [randn(batch, seqlen, nheads, d_v, seed=2), -F.softplus(randn(batch, seqlen, nheads) - 2)]
    inputs += [randn(batch, seqlen, nheads, seed=1).sigmoid(), randn(batch, nheads, d_k, d_v)]
    return [x.requires_grad_() for x in inputs]


def delta_loop(q, k, v, g, beta, state, seq_idx):
    """The rule as its paper writes it, token by token (eq. 10)."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * (g[:, t].exp() * same_document(seq_idx, t)[:, None])[..., None, None]
        missing = v[:, t] - (state.mT @ k[:, t].unsqueeze(-1)).squeeze(-1)
        state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * missing).unsqueeze(-2)
        outputs.append((state.mT @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [(2, 131, 3, 12, 20), (1, 200, 2, 33, 7), (2, 1, 1, 16, 16), (1, 64, 2, 64, 64)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_gated_delta_rule_equals_loop(backend, shape, packed):
    inputs = delta_inputs(*shape)
    seq_idx = documents(*shape[:2]) * packed
    expected = delta_loop(*inputs, seq_idx)
    got = gated_delta_rule(*inputs, seq_idx=seq_idx, backend=backend)
    assert_same(got, expected)
    assert_same(gradients(got, inputs), gradients(expected, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_states_included(backend):
    inputs = selective_inputs(2, 5, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: run_selective(x, backend=backend), inputs, fast_mode=True)
    inputs = ssd_inputs(1, 5, 2, 3, 1, 2)
    assert torch.autograd.gradcheck(lambda *x: run_ssd(x, backend=backend), inputs, fast_mode=True)
    inputs = delta_inputs(1, 5, 2, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, backend=backend), inputs, fast_mode=True)
    a, b, h = [x.requires_grad_() for x in (0.5 * randn(1, 5, 3, 3), randn(1, 5, 3), randn(1, 3))]
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, backend=backend), (a, b, h), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_and_bfloat16_against_float64(backend):
    inputs = selective_inputs(1, 200, 24, 16)
    exact = run_selective(inputs)
    exact_gradients = gradients(exact, inputs)
    single = [x.detach().float().requires_grad_() for x in inputs]
    got = run_selective(single, backend=backend)
    total = sum((y * randn(*y.shape, seed=7).float()).sum() for y in got)
    assert_same(torch.autograd.grad(total, single), exact_gradients, tolerance=1e-5)

    half = [x.detach().bfloat16().requires_grad_() for x in inputs]
    rounded = [x.detach().double().requires_grad_() for x in half]
    y, state = run_selective(half, backend=backend)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    loop = selective_loop(*half, torch.zeros(1, 200, dtype=torch.long))[0]
    exact_y = run_selective(rounded)[0]
    assert relative(y.double(), exact_y) <= relative(loop.double(), exact_y)
    weights = randn(*y.shape, seed=7)
    ours = torch.autograd.grad((y * weights.bfloat16()).sum(), half[:5])
    plain = torch.autograd.grad((loop * weights.bfloat16()).sum(), half[:5])
    true = torch.autograd.grad((exact_y * weights).sum(), rounded[:5])
    for mine, theirs, truth in zip(ours, plain, true, strict=True):
        assert relative(mine.double(), truth) <= relative(theirs.double(), truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_stays_accurate_with_decays_near_one_and_underflowing_products(backend):
    for rate in (1e-6, 30.0):
        u, _, _, B, C, *_ = selective_inputs(1, 400, 16, 16)
        delta, A = torch.ones_like(u), torch.full((16, 16), -rate, dtype=torch.float64)
        dy = randn(1, 400, 16, seed=4)
        exact = torch.autograd.grad(selective_scan(u, delta, A, B, C, window=150)[0], (u, B, C), dy)
        single = [x.detach().float().requires_grad_() for x in (u, delta, A, B, C)]
        y, _ = selective_scan(*single, window=150, backend=backend)
        assert_same(
            torch.autograd.grad(y, (single[0], single[3], single[4]), dy.float()), exact, tolerance=1e-5
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window must be"),
        ({"window": -3}, "window must be"),
        ({"window": 2.5}, "window must be"),
        ({"halo": 5}, "halo must be"),
        ({"backend": "cuda"}, "there is no such backend"),
        ({"D": torch.zeros(3)}, "D must have shape"),
        ({"seq_idx": torch.zeros(1, 4)}, "seq_idx must have shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    u, delta, A, B, C, *_ = selective_inputs(1, 5, 4, 3)
    with pytest.raises(ValueError, match=message):
        selective_scan(u, delta, A, B, C, **change)


def test_no_grad_saves_nothing_and_gives_the_same():
    inputs = selective_inputs(1, 50, 8, 16)
    with torch.no_grad():
        quiet = run_selective(inputs)
    assert torch.equal(quiet[0], run_selective(inputs)[0]) and quiet[0].grad_fn is None


def test_loading_the_compiled_kernels_leaves_denormals_alone():
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    cpu_build.load()
    assert (torch.tensor([1e-40]) * 1.0).item() > 0


def test_without_a_compiler_there_is_one_warning_and_the_reference():
    code = (
        "import warnings, torch; warnings.simplefilter('always')\n"
        "from adjoint.kernels.selective_scan import selective_scan\n"
        "x = torch.ones(1, 4, 2); A = -torch.ones(2, 3); B = torch.ones(1, 4, 3)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    selective_scan(x, x, A, B, B); selective_scan(x, x, A, B, B)\n"
        "from adjoint.kernels import dispatch\n"
        "print(len([w for w in seen if 'compiled CPU kernels' in str(w.message)]), dispatch.backends())"
    )
    environment = {**os.environ, "ADJOINT_DISABLE_CPU_KERNELS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[0].startswith("1 ['reference'")


def test_triton_is_asked_for_by_name_and_refused_where_it_cannot_run():
    x, A, B = torch.ones(1, 4, 2), -torch.ones(2, 3), torch.ones(1, 4, 3)
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        assert "triton" not in dispatch.backends()
        with pytest.raises(ValueError, match="backend 'triton' is not usable here"):
            selective_scan(x, x, A, B, B, backend="triton")
    code = (
        "import torch, adjoint\n"
        "assert 'triton' in adjoint.backends()\n"
        "x = torch.rand(1, 9, 4); A = -torch.rand(4, 3); B = torch.rand(1, 9, 3)\n"
        "a, b = (adjoint.selective_scan(x, x, A, B, B, backend=k)[0] for k in ('triton', 'reference'))\n"
        "assert (a - b).norm() <= 1e-5 * b.norm()"
    )
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
