"""The gated delta rule (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"), and with a decay for each
channel of the keys Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"); differentiable in every tensor, both
states included."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators
from adjoint.kernels.gated_delta_rule import reference, trial
from adjoint.kernels.operation import CPU, Code, Operation, register


def _operation(g: Tensor) -> str:
    """Name of the operation for backends and trials: with a decay per channel it is another one."""
    return "kda" if g.dim() == 4 else "gated_delta_rule"


def _forward(q, k, v, g, beta, initial_state, reset, backend, save=False):
    code = dispatch.choose(_operation(g), backend, q.device, q.dtype)
    return code.forward(q, k, v, g, beta, initial_state, reset, save)


def _fake(q, k, v, g, beta, initial_state, reset, backend, save=False):
    batch, _, nheads, d_k = k.shape
    state = g.new_empty(batch, nheads, d_k, v.shape[-1])
    code = dispatch.choose(_operation(g), backend, q.device, q.dtype)
    return v.new_empty(v.shape), state, state.new_empty(code.saved_shape(k, v) if save else 0)


def _backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, saved, backend):
    code = dispatch.choose(_operation(g), backend, q.device, q.dtype)
    do = torch.zeros_like(v) if do is None else do
    return code.backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, saved)


_gated_delta_rule = operators.register(
    "gated_delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? reset",
    "str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    has_intermediate=True,
)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = (I - β_t k_t k_tᵀ) exp(g_t) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t.

    The decay exp(g_t) is a number per head or, in Kimi Delta Attention, a diagonal matrix. Inside a chunk of
    64 tokens the updates are one triangular system (section 3.3, the extended WY form); from chunk to chunk
    the state is carried, and saved for the backward.

    Args:
        q, k: (batch, seqlen, nheads, d_k), as they enter the rule: scaled and normalised already.
        v: (batch, seqlen, nheads, d_v).
        g: log decays, finite, 0 or less: (batch, seqlen, nheads), or for each channel of the keys (batch,
            seqlen, nheads, d_k).
        beta: (batch, seqlen, nheads).
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
        v=(v, batch, seqlen, nheads, v.shape[-1]),
        g=(g, batch, seqlen, nheads, *([d_k] if g.dim() == 4 else [])),
        beta=(beta, batch, seqlen, nheads),
        initial_state=(initial_state, batch, nheads, d_k, v.shape[-1]),
    )
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    backend, wide, narrow = dispatch.prepare(_operation(g), backend, v, reset=reset, d_k=d_k)
    q, k, v = (t.to(narrow) for t in (q, k, v))
    g, beta = g.to(wide), beta.to(wide)
    initial = None if initial_state is None else initial_state.to(wide)
    o, final_state, _ = _gated_delta_rule(q, k, v, g, beta, initial, reset, backend)
    return o.to(wide), final_state


OPERATION = register(
    Operation(
        name="gated_delta_rule",
        function=gated_delta_rule,
        operator="gated_delta_rule",
        code_name="gated_delta_rule",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code(
                "adjoint.kernels.gated_delta_rule.triton.launch",
                limits={"d_k": 256},
                saved_shape=reference.gated_delta_rule_saved_shape,
            ),
        },
        saves_states=True,
        under_recompute="save",
        trial=trial.gated_delta_rule,
    )
)
KDA = register(dataclasses.replace(OPERATION, name="kda", trial=trial.kda))
