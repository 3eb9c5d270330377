"""Digits that float32 keeps over many tokens and on hard inputs, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Exact, Stack, StackConfig
from adjoint.batch import divisor_of
from adjoint.engine import tile
from adjoint.engine.tile import Gradients
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.modal_scan import modal_scan
from adjoint.kernels.rms_norm import rms_norm
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan
from tests.kernels.helpers import BACKENDS, INTERPRETED
from tests.model_helpers import relative

pytestmark = pytest.mark.usefixtures("one_thread")

Operation = Callable[..., Any]
EXACT = "reference"  # which computes in float64 what to expect: quickly, where kernels are interpreted
LARGE = 2.0**24  # the first float32 to which adding 1 changes nothing


def norm(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    return rms_norm(x, weight, eps=0.0, backend=backend)


def conv(x: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Tensor:
    return causal_conv1d(x, weight, bias, backend=backend)[0]


def modal(x: Tensor, A: Tensor, R: Tensor, D: Tensor, backend: str) -> Tensor:
    return modal_scan(x, A, R, D, backend=backend)[0]


def selective(x: Tensor, A: Tensor, D: Tensor, bias: Tensor, backend: str) -> Tensor:
    delta, B = x * 0.5, x[:, :, :3]
    return selective_scan(x, delta, A, B, B, D, None, bias, backend=backend)[0]


def ssd(x: Tensor, A: Tensor, D: Tensor, bias: Tensor, backend: str) -> Tensor:
    x = x.unflatten(-1, (2, -1))
    dt, B = x[..., 0] * 0.5, x[:, :, :1].expand(-1, -1, -1, x.shape[-1])
    return ssd_scan(x, dt, A, B, B, D, None, bias, backend=backend)[0].flatten(2)


def ssd_in_blocks(x: Tensor, A: Tensor, D: Tensor, bias: Tensor, backend: str) -> Tensor:
    """States large enough for the CPU kernels' matrix products."""
    B = x[:, :, None, :4].repeat(1, 1, 1, 4)
    x = x.unflatten(-1, (2, -1)).repeat(1, 1, 1, 8)
    return ssd_scan(x, x[..., 0] * 0.5, A, B, B, D, None, bias, backend=backend)[0].flatten(2)


SUMS = {
    "rms_norm": (norm, [torch.ones(4)]),
    "causal_conv1d": (conv, [torch.full((4, 4), 0.5), torch.ones(4)]),
    "causal_conv1d by blocks": (conv, [torch.full((4, 20), 0.1), torch.ones(4)]),
    "modal_scan": (modal, [-torch.ones(4, 3), torch.ones(4, 3), torch.ones(4)]),
    "selective_scan": (selective, [-torch.ones(4, 3), torch.ones(4), torch.full((4,), 0.1)]),
    "ssd_scan": (ssd, [-torch.ones(2), torch.ones(2), torch.full((2,), 0.1)]),
    "ssd_scan in blocks": (ssd_in_blocks, [-torch.ones(2), torch.ones(2), torch.full((2,), 0.1)]),
}


def gradients(f: Operation, x: Tensor, parameters: list[Tensor], dy: Tensor, backend: str) -> list[Tensor]:
    """Return the parameters' gradients, in x's dtype."""
    leaves = [p.to(x.dtype).requires_grad_() for p in parameters]
    y = f(x, *leaves, backend=backend)
    return list(torch.autograd.grad(y, leaves, dy.to(x.dtype).expand_as(y)))


@pytest.mark.skipif(INTERPRETED, reason="takes minutes under the interpreter")
@pytest.mark.parametrize("name", SUMS)
def test_gradients_summed_over_many_tokens(name: str) -> None:
    """Summands of one sign lose a digit every ten thousand tokens in one float32 sum."""
    f, parameters = SUMS[name]
    x = torch.rand(1, (1 << 17) + 5, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    expected = gradients(f, x.double(), parameters, torch.ones(1), BACKENDS[-1])
    for backend in BACKENDS:
        for a, b in zip(gradients(f, x, parameters, torch.ones(1), backend), expected, strict=True):
            assert relative(a, b) < 1e-6, backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SUMS)
