"""States from call to call: a call with labels returns transformers' own cache, another goes on from it."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import (
    VOCAB,
    assert_exact,
    by_spans,
    current_gradients,
    float64_throughout,
    make,
    one_line,
)
from tests.hf.multimodal_models import make_multimodal, make_multimodal_batch

transformers = pytest.importorskip("transformers")
from adjoint.hf.transformers_api import cache_argument  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]

BAMBA, MAMBA, LLAMA, MISTRAL = (f"{n}ForCausalLM" for n in ("Bamba", "Mamba2", "Llama", "Mistral"))
QWEN = "Qwen3_5ForCausalLM"
SEGMENT = 7


def wrapped_copy(model: Any, chunk_size: int = 3) -> Any:
    return adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=chunk_size))


def tokens(seqlen: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCAB, (2, seqlen), generator=torch.Generator().manual_seed(seed))


def run_segments(model: Any, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
    """Backpropagate the loss of each segment; return their sum and the last cache."""
    name, total = cache_argument(inspect.signature(model.forward).parameters), torch.zeros(())
    for segment in ids.split(SEGMENT, dim=1):
        out = model(input_ids=segment, labels=segment, use_cache=True, **{name: cache}, **inputs)
        out.loss.backward()
        total, cache = total + out.loss.detach(), getattr(out, name)
    return total, cache


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", [BAMBA, QWEN, MAMBA, MISTRAL, LLAMA])
def test_segments_are_one_sequence_whose_states_are_cut(name: str) -> None:
    """Ten segments, the last one shorter, against the untouched model, which goes on span by span from
    its own cache of all tokens before."""
    model, ids = make(name), tokens(67)
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    targets[:, SEGMENT - 1 :: SEGMENT] = -100  # a segment's last token has no label
    expected = by_spans(model, ids, targets, SEGMENT)
    wrapped = wrapped_copy(model)
    total, _ = run_segments(wrapped, ids, num_items_in_batch=targets.numel())
    assert_exact((total, current_gradients(wrapped)), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [BAMBA, QWEN, MISTRAL])
def test_the_cache_is_transformers_own(name: str) -> None:
    """The untouched model goes on from it as from its own; a call does not change the cache it is given."""
    model, ids = make(name).eval(), tokens(23)
    wrapped = wrapped_copy(model)
    _, cache = run_segments(wrapped, ids[:, :14])
    assert isinstance(cache, transformers.DynamicCache) and cache.get_seq_length() == 14
    assert type(pickle.loads(pickle.dumps(cache))) is transformers.DynamicCache
    with torch.no_grad():
        without_gradients = wrapped(input_ids=ids, labels=ids, use_cache=True).past_key_values
    assert type(without_gradients) is transformers.DynamicCache
    for kept_cache, requires_grad in ((cache, True), (without_gradients, False)):
        tensors = [t for layer in kept_cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        tensors = [t for t in tensors if t.is_floating_point()]
        assert tensors and all(t.requires_grad == requires_grad for t in tensors)
        assert all(t.untyped_storage().nbytes() < 2 * t.nbytes for t in tensors)
    models_cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :14], past_key_values=models_cache, use_cache=True)
        losses = [
            wrapped(input_ids=ids[:, 14:], labels=ids[:, 14:], past_key_values=start).loss
            for start in (cache, models_cache, cache)
        ]
        # without positions Bamba by itself counts from 0, as its first layer caches no tokens
        positions = torch.arange(14, 23)[None]
        logits = model(ids[:, 14:], past_key_values=cache, position_ids=positions).logits
        expected = model(ids).logits[:, 14:]
    assert torch.allclose(logits, expected, atol=1e-12)
    assert losses[0] == losses[2] and losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, adjoint.Exact(chunk_size=3)) for name in (BAMBA, QWEN, MAMBA, MISTRAL, LLAMA)),
        ("DeepseekV32ForCausalLM", adjoint.Exact(chunk_size=3)),
        ("MiniMaxM3VLForCausalLM", adjoint.Exact(chunk_size=3)),
        (BAMBA, adjoint.Exact(chunk_size=3, checkpoints=2)),
        (MISTRAL, adjoint.Truncated(9, chunk_size=3)),
    ],
)
def test_gradients_into_a_cache_of_an_earlier_call(name: str, method: Any) -> None:
    """A call goes on from the cache that transformers' own forward has made with gradients."""
    model, ids = make(name), tokens(31)
    wrapped = adjoint.wrap(copy.deepcopy(model), method)
    labels = ids.clone()
    labels[:, :15] = labels[:, 23:] = -100  # within Truncated's first window
    with float64_throughout():
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        argument = cache_argument(inspect.signature(model.forward).parameters)
        wrapped.eval()  # the call is transformers' own, then
        with pytest.warns(UserWarning, match="as if not wrapped"):
            cache = getattr(wrapped(input_ids=ids[:, :14], use_cache=True), argument)
        out = wrapped.train()(input_ids=ids[:, 14:], labels=labels[:, 14:], **{argument: cache})
        out.loss.backward()
    assert_exact((out.loss.detach(), current_gradients(wrapped)), (loss.detach(), current_gradients(model)))


