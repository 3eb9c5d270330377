"""transformers' models copied into a stack: loss, logits and all gradients against their own, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, Stack
from tests.hf.hf_models import RELEASE, assert_exact, current_gradients, float64_throughout, make
from tests.model_helpers import make_ids, relative

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba, tied": ("MambaForCausalLM", {}),
    "Mamba, untied, biases": ("MambaForCausalLM", {"tie_word_embeddings": False, "use_bias": True}),
    "Mamba, narrow conv without bias": (
        "MambaForCausalLM",
        {"conv_kernel": 2, "use_conv_bias": False, "time_step_rank": 5, "expand": 3},
    ),
    "Mamba-2, two groups": ("Mamba2ForCausalLM", {}),
    "Mamba-2, one group, tied": ("Mamba2ForCausalLM", {"n_groups": 1, "tie_word_embeddings": True}),
    "Mamba-2, four groups, biases": (
        "Mamba2ForCausalLM",
        {"n_groups": 4, "num_heads": 8, "head_dim": 6, "use_bias": True},
    ),
    "Mamba-2, narrow conv without bias": (
        "Mamba2ForCausalLM",
        {"num_heads": 2, "head_dim": 24, "conv_kernel": 3, "use_conv_bias": False},
    ),
}


def hf_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    return make(kind, dtype, seed, use_cache=False, **options)


def name_in_stack(name: str) -> str:
    return name.removeprefix("backbone.").replace("embeddings.weight", "embedding.weight")


def assert_equal_to_transformers(
    model: Any, input_ids: torch.Tensor, labels: torch.Tensor, method: Any
) -> None:
    stack = Stack.from_transformers(model)
    assert next(stack.parameters()).dtype == torch.float64
    with float64_throughout():
        expected = model(input_ids, labels=labels)
        expected.loss.backward()
    got = stack(input_ids, labels=labels, method=method, return_logits=True)
    got.loss.backward()
    assert relative(got.logits.detach(), expected.logits.detach()) <= 1e-12
    theirs = {name_in_stack(name): gradient for name, gradient in current_gradients(model).items()}
    assert_exact((got.loss.detach(), current_gradients(stack)), (expected.loss.detach(), theirs))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seqlen", [2, 3, 17, 37])
@pytest.mark.parametrize("case", CASES)
def test_loss_logits_and_gradients(case: str, seqlen: int) -> None:
    kind, options = CASES[case]
    if kind == "Mamba2ForCausalLM" and options.get("n_groups") != 1 and RELEASE < (5, 23):
        pytest.skip("before transformers 5.23 its norm is over all groups together")
    for batch, method in ((1, Backprop()), (3, Exact(chunk_size=10))):
        model = hf_model(kind, seed=batch, **options)
        input_ids = make_ids(batch, seqlen, vocab_size=61, seed=seqlen)
        labels = input_ids.masked_fill(make_ids(batch, seqlen, vocab_size=61, seed=1) < 7, -100)
        labels[:, 1] = input_ids[:, 1]
        assert_equal_to_transformers(model, input_ids, labels, method)


def test_the_weights_are_copied() -> None:
    model = hf_model("Mamba2ForCausalLM", torch.float32)
    stack, input_ids = Stack.from_transformers(model), make_ids(1, 9, vocab_size=61)
    before = model(input_ids).logits
    with torch.no_grad():
        for p in stack.parameters():
            p.zero_()
    assert torch.equal(model(input_ids).logits, before)
    assert next(stack.parameters()).dtype == torch.float32


def test_other_models_and_options_are_refused() -> None:
    refused = [
        (
            make("LlamaForCausalLM"),
            "only MambaForCausalLM and Mamba2ForCausalLM .* LlamaForCausalLM",
        ),
        (hf_model("MambaForCausalLM").backbone, "only MambaForCausalLM .* MambaModel"),
        (torch.nn.Linear(2, 2), "only MambaForCausalLM .* Linear"),
        (hf_model("MambaForCausalLM", hidden_act="gelu"), "hidden_act must be silu, the model has 'gelu'"),
        (
            hf_model("Mamba2ForCausalLM", time_step_limit=(0.01, 0.1)),
            r"time_step_limit must be \(0, inf\)",
        ),
    ]
    for model, message in refused:
        with pytest.raises(ValueError, match=message):
            Stack.from_transformers(model)
