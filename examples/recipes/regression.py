"""A regression head on a long sequence: any module on the backbone's hidden states, with any loss.

python examples/recipes/regression.py --steps 10
"""

import argparse
import copy

import torch
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()


class Regressor(nn.Module):
    """One number per sequence, from the last token's hidden state."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(backbone.config.hidden_size, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(input_ids=ids).last_hidden_state[:, -1]).squeeze(-1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and for each row the share of even ones among its first hundred."""
    ids = torch.randint(256, (4, args.seqlen), generator=torch.Generator().manual_seed(seed))
    return ids, (ids[:, :100] % 2 == 0).float().mean(1)


torch.manual_seed(0)
config = Mamba2Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=16, num_heads=8, head_dim=32, n_groups=1
)
causal_lm = Mamba2ForCausalLM(config)
plain = Regressor(copy.deepcopy(causal_lm).base_model)
model = Regressor(adjoint.wrap(causal_lm, adjoint.Exact(chunk_size=512)).base_model)
model.head.load_state_dict(plain.head.state_dict())

ids, target = batch(seed=0)
for one in (plain, model):
    nn.functional.mse_loss(one(ids), target).backward()
gradients = [
    torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]) for one in (plain, model)
]
difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
print(f"gradient by chunks against plain autograd: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    ids, target = batch(seed=step)
    loss = nn.functional.mse_loss(model(ids), target)
    loss.backward()
    optimizer.step()
    print(f"step {step:3d}  loss {loss.item():.3f}")