def test_many_small_summands_beside_a_large_one(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running float32 sum of the weight's, bias' or D's gradient from 2^24 on would lose every 1."""
    f, parameters = SUMS[name]
    seqlen = 643
    if INTERPRETED:  # one program takes all tokens
        from adjoint.kernels.selective_scan.triton import launch
        from adjoint.kernels.triton import common

        seqlen = 203
        monkeypatch.setattr(common, "programs_that_fill", lambda *_: 1)
        monkeypatch.setattr(launch, "STRETCHES_TOGETHER", 2)
    x, dy = torch.ones(1, seqlen, 4), torch.ones(1, seqlen, 1)
    dy[:, [0, -1]] = LARGE
    got, expected = (
        gradients(f, x.to(dtype), parameters, dy, by)[0 if f is norm else 1].double()
        for dtype, by in ((torch.float32, backend), (torch.float64, EXACT))
    )
    assert (got - expected).abs().max() < 0.5 * (expected.max() % (2 * LARGE))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_decays_near_1_of_many_chunks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk leaves of the state what is 20.4 roundings below 1."""
    seqlen, chunk = 8192, 256
    if INTERPRETED:
        from adjoint.kernels.ssd_scan.triton import saved_states

        seqlen, chunk = 512, saved_states.TILE[4]
        monkeypatch.setitem(saved_states.CHUNK, 4, chunk)
    rate = 20.4 * 2.0**-24 / chunk
    x, B, h = torch.zeros(1, seqlen, 1, 1), torch.ones(1, seqlen, 1, 1), torch.ones(1, 1, 1, 1)
    inputs = [x, torch.full((1, seqlen, 1), rate), -torch.ones(1), B, B]
    got, expected = (
        ssd_scan(*(t.to(dtype) for t in inputs), initial_state=h.to(dtype), backend=by)[1].double()
        for dtype, by in ((torch.float32, backend), (torch.float64, EXACT))
    )
    assert relative(1 - got, 1 - expected) < 0.01


def linear(a: Tensor, b: Tensor, state: Tensor, backend: str) -> tuple[Tensor, ...]:
    return (linear_scan(a, b, state, backend=backend),)


def results(f: Operation, inputs: list[Tensor], backend: str) -> list[Tensor]:
    """Outputs, and gradients of the inputs."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = f(*leaves, backend=backend)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, cotangents)]


def assert_same_digits(f: Operation, inputs: list[Tensor], backend: str, rtol: float) -> None:
    """Raise AssertionError unless results in float32 are those in float64."""
    expected = results(f, [t.double() for t in inputs], EXACT if INTERPRETED else backend)
    for a, b in zip(results(f, inputs, backend), expected, strict=True):
        assert relative(a, b) < rtol


@pytest.mark.skipif(INTERPRETED, reason="takes minutes under the interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("rate", [1e-3, 1e-5])
@pytest.mark.parametrize("d_state", [3, 16])
def test_decays_near_1_over_many_tokens(d_state: int, rate: float, backend: str) -> None:
    """The exponential of a small rate rounds the same way at every token, by 3e-8."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen = 2, 8195

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    def ssd_scan_of(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, backend: str) -> Any:
        return ssd_scan(x, dt, A, B, C, initial_state=h, backend=backend)

    def selective_scan_of(
        u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, backend: str
    ) -> Any:
        return selective_scan(u, dt, A, B, C, initial_state=h, backend=backend)

    A = -torch.tensor([1.0, 2.0, 1e4])
    inputs = [normal(seqlen, 3, 8), torch.full((batch, seqlen, 3), rate), A]
    inputs += [normal(seqlen, 1, d_state), normal(seqlen, 1, d_state), normal(3, 8, d_state)]
    assert_same_digits(ssd_scan_of, inputs, backend, 1e-5)
    states = A[:, None] * torch.linspace(1, 2, d_state)
    inputs = [normal(seqlen, 3), torch.full((batch, seqlen, 3), rate), states]
    inputs += [normal(seqlen, d_state), normal(seqlen, d_state), normal(3, d_state)]
    assert_same_digits(selective_scan_of, inputs, backend, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decays", [1, 5])
def test_a_linear_scan_with_decays_near_1(decays: int, backend: str) -> None:
    """Beside those that are not; what a token takes from the state is as small as its last digit."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen = (1, 150) if INTERPRETED else (2, 32_771)
    rates = torch.tensor([1e-7, 0.0, 1e-4, 0.3, 1.0])[:decays]
    b = torch.randn(batch, seqlen, 5, generator=generator)
    inputs = [(1 - rates).expand(batch, seqlen, decays), b, 100 * b[:, 0]]
    assert_same_digits(linear, inputs, backend, 2e-7)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor, backend: str
) -> tuple[Tensor, ...]:
    return gated_delta_rule(q, k, v, g, beta, initial_state=h, backend=backend)


@pytest.mark.skipif(INTERPRETED, reason="Triton's kernels have registers for differences of sums alone")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strong", [-200.0, -1e4, -1e6])
def test_a_delta_rule_with_a_strong_decay(strong: float, backend: str) -> None:
    """A strong decay leaves those of the tokens after it in a block their digits."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen, heads = 2, 195, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(seqlen, heads, 16), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(normal(seqlen, heads) - 3)
    g[0, 5::50] = strong
    g[1] *= 16
    beta = torch.sigmoid(normal(seqlen, heads))
    inputs = [q, k, normal(seqlen, heads, 24), g, beta, normal(heads, 16, 24)]
    assert_same_digits(delta_rule, inputs, backend, 2e-6)


@pytest.mark.skipif(INTERPRETED, reason="no change in Triton's kernels")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["scalar", "wide", "dplr"])
def test_repeated_keys_whose_sign_turns(rule: str, backend: str) -> None:
    """β = 2 with one key: each token turns a sign, and a rounded k'k would stretch the state each time."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen, heads, d_k, d_v = 2, 515, 3, 20, 12

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    documents = torch.zeros(batch, seqlen, dtype=torch.long)
    documents[0, 200:] = 1
    k = torch.nn.functional.normalize(normal(1, heads, d_k), dim=-1).expand(-1, seqlen, -1, -1).contiguous()
    q, v, h = normal(seqlen, heads, d_k), normal(seqlen, heads, d_v), normal(heads, d_k, d_v)
    g = torch.zeros(batch, seqlen, heads) if rule == "scalar" else torch.zeros_like(k)

    def by_dplr(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor, backend: str) -> Any:
        a, write = k, beta[..., None] * k
        return dplr_delta_rule(q, write, v, a, -write, g, initial_state=h, seq_idx=documents, backend=backend)

    def by_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor, backend: str) -> Any:
        return gated_delta_rule(q, k, v, g, beta, initial_state=h, seq_idx=documents, backend=backend)

    inputs = [q, k, v, g, torch.full((batch, seqlen, heads), 2.0), h]
    rtol = 1e-5 if backend == "triton" else 5e-7
    assert_same_digits(by_dplr if rule == "dplr" else by_gated, inputs, backend, rtol)


