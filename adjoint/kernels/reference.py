"""Every operation in plain PyTorch: any dtype, any device, no compiler. The fallback, and what the fast
backends must equal.

The recurrence h_t = a_t h_{t-1} + b_t is evaluated in two levels: short stretches step by step, all stretches
at once, then the stretches' edges by the same rule. Nothing is divided and no running product is inverted, so
decays of exactly 1 and products that underflow are both harmless.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 16  # tokens stepped one by one, all stretches in parallel
SEGMENT = 256  # tokens whose states exist at the same time
DELTA_CHUNK = 64  # tokens whose delta-rule updates are solved for together


def recurrence(a: Tensor, b: Tensor, initial: Tensor | None = None, cut: Tensor | None = None) -> Tensor:
    """All states of h_t = a_t h_{t-1} + b_t along dim 1; a and b broadcast against each other, a (batch,
    seqlen, …).

    Args:
        cut: (batch, seqlen) bool, tokens to which nothing is carried, no NaN either: 0 times NaN would be.
    """
    seqlen = b.shape[1]
    if seqlen <= STRETCH:
        states, h = [], initial
        for t, (a_t, b_t) in enumerate(zip(a.unbind(1), b.unbind(1), strict=True)):
            h = b_t if h is None else _cut(a_t * h, None if cut is None else cut[:, t]) + b_t
            states.append(h)
        return torch.stack(states, dim=1)
    stretches = -(-seqlen // STRETCH)
    padding = stretches * STRETCH - seqlen
    if padding:
        a = torch.cat([a, a.new_ones(a.shape[0], padding, *a.shape[2:])], dim=1)
        b = torch.cat([b, b.new_zeros(b.shape[0], padding, *b.shape[2:])], dim=1)
        cut = None if cut is None else F.pad(cut, (0, padding))
    a = a.unflatten(1, (stretches, STRETCH))
    b = b.unflatten(1, (stretches, STRETCH))
    here: list[Tensor | None] = [None] * STRETCH
    so_far = None
    if cut is not None:  # at a token, and anywhere in its stretch up to it
        cut = cut.unflatten(1, (stretches, STRETCH))
        here, so_far = list(cut.unbind(2)), _ever(cut)
    local, products = [b[:, :, 0]], [a[:, :, 0]]
    for t in range(1, STRETCH):
        local.append(_cut(a[:, :, t] * local[-1], here[t]) + b[:, :, t])
        products.append(a[:, :, t] * products[-1])
    through = _cut(torch.stack(products, dim=2), so_far)
    edges = recurrence(through[:, :, -1], local[-1], initial, None if so_far is None else so_far[:, :, -1])
    first = torch.zeros_like(edges[:, :1]) if initial is None else initial.unsqueeze(1)
    before = torch.cat([first, edges[:, :-1]], dim=1).unsqueeze(2)
    h = torch.stack(local, dim=2) + _cut(through * before, so_far)
    return h.flatten(1, 2)[:, :seqlen]


def _cut(x: Tensor, cut: Tensor | None) -> Tensor:
    """Zero where `cut` (x's first dimensions) says so, whatever x is there."""
    return x if cut is None else x.masked_fill(cut.reshape(*cut.shape, *[1] * (x.dim() - cut.dim())), 0)


def _ever(cut: Tensor) -> Tensor:
    """Along the last dimension, whether it has been so up to here."""
    return cut.cumsum(-1) > 0


def _next(a: Tensor) -> Tensor:
    """a_{t+1} at t; 0 after the last token."""
    return torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)


