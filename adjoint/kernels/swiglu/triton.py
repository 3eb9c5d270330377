"""A gated product in one pass, in Triton: forward and backward.

    y = silu(z) v,   dz = d v p (1 + z (1 - p)),   dv = d z p      with p = sigmoid(z)

A program takes BLOCK channels of one row; the backward computes silu again. Parameters of the kernels that
are not obvious:

    *_r: strides of rows, of d_gate d's or the width; those of y and d_value are the width
    ACC: type of the arithmetic, float32 or float64
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import sigmoid

BLOCK = 1024


@triton.jit
def _forward_kernel(gate, value, y, width, gate_r, value_r, BLOCK: tl.constexpr, ACC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < width
    z = tl.load(gate + row * gate_r + i, mask=ok, other=0.0).to(ACC)
    v = tl.load(value + row * value_r + i, mask=ok, other=0.0).to(ACC)
    tl.store(y + row * width + i, z * sigmoid(z) * v, mask=ok)


@triton.jit
def _backward_kernel(
    d,
    gate,
    value,
    d_gate,
    d_value,
    width,
    d_r,
    gate_r,
    value_r,
    d_gate_r,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < width
    g = tl.load(d + row * d_r + i, mask=ok, other=0.0).to(ACC)
    z = tl.load(gate + row * gate_r + i, mask=ok, other=0.0).to(ACC)
    v = tl.load(value + row * value_r + i, mask=ok, other=0.0).to(ACC)
    p = sigmoid(z)
    tl.store(d_value + row * width + i, g * z * p, mask=ok)
    tl.store(d_gate + row * d_gate_r + i, g * v * p * (1.0 + z * (1.0 - p)), mask=ok)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., width) as (rows, width) with a dense last dimension; a view where the strides allow one."""
    return common.last_contiguous(x.reshape(-1, x.shape[-1]))


def _launch(kernel: triton.JITFunction, tensors: list[torch.Tensor], *strides: int) -> None:
    """Launch a kernel on rows of tensors.

    Args:
        strides: of their rows.
    """
    rows, width = tensors[0].shape
    with common.on_device(tensors[0]):
        kernel[(rows, triton.cdiv(width, BLOCK))](
            *(*tensors, width, *strides),
            BLOCK=BLOCK,
            ACC=common.tl_dtype(accumulate_dtype(tensors[0].dtype)),
            num_warps=4,
        )


def swiglu_forward(gate: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
    """(y,): silu(gate) value, rounded once; gate and value (..., width) of one dtype."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    z, v = _rows(gate), _rows(value)
    _launch(_forward_kernel, [z, v, y], z.stride(0), v.stride(0))
    return (y,)


def swiglu_backward(
    d: torch.Tensor, gate: torch.Tensor, value: torch.Tensor, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_gate, d_value) of :func:`swiglu_forward`; with ``in_place`` d, whose rows are a view, is d_gate."""
    d_value = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_gate = d if in_place else torch.empty_like(d_value)
    g, z, v, d_z = d.view(-1, d.shape[-1]) if in_place else _rows(d), _rows(gate), _rows(value), _rows(d_gate)
    strides = g.stride(0), z.stride(0), v.stride(0), d_z.stride(0)
    _launch(_backward_kernel, [g, z, v, d_z, d_value], *strides)
    return d_gate, d_value
