"""Precision of float32 products, which PyTorch's settings may lower to TF32 or bfloat16."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

FULL = "ieee"
_lock, _open = threading.Lock(), list[Callable[[], None]]()


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products and convolutions in float32, whatever the user's settings say.

    Two runs in TF32 differ by rounding as much as by a small mistake, so results are compared without it.
    The settings are the process's: they are as before once the last of several threads has left.
    """
    with _lock:
        _open.append(_set_full() if not _open else _open[0])
    try:
        yield
    finally:
        with _lock:
            restore = _open.pop()
            if not _open:
                restore()


class _Backend(Protocol):
    """Operators of one kind on one backend, such as matrix products on CUDA."""

    fp32_precision: str


def _backends() -> list[_Backend]:
    names = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
    return [operator.attrgetter(name)(torch.backends) for name in names]


def _set_full() -> Callable[[], None]:
    """Set full precision; return a function that sets the precisions of now again."""
    backends = _backends()
    precisions = [backend.fp32_precision for backend in backends]
    # PyTorch has older settings beside these. It raises an error when one is read, in its own kernels too,
    # that says the opposite: both are set, unless they have disagreed before.
    product_precision: str | None = None
    cudnn_allows_tf32: bool | None = None
    with contextlib.suppress(RuntimeError):
        product_precision = torch.get_float32_matmul_precision()
    with contextlib.suppress(RuntimeError):
        cudnn_allows_tf32 = torch.backends.cudnn.allow_tf32
    _set_older(product_precision and "highest", None if cudnn_allows_tf32 is None else False)
    for backend in backends:
        backend.fp32_precision = FULL

    def restore() -> None:
        _set_older(product_precision, cudnn_allows_tf32)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = "none"  # follows torch.backends.fp32_precision, as far as that is enough
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision

    return restore


def _set_older(product_precision: str | None, cudnn_allows_tf32: bool | None) -> None:
    """Set PyTorch's older settings, except those that are None."""
    if product_precision is not None:
        torch.set_float32_matmul_precision(product_precision)
    if cudnn_allows_tf32 is not None:
        torch.backends.cudnn.allow_tf32 = cudnn_allows_tf32
