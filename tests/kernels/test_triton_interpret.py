"""The kernels' tests once more, with Triton's kernels for the backend: its interpreter runs them on the CPU,
in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.helpers import INTERPRETED, run_interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels already")

FILES = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("operations", "norm")]
PARTS = ["selective_scan", "ssd_scan", "not selective_scan and not ssd_scan"]


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", PARTS)
def test_under_the_interpreter(part: str, marks: str) -> None:
    how = "-q", "-x", "-p", "no:cacheprovider", "-m", marks, "-k", f"triton and {part}"
    said = run_interpreted("-m", "pytest", *how, *FILES)
    assert " passed" in said and " skipped" not in said


def test_triton_is_a_backend_of_its_own_under_the_interpreter() -> None:
    """Its kernels are what the interpreter runs, it takes half precision as it is, and what is asked for by
    name."""
    code = """
import torch, adjoint
from adjoint.kernels import dispatch
from adjoint.kernels.triton.selective_scan import forward
from triton.runtime.interpreter import InterpretedFunction
from tests.kernels.helpers import BACKENDS, has_kernel
assert BACKENDS == ["triton"] and "triton" in adjoint.backends()
assert all(has_kernel(name, "triton") for name in ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm"))
assert any(isinstance(found, InterpretedFunction) for found in vars(forward).values())
assert dispatch.sequence_dtype("selective_scan", "triton", torch.empty(1).bfloat16()) == torch.bfloat16
x = torch.rand(1, 9, 4); A = -torch.rand(4, 3); B = torch.rand(1, 9, 3)
a, b = (adjoint.selective_scan(x, x, A, B, B, backend=k)[0] for k in ("triton", "reference"))
assert (a - b).norm() <= 1e-5 * b.norm()
"""
    run_interpreted("-c", code)
