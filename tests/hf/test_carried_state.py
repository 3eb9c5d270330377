"""States from call to call: a call with labels returns transformers' own cache, another goes on from it.

Gradients go through caches into the calls that made them, against one graph."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.engine import step as engine_step
from adjoint.engine.executor import Executor
from tests.fuzz import caches
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
from adjoint.hf.outputs import LossOutput  # noqa: E402
from adjoint.hf.transformers_api import cache_argument  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]

BAMBA, MAMBA, LLAMA, MISTRAL = (f"{n}ForCausalLM" for n in ("Bamba", "Mamba2", "Llama", "Mistral"))
QWEN, MINIMAX = "Qwen3_5ForCausalLM", "MiniMaxForCausalLM"
SEGMENT = 7
MODELS = ["MambaForCausalLM", MAMBA, BAMBA, QWEN, "Qwen3NextForCausalLM", LLAMA]
CUTS = (0, 9, 14, 25)  # of three calls


def wrapped_copy(model: Any, method: Any = None) -> Any:
    return adjoint.wrap(copy.deepcopy(model), method or adjoint.Exact(chunk_size=4))


def name_of_cache(model: Any) -> str:
    return cache_argument(inspect.signature(model.forward).parameters)


def tokens(seqlen: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCAB, (2, seqlen), generator=torch.Generator().manual_seed(seed))


def run_segments(model: Any, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
    """Backpropagate the loss of each segment; return their sum and the last cache."""
    name, total = name_of_cache(model), torch.zeros(())
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
        argument = name_of_cache(model)
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
        wrapped, argument = wrapped_copy(model), name_of_cache(model)
        cache = getattr(wrapped(input_ids=ids[:, :SEGMENT], use_cache=True), argument)
        stored = copy.deepcopy(cache.layers)
        out = wrapped(input_ids=ids[:, SEGMENT:], labels=ids[:, SEGMENT:], **{argument: cache})
        assert (out.logits - expected).norm() <= 1e-12 * expected.norm()
    for layer, before in zip(cache.layers, stored, strict=True):
        for states, earlier in zip(vars(layer).values(), vars(before).values(), strict=True):
            if isinstance(states, dict):
                assert all(torch.equal(t, earlier[n]) for n, t in states.items() if isinstance(t, Tensor))


def test_a_cache_without_keys_does_not_know_its_length() -> None:
    """Masks and positions that count the tokens before it, as generate's and PEFT's prefix tuning's do.

    Padding that a mask hides there has left nothing in the cache."""
    ids = tokens(23)
    model = wrapped_copy(make(MAMBA))
    argument = name_of_cache(model)
    cache = getattr(model(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True), argument)
    mask = torch.ones_like(ids)
    mask[0, 19:] = 0
    inputs = {"input_ids": ids[:, 9:], "labels": ids[:, 9:].masked_fill(mask[:, 9:] == 0, -100)}
    results = []
    for more in (
        {"attention_mask": mask[:, 9:]},
        {"attention_mask": mask, "position_ids": torch.arange(9, 23)[None]},
        {"attention_mask": mask.index_fill(1, torch.arange(4), 0)},
    ):
        model.zero_grad()
        loss = model(**inputs, **{argument: cache}, **more).loss
        loss.backward(retain_graph=True)
        results.append((loss.detach(), current_gradients(model)))
    for result in results[1:]:
        assert_exact(result, results[0])
    with one_line("attention_mask hides tokens of the cache, or the first one after it"):
        model(**inputs, **{argument: cache}, attention_mask=mask.index_fill(1, torch.tensor([9]), 0))
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


@pytest.mark.parametrize("name", [BAMBA, pytest.param(MAMBA, marks=pytest.mark.slow)])
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


# ---------------------------------------------------------------------------------- gradients through caches


def chain(model: Any, ids: Tensor, labels: Tensor, cache: Any = None) -> tuple[list[Tensor], Any]:
    """Call a model on piece after piece, each going on from the cache before; return the losses and the
    last cache. Losses are divided by the number of tokens of ids."""
    name, losses = name_of_cache(model), []
    for start, stop in zip(CUTS, (*CUTS[1:-1], ids.shape[1]), strict=False):
        inputs = {"input_ids": ids[:, start:stop], "shift_labels": labels[:, start:stop]}
        out = model(**inputs, num_items_in_batch=ids.numel(), use_cache=True, **{name: cache})
        losses.append(out.loss)
        cache = getattr(out, name)
    return losses, cache


def shifted(ids: Tensor) -> Tensor:
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)


TREE: list[dict[str, Any]] = [{"tokens": 9}, {"tokens": 5, "after": 0}, {"tokens": 11, "after": 1}]
TREE += [{"tokens": 7, "after": 2, "rows": "repeat"}, {"tokens": 6, "after": 2, "rows": "select"}]
CROPPED: list[dict[str, Any]] = [{"tokens": 13}, {"tokens": 9, "after": 0, "crop": 2}]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("only_last", [False, True], ids=["all losses", "last loss"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [*((n, TREE) for n in (*MODELS, MINIMAX)), (LLAMA, CROPPED), ("xLSTMForCausalLM", TREE[:3])],
)
def test_three_calls_and_two_branches(name: str, calls: list[dict[str, Any]], only_last: bool) -> None:
    """Cases of the fuzzer: three calls, from whose last cache two branches go on, with rows doubled and
    exchanged; and a cache that is cropped."""
    case = {"seed": 3, "model": name, "calls": calls, "method": {"chunk_size": 4}}
    caches.check(case | ({"only_last": True} if only_last else {}))


def loss_of(model: Any, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: int) -> Tensor:
    """Return the untouched model's summed loss, divided: not all releases read num_items_in_batch."""
    logits = model(input_ids=input_ids).logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / (
        num_items_in_batch
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "method",
    [
        adjoint.Exact(chunk_size=4, checkpoints=2),
        adjoint.Exact(chunk_size=4, recompute="full"),
        adjoint.Exact(memory="1GB"),
        adjoint.Truncated(12, chunk_size=4),  # no call is longer than the window
    ],
    ids=str,
)
def test_three_calls_by_each_method(method: Any) -> None:
    model, ids = make(BAMBA), tokens(CUTS[-1])
    wrapped = wrapped_copy(model, method)
    loss = torch.stack(chain(wrapped, ids, shifted(ids))[0]).sum()
    loss.backward()
    expected = loss_of(model, ids, shifted(ids), ids.numel())
    expected.backward()
    assert_exact((loss.detach(), current_gradients(wrapped)), (expected.detach(), current_gradients(model)))


