"""The generalised delta rule, whose transition is diagonal plus low-rank (DPLR), as in RWKV-7 (Peng et al.
2025, "RWKV-7 Goose"); differentiable in every tensor, both states included."""

from __future__ import annotations

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.dplr_delta_rule import reference, trial
from adjoint.kernels.operation import CPU, Code, Operation, register

NAME = "dplr_delta_rule"


def _forward(q, k, v, a, b, g, initial_state, reset, backend, save=False):
    code = dispatch.choose(NAME, backend, q.device, q.dtype)
    return code.forward(q, k, v, a, b, g, initial_state, reset, save)


def _fake(q, k, v, a, b, g, initial_state, reset, backend, save=False):
    batch, _, nheads, d_k = k.shape
    state = g.new_empty(batch, nheads, d_k, v.shape[-1])
    code = dispatch.choose(NAME, backend, q.device, q.dtype)
    return v.new_empty(v.shape), state, state.new_empty(code.saved_shape(k, v) if save else 0)


def _backward(do, dfinal_state, q, k, v, a, b, g, initial_state, reset, saved, backend):
    code = dispatch.choose(NAME, backend, q.device, q.dtype)
    do = torch.zeros_like(v) if do is None else do
    return code.backward(do, dfinal_state, q, k, v, a, b, g, initial_state, reset, saved)


_dplr_delta_rule = operators.register(
    NAME,
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor g, Tensor? initial_state, Tensor? reset",
    "str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
)


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = (diag(exp(g_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t.

    RWKV-7 has S transposed, and a = -κ̂, b = κ̂ times the in-context learning rate. With a = -exp(g) k, b = β k
    and β v in the place of v, it is Kimi Delta Attention; use `gated_delta_rule` for that, which does less
    work. States stay bounded only if a and b make the transition a contraction, which nothing checks.

    Args:
        q: (batch, seqlen, nheads, d_k), scaled already.
        k, a, b: of q's shape; a reads the state before it decays.
        v: (batch, seqlen, nheads, d_v).
        g: log decays of the keys' channels, finite, 0 or less, of q's shape.
        initial_state: (batch, nheads, d_k, d_v); zero if None.
        seq_idx, backend: as in `selective_scan`.

    Returns:
        o (batch, seqlen, nheads, d_v) and the final state (batch, nheads, d_k, d_v), in float32, or float64
        for float64 inputs.

    Raises:
        ValueError: a shape does not fit, or the backend is not usable here.
    """
    batch, seqlen, nheads, d_k = checks.sizes("k", k, "batch", "seqlen >= 1", "nheads", "d_k")
    checks.shapes(
        q=(q, *k.shape),
        a=(a, *k.shape),
        b=(b, *k.shape),
        g=(g, *k.shape),
        v=(v, batch, seqlen, nheads, v.shape[-1]),
        initial_state=(initial_state, batch, nheads, d_k, v.shape[-1]),
    )
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    backend, wide, narrow = dispatch.prepare(NAME, backend, v, reset=reset, d_k=d_k)
    q, k, v, a, b = (t.to(narrow) for t in (q, k, v, a, b))
    initial = None if initial_state is None else initial_state.to(wide)
    o, final_state, _ = _dplr_delta_rule(q, k, v, a, b, g.to(wide), initial, reset, backend)
    return o.to(wide), final_state


OPERATION = register(
    Operation(
        name=NAME,
        function=dplr_delta_rule,
        operator=NAME,
        code_name=NAME,
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code(
                "adjoint.kernels.dplr_delta_rule.triton.launch",
                limits={"d_k": 256},
                saved_shape=reference.dplr_delta_rule_saved_shape,
            ),
        },
        saves_states=True,
        under_recompute="save",
        trial=trial.dplr_delta_rule,
    )
)
