#!/usr/bin/env bash
# x-transformers 2.31.10, torch-einops-utils 0.2.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11,
# x86-64 Linux.
#
# One would guess: a `Decoder` is causal with any option. `orthog_residual=True` adds to each token's residual what is
# orthogonal to it, and `attn_orthog_projected_values=True` takes the part of each token's values out of its attention.
# Seen: both take tokens and channels as one long vector, so that a token's output depends on all later tokens: with
# another second half of the text, logits of the first half change by 0.4% to 2%. The newest token's logits, as text is
# generated, differ from those of one call by 4% and 30%. The plain decoder and `gate_residual=True` change nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "x-transformers==2.31.10" "torch-einops-utils==0.2.0"
"$folder/env/bin/python" - <<'PY'
from importlib.metadata import version

import torch
from x_transformers import Decoder, TransformerWrapper

torch.set_num_threads(1)
print({name: version(name) for name in ("x-transformers", "torch-einops-utils", "torch")})
SYMBOLS, HALF = 64, 64


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


options = {
    "plain": {},
    "gate_residual": dict(gate_residual=True),
    "orthog_residual": dict(orthog_residual=True),
    "attn_orthog_projected_values": dict(attn_orthog_projected_values=True),
}
for name, option in options.items():
    later, at_once = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, rotary_pos_emb=True, verbose=False, **option)
        net = TransformerWrapper(num_tokens=SYMBOLS, max_seq_len=2 * HALF, use_abs_pos_emb=False, attn_layers=layers)
        net = net.double().eval()
        text = torch.randint(SYMBOLS, (1, 2 * HALF))
        other = torch.cat([text[:, :HALF], torch.randint(SYMBOLS, (1, HALF))], 1)
        with torch.no_grad():
            logits = net(text)
            later.append(apart(net(other)[:, :HALF], logits[:, :HALF]))
            newest = torch.cat([net(text[:, : i + 1])[:, -1:] for i in range(2 * HALF)], 1)
            at_once.append(apart(newest, logits))
    changes = ", ".join(f"{change:.1%}" for change in later)
    print(f"{name}: other later tokens change logits by {changes}; token by token they differ by {max(at_once):.1%}")
    if "orthog" in name:
        assert min(later) > 1e-3 and min(at_once) > 0.01, (later, at_once)
    else:
        assert max(later + at_once) < 1e-5, (later, at_once)
PY
