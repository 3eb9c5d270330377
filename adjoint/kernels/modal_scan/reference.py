"""The modal filter in plain PyTorch: a segment's states at a time, made again in the backward.

In float32 it runs in float64: a state is a sum over as many tokens as its pole lasts."""

import torch
from torch import Tensor

from adjoint.kernels.plain_recurrence import (
    CompensatedSum,
    accumulated_adjoint,
    add_final,
    in_float64,
    initial_cotangent,
    previous_states,
    recurrence,
    segments,
    state_before,
    without_halo,
    zero_where,
)


def modal_scan_saved_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """States before each segment: (batch, segments, channels, order)."""
    return u.shape[0], len(segments(u.shape[1])), *A.shape


def modal_scan_forward(u, A, R, D, initial_state, reset, save=True):
    inputs = u, A, R, D, initial_state, reset
    y, state, checkpoints = _forward(*inputs) if u.dtype == torch.float64 else in_float64(_forward, *inputs)
    return y, state, checkpoints if save else None


def _forward(u, A, R, D, initial_state, reset):
    state = u.new_zeros(u.shape[0], *A.shape) if initial_state is None else initial_state
    checkpoints, outputs = [], []
    for s in segments(u.shape[1]):
        checkpoints.append(state)
        _, _, h, _ = _states(u, A, reset, s, state)
        state = h[:, -1]
        y = (h * R).sum(-1)
        outputs.append(y if D is None else y + D * u[:, s])
    return torch.cat(outputs, dim=1), state, torch.stack(checkpoints, dim=1)


def _states(u, A, reset, s, state):
    """Return the poles' logarithms and the poles, (batch, tokens, channels, order), the states of a segment,
    and where documents begin in it."""
    cut = None if reset is None else reset[:, s]
    inputs = u[:, s].unsqueeze(-1).expand(*u[:, s].shape, A.shape[1])
    exponent = A.expand(inputs.shape)
    a = zero_where(exponent.exp(), cut)
    return exponent, a, recurrence(a, inputs, state, cut, exponent), cut


def modal_scan_backward(dy, dfinal_state, u, A, R, D, initial_state, reset, checkpoints, window, halo=0):
    inputs = dy, dfinal_state, u, A, R, D, initial_state, reset, checkpoints, window, halo
    return _backward(*inputs) if u.dtype == torch.float64 else in_float64(_backward, *inputs)


def _backward(dy, dfinal_state, u, A, R, D, initial_state, reset, checkpoints, window, halo):
    # with a window mu needs the sequence undivided
    windowed = (window is not None and window < u.shape[1] + 1) or halo > 0
    du = torch.zeros_like(u, memory_format=torch.contiguous_format)
    dA, dR, dD = CompensatedSum(A), CompensatedSum(R), None if D is None else CompensatedSum(D)
    carry = dfinal_state
    for s in reversed(segments(u.shape[1], undivided=windowed)):
        state = state_before(checkpoints, s)
        exponent, a, h, cut = _states(u, A, reset, s, state)
        g = dy[:, s].unsqueeze(-1) * R
        mu = accumulated_adjoint(g, a, window, cut, exponent, carry)
        carry = initial_cotangent(add_final(g, carry), a, window, mu, cut)
        mu, dout = without_halo(mu, halo), without_halo(dy[:, s], halo)
        du[:, s] = mu.sum(-1) + (0 if D is None else D * dout)
        dA.add(zero_where(mu * a * previous_states(h, state), cut).sum((0, 1)))
        dR.add((dout.unsqueeze(-1) * h).sum((0, 1)))
        if dD is not None:
            dD.add((dout * u[:, s]).sum((0, 1)))
    return du, dA.total, dR.total, None if dD is None else dD.total, carry
