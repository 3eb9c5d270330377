"""Models that run some of their layers in loops: each run has entries of its own in the cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.engine.verification import Refused
from adjoint.hf import layer_segments
from adjoint.hf.split import describe
from adjoint.hf.verify.first_use import verification_of
from tests.hf.hf_models import (
    FAMILIES,
    assert_exact,
    float64_throughout,
    loss_and_gradients,
    make,
    make_batch,
    since,
)

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), since(5, 24, "no class has loops")]
LOOPED = list(FAMILIES["looped depth"])


@pytest.fixture(autouse=True)
def double() -> Any:
    with float64_throughout():
        yield


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize(
    ("seqlen", "chunk_size", "recompute"), [(17, 5, "none"), (33, 8, "selective"), (7, 2, "full")]
)
def test_gradients_are_the_models_own(name: str, seqlen: int, chunk_size: int, recompute: Any) -> None:
    model, inputs = make(name), make_batch(seqlen)
    expected = loss_and_gradients(copy.deepcopy(model), **inputs)
    adjoint.wrap(model, adjoint.Exact(chunk_size=chunk_size, recompute=recompute))
    assert_exact(loss_and_gradients(model, **inputs), expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOOPED)
@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize("training", [True, False])
def test_calls_go_on_from_a_cache(name: str, argument: str, training: bool) -> None:
    """Losses and gradients of two chained calls are those of the whole; the first is given an empty cache."""
    model, ids = make(name), make_batch(24)["input_ids"]
    unwrapped = copy.deepcopy(model)
    labels = ids.clone()
    labels[:, 11] = -100  # predicted by no call
    labels[:, 0] = -100
    loss = unwrapped(input_ids=ids, labels=labels).loss
    loss.backward()
    adjoint.wrap(model, adjoint.Exact(chunk_size=6)).train(training)
    first = model(
        input_ids=ids[:, :11],
        labels=labels[:, :11],
        use_cache=True,
        **{argument: transformers.DynamicCache(config=model.config)},
    )
    second = model(input_ids=ids[:, 11:], labels=labels[:, 11:], **{argument: first.past_key_values})
    weights = torch.tensor([float((labels[:, :11] >= 0).sum()), float((labels[:, 12:] >= 0).sum())])
    chained = (first.loss * weights[0] + second.loss * weights[1]) / weights.sum()
    torch.testing.assert_close(chained, loss, rtol=1e-12, atol=0)
    chained.backward()
    got: dict[str, Tensor] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = {n: p.grad for n, p in unwrapped.named_parameters() if p.grad is not None}
    assert_exact((chained.detach(), got), (loss.detach(), expected))


@pytest.mark.parametrize("name", LOOPED)
def test_transformers_goes_on_from_our_cache(name: str) -> None:
    """`generate` continues from the state of a long prompt as from its own."""
    model, ids = make(name).eval(), make_batch(23)["input_ids"][:1]
    plain = copy.deepcopy(model)
    adjoint.wrap(model, adjoint.Exact(chunk_size=4))
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        expected = plain(input_ids=torch.cat([ids, ids[:, :1]], dim=1), use_cache=False).logits[:, -1]
        got = plain(input_ids=ids[:, :1], cache=cache, use_cache=True).logits[:, -1]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        tokens = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids, **tokens), plain.generate(ids, **tokens))


@pytest.mark.parametrize("name", LOOPED)
def test_layers_in_loops_are_not_divided(name: str) -> None:
    """A stage of a layer's own would run it once: layer shards are refused, segments are not made."""
    model, ids = make(name), make_batch(9)["input_ids"]
    with pytest.raises(Refused, match=r"its layers 1 to 2 run in loops|its layers 2 to 3 run in loops"):
        describe(model, ids)
    adjoint.wrap(model, adjoint.Exact(chunk_size=4))(input_ids=ids, labels=ids)
    assert layer_segments.segments_of(verification_of(model)) is None


def test_a_cache_of_the_last_loop_is_refused_by_name() -> None:
    """Dory's earlier loops attend to other keys with such a cache than without: pieces are not the whole."""
    model, ids = make("DoryForCausalLM", recurrent_kv_cache_mode="last_loop"), make_batch(9)["input_ids"]
    with pytest.raises(Refused, match=r"recurrent_kv_cache_mode='last_loop'.*set it to 'per_loop'"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=4))(input_ids=ids, labels=ids)
    once = make("DoryForCausalLM", recurrent_kv_cache_mode="last_loop", n_recurrent_loops=1)
    adjoint.wrap(once, adjoint.Exact(chunk_size=4))(input_ids=ids, labels=ids).loss.backward()
