"""silu(gate) value, the product in the middle of a gated MLP; it keeps both factors and nothing else for the
backward, which computes silu again."""

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.operation import CPU, Code, Operation, register
from adjoint.kernels.swiglu import reference, trial


def _forward(gate, value, backend):
    return dispatch.choose("swiglu", backend, gate.device, gate.dtype).forward(gate, value)


def _backward(d, gate, value, backend):
    d = torch.zeros_like(gate) if d is None else d
    return dispatch.choose("swiglu", backend, gate.device, gate.dtype).backward(d, gate, value)


_swiglu = operators.register(
    "swiglu",
    "Tensor gate, Tensor value",
    "str? backend",
    outputs=1,
    gradients=2,
    forward=_forward,
    fake=lambda gate, value, backend: (gate.new_empty(gate.shape),),
    backward=_backward,
)


def _backward_in_place(d, gate, value, backend):
    code = dispatch.choose("swiglu", backend, gate.device, gate.dtype)
    return code.backward(d, gate, value, in_place=True)[1]


operators.LIBRARY.define(
    "swiglu_backward_(Tensor(a!) d, Tensor gate, Tensor value, str? backend) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators.LIBRARY.impl("swiglu_backward_", _backward_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(
    "adjoint::swiglu_backward_",
    lambda d, gate, value, backend: gate.new_empty(gate.shape),
    lib=operators.LIBRARY,
)


def swiglu(gate: Tensor, value: Tensor, backend: str | None = None) -> Tensor:
    """y = silu(gate) value (SwiGLU, Shazeer 2020), in one pass, as is its backward.

    Args:
        gate, value: (…, d), floating point. Halves of one tensor are read where they are.
        backend: a name of `adjoint.backends()`; None picks one.

    Returns:
        y, computed in float32 at least and rounded once; in plain PyTorch, which a CPU uses for half
        precision, rounded as autograd does.

    Raises:
        ValueError: the shapes differ, or the backend is not usable here.
    """
    checks.shapes(value=(value, *gate.shape))
    dtype = torch.promote_types(gate.dtype, value.dtype)
    backend, _, narrow = dispatch.prepare("swiglu", backend, gate.to(dtype))
    read = narrow if backend == "cpu" else dtype
    y: Tensor = _swiglu(gate.to(read), value.to(read), backend)
    return y.to(dtype)


def swiglu_backward_(d: Tensor, gate: Tensor, value: Tensor) -> Tensor:
    """Return the cotangent of value from that of y, d, whose contiguous memory gets that of gate."""
    backend = dispatch.prepare("swiglu", None, gate)[0]
    d_value: Tensor = torch.ops.adjoint.swiglu_backward_(d, gate, value, backend)
    return d_value


OPERATION = register(
    Operation(
        name="swiglu",
        function=swiglu,
        operator="swiglu",
        code_name="swiglu",
        reference=reference,
        backends={"cpu": CPU, "triton": Code("adjoint.kernels.swiglu.triton")},
        saves_states=False,
        under_recompute="recompute",
        trial=trial.swiglu,
    )
)
