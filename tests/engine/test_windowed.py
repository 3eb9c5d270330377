"""Truncated and LayerLocal: chunked tasks against plain autograd over windowed scans, and against Exact."""

import random

import pytest
import torch

import adjoint
from adjoint.batch import Batch, shift_labels
from adjoint.engine.grid import Grid, Tile, make_grid
from adjoint.engine.program import plan
from tests.model_helpers import forward

MIXERS = ["mamba", "mamba2", "diagonal", "scalar", "dense", ["mamba", "dense"]]


class WindowedBackprop:
    """Plain autograd through whole sequences, the recurrence's adjoint windowed by the scans themselves."""

    def __init__(self, *windows):  # one a layer, or one for all
        self.windows = windows

    def run(self, model, batch, states):
        y, final = model.embed(batch.ids), []
        for k, (block, state) in enumerate(zip(model.layers, states, strict=True)):
            inputs, tail = block.mixer.scan_inputs(block.norm(y), state[0])
            scanned, h = block.mixer.scan(inputs, state[-1], window=self.windows[k % len(self.windows)])
            y = block.feed_forward(y + block.mixer.scan_outputs(scanned, inputs))
            final.append((tail, h) if len(state) > 1 else (h,))
        return model.head_loss(y, batch.targets) / batch.divisor, final


def make(mixer, seed=0):
    torch.manual_seed(seed)
    config = adjoint.StackConfig(
        vocab_size=31, d_model=16, n_layer=2, mixer=mixer, d_state=4, headdim=8, ngroups=2, d_intermediate=12
    )
    model = adjoint.Stack(config).double()
    with torch.no_grad():  # larger steps, so that the windows matter and what they drop is not negligible
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "dt_proj.bias")):
                parameter += 2
    return model


def gradients(model, method, ids, initial):
    """All parameters' gradients, then all initial states', of a loss that also looks at the final states."""
    states = [s.requires_grad_() for state in initial for s in state]
    output = forward(model, ids, method, state=initial, return_state=True)
    generator = torch.Generator().manual_seed(1)
    loss = output.loss
    for s in (s for state in output.state for s in state):
        loss = loss + 0.01 * (s * torch.randn(s.shape, generator=generator, dtype=s.dtype)).sum()
    return torch.autograd.grad(loss, [*model.parameters(), *states])


def assert_same(got, expected):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a - b).norm() <= 1e-10 * b.norm().clamp_min(1e-12), i


def setup(mixer):
    model = make(mixer)
    ids = torch.randint(0, 31, (2, 43))
    return model, ids, [tuple(torch.randn_like(s) for s in state) for state in model.initial_state(2)]


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_truncated_equals_autograd_over_windowed_scans(mixer, monkeypatch):
    model, ids, initial = setup(mixer)
    exact = gradients(model, adjoint.Exact(10), ids, initial)
    for window, chunk_sizes in {1: (2, 7), 2: (7, None), 9: (2, 7), 42: (7, None)}.items():
        expected = gradients(model, WindowedBackprop(window), ids, initial)
        for chunk_size in chunk_sizes:
            assert_same(gradients(model, adjoint.Truncated(window, chunk_size), ids, initial), expected)
    assert (
        any((a - b).norm() > 1e-6 * b.norm() for a, b in zip(expected, exact, strict=True))
        or mixer == "dense"
    )
    for window in (43, 1000):
        assert_same(gradients(model, adjoint.Truncated(window, 10), ids, initial), exact)


@pytest.mark.parametrize("method", [adjoint.Truncated(6, 5), adjoint.LayerLocal(6, 5)], ids=lambda m: m.name)
def test_tasks_of_a_layer_may_run_in_any_order(method, monkeypatch):
    model, ids, initial = setup("mamba")
    in_order = gradients(model, method, ids, initial)
    ordered = Grid.order

    def shuffled(grid, stream=False):
        """Layer by layer, the chunks of each in a random order."""
        found = ordered(grid, stream)
        random.Random(0).shuffle(found)
        forward = [t for t in ordered(grid, stream) if t.kind == "F"]
        return forward + sorted((t for t in found if t.kind != "F"), key=lambda t: (-t.stage, t.kind == "B"))

    monkeypatch.setattr(Grid, "order", shuffled)
    plan.cache_clear()
    assert_same(gradients(model, method, ids, initial), in_order)
    plan.cache_clear()