def accumulated_adjoint(g: Tensor, a: Tensor, window: int | None = None, cut: Tensor | None = None) -> Tensor:
    """mu_t = sum over s in [t, t + window) of a_{t+1} … a_s g_s (the sum runs to the end if window is None).

    g (batch, seqlen, …); a broadcasts against g; cut as `recurrence`'s. With a window: blocks of `window`
    tokens, a suffix scan inside each block, a prefix scan in the next one, and the two joined — linear in
    seqlen for every window.
    """
    seqlen = g.shape[1]
    if window is None or window >= seqlen:
        cuts = None if cut is None else _next(cut).flip(1)
        return recurrence(_next(a).flip(1), g.flip(1), cut=cuts).flip(1)
    if window == 1:
        return g
    following = _next(a)
    blocks = -(-seqlen // window)
    padding = blocks * window - seqlen

    def in_blocks(x: Tensor) -> Tensor:  # (batch * blocks, window, …)
        if padding:
            x = torch.cat([x, x.new_zeros(x.shape[0], padding, *x.shape[2:])], dim=1)
        return x.reshape(x.shape[0] * blocks, window, *x.shape[2:])

    def but_last(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], torch.zeros_like(x[:, :1])], dim=1)

    g_blocks, following_blocks, a_blocks = in_blocks(g), in_blocks(following), in_blocks(a)
    inside_cut = to_next_cut = from_start_cut = None
    if cut is not None:
        following_cut, own_cut = in_blocks(_next(cut)), in_blocks(cut)
        inside_cut = but_last(following_cut).flip(1)
        to_next_cut = _ever(following_cut.flip(1)).flip(1)
        from_start_cut = _ever(torch.cat([torch.zeros_like(own_cut[:, :1]), own_cut[:, 1:]], dim=1))
    suffix = recurrence(but_last(following_blocks).flip(1), g_blocks.flip(1), cut=inside_cut).flip(1)
    to_next_block = following_blocks.flip(1).cumprod(1).flip(1)
    from_block_start = torch.cat([torch.ones_like(a_blocks[:, :1]), a_blocks[:, 1:]], dim=1).cumprod(1)
    prefix = _cut(from_block_start * g_blocks, from_start_cut).cumsum(1)
    prefix = prefix.unflatten(0, (g.shape[0], blocks))
    joined = torch.zeros_like(
        prefix
    )  # the token at offset w of a block ends its window at offset w - 1 of the next
    joined[:, :-1, 1:] = prefix[:, 1:, :-1]
    mu = suffix + _cut(to_next_block * joined.flatten(0, 1), to_next_cut)
    return mu.reshape(g.shape[0], blocks * window, *g.shape[2:])[:, :seqlen]


def _windowed_initial(
    g: Tensor, a: Tensor, window: int | None, mu: Tensor, cut: Tensor | None = None
) -> Tensor:
    """The initial state's cotangent: a_1 mu_1, where the window of the token before the first ends at token
    window - 1."""
    at_first = None if cut is None else cut[:, 0]
    if window is None or window > g.shape[1]:
        return _cut(a[:, 0] * mu[:, 0], at_first)
    if window == 1:
        return torch.zeros_like(mu[:, 0])
    products = torch.cat([torch.ones_like(a[:, :1]), a[:, 1 : window - 1]], dim=1).cumprod(1)
    terms = products * g[:, : window - 1]
    if cut is not None:
        terms = _cut(terms, _ever(torch.cat([torch.zeros_like(cut[:, :1]), cut[:, 1 : window - 1]], dim=1)))
    return _cut(a[:, 0] * terms.sum(1), at_first)


def _previous(h: Tensor, initial: Tensor | None) -> Tensor:
    first = torch.zeros_like(h[:, :1]) if initial is None else initial.unsqueeze(1)
    return torch.cat([first, h[:, :-1]], dim=1)


def _add_final(g: Tensor, dfinal_state: Tensor | None) -> Tensor:
    """The final state's cotangent is one more term of g at the last token."""
    if dfinal_state is None:
        return g
    return torch.cat([g[:, :-1], g[:, -1:] + dfinal_state.unsqueeze(1)], dim=1)


def _mask(x: Tensor, reset: Tensor | None) -> Tensor:
    """Zero where a document begins, so that nothing is carried over its beginning."""
    return _cut(x, reset)


def _segments(seqlen: int, whole: bool) -> list[slice]:
    step = seqlen if whole else SEGMENT
    return [slice(s, min(s + step, seqlen)) for s in range(0, seqlen, step)]


