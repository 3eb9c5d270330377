"""Sparse attention that picks keys by `topk`, which decides between equal scores by the length of the row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import (
    VOCAB,
    assert_exact,
    float64_throughout,
    loss_and_gradients,
    make,
    one_line,
    since,
)
from tests.hf.multimodal_models import make_multimodal
from tests.model_helpers import make_ids

pytestmark = pytest.mark.usefixtures("one_thread", "double")
SEQLEN = 61
PADDED = {"padded at the right": (0, 50, 0, 44), "not padded": (0, SEQLEN, 0, SEQLEN)}


def glm() -> Any:
    model = make_multimodal("Glm5NextForConditionalGeneration", index_n_heads=1)
    model.set_experts_implementation("eager")
    return model


SPARSE = {  # a single head: where it is not positive the score is 0, as many others are
    "DeepseekV32": lambda: make("DeepseekV32ForCausalLM", index_n_heads=1),
    "DeepseekV4": lambda: make("DeepseekV4ForCausalLM", index_n_heads=1),
    "Glm5Next": glm,
    "Doge": lambda: make("DogeForCausalLM", keep_window_size=9),
}


def batch_of(first: int, last: int, second_first: int, second_last: int) -> dict[str, Tensor]:
    """Return a batch of few different tokens, whose two rows are real from their first to their last."""
    ids = make_ids(2, SEQLEN, vocab_size=9) + 3
    places, limits = torch.arange(SEQLEN), torch.tensor([[first, last], [second_first, second_last]])
    mask = ((places >= limits[:, :1]) & (places < limits[:, 1:])).long()
    labels = ids.masked_fill((mask == 0) | (places == limits[:, :1]), -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


UNMASKED = since(5, 18, "without a mask its window of keys is not causal")
MARKS = {"Doge": UNMASKED}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SPARSE])
def test_chunks_pick_the_keys_of_the_whole(name: str, padding: str) -> None:
    assert VOCAB > 12
    plain, batch = SPARSE[name](), batch_of(*PADDED[padding])
    model = adjoint.wrap(copy.deepcopy(plain), adjoint.Exact(chunk_size=8))
    with float64_throughout():
        assert_exact(loss_and_gradients(model, **batch), loss_and_gradients(plain, **batch))


def test_ties_behind_padding_at_the_left_are_refused() -> None:
    """The rows of the whole have the padding in front, which chunks cut off."""
    model = adjoint.wrap(SPARSE["DeepseekV32"](), adjoint.Exact(chunk_size=8))
    batch = batch_of(0, SEQLEN, 9, SEQLEN)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with one_line("it picks keys by topk, which decides between equal scores by the row of the whole"):
        model(**batch, position_ids=positions)
