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
CHUNK = 4096
# A dense mixer's A_proj has a gradient far smaller than its terms. Mamba-3's angles add up over all tokens:
# of a token's two cotangents, which cancel, the rounding is left, and is summed over those behind.
LIMITS = {"dense": 3e-4, "mamba3": 1e-3}
# Of each kind of cache; the others of transformers' recurrent classes share their code.
CACHES = ["Mamba2ForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM"]
MORE_CACHES = ["MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM"]
MORE_CACHES += ["Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM", "KimiLinearForCausalLM"]


def walk(tokens: int, vocab_size: int) -> Tensor:
    """Return ids (1, tokens) that can be learnt: of random ones gradients are what is left of large terms."""
    return make_ids(1, tokens, 3).cumsum(1) % vocab_size


def assert_digits(single: dict[str, Tensor], double: dict[str, Tensor], limit: float = 1e-5) -> None:
    """Raise AssertionError unless all gradients in float32 are those in float64."""
    errors = {name: relative(single[name], double[name]) for name in double}
    assert max(errors.values()) < limit, errors


@pytest.mark.slow
@pytest.mark.parametrize("mixer", RECURRENT)
def test_a_step_of_a_stack(mixer: str) -> None:
    """A sequence is trained by chunks."""
    torch.manual_seed(0)
    model = adjoint.Stack(adjoint.StackConfig(mixer=mixer, **SIZES))
    ids, method = walk(1 << 20 if mixer == "mamba2" else 1 << 16, 61), adjoint.Exact(chunk_size=CHUNK)
    double = gradients(copy.deepcopy(model).double(), ids, ids, method)[1]
    assert_digits(gradients(model, ids, ids, method)[1], double, LIMITS.get(mixer, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens"), [("Mamba2ForCausalLM", 1 << 16), ("Qwen3_5ForCausalLM", 1 << 13)]
)
def test_a_step_of_a_wrapped_model(name: str, tokens: int) -> None:
    """Steps are small, as in trained models, so that states last."""
    hf = pytest.importorskip("tests.hf.hf_models")
    single = (hf.trained_like if "Qwen" in name else hf.make)(name, torch.float32)
    double, ids = copy.deepcopy(single).double(), walk(tokens, hf.VOCAB)

    def step(model: torch.nn.Module) -> dict[str, Tensor]:
        wrapped = adjoint.wrap(model, adjoint.Exact(chunk_size=CHUNK))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        return current_gradients(wrapped)

    with hf.float64_throughout():
        expected = step(double)
    assert_digits(step(single), expected)


def final_cache(name: str, chunk_size: int) -> Any:
    """Return the cache of a wrapped bfloat16 model after a sequence by chunks."""
    hf = pytest.importorskip("tests.hf.hf_models")
    model = adjoint.wrap(hf.make(name, torch.bfloat16), adjoint.Exact(chunk_size=chunk_size))
    ids = make_ids(1, 48, hf.VOCAB)
    out = model(input_ids=ids, labels=ids, use_cache=True)
    return out.cache_params if hasattr(out, "cache_params") else out.past_key_values


@pytest.mark.parametrize(
    "name", [*CACHES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CACHES)]
)
def test_a_bfloat16_model_carries_float32(name: str) -> None:
    """The first layer's state after twelve chunks is that after one, to float32's digits."""
    by_chunks, at_once = (final_cache(name, size).layers[0].recurrent_states[0] for size in (4, 64))
    assert by_chunks.dtype == torch.float32
    assert relative(by_chunks, at_once) < 1e-5
    assert relative(by_chunks.bfloat16(), by_chunks) > 1e-4


@pytest.mark.slow
def test_minimax_carries_bfloat16() -> None:
    """transformers' own class keeps its state in the model's dtype, and rounds what it is given to that."""
    cache = final_cache("MiniMaxForCausalLM", 4)
    assert {state.dtype for state in cache.linear_cache if torch.is_tensor(state)} == {torch.bfloat16}
