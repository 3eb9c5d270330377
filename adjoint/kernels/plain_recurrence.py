"""Linear recurrences in plain PyTorch: what the references of the scans share. Any dtype, any device, no
compiler.

The recurrence h_t = a_t h_{t-1} + b_t is evaluated in two levels: short stretches step by step, all stretches
at once, then the stretches' edges by the same rule. Nothing is divided and no running product is inverted, so
decays of exactly 1 and products that underflow are both harmless.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 16  # tokens stepped one by one, all stretches in parallel
SEGMENT = 256  # tokens whose states exist at the same time


def recurrence(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None = None,
    cut: Tensor | None = None,
    exponent: Tensor | None = None,
) -> Tensor:
    """Return all states of h_t = a_t h_{t-1} + b_t along dim 1; a (batch, seqlen, …) and b broadcast against
    each other.

    Args:
        cut: (batch, seqlen) bool, tokens to which nothing is carried, no NaN either: 0 times NaN would be.
        exponent: a's logarithm, if it is known. A product of decays near 1, each of them rounded, would lose
            the digits of their distance from 1; the exponential of a sum does not.
    """
    seqlen = b.shape[1]
    if seqlen <= STRETCH and exponent is not None and initial is not None:
        total, first = exponent.cumsum(1), initial.unsqueeze(1)
        # a factor near 1 would be rounded the same way in each segment
        through = torch.where(total > -0.5, first + torch.expm1(total) * first, total.exp() * first)
        return recurrence(a, b, cut=cut) + zero_where(through, None if cut is None else _so_far(cut))
    if seqlen <= STRETCH:
        states, h = [], initial
        for t, (a_t, b_t) in enumerate(zip(a.unbind(1), b.unbind(1), strict=True)):
            h = b_t if h is None else zero_where(a_t * h, None if cut is None else cut[:, t]) + b_t
            states.append(h)
        return torch.stack(states, dim=1)
    stretches = -(-seqlen // STRETCH)
    padding = stretches * STRETCH - seqlen
    if padding:
        a = torch.cat([a, a.new_ones(a.shape[0], padding, *a.shape[2:])], dim=1)
        b = torch.cat([b, b.new_zeros(b.shape[0], padding, *b.shape[2:])], dim=1)
        if exponent is not None:
            zeros = exponent.new_zeros(exponent.shape[0], padding, *exponent.shape[2:])
            exponent = torch.cat([exponent, zeros], dim=1)
        cut = None if cut is None else F.pad(cut, (0, padding))
    a = a.unflatten(1, (stretches, STRETCH))
    b = b.unflatten(1, (stretches, STRETCH))
    cut_at: list[Tensor | None] = [None] * STRETCH
    cut_since = None
    if cut is not None:  # at a token, and anywhere in its stretch up to it
        cut = cut.unflatten(1, (stretches, STRETCH))
        cut_at, cut_since = list(cut.unbind(2)), _so_far(cut)
    local, products = [b[:, :, 0]], [a[:, :, 0]]
    for t in range(1, STRETCH):
        local.append(zero_where(a[:, :, t] * local[-1], cut_at[t]) + b[:, :, t])
        products.append(a[:, :, t] * products[-1])
    sums = None if exponent is None else exponent.unflatten(1, (stretches, STRETCH)).cumsum(2)
    through = zero_where(torch.stack(products, dim=2) if sums is None else sums.exp(), cut_since)
    edge_cut = None if cut_since is None else cut_since[:, :, -1]
    of_edges = None if sums is None else sums[:, :, -1]
    edges = recurrence(through[:, :, -1], local[-1], initial, edge_cut, of_edges)
    first = torch.zeros_like(edges[:, :1]) if initial is None else initial.unsqueeze(1)
    before = torch.cat([first, edges[:, :-1]], dim=1).unsqueeze(2)
    h = torch.stack(local, dim=2) + zero_where(through * before, cut_since)
    return h.flatten(1, 2)[:, :seqlen]


def zero_where(x: Tensor, cut: Tensor | None) -> Tensor:
    """Zero where `cut` (x's first dimensions) says so, whatever x is there; x itself if `cut` is None."""
    return x if cut is None else x.masked_fill(cut.reshape(*cut.shape, *[1] * (x.dim() - cut.dim())), 0)


def _so_far(cut: Tensor) -> Tensor:
    """Whether `cut` is true anywhere along the last dimension up to each place."""
    return cut.cumsum(-1) > 0


def _next(a: Tensor) -> Tensor:
    """a_{t+1} at t; 0 after the last token."""
    return torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], dim=1)


