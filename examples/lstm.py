"""An LSTM that learns to recall a mark from far back, by exact gradients through the whole sequence.

python examples/lstm.py --steps 5 --seqlen 1048576
python examples/lstm.py --steps 1 --seqlen 65536 --plain     # by autograd, for comparison: memory grows
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import adjoint
from adjoint.memory import PeakMemory

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--seqlen", type=int, default=16_384)
parser.add_argument("--plain", action="store_true", help="without adjoint.checkpoint_sequence")
args = parser.parse_args()

torch.manual_seed(0)
lstm, head = nn.LSTM(4, 64, batch_first=True), nn.Linear(64, 4)
optimizer = torch.optim.AdamW([*lstm.parameters(), *head.parameters()], lr=3e-3)


def loss_of_chunk(y, target):
    """Return the summed loss, chunk by chunk: neither y nor the head's output is ever whole."""
    return F.cross_entropy(head(y).flatten(0, 1), target.flatten(), reduction="sum")


for step in range(1, args.steps + 1):
    symbols = torch.randint(4, (1, args.seqlen))
    target = symbols.cummax(dim=1).values  # the largest symbol so far
    x, began = F.one_hot(symbols, 4).float(), time.perf_counter()
    state = torch.zeros(1, 1, 64), torch.zeros(1, 1, 64)
    with PeakMemory(x.device) as peak:
        if args.plain:
            loss = loss_of_chunk(lstm(x, state)[0], target)
        else:
            loss, _ = adjoint.checkpoint_sequence(lstm, x, state, loss=loss_of_chunk, target=target)
        (loss / args.seqlen).backward()
    optimizer.step()
    optimizer.zero_grad()
    memory = "" if peak.bytes is None else f"  peak {peak.bytes / 2**20:,.0f} MiB"
    print(
        f"step {step:3d}  loss {loss.item() / args.seqlen:.4f}  {time.perf_counter() - began:.1f} s{memory}"
    )