@pytest.mark.parametrize("name", [BAMBA, pytest.param(LLAMA, marks=pytest.mark.slow)])
def test_backwards_as_torch_has_them(name: str) -> None:
    """A graph that is retained gives the same gradients twice; one that is freed is refused by torch."""
    wrapped, ids = wrapped_copy(make(name)), tokens(CUTS[-1])
    loss = chain(wrapped, ids, shifted(ids))[0][-1]
    loss.backward(retain_graph=True)
    first = current_gradients(wrapped)
    wrapped.zero_grad()
    loss.backward()
    assert_exact((loss.detach(), current_gradients(wrapped)), (loss.detach(), first))
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()

    ids = tokens(18)
    first_out = wrapped(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True)
    second_loss = wrapped(
        input_ids=ids[:, 9:], labels=ids[:, 9:], past_key_values=first_out.past_key_values
    ).loss
    first_out.loss.backward()  # before the call that goes on is done
    with pytest.raises(RuntimeError, match="a second time"):
        second_loss.backward()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("reason", ["backward has run", "used without gradients", "made without gradients"])
def test_a_cache_without_a_way_back_is_a_value(reason: str) -> None:
    """The second call has the gradients that a detached cache gives it."""
    model, ids, results = make(QWEN), tokens(23), []
    for is_expected in (True, False):
        wrapped = wrapped_copy(model)
        with torch.set_grad_enabled(not (is_expected or reason == "made without gradients")):
            out = wrapped(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True)
        cache = out.past_key_values
        if reason == "backward has run" and not is_expected:
            out.loss.backward()
            wrapped.zero_grad()
        if reason == "used without gradients":
            with torch.no_grad():
                wrapped(input_ids=ids[:, 9:14], past_key_values=cache, use_cache=True)
        start = cache.get_seq_length()
        inputs = {"input_ids": ids[:, start:], "labels": ids[:, start:]}
        cache.reorder_cache(torch.tensor([1, 0]))
        loss = wrapped(**inputs, past_key_values=cache).loss
        loss.backward()
        results.append((loss.detach(), current_gradients(wrapped)))
    assert_exact(*reversed(results))


def test_a_cache_changed_without_gradients_is_pickled() -> None:
    cache = wrapped_copy(make(LLAMA))(input_ids=tokens(9), labels=tokens(9), use_cache=True).past_key_values
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([1, 0]))
    loaded = pickle.loads(pickle.dumps(cache))
    assert type(loaded) is transformers.DynamicCache
    assert torch.equal(loaded.layers[1].keys, cache.layers[1].keys)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_states_that_the_cache_lists(beams: int) -> None:
    """Unwrapped, MiniMax reads padding of the prompt, and leaves states where beams change places."""
    model, ids = make(MINIMAX).eval(), tokens(11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 7, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}
    got = wrapped_copy(model).generate(ids, attention_mask=mask, **options)
    for row, first in ((0, 4), (1, 0)):
        expected = model.generate(ids[row : row + 1, first:], use_cache=False, **options)
        assert torch.equal(got.sequences[row, first:], expected.sequences[0])
        scores = torch.stack(got.scores)[:, row], torch.stack(expected.scores)[:, 0]
        if beams > 1:
            scores = got.sequences_scores[row], expected.sequences_scores[0]
        torch.testing.assert_close(*scores)


