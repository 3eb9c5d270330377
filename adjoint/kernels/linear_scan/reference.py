"""Linear scans in plain PyTorch: scalar and diagonal decays by `recurrence`, dense ones token by token.

In float32 they run in float64: products of decays near 1, rounded the same way each time, would be powers of
another number."""

import torch
from torch import Tensor

from adjoint.kernels.plain_recurrence import (
    accumulated_adjoint,
    in_float64,
    initial_cotangent,
    previous_states,
    recurrence,
    without_halo,
    zero_where,
)


def linear_scan_forward(a: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    """Return all states of h_t = a_t h_{t-1} + b_t: b (batch, seqlen, d_state), a like b or
    (batch, seqlen, 1)."""
    if b.dtype == torch.float32:
        first = None if initial_state is None else initial_state.double()
        return linear_scan_forward(a.double(), b.double(), first, reset).float()
    return recurrence(zero_where(a, reset), b, initial_state, reset)


def linear_scan_backward(dh, a, h, initial_state, reset, window, halo=0):
    """mu_t = dh_t + a_{t+1} mu_{t+1}; da_t = mu_t h_{t-1}, db_t = mu_t, dinitial = a_1 mu_1."""
    if h.dtype == torch.float32:
        return in_float64(linear_scan_backward, dh, a, h, initial_state, reset, window, halo)
    masked = zero_where(a, reset)
    mu = accumulated_adjoint(dh, masked, window, reset)
    dinitial = initial_cotangent(dh, masked, window, mu, reset)
    mu = without_halo(mu, halo)
    da = zero_where(mu * previous_states(h, initial_state), reset)
    if a.shape[-1] == 1:
        da = da.sum(-1, keepdim=True)
    return da, mu, dinitial


def dense_scan_forward(A: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    """Return all states of h_t = A_t h_{t-1} + b_t: A (batch, seqlen, d_state, d_state), b (batch, seqlen,
    d_state)."""
    h = torch.zeros_like(b[:, 0]) if initial_state is None else initial_state
    states = []
    for t, (A_t, b_t) in enumerate(zip(A.unbind(1), b.unbind(1), strict=True)):
        h = zero_where((A_t @ h.unsqueeze(-1)).squeeze(-1), None if reset is None else reset[:, t]) + b_t
        states.append(h)
    return torch.stack(states, dim=1)


def dense_scan_backward(dh, A, h, initial_state, reset, window, halo=0):
    masked = zero_where(A, reset)
    mu, dinitial = _dense_adjoint(dh, masked.transpose(-1, -2), window, reset)
    mu = without_halo(mu, halo)
    dA = zero_where(mu.unsqueeze(-1) * previous_states(h, initial_state).unsqueeze(-2), reset)
    return dA, mu, dinitial


def _dense_adjoint(g: Tensor, At: Tensor, window: int | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """mu and the initial state's cotangent for matrices; At holds the transposes. Same blocks as
    `accumulated_adjoint`."""
    seqlen = g.shape[1]
    g_t, At_t = g.unbind(1), At.unbind(1)
    zero = torch.zeros_like(g_t[0])

    def apply(M: Tensor, v: Tensor, cut: Tensor | None) -> Tensor:
        return zero_where((M @ v.unsqueeze(-1)).squeeze(-1), cut)

    def begins(first: int, last: int) -> Tensor | None:
        """Whether a document begins at one of the tokens [first, last]."""
        return None if reset is None else reset[:, first : last + 1].any(1)

    mu = list(g_t)
    if window is None or window > seqlen:
        for t in range(seqlen - 2, -1, -1):
            mu[t] = g_t[t] + apply(At_t[t + 1], mu[t + 1], begins(t + 1, t + 1))
        return torch.stack(mu, dim=1), apply(At_t[0], mu[0], begins(0, 0))
    if window == 1:
        return g, zero
    prefix: list[Tensor] = []  # inside each block, from its first token up to this one
    product = At_t[0]
    for t in range(seqlen):
        start = t // window * window
        if t == start:
            prefix.append(g_t[t])
        else:
            product = At_t[t] if t == start + 1 else product @ At_t[t]
            prefix.append(prefix[-1] + apply(product, g_t[t], begins(start + 1, t)))
    suffix = g_t[-1]
    to_next: Tensor | None = None  # the product of At from t + 1 to the next block's first token
    for t in range(seqlen - 1, -1, -1):
        closes = t == seqlen - 1 or t % window == window - 1
        suffix = g_t[t] if closes else g_t[t] + apply(At_t[t + 1], suffix, begins(t + 1, t + 1))
        if t + 1 < seqlen:
            to_next = At_t[t + 1] if closes or to_next is None else At_t[t + 1] @ to_next
        next_block = (t // window + 1) * window
        mu[t] = suffix
        if t % window and next_block < seqlen:
            assert to_next is not None
            rest = prefix[min(t + window - 1, seqlen - 1)]
            mu[t] = suffix + apply(to_next, rest, begins(t + 1, next_block))
    return torch.stack(mu, dim=1), apply(At_t[0], prefix[window - 2], begins(0, 0))
