"""A LightningModule with our callback, beside the same without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint
from adjoint.errors import UserError
from tests.hf.hf_models import VOCAB, make
from tests.integrations.chunk_counter import count_chunks
from tests.model_helpers import make_ids

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A causal LM, made at once or by `configure_model`."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.losses: list[float] = []
        if not is_late:
            self.model = self.make()

    def make(self) -> Any:
        return make("BambaForCausalLM", num_hidden_layers=2).eval()  # as from_pretrained returns it

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.make()

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_late", [False, True])
def test_the_callback_trains_by_chunks_with_the_unwrapped_losses(is_late: bool, tmp_path: Path) -> None:
    from adjoint.integrations.lightning import AdjointCallback

    rows, losses, chunks = make_ids(6, 37, vocab_size=VOCAB), [], []
    for callbacks in ([], [AdjointCallback(adjoint.Exact(chunk_size=16))]):
        module = Module(is_late)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", default_root_dir=tmp_path, logger=False, callbacks=callbacks,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        with count_chunks() as counter:
            trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
        losses.append(module.losses)
        chunks.append(counter.chunks)
    print(losses, chunks)
    assert chunks[0] == 0 and chunks[1] >= 3 * (3 + 2)
    assert all(abs(a - b) <= 1e-5 for a, b in zip(*losses, strict=True))
    assert module.model.training


def test_a_module_with_two_models_needs_a_name() -> None:
    from adjoint.integrations.lightning import AdjointCallback

    module = Module(is_late=False)
    module.teacher = module.make()
    with pytest.raises(UserError, match=r"has 2 models of transformers \(model, teacher\): name one"):
        AdjointCallback().setup(None, module, "fit")
    AdjointCallback(model="model").setup(None, module, "fit")