def accumulated_adjoint(
    g: Tensor,
    a: Tensor,
    window: int | None = None,
    cut: Tensor | None = None,
    exponent: Tensor | None = None,
    final: Tensor | None = None,
) -> Tensor:
    """mu_t = sum over s in [t, t + window) of a_{t+1} … a_s g_s (the sum runs to the end if window is None).

    g (batch, seqlen, …); a broadcasts against g; cut and exponent as `recurrence`'s; final is added to the
    last token's g. With a window: blocks of `window` tokens, a suffix scan inside each block, a prefix scan
    in the next one, and the two joined — linear in seqlen for every window.
    """
    seqlen = g.shape[1]
    if window is None or window >= seqlen:
        cuts = None if cut is None else _next(cut).flip(1)
        exponents, following = None, _next(a)
        if exponent is not None:
            last = torch.full_like(exponent[:, :1], -torch.inf if final is None else 0.0)
            exponents = torch.cat([exponent[:, 1:], last], dim=1).flip(1)
        if final is not None:
            following[:, -1] = 1
        return recurrence(following.flip(1), g.flip(1), final, cuts, exponents).flip(1)
    g = add_final(g, final)
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
        following_cut, block_cut = in_blocks(_next(cut)), in_blocks(cut)
        inside_cut = but_last(following_cut).flip(1)
        to_next_cut = _so_far(following_cut.flip(1)).flip(1)
        from_start_cut = _so_far(torch.cat([torch.zeros_like(block_cut[:, :1]), block_cut[:, 1:]], dim=1))
    suffix = recurrence(but_last(following_blocks).flip(1), g_blocks.flip(1), cut=inside_cut).flip(1)
    to_next_block = following_blocks.flip(1).cumprod(1).flip(1)
    from_block_start = torch.cat([torch.ones_like(a_blocks[:, :1]), a_blocks[:, 1:]], dim=1).cumprod(1)
    prefix = zero_where(from_block_start * g_blocks, from_start_cut).cumsum(1)
    prefix = prefix.unflatten(0, (g.shape[0], blocks))
    # the token at offset w of a block ends its window at offset w - 1 of the next
    joined = torch.zeros_like(prefix)
    joined[:, :-1, 1:] = prefix[:, 1:, :-1]
    mu = suffix + zero_where(to_next_block * joined.flatten(0, 1), to_next_cut)
    return mu.reshape(g.shape[0], blocks * window, *g.shape[2:])[:, :seqlen]


def initial_cotangent(
    g: Tensor, a: Tensor, window: int | None, mu: Tensor, cut: Tensor | None = None
) -> Tensor:
    """The initial state's cotangent: a_1 mu_1, where the window of the token before the first ends at token
    window - 1."""
    at_first = None if cut is None else cut[:, 0]
    if window is None or window > g.shape[1]:
        return zero_where(a[:, 0] * mu[:, 0], at_first)
    if window == 1:
        return torch.zeros_like(mu[:, 0])
    products = torch.cat([torch.ones_like(a[:, :1]), a[:, 1 : window - 1]], dim=1).cumprod(1)
    terms = products * g[:, : window - 1]
    if cut is not None:
        later_cut = torch.cat([torch.zeros_like(cut[:, :1]), cut[:, 1 : window - 1]], dim=1)
        terms = zero_where(terms, _so_far(later_cut))
    return zero_where(a[:, 0] * terms.sum(1), at_first)


def previous_states(h: Tensor, initial: Tensor | None) -> Tensor:
    """h_{t-1} at t: the initial state, or zero, at the first token."""
    first = torch.zeros_like(h[:, :1]) if initial is None else initial.unsqueeze(1)
    return torch.cat([first, h[:, :-1]], dim=1)


def add_final(g: Tensor, dfinal_state: Tensor | None) -> Tensor:
    """g with the final state's cotangent as one more term at the last token."""
    if dfinal_state is None:
        return g
    return torch.cat([g[:, :-1], g[:, -1:] + dfinal_state.unsqueeze(1)], dim=1)


def without_halo(x: Tensor, halo: int) -> Tensor:
    """Zero on the last `halo` tokens: they are context for the windows of the others, and another piece of
    the sequence has their gradients."""
    if halo == 0:
        return x
    x = x.clone()
    x[:, x.shape[1] - halo :] = 0
    return x


def segments(seqlen: int, undivided: bool = False) -> list[slice]:
    """Cut a sequence into stretches of SEGMENT tokens, or one of all of them if `undivided`."""
    step = seqlen if undivided else SEGMENT
    return [slice(s, min(s + step, seqlen)) for s in range(0, seqlen, step)]


def state_before(checkpoints: Tensor, segment: slice) -> Tensor:
    """The state before a segment, among those (batch, segments, …) that forward saved."""
    return checkpoints[:, segment.start // SEGMENT]


def step_size(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    """The discretisation step d = delta + delta_bias, through softplus if asked."""
    raw = delta if delta_bias is None else delta + delta_bias
    return F.softplus(raw) if delta_softplus else raw


def in_float64(
    operation: Callable[..., tuple[Tensor | None, ...]], *inputs: Tensor | int | None, **options: bool
) -> tuple[Tensor | None, ...]:
    """Return what an operation makes of float32 inputs, computed in float64 and rounded."""
    wide = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in inputs]
    return tuple(x if x is None else x.float() for x in operation(*wide, **options))


class CompensatedSum:
    """A sum of many tensors that keeps the digits of their dtype, however many they are (Kahan 1965).

    Attributes:
        total: the sum.
        excess: what rounding has added to it and is to be taken off.
    """

    def __init__(self, like: Tensor) -> None:
        self.total, self.excess = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, term: Tensor) -> None:
        term = term - self.excess
        total = self.total + term
        self.total, self.excess = total, (total - self.total) - term


def softplus_gradient(dd: Tensor, delta: Tensor, delta_bias: Tensor | None) -> Tensor:
    """The cotangent of delta from that of d = softplus(delta + delta_bias)."""
    raw = delta if delta_bias is None else delta + delta_bias
    return torch.where(raw > 20, dd, dd * torch.sigmoid(raw))
