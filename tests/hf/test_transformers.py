"""transformers' models copied into a stack: loss, logits and all gradients against their own, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, Stack
from tests.hf.hf_models import float64_throughout
from tests.model_helpers import make_ids, relative

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 8, "use_cache": False}
MAMBA: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, biases": {"tie_word_embeddings": False, "use_bias": True},
    "narrow conv without bias": {"conv_kernel": 2, "use_conv_bias": False, "time_step_rank": 5, "expand": 3},
}
MAMBA2: dict[str, dict[str, Any]] = {
    "two groups": {"n_groups": 2, "num_heads": 4, "head_dim": 12},
    "one group, tied": {"n_groups": 1, "num_heads": 4, "head_dim": 12, "tie_word_embeddings": True},
    "four groups, biases": {"n_groups": 4, "num_heads": 8, "head_dim": 6, "use_bias": True},
    "narrow conv without bias": {
        "n_groups": 2,
        "num_heads": 2,
        "head_dim": 24,
        "conv_kernel": 3,
        "use_conv_bias": False,
    },
}
CASES = [*(("mamba", name) for name in MAMBA), *(("mamba2", name) for name in MAMBA2)]


def hf_model(kind: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    if kind == "mamba":
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**{**SIZES, **options}))
    else:
        model = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(**{**SIZES, "chunk_size": 16, **options})
        )
    with torch.no_grad():  # away from initial values, at which biases are zero and norms one
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.double()


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
    assert relative(got.loss.detach(), expected.loss.detach()) <= 1e-12
    assert relative(got.logits.detach(), expected.logits.detach()) <= 1e-12
    theirs = {name_in_stack(name): p.grad for name, p in model.named_parameters()}
    ours = {name: p.grad for name, p in stack.named_parameters()}
    assert ours.keys() == theirs.keys()
    errors = {name: relative(ours[name], theirs[name]) for name in ours}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1e-9, f"{worst}: {errors[worst]:.1e}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seqlen", [2, 3, 17, 37])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_loss_logits_and_gradients(kind: str, name: str, seqlen: int) -> None:
    options = (MAMBA if kind == "mamba" else MAMBA2)[name]
    for batch, method in ((1, Backprop()), (3, Exact(chunk_size=10))):
        model = hf_model(kind, seed=batch, **options)
        input_ids = make_ids(batch, seqlen, vocab_size=61, seed=seqlen)
        labels = input_ids.masked_fill(make_ids(batch, seqlen, vocab_size=61, seed=1) < 7, -100)
        labels[:, 1] = input_ids[:, 1]
        assert_equal_to_transformers(model, input_ids, labels, method)


def test_the_comparison_is_in_float64() -> None:
    """As they stand, transformers' models compute in float32: the comparison above would mean little."""
    model, input_ids = hf_model("mamba"), make_ids(2, 17, vocab_size=61)
    with torch.no_grad():
        single = model(input_ids, labels=input_ids).loss.double()
        with float64_throughout():
            double = model(input_ids, labels=input_ids).loss
    assert torch.float32 != torch.float64
    assert 1e-10 < relative(single, double) < 1e-5


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_the_weights_are_copied(kind: str) -> None:
    options = {} if kind == "mamba" else MAMBA2["two groups"]
    model = hf_model(kind, **options).float()
    stack, input_ids = Stack.from_transformers(model), make_ids(1, 9, vocab_size=61)
    before = model(input_ids).logits
    with torch.no_grad():
        for p in stack.parameters():
            p.zero_()
    assert torch.equal(model(input_ids).logits, before)
    assert next(stack.parameters()).dtype == torch.float32


def test_greedy_generation_equals_transformers() -> None:
    model = hf_model("mamba")
    input_ids = make_ids(2, 7, vocab_size=61)
    with float64_throughout():
        expected = input_ids
        for _ in range(8):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(Stack.from_transformers(model).generate(input_ids, 8, temperature=0), expected)


def test_other_models_and_options_are_refused() -> None:
    small = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1}
    llama = transformers.LlamaConfig(**small, intermediate_size=8, num_attention_heads=2)
    refused = [
        (
            transformers.LlamaForCausalLM(llama),
            "only MambaForCausalLM and Mamba2ForCausalLM .* LlamaForCausalLM",
        ),
        (transformers.MambaModel(transformers.MambaConfig(**SIZES)), "only MambaForCausalLM .* MambaModel"),
        (torch.nn.Linear(2, 2), "only MambaForCausalLM .* Linear"),
        (hf_model("mamba", hidden_act="gelu"), "hidden_act must be silu, the model has 'gelu'"),
        (
            hf_model("mamba2", **MAMBA2["two groups"], time_step_limit=(0.01, 0.1)),
            r"time_step_limit must be \(0, inf\)",
        ),
    ]
    for model, message in refused:
        with pytest.raises(ValueError, match=message):
            Stack.from_transformers(model)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_head_that_was_replaced_is_kept_though_the_configuration_says_tied(kind: str) -> None:
    options = {**(MAMBA["tied"] if kind == "mamba" else MAMBA2["two groups"]), "tie_word_embeddings": True}
    model, input_ids = hf_model(kind, **options), make_ids(2, 17, vocab_size=61)
    assert Stack.from_transformers(model).config.tie_embeddings
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    stack = Stack.from_transformers(model)
    with torch.no_grad(), float64_throughout():
        assert relative(stack(input_ids).logits, model(input_ids).logits) <= 1e-12
    assert not stack.config.tie_embeddings
