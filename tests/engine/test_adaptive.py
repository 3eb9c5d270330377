"""Truncated(window="auto") and Truncated(unbiased=True): the bound that must hold, the expectation that must
be exact."""

import itertools
import math

import pytest
import torch

import adjoint
from adjoint.engine import autograd
from adjoint.engine.decay import BLOCK, Decays
from tests.engine.test_windowed import MIXERS, WindowedBackprop, assert_same, gradients, make, setup

AUTO = adjoint.Truncated("auto", chunk_size=20, tolerance=1e-3)


def slow_model(mixer, seed=0):
    """Layers that forget at different speeds, within the sequence."""
    model = make(mixer, seed)
    with torch.no_grad():
        for k, block in enumerate(model.layers):
            for name, parameter in block.named_parameters():
                if name.endswith(("dt_bias", "dt_proj.bias")):
                    parameter.fill_(-1.0 + 2 * k)
                if name.endswith("A_log"):
                    parameter.fill_(0.0)
                if name.endswith("A_proj.bias"):
                    parameter[: 1 if parameter.numel() == 1 else 4] = -1.0 + 2 * k
    return model


# ------------------------------------------------------------------------------------------------------ auto


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_auto_equals_autograd_with_the_windows_it_reports(mixer):
    model = slow_model(mixer)
    ids = torch.randint(0, 31, (2, 151))
    initial = [tuple(torch.randn_like(s) for s in state) for state in model.initial_state(2)]
    windows = model(ids, labels=ids, method=AUTO).windows
    assert len(windows) == 2 and all(1 <= w <= 151 for w in windows)
    assert windows[0] > windows[1] or "dense" in mixer  # the first layer forgets more slowly
    expected = gradients(model, WindowedBackprop(*windows), ids, initial)
    assert_same(gradients(model, AUTO, ids, initial), expected)


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_auto_drops_nothing_where_nothing_decays_that_far(mixer):
    model, ids, initial = setup(mixer)
    auto = adjoint.Truncated("auto", chunk_size=10, tolerance=1e-300)
    assert model(ids, labels=ids, method=auto).windows == [43, 43]
    assert_same(gradients(model, auto, ids, initial), gradients(model, adjoint.Exact(10), ids, initial))


def adjoint_states(a, g, window):
    """The accumulated adjoint state of each token, every sum written out: a, g (batch, seqlen, channels)."""
    mu = torch.zeros_like(g)
    for i in range(g.shape[1]):
        product = torch.ones_like(g[:, 0])
        for t in range(i, min(i + window, g.shape[1])):
            product = product * a[:, t] if t > i else product
            mu[:, i] += product * g[:, t]
    return mu


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds(tolerance, seed):
    torch.manual_seed(seed)
    # channels of very different memory, the decays of each changing all the time; one forgets at once
    rate = torch.tensor([0.02, 0.2, 1.0, 30.0])
    log_decay = -rate * torch.rand(2, 333, 4, dtype=torch.float64) * 2
    log_decay[:, 100:110, 1] = -math.inf
    decays = Decays()
    for part in log_decay.split([7, 100, 16, 1, 209], dim=1):
        decays.add(part)
    window = decays.window(tolerance, 333)
    g = torch.randn(2, 333, 4, dtype=torch.float64)
    whole, cut = (adjoint_states(log_decay.exp(), g, w) for w in (333, window))
    dropped = (whole - cut).abs().amax((0, 1)) / whole.abs().amax((0, 1))
    assert dropped.max() <= tolerance, (window, dropped)
    if window < 333:  # and the window is no longer than it must be, but for whole blocks
        short = window - 2 * BLOCK
        run = log_decay.clamp_min(-1e4).cumsum(1)
        assert short < 1 or (run[:, short:] - run[:, :-short]).max() > math.log(tolerance)


def test_the_bound_holds_for_dense_matrices_in_the_sum_norm():
    torch.manual_seed(0)
    mixer = slow_model("dense").layers[1].mixer
    inputs, _ = mixer.scan_inputs(torch.randn(1, 200, 16, dtype=torch.float64))
    decays = Decays()
    decays.add(mixer.log_decay(inputs))
    window = decays.window(1e-2, 200)
    assert window < 150
    a, g = inputs.a[0].mT, torch.randn(200, 4, dtype=torch.float64)
    mu = torch.zeros(201, 4, dtype=torch.float64)
    for i in reversed(range(200)):
        mu[i] = g[i] + (a[i + 1] @ mu[i + 1] if i < 199 else 0)
    for i in range(200 - window):
        dropped = mu[i + window]
        for j in range(i + window, i, -1):
            dropped = a[j] @ dropped
        assert dropped.abs().sum() <= 1e-2 * mu[i + window].abs().sum()


