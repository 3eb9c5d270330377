"""Both strands of DNA: the backbone reads a sequence and its reverse complement, and one head reads both.

python examples/recipes/both_strands.py --steps 10
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

LETTERS = "ACGT"
COMPLEMENT = torch.tensor([LETTERS.index(letter) for letter in "TGCA"])


class BothStrands(nn.Module):
    """One number per position, which does not depend on the strand that is read."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(backbone.config.hidden_size, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        strand = self.backbone(input_ids=ids).last_hidden_state
        other = self.backbone(input_ids=COMPLEMENT[ids].flip(1)).last_hidden_state.flip(1)
        return self.head(strand + other).squeeze(-1)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sequences, and whether a position begins CG, which both strands share."""
    ids = torch.randint(4, (2, args.seqlen), generator=torch.Generator().manual_seed(seed))
    begins = (ids[:, :-1] == LETTERS.index("C")) & (ids[:, 1:] == LETTERS.index("G"))
    return ids, nn.functional.pad(begins, (0, 1)).float()


torch.manual_seed(0)
config = Mamba2Config(
    vocab_size=4, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=4, head_dim=32, n_groups=1
)
causal_lm = Mamba2ForCausalLM(config)
plain = BothStrands(copy.deepcopy(causal_lm).base_model)
model = BothStrands(adjoint.wrap(causal_lm, adjoint.Exact(chunk_size=512)).base_model)
model.head.load_state_dict(plain.head.state_dict())

ids, target = batch(seed=0)
for one in (plain, model):
    nn.functional.binary_cross_entropy_with_logits(one(ids), target).backward()
gradients = [
    torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]) for one in (plain, model)
]
difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
print(f"gradient of both calls by chunks against plain autograd: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    ids, target = batch(seed=step)
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids), target)
    loss.backward()
    optimizer.step()
    print(f"step {step:3d}  loss {loss.item():.3f}")