LASTING = dict.fromkeys(("ssd_scan", "ssd_scan in blocks", "selective_scan"), (1 << 18, 1e-6))
LASTING["modal_scan"] = 1 << 18, 1e-6
LASTING |= dict.fromkeys(("gated_delta_rule", "kda", "dplr_delta_rule"), (1 << 17, 3e-7))
LASTING["slow dplr_delta_rule"] = 1 << 17, 2e-6


@pytest.mark.skipif(INTERPRETED, reason="takes minutes under the interpreter")
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "reference" else ())
        for name in BACKENDS
        if name != "triton"
    ],
)
@pytest.mark.parametrize("name", LASTING)
def test_states_that_last(name: str, backend: str) -> None:
    """Each rounding of a state without decay stays in it: as many as there are tokens, or blocks."""
    generator = torch.Generator().manual_seed(0)
    tokens, rtol = LASTING[name]
    tokens = tokens // 8 if backend == "reference" else tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, backend: str) -> Any:
        return gated_delta_rule(q, k, v, g, beta, backend=backend)

    def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, backend: str) -> Any:
        return dplr_delta_rule(q, k, v, a, b, g, backend=backend)

    def ssd_scan_of(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, backend: str) -> Any:
        return ssd_scan(x, dt, torch.zeros(1, dtype=x.dtype), B, C, backend=backend)

    def selective_scan_of(u: Tensor, delta: Tensor, B: Tensor, C: Tensor, backend: str) -> Any:
        A = torch.zeros(u.shape[-1], B.shape[-1], dtype=u.dtype)
        return selective_scan(u, delta, A, B, C, backend=backend)

    if name.startswith("ssd_scan"):
        d_state, headdim = (16, 8) if "blocks" in name else (3, 2)
        inputs = [normal(1, headdim), normal(1).abs(), normal(1, d_state), normal(1, d_state)]
        return assert_same_digits(ssd_scan_of, inputs, backend, rtol)
    if name == "selective_scan":
        inputs = [normal(4), normal(4).abs(), normal(4), normal(4)]
        return assert_same_digits(selective_scan_of, inputs, backend, rtol)
    if name == "modal_scan":
        poles = torch.zeros(4, 3)

        def modal_scan_of(u: Tensor, R: Tensor, backend: str) -> Any:
            return modal_scan(u, poles.to(u.dtype), R, backend=backend)

        return assert_same_digits(
            modal_scan_of, [normal(4), torch.randn(4, 3, generator=generator)], backend, rtol
        )
    k = torch.nn.functional.normalize(normal(1, 8)[:, :1], dim=-1).expand(1, tokens, 1, 8).contiguous()
    q, v, beta = normal(1, 8), normal(1, 8), torch.full((1, tokens, 1), 2.0)
    if name == "slow dplr_delta_rule":
        g, beta = -1e-5 * normal(1, 8).abs(), torch.full((1, tokens, 1), 1e-3)
    else:
        g = torch.zeros((1, tokens, 1) if name == "gated_delta_rule" else (1, tokens, 1, 8))
    if "dplr" in name:
        write = beta[..., None] * k
        return assert_same_digits(dplr, [q, write, v, k, -write, g], backend, rtol)
    return assert_same_digits(gated, [q, k, v, g, beta], backend, rtol)


