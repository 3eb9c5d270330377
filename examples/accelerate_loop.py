"""One's own loop with accelerate: bfloat16 autocast, gradient accumulation, the model unwrapped for saving.

python examples/accelerate_loop.py --steps 15
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
rows = text[: len(text) // args.seqlen * args.seqlen].view(-1, args.seqlen)
config = Mamba2Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=16, num_heads=8, head_dim=32, n_groups=1
)
model = adjoint.wrap(Mamba2ForCausalLM(config), adjoint.Exact(chunk_size=512))

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=2e-3), DataLoader(rows, batch_size=1, shuffle=True)
)

step = 0
while step < args.steps:
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step += 1
                print(f"step {step:3d}  loss {loss.item():.3f}")
            optimizer.step()
            optimizer.zero_grad()
        if step == args.steps:
            break

with tempfile.TemporaryDirectory() as folder:
    accelerator.unwrap_model(model).save_pretrained(folder)  # accelerate's unwrapping; ours is adjoint.unwrap
    print("saved:", sorted(os.listdir(folder)))
