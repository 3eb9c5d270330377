#!/usr/bin/env bash
# fla-core 0.6.0 and torch 2.13.0 (CPU), seen on 30 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: pieces of a sequence, each called with the final state of the one before, give the whole: the
# recurrence of ABC attention (attention with bounded memory) takes `initial_state` and returns the final one.
# Seen: with the gate `g` they do, bit for bit. Without it, as the layer calls it, slots are normalised by a running
# sum that begins again in each call and is not in the state: the second piece is 159% off, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "einops==0.8.2"
"$folder/env/bin/pip" install -q --no-deps "fla-core==0.6.0"
"$folder/env/bin/python" - <<'PY'
import importlib.util
import pathlib
import sysconfig

import torch

# The package itself imports Triton; its reference is plain PyTorch.
path = pathlib.Path(sysconfig.get_paths()["purelib"], "fla", "ops", "abc", "naive.py")
spec = importlib.util.spec_from_file_location("abc_reference", path)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

torch.manual_seed(0)
batch, heads, tokens, slots, cut = 2, 2, 40, 4, 17
q, k, v = torch.randn(3, batch, heads, tokens, 8)
s = torch.randn(batch, heads, tokens, slots)
g = torch.nn.functional.logsigmoid(torch.randn(batch, heads, tokens, slots))


def errors(*inputs):
    run = reference.naive_recurrent_abc
    whole, _ = run(*inputs)
    first, state = run(*(x[:, :, :cut] for x in inputs), output_final_state=True)
    second, _ = run(*(x[:, :, cut:] for x in inputs), initial_state=state)
    pairs = (first, whole[:, :, :cut]), (second, whole[:, :, cut:])
    return [((piece - expected).norm() / expected.norm()).item() for piece, expected in pairs]


gated, plain = errors(q, k, v, s, g), errors(q, k, v, s)
print(f"with a gate: {gated[0]:.2f}, {gated[1]:.2f}; without: {plain[0]:.2f}, {plain[1]:.2f}")
assert max(gated) < 1e-6 and plain[0] < 1e-6 and plain[1] > 0.5, (gated, plain)
PY
