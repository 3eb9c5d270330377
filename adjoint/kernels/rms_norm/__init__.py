"""RMSNorm, optionally gated, and of a sum that goes on as the residual stream; it keeps its input and one
number a row for the backward."""

from typing import overload

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators, recorded
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import CPU, Code, Operation, register
from adjoint.kernels.rms_norm import reference, trial


def _forward(x, weight, gate, residual, eps, group_size, offset, x_dtype, dtype, backend, save=False):
    code = dispatch.choose("rms_norm", backend, x.device, x.dtype)
    y, s, rstd = code.forward(x, weight, gate, residual, eps, group_size, dtype, offset)
    return y, x.new_empty(0) if s is None else s, rstd if save else None


def _fake(x, weight, gate, residual, eps, group_size, offset, x_dtype, dtype, backend, save=False):
    s = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    groups = x.shape[-1] // group_size
    rstd = x.new_empty(
        (*x.shape[:-1], groups) if save else 0, dtype=accumulate_dtype(x.dtype) if save else None
    )
    return x.new_empty(x.shape, dtype=dtype), s, rstd


def _backward(dy, ds, s, weight, gate, rstd, eps, group_size, offset, x_dtype, dtype, backend):
    """(cotangent of the sum, dweight, dgate, the first once more as x's where x has another dtype)."""
    code = dispatch.choose("rms_norm", backend, s.device, x_dtype)
    dy = torch.zeros_like(s, dtype=dtype) if dy is None else dy
    # without a residual the sum is an empty stand-in, and so is its cotangent
    ds = None if ds is None or ds.shape != s.shape else ds
    return code.backward(dy, ds, s, weight, gate, rstd, group_size, x_dtype, offset)


def _backward_fake(dy, ds, s, weight, gate, rstd, eps, group_size, offset, x_dtype, dtype, backend):
    dgate = None if gate is None else gate.new_empty(gate.shape)
    dx = None if s.dtype == x_dtype else s.new_empty(s.shape, dtype=x_dtype)
    dweight = None if weight is None else weight.new_empty(weight.shape)
    return s.new_empty(s.shape), dweight, dgate, dx


def _route(ds, dweight, dgate, dx):
    return dx if dx.shape == ds.shape else ds, dweight, dgate, ds


_rms_norm = operators.register(
    "rms_norm",
    "Tensor x, Tensor? weight, Tensor? gate, Tensor? residual",
    "float eps, int group_size, float offset, ScalarType x_dtype, ScalarType dtype, str? backend",
    outputs=2,
    gradients=4,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
    saved_schema="Tensor s, Tensor? weight, Tensor? gate, Tensor rstd",
    select_saved=lambda x, weight, gate, residual, y, s, rstd: (
        x if residual is None else s,
        weight,
        gate,
        rstd,
    ),
    backward_fake=_backward_fake,
    route=_route,
)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = ...,
    gate: Tensor | None = ...,
    group_size: int | None = ...,
    backend: str | None = ...,
    residual: None = ...,
    dtype: torch.dtype | None = ...,
    offset: float = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = ...,
    gate: Tensor | None = ...,
    group_size: int | None = ...,
    backend: str | None = ...,
    *,
    residual: Tensor,
    dtype: torch.dtype | None = ...,
    offset: float = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    group_size: int | None = None,
    backend: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = (offset + weight) v / sqrt(mean(v²) + eps) with v = s silu(gate), or s, and s = x + residual, or x
    (Zhang & Sennrich 2019; gated as in Mamba-2, Dao & Gu 2024, section 7).

    With a residual the sum is computed once, in the pass that normalises it, and given back: the stream goes
    on from it. In the backward too the cotangent of s that comes from further on is added in the norm's pass.

    Args:
        x, gate: (…, d), floating point. weight: (d,); None for zeros.
        group_size: channels a mean is taken over; all d if None.
        backend: a name of `adjoint.backends()`; None picks one.
        residual: (…, d), floating point; may be wider than x, as the stream of a model under autocast is.
        dtype: y's; x's if None. With what a matrix product behind the norm reads nothing is cast in between.
        offset: added to the weight in float32 at least, as the 1 of weights that are trained around it.

    Returns:
        y, computed in float32 at least and rounded once to `dtype`; with a residual (y, s), s in residual's
        dtype: the sum is rounded to it, once, after the norm was taken of it.

    Raises:
        ValueError: a shape does not fit, group_size does not divide d, or the backend is not usable here.
    """
    d = x.shape[-1]
    checks.shapes(weight=(weight, d), gate=(gate, *x.shape), residual=(residual, *x.shape))
    group_size = d if group_size is None else group_size
    if group_size < 1 or d % group_size:
        raise ValueError(f"group_size must divide the {d} channels, got {group_size}")
    stream, dtype = residual, x.dtype if dtype is None else dtype
    if residual is not None and residual.dtype == torch.float64:  # the sum is one in float64
        x = x.double()
    tried = dtype if dtype.itemsize == 2 else x.dtype  # its trial writes half precision from float32 too
    backend, wide, narrow = dispatch.prepare("rms_norm", backend, x, dtype=tried, group_size=group_size)
    if residual is not None and narrow == wide:  # only kernels for half precision read two dtypes
        wide = narrow = torch.promote_types(wide, accumulate_dtype(residual.dtype))
        stream = residual.to(wide)
    gate = None if gate is None else gate.to(narrow)
    is_widened = backend == "triton" and weight is not None and weight.dtype == narrow  # while it is read
    if weight is not None and not is_widened:
        weight = weight.to(wide)
    options = eps, group_size, offset, narrow, dtype, backend
    y, s, _ = _rms_norm(x.to(narrow), weight, gate, stream, *options)
    if residual is not None:
        return y, s.to(residual.dtype)
    recording = recorded.current.recording
    if recording is not None:
        recording.note_cheap_result(
            y, lambda x, *others: _rms_norm(x.to(narrow), *others, *options)[0], x, weight, gate, None
        )
    return y


def l2_norm(x: Tensor, eps: float = 1e-6, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    """Return scale x / sqrt(Σ x² + eps) over the last dimension: the RMSNorm of equal weights.

    Args:
        x: (…, d), floating point.
        dtype: as in `rms_norm`.
    """
    d = x.shape[-1]
    flat = x.flatten(-2) if x.dim() > 2 else x  # heads that are a slice of wider rows stay where they are
    return rms_norm(flat, None, eps / d, group_size=d, dtype=dtype, offset=scale * d**-0.5).view(x.shape)


OPERATION = register(
    Operation(
        name="rms_norm",
        function=rms_norm,
        operator="rms_norm",
        code_name="rms_norm",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code("adjoint.kernels.rms_norm.triton", limits={"group_size": 16384}),
        },
        saves_states=False,
        under_recompute="recompute",
        trial=trial.rms_norm,
    )
)
