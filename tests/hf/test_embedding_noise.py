"""NEFTune's noise on embeddings: drawn in chunks, of the size that it has in the whole sequence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from tests.hf.hf_models import VOCAB, assert_exact, loss_and_gradients, make
from tests.model_helpers import make_ids

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
ALPHA, SEQLEN = 5.0, 37


def with_noise(model: Any) -> list[Tensor]:
    """Add NEFTune's hook to a model's embedding; return a list that gets each call's noise."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    embedding, drawn = model.get_input_embeddings(), list[Tensor]()
    embedding.neftune_noise_alpha = ALPHA

    def record(module: Any, inputs: Any, output: Tensor) -> None:
        drawn.append((output - torch.nn.functional.embedding(inputs[0], module.weight)).detach())

    embedding.register_forward_hook(neftune_post_forward_hook)
    embedding.register_forward_hook(record)
    return drawn


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BambaForCausalLM"])
@pytest.mark.parametrize(
    "method",
    [
        adjoint.Exact(chunk_size=16),
        adjoint.Exact(chunk_size=16, recompute="full"),
        adjoint.Exact(chunk_size=8, checkpoints=2),
        adjoint.MiniSequence(),
    ],
    ids=str,
)
def test_the_gradient_is_exact_for_the_noise_that_was_drawn(name: str, method: adjoint.Exact) -> None:
    plain = make(name, torch.float64).train()
    model = adjoint.wrap(copy.deepcopy(plain), method)
    drawn, ids = with_noise(model), make_ids(2, SEQLEN, vocab_size=VOCAB)
    loss_and_gradients(model, input_ids=ids, labels=ids)  # with the comparison on first use
    drawn.clear()
    torch.manual_seed(3)
    ours = loss_and_gradients(model, input_ids=ids, labels=ids)
    chunks, width = list[Tensor](), 0
    for piece in drawn:  # the forward's come first
        if width < SEQLEN:
            chunks.append(piece)
            width += piece.shape[1]
    noise = torch.cat(chunks, dim=1)
    assert noise.shape[1] == SEQLEN
    largest = ALPHA / (SEQLEN * noise.shape[2]) ** 0.5
    assert 0.95 * largest < noise.abs().max() <= largest * (1 + 1e-6)
    plain.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output + noise)
    assert_exact(ours, loss_and_gradients(plain, input_ids=ids, labels=ids))


def test_the_trainers_flag_runs_by_chunks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tests.hf.test_loops import METHOD, TRAINING, documents, logged, padded, tiny
    from tests.integrations.chunk_counter import count_chunks

    losses = []
    for alpha in (None, ALPHA, ALPHA):
        options = TRAINING | {"max_steps": 3, "neftune_noise_alpha": alpha}
        trainer = transformers.Trainer(
            adjoint.wrap(tiny(), METHOD),
            transformers.TrainingArguments(str(tmp_path), **options),
            train_dataset=[{"input_ids": ids} for ids in documents(16)],
            data_collator=padded,
        )
        with count_chunks() as counter:
            trainer.train()
        assert counter.chunks >= 3 * 3
        losses.append(logged(trainer, "loss"))
    without, noisy, again = losses
    assert torch.equal(noisy, again)  # the Trainer's seed decides
    assert 1e-6 < (noisy - without).abs().max() < 0.5
