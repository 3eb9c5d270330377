"""The modal filter of Hyena-LI: a causal filter of any length as a sum of decaying exponentials."""

from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.modal_scan import reference, trial
from adjoint.kernels.operation import CPU, Code, Operation, no_states, register


def _forward(u, A, R, D, initial_state, reset, window, halo, backend, save=False):
    code = dispatch.choose("modal_scan", backend, u.device, u.dtype)
    return code.forward(u, A, R, D, initial_state, reset, save)


def _fake(u, A, R, D, initial_state, reset, window, halo, backend, save=False):
    state = u.new_empty(u.shape[0], *A.shape, dtype=accumulate_dtype(u.dtype))
    code = dispatch.choose("modal_scan", backend, u.device, u.dtype)
    return u.new_empty(u.shape), state, state.new_empty(code.saved_shape(u, A) if save else 0)


def _backward(dy, dfinal_state, u, A, R, D, initial_state, reset, saved, window, halo, backend):
    code = dispatch.choose("modal_scan", backend, u.device, u.dtype)
    dy = u.new_zeros(u.shape) if dy is None else dy
    return code.backward(dy, dfinal_state, u, A, R, D, initial_state, reset, saved, window, halo)


_modal_scan = operators.register(
    "modal_scan",
    "Tensor u, Tensor A, Tensor R, Tensor? D, Tensor? initial_state, Tensor? reset",
    "SymInt? window, SymInt halo, str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
)


def modal_scan(
    u: Tensor,
    A: Tensor,
    R: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    window: int | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
    halo: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run h_{n,t} = exp(A_n) h_{n,t-1} + u_t,  y_t = sum over n of R_n h_{n,t} + D u_t in each channel.

    That is the causal convolution of u with the filter sum over n of R_n exp(A_n)^t, plus D at t = 0: the
    modal form of StripedHyena's long filters (Massaroli et al. 2023, "Laughing Hyena Distillery", section 3),
    with real poles.

    Args:
        u: (batch, seqlen, channels), floating point.
        A: (channels, order), the logarithms of the poles, usually negative. R: (channels, order), residues.
        D: (channels,), zero if None.
        initial_state: (batch, channels, order), zero if None.
        window, seq_idx, backend, halo: as in `selective_scan`.

    Returns:
        y (batch, seqlen, channels) in u's dtype and the final state (batch, channels, order), float32 for
        bfloat16 and float16.

    Raises:
        ValueError: a shape does not fit, window < 1, or the backend is not usable here.
    """
    batch, seqlen, channels = checks.sizes("u", u, "batch", "seqlen >= 1", "channels")
    order = checks.sizes("A", A, "channels", "order")[1]
    checks.shapes(
        A=(A, channels, order),
        R=(R, channels, order),
        D=(D, channels),
        initial_state=(initial_state, batch, channels, order),
    )
    checks.window_and_halo(window, halo, seqlen)
    window = None if window is not None and window > seqlen else window  # which cuts nothing
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    backend, wide, narrow = dispatch.prepare("modal_scan", backend, u, window, halo, reset, order=order)
    A_, R_, D_, initial = [None if x is None else x.to(wide) for x in (A, R, D, initial_state)]
    y, final_state, _ = _modal_scan(u.to(narrow), A_, R_, D_, initial, reset, window, halo, backend)
    return y.to(u.dtype), final_state


OPERATION = register(
    Operation(
        name="modal_scan",
        function=modal_scan,
        operator="modal_scan",
        code_name="modal_scan",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code(
                "adjoint.kernels.modal_scan.triton",
                limits={"order": 64},
                saved_shape=no_states,
                takes_windows=False,
            ),
        },
        saves_states=True,
        under_recompute="save",
        trial=trial.modal_scan,
    )
)
