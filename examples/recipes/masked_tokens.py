"""A masked-token objective on DNA-like text, with layers that read in both directions.

python examples/recipes/masked_tokens.py --steps 40
"""

import argparse

import torch

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()

torch.manual_seed(0)
MASK = 4  # after the ids of A, C, G and T
MOTIFS = torch.randint(4, (8, 12))
model = adjoint.Stack(adjoint.StackConfig(vocab_size=5, d_model=48, n_layer=2, bidirectional="tied"))


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Motifs one after another; a seventh of the bases is masked and predicted, each in its own place."""
    ids = MOTIFS[torch.randint(len(MOTIFS), (tokens // 12 + 1,))].flatten()[None, :tokens]
    masked = torch.rand(ids.shape) < 1 / 7
    return ids.masked_fill(masked, MASK), ids.masked_fill(~masked, -100)


ids, labels = batch(args.seqlen)
plain, by_chunks = (
    torch.autograd.grad(model(ids, labels=labels, method=method).loss, list(model.parameters()))
    for method in (adjoint.Backprop(), adjoint.Exact(chunk_size=256))
)
distance = sum((g - e).square().sum() for g, e in zip(by_chunks, plain, strict=True)).sqrt()
difference = distance / sum(e.square().sum() for e in plain).sqrt()
print(f"gradient by chunks against backpropagation: {difference:.1e}")
assert difference < 1e-4

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(args.steps):
    ids, labels = batch(args.seqlen)
    loss = model(ids, labels=labels, method=adjoint.Exact()).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1:3d}  loss {loss.item():.3f}")
