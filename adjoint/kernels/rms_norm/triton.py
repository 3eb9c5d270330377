"""RMSNorm with residual sum and gate in one pass, in Triton: forward and backward.

    s = x + residual,   v = s silu(gate),   y = (offset + weight) v / sqrt(mean(v^2) + eps)

``s`` is the new residual stream; the gate is Mamba-2's (normalised after gating). The mean runs over
groups of ``group_size`` channels, the whole row by default. A program keeps one group of a few rows in
registers, so every tensor is read and written once; weight gradients are summed over ROWS_TOGETHER rows, over
the program's rows and over programs, in a fixed order, the longer sums in float64.

Proven under the interpreter and by compilation; not measured on a GPU: warps a group and programs a
multiprocessor are reasoned, not tuned.

Backward, with n = v rstd and e = (offset + weight) dy:

    dv = rstd (e - n mean(e n)),   dweight = sum over rows of dy n

Parameters of the kernels that are not obvious:

    *_r: strides of rows; rows_each: rows that a program of the backward takes
    dweight: float64 (programs, width)
    OFFSET: of the weight; a constant, as an argument would be rounded to float32
    GROUP, BLOCK: channels of a group, and the power of two that holds them
    ACC: type of sums, float32 or float64
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import registered
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import LENGTHS, sigmoid

MAX_GROUP = registered("rms_norm").limits("triton")[
    "group_size"
]  # channels that a program holds in registers
PROGRAMS_PER_SM = 4
ROWS_TOGETHER = 64  # whose weight gradients are summed in ACC


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    x,
    residual,
    gate,
    weight,
    y,
    s,
    rstd,
    rows,
    width,
    eps,
    x_r,
    residual_r,
    gate_r,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    ok = i < GROUP
    d = group * GROUP + i
    v = tl.load(x + row * x_r + d, mask=ok, other=0.0).to(ACC)
    if HAS_RESIDUAL:
        v += tl.load(residual + row * residual_r + d, mask=ok, other=0.0).to(ACC)
        tl.store(s + row * width + d, v, mask=ok)
    if HAS_GATE:
        z = tl.load(gate + row * gate_r + d, mask=ok, other=0.0).to(ACC)
        v = v * z * sigmoid(z)
    r = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / GROUP + eps)
    tl.store(rstd + row * tl.num_programs(1) + group, r)
    w = tl.full((BLOCK,), OFFSET, ACC)
    if HAS_WEIGHT:
        w += tl.load(weight + d, mask=ok, other=0.0).to(ACC)
    tl.store(y + row * width + d, v * r * w, mask=ok)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_kernel(
    dy,
    ds,
    s,
    gate,
    weight,
    rstd,
    dx,
    dresidual,
    dgate,
    dweight,
    rows,
    width,
    rows_each,
    dy_r,
    ds_r,
    s_r,
    gate_r,
    HAS_DS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_DX: tl.constexpr,
    TOGETHER: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    share, group = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    ok = i < GROUP
    d = group * GROUP + i
    w = tl.full((BLOCK,), OFFSET, ACC)
    if HAS_WEIGHT:
        w += tl.load(weight + d, mask=ok, other=0.0).to(ACC)
    first = share.to(tl.int64) * rows_each
    count = tl.minimum(rows_each, rows - first)
    if HAS_WEIGHT:
        total = dweight + share.to(tl.int64) * width + d
    for start in range(0, count, TOGETHER):
        sum_w = tl.zeros((BLOCK,), ACC)
        for k in range(start, tl.minimum(start + TOGETHER, count)):
            row = first + k
            v = tl.load(s + row * s_r + d, mask=ok, other=0.0).to(ACC)
            g = tl.load(dy + row * dy_r + d, mask=ok, other=0.0).to(ACC)
            r = tl.load(rstd + row * tl.num_programs(1) + group).to(ACC)
            if HAS_GATE:
                z = tl.load(gate + row * gate_r + d, mask=ok, other=0.0).to(ACC)
                p = sigmoid(z)
                ungated = v
                v = v * z * p
            hat = v * r
            sum_w += g * hat
            g = g * w
            dv = (g - hat * (tl.sum(g * hat, axis=0) / GROUP)) * r
            if HAS_GATE:
                tl.store(dgate + row * width + d, dv * ungated * p * (1.0 + z * (1.0 - p)), mask=ok)
                dv = dv * z * p
            if HAS_DS:
                dv += tl.load(ds + row * ds_r + d, mask=ok, other=0.0).to(ACC)
            tl.store(dresidual + row * width + d, dv, mask=ok)
            if HAS_DX:
                tl.store(dx + row * width + d, dv, mask=ok)
        if HAS_WEIGHT:
            before = tl.load(total, mask=ok & (start > 0), other=0.0)
            tl.store(total, before + sum_w, mask=ok)
            tl.debug_barrier()  # the next rows read what these have summed


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., width) as (rows, width) with a dense last dimension; a view where the strides allow one."""
    return common.last_contiguous(x.reshape(-1, x.shape[-1]))


