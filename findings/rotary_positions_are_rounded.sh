#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `rotate_queries_or_keys` counts positions exactly and rounds the rotated vectors to the dtype of its
# input: bfloat16 queries are 0.2% off at every position. Its frequencies are a float32 parameter.
# Seen: it counts in the input's dtype, and bfloat16 has no 257. Up to 256 tokens 0.2% off, the last quarter of 1,024
# tokens 28%, of 4,096 58%, of 16,384 80%, and tokens share positions: 94% of 16,384 tokens are rotated as the token
# before them. A Linear layer's output under autocast is bfloat16, so mixed precision is affected with float32 weights.
# What it rotated first is kept: float32 queries after a call with bfloat16 ones of the same length are 48% off, too.
# `rotary(positions)` with float32 positions, and `apply_rotary_emb`, are right to 0.2%.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "rotary-embedding-torch==0.9.1"
"$folder/env/bin/python" - <<'PY'
import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

torch.manual_seed(0)
WIDTH = 64
query = torch.randn(WIDTH)


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


for tokens, low, high in (256, 0, 5e-3), (1024, 0.1, 0.5), (4096, 0.3, 0.8), (16384, 0.5, 1.2):
    x = query.expand(1, 1, tokens, WIDTH)  # the same query at every position
    exact = RotaryEmbedding(WIDTH).rotate_queries_or_keys(x)
    rotary = RotaryEmbedding(WIDTH)
    rounded = rotary.rotate_queries_or_keys(x.bfloat16())
    again = rotary.rotate_queries_or_keys(x)
    counted = apply_rotary_emb(RotaryEmbedding(WIDTH)(torch.arange(tokens).float()), x.bfloat16())
    last = slice(-(tokens // 4), None)
    off = error(rounded[:, :, last], exact[:, :, last])
    shared = (rounded[0, 0, 1:] == rounded[0, 0, :-1]).all(-1).float().mean().item()
    print(f"{tokens} tokens: last quarter {off:.1e} off, {shared:.0%} as the token before; with float32 positions "
          f"{error(counted, exact):.1e}; float32 afterwards {error(again, exact):.1e}")
    assert low < off < high and error(counted, exact) < 5e-3, off
    assert shared == 0 if tokens == 256 else shared > 0.4, shared
    if tokens == 4096:
        assert error(again, exact) > 0.3

head = torch.nn.Linear(WIDTH, WIDTH)
with torch.autocast("cpu", torch.bfloat16):
    under_autocast = RotaryEmbedding(WIDTH).rotate_queries_or_keys(head(query.expand(1, 1, 4096, WIDTH)))
expected = RotaryEmbedding(WIDTH).rotate_queries_or_keys(head(query.expand(1, 1, 4096, WIDTH)))
print(f"4096 tokens under autocast: {error(under_autocast, expected):.1e} off")
assert error(under_autocast, expected) > 0.3
PY