def test_a_task_needs_no_more_than_its_halo():
    grid = make_grid(adjoint.Truncated(6, 10).scheme(43, 10), 43, [False, True, True, False], reach=3)
    tasks = [t for t in grid.backward_tiles() if t.kind == "W"]
    assert len(tasks) == 2 * 5
    assert tasks[1] == Tile("W", 2, 1) and grid.span(tasks[1]) == (7, 10, 20, 25)
    assert tasks[4] == Tile("W", 2, 4) and grid.span(tasks[4]) == (37, 40, 43, 43)
    assert grid.reads(tasks[1]) == [
        *(("y", 1, c) for c in (0, 1, 2)),
        ("S", 2, 0),
        ("dy", 2, 1),
        ("dy", 2, 2),
    ]
    assert grid.writes(tasks[1]) == [("dy", 1, 1), ("spill", 1, 0, 1)]


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_layer_local_gives_every_layer_the_last_cotangent(mixer):
    """Prop. 3, eq. 7, written out with autograd: each block's own vjp with dL/dy_K, nothing passed down."""
    model, ids, _ = setup(mixer)
    for window in (None, 5):
        got = gradients_without_states(model, adjoint.LayerLocal(window, 9), ids)
        y, d_last = hidden(model, ids)
        expected = {}
        for k, block in enumerate(model.layers):
            whole = WindowedBackprop(window or 10**6)
            single = SingleBlock(model, block, k)
            out = whole.run(single, Batch(y[k].detach(), y[k]), [model.initial_state(2)[k]])[0]
            named = dict(block.named_parameters())
            grads = torch.autograd.grad(out, list(named.values()), d_last)
            expected |= {f"layers.{k}.{name}": g for name, g in zip(named, grads, strict=True)}
        for name, gradient in expected.items():
            assert (got[name] - gradient).norm() <= 1e-10 * gradient.norm().clamp_min(1e-12), name
    exact = gradients_without_states(model, adjoint.Exact(9), ids)
    local = gradients_without_states(model, adjoint.LayerLocal(None, 9), ids)
    for name in exact:
        if name.startswith(("layers.1.", "norm_f")):
            assert (local[name] - exact[name]).norm() <= 1e-10 * exact[name].norm().clamp_min(1e-12)
    assert (local["layers.0.norm.weight"] - exact["layers.0.norm.weight"]).norm() > 1e-3 * exact[
        "layers.0.norm.weight"
    ].norm()


class SingleBlock:
    """Makes WindowedBackprop run one block and return its output instead of a loss."""

    def __init__(self, model, block, k):
        self.layers = [block]

    def embed(self, y):
        return y

    def head_loss(self, y, targets):
        return y


def hidden(model, ids):
    y, inputs = model.embed(ids), []
    for block, state in zip(model.layers, model.initial_state(2), strict=True):
        inputs.append(y)
        y, _ = block(y, state)
    y = y.detach().requires_grad_()
    targets = shift_labels(ids)
    return inputs, torch.autograd.grad(model.head_loss(y, targets) / (2 * 42), y)[0]


def gradients_without_states(model, method, ids):
    model.zero_grad()
    model(ids, labels=ids, method=method).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_layer_local_is_exact_for_one_layer():
    torch.manual_seed(0)
    model = adjoint.Stack(
        adjoint.StackConfig(vocab_size=31, d_model=16, n_layer=1, tie_embeddings=False)
    ).double()
    ids = torch.randint(0, 31, (1, 50))
    exact, local = (
        gradients_without_states(model, m, ids) for m in (adjoint.Exact(9), adjoint.LayerLocal(None, 9))
    )
    for name in exact:
        assert (local[name] - exact[name]).norm() <= 1e-10 * exact[name].norm()


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "all"])
def test_bad_windows_are_refused(window):
    with pytest.raises(ValueError, match="window must be a whole number of tokens"):
        adjoint.Truncated(window)
    with pytest.raises(ValueError, match="window must be a whole number of tokens"):
        adjoint.LayerLocal(window)


def test_bad_chunk_sizes_are_refused():
    for make_method in (adjoint.Exact, lambda c: adjoint.Truncated(4, c), lambda c: adjoint.LayerLocal(4, c)):
        with pytest.raises(ValueError, match="chunk_size must be a whole number of tokens"):
            make_method(0)