def test_calls_are_freed_as_the_backward_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen calls hang together: a tape is kept for the last one alone, and when a call's backward
    begins, those after it are gone: steps, states and the caches that logits could be computed from."""
    steps: list[weakref.ref[Any]] = []
    caches: list[weakref.ref[Any]] = []
    init = engine_step.ChunkedStep.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        steps.append(weakref.ref(self))

    wrapped, cache, losses, alive = wrapped_copy(make(BAMBA)), None, [], []
    ids = tokens(16 * 9)
    wrapped(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True)  # compared on first use
    monkeypatch.setattr(engine_step.ChunkedStep, "__init__", noting)
    gc.collect()
    gc.disable()
    try:
        for number, piece in enumerate(ids.split(9, dim=1)):
            out = wrapped(input_ids=piece, labels=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            losses.append(out.loss)
            tensor = cache.layers[0].conv_states[0]
            caches.append(weakref.ref(tensor))
            tensor.register_hook(
                lambda _, number=number: alive.append(
                    (number, *(sum(ref() is not None for ref in refs) for refs in (steps, caches)))
                )
            )
            del out, tensor
        tapes = [sum(key[0] == "tape" for key in ref().executor.store) for ref in steps]
        assert tapes == [0] * 15 + [1]
        del cache
        torch.stack(losses).sum().backward()
        assert alive == [(number, number + 1, number) for number in range(14, -1, -1)]
        assert not any(ref() is not None for ref in (*steps, *caches)), "freed although losses are held"
        assert all(LossOutput(loss=loss).logits is None for loss in losses[1:])
    finally:
        gc.enable()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_calls_without_labels(name: str) -> None:
    """Logits and hidden states of calls in training mode that go on from caches; a cache that is given is
    filled, as transformers does it, also by a single token where all layers are attention."""
    model, ids = make(name), tokens(27)
    wrapped, argument = wrapped_copy(model), name_of_cache(model)
    pieces = ids.split([9, 1, 11, 6] if name == LLAMA else [9, 2, 10, 6], dim=1)
    weights = torch.randn(27, 1, generator=torch.Generator().manual_seed(1))
    with float64_throughout(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*as if not wrapped")
        first = wrapped(input_ids=pieces[0], use_cache=True)
        cache = getattr(first, argument)
        second = wrapped(input_ids=pieces[1], use_cache=True, **{argument: cache})
        assert getattr(second, argument) is cache
        backbone = wrapped.base_model
        hidden = []
        for piece, use_cache in ((pieces[2], True), (pieces[3], False)):
            out = backbone(input_ids=piece, use_cache=use_cache, **{name_of_cache(backbone): cache})
            assert getattr(out, name_of_cache(backbone)) is (cache if use_cache else None)
            hidden.append(out.last_hidden_state)
        logits = [first.logits, second.logits, *map(wrapped.get_output_embeddings(), hidden)]
        results = []
        for values in (torch.cat(logits, dim=1), model(input_ids=ids).logits):
            loss = (values.log_softmax(-1) * weights)[..., 5].sum()
            loss.backward()
            results.append(loss.detach())
    assert_exact((results[0], current_gradients(wrapped)), (results[1], current_gradients(model)))


def test_one_token_after_a_recurrent_state() -> None:
    """A call with labels is refused by name; one without is transformers' own forward."""
    wrapped, ids = wrapped_copy(make(QWEN)), tokens(10)
    cache = wrapped(input_ids=ids[:, :9], labels=ids[:, :9], use_cache=True).past_key_values
    with one_line("give two tokens or more"):
        wrapped(input_ids=ids[:, 9:], shift_labels=ids[:, 9:], past_key_values=cache)
    with pytest.warns(UserWarning, match="as if not wrapped"):
        wrapped(input_ids=ids[:, 9:], past_key_values=cache)


def test_a_cache_changed_in_place_keeps_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own forward of a single token writes into the cache of a call by chunks; what that call
    holds is freed with the cache, without a backward."""
    executors: list[weakref.ref[Executor]] = []
    initialize = Executor.__init__

    def noted(self: Executor, *args: Any, **kwargs: Any) -> None:
        executors.append(weakref.ref(self))
        initialize(self, *args, **kwargs)

    monkeypatch.setattr(Executor, "__init__", noted)
    test_one_token_after_a_recurrent_state()
    gc.collect()
    assert executors
    assert not [reference for reference in executors if reference() is not None]
