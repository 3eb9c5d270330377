"""Backbones, alone and inside other modules, in training and in evaluation, with gradients and without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.hf import forwards, mini_sequence
from tests.hf.hf_models import VOCAB, assert_exact, current_gradients, float64_throughout, make
from tests.model_helpers import make_ids

pytestmark = pytest.mark.usefixtures("one_thread", "double")
BAMBA, LLAMA, MAMBA = "BambaForCausalLM", "LlamaForCausalLM", "Mamba2ForCausalLM"
EXACT = adjoint.Exact(chunk_size=8)
IDS = make_ids(2, 37, vocab_size=VOCAB)


@pytest.fixture
def by_chunks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that gets an entry for each forward of a backbone by chunks."""
    calls: list[object] = []
    hidden_by_chunks = forwards._hidden_by_chunks
    monkeypatch.setattr(
        forwards, "_hidden_by_chunks", lambda call: calls.append(call) or hidden_by_chunks(call)
    )
    return calls


class Regression(nn.Module):
    """A head above a backbone."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(24, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=input_ids).last_hidden_state.mean(1)).pow(2).sum()


def hidden_loss(model: Any) -> Tensor:
    return model(input_ids=IDS)[0].square().mean()


def causal_lm_loss(model: Any) -> Tensor:
    return model(input_ids=IDS).logits.square().mean()


@pytest.mark.sampled(11)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", [BAMBA, LLAMA, MAMBA])
@pytest.mark.parametrize("kind", ["alone", "inside a module", "inside a wrapped module", "of a causal LM"])
def test_gradients_of_a_backbone(kind: str, name: str, is_training: bool, by_chunks: list[object]) -> None:
    """The mode decides dropout, not the method."""
    results = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        lm = make(name)
        model, loss = (lm, causal_lm_loss) if kind.startswith("of") else (lm.base_model, hidden_loss)
        if is_wrapped and "wrapped" not in kind:
            adjoint.wrap(model, EXACT)
        if kind.startswith("inside"):
            model = Regression(model)
            loss = model_loss
        if is_wrapped and "wrapped" in kind:
            assert adjoint.wrap(adjoint.unwrap(adjoint.wrap(model, EXACT)), EXACT) is model
        model.train(is_training).double()
        with float64_throughout():
            value = loss(model)
            value.backward()
        results.append((value.detach(), current_gradients(model)))
    assert_exact(*reversed(results))
    assert len(by_chunks) == 1


def model_loss(model: Any) -> Tensor:
    return model(IDS)


def test_mini_sequences_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = []
    splitting = mini_sequence.splitting
    monkeypatch.setattr(mini_sequence, "splitting", lambda *args: splits.append(args) or splitting(*args))
    model = adjoint.wrap(make(LLAMA).base_model.eval(), adjoint.MiniSequence())
    hidden_loss(model).backward()
    with torch.no_grad():
        hidden_loss(model)
    assert len(splits) == 1


def set_inference_mode() -> Any:
    return torch.inference_mode()


@pytest.mark.parametrize("without_gradients", [torch.no_grad, set_inference_mode])
@pytest.mark.parametrize("name", [BAMBA, LLAMA, MAMBA])
def test_a_long_evaluation_is_by_chunks(
    name: str, without_gradients: Callable[[], Any], by_chunks: list[object]
) -> None:
    """The cache that transformers returns unasked is computed if somebody goes on from it."""
    plain = make(name).eval()
    model = adjoint.wrap(copy.deepcopy(plain), EXACT)
    argument = "cache_params" if name == MAMBA else "past_key_values"
    ids, following = IDS[:, :-1], IDS[:, -1:]
    with float64_throughout(), without_gradients():
        outputs = [each(input_ids=ids) for each in (model, plain)]
        assert len(by_chunks) == 1
        assert torch.allclose(outputs[0].logits, outputs[1].logits, atol=1e-12)
        caches = [getattr(output, argument) for output in outputs]
        with pytest.warns(UserWarning, match="past_key_values was read"):
            assert len(caches[0].layers) == len(caches[1].layers)
        caches[0] = pickle.loads(pickle.dumps(caches[0]))
        logits = [
            each(input_ids=following, **{argument: cache}, position_ids=torch.full((2, 1), 36)).logits
            if name != MAMBA
            else each(input_ids=following, **{argument: cache}).logits
            for each, cache in zip((model, plain), caches, strict=True)
        ]
        assert torch.allclose(*logits, atol=1e-12)
        assert len(by_chunks) == 1  # a call with a cache is transformers' own
        assert getattr(model(input_ids=ids, use_cache=False), argument) is None
        model(input_ids=IDS[:, :8])
        assert len(by_chunks) == 2  # no more than a chunk


def test_an_evaluation_that_chunks_refuse_is_transformers_own(by_chunks: list[object]) -> None:
    plain = make(LLAMA).eval()
    model = adjoint.wrap(copy.deepcopy(plain), EXACT)
    mask = torch.ones(37, 37, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    with torch.no_grad():
        expected = plain.model(IDS, attention_mask=mask)[0]
        for _ in range(2):
            assert torch.equal(model.model(IDS, attention_mask=mask)[0], expected)
        assert len(by_chunks) == 1  # it is not tried again
        assert torch.allclose(model.model(IDS)[0], expected, atol=1e-12)
    assert len(by_chunks) == 2
