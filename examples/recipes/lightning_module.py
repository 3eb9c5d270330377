"""A LightningModule around a wrapped model: nothing of Lightning changes.

pip install lightning; python examples/recipes/lightning_module.py --steps 10
"""

import argparse
import os
import tempfile
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()


class LongTexts(lightning.LightningModule):
    def __init__(self, is_wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Mamba2Config(
            vocab_size=256,
            hidden_size=64,
            num_hidden_layers=2,
            state_size=16,
            num_heads=4,
            head_dim=32,
            n_groups=1,
        )
        self.model = Mamba2ForCausalLM(config)  # or from_pretrained(...).train()
        if is_wrapped:
            adjoint.wrap(self.model, adjoint.Exact(chunk_size=512))
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
rows = text[: len(text) // args.seqlen * args.seqlen].view(-1, args.seqlen)
losses = {}
for is_wrapped in (False, True):
    module = LongTexts(is_wrapped)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=args.steps, accelerator="cpu", default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(module, DataLoader(rows, batch_size=1))
    losses[is_wrapped] = module.losses
    print("wrapped  " if is_wrapped else "unwrapped", " ".join(f"{loss:.4f}" for loss in module.losses))
assert torch.allclose(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-4)
print("the losses are the same")
