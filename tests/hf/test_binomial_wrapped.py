"""`Exact(checkpoints=…)` of wrapped models: losses, gradients and random numbers are those of all states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.hf.stage import Backbone
from tests.hf.hf_models import loss_and_gradients, make, make_batch, transformers
from tests.model_helpers import assert_same

__all__ = ["transformers"]
pytestmark = pytest.mark.usefixtures("one_thread", "double")
MODELS = {
    "Mamba2ForCausalLM": {},
    "JambaForCausalLM": {"output_router_logits": True},
    "Qwen3NextForCausalLM": {},
}


def by(model: Any, method: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the model, wrapped, from the same random numbers on."""
    wrapped = adjoint.wrap(model, method)
    torch.manual_seed(3)
    return loss_and_gradients(wrapped, **inputs)


@pytest.mark.filterwarnings("ignore:position_ids start again")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_with_all_states(name: str) -> None:
    """Rows without documents, and a row in documents of several chunks, of a chunk and of less."""
    model: Any = make(name, **MODELS[name])
    starts = (0, 13, 15, 16, 33)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, (*starts[1:], 47), strict=True)])
    packed = make_batch(47, batch=1) | {"position_ids": positions[None]}
    packed.pop("attention_mask", None)
    for inputs in (make_batch(47), packed):
        loss, expected = by(model, adjoint.Exact(3), inputs)
        for states in (1, 4):
            other, got = by(model, adjoint.Exact(3, checkpoints=states), inputs)
            assert float(other) == float(loss)
            assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "1GB"])
def test_dropout_is_drawn_again_alike(memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk draws the same numbers each time, and generators' states are stored with the layers' alone."""
    model: Any = make("BambaForCausalLM", attention_dropout=0.4).train()
    inputs, stored, forget = make_batch(40), [], Backbone.forget

    def counted(self: Backbone, start: int) -> None:
        stored.append(len(self.randomness.states_by_chunk))
        forget(self, start)

    monkeypatch.setattr(Backbone, "forget", counted)
    loss, expected = by(model, adjoint.Exact(3, memory=memory), inputs)
    after = torch.rand(())
    assert not stored
    for states in (1, 4, 30):
        other, got = by(model, adjoint.Exact(3, checkpoints=states, memory=memory), inputs)
        assert float(other) == float(loss) and torch.rand(()) == after
        assert_same(got, expected)
        if memory is None:  # those of the first chunk, of stored states, and of the chunk that has just run
            assert stored and max(stored) <= states + 2
        stored.clear()


def test_a_loss_of_hidden_states() -> None:
    model: Any = make("BambaForCausalLM")
    ids = make_batch(40)["input_ids"]

    def gradients(method: Any) -> dict[str, Tensor]:
        wrapped = adjoint.wrap(copy.deepcopy(model), method)
        loss = wrapped.model(input_ids=ids).last_hidden_state.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}

    assert_same(gradients(adjoint.Exact(3, checkpoints=2)), gradients(adjoint.Exact(3)))
