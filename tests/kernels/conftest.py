"""What the kernels' tests share: memory that is NaN before it is written, and Triton's interpreter made as
exact as the hardware."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels import emulated
from tests.kernels.helpers import INTERPRETED

if processor := os.environ.get("ADJOINT_EMULATE"):
    emulated.install(processor)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory reads as NaN, so an element that nobody writes cannot pass for a result."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return make_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=INTERPRETED)
def bfloat16_as_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as its bits, multiplies those in matrix products, and cuts float32 off
    to get them: give its products floats, and round to nearest even."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def as_float(x: Any) -> Any:
        return cast(None, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, as_float(a), as_float(b), *rest)

    def round_and_cast(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16).numpy()
            return TensorHandle(rounded.view(np.uint16), tl.bfloat16)
        return cast(self, x, to)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    for name in ("create_fp_trunc", "cast_impl"):
        monkeypatch.setattr(InterpreterBuilder, name, round_and_cast)
