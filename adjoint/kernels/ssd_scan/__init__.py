"""The scan of Mamba-2 (state-space duality), differentiable in every tensor, both states included."""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.libraries import MambaSSM
from adjoint.kernels.operation import CPU, Code, Operation, register
from adjoint.kernels.ssd_scan import reference, trial
from adjoint.kernels.ssd_scan.triton.saved_states import ssd_scan_saved_shape


def _forward(x, dt, A, B, C, D, bias, initial_state, reset, softplus, window, halo, backend, save=False):
    code = dispatch.choose("ssd_scan", backend, x.device, x.dtype)
    return code.forward(x, dt, A, B, C, D, bias, softplus, initial_state, reset, save)


def _fake(x, dt, A, B, C, D, bias, initial_state, reset, softplus, window, halo, backend, save=False):
    batch, _, nheads, headdim = x.shape
    state = x.new_empty(batch, nheads, headdim, B.shape[-1], dtype=accumulate_dtype(x.dtype))
    code = dispatch.choose("ssd_scan", backend, x.device, x.dtype)
    return x.new_empty(x.shape), state, state.new_empty(code.saved_shape(x, B) if save else 0)


def _backward(
    dy, dfinal_state, x, dt, A, B, C, D, bias, initial_state, reset, saved, softplus, window, halo, backend
):
    code = dispatch.choose("ssd_scan", backend, x.device, x.dtype)
    inputs = x, dt, A, B, C, D, bias, softplus, initial_state, reset
    dy = torch.zeros_like(x) if dy is None else dy
    return code.backward(dy, dfinal_state, *inputs, saved, window, halo)


_ssd_scan = operators.register(
    "ssd_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? reset",
    "bool dt_softplus, SymInt? window, SymInt halo, str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(d_t A) h_{t-1} + d_t x_t ⊗ B_t,  y_t = (h_t C_t + D x_t) silu(z_t), one decay per head.

    Mamba-2 (Dao & Gu 2024), section 3; the backward is the accumulated adjoint state (docs/method.md).

    Args:
        x, z: (batch, seqlen, nheads, headdim), floating point. dt: (batch, seqlen, nheads).
        A, D, dt_bias: (nheads,); A is negative where mamba-ssm may run, which cuts decays off at 1.
        B, C: (batch, seqlen, ngroups, d_state); ngroups divides nheads.
        initial_state: (batch, nheads, headdim, d_state), zero if None.
        window, seq_idx, backend, halo: as in `selective_scan`.

    Returns:
        y like x, and the final state (batch, nheads, headdim, d_state), float32 for bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    batch, seqlen, nheads, headdim = checks.sizes("x", x, "batch", "seqlen >= 1", "nheads", "headdim")
    if B.dim() != 4 or nheads % B.shape[2]:
        raise ValueError(
            f"B must have shape (batch, seqlen, ngroups, d_state), ngroups dividing {nheads} heads; "
            f"got {tuple(B.shape)}"
        )
    checks.shapes(
        B=(B, batch, seqlen, *B.shape[2:]),
        C=(C, batch, seqlen, *B.shape[2:]),
        dt=(dt, batch, seqlen, nheads),
        A=(A, nheads),
        D=(D, nheads),
        dt_bias=(dt_bias, nheads),
        z=(z, batch, seqlen, nheads, headdim),
        initial_state=(initial_state, batch, nheads, headdim, B.shape[-1]),
    )
    if window is not None or halo:
        checks.window_and_halo(window, halo, seqlen)
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    products = batch * seqlen * B.shape[2] * MambaSSM.CHUNK  # of C and B, which mamba-ssm stores
    backend, wide, narrow = dispatch.prepare(
        "ssd_scan",
        backend,
        x,
        window,
        halo,
        reset,
        others=(dt, B, C),
        numel=products,
        headdim=headdim,
        d_state=B.shape[-1],
        dt_softplus=dt_softplus,
    )
    y, final_state, _ = _ssd_scan(
        x.to(narrow),
        dt.to(narrow),
        A.to(wide),
        B.to(narrow),
        C.to(narrow),
        None if D is None else D.to(wide),
        None if dt_bias is None else dt_bias.to(wide),
        None if initial_state is None else initial_state.to(wide),
        reset,
        dt_softplus,
        window,
        halo,
        backend,
    )
    y = y.to(x.dtype)
    if z is None:
        return y, final_state
    if halo:  # whose tokens get no gradients
        z = torch.cat([z[:, :-halo], z[:, -halo:].detach()], dim=1)
    return y * F.silu(z), final_state


OPERATION = register(
    Operation(
        name="ssd_scan",
        function=ssd_scan,
        operator="ssd_scan",
        code_name="ssd_scan",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code(
                "adjoint.kernels.ssd_scan.triton.launch",
                limits={"headdim": 128, "d_state": 256},
                saved_shape=ssd_scan_saved_shape,
            ),
        },
        saves_states=True,
        under_recompute="save",
        trial=trial.ssd_scan,
    )
)
