#!/usr/bin/env bash
# lru-pytorch 0.1.3 and torch 2.13.0 (CPU), seen on 30 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `layer(input, state)` starts every row of a batch (batch, tokens, features) at the state, and the
# state after a call can be read from `layer.state`, to go on with the next piece of a sequence.
# Seen: the first row alone starts there, all others at zeros, without a word; and `layer.state` is zeros after each
# call, so that pieces of one sequence cannot be joined.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "lru-pytorch==0.1.3"
"$folder/env/bin/python" - <<'PY'
import torch
from LRU_pytorch import LRU

torch.manual_seed(0)
layer, x = LRU(4, 5, 6), torch.randn(3, 7, 4)
state = torch.complex(torch.randn(6), torch.randn(6))
with torch.no_grad():
    together = layer(x, state)
    after = layer.state.abs().max().item()
    one_by_one = torch.cat([layer(row[None], state) for row in x])
    from_zeros = torch.cat([layer(row[None], torch.zeros_like(state)) for row in x])
rows = [((a - b).norm() / b.norm()).item() for a, b in zip(together, one_by_one)]
others = (together[1:] - from_zeros[1:]).abs().max().item()
print("relative difference of each row:", [f"{e:.2f}" for e in rows], "state after the call:", after)
assert rows[0] < 1e-6 and min(rows[1:]) > 0.05 and others < 1e-6 and after == 0, (rows, others, after)
PY
