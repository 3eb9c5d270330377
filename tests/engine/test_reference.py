"""The paper's Algorithms 1–4 as written (`paper`), against autograd; the paper's arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Stack, StackConfig
from adjoint.methods import LayerLocal, Truncated
from adjoint.tools.sweep.compare import counted_vjps, truncated_products
from tests.engine.paper import (
    Counts,
    adjoint_states,
    layer_forward,
    layer_gradient,
    layer_local_gradients,
    saved_share,
    truncated_gradients,
    vjp_counts,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STRUCTURES = ["dense", "diagonal", "scalar"]
SEQLEN = 12
TOLERANCE = 1e-10


def make_model(structure: str | list[str], n_layer: int, seed: int = 0, **config: object) -> Stack:
    """Weights larger than at initialisation: every path through the model matters for its gradient."""
    sizes = {"vocab_size": 11, "d_model": 6, "d_state": 4, "n_layer": n_layer, "mixer": structure} | config
    torch.manual_seed(seed)
    model = Stack(StackConfig(**sizes)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def make_batch(batch: int = 1, seqlen: int = SEQLEN, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels, one of them ignored."""
    ids = torch.randint(11, (batch, seqlen), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, min(3, seqlen - 1)] = -100
    return ids, labels


def backprop(model: Stack, ids: Tensor, labels: Tensor, method: Any = None) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(model(ids, labels=labels, method=method).loss, parameters)
    return dict(zip(names, grads, strict=True))


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert want.norm() > 0
    return float((got - want).norm() / want.norm())


def cosine(got: dict[str, Tensor], want: dict[str, Tensor], names: list[str]) -> float:
    flat_got, flat_want = (torch.cat([g[name].flatten() for name in names]) for g in (got, want))
    return float(flat_got @ flat_want / (flat_got.norm() * flat_want.norm()))


# ----------------------------------------------------------------------------------------- Algorithms 1 and 2


