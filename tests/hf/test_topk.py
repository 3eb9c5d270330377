"""Sparse attention that picks keys by `topk`, which decides between equal scores by the length of the row.

Windows of keys (DeepSeek-V4, MiniMax-M3): documents that begin inside of one, and padding before them."""

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
    current_gradients,
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


METHODS = {
    "kept": adjoint.Exact(chunk_size=4),
    "recomputed": adjoint.Exact(chunk_size=5, recompute="full"),
    "few states": adjoint.Exact(chunk_size=3, checkpoints=2),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:position_ids restart")
def test_documents_that_begin_inside_a_window(method: str) -> None:
    """Windows have 2 and 5 tokens, the first document 13; the reference runs each document by itself."""
    plain, ids = make("DeepseekV4ForCausalLM"), make_ids(1, 41, vocab_size=VOCAB)
    model = adjoint.wrap(copy.deepcopy(plain), METHODS[method])
    labels, positions = ids.clone(), torch.cat([torch.arange(13), torch.arange(28)])[None]
    labels[:, [0, 13]] = -100
    with float64_throughout():
        documents = [ids[:, :13], ids[:, 13:]]
        sums = [plain(input_ids=each, labels=each).loss * (each.shape[1] - 1) for each in documents]
        expected = torch.stack(sums).sum() / 39
        expected.backward()
        loss = model(input_ids=ids, labels=labels, position_ids=positions).loss
        loss.backward()
    assert_exact((loss.detach(), current_gradients(model)), (expected.detach(), current_gradients(plain)))


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "MiniMaxM3VLForCausalLM"])
def test_padding_at_the_left_is_refused(name: str) -> None:
    """Windows of the whole row begin in the padding, where chunks cut it off."""
    model, ids = make(name, torch.float32), make_ids(2, 37, vocab_size=VOCAB)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    positions, labels = (mask.cumsum(-1) - 1).clamp(min=0), ids.masked_fill(mask == 0, -100)
    labels[1, 6] = -100
    adjoint.wrap(model, adjoint.Exact(chunk_size=4))
    with one_line("padded at the left, and it counts padding in its windows of keys"):
        model(input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions)
