"""Calls while a CUDA graph is captured: the host cannot read values then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint
from adjoint.errors import UserError


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Mamba2Config(
        num_hidden_layers=2, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1, vocab_size=64
    )
    model = adjoint.wrap(Mamba2ForCausalLM(config).double(), adjoint.Exact(chunk_size=5))
    model(input_ids=IDS, labels=IDS)  # the comparison on first use
    return model


IDS = torch.arange(2 * 13).view(2, 13) % 64


def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_captured_step_is_that_of_other_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = IDS.masked_fill(IDS % 3 == 0, -100)

    def step(number: int | torch.Tensor | None) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = model(IDS, labels=labels, num_items_in_batch=number).loss
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters()]

    numbers = None, 9, torch.tensor(9)
    expected = [step(number) for number in numbers]
    capture(monkeypatch)
    for number, (loss, gradients) in zip(numbers, expected, strict=True):
        captured_loss, captured_gradients = step(number)
        assert captured_loss == loss
        assert all(map(torch.equal, captured_gradients, gradients))


@pytest.mark.parametrize("inputs", [{"attention_mask": IDS.clamp(max=1)}, {"position_ids": IDS % 13}])
def test_padding_and_documents_are_refused_by_name(
    inputs: dict[str, torch.Tensor], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(monkeypatch)
    with pytest.raises(UserError, match="cannot be captured in a CUDA graph"):
        model(IDS, labels=IDS, **inputs)


def test_a_stack_is_captured_without_a_look_at_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = adjoint.Stack(adjoint.StackConfig(vocab_size=64, d_model=16, n_layer=2), seed=0)
    expected = stack(IDS, labels=IDS, method=adjoint.Exact(5)).loss
    capture(monkeypatch)
    assert stack(IDS, labels=IDS, method=adjoint.Exact(5)).loss == expected
