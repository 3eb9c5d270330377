"""State passing in a `Stack`: a text longer than any batch, part by part, each from the last one's state.

python examples/recipes/state_passing.py --steps 20
"""

import argparse
import os
from pathlib import Path

import torch

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(os.__file__).read_bytes()))[None]  # Python's own library, a byte a token
model = adjoint.Stack(adjoint.StackConfig(vocab_size=256, d_model=64, n_layer=2, mixer="mamba2", d_state=16))
method = adjoint.Exact(chunk_size=256)

# With gradients across the cut: the loss of the second part reaches the first one through the state.
first, second, both = text[:, :512], text[:, 512:1024], text[:, :1024]
labels = both.clone()
labels[:, :513] = -100  # the whole predicts what the second part does
expected = torch.autograd.grad(model(both, labels=labels, method=method).loss, list(model.parameters()))
before = model(first, labels=first, method=method, return_state=True)
loss = model(second, labels=second, method=method, state=before.state).loss
gradient = torch.autograd.grad(loss, list(model.parameters()))
distance = sum((g - e).square().sum() for g, e in zip(gradient, expected, strict=True)).sqrt()
difference = distance / sum(e.square().sum() for e in expected).sqrt()
print(f"gradient of two parts against the whole: {difference:.1e}")
assert difference < 1e-4

# Without gradients across the cut: the state's values go on, the graph does not grow.
optimizer, state = torch.optim.AdamW(model.parameters(), lr=2e-3), None
for step in range(args.steps):
    start = step * args.seqlen % (text.shape[1] - args.seqlen)
    ids = text[:, start : start + args.seqlen]
    out = model(ids, labels=ids, method=method, state=state, return_state=True)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    state = [tuple(tensor.detach() for tensor in layer) for layer in out.state]
    print(f"step {step + 1:3d}  loss {out.loss.item():.3f}")
