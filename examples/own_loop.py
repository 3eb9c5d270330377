"""A plain PyTorch loop over a Hugging Face model. One line keeps its memory from growing with the sequence.

python examples/own_loop.py --steps 30
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--seqlen", type=int, default=4096)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
config = Mamba2Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=16, num_heads=8, head_dim=32, n_groups=1
)
model = Mamba2ForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(...)
adjoint.wrap(model, adjoint.Exact())  # this line; everything else is as before

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, args.steps + 1):
    start = int(torch.randint(len(text) - args.seqlen, ()))
    ids = text[None, start : start + args.seqlen]
    loss = model(input_ids=ids, labels=ids).loss  # labels as ever: the model shifts them
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:3d}  loss {loss.item():.3f}")
