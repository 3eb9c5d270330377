"""The modal filter in Triton:

    h_{n,t} = p_n h_{n,t-1} + u_t,   y_t = sum_n R_n h_{n,t} + D u_t,   p = exp(A)

A program walks a split of the sequence with all modes of some channels in registers, one vector of channels
for each mode, so that nothing crosses lanes. The splits' states are joined as in the linear scan
(`common.pass_states`).

Backward, without states of the forward:

    mu_{n,t} = R_n dy_t + p_n mu_{n,t+1},   du_t = sum_n mu_{n,t} + D dy_t          from right to left
    g_{n,t} = dh_{n,t} / dp_n = p_n g_{n,t-1} + h_{n,t-1}                           from left to right
    dp_n = sum_t R_n dy_t g_{n,t} + (mu of the first token behind the split times p_n) g_{n,last}

with g zero at the beginning of each split: what the state before it does is in the split before, by its mu.

Proven under the interpreter and by compilation; not measured on a GPU. There is no kernel for windows.

Parameters of the kernels that are not obvious:

    pole, R: (ORDER, channels); edges of splits: (batch, splits, ORDER, channels)
    *_b, *_t: strides of batch and token; channels are dense
    split_len: tokens of a split; UNROLL: tokens loaded at once; ACC: type of states and sums
    LOCAL: from a zero state, only the state at the split's end and the product of p
"""

# Triton's compiler knows the concatenation of tuples, not unpacking, and types of its own:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.linear_scan.triton import state_dtype
from adjoint.kernels.operation import no_states
from adjoint.kernels.triton import common
from adjoint.kernels.triton.common import begins_at, over_edge

CHANNELS = 32  # one warp's
UNROLL = 4
UNIT = 64  # split lengths are multiples of this
SHORTEST_SPLIT = 256
PER_SM = 16


@triton.jit
def _modes(pointer, d, ok, channels, ORDER: tl.constexpr, ACC: tl.constexpr):
    """The vectors of channels of all modes at `pointer`."""
    modes = ()
    for n in tl.static_range(ORDER):
        modes = modes + (tl.load(pointer + n * channels + d, mask=ok, other=0.0).to(ACC),)
    return modes


