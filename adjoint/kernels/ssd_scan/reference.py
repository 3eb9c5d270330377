"""The scan of Mamba-2 in plain PyTorch: a segment's states at a time, made again in the backward."""

import torch
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


def ssd_scan_saved_shape(x: Tensor, B: Tensor) -> tuple[int, ...]:
    """States before each segment: (batch, segments, nheads, headdim, d_state)."""
    return x.shape[0], len(segments(x.shape[1])), *x.shape[2:], B.shape[-1]


def _states(x, d, A, decay, B, reset, s, state):
    inputs = (d[:, s].unsqueeze(-1) * x[:, s]).unsqueeze(-1) * B[:, s].unsqueeze(3)
    exponent, cut = (d[:, s] * A)[..., None, None], None if reset is None else reset[:, s]
    return recurrence(decay[:, s, :, None, None], inputs, state, cut, exponent)


def _prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset):
    d = step_size(dt, dt_bias, dt_softplus)
    decay = zero_where(torch.exp(d * A), reset)
    repeat = x.shape[2] // B.shape[2]
    return d, decay, B.repeat_interleave(repeat, dim=2), C.repeat_interleave(repeat, dim=2)


def ssd_scan_forward(x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, save=True):
    batch, seqlen, nheads, headdim = x.shape
    state = x.new_zeros(batch, nheads, headdim, B.shape[-1]) if initial_state is None else initial_state
    d, decay, B, C = _prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset)
    checkpoints, outputs = [], []
    for s in segments(seqlen):
        checkpoints.append(state)
        h = _states(x, d, A, decay, B, reset, s, state)
        state = h[:, -1]
        y = (h * C[:, s].unsqueeze(3)).sum(-1)
        outputs.append(y if D is None else y + D.unsqueeze(-1) * x[:, s])
    return torch.cat(outputs, dim=1), state, torch.stack(checkpoints, dim=1) if save else None


def ssd_scan_backward(
    dy,
    dfinal_state,
    x,
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    dt_softplus,
    initial_state,
    reset,
    checkpoints,
    window,
    halo=0,
):
    seqlen, groups = x.shape[1], B.shape[2]
    windowed = (window is not None and window < seqlen + 1) or halo > 0
    d, decay, B, C = _prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset)
    dx, dd, ddecay = torch.zeros_like(x), torch.zeros_like(d), torch.zeros_like(d)
    dB, dC = torch.zeros_like(B), torch.zeros_like(C)
    dD = None if D is None else CompensatedSum(D)
    carry = dfinal_state
    for s in reversed(segments(seqlen, undivided=windowed)):
        state = state_before(checkpoints, s)
        h = _states(x, d, A, decay, B, reset, s, state)
        a, x_s, d_s, dout = decay[:, s, :, None, None], x[:, s], d[:, s].unsqueeze(-1), dy[:, s]
        g = dout.unsqueeze(-1) * C[:, s].unsqueeze(3)
        cut = None if reset is None else reset[:, s]
        mu = accumulated_adjoint(g, a, window, cut, (d[:, s] * A)[..., None, None], carry)
        carry = initial_cotangent(add_final(g, carry), a, window, mu, cut)
        mu, dout = without_halo(mu, halo), without_halo(dout, halo)
        into_b = (mu * B[:, s].unsqueeze(3)).sum(-1)
        dx[:, s] = d_s * into_b + (0 if D is None else D.unsqueeze(-1) * dout)
        dd[:, s] = (x_s * into_b).sum(-1)
        ddecay[:, s] = zero_where((mu * previous_states(h, state)).sum((-1, -2)), cut)
        dB[:, s] = (mu * (d_s * x_s).unsqueeze(-1)).sum(3)
        dC[:, s] = (dout.unsqueeze(-1) * h).sum(3)
        if dD is not None:
            dD.add((dout * x_s).sum((0, 1, 3)))
    ddt, dA = ssd_step_gradients(dd, ddecay * decay, d, dt, A, dt_bias, dt_softplus)
    dbias = None if dt_bias is None else ddt.sum((0, 1))
    dB = dB.unflatten(2, (groups, -1)).sum(3)
    dC = dC.unflatten(2, (groups, -1)).sum(3)
    return dx, ddt, dA, dB, dC, None if dD is None else dD.total, dbias, carry


def ssd_step_gradients(dd, dexponent, d, dt, A, dt_bias, dt_softplus):
    """Return the cotangents of dt and A from those of the step size d and of the decay's exponent d A."""
    dd = dd + dexponent * A
    ddt = softplus_gradient(dd, dt, dt_bias) if dt_softplus else dd
    return ddt, (dexponent * d).sum((0, 1))
