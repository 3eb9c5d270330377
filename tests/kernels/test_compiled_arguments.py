"""Tensors that the compiled CPU kernels refuse to read or write: those of another dtype or device, and
results whose layout does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from adjoint.kernels import dispatch
from adjoint.kernels.cpu import backend as cpu
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.swiglu import swiglu_backward_
from tests.kernels.helpers import INTERPRETED, OPERATIONS, make_case, run, tensors_of

pytestmark = pytest.mark.skipif(
    INTERPRETED or dispatch.why_not("cpu") is not None, reason="the compiled CPU kernels do not run here"
)

Call = tuple[cpu._Args, str, torch.dtype, tuple[int, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of compiled functions, as they are made."""
    calls: list[Call] = []
    call = cpu._Args.run

    def run_and_note(
        args: cpu._Args, function: str, dtype: torch.dtype, *options: int, **tensors: Any
    ) -> None:
        call(args, function, dtype, *options, **tensors)
        calls.append((args, function, dtype, options))

    monkeypatch.setattr(cpu._Args, "run", run_and_note)
    return calls


def attend() -> None:
    d, q, k, v = (torch.randn(1, 2, 5, 16, dtype=torch.float64) for _ in range(4))
    out, log = cpu.past_attention_forward(q, k, v, True, 0.3)
    cpu.past_attention_backward(d, q, k, v, out, log, True, 0.3)


@pytest.mark.parametrize("operation", [*OPERATIONS, "past_attention"])
def test_a_tensor_of_another_dtype_or_device_is_refused_by_name(operation: str, calls: list[Call]) -> None:
    """Every tensor of every call, forward and backward: it would be read as other numbers."""
    if operation == "past_attention":
        attend()
    else:
        case = make_case(operation, 19, backend="cpu", documents=0.2)
        outputs = run(case, tensors := tensors_of(case))
        torch.autograd.grad(sum(y.sum() for y in outputs), list(tensors.values()))
    assert len(calls) >= 2
    for args, function, dtype, options in list(calls):
        tensors = dict(vars(args))
        assert {x.dtype for x in tensors.values()} <= {torch.float64, torch.bool}
        for name, x in tensors.items():
            for wrong in (x.float(), x.to("meta")):
                vars(args)[name] = wrong
                with pytest.raises(ValueError, match=f"^the compiled CPU kernel {function} needs {name} in "):
                    args.run(function, dtype, *options, inputs={}, outputs={})
            vars(args)[name] = x


def test_inputs_of_another_dtype_are_refused_where_they_come_in() -> None:
    q, k = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attention needs k in torch.float32 on the CPU, got torch.float64"):
        cpu.past_attention_forward(q, k, q, True, 0.3)
    with pytest.raises(ValueError, match=r"attention is for float32 and float64, not torch.bfloat16"):
        cpu.past_attention_forward(*[q.bfloat16()] * 3, True, 0.3)
    with pytest.raises(ValueError, match=r"width of q must be a multiple of \d+, got shape \(1, 2, 5, 15\)"):
        cpu.past_attention_forward(*[q[..., :15]] * 3, True, 0.3)


def test_tensors_that_wrap_others_are_refused() -> None:
    """Such a class has no memory of its own: a cotangent of plain queries ended the process."""
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    out, log = cpu.past_attention_forward(q, q, q, True, 0.3)
    d = TwoTensor(torch.ones_like(q), torch.ones_like(q))
    with pytest.raises(ValueError, match=r"kernel attention reads memory, and d is a TwoTensor, which has"):
        cpu.past_attention_backward(d, q, q, q, out, log, True, 0.3, torch.zeros_like(log))


def test_results_are_written_where_they_are_or_refused() -> None:
    """A copy would get them, and be lost."""
    factors = torch.randn(2, 5, 8)
    d = torch.randn(5, 8, 2).permute(2, 0, 1)
    with pytest.raises(ValueError, match=r"^the compiled CPU kernels cannot write d_gate where it is: shape"):
        swiglu_backward_(d, factors, factors)
    off_a_boundary = cpu._aligned((1, 1, 2, 33), torch.float32)[..., 1:]
    with pytest.raises(ValueError, match=r"cannot write out where it is: shape \(1, 1, 2, 32\), strides"):
        cpu._AttentionArgs().run("attention", torch.float32, 0, inputs={}, outputs={"out": off_a_boundary})


def test_saved_states_may_come_back_off_a_vector_s_boundary() -> None:
    """A hook stores what autograd saves, and maps a file."""

    def move(x: Tensor) -> Tensor:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
        return memory.view(x.shape).copy_(x)

    def gradients(pack: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        shapes = (2, 70, 9), (2, 70, 9), (9, 33), (2, 70, 33), (2, 70, 33)
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        u, delta, A, B, C = inputs
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y, _ = selective_scan(u, delta.sigmoid(), -A.exp(), B, C, backend="cpu")
        return torch.autograd.grad(y.square().sum(), inputs)

    for moved, expected in zip(gradients(move), gradients(lambda x: x), strict=True):
        assert torch.equal(moved, expected)
