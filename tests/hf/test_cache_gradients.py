"""Gradients through caches: calls of a wrapped model that hang together, against one graph."""

from __future__ import annotations

import copy
import gc
import inspect
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
    current_gradients,
    float64_throughout,
    make,
    one_line,
)

transformers = pytest.importorskip("transformers")
from adjoint.hf.outputs import LossOutput  # noqa: E402
from adjoint.hf.transformers_api import cache_argument  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]

LLAMA, QWEN, BAMBA = "LlamaForCausalLM", "Qwen3_5ForCausalLM", "BambaForCausalLM"
MODELS = ["MambaForCausalLM", "Mamba2ForCausalLM", BAMBA, QWEN, "Qwen3NextForCausalLM", LLAMA]
CUTS = (0, 9, 14, 25)  # of three calls, by chunks of 4 tokens


def tokens(rows: int, seqlen: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCAB, (rows, seqlen), generator=torch.Generator().manual_seed(seed))


def wrapped_copy(model: Any, method: Any = None) -> Any:
    return adjoint.wrap(copy.deepcopy(model), method or adjoint.Exact(chunk_size=4))


def name_of_cache(model: Any) -> str:
    return cache_argument(inspect.signature(model.forward).parameters)


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
TREE += [{"tokens": 7, "after": 2, "rows": "repeat"}, {"tokens": 6, "after": 2}]
CROPPED: list[dict[str, Any]] = [{"tokens": 13}, {"tokens": 9, "after": 0, "crop": 2}]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("only_last", [False, True], ids=["all losses", "last loss"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [*((n, TREE) for n in MODELS), (LLAMA, [{"tokens": 13}, {"tokens": 9, "after": 0, "crop": 2}])],
)
def test_three_calls_and_two_branches(name: str, calls: list[dict[str, Any]], only_last: bool) -> None:
    """Cases of the fuzzer: three calls, from whose last cache two branches go on, one with the rows doubled;
    and a cache that is cropped."""
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
    model, ids = make(BAMBA), tokens(2, CUTS[-1])
    wrapped = wrapped_copy(model, method)
    loss = torch.stack(chain(wrapped, ids, shifted(ids))[0]).sum()
    loss.backward()
    expected = loss_of(model, ids, shifted(ids), ids.numel())
    expected.backward()
    assert_exact((loss.detach(), current_gradients(wrapped)), (expected.detach(), current_gradients(model)))


@pytest.mark.parametrize("name", [BAMBA, LLAMA])
def test_backwards_as_torch_has_them(name: str) -> None:
    """A graph that is retained gives the same gradients twice; one that is freed is refused by torch."""
    wrapped, ids = wrapped_copy(make(name)), tokens(2, CUTS[-1])
    loss = chain(wrapped, ids, shifted(ids))[0][-1]
    loss.backward(retain_graph=True)
    first = current_gradients(wrapped)
    wrapped.zero_grad()
    loss.backward()
    assert_exact((loss.detach(), current_gradients(wrapped)), (loss.detach(), first))
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()

    ids = tokens(2, 18)
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
    model, ids, results = make(QWEN), tokens(2, 23), []
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
    ids = tokens(2, 16 * 9)
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
    model, ids = make(name), tokens(2, 27)
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
    wrapped, ids = wrapped_copy(make(QWEN)), tokens(2, 10)
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