@triton.jit
def _zeros(ORDER: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
    """A zero vector of channels for each mode."""
    modes = ()
    for _n in tl.static_range(ORDER):
        modes = modes + (tl.zeros((CHANNELS,), ACC),)
    return modes


@triton.jit
def _store_modes(pointer, modes, d, ok, channels, ORDER: tl.constexpr):
    for n in tl.static_range(ORDER):
        tl.store(pointer + n * channels + d, modes[n], mask=ok)


@triton.jit(do_not_specialize=common.LENGTHS)
def _forward_kernel(
    u,
    pole,
    R,
    D,
    h_in,
    reset,
    y,
    h_out,
    decay,
    seqlen,
    channels,
    split_len,
    u_b,
    u_t,
    ORDER: tl.constexpr,
    LOCAL: tl.constexpr,
    HAS_INIT: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_RESET: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Run one split. LOCAL: h_out has an entry for each split; else for the sequence's end alone."""
    split, splits, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < channels
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    u += batch * u_b
    if HAS_RESET:
        reset += batch * seqlen
    poles = _modes(pole, d, ok, channels, ORDER, ACC)
    residues = _modes(R, d, ok, channels, ORDER, ACC)
    gain = tl.zeros((CHANNELS,), ACC)
    if HAS_D:
        gain = tl.load(D + d, mask=ok, other=0.0).to(ACC)
    edge = (batch * splits + split) * ORDER * channels
    h = _zeros(ORDER, CHANNELS, ACC)
    if HAS_INIT:
        h = _modes(h_in + edge, d, ok, channels, ORDER, ACC)
    left = ()
    for _n in tl.static_range(ORDER):
        left = left + (tl.full((CHANNELS,), 1.0, ACC),)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        inputs = ()
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            inputs = inputs + (tl.load(u + t * u_t + d, mask=ok & (t < stop), other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            inside = t < stop
            begins = begins_at(reset, t, inside, HAS_RESET)
            out = gain * inputs[i]
            states = ()
            product = ()
            for n in tl.static_range(ORDER):
                state = over_edge(poles[n] * h[n], begins, HAS_RESET) + inputs[i]
                out += residues[n] * state
                states = states + (tl.where(inside, state, h[n]),)
                if LOCAL:
                    remaining = over_edge(poles[n] * left[n], begins, HAS_RESET)
                    product = product + (tl.where(inside, remaining, left[n]),)
            h = states
            if LOCAL:
                left = product
            else:
                tl.store(y + (batch * seqlen + t) * channels + d, out, mask=ok & inside)
    if LOCAL:
        _store_modes(h_out + edge, h, d, ok, channels, ORDER)
        _store_modes(decay + edge, left, d, ok, channels, ORDER)
    elif split == splits - 1:
        _store_modes(h_out + batch * ORDER * channels, h, d, ok, channels, ORDER)


@triton.jit(do_not_specialize=common.LENGTHS)
def _adjoint_kernel(
    dy,
    pole,
    R,
    D,
    mu_in,
    reset,
    du,
    mu_out,
    seqlen,
    channels,
    split_len,
    dy_b,
    dy_t,
    ORDER: tl.constexpr,
    LOCAL: tl.constexpr,
    HAS_INIT: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_RESET: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Run one split from its last token to its first. mu_in: what comes from the split behind; mu_out: what
    goes to the one before; without LOCAL, before the sequence."""
    split, splits, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < channels
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    dy += batch * dy_b
    if HAS_RESET:
        reset += batch * seqlen
    poles = _modes(pole, d, ok, channels, ORDER, ACC)
    residues = _modes(R, d, ok, channels, ORDER, ACC)
    gain = tl.zeros((CHANNELS,), ACC)
    if HAS_D:
        gain = tl.load(D + d, mask=ok, other=0.0).to(ACC)
    edge = (batch * splits + split) * ORDER * channels
    mu = _zeros(ORDER, CHANNELS, ACC)
    if HAS_INIT:
        mu = _modes(mu_in + edge, d, ok, channels, ORDER, ACC)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        grads = ()
        for i in tl.static_range(UNROLL):
            t = stop - 1 - group * UNROLL - i
            grads = grads + (tl.load(dy + t * dy_t + d, mask=ok & (t >= first), other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = stop - 1 - group * UNROLL - i
            inside = t >= first
            begins = begins_at(reset, t, inside, HAS_RESET)
            out = gain * grads[i]
            carried = ()
            for n in tl.static_range(ORDER):
                total = mu[n] + residues[n] * grads[i]
                out += total
                carried = carried + (tl.where(inside, over_edge(poles[n] * total, begins, HAS_RESET), mu[n]),)
            mu = carried
            if not LOCAL:
                tl.store(du + (batch * seqlen + t) * channels + d, out, mask=ok & inside)
    if LOCAL:
        _store_modes(mu_out + edge, mu, d, ok, channels, ORDER)
    elif split == 0:
        _store_modes(mu_out + batch * ORDER * channels, mu, d, ok, channels, ORDER)


@triton.jit(do_not_specialize=common.LENGTHS)
def _parameters_kernel(
    dy,
    u,
    pole,
    R,
    h_in,
    mu_in,
    reset,
    dpole,
    dR,
    dD,
    seqlen,
    channels,
    split_len,
    dy_b,
    dy_t,
    u_b,
    u_t,
    ORDER: tl.constexpr,
    HAS_INIT: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_RESET: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute one split's part of the parameters' gradients."""
    split, splits, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    ok = d < channels
    first = split.to(tl.int64) * split_len
    stop = tl.minimum(first + split_len, seqlen)
    dy += batch * dy_b
    u += batch * u_b
    if HAS_RESET:
        reset += batch * seqlen
    poles = _modes(pole, d, ok, channels, ORDER, ACC)
    edge = (batch * splits + split) * ORDER * channels
    h = _zeros(ORDER, CHANNELS, ACC)
    if HAS_INIT:
        h = _modes(h_in + edge, d, ok, channels, ORDER, ACC)
    g = _zeros(ORDER, CHANNELS, ACC)
    to_pole = _zeros(ORDER, CHANNELS, ACC)
    to_residue = _zeros(ORDER, CHANNELS, ACC)
    to_gain = tl.zeros((CHANNELS,), ACC)
    for group in range(0, (stop - first + UNROLL - 1) // UNROLL):
        grads = ()
        inputs = ()
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            inside = ok & (t < stop)
            grads = grads + (tl.load(dy + t * dy_t + d, mask=inside, other=0.0).to(ACC),)
            inputs = inputs + (tl.load(u + t * u_t + d, mask=inside, other=0.0).to(ACC),)
        for i in tl.static_range(UNROLL):
            t = first + group * UNROLL + i
            inside = t < stop
            begins = begins_at(reset, t, inside, HAS_RESET)
            states = ()
            slopes = ()
            of_poles = ()
            of_residues = ()
            for n in tl.static_range(ORDER):
                slope = over_edge(poles[n] * g[n] + h[n], begins, HAS_RESET)
                state = over_edge(poles[n] * h[n], begins, HAS_RESET) + inputs[i]
                slopes = slopes + (tl.where(inside, slope, g[n]),)
                states = states + (tl.where(inside, state, h[n]),)
                of_poles = of_poles + (to_pole[n] + tl.where(inside, grads[i] * slope, 0.0),)
                of_residues = of_residues + (to_residue[n] + tl.where(inside, grads[i] * state, 0.0),)
            h = states
            g = slopes
            to_pole = of_poles
            to_residue = of_residues
            to_gain += grads[i] * inputs[i]
    for n in tl.static_range(ORDER):
        residue = tl.load(R + n * channels + d, mask=ok, other=0.0).to(ACC)
        total = residue * to_pole[n]
        if HAS_FINAL:
            total += tl.load(mu_in + edge + n * channels + d, mask=ok, other=0.0).to(ACC) * g[n]
        tl.store(dpole + edge + n * channels + d, total, mask=ok)
        tl.store(dR + edge + n * channels + d, to_residue[n], mask=ok)
    tl.store(dD + (batch * splits + split) * channels + d, to_gain, mask=ok)


class _Problem:
    """The arguments that the kernels share: parameters by modes, and how the sequence is split."""

    def __init__(
        self,
        u: torch.Tensor,
        A: torch.Tensor,
        R: torch.Tensor,
        D: torch.Tensor | None,
        reset: torch.Tensor | None,
    ) -> None:
        self.batch, self.seqlen, self.channels = u.shape
        self.order, self.acc = A.shape[1], state_dtype(u.dtype)
        self.pole, self.R = A.to(self.acc).exp().t().contiguous(), R.to(self.acc).t().contiguous()
        self.D = None if D is None else D.to(self.acc).contiguous()
        self.reset, self.like = common.reset_bytes(reset), u
        self.blocks = triton.cdiv(self.channels, CHANNELS)
        fill = common.programs_that_fill(u, PER_SM)
        programs = self.batch * self.blocks
        self.split_len = common.split_length(self.seqlen, programs, fill, UNIT, SHORTEST_SPLIT)
        self.splits = triton.cdiv(self.seqlen, self.split_len)
        self.grid = self.blocks, self.splits, self.batch
        self.constants = {
            "ORDER": self.order,
            **common.has_flags(RESET=reset),
            "UNROLL": UNROLL,
            "CHANNELS": CHANNELS,
            "ACC": common.tl_dtype(self.acc),
            "num_warps": 1,
        }

    def edges(self, *modes: int) -> torch.Tensor:
        """Return room for a number of each channel at each split: (batch, splits, *modes, channels)."""
        shape = (self.batch, self.splits, *modes, self.channels)
        return torch.empty(shape, dtype=self.acc, device=self.like.device)

    def by_modes(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """Return states (batch, channels, order) as (batch, order, channels)."""
        return None if state is None else state.to(self.acc).transpose(1, 2).contiguous()

    def by_channels(self, state: torch.Tensor) -> torch.Tensor:
        """Return states (batch, order, channels) as the caller's, (batch, channels, order)."""
        return state.transpose(1, 2).to(accumulate_dtype(self.like.dtype)).contiguous()

    def forward(
        self, u: torch.Tensor, before: torch.Tensor | None, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the splits to outputs y from the states before them; without y, from zero to their ends."""
        is_local = y is None
        edge = self.edges(self.order) if is_local else self.edges(self.order)[:, 0].contiguous()
        decay = torch.empty_like(edge) if is_local else None
        sizes = self.seqlen, self.channels, self.split_len, *common.strides(u)
        tensors = u, self.pole, self.R, self.D, before, self.reset, y, edge, decay
        options = {"LOCAL": is_local, **common.has_flags(INIT=before, D=self.D)}
        _forward_kernel[self.grid](*tensors, *sizes, **options, **self.constants)
        return edge, decay

    def adjoint(self, dy: torch.Tensor, behind: torch.Tensor | None, du: torch.Tensor | None) -> torch.Tensor:
        """Run the splits from right to left to du; without it, from zero to what goes to their left."""
        is_local = du is None
        edge = self.edges(self.order) if is_local else self.edges(self.order)[:, 0].contiguous()
        sizes = self.seqlen, self.channels, self.split_len, *common.strides(dy)
        tensors = dy, self.pole, self.R, self.D, behind, self.reset, du, edge
        options = {"LOCAL": is_local, **common.has_flags(INIT=behind, D=self.D)}
        _adjoint_kernel[self.grid](*tensors, *sizes, **options, **self.constants)
        return edge

    def states_before(
        self, u: torch.Tensor, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the states before all splits, and the products of poles over each if there are several."""
        if self.splits == 1:
            return initial, None
        ends, decay = self.forward(u, None, None)
        assert decay is not None
        return common.pass_states(ends, decay, initial, self.reset is not None, reverse=False)[0], decay


modal_scan_saved_shape = no_states


def modal_scan_forward(
    u: torch.Tensor,
    A: torch.Tensor,
    R: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    save: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return y (batch, seqlen, channels), the final state (batch, channels, order), and an empty tensor: the
    backward needs no states of the forward. A, R (channels, order); D (channels,) or None."""
    u = common.last_contiguous(u)
    problem = _Problem(u, A, R, D, reset)
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    with common.on_device(u):
        before, _ = problem.states_before(u, problem.by_modes(initial_state))
        final, _ = problem.forward(u, before, y)
    return y, problem.by_channels(final), u.new_empty(0) if save else None


def modal_scan_backward(
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    u: torch.Tensor,
    A: torch.Tensor,
    R: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    reset: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
    window: int | None,
    halo: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(du, dA, dR, dD, dinitial_state) of :func:`modal_scan_forward`.

    Raises:
        ValueError: there is a halo, or a window that cuts something.
    """
    if halo or (window is not None and window <= u.shape[1]):
        raise ValueError("modal_scan has no Triton kernel for windows: leave out backend, or the window")
    u, dy = common.last_contiguous(u), common.last_contiguous(dy)
    problem = _Problem(u, A, R, D, reset)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    dpole, dR, dD = problem.edges(problem.order), problem.edges(problem.order), problem.edges()
    with common.on_device(u):
        before, decay = problem.states_before(u, problem.by_modes(initial_state))
        behind = problem.by_modes(dfinal_state)
        if decay is not None:
            ends = problem.adjoint(dy, None, None)
            behind, _ = common.pass_states(ends, decay, behind, reset is not None, reverse=True)
        dinitial = problem.adjoint(dy, behind, du)
        _parameters_kernel[problem.grid](
            *(dy, u, problem.pole, problem.R, before, behind, problem.reset, dpole, dR, dD),
            *(problem.seqlen, problem.channels, problem.split_len, *common.strides(dy, u)),
            **common.has_flags(INIT=before, FINAL=behind),
            **problem.constants,
        )
    dA = (dpole.sum((0, 1)) * problem.pole).t().to(A.dtype)
    to_D = None if D is None else dD.sum((0, 1)).to(D.dtype)
    return du, dA, dR.sum((0, 1)).t().to(R.dtype), to_D, problem.by_channels(dinitial)
