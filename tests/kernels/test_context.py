"""Operators inside what a program may have set up around them: autocast, a default device, a compiler that
asks which dtype a kernel takes, the capture of a CUDA graph, a device without memory."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import adjoint
from adjoint.kernels import dispatch, reference, trial
from adjoint.kernels.linear_scan import linear_scan

BACKENDS = [name for name in ("reference", "cpu") if dispatch.why_not(name) is None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_nothing_inside_an_operator(backend: str) -> None:
    torch.manual_seed(0)
    A, b = (torch.randn(2, 40, 6, 6) / 4).requires_grad_(), torch.randn(2, 40, 6, requires_grad=True)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            h = linear_scan(A, b, backend=backend)
            results.append((h, *torch.autograd.grad(h.square().sum(), (A, b))))
    for plain, inside in zip(*results, strict=True):
        assert torch.equal(plain, inside)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_device_is_not_asked(backend: str) -> None:
    torch.manual_seed(0)
    u, delta, B, C = (torch.randn(1, 70, n) for n in (6, 6, 3, 3))
    arguments = u.requires_grad_(), delta, -torch.rand(6, 3), B, C
    results = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            y, state = adjoint.selective_scan(*arguments, delta_softplus=True, backend=backend)
            results.append((y, state, *torch.autograd.grad(y.sum(), u)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_the_trial_draws_on_no_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SEQLEN", 70)
    with torch.device("meta"):
        for operation in dispatch.operations():
            found = trial.errors(reference, operation, torch.device("cpu"), torch.float64)
            assert set(found.values()) == {0.0}


def backend_that_raises(error: Exception) -> ModuleType:
    def forward(*arguments: object) -> None:
        raise error

    module = ModuleType("raising")
    vars(module).update(rms_norm_forward=forward)
    return module


def test_a_capture_is_no_place_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the capture, and the backend would pass for a broken one ever after."""
    impl = backend_that_raises(AssertionError("tried"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"rms_norm has not run on cuda:0 yet.*before capturing"):
        trial.passes(impl, "rms_norm", torch.device("cuda", 0), torch.float32)


def test_no_memory_left_is_not_held_against_the_backend() -> None:
    impl = backend_that_raises(torch.OutOfMemoryError("all taken"))
    for _ in range(2):  # not remembered either
        with pytest.raises(torch.OutOfMemoryError, match="all taken"):
            trial.passes(impl, "rms_norm", torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_half_precision_is_one_graph_under_triton() -> None:
    """Which dtype the kernels take is asked while the graph is made: imports and trials are not traced."""
    pytest.importorskip("triton")
    code = """
import torch
from adjoint.kernels.rms_norm import rms_norm
x, r = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
call = lambda x, r: rms_norm(x, torch.ones(8), backend="triton", residual=r)
results = []
for f in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
    y, s = f(x, r)
    results.append((y, s, *torch.autograd.grad(y.float().square().sum() + s.sum(), (x, r))))
for a, b in zip(*results, strict=True):
    assert a.dtype == b.dtype and torch.equal(a, b)
assert [t.dtype for t in results[0]] == [torch.bfloat16, torch.float32] * 2
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
