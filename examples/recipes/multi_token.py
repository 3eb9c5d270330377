"""Multi-token prediction: modules above the hidden states predict the tokens after the next one.

They have the form of DeepSeek-V3's (arXiv 2412.19437, section 2.2): module k joins the hidden state of
token t with the embedding of token t + k, and runs a layer of the model's own class on it.

python examples/recipes/multi_token.py --steps 10
"""

import argparse
import copy
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

DEPTHS, WEIGHT = 2, 0.3  # modules, and λ, the weight of their mean loss


class PredictionModule(nn.Module):
    """(hidden states of tokens t, embeddings of tokens t + k) → hidden states for the head."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        width, config = lm.config.hidden_size, copy.deepcopy(lm.config)
        config.num_hidden_layers = 1
        self.norm_hidden, self.norm_embedded = nn.RMSNorm(width), nn.RMSNorm(width)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.block = type(lm.base_model)(config)  # a layer and the norm before the head
        self.block.set_input_embeddings(lm.get_input_embeddings())

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        joined = self.join(torch.cat([self.norm_hidden(hidden), self.norm_embedded(embedded)], dim=-1))
        return self.block(inputs_embeds=joined).last_hidden_state


class MultiToken(nn.Module):
    """A causal LM with prediction modules, which share its embeddings and its head."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.predictors = nn.ModuleList(PredictionModule(lm) for _ in range(DEPTHS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss for each distance: of the next token, the one after it, and so on."""
        hidden_states = [self.lm.base_model(input_ids=ids).last_hidden_state]
        for k, predictor in enumerate(self.predictors, 1):
            embedded = self.lm.get_input_embeddings()(ids[:, k:])
            hidden_states.append(predictor(hidden_states[-1][:, :-1], embedded))
        return adjoint.multi_token_loss(self.lm, hidden_states, labels=ids)


def total(losses: torch.Tensor) -> torch.Tensor:
    return losses[0] + WEIGHT * losses[1:].mean()


torch.manual_seed(0)
config = Mamba2Config(
    vocab_size=256, hidden_size=64, num_hidden_layers=3, state_size=16, num_heads=4, head_dim=32, n_groups=1
)
plain = MultiToken(Mamba2ForCausalLM(config))
model = copy.deepcopy(plain)
for wrapped in (model.lm, *(predictor.block for predictor in model.predictors)):
    adjoint.wrap(wrapped, adjoint.Exact(chunk_size=512))

text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
for one in (plain, model):
    total(one(text[None, : args.seqlen])).backward()
gradients = [
    torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None]) for one in (plain, model)
]
difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
print(f"gradient by chunks against plain autograd: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, args.steps + 1):
    start = int(torch.randint(len(text) - args.seqlen, (1,)))
    optimizer.zero_grad()
    losses = model(text[None, start : start + args.seqlen])
    loss = total(losses)
    loss.backward()
    optimizer.step()
    distances = ", ".join(f"{each:.3f}" for each in losses.tolist())
    print(f"step {step:3d}  loss {loss.item():.3f}  by distance {distances}")