@pytest.mark.skipif(INTERPRETED, reason="takes minutes under the interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d_state", [3, 16])
def test_nothing_is_left_of_a_forgotten_state(d_state: int, backend: str) -> None:
    """Large states and cotangents are forgotten before small ones begin to last."""
    generator = torch.Generator().manual_seed(0)
    tokens, outer = 1152, 384
    steps = torch.full((1, tokens, 1), 2.0**-20)
    steps[:, outer:-outer] = 2.0  # nothing is left of a state after these
    x, B, C = (torch.randn(1, tokens, 1, n, generator=generator) for n in (8, d_state, d_state))
    x /= steps[..., None]
    x[:, :outer] *= 2.0**30
    x[:, outer:-outer] = 0
    dy = torch.randn(1, tokens, 1, 8, generator=generator)
    dy[:, -outer:] *= 2.0**30
    got: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        A = torch.full((1,), -1.0, dtype=dtype)
        y = ssd_scan(leaf, steps.to(dtype), A, B.to(dtype), C.to(dtype), backend=backend)[0]
        (dx,) = torch.autograd.grad(y, leaf, dy.to(dtype))
        got.append([y[:, -outer:].detach(), dx[:, :outer]])
    assert all(relative(a, b) < 1e-5 for a, b in zip(*got, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
@pytest.mark.parametrize("additions", [tile.MAX_PLAIN_ADDITIONS, 16])
def test_sums_over_many_chunks(additions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks' gradients as one, one by one or with others of their kind; the first may be the largest.

    Vectors' sums are compensated, matrices' after as many additions."""
    monkeypatch.setattr(tile, "MAX_PLAIN_ADDITIONS", additions)
    vector, scalar, matrix = torch.zeros(3), torch.zeros(()), torch.zeros(2, 2)
    generator = torch.Generator().manual_seed(0)
    terms = [
        {p: torch.rand(p.shape, generator=generator) + 0.5 for p in (vector, scalar, matrix)}
        for _ in range(5_000)
    ]
    for add_together in (False, True):
        sums = Gradients()
        for chunk in terms:
            if add_together:
                sums.add_all([*chunk.items(), (vector, chunk[vector].bfloat16())])
            else:
                for parameter, gradient in chunk.items():
                    sums.add(parameter, gradient)
        for parameter in (vector, scalar, matrix):
            expected = sum(chunk[parameter].double() for chunk in terms)
            if add_together and parameter is vector:
                expected = expected + sum(chunk[vector].bfloat16().double() for chunk in terms)
            got = sums.get(parameter)
            assert got is not None
            plain_sum = parameter is matrix and additions > 16
            assert relative(got, expected) < (1e-5 if plain_sum else 1e-7 if parameter is matrix else 6e-8)


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_losses_summed_over_many_chunks() -> None:
    """A float32 sum of a thousand equal losses would round each time to the same side."""
    torch.manual_seed(0)
    model = Stack(StackConfig(mixer="scalar", d_model=4, n_layer=1, d_state=2, vocab_size=11))
    ids = torch.full((1, 2048), 3)
    with torch.no_grad():
        single = model(ids, labels=ids, method=Exact(chunk_size=2)).loss
        double = model.double()(ids, labels=ids, method=Exact(chunk_size=2048)).loss
    assert single.dtype == torch.float32
    assert abs(single.item() - double.item()) < 1.2e-7 * double.item()


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_labels_are_counted_exactly() -> None:
    """More of them than float32 has whole numbers without gaps."""
    assert divisor_of(torch.zeros(1, 1, dtype=torch.long).expand(1, 2**24 + 3)) == 2**24 + 3
