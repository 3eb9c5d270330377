"""Windows of keys (DeepSeek-V4, MiniMax-M3): documents that begin inside of one, and padding before them."""

from __future__ import annotations

import copy

import pytest
import torch

import adjoint
from tests.hf.hf_models import VOCAB, assert_exact, current_gradients, float64_throughout, make, one_line
from tests.model_helpers import make_ids

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
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
