"""What the tests of interpreted Triton kernels share: inputs, poisoned buffers, comparison with the
reference.

Triton decides when it is imported whether kernels are interpreted. ``test_triton_interpret`` therefore runs
these test files in a process of their own with TRITON_INTERPRET=1; in any other they skip themselves. Sizes
are tiny: interpreted kernels are slow.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SKIPPED = "run by test_triton_interpret in a process of its own"

if INTERPRETED and importlib.util.find_spec("triton") is not None:
    from triton.runtime import interpreter

    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes ints of arrays of one element, which NumPy 2.4 refuses."""
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor_and_index


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory reads as NaN, so an element that no program writes cannot pass for a result."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return make_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
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


def error(a: Tensor, b: Tensor) -> float:
    """Relative L2 error against the float64 ``b`` (absolute where b is all zeros)."""
    scale = b.double().norm()
    return ((a.double() - b.double()).norm() / (scale if scale > 0 else 1.0)).item()


def strided(x: Tensor | None) -> Tensor | None:
    """``x`` as a view into a wider buffer whose other half is NaN: the last dimension dense, the others
    not."""
    if x is None:
        return None
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def sparse(x: Tensor | None) -> Tensor | None:
    """``x`` (n,) as every second element of a buffer that is NaN elsewhere."""
    if x is None:
        return None
    wide = torch.full((2 * len(x),), float("nan"), dtype=x.dtype)
    wide[::2] = x
    return wide[::2]


def generator(seed: int) -> Callable[..., Tensor]:
    """randn(*shape) in float64, of values that float32 holds, always the same ones."""
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64).float().double()


def resets(seed: int, batch: int, seqlen: int) -> Tensor:
    """A few document beginnings, (batch, seqlen) bool: the second token's, the last one's, and random
    ones."""
    reset = torch.rand(batch, seqlen, generator=torch.Generator().manual_seed(seed)) < 0.1
    reset[:, 1:2] = True
    reset[-1, -1] = True
    return reset


def to(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.to(dtype) for x in tensors]


def assert_close(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float, names: Sequence[str]
) -> None:
    """Every tensor of ``got`` has its counterpart's shape and, relatively, at most ``tolerance`` of error."""
    for name, x, y in zip(names, got, expected, strict=True):
        if y is None:
            assert x is None, name
        else:
            assert x is not None and x.shape == y.shape, name
            assert error(x, y) <= tolerance, (name, error(x, y))


def assert_no_worse(
    got: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor], names: Sequence[str]
) -> None:
    """CCE's rule: the error against float64 is at most that of autograd in the same 16-bit dtype."""
    for name, x, y, z in zip(names, got, exact, rounded, strict=True):
        assert error(x, y) <= error(z, y), (name, error(x, y), error(z, y))


def assert_documents_apart(
    run: Callable[..., Sequence[Any]],
    given: dict[str, Any],
    names: Sequence[str],
    lengths: Sequence[int],
    value: float = float("nan"),
) -> None:
    """All that one document of a row brings, and its tokens' cotangents, is ``value``: what other documents
    get, bit for bit, is what they get without that.

    run(given, reset) gives the results that ``names`` name; "initial_state" and "dfinal" in ``given`` belong
    to the first and to the last document, and so do "d initial_state" and "final_state" among the results."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    begins = torch.cat([torch.zeros(1, dtype=torch.bool), numbers[1:] != numbers[:-1]])[None]
    ends = {
        "initial_state": 0,
        "d initial_state": 0,
        "dfinal": len(lengths) - 1,
        "final_state": len(lengths) - 1,
    }

    def of_token(t: Tensor) -> bool:
        return t.dim() > 2 and t.shape[1] == len(numbers)

    expected = run(given, begins)
    assert all(t is None or t.isfinite().all() for t in expected)
    for document in range(len(lengths)):
        mine = {name: None if t is None else t.clone() for name, t in given.items()}
        for name, t in mine.items():
            if t is not None and of_token(t):
                t[:, numbers == document] = value
            elif t is not None and ends.get(name) == document:
                t.fill_(value)
        for name, a, b in zip(names, run(mine, begins), expected, strict=True):
            if a is not None and of_token(a):
                assert torch.equal(a[:, numbers != document], b[:, numbers != document]), (name, document)
            elif a is not None and ends.get(name, document) != document:
                assert torch.equal(a, b), (name, document)


def slow(*values: Any) -> Any:
    """A parameter's values that are left to `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)