# --------------------------------------------------------------------------------------------------- linear
# scan


def linear_scan_forward(a: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    return recurrence(_mask(a, reset), b, initial_state, reset)


def linear_scan_backward(dh, a, h, initial_state, reset, window, halo=0):
    masked = _mask(a, reset)
    mu = accumulated_adjoint(dh, masked, window, reset)
    dinitial = _windowed_initial(dh, masked, window, mu, reset)
    mu = _owned(mu, halo)
    da = _mask(mu * _previous(h, initial_state), reset)
    if a.shape[-1] == 1:
        da = da.sum(-1, keepdim=True)
    return da, mu, dinitial


def _owned(x: Tensor, halo: int) -> Tensor:
    """Zero on the last `halo` tokens: they are context for the windows of the others, their own gradients
    belong elsewhere."""
    if halo == 0:
        return x
    x = x.clone()
    x[:, x.shape[1] - halo :] = 0
    return x


# ------------------------------------------------------------------------------------------------ selective
# scan


def _step_size(delta, delta_bias, delta_softplus):
    raw = delta if delta_bias is None else delta + delta_bias
    return F.softplus(raw) if delta_softplus else raw


def selective_scan_forward(
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, reset, save=True
):
    batch, seqlen, d_inner = u.shape
    state = u.new_zeros(batch, d_inner, A.shape[1]) if initial_state is None else initial_state
    checkpoints, outputs = [], []
    for s in _segments(seqlen, whole=False):
        checkpoints.append(state)
        _, h, _ = _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state)
        state = h[:, -1]
        y = (h * C[:, s].unsqueeze(2)).sum(-1)
        if D is not None:
            y = y + D * u[:, s]
        outputs.append(y if z is None else y * F.silu(z[:, s]))
    return torch.cat(outputs, dim=1), state, torch.stack(checkpoints, dim=1) if save else None


def _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state):
    d = _step_size(delta[:, s], delta_bias, delta_softplus)
    cut = None if reset is None else reset[:, s]
    a = _mask(torch.exp(d.unsqueeze(-1) * A), cut)
    h = recurrence(a, (d * u[:, s]).unsqueeze(-1) * B[:, s].unsqueeze(2), state, cut)
    return a, h, d


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
    windowed = (
        window is not None and window < seqlen + 1
    ) or halo > 0  # then mu needs the whole sequence at once
    du, ddelta, dB, dC = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (u, delta, B, C)
    )
    dz = torch.zeros_like(u)
    dA = torch.zeros_like(A)
    dD = None if D is None else torch.zeros_like(D)
    carry = dfinal_state
    for s in reversed(_segments(seqlen, whole=windowed)):
        state = checkpoints[:, s.start // SEGMENT]
        a, h, d = _selective_states(u, delta, A, B, delta_bias, delta_softplus, reset, s, state)
        u_s, B_s, C_s, dout = u[:, s], B[:, s].unsqueeze(2), C[:, s].unsqueeze(2), dy[:, s]
        if z is not None:
            y = (h * C_s).sum(-1) + (0 if D is None else D * u_s)
            sig = torch.sigmoid(z[:, s])
            dz[:, s] = _owned(dout * y * sig * (1 + z[:, s] * (1 - sig)), halo)
            dout = dout * z[:, s] * sig
        g = _add_final(dout.unsqueeze(-1) * C_s, carry)
        cut = None if reset is None else reset[:, s]
        mu = accumulated_adjoint(g, a, window, cut)
        carry = _windowed_initial(g, a, window, mu, cut)
        mu, dout = _owned(mu, halo), _owned(dout, halo)
        through_a = _mask(mu * a * _previous(h, state), cut)
        into_b = (mu * B_s).sum(-1)
        du[:, s] = d * into_b + (0 if D is None else D * dout)
        dB[:, s] = (mu * (d * u_s).unsqueeze(-1)).sum(2)
        dC[:, s] = (dout.unsqueeze(-1) * h).sum(2)
        dd = (through_a * A).sum(-1) + u_s * into_b
        if delta_softplus:
            raw = delta[:, s] if delta_bias is None else delta[:, s] + delta_bias
            dd = torch.where(raw > 20, dd, dd * torch.sigmoid(raw))
        ddelta[:, s] = dd
        dA += (through_a * d.unsqueeze(-1)).sum((0, 1))
        if dD is not None:
            dD += (dout * u_s).sum((0, 1))
    dbias = None if delta_bias is None else ddelta.sum((0, 1))
    return du, ddelta, dA, dB, dC, dD, None if z is None else dz, dbias, carry


# ------------------------------------------------------------------------------------------------------ SSD
# scan


def _ssd_states(x, d, decay, B, reset, s, state):
    inputs = (d[:, s].unsqueeze(-1) * x[:, s]).unsqueeze(-1) * B[:, s].unsqueeze(3)
    return recurrence(decay[:, s, :, None, None], inputs, state, None if reset is None else reset[:, s])


def _ssd_prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset):
    d = _step_size(dt, dt_bias, dt_softplus)
    decay = _mask(torch.exp(d * A), reset)
    repeat = x.shape[2] // B.shape[2]
    return d, decay, B.repeat_interleave(repeat, dim=2), C.repeat_interleave(repeat, dim=2)


