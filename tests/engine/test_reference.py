"""The paper's Algorithms 1–4 as written (`paper`) are the methods at every window; the paper's arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adjoint import Backprop, LayerLocal, Truncated
from adjoint.tools.sweep.compare import counted_vjps, truncated_products
from benchmarks.layer_local import mean_cosine
from tests.engine.paper import Counts, layer_local_gradients, saved_share, truncated_gradients, vjp_counts
from tests.model_helpers import assert_same, gradients, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")

STRUCTURES = ["dense", "diagonal", "scalar"]


def make_batch(batch: int, seqlen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels, one of them ignored."""
    ids = make_ids(batch, seqlen, 11, seed)
    labels = ids.clone()
    labels[0, 3] = -100
    return ids, labels


@pytest.mark.sampled(13)
@pytest.mark.parametrize("n_layer", [1, 3])
@pytest.mark.parametrize("structure", [*STRUCTURES, "all three"])
def test_methods_are_the_reference_at_every_window(structure: str, n_layer: int) -> None:
    """And where the paper says so, backpropagation's gradient, by as many vjps as it says."""
    seqlen, tied = 5, n_layer == 1 or structure == "dense"
    mixer = STRUCTURES[:n_layer] if structure == "all three" else structure
    model = make_model(mixer=mixer, n_layer=n_layer, d_model=6, d_intermediate=5, tie_embeddings=tied)
    ids, labels = make_batch(2, seqlen)
    _, exact = gradients(model, ids, labels, Backprop())
    whole, _ = layer_local_gradients(model, ids, labels)
    for window in (*range(1, seqlen + 2), None):
        local, counts = layer_local_gradients(model, ids, labels, window)
        truncated, _ = truncated_gradients(model, ids, labels, window)
        assert counts == vjp_counts(seqlen, n_layer, window)
        reaches_all = window is None or window >= seqlen - 1  # the last token predicts nothing
        assert all(torch.equal(local[name], whole[name]) for name in whole) == reaches_all
        cases = [(LayerLocal(window, chunk_size=2), local)]  # three chunks
        cases += [] if window is None else [(Truncated(window, chunk_size=2), truncated)]
        for method, expected in cases:
            assert_same(gradients(model, ids, labels, method)[1], expected)
        if reaches_all:  # gradients that are handed down are backpropagation's at every depth
            assert_same(truncated, exact)
    # Propositions 2 and 3: the last layer and what is above it; what is left out below is no rounding error
    last = f"layers.{n_layer - 1}.", "norm_f.", "lm_head."
    for name in exact:
        if n_layer == 1 or name.startswith(last):
            assert relative(whole[name], exact[name]) < 1e-10, name
        else:
            assert relative(whole[name], exact[name]) > 1e-3, name


# --------------------------------------------------------------------------------------------------- counting


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


def test_distance_from_the_gradient_grows_with_depth() -> None:
    """The table in docs/paper.md is of longer sequences and more seeds."""
    means = [mean_cosine("diagonal", n_layer, share=0.3, seqlen=8, seeds=4) for n_layer in (1, 2, 4, 8)]
    assert means[0] > 1 - 1e-12
    assert 0.95 > means[2] > means[3] > 0  # a mean of few seeds may rise from 2 to 4 layers
    assert 1 > means[1] > means[3]
