"""total += a @ b with a float32 total and half-precision factors: a weight's gradient, summed over chunks."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from adjoint.kernels import operators


def add_product(total: Tensor, a: Tensor, b: Tensor, overwrites: bool = False) -> None:
    """Adds a @ b to `total`, in place, or writes it there.

    On CUDA the product itself adds, in float32, without a rounded copy of its own: 8 bytes of memory traffic
    an element of the total instead of 12.

    Args:
        total: (m, n) float32. a: (m, k), b: (k, n), of one dtype, bfloat16 or float16.
        overwrites: whether the total has no values yet.
    """
    torch.ops.adjoint.add_product(total, a, b, overwrites)


def _add_product(total: Tensor, a: Tensor, b: Tensor, overwrites: bool) -> None:
    with torch._C._DisableAutocast():
        if total.is_cuda and _adds_in_float32(total.device, a.dtype):
            torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if overwrites else 1, out=total)
        elif overwrites:
            total.copy_(a @ b)
        else:
            total += a @ b


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds products to a wider total, tried on a small one: 2.8 was the first to have
    `out_dtype`, and some of its successors want a total as narrow as the factors."""
    generator = torch.Generator().manual_seed(0)
    total, a, b = (torch.randn(32, 32, generator=generator).to(device) for _ in range(3))
    a, b = a.to(dtype), b.to(dtype)
    product, first = a.double() @ b.double(), torch.full_like(total, torch.nan)
    expected = torch.stack([total + product, product])
    try:
        torch.addmm(first, a, b, out_dtype=total.dtype, beta=0, out=first)
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        error = float((torch.stack([total, first]) - expected).norm() / expected.norm())
        reason = "" if error < 1e-5 else f"it is off by {error:.0e}"
    except (RuntimeError, TypeError) as refusal:
        reason = str(refusal).splitlines()[0]
    if reason:
        warnings.warn(
            f"torch {torch.__version__} does not add a {dtype} product to a float32 sum in place ({reason}): "
            "weights' gradients are rounded before they are added; a newer torch would be faster",
            stacklevel=4,
        )
    return not reason


operators.LIBRARY.define(
    "add_product(Tensor(a!) total, Tensor a, Tensor b, bool overwrites) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators.LIBRARY.impl("add_product", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake(
    "adjoint::add_product", lambda total, a, b, overwrites: None, lib=operators.LIBRARY
)
