"""The selective scan in plain PyTorch: a segment's states at a time, made again in the backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.plain_recurrence import (
    CompensatedSum,
    accumulated_adjoint,
    add_final,
    initial_cotangent,
    previous_states,
    recurrence,
    segments,
    softplus_gradient,
    state_before,
    step_size,
    without_halo,
    zero_where,
)


def selective_scan_saved_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """States before each segment: (batch, segments, d_inner, d_state)."""
    return u.shape[0], len(segments(u.shape[1])), *A.shape


def selective_scan_forward(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, reset, save=True
):
    batch, seqlen, d_inner = u.shape
    state = u.new_zeros(batch, d_inner, A.shape[1]) if initial_state is None else initial_state
    checkpoints, outputs = [], []
    for s in segments(seqlen):
        checkpoints.append(state)
        _, _, h, _ = _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state)
        state = h[:, -1]
        y = (h * C[:, s].unsqueeze(2)).sum(-1)
        if D is not None:
            y = y + D * u[:, s]
        outputs.append(y if z is None else y * F.silu(z[:, s]))
    return torch.cat(outputs, dim=1), state, torch.stack(checkpoints, dim=1) if save else None


def _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state):
    d = step_size(delta[:, s], delta_bias, delta_softplus)
    cut = None if reset is None else reset[:, s]
    exponent = d.unsqueeze(-1) * A
    a = zero_where(torch.exp(exponent), cut)
    h = recurrence(a, (d * u[:, s]).unsqueeze(-1) * B[:, s].unsqueeze(2), state, cut, exponent)
    return exponent, a, h, d


def selective_scan_backward(
    dy,
    dfinal_state,
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    delta_softplus,
    initial_state,
    reset,
    checkpoints,
    window,
    halo=0,
):
    seqlen = u.shape[1]
    # with a window mu needs the sequence undivided
    windowed = (window is not None and window < seqlen + 1) or halo > 0
    du, ddelta, dB, dC = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (u, delta, B, C)
    )
    dz = torch.zeros_like(u)
    dA, dD = CompensatedSum(A), None if D is None else CompensatedSum(D)
    carry = dfinal_state
    for s in reversed(segments(seqlen, undivided=windowed)):
        state = state_before(checkpoints, s)
        exponent, a, h, d = _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state)
        u_s, B_s, C_s, dout = u[:, s], B[:, s].unsqueeze(2), C[:, s].unsqueeze(2), dy[:, s]
        if z is not None:
            y = (h * C_s).sum(-1) + (0 if D is None else D * u_s)
            sig = torch.sigmoid(z[:, s])
            dz[:, s] = without_halo(dout * y * sig * (1 + z[:, s] * (1 - sig)), halo)
            dout = dout * z[:, s] * sig
        g = dout.unsqueeze(-1) * C_s
        cut = None if reset is None else reset[:, s]
        mu = accumulated_adjoint(g, a, window, cut, exponent, carry)
        carry = initial_cotangent(add_final(g, carry), a, window, mu, cut)
        mu, dout = without_halo(mu, halo), without_halo(dout, halo)
        through_a = zero_where(mu * a * previous_states(h, state), cut)
        into_b = (mu * B_s).sum(-1)
        du[:, s] = d * into_b + (0 if D is None else D * dout)
        dB[:, s] = (mu * (d * u_s).unsqueeze(-1)).sum(2)
        dC[:, s] = (dout.unsqueeze(-1) * h).sum(2)
        dd = (through_a * A).sum(-1) + u_s * into_b
        ddelta[:, s] = softplus_gradient(dd, delta[:, s], delta_bias) if delta_softplus else dd
        dA.add((through_a * d.unsqueeze(-1)).sum((0, 1)))
        if dD is not None:
            dD.add((dout * u_s).sum((0, 1)))
    dbias = None if delta_bias is None else ddelta.sum((0, 1))
    sum_D = None if dD is None else dD.total
    return du, ddelta, dA.total, dB, dC, sum_D, None if z is None else dz, dbias, carry