@pytest.mark.parametrize(
    ("name", "padding"), [*itertools.product((LLAMA, BAMBA), ("none", "right")), (LLAMA, "left")]
)
@pytest.mark.filterwarnings("ignore:padding between a cache and a row's tokens")  # and at the left
def test_a_trained_cache_below_frozen_weights(name: str, padding: str) -> None:
    """Prefix tuning trains the keys and values before the sequence alone, with rows of different lengths."""
    peft = pytest.importorskip("peft")
    results, ids = [], tokens(31)
    mask = torch.ones_like(ids)
    mask[0, {"none": slice(0), "right": slice(20, None), "left": slice(11)}[padding]] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for wrap in (lambda model: model, lambda model: adjoint.wrap(model, adjoint.Exact(chunk_size=8))):
        if name == LLAMA:
            config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
            torch.manual_seed(0)
            model = wrap(peft.get_peft_model(make(name), config).double().train())
            inputs, trained = {"attention_mask": mask}, [p for p in model.parameters() if p.requires_grad]
        else:
            model = make(name).requires_grad_(False)
            with torch.no_grad():
                cache = model(tokens(5), use_cache=True).past_key_values
            attention = cache.layers[1]
            trained = [attention.keys.requires_grad_(), attention.values.requires_grad_()]
            inputs = {"past_key_values": cache, "position_ids": torch.arange(5, 36)[None]}
            inputs["attention_mask"] = torch.cat([torch.ones(2, 5).long(), mask], dim=1)
            model = wrap(model)
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
        results.append((loss.detach(), {str(i): t.grad.clone() for i, t in enumerate(trained)}))
    assert_exact(*reversed(results))


@pytest.mark.parametrize("name", [BAMBA, MAMBA])
def test_a_labelled_token_after_a_cache_leaves_it_as_it_was(name: str) -> None:
    """The models' code for a single token writes over recurrent states: over copies of the cache's. The
    call's logits, which a second forward computes, begin with the same state."""
    model, ids = make(name), tokens(SEGMENT + 1)
    with float64_throughout(), torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, SEGMENT:]
        wrapped, argument = wrapped_copy(model), cache_argument(inspect.signature(model.forward).parameters)
        cache = getattr(wrapped(input_ids=ids[:, :SEGMENT], use_cache=True), argument)
        stored = copy.deepcopy(cache.layers)
        out = wrapped(input_ids=ids[:, SEGMENT:], labels=ids[:, SEGMENT:], **{argument: cache})
        assert (out.logits - expected).norm() <= 1e-12 * expected.norm()
    for layer, before in zip(cache.layers, stored, strict=True):
        for states, earlier in zip(vars(layer).values(), vars(before).values(), strict=True):
            if isinstance(states, dict):
                assert all(torch.equal(t, earlier[n]) for n, t in states.items() if isinstance(t, Tensor))


def test_a_cache_without_keys_does_not_know_its_length() -> None:
    """Masks and positions that count the tokens before it, as generate's and PEFT's prefix tuning's do."""
    ids = tokens(23)
    model = wrapped_copy(make(MAMBA))
    argument = cache_argument(inspect.signature(model.forward).parameters)
    cache = getattr(model(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True), argument)
    mask = torch.ones_like(ids)
    mask[0, 19:] = 0
    inputs = {"input_ids": ids[:, 9:], "labels": ids[:, 9:].masked_fill(mask[:, 9:] == 0, -100)}
    results = []
    for more in (
        {"attention_mask": mask[:, 9:]},
        {"attention_mask": mask, "position_ids": torch.arange(9, 23)[None]},
    ):
        model.zero_grad()
        loss = model(**inputs, **{argument: cache}, **more).loss
        loss.backward(retain_graph=True)
        results.append((loss.detach(), current_gradients(model)))
    assert_exact(*results)
    for positions in (torch.arange(14), torch.arange(9, 23).flip(0)):
        with one_line("position_ids must go on from the tokens in past_key_values"):
            model(**inputs, **{argument: cache}, position_ids=positions[None])


