"""The trial a backend stands before it is picked by itself: right ones pass, wrong and broken ones do not."""

import functools
import os
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
import torch

import adjoint
from adjoint.kernels import dispatch, reference, trial

CPU = torch.device("cpu")
OPERATIONS = sorted(trial._PROBLEMS)


def test_every_operation_has_a_trial():
    assert sorted(dispatch.operations()) == OPERATIONS


@pytest.mark.skipif("cpu" not in adjoint.backends(), reason="no C++ compiler")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_compiled_backend_passes(operation):
    from adjoint.kernels.cpu import backend as cpu

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.float64):
            assert trial.passes(cpu, operation, CPU, dtype)


def backend(**changed):
    """The reference as if it were another one, some of its functions changed."""
    module = ModuleType("changed")
    functions = {k: functools.partial(v) for k, v in vars(reference).items() if k.endswith("ward")}
    vars(module).update(functions | changed)
    return module


@pytest.fixture
def short(monkeypatch):
    """A trial of a fraction of a second."""
    monkeypatch.setattr(trial, "SEQLEN", 150)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_wrong_result_is_seen(operation, function, result):
    right = getattr(reference, f"{operation}_{function}")

    def wrong(*arguments):
        """The first or the last result is off by a thousandth."""
        results = right(*arguments)
        if isinstance(results, torch.Tensor):
            return results * 1.001
        results = list(results)
        found = [i for i, r in enumerate(results) if r is not None][-result]
        results[found] = results[found] * 1.001
        return tuple(results)

    assert trial.passes(backend(), operation, CPU, torch.float32)
    with pytest.warns(UserWarning, match=f"{operation} runs in plain PyTorch"):
        assert not trial.passes(backend(**{right.__name__: wrong}), operation, CPU, torch.float32)


def test_a_backend_that_fails_is_passed_over_with_one_warning():
    def broken(*arguments):
        raise RuntimeError("no kernel image\nis available")

    impl = backend(rms_norm_forward=broken)
    with pytest.warns(
        UserWarning, match="rms_norm runs in plain PyTorch on cpu.*no kernel image is available"
    ):
        assert not trial.passes(impl, "rms_norm", CPU, torch.float32)


@pytest.mark.parametrize(
    "operation", [pytest.param(o, marks=() if o == "rms_norm" else pytest.mark.slow) for o in OPERATIONS]
)
def test_triton_passes_under_the_interpreter(operation):
    pytest.importorskip("triton")
    code = f"""
import torch, warnings
from adjoint.kernels import trial
from adjoint.kernels.triton import backend as triton_backend
warnings.simplefilter("error")
trial.SEQLEN, trial.WINDOWS = 67, (None,)
assert trial.passes(triton_backend, {operation!r}, torch.device("cpu"), torch.float32)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_triton_takes_half_precision_as_it_is():
    """Under the interpreter: bfloat16 in, bfloat16 gradients out, states in float32, near float64's."""
    pytest.importorskip("triton")
    code = """
import torch
from adjoint.kernels import dispatch
from adjoint.kernels.triton.selective_scan import launch as triton_selective_scan
from adjoint import selective_scan

seen = []
forward = triton_selective_scan.selective_scan_forward
from adjoint.kernels.triton import backend as triton_backend
triton_backend.selective_scan_forward = lambda u, *rest: seen.append(u.dtype) or forward(u, *rest)
torch.manual_seed(0)
u, delta, z, dy = (torch.randn(1, 21, 6) for _ in range(4))
B, C = torch.randn(1, 21, 4), torch.randn(1, 21, 4)
A, D, bias, state = -torch.rand(6, 4), torch.randn(6), torch.randn(6), torch.randn(1, 6, 4)
half = [x.bfloat16() for x in (u, delta, B, C, z)]

def run(dtype, backend):
    leaves = [x.to(dtype).requires_grad_() for x in half]
    own = torch.float64 if dtype == torch.float64 else torch.float32
    wide = [x.to(own).requires_grad_() for x in (A, D, bias, state)]
    u, delta, B, C, z = leaves
    A_, D_, bias_, state_ = wide
    y, last = selective_scan(u, delta, A_, B, C, D_, z, bias_, True, state_, backend=backend)
    grads = torch.autograd.grad((y.double() * dy).sum() + last.double().sum(), [*leaves, *wide])
    return y, last, *grads

got, want = run(torch.bfloat16, "triton"), run(torch.float64, "reference")
assert seen == [torch.bfloat16], seen
assert [g.dtype for g in got] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 5 + [torch.float32] * 4
for a, b in zip(got, want):
    assert (a.double() - b).norm() <= 2e-2 * b.norm(), (a, b)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
