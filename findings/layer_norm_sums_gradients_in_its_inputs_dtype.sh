#!/usr/bin/env bash
# torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: the gradients of a norm's weight and bias, sums over all tokens, are summed in float32, at the least
# where these parameters are in float32, and are right to 0.2%: so it is for RMSNorm, and for GroupNorm with one group,
# which is the same function of rows (tokens, channels) as LayerNorm.
# Seen: LayerNorm's backward on a CPU has one sum per thread in the dtype of its input. With bfloat16 input, one thread
# and labels as frequent as words are, the bias's gradient is 8% off over 1,024 tokens, 88% over 16,384 and 98% over
# 131,072, the weight's 2%, 39% and 88%, in a bfloat16 model and, as a Linear layer's output is bfloat16 there, under
# autocast with float32 parameters. With two threads it is 76% and 14% over 16,384. With float32 input 2e-6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import copy

import torch
from torch.nn import functional as F

WIDTH, VOCABULARY = 32, 64


def errors(norm, tokens, dtype=torch.bfloat16, autocast=False, threads=1):
    """Return the relative errors of the norm's gradients to float64 sums of the same tokens' terms."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    first, head, x = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY), torch.randn(tokens, WIDTH)
    labels = torch.multinomial(1 / torch.arange(1.0, VOCABULARY + 1), tokens, replacement=True)
    norm = copy.deepcopy(norm)
    for module in first, norm, head:
        module.to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inputs = first(x if autocast else x.to(dtype)).detach()
        outputs = norm(inputs)
        outputs.retain_grad()
        F.cross_entropy(head(outputs).float(), labels).backward()
    exact = copy.deepcopy(norm).double()
    exact.zero_grad()
    exact(inputs.double()).backward(outputs.grad.double())
    pairs = zip(norm.parameters(), exact.parameters())
    return [((p.grad - q.grad).norm() / q.grad.norm()).item() for p, q in pairs]


layer_norm = torch.nn.LayerNorm(WIDTH)
others = {"RMSNorm": torch.nn.RMSNorm(WIDTH), "GroupNorm": torch.nn.GroupNorm(1, WIDTH)}
for tokens, least in (1024, 0.05), (16384, 0.5), (131072, 0.8):
    bfloat16, autocast = errors(layer_norm, tokens), errors(layer_norm, tokens, autocast=True)
    two_threads, float32 = errors(layer_norm, tokens, threads=2), errors(layer_norm, tokens, torch.float32)
    runs = {"bfloat16": bfloat16, "two threads": two_threads, "autocast": autocast, "float32": float32}
    numbers = [f"{name} {weight:.1e} {bias:.1e}" for name, (weight, bias) in runs.items()]
    print(f"{tokens} tokens, LayerNorm's weight and bias:", ", ".join(numbers))
    assert bfloat16[1] > least and autocast[1] > least and max(float32) < 1e-4
    for name, norm in others.items():
        right = errors(norm, tokens) + errors(norm, tokens, autocast=True)
        print(f"  {name}: {max(right):.1e}")
        assert max(right) < 5e-3, right
PY
