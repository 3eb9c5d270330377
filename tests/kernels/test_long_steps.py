"""Whole training steps over many tokens: every parameter's gradient in float32 against float64; and the state
that a bfloat16 model carries from call to call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.kernels.helpers import INTERPRETED
from tests.model_helpers import RECURRENT, current_gradients, gradients, make_ids, relative

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no kernel runs"),
]

SIZES = {"d_model": 16, "n_layer": 2, "d_state": 4, "headdim": 8, "vocab_size": 61}
CHUNK, MILLION = 4096, 1 << 20
ONE_LAYER_OF_EACH_KIND = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
ONE_LAYER_OF_EACH_KIND |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# One of each kind of recurrence: transformers' other classes with these share their code.
CACHES = ["Mamba2ForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM"]
MORE_CACHES = ["MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM"]
MORE_CACHES += ["Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM", "KimiLinearForCausalLM"]
MORE_CACHES += ["ZambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM"]
MORE_CACHES += ["NemotronHForCausalLM", "OlmoHybridForCausalLM", "BailingHybridForCausalLM"]
MORE_CACHES += ["Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM"]


def walk(tokens: int, vocab_size: int) -> Tensor:
    """Return ids (1, tokens) that can be learnt: of random ones gradients are what is left of large terms."""
    return make_ids(1, tokens, 3).cumsum(1) % vocab_size


def errors_of(single: dict[str, Tensor], double: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each gradient in float32 is from that in float64."""
    return {name: relative(single[name], double[name]) for name in double}


def assert_digits(errors: dict[str, float]) -> None:
    """Raise AssertionError unless all gradients in float32 are those in float64."""
    assert all(error < 1e-5 for error in errors.values()), errors


def turn_signs_away(model: adjoint.Stack) -> None:
    """Move a dense transition's entries away from 0, where the derivative of their absolute values jumps.

    One entry that rounding moves across 0, of a million, moves A_proj's gradient by 7e-5."""
    for parameter_name, bias in model.named_parameters():
        if parameter_name.endswith("A_proj.bias"):
            n = SIZES["d_state"]
            signs = torch.ones(n, n, dtype=bias.dtype).tril() * 2 - 1
            bias.data[n:] += 0.3 * signs.flatten()


@pytest.mark.slow
@pytest.mark.parametrize("mixer", RECURRENT)
def test_a_step_of_a_stack(mixer: str) -> None:
    """A sequence is trained by chunks."""
    torch.manual_seed(0)
    model = adjoint.Stack(adjoint.StackConfig(mixer=mixer, **SIZES))
    if mixer == "dense":
        turn_signs_away(model)
    ids, method = walk(MILLION, 61), adjoint.Exact(chunk_size=CHUNK)
    double = gradients(copy.deepcopy(model).double(), ids, ids, method)[1]
    assert_digits(errors_of(gradients(model, ids, ids, method)[1], double))


def test_angles_that_add_up_over_many_chunks() -> None:
    """The gradient of a turn of Mamba-3's keys is a sum over all later tokens, most of which cancels."""
    torch.manual_seed(0)
    model = adjoint.Stack(adjoint.StackConfig(mixer="mamba3", **SIZES))
    ids, method = walk(1 << 14, 61), adjoint.Exact(chunk_size=512)
    double = gradients(copy.deepcopy(model).double(), ids, ids, method)[1]
    errors = errors_of(gradients(model, ids, ids, method)[1], double)
    assert max(errors.values()) < 4e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("Mamba2ForCausalLM", {}), ("Qwen3_5ForCausalLM", ONE_LAYER_OF_EACH_KIND)]
)
def test_a_step_of_a_wrapped_model(name: str, sizes: dict[str, Any]) -> None:
    """Steps are small, as in trained models, so that states last. With AVX-512 one head of attention to a
    million tokens takes 45 minutes, two thirds of them in float64."""
    hf = pytest.importorskip("tests.hf.hf_models")
    single = hf.make(name, torch.float32, **sizes)
    double, ids = copy.deepcopy(single).double(), walk(MILLION, hf.VOCAB)

    def step(model: torch.nn.Module) -> dict[str, Tensor]:
        wrapped = adjoint.wrap(model, adjoint.Exact(chunk_size=CHUNK))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        return current_gradients(wrapped)

    with hf.float64_throughout():
        expected = step(double)
    assert_digits(errors_of(step(single), expected))


def final_cache(name: str, chunk_size: int) -> Any:
    """Return the cache of a wrapped bfloat16 model after a sequence by chunks."""
    hf = pytest.importorskip("tests.hf.hf_models")
    model = adjoint.wrap(hf.make(name, torch.bfloat16), adjoint.Exact(chunk_size=chunk_size))
    ids = make_ids(1, 48, hf.VOCAB)
    out = model(input_ids=ids, labels=ids, use_cache=True)
    return out.cache_params if hasattr(out, "cache_params") else out.past_key_values


def first_state(cache: Any) -> Tensor:
    """Return the first recurrent state of a cache; n-grams' ids are none."""
    states = (state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values())
    return next(state for state in states if state.is_floating_point())


@pytest.mark.parametrize(
    "name", [*CACHES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CACHES)]
)
def test_a_bfloat16_model_carries_float32(name: str) -> None:
    """The first recurrent state after twelve chunks is that after one, to float32's digits."""
    by_chunks, at_once = (first_state(final_cache(name, size)) for size in (4, 64))
    assert by_chunks.dtype == torch.float32
    assert relative(by_chunks, at_once) < 1e-5
    assert relative(by_chunks.bfloat16(), by_chunks) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MiniMaxForCausalLM", "xLSTMForCausalLM"])
def test_classes_that_carry_bfloat16(name: str) -> None:
    """transformers' own caches keep these states in the model's dtype, and round what they are given."""
    cache = final_cache(name, 4)
    if name == "MiniMaxForCausalLM":
        states = [state for state in cache.linear_cache if torch.is_tensor(state)]
    else:
        states = [state for layer in cache.rnn_state.values() for state in layer]
    assert {state.dtype for state in states} == {torch.bfloat16}