@pytest.mark.parametrize("structure", STRUCTURES)
def test_forward_is_the_layers(structure: str) -> None:
    mixer = make_model(structure, 1).layers[0].mixer
    x, h = torch.randn(2, SEQLEN, 6, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    stored = layer_forward(mixer, x, h)
    y, (final,) = mixer(x, (h,))
    torch.testing.assert_close(torch.stack(stored.outputs, 1), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stored.states[-1], final, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_adjoint_states_are_derivatives_of_outputs_by_states(structure: str) -> None:
    """λ^{t,i} = ∂y^t/∂h^i: nudge the state after token i and run on from there."""
    mixer = make_model(structure, 1).layers[0].mixer
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    stored = layer_forward(mixer, x)
    for t in range(5):
        states = adjoint_states(stored.A, stored.C, t)
        assert list(states) == list(range(t, -1, -1))
        for i, state in states.items():
            h = stored.states[i + 1]
            for n in range(4):
                nudge = torch.zeros_like(h)
                nudge[0, n] = 1.0  # the recurrence is affine in h: the difference is exact at any size
                if i == t:
                    change = (stored.C[t] @ nudge.unsqueeze(-1)).squeeze(-1)
                else:
                    run = [
                        layer_forward(mixer, x[:, i + 1 : t + 1], start).outputs[-1]
                        for start in (h + nudge, h)
                    ]
                    change = run[0] - run[1]
                torch.testing.assert_close(state[..., n], change, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------- Algorithm 3, and 4 for one layer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_layer_is_autograd(structure: str, seed: int) -> None:
    """Proposition 2 for the parameters, and the same for the inputs; from a state that is not zero."""
    mixer = make_model(structure, 1, seed).layers[0].mixer
    x = torch.randn(2, SEQLEN, 6, dtype=torch.float64, requires_grad=True)
    h, g = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, SEQLEN, 6, dtype=torch.float64)
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    dx, *grads = torch.autograd.grad(mixer(x, (h,))[0], [x, *parameters], g)
    got = layer_gradient(mixer, x, g, initial_state=h)
    assert list(got.parameters) == list(names)
    for name, want in zip(names, grads, strict=True):
        assert relative_error(got.parameters[name], want) < TOLERANCE, name
    assert relative_error(got.x, dx) < TOLERANCE


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_windowed_layer_is_autograd_with_cut_states(structure: str) -> None:
    """Eq. 7 another way: each y^t differentiated from the state W tokens back, which is held constant."""
    mixer = make_model(structure, 1).layers[0].mixer
    seqlen, names = 7, [name for name, _ in mixer.named_parameters()]
    x = torch.randn(1, seqlen, 6, dtype=torch.float64)
    g = torch.randn(1, seqlen, 6, dtype=torch.float64)
    states = layer_forward(mixer, x).states
    for window in range(1, seqlen + 2):
        inputs = x.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for t in range(seqlen):
            first = max(0, t + 1 - window)
            y, _ = mixer(inputs[:, first : t + 1], (states[first],))
            total = total + (y[:, -1] * g[:, t]).sum()
        dx, *grads = torch.autograd.grad(total, [inputs, *mixer.parameters()])
        got = layer_gradient(mixer, x, g, window)
        for name, want in zip(names, grads, strict=True):
            assert relative_error(got.parameters[name], want) < TOLERANCE, (window, name)
        assert relative_error(got.x, dx) < TOLERANCE, window


# ---------------------------------------------------------------------------------------- Algorithm 4, models


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_layer_model_is_backprop(structure: str, batch: int) -> None:
    """Proposition 3 at K = 1, the embedding through the first block's own pullback."""
    for seed in range(2):
        model = make_model(structure, 1, seed, tie_embeddings=False)
        ids, labels = make_batch(batch, seed=seed)
        want = backprop(model, ids, labels)
        got, counts = layer_local_gradients(model, ids, labels)
        assert got.keys() == want.keys()
        for name in got:
            assert relative_error(got[name], want[name]) < TOLERANCE, name
        assert counts == vjp_counts(SEQLEN, 1)


@pytest.mark.parametrize("structure", [*STRUCTURES, STRUCTURES])
def test_last_of_three_layers_is_backprop(structure: str | list[str]) -> None:
    model = make_model(structure, 3, tie_embeddings=False, d_intermediate=5)
    ids, labels = make_batch()
    want = backprop(model, ids, labels)
    got, counts = layer_local_gradients(model, ids, labels)
    exact = [name for name in got if name.startswith(("layers.2.", "norm_f.", "lm_head."))]
    assert len(exact) > 8
    for name in exact:
        assert relative_error(got[name], want[name]) < TOLERANCE, name
    for name in got.keys() - set(exact):  # what Proposition 3 leaves out is no rounding error
        assert relative_error(got[name], want[name]) > 1e-3, name
    assert counts == vjp_counts(SEQLEN, 3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_layers_below_are_autograd_of_each_block_alone(structure: str) -> None:
    """Proposition 3 another way: autograd through each block alone, its input constant, from dL/dy_K."""
    model = make_model(structure, 3, d_intermediate=5)
    ids, labels = make_batch(2, seqlen=8)
    got, _ = layer_local_gradients(model, ids, labels)
    inputs = [model.embed(ids).detach()]
    for block, state in zip(model.layers, model.initial_state(2), strict=True):
        inputs.append(block(inputs[-1], state)[0].detach())
    top = inputs[-1].requires_grad_()
    logits, targets = model.logits(top)[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    dy, head = torch.autograd.grad(loss, [top, model.embedding.weight])
    for k, (block, state) in enumerate(zip(model.layers, model.initial_state(2), strict=True)):
        names, parameters = zip(*block.named_parameters(), strict=True)
        y = inputs[k].detach().requires_grad_()
        d_input, *grads = torch.autograd.grad(block(y, state)[0], (y, *parameters), dy)
        if k == 0:
            d_embedded = d_input
        for name, want in zip(names, grads, strict=True):
            assert relative_error(got[f"layers.{k}.{name}"], want) < TOLERANCE, (k, name)
    # tied: the head's part, and what the first block hands down
    table = head.index_add(0, ids.flatten(), d_embedded.flatten(0, 1))
    assert relative_error(got["embedding.weight"], table) < TOLERANCE


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("structure", [*STRUCTURES, STRUCTURES])
def test_propagated_is_backprop_at_every_depth(structure: str | list[str], tie_embeddings: bool) -> None:
    model = make_model(structure, 3, tie_embeddings=tie_embeddings, d_intermediate=0 if tie_embeddings else 5)
    ids, labels = make_batch(2, seqlen=6)
    want = backprop(model, ids, labels)
    for window in (None, 6, 100):
        got, _ = truncated_gradients(model, ids, labels, window)
        assert got.keys() == want.keys()
        for name in want:
            assert relative_error(got[name], want[name]) < TOLERANCE, (window, name)
    # 5 would reach as far as 6: the last token predicts nothing
    got, _ = truncated_gradients(model, ids, labels, 4)
    assert relative_error(got["layers.0.mixer.B_proj.weight"], want["layers.0.mixer.B_proj.weight"]) > 1e-8


# ------------------------------------------------------------------ the methods, which do it in linear time


@pytest.mark.parametrize("n_layer", [1, 3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_methods_are_the_reference_at_every_window(structure: str, n_layer: int) -> None:
    seqlen = 5  # three chunks
    model = make_model(structure, n_layer, d_intermediate=5)
    ids, labels = make_batch(2, seqlen)
    for window in (*range(1, seqlen + 1), None):
        local, _ = layer_local_gradients(model, ids, labels, window)
        truncated, _ = truncated_gradients(model, ids, labels, window)
        cases = [(LayerLocal(window, chunk_size=2), local)]
        if window is not None:
            cases.append((Truncated(window, chunk_size=2), truncated))
        for method, want in cases:
            got = backprop(model, ids, labels, method)
            for name in want:
                assert relative_error(got[name], want[name]) < TOLERANCE, (method, name)


# --------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("structure", STRUCTURES)
def test_counted_vjps_are_the_formula_for_every_window(structure: str) -> None:
    seqlen, n_layer = 6, 3
    model = make_model(structure, n_layer)
    ids, labels = make_batch(seqlen=seqlen)
    whole, whole_counts = layer_local_gradients(model, ids, labels)
    for window in range(1, seqlen + 2):
        got, counts = layer_local_gradients(model, ids, labels, window)
        assert counts == vjp_counts(seqlen, n_layer, window)
        same = all(torch.equal(got[name], whole[name]) for name in whole)
        assert same == (window >= seqlen - 1)  # the last token predicts nothing: nothing reaches back from it
    assert whole_counts == vjp_counts(seqlen, n_layer)


def test_number_of_products_is_the_number_of_pairs() -> None:
    for seqlen in range(1, 30):
        for window in range(1, 35):
            pairs = sum(1 for t in range(seqlen) for i in range(seqlen) if t - window < i <= t)
            assert truncated_products(seqlen, window) == pairs
        assert truncated_products(seqlen) == seqlen * (seqlen + 1) // 2
    with pytest.raises(ValueError, match="seqlen must be a whole number"):
        truncated_products(0)
    assert vjp_counts(10, 5, 3) == Counts(A=135, B=135, C=50)
    assert vjp_counts(10, 5, 3).total() == counted_vjps("layer-local", [3] * 5, 10) == 320
    assert vjp_counts(10, 2) + vjp_counts(10, 3) == vjp_counts(10, 5)


def test_the_papers_64_percent_and_its_plus() -> None:
    assert round(saved_share(10_000, 2_000), 2) == 0.64
    with_the_papers_plus = 2_000 * 10_000 + 2_000 * 1_999 // 2
    assert round(1 - with_the_papers_plus / truncated_products(10_000), 2) == 0.56
    assert saved_share(100, 100) == saved_share(100, 1000) == 0


# ------------------------------------------------------------------------------------- how far Prop. 3 is off


@torch.no_grad()
def model_with_share(structure: str, n_layer: int, share: float, ids: Tensor, seed: int) -> Stack:
    """Random weights, embeddings of size 1; the first layer adds an output `share` times as large as they."""
    torch.manual_seed(seed)
    config = StackConfig(11, 8, n_layer, structure, d_state=4, tie_embeddings=False, initializer_range=1.0)
    model = Stack(config).double()
    for block in model.layers:
        torch.nn.init.zeros_(block.mixer.A_proj.bias)  # decays around one half
        torch.nn.init.normal_(block.mixer.A_proj.weight, std=0.5)
    y, block = model.embed(ids), model.layers[0]
    size = (block(y, model.initial_state(len(ids))[0])[0] - y).norm() / y.norm()
    for block in model.layers:
        block.mixer.C_proj.weight *= share / size
        block.mixer.C_proj.bias *= share / size
    return model


def mean_cosines(structure: str, share: float, seqlen: int, seeds: int) -> list[float]:
    """Cosine of Proposition 3 with backpropagation, all mixers' parameters, at 1, 2, 4 and 8 layers."""
    means = []
    for n_layer in (1, 2, 4, 8):
        cosines = []
        for seed in range(seeds):
            ids, labels = make_batch(seqlen=seqlen, seed=seed)
            model = model_with_share(structure, n_layer, share, ids, seed)
            got, _ = layer_local_gradients(model, ids, labels)
            names = [name for name in got if ".mixer." in name]
            cosines.append(cosine(got, backprop(model, ids, labels), names))
        means.append(sum(cosines) / seeds)
    print(f"{structure}, share {share}: " + ", ".join(f"{value:.2f}" for value in means))
    return means


def test_distance_from_the_gradient_grows_with_depth() -> None:
    """`pytest -rP` shows the figures; the table in docs/paper.md is the slow test's."""
    means = mean_cosines("diagonal", share=0.3, seqlen=8, seeds=4)
    assert means[0] > 1 - 1e-12
    assert 0.95 > means[2] > means[3] > 0  # a mean of few seeds may rise from 2 to 4 layers
    assert 1 > means[1] > means[3]


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "scalar"])
def test_distance_from_the_gradient_grows_with_depth_and_share(structure: str) -> None:
    table = [mean_cosines(structure, share, seqlen=24, seeds=8) for share in (0.1, 0.3, 1.0)]
    for means in table:
        assert means[0] > 1 - 1e-12
        assert min(means) == means[3]
        assert max(means[1:]) < 1
    for small, large in itertools.pairwise(table):
        assert all(a > b for a, b in zip(small[1:], large[1:], strict=True))