def test_documents() -> None:
    """The first document goes on from the cache, others begin anew; the state returned is the last one's."""
    model, ids = make(BAMBA), tokens(31)
    wrapped = wrapped_copy(model)
    _, cache = run_segments(wrapped, ids[:, :9])
    wrapped.zero_grad()
    seq_idx = torch.tensor([[0] * 5 + [1] * 17])
    labels = ids[:, 9:].index_fill(1, torch.tensor([5]), -100)
    out = wrapped(input_ids=ids[:, 9:], labels=labels, seq_idx=seq_idx, past_key_values=cache, use_cache=True)
    out.loss.backward()
    got = out.loss.detach(), current_gradients(wrapped)
    wrapped.zero_grad()
    pieces = [
        wrapped(input_ids=piece, labels=piece, num_items_in_batch=40, use_cache=True, past_key_values=start)
        for piece, start in ((ids[:, 9:14], cache), (ids[:, 14:], None))
    ]
    loss = pieces[0].loss + pieces[1].loss
    loss.backward()
    assert_exact(got, (loss.detach(), current_gradients(wrapped)))
    ends = [
        wrapped(input_ids=ids, labels=ids, past_key_values=end.past_key_values).loss
        for end in (out, pieces[1])
    ]
    assert ends[0].item() == pytest.approx(ends[1].item(), rel=1e-13)


@pytest.mark.parametrize("name", [BAMBA, MAMBA])
def test_a_run_resumes_bitwise(name: str) -> None:
    """Two steps of two segments each; weights and the cache are saved after the first, and loaded."""
    ids = tokens(4 * SEGMENT)
    with float64_throughout():
        model = adjoint.wrap(make(name, torch.float32), adjoint.Exact(chunk_size=3))

    def step(model: Any, ids: Tensor, cache: Any) -> Any:
        model.zero_grad()
        _, cache = run_segments(model, ids, cache)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad if p.grad is not None else 0, alpha=0.1)
        return cache

    cache = step(model, ids[:, : 2 * SEGMENT], None)
    file = io.BytesIO()
    torch.save((model.state_dict(), cache), file)
    file.seek(0)
    weights, loaded_cache = torch.load(file, weights_only=False)
    resumed = adjoint.wrap(make(name, torch.float32, seed=1), adjoint.Exact(chunk_size=3))
    resumed.load_state_dict(weights)
    for trained, start in ((model, cache), (resumed, loaded_cache)):
        step(trained, ids[:, 2 * SEGMENT :], start)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True))


def test_what_is_refused() -> None:
    model = wrapped_copy(make(BAMBA))
    ids = tokens(9)
    inputs = {"input_ids": ids, "labels": ids}
    cache = model(**inputs, use_cache=True).past_key_values
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([8]), 0)
    padded = {**inputs, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask, "use_cache": True}
    with one_line("the state after padding is not that of the row's last token"):
        model(**padded)
    hidden = torch.ones(2, 18).long().index_fill(1, torch.tensor([9]), 0)
    with one_line("attention_mask hides tokens of the cache, or the first one after it"):
        model(**inputs, past_key_values=cache, attention_mask=hidden)
    with one_line("position_ids must go on from 9, the number of tokens in past_key_values"):
        model(**inputs, past_key_values=cache, position_ids=torch.arange(9)[None])
    with one_line("conv of layer 0 has 2 rows, and input_ids 1"):
        model(input_ids=ids[:1], labels=ids[:1], past_key_values=cache)
    with one_line("past_key_values is a tuple, not the cache that a call returned"):
        model(**inputs, past_key_values=((ids, ids),))
    static = transformers.StaticCache(config=model.config, max_cache_len=9)
    with one_line("past_key_values has a "):
        model(**inputs, past_key_values=static)
    seq_idx = torch.tensor([[0] * 9, [0] * 5 + [1] * 4])
    with one_line("rows must have the same documents"):
        model(**inputs, seq_idx=seq_idx, use_cache=True)
    out = model(**inputs, past_key_values=cache)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)  # changes the states that the backward reads
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()
    with_images = wrapped_copy(make_multimodal("Qwen3_5ForConditionalGeneration"))
    with one_line("where tokens stand after an image is not in the cache"):
        with_images(**make_multimodal_batch("Qwen3_5ForConditionalGeneration"), use_cache=True)


def test_a_model_whose_cache_lacks_what_chunks_need_is_left_alone() -> None:
    model, ids = make("DeepseekV4ForCausalLM", use_cache=True), tokens(9)
    with pytest.warns(UserWarning, match="use_cache: this call is backpropagated as if not wrapped"):
        adjoint.wrap(model, adjoint.Exact(chunk_size=3))(input_ids=ids, labels=ids, use_cache=True)
