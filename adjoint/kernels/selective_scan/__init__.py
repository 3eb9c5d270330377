"""The selective scan of Mamba-1, differentiable in every tensor, both states included."""

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.operation import CPU, Code, Operation, register
from adjoint.kernels.selective_scan import reference, trial
from adjoint.kernels.selective_scan.triton.saved_states import selective_scan_saved_shape


def _forward(
    u, delta, A, B, C, D, z, bias, initial_state, reset, softplus, window, halo, backend, save=False
):
    code = dispatch.choose("selective_scan", backend, u.device, u.dtype)
    return code.forward(u, delta, A, B, C, D, z, bias, softplus, initial_state, reset, save)


def _fake(u, delta, A, B, C, D, z, bias, initial_state, reset, softplus, window, halo, backend, save=False):
    state = u.new_empty(u.shape[0], *A.shape, dtype=accumulate_dtype(u.dtype))
    code = dispatch.choose("selective_scan", backend, u.device, u.dtype)
    return u.new_empty(u.shape), state, state.new_empty(code.saved_shape(u, A) if save else 0)


def _backward(
    dy,
    dfinal_state,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    bias,
    initial_state,
    reset,
    saved,
    softplus,
    window,
    halo,
    backend,
):
    """The accumulated adjoint state: a reverse scan that recomputes h from sparse saved states."""
    code = dispatch.choose("selective_scan", backend, u.device, u.dtype)
    inputs = u, delta, A, B, C, D, z, bias, softplus, initial_state, reset
    dy = torch.zeros_like(u) if dy is None else dy
    return code.backward(dy, dfinal_state, *inputs, saved, window, halo)


_selective_scan = operators.register(
    "selective_scan",
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "Tensor? initial_state, Tensor? reset",
    "bool delta_softplus, SymInt? window, SymInt halo, str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(d_t A) h_{t-1} + d_t u_t B_t,  y_t = (C_t · h_t + D u_t) silu(z_t),  d = delta or
    softplus(delta + delta_bias).

    Mamba (Gu & Dao 2023), eq. 2; the backward is the accumulated adjoint state (docs/method.md), in time
    linear in seqlen.

    Args:
        u, delta, z: (batch, seqlen, d_inner), floating point.
        A: (d_inner, d_state), usually negative. D, delta_bias: (d_inner,).
        B, C: (batch, seqlen, d_state); or (batch, seqlen, ngroups, d_state), of as many groups of consecutive
            channels, equally large.
        initial_state: (batch, d_inner, d_state), zero if None.
        window: tokens; the backward keeps, of each output's dependence on the past, the last `window` tokens.
            None keeps all: exact.
        seq_idx: (batch, seqlen) integers; where it changes a new document begins and the state starts from
            zero.
        backend: a name of `adjoint.backends()`; None picks one.
        halo: the last `halo` tokens only serve the windows of the others: they get no gradients.

    Returns:
        y (batch, seqlen, d_inner) in u's dtype and the final state (batch, d_inner, d_state), float32 for
        bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    batch, seqlen, d_inner = checks.sizes("u", u, "batch", "seqlen >= 1", "d_inner")
    d_state = checks.sizes("A", A, "d_inner", "d_state")[1]
    groups = tuple(B.shape[2:3]) if B.dim() == 4 else ()
    if groups and (groups[0] < 1 or d_inner % groups[0]):
        raise ValueError(f"B's ngroups must divide d_inner = {d_inner}, got {groups[0]}")
    checks.shapes(
        A=(A, d_inner, d_state),
        delta=(delta, batch, seqlen, d_inner),
        z=(z, batch, seqlen, d_inner),
        B=(B, batch, seqlen, *groups, d_state),
        C=(C, batch, seqlen, *groups, d_state),
        D=(D, d_inner),
        delta_bias=(delta_bias, d_inner),
        initial_state=(initial_state, batch, d_inner, d_state),
    )
    checks.window_and_halo(window, halo, seqlen)
    if groups:
        rest = window, seq_idx, backend, halo
        return _in_groups(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, *rest)
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    backend, wide, narrow = dispatch.prepare(
        "selective_scan", backend, u, window, halo, reset, d_state=d_state
    )
    u_, delta_, B_, C_, z_ = [None if x is None else x.to(narrow) for x in (u, delta, B, C, z)]
    A_, D_, bias, initial = [None if x is None else x.to(wide) for x in (A, D, delta_bias, initial_state)]
    y, final_state, _ = _selective_scan(
        u_, delta_, A_, B_, C_, D_, z_, bias, initial, reset, delta_softplus, window, halo, backend
    )
    return y.to(u.dtype), final_state


def _in_groups(u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, *rest):
    """Scan each group on its own; channels are independent of each other."""
    ngroups = B.shape[2]
    channels = (u, 2), (delta, 2), (A, 0), (D, 0), (z, 2), (delta_bias, 0), (initial_state, 1)
    pieces = [[None] * ngroups if t is None else t.chunk(ngroups, dim) for t, dim in channels]
    scans = [
        selective_scan(u, delta, A, B, C, D, z, bias, delta_softplus, h, *rest)
        for u, delta, A, D, z, bias, h, B, C in zip(*pieces, B.unbind(2), C.unbind(2), strict=True)
    ]
    y, final_state = zip(*scans, strict=True)
    return torch.cat(y, dim=2), torch.cat(final_state, dim=1)


OPERATION = register(
    Operation(
        name="selective_scan",
        function=selective_scan,
        operator="selective_scan",
        code_name="selective_scan",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code(
                "adjoint.kernels.selective_scan.triton.launch",
                limits={"d_state": 256},
                saved_shape=selective_scan_saved_shape,
            ),
        },
        saves_states=True,
        under_recompute="save",
        trial=trial.selective_scan,
    )
)
