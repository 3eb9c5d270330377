#!/usr/bin/env bash
# torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: x[:], x[:, :] and x[...] of a tensor are the same, and cost nothing; so does x[:, -n:] of n columns.
# Seen: x[:, :] and x[...] have a backward that hands the gradient on. That of x[:] and of x[:, -n:] fills a tensor as
# large as x with zeros and copies the gradient into it. Models that drop what is before a chunk by
# `y[:, :, -seq_len:]` pay for that where nothing is before it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def operators_of_backward(index):
    x = torch.randn(5, 4, requires_grad=True)
    y = x[index]
    assert torch.equal(y, x)
    d = torch.ones_like(y)
    with Operators() as operators:
        torch.autograd.grad(y, x, d)
    return [name for name in operators.names if name != "aten::detach"]


everything = slice(None)
indices = {"[:]": everything, "[:, -4:]": (everything, slice(-4, None)), "[:, :]": (everything, everything), "[...]": ...}
seen = {name: operators_of_backward(index) for name, index in indices.items()}
print(seen)
assert seen["[:]"] == seen["[:, -4:]"] == ["aten::slice_backward"] and seen["[:, :]"] == seen["[...]"] == [], seen
PY
