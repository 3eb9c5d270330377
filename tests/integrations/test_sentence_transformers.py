"""An embedding model of sentence-transformers, trained with GradCache's loss and our callback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import adjoint
from tests.integrations.chunk_counter import count_chunks
from tests.integrations.commands import write_data, write_model

pytest.importorskip("sentence_transformers")


@pytest.mark.usefixtures("one_thread")
def test_the_callback_trains_by_chunks_with_the_unwrapped_losses(tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        models,
    )
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    from adjoint.integrations.sentence_transformers import AdjointCallback

    write_model(tmp_path / "model")
    write_data(tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    pairs = Dataset.from_dict({"anchor": [t[:150] for t in texts], "positive": [t[20:190] for t in texts]})
    runs = []
    for callbacks in ([], [AdjointCallback(adjoint.Exact(chunk_size=32))]):
        tokens = models.Transformer(str(tmp_path / "model"), max_seq_length=200)
        model = SentenceTransformer(modules=[tokens, models.Pooling(32)], device="cpu")
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(
                str(tmp_path / "out"),
                max_steps=3,
                per_device_train_batch_size=4,
                learning_rate=1e-3,
                logging_steps=1,
                report_to="none",
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=pairs,
            loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
            callbacks=callbacks,
        )
        with count_chunks() as counter:
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, counter.chunks))
    print(runs)
    (plain, no_chunks), (ours, chunks) = runs
    assert no_chunks == 0 and len(plain) == 3
    # 3 steps of 2 × 2 small batches of 5 chunks or more: GradCache's pass without gradients and one with them
    assert chunks >= 3 * 4 * (5 + 5 + 4)
    assert all(abs(a - b) <= 1e-4 * a for a, b in zip(plain, ours, strict=True))