@pytest.mark.parametrize("tolerance", [0, 1, -0.1, math.nan, math.inf, "much", True])
def test_bad_tolerances_are_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must be a number between 0 and 1"):
        adjoint.Truncated("auto", tolerance=tolerance)


def test_arguments_that_do_not_go_together_are_refused():
    for message, arguments in (
        ('tolerance goes with window="auto"', {"window": 5, "tolerance": 1e-3}),
        ("unbiased needs a window in tokens", {"window": "auto", "unbiased": True}),
        ("unbiased needs chunk_size below window", {"window": 8, "chunk_size": 8, "unbiased": True}),
        ("unbiased needs chunk_size below window", {"window": 1, "unbiased": True}),
        ("or \"auto\"; got 'all'", {"window": "all"}),
    ):
        with pytest.raises(ValueError, match=message):
            adjoint.Truncated(**arguments)


# -------------------------------------------------------------------------------------------------- unbiased


def small():
    torch.manual_seed(3)
    model = slow_model("mamba")
    ids = torch.randint(0, 31, (1, 22))
    return model, ids, adjoint.Truncated(12, chunk_size=6, unbiased=True)


def flat(model, method, ids):
    loss = model(ids, labels=ids, method=method).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_the_expectation_over_all_cuts_is_the_exact_gradient(monkeypatch):
    """Two layers and three inner edges: all 64 outcomes, each with its probability."""
    model, ids, method = small()
    drawn, expectation = [], 0
    for outcome in itertools.product((0.0, 2.0), repeat=6):
        passing = tuple((math.nan, *outcome[3 * k : 3 * k + 3]) for k in range(2))
        monkeypatch.setattr(
            autograd,
            "draw_passing",
            lambda n_layer, n_chunks, cut, p=passing: p,
        )
        drawn.append(flat(model, method, ids))
        expectation += drawn[-1] / 64  # cut = 6 / 12
    truth = flat(model, adjoint.Exact(6), ids)
    assert (expectation - truth).norm() <= 1e-12 * truth.norm()
    assert (drawn[0] - truth).norm() > 1e-3 * truth.norm()  # cutting everywhere is far from exact


@pytest.mark.slow
def test_the_mean_approaches_the_exact_gradient_at_the_monte_carlo_rate():
    """z-scores of the mean in 8 random directions stay below 5: with normal means (300 draws) a right
    estimator fails with probability below 8 × 5.8e-7, 5 in a million; the squared error falls as 1 / n."""
    model, ids, method = small()
    truth = flat(model, adjoint.Exact(6), ids)
    draws = torch.stack([flat(model, method, ids) for _ in range(300)])
    directions = torch.randn(len(truth), 8, dtype=torch.float64)

    def z(samples):
        along = (samples - truth) @ directions
        return (along.mean(0) / (along.std(0) / math.sqrt(len(samples)))).abs().max()

    assert z(draws) < 5
    unweighted = adjoint.Truncated(6, chunk_size=6)  # the same cuts, always made: biased
    bias = (flat(model, unweighted, ids) - truth) @ directions
    assert (
        bias.abs() / (((draws - truth) @ directions).std(0) / math.sqrt(300))
    ).max() > 5  # it would be seen
    spread = draws.var(0).sum()
    for n in (10, 50):  # the squared error of means of n, times n, is the variance: groups give its mean
        errors = (draws.view(-1, n, len(truth)).mean(1) - truth).square().sum(1) * n / spread
        assert 0.4 < errors.mean() < 2.5, (n, errors)


def test_draws_differ_between_calls_and_repeat_with_the_seed():
    model, ids, method = small()
    torch.manual_seed(0)
    first = [flat(model, method, ids) for _ in range(4)]
    torch.manual_seed(0)
    again = [flat(model, method, ids) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], other) for other in first[1:])
    whole = adjoint.Truncated(22, chunk_size=6, unbiased=True)  # a window over everything cuts nothing
    assert torch.equal(flat(model, whole, ids), flat(model, adjoint.Exact(6), ids))
