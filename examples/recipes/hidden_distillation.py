"""Distillation on hidden states: the teacher runs under no_grad, both by chunks, with a loss of your own.

python examples/recipes/hidden_distillation.py --steps 10
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()


def make(hidden_size: int, num_layers: int) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    heads = hidden_size // 16
    config = Mamba2Config(
        vocab_size=256,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        state_size=16,
        num_heads=heads,
        head_dim=32,
        n_groups=1,
    )
    return Mamba2ForCausalLM(config)


text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
teacher = adjoint.wrap(make(128, 4), adjoint.Exact(chunk_size=512))
plain, student = make(64, 2), adjoint.wrap(make(64, 2), adjoint.Exact(chunk_size=512))
project = nn.Linear(64, 128)  # the student's width to the teacher's


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = teacher.base_model(input_ids=ids).last_hidden_state
    return nn.functional.mse_loss(project(model.base_model(input_ids=ids).last_hidden_state), target)


def gradient_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    parameters = list(model.base_model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, ids), parameters)])


first = text[None, : args.seqlen]
expected = gradient_of(plain, first)
difference = (gradient_of(student, first) - expected).norm() / expected.norm()
print(f"gradient by chunks against plain autograd: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW([*student.base_model.parameters(), *project.parameters()], lr=2e-3)
for step in range(1, args.steps + 1):
    start = int(torch.randint(len(text) - args.seqlen, (1,)))
    optimizer.zero_grad()
    loss = loss_of(student, text[None, start : start + args.seqlen])
    loss.backward()
    optimizer.step()
    print(f"step {step:3d}  loss {loss.item():.3f}")
