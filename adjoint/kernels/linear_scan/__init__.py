"""Linear recurrences h_t = A_t h_{t-1} + b_t with scalar, diagonal or dense A_t, returning every state."""

import dataclasses

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.linear_scan import reference, trial
from adjoint.kernels.operation import CPU, Code, Operation, register


def _operation(a: Tensor) -> str:
    """Name of the operation that backends have: with dense decays it is another kernel."""
    return "dense_scan" if a.dim() == 4 else "linear_scan"


def _forward(a, b, initial_state, reset, window, halo, backend):
    code = dispatch.choose(_operation(a), backend, b.device, b.dtype)
    return (code.forward(a, b, initial_state, reset),)


def _fake(a, b, initial_state, reset, window, halo, backend):
    return (b.new_empty(b.shape),)


def _backward(dh, a, h, initial_state, reset, window, halo, backend):
    code = dispatch.choose(_operation(a), backend, h.device, h.dtype)
    dh = torch.zeros_like(h) if dh is None else dh
    da, db, dinitial = code.backward(dh, a, h, initial_state, reset, window, halo)
    return da, db.clone() if db is dh else db, dinitial  # with a window of one token, db is dh


_linear_scan = operators.register(
    "linear_scan",
    "Tensor a, Tensor b, Tensor? initial_state, Tensor? reset",
    "SymInt? window, SymInt halo, str? backend",
    outputs=1,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saved_schema="Tensor a, Tensor h, Tensor? initial_state, Tensor? reset",
    select_saved=lambda a, b, initial_state, reset, h: (a, h, initial_state, reset),
)


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> Tensor:
    """Return all states of h_t = A_t h_{t-1} + b_t (the generic selective SSM; docs/method.md §1).

    Args:
        a: (batch, seqlen, 1) scalar, (batch, seqlen, d_state) diagonal or (batch, seqlen, d_state, d_state)
            dense.
        b: (batch, seqlen, d_state). initial_state: (batch, d_state), zero if None.
        window, seq_idx, backend, halo: as in `selective_scan`.

    Returns:
        h (batch, seqlen, d_state) in b's dtype; h[:, -1] is the final state.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    batch, seqlen, d_state = checks.sizes("b", b, "batch", "seqlen >= 1", "d_state")
    if tuple(a.shape) not in (
        (batch, seqlen, 1),
        (batch, seqlen, d_state),
        (batch, seqlen, d_state, d_state),
    ):
        raise ValueError(
            f"a must be scalar, diagonal or dense for states {tuple(b.shape)}, got {tuple(a.shape)}"
        )
    checks.shapes(initial_state=(initial_state, batch, d_state))
    checks.window_and_halo(window, halo, seqlen)
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    dtype = accumulate_dtype(b.dtype)
    initial_state = None if initial_state is None else initial_state.to(dtype)
    a, b_ = a.to(dtype), b.to(dtype)
    backend = dispatch.fitting(_operation(a), backend, b_, window, halo, reset)
    h = _linear_scan(a, b_, initial_state, reset, window, halo, backend)
    return h.to(b.dtype)


OPERATION = register(
    Operation(
        name="linear_scan",
        function=linear_scan,
        operator="linear_scan",
        code_name="linear_scan",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code("adjoint.kernels.linear_scan.triton"),
        },
        saves_states=False,
        under_recompute="save",
        trial=trial.linear_scan,
    )
)
DENSE = register(
    dataclasses.replace(
        OPERATION,
        name="dense_scan",
        code_name="dense_scan",
        backends={**OPERATION.backends, "triton": None},
        trial=trial.dense_scan,
    )
)
