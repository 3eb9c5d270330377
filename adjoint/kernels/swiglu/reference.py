"""silu(gate) value in plain PyTorch."""

import torch
import torch.nn.functional as F


def swiglu_forward(gate, value):
    """The product, alone in a tuple."""
    return (F.silu(gate) * value,)


def swiglu_backward(d, gate, value, in_place=False):
    """The cotangents of gate and value; with `in_place` the first in d's memory.

    They are what a chunk's backward holds most of, so nothing else as large is made."""
    d_value = F.silu(gate).mul_(d)
    d_gate = d.mul_(value) if in_place else d * value
    return torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate), d_value