def _group(width: int, group_size: int | None) -> tuple[int, int, int]:
    """(channels a group, its power-of-two block, warps)."""
    group = width if group_size is None else group_size
    if group < 1 or width % group:
        raise ValueError(f"group_size={group_size} does not divide the {width} channels of the norm")
    if group > MAX_GROUP:
        raise ValueError(
            f"a norm over {group} channels is above {MAX_GROUP}, the most the Triton kernel takes"
        )
    block = triton.next_power_of_2(group)
    return group, block, min(max(block // 256, 1), 16)


def rms_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float = 1e-5,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, s, rstd): the norm of ``s = x + residual`` gated by silu(gate), s itself, and what the backward
    needs.

    x, gate, residual (..., width), weight (width,) or None for zeros. y has ``dtype`` (None: x's), s
    residual's (None without one); the norm is taken of the sum before it is rounded. rstd (..., groups) is
    float32 (float64 for float64). Raises ValueError when group_size does not divide width, or for groups
    above 16384 channels.
    """
    width = x.shape[-1]
    group, block, warps = _group(width, group_size)
    acc = accumulate_dtype(x.dtype)
    weight, flat = None if weight is None else weight.contiguous(), _rows(x)
    flat_residual = None if residual is None else _rows(residual)
    flat_gate = None if gate is None else _rows(gate)
    rows, groups = flat.shape[0], width // group
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    s = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], groups), dtype=acc, device=x.device)
    with common.on_device(x):
        _forward_kernel[(rows, groups)](
            *(flat, flat_residual, flat_gate, weight, y, s, rstd, rows, width, eps, flat.stride(0)),
            0 if flat_residual is None else flat_residual.stride(0),
            0 if flat_gate is None else flat_gate.stride(0),
            **common.has_flags(RESIDUAL=residual, GATE=gate, WEIGHT=weight),
            OFFSET=offset,
            GROUP=group,
            BLOCK=block,
            ACC=common.tl_dtype(acc),
            num_warps=warps,
        )
    return y, s, rstd


def rms_norm_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    rstd: torch.Tensor,
    group_size: int | None = None,
    x_dtype: torch.dtype | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dresidual, dweight, dgate, dx) of :func:`rms_norm_forward`; s is x without a residual, ds the
    cotangent of s as an output (None: none).

    The gradients of residual and x are the same numbers: dresidual in s's dtype, so that a float32 stream
    keeps a float32 gradient, and dx in ``x_dtype`` (None: dy's), None where that is the same. dy may have
    another dtype than both.
    """
    width = s.shape[-1]
    group, block, warps = _group(width, group_size)
    acc, x_dtype = rstd.dtype, x_dtype or dy.dtype
    weight = None if weight is None else weight.contiguous()
    flat_dy, flat_s = _rows(dy), _rows(s)
    flat_ds = None if ds is None else _rows(ds)
    flat_gate = None if gate is None else _rows(gate)
    rows, groups = flat_s.shape[0], width // group
    shares = max(1, min(rows, common.programs_that_fill(dy, PROGRAMS_PER_SM)))
    rows_each = triton.cdiv(rows, shares)
    shares = triton.cdiv(rows, rows_each)
    dresidual = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    dx = None if s.dtype == x_dtype else torch.empty(s.shape, dtype=x_dtype, device=s.device)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=s.device)
    dweight = None
    if weight is not None:
        dweight = torch.empty((shares, width), dtype=torch.float64, device=s.device)
    with common.on_device(s):
        _backward_kernel[(shares, groups)](
            *(flat_dy, flat_ds, flat_s, flat_gate, weight, rstd),
            *(dx, dresidual, dgate, dweight, rows, width, rows_each),
            flat_dy.stride(0),
            0 if flat_ds is None else flat_ds.stride(0),
            flat_s.stride(0),
            0 if flat_gate is None else flat_gate.stride(0),
            **common.has_flags(DS=ds, GATE=gate, WEIGHT=weight, DX=dx),
            OFFSET=offset,
            TOGETHER=ROWS_TOGETHER,
            GROUP=group,
            BLOCK=block,
            ACC=common.tl_dtype(acc),
            num_warps=warps,
        )
    if weight is not None and dweight is not None:
        dweight = dweight.sum(0).to(weight.dtype)
    return dresidual, dweight, dgate, dx
