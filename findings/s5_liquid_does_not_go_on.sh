#!/usr/bin/env bash
# s5-pytorch 0.2.1, torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: a layer that returns its state, and takes one, goes on from it: two pieces give the whole's state.
# Seen: S5 does; with `liquid=True` the state after the second piece is another one. The state that is given is carried
# by Lambda alone, and not by the step that the token's input has made of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "s5-pytorch==0.2.1" "numpy<3" scipy
"$folder/env/bin/python" - <<'PY'
import torch
from s5 import s5_model


def difference(liquid):
    """Between the states after 20 tokens at once, and after 9 and 11, relative."""
    torch.manual_seed(0)
    layer = s5_model.S5(8, 12, block_count=2, liquid=liquid)
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.1 * torch.randn_like(p)
        x = torch.randn(2, 20, 8)
        _, whole = layer(x, return_state=True)
        _, state = layer(x[:, :9], return_state=True)
        _, state = layer(x[:, 9:], state=state, return_state=True)
    return float((state - whole).norm() / whole.norm())


seen = {"plain": difference(False), "liquid": difference(True)}
print({name: f"{value:.0e}" for name, value in seen.items()})
assert seen["plain"] < 1e-5 and seen["liquid"] > 1e-3, seen
PY
