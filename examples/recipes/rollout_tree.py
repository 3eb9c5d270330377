"""Rollouts of several turns that share their beginnings as a tree: each turn is computed once.

A prompt has two answers, the environment replies to each, and two attempts follow each reply. Every path from
the prompt to a last attempt is a row; its advantage counts for all answers on the path, so that an answer
that several rows share gets the sum. The reward counts even tokens.

python examples/recipes/rollout_tree.py --seqlen 1024 --steps 20
"""

import argparse

import torch
from transformers import BambaConfig, BambaForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seqlen", type=int, default=1024, help="tokens of the prompt, and of a reply")
args = parser.parse_args()

ANSWER, VOCAB = 16, 128
torch.manual_seed(0)
config = BambaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[1],  # attention here, Mamba-2 in the other layer
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_d_state=16,
    mamba_n_groups=1,
)
model = adjoint.wrap(BambaForCausalLM(config), adjoint.Exact())


@torch.no_grad()
def answers(rows: torch.Tensor) -> torch.Tensor:
    """Sample an answer to each row."""
    sampled = model.generate(rows, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=True)
    return torch.cat([rows, sampled[:, rows.shape[1] :]], 1)


def rollouts(prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row for each leaf of the tree, and which of its tokens the model has written."""
    first = answers(prompt.expand(2, -1))
    replies = torch.randint(3, VOCAB, (2, args.seqlen))
    rows = answers(torch.cat([first, replies], 1).repeat_interleave(2, 0))
    tokens = torch.arange(rows.shape[1]).expand_as(rows)
    in_first = (tokens >= args.seqlen) & (tokens < args.seqlen + ANSWER)
    return rows, in_first | (tokens >= rows.shape[1] - ANSWER)


def loss_of(rows: torch.Tensor, is_written: torch.Tensor) -> torch.Tensor:
    """Return the policy-gradient loss of a tree's rows."""
    rewards = (is_written & (rows % 2 == 0)).sum(1) / is_written.sum(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logprobs = adjoint.token_logprobs(model, rows, is_written)
    return -(logprobs * advantages[:, None]).sum() / is_written.sum()


rows, is_written = rollouts(torch.randint(3, VOCAB, (1, args.seqlen)))
parameters = list(model.parameters())
gradient = torch.autograd.grad(loss_of(rows, is_written), parameters)
adjoint.wrap(model, adjoint.Exact(share_prefixes=False))  # each row in full
expected = torch.autograd.grad(loss_of(rows, is_written), parameters)
adjoint.wrap(model, adjoint.Exact())
distance = sum((g - e).square().sum() for g, e in zip(gradient, expected, strict=True)).sqrt()
difference = distance / sum(e.square().sum() for e in expected).sqrt()
print(f"gradient of the tree against that of its rows: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW(parameters, lr=3e-3)
for step in range(args.steps):
    rows, is_written = rollouts(torch.randint(3, VOCAB, (1, args.seqlen)))
    loss = loss_of(rows, is_written)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    even = (rows[is_written] % 2 == 0).float().mean()
    print(f"step {step + 1:3d}  loss {loss.item():.3f}  even {even:.3f}")