def ssd_scan_forward(x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, save=True):
    batch, seqlen, nheads, headdim = x.shape
    state = x.new_zeros(batch, nheads, headdim, B.shape[-1]) if initial_state is None else initial_state
    d, decay, B, C = _ssd_prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset)
    checkpoints, outputs = [], []
    for s in _segments(seqlen, whole=False):
        checkpoints.append(state)
        h = _ssd_states(x, d, decay, B, reset, s, state)
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
    d, decay, B, C = _ssd_prepare(x, dt, A, B, C, dt_bias, dt_softplus, reset)
    dx, dd, ddecay = torch.zeros_like(x), torch.zeros_like(d), torch.zeros_like(d)
    dB, dC = torch.zeros_like(B), torch.zeros_like(C)
    dD = None if D is None else torch.zeros_like(D)
    carry = dfinal_state
    for s in reversed(_segments(seqlen, whole=windowed)):
        state = checkpoints[:, s.start // SEGMENT]
        h = _ssd_states(x, d, decay, B, reset, s, state)
        a, x_s, d_s, dout = decay[:, s, :, None, None], x[:, s], d[:, s].unsqueeze(-1), dy[:, s]
        g = _add_final(dout.unsqueeze(-1) * C[:, s].unsqueeze(3), carry)
        cut = None if reset is None else reset[:, s]
        mu = accumulated_adjoint(g, a, window, cut)
        carry = _windowed_initial(g, a, window, mu, cut)
        mu, dout = _owned(mu, halo), _owned(dout, halo)
        into_b = (mu * B[:, s].unsqueeze(3)).sum(-1)
        dx[:, s] = d_s * into_b + (0 if D is None else D.unsqueeze(-1) * dout)
        dd[:, s] = (x_s * into_b).sum(-1)
        ddecay[:, s] = _mask((mu * _previous(h, state)).sum((-1, -2)), cut)
        dB[:, s] = (mu * (d_s * x_s).unsqueeze(-1)).sum(3)
        dC[:, s] = (dout.unsqueeze(-1) * h).sum(3)
        if dD is not None:
            dD += (dout * x_s).sum((0, 1, 3))
    ddt, dA = ssd_step_gradients(dd, ddecay, d, decay, dt, A, dt_bias, dt_softplus)
    dbias = None if dt_bias is None else ddt.sum((0, 1))
    dB = dB.unflatten(2, (groups, -1)).sum(3)
    dC = dC.unflatten(2, (groups, -1)).sum(3)
    return dx, ddt, dA, dB, dC, dD, dbias, carry


def ssd_step_gradients(dd, ddecay, d, decay, dt, A, dt_bias, dt_softplus):
    """From cotangents of the step size and of the decay exp(d A) (zero at a reset) to those of dt and A."""
    through = ddecay * decay
    dd = dd + through * A
    if dt_softplus:
        raw = dt if dt_bias is None else dt + dt_bias
        dd = torch.where(raw > 20, dd, dd * torch.sigmoid(raw))
    return dd, (through * d).sum((0, 1))


# ---------------------------------------------------------------------------------------------------- dense
# scan


def dense_scan_forward(A: Tensor, b: Tensor, initial_state: Tensor | None, reset: Tensor | None) -> Tensor:
    """All states of h_t = A_t h_{t-1} + b_t: A (batch, seqlen, d_state, d_state), b (batch, seqlen,
    d_state)."""
    h = torch.zeros_like(b[:, 0]) if initial_state is None else initial_state
    states = []
    for t, (A_t, b_t) in enumerate(zip(A.unbind(1), b.unbind(1), strict=True)):
        h = _cut((A_t @ h.unsqueeze(-1)).squeeze(-1), None if reset is None else reset[:, t]) + b_t
        states.append(h)
    return torch.stack(states, dim=1)


def dense_scan_backward(dh, A, h, initial_state, reset, window, halo=0):
    masked = _mask(A, reset)
    mu, dinitial = _dense_adjoint(dh, masked.transpose(-1, -2), window, reset)
    mu = _owned(mu, halo)
    dA = _mask(mu.unsqueeze(-1) * _previous(h, initial_state).unsqueeze(-2), reset)
    return dA, mu, dinitial


def _dense_adjoint(g: Tensor, At: Tensor, window: int | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """mu and the initial state's cotangent for matrices; At holds the transposes. Same blocks as
    `accumulated_adjoint`."""
    seqlen = g.shape[1]
    g_t, At_t = g.unbind(1), At.unbind(1)
    zero = torch.zeros_like(g_t[0])

    def apply(M: Tensor, v: Tensor, cut: Tensor | None) -> Tensor:
        return _cut((M @ v.unsqueeze(-1)).squeeze(-1), cut)

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


# -------------------------------------------------------------------------------------------------- causal
# conv1d


def _taps(x: Tensor, width: int, initial_state: Tensor | None, reset: Tensor | None):
    """For each tap j the input it sees, (batch, seqlen, channels), 0 where it would reach into another
    document, and whether it does, None where none can."""
    batch, seqlen, channels = x.shape
    before = (
        x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.transpose(1, 2)
    )
    padded = torch.cat([before, x], dim=1)
    starts = None if reset is None else reset.to(torch.int32).cumsum(1)
    for j in range(width):
        lag = width - 1 - j
        tap = padded[:, j : j + seqlen]
        apart = None
        if starts is not None and lag:
            earlier = torch.cat(
                [starts.new_zeros(batch, min(lag, seqlen)), starts[:, : max(seqlen - lag, 0)]], dim=1
            )
            apart = earlier != starts[:, :seqlen]
            tap = _cut(tap, apart)
        yield j, tap, apart


def causal_conv1d_forward(x, weight, bias, initial_state, silu, reset=None):
    p = _preactivation(x, weight, bias, initial_state, reset)
    return F.silu(p) if silu else p


def _preactivation(x, weight, bias, initial_state, reset):
    p = sum(weight[:, j] * tap for j, tap, _ in _taps(x, weight.shape[1], initial_state, reset))
    return p if bias is None else p + bias


def causal_conv1d_backward(dy, x, weight, bias, initial_state, silu, reset=None):
    width, seqlen = weight.shape[1], x.shape[1]
    dp = dy
    if silu:
        p = _preactivation(x, weight, bias, initial_state, reset)
        sig = torch.sigmoid(p)
        dp = dy * sig * (1 + p * (1 - sig))
    padded = x.new_zeros(x.shape[0], seqlen + width - 1, x.shape[2])
    dweight = torch.zeros_like(weight)
    for j, tap, apart in _taps(x, width, initial_state, reset):
        dweight[:, j] = (dp * tap).sum((0, 1))
        padded[:, j : j + seqlen] += weight[:, j] * _cut(dp, apart)
    dbias = None if bias is None else dp.sum((0, 1))
    return padded[:, width - 1 :], dweight, dbias, padded[:, : width - 1].transpose(1, 2)


# -------------------------------------------------------------------------------------------------- RMS norm


def rms_norm_forward(x, weight, gate, residual, eps, group_size, dtype):
    """y in `dtype`, the sum s = x + residual (None without a residual), the reciprocal root mean squares (…,
    groups)."""
    s = x if residual is None else x + residual
    grouped = (s if gate is None else s * F.silu(gate)).unflatten(-1, (-1, group_size))
    rstd = torch.rsqrt(grouped.square().mean(-1) + eps)
    y = weight * (grouped * rstd.unsqueeze(-1)).flatten(-2)
    return y.to(dtype), None if residual is None else s, rstd


def rms_norm_backward(dy, ds, s, weight, gate, rstd, group_size, x_dtype):
    """The cotangent of s, to which ds, that of s as an output, is added; dweight; dgate; and the first once
    more in x's dtype, None where that is s's."""
    grouped = (s if gate is None else s * F.silu(gate)).unflatten(-1, (-1, group_size))
    scale = rstd.unsqueeze(-1)
    normalised = grouped * scale
    inner = (dy * weight).unflatten(-1, (-1, group_size))
    dv = (scale * (inner - normalised * (inner * normalised).mean(-1, keepdim=True))).flatten(-2)
    dweight = (dy * normalised.flatten(-2)).reshape(-1, len(weight)).sum(0)
    dgate = None
    if gate is not None:
        sig = torch.sigmoid(gate)
        dgate = dv * s * sig * (1 + gate * (1 - sig))
        dv = dv * gate * sig
    return dv if ds is None else dv + ds, dweight, dgate, None


# ------------------------------------------------------------------------------------------- gated delta rule


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    c = _DeltaChunks(q, k, v, g, beta, reset)
    values, reads = c.solved(torch.cat([c.v * c.beta, c.from_state(c.k * c.beta * c.since)], dim=-1)).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    state = k.new_zeros(*c.k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    states, written = [], []
    for i, (u, w, keys, decay) in enumerate(c.each(values, reads, c.k_last, c.whole)):
        states.append(state)
        written.append(u - c.from_state(w @ state, i))
        state = c.through(state * decay, i) + keys.mT @ c.to_state(written[-1], i)
    before = torch.stack(states, dim=2)
    out = c.from_state((c.q * c.since) @ before) + c.mixed(c.within, torch.stack(written, dim=2))
    return c.tokens(out), state, before if save else None


def gated_delta_rule_backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, states):
    c = _DeltaChunks(q, k, v, g, beta, reset)
    do = c.chunks(do)
    # what each token would write, were it its chunk's first
    residual = c.v - c.from_state((c.k * c.since) @ states)
    written = c.solved(residual * c.beta)
    reads = c.from_state(c.solved(c.from_state(c.k * c.beta * c.since)))
    d_own = c.mixed(c.within, do, transposed=True)
    d_read = c.from_state(c.q * c.since).mT @ c.from_state(do)
    d = torch.zeros_like(states[:, :, 0]) if dfinal_state is None else dfinal_state
    d_states, d_written = [], []  # cotangents of the states after each chunk, and of what is written in it
    for i, (own, read, keys, w, decay) in reversed(
        list(enumerate(c.each(d_own, d_read, c.k_last, reads, c.whole)))
    ):
        d_states.append(d)
        d_written.append(own + c.to_state(keys @ d, i))
        d = c.through(d * decay, i) + read - w.mT @ c.from_state(d_written[-1], i)
    d_after = torch.stack(d_states[::-1], dim=2)
    dr = c.solved(torch.stack(d_written[::-1], dim=2), transposed=True)
    d_pairs, d_system = c.paired(do @ written.mT), c.paired(-(dr @ written.mT)).tril(-1)
    dv = dr * c.beta
    dbeta = (dr * residual).sum(-1) + (d_system * c.keys).sum(-1)
    # a token with itself: nothing decays, so this is no part of the decays' gradient
    alone = d_pairs.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk_wrote = c.decayed_gradients(d_pairs.tril(-1), c.q, c.k)
    dk, dk_written = c.decayed_gradients(c.paired(d_system * c.beta), c.k, c.k)
    dk_last = c.to_state((written @ d_after.mT) * c.until)
    dq = dq + c.from_state((do @ states.mT) * c.since)
    dk = dk + c.from_state(-(dv @ states.mT) * c.since)
    dk_wrote = dk_wrote + dk_written + dk_last
    # of the running sums of g, one for each channel of the keys: e^{c_i} goes with what is read, e^{-c_j}
    # with what is written, e^{c_n} with the next state
    dc = dq * c.q + dk * c.k - dk_wrote * c.k
    dc[..., -1, :] += c.to_state(dk_last * c.k).sum(-2)
    dc[..., -1, :] += c.through(c.whole * states * d_after).sum(-1)
    if g.dim() == 3:
        dc = dc.sum(-1, keepdim=True)
    dg = c.tokens(c.summed(dc, transposed=True)).reshape(g.shape)
    dq, dk = dq + alone * c.k, dk + dk_wrote + alone * c.q
    return c.tokens(dq), c.tokens(dk), c.tokens(dv), _mask(dg, reset), c.tokens(dbeta), d


# with a decay for each channel of the keys; backends may have one and not the other
kda_forward, kda_backward = gated_delta_rule_forward, gated_delta_rule_backward


class _DeltaChunks:
    """Tensors of the gated delta rule in chunks, (batch, nheads, chunks, DELTA_CHUNK, …), and the decays
    inside them, per head or per channel of its keys; what is padded decays nothing and writes nothing.

    Where there are documents, what one has of another is put to zero after each product that has made it:
    a factor of zero would let a NaN through."""

    def __init__(self, q, k, v, g, beta, reset):
        self.seqlen = q.shape[1]
        self.q, self.k, self.v, beta = map(self.chunks, (q, k, v, beta))
        self.beta = beta[..., None]
        below = torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=q.device).tril()
        self.same = self.first = self.last = None
        if reset is not None:  # documents of a chunk, numbered; the first goes on from the chunk before
            number = self.chunks(reset[..., None].int()).cumsum(-1)[..., None]
            self.same = below & (number == number.mT)
            self.first, self.last = number == 0, number == number[..., -1:, :]
        g = _mask(g, reset)
        self.g = self.chunks(g[..., None] if g.dim() == 3 else g)
        sums, self.pairs = self.summed(self.g), None
        if g.dim() == 3:
            seen = below if self.same is None else self.same
            differences = (sums - sums.mT).masked_fill(~seen, -torch.inf)
            self.pairs = differences.exp()
        later = F.pad(self.g[..., 1:, :], (0, 0, 0, 1))
        self.since = self.from_state(sums.exp())
        self.until = self.to_state(self.summed(later, transposed=True).exp())
        self.whole = self.since[..., -1:, :].mT
        self.k_last = self.to_state(self.k * self.until)
        self.within = self.decayed(self.q, self.k)
        self.keys = self.decayed(self.k, self.k)
        self.system = self.keys * self.beta

    def decayed(self, a, b):
        """The products of a token's row of a and an earlier one's, or its own, of b, decayed in between:
        (…, DELTA_CHUNK, DELTA_CHUNK), `paired`."""
        if self.pairs is not None:
            return self.paired((a @ b.mT) * self.pairs)
        columns = [
            F.pad((a[..., j:, :] * decay) @ b[..., j, :, None], (0, 0, j, 0))
            for j, decay in self._from_each()
        ]
        return self.paired(torch.cat(columns, dim=-1))

    def decayed_gradients(self, d, a, b):
        """Gradients of a and b from those of `decayed(a, b)`, which are `paired`."""
        if self.pairs is not None:
            weights = d * self.pairs
            return self.mixed(weights, b), self.mixed(weights, a, transposed=True)
        da, db = torch.zeros_like(a), []
        for j, decay in self._from_each():
            weights = d[..., j:, j, None] * decay
            da[..., j:, :] += self._seen(weights * b[..., j : j + 1, :], j)
            db.append(self._seen(weights * a[..., j:, :], j).sum(-2))
        return da, torch.stack(db, dim=-2)

    def _from_each(self):
        """For each of a chunk's tokens its number, and by how much each channel decays from it to those from
        it on: never by a quotient, whose parts would overflow."""
        for j in range(DELTA_CHUNK):
            sums = F.pad(self.g[..., j + 1 :, :], (0, 0, 1, 0)).cumsum(-2)
            yield j, self._seen(sums, j, -torch.inf).exp()

    def _seen(self, x, j, other=0):
        """x of a chunk's tokens from the j-th on, `other` where they are of another document than it."""
        return x if self.same is None else x.masked_fill(~self.same[..., j:, j, None], other)

    def chunks(self, x):
        """(batch, seqlen, nheads, …) in chunks."""
        x = F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -self.seqlen % DELTA_CHUNK))
        return x.unflatten(2, (-1, DELTA_CHUNK))

    def tokens(self, x):
        """The way back."""
        return x.flatten(2, 3)[:, :, : self.seqlen].transpose(1, 2)

    def each(self, *tensors):
        """Chunk by chunk."""
        return zip(*(t.unbind(2) for t in tensors), strict=True)

    def from_state(self, x, chunk=None):
        """x (…, DELTA_CHUNK, n) of tokens that go on from the state before their chunk, else zero."""
        return self._where(self.first, x, chunk)

    def to_state(self, x, chunk=None):
        """x of tokens that the state after their chunk goes on from, else zero."""
        return self._where(self.last, x, chunk)

    def through(self, x, chunk=None):
        """x (…, n, m) of chunks whose state goes on from the one before them, else zero."""
        return self._where(None if self.first is None else self.first[..., -1:, :], x, chunk)

    def paired(self, x):
        """x (…, DELTA_CHUNK, DELTA_CHUNK) of a token and itself or one before it in its document, else
        zero."""
        return x.tril() if self.same is None else x.masked_fill(~self.same, 0)

    def _where(self, mask, x, chunk):
        if mask is None:
            return x
        return x.masked_fill(~(mask if chunk is None else mask[:, :, chunk]), 0)

    def mixed(self, weights, x, transposed=False):
        """weights @ x, or the transpose of weights, which are `paired`: sums over each token's document, up
        to it or from it on."""
        weights = weights.mT if transposed else weights
        return weights @ x if self.same is None else self._apart(x, lambda x: weights @ x, transposed)

    def summed(self, x, transposed=False):
        """Sums of x (…, DELTA_CHUNK, n) over the tokens of a document up to each, or from each on."""
        if self.same is None:
            return x.flip(-2).cumsum(-2).flip(-2) if transposed else x.cumsum(-2)
        return self.mixed(self.same.to(x.dtype), x, transposed)

    def solved(self, right, transposed=False):
        """x of (1 + the strictly lower part of `system`) x = right, or of its transpose."""

        def solve(right, system):
            system = system.mT if transposed else system
            return torch.linalg.solve_triangular(system, right, upper=transposed, unitriangular=True)

        if self.same is None:
            return solve(right, self.system)
        strange = ~self.system.isfinite().all(-1, keepdim=True)
        system = self.system.masked_fill(strange | strange.mT, 0)
        return self._apart(right, lambda right: solve(right, system), transposed, strange)

    def _apart(self, x, call, transposed, strange=False):
        """call(x), which is linear and adds up tokens of a document alone. What has a share of a token that
        is no number, by x or by `strange`, is NaN."""
        strange = strange | ~x.isfinite().all(-1, keepdim=True)
        assert self.same is not None
        shares = (self.same.mT if transposed else self.same).to(x.dtype)
        found = call(x.masked_fill(strange, 0))
        return found.masked_fill((shares @ strange.to(x.dtype)) > 0, torch.nan)
