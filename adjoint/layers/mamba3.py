"""The Mamba-3 mixer, parameters named and initialised as in mamba-ssm (modules/mamba3.py).

    h_t = α_t h_{t-1} + (1 - λ_t) d_t α_t v_{t-1} ⊗ k_{t-1} + λ_t d_t v_t ⊗ k_t        y_t = h_t q_t + D v_t

with d_t the step size and α_t = exp(A_t d_t): the trapezoidal rule where Mamba-2 uses Euler's. Keys and
queries are rotated by angles that add up over time: a complex-valued state in real numbers. With `is_mimo` a
token has `mimo_rank` each of v, k, q and y, which share h: v ⊗ k is summed over them."""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.kernels import checks
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.ssd_scan import ssd_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.mixer import Mixer, check_heads
from adjoint.layers.norm import RMSNorm
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Splits,
    by_columns,
    by_rows,
    every_rank_has,
    rank_config_by_groups,
)

TINY = 1e-12  # lower bound of -A d, by which inputs are divided: exp(-TINY) is 1 but for rounding


class Mamba3Mixer(Mixer):
    """in_proj → B and C normalised, biased and rotated → SSD scan → (norm,) gate → out_proj. State: angles
    (batch, nheads, angles), h (batch, nheads, headdim, d_state), and the last token's rotated k (batch,
    nheads, rank, d_state) and its v before mimo_x (batch, nheads, headdim); rank is 1 without `is_mimo`.

    With `is_mimo`, mimo_x and mimo_z spread x and the gate over the inputs and outputs of a token, and mimo_o
    sums the outputs, all three (nheads, mimo_rank, headdim)."""

    default_d_state = 128
    projected = True
    undecayed = frozenset({"dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D"})
    mimo_x: Tensor | None
    mimo_z: Tensor | None
    mimo_o: Tensor | None

    def __init__(self, config: StackConfig) -> None:
        c, nheads, n = config, config.nheads, self.state_size(config)
        angles, rank = self.count_angles(c), self.inputs_per_token(c)
        super().__init__(c, (nheads, angles), (nheads, c.headdim, n), (nheads, rank, n), (nheads, c.headdim))
        self.d_state, self.angles, self.rank = n, angles, rank
        d_inner, keys = c.d_inner, rank * c.ngroups * n
        # z, x, B, C, dt, A, trap, angle
        self.sizes = [d_inner, d_inner, keys, keys, nheads, nheads, nheads, self.angles]
        self.in_proj = nn.Linear(c.d_model, sum(self.sizes), bias=c.bias)
        self.dt_bias = nn.Parameter(torch.empty(nheads))
        self.B_bias = nn.Parameter(torch.empty(nheads, self.rank, n))
        self.C_bias = nn.Parameter(torch.empty(nheads, self.rank, n))
        self.B_norm = RMSNorm(n, c.norm_eps)
        self.C_norm = RMSNorm(n, c.norm_eps)
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            weight = nn.Parameter(torch.empty(nheads, self.rank, c.headdim)) if c.is_mimo else None
            self.register_parameter(name, weight)
        self.D = nn.Parameter(torch.empty(nheads))
        self.norm = RMSNorm(d_inner, c.norm_eps, group_size=c.headdim) if c.is_outproj_norm else None
        self.out_proj = nn.Linear(d_inner, c.d_model, bias=c.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.B_norm, self.C_norm, self.norm, self.out_proj)
        self.dt_bias.copy_(inverse_softplus_steps(self.config, self.dt_bias))
        for parameter in (self.B_bias, self.C_bias, self.D):
            nn.init.ones_(parameter)
        for weight, value in ((self.mimo_x, 1 / self.rank), (self.mimo_z, 1.0), (self.mimo_o, 1 / self.rank)):
            if weight is not None:
                nn.init.constant_(weight, value)

    @classmethod
    def count_angles(cls, config: StackConfig) -> int:
        """Return the number of rotated pairs of channels."""
        return int(cls.state_size(config) * config.rope_fraction) // 2

    @classmethod
    def inputs_per_token(cls, config: StackConfig) -> int:
        return config.mimo_rank if config.is_mimo else 1

    @classmethod
    def check(cls, config: StackConfig) -> None:
        check_heads(config, config.ngroups)
        fraction, size = config.rope_fraction, cls.state_size(config)
        if fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction must be 0.5 or 1, got {fraction}")
        if cls.count_angles(config) < 1:
            raise ValueError(
                f"d_state must be at least {int(2 / fraction)}, so that there is a pair to rotate; got {size}"
            )
        if config.is_mimo and size % 2:
            raise ValueError(f"d_state must be even with is_mimo, which rotates its halves; got {size}")

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts in_proj's output, what is made of it for each of a token's inputs, and the scan's states."""
        d_inner, nheads, n, mimo = config.d_inner, config.nheads, cls.state_size(config), config.is_mimo
        rank, accumulated = cls.inputs_per_token(config), max(element, 4)
        states = rank * d_inner * n * accumulated * element // 512
        if selective:
            return 2 * (d_inner + rank * n * config.ngroups) * element + rank * d_inner * accumulated + states
        turned = nheads * (2 * cls.count_angles(config) + 10) + 2 * rank * (nheads * n + d_inner)
        narrow = rank * (4 + config.is_outproj_norm + mimo) * d_inner + 2 * mimo * d_inner
        narrow += 2 * rank * n * (config.ngroups + nheads)
        return turned * accumulated + narrow * element + states

    def splits(self) -> Splits:
        c = self.config
        heads, channels = (
            Section("the number of heads", c.nheads),
            Section("the number of heads", c.nheads, c.headdim),
        )
        keys = self.rank * [Section("ngroups", c.ngroups, self.d_state, shared=True)]
        rows = by_rows(
            in_proj=[channels, channels, *keys, *keys, heads, heads, heads, every_rank_has(self.angles)],
            **{name: [heads] for name in ("dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D")},
            norm=[channels],
        )
        return {**rows, **by_columns(out_proj=[channels])}

    def rank_config(self, ranks: int) -> RankConfig:
        return rank_config_by_groups(self.config, ranks)

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        c, (angle, h, k_before, v_before) = self.config, state
        checks.shapes(initial_state=(h, x.shape[0], c.nheads, c.headdim, self.d_state))
        z, v, B, C, dt, a, trap, turns = self.in_proj(x).split(self.sizes, dim=-1)
        dtype = accumulate_dtype(x.dtype)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
        decay = (_heavy_tail(a.to(dtype)).clamp_min(c.A_floor) * dt).clamp_min(TINY)  # -A d
        trap = torch.sigmoid(trap.to(dtype))
        turns = math.pi * torch.tanh(turns.to(dtype))[:, :, None] * dt[..., None]
        once = turns.new_ones(*x.shape[:2], 1)
        angles = linear_scan(once, turns.flatten(2), angle.detach().flatten(1), seq_idx=seq_idx)
        reset_at = None if seq_idx is None else checks.reset_of(seq_idx, *x.shape[:2])
        angles, angle, before, after = _Angles.apply(angles.view_as(turns), angle.to(dtype), reset_at)
        h, k_before = (_Frame.apply(t, before, c.is_mimo) for t in (h, k_before))
        k, q = (
            self._heads(t, norm, bias.to(dtype))
            for t, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        by = angles[..., None, :]
        turn = torch.polar(torch.ones_like(by), by.detach())
        (k_turned, k_last), (q_turned, _) = (_Turned.apply(t, by, turn, c.is_mimo) for t in (k, q))
        k_last = _Frame.apply(k_last, after, c.is_mimo)
        v, z = (t.unflatten(-1, (c.nheads, c.headdim)) for t in (v, z))
        v_last = v[:, -1].clone()  # a view would keep the memory of all tokens
        v, v_before = (_spread(t.to(dtype), self.mimo_x) for t in (v, v_before))
        # v ⊗ k of a token enters h twice: `own_share` of it with the token, `due_share` with the next one.
        # A chunk's last token leaves its second part to the next chunk; v_before brings the last chunk's.
        shares, own_share = (1 - trap) * dt, trap * dt
        due_share = F.pad(shares[:, 1:], (0, 0, 0, 1))
        if reset_at is not None:  # nothing is due across a document's beginning
            due_share = due_share.masked_fill(F.pad(reset_at[:, 1:], (0, 1))[..., None], 0)
        v_before = shares[:, 0, :, None, None] * v_before
        h = h.to(dtype) + (v_before[..., None] * k_before.to(dtype)[..., None, :]).sum(2)
        # The scan adds both parts with the token itself; `_within` subtracts `due_share` from the
        # token's output.
        y, h = _scan(own_share + due_share, decay, v, k_turned.to(z.dtype), q_turned.to(z.dtype), h, seq_idx)
        y = y + _within(own_share, due_share, self.D.to(dtype), v, k, q).transpose(2, 3)
        y = y.to(z.dtype)
        if self.norm is not None:
            y = self.norm(y.flatten(-2)).unflatten(-1, (c.nheads, -1))
        y = y * F.silu(_spread(z, self.mimo_z)).transpose(2, 3)
        y = y.squeeze(2) if self.mimo_o is None else (y * self.mimo_o.to(y.dtype).transpose(0, 1)).sum(2)
        state = angle % math.tau, _Frame.apply(h, after, c.is_mimo), k_last, v_last
        return self.out_proj(y.flatten(-2)), state

    def _heads(self, t: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """Return keys or queries, (batch, seqlen, nheads, rank, d_state).

        They are each group's normalised vectors plus the bias of each of its heads."""
        c = self.config
        t = norm(t.unflatten(-1, (self.rank, c.ngroups, self.d_state))).transpose(2, 3)[:, :, :, None]
        return (bias.unflatten(0, (c.ngroups, -1)) + t).flatten(2, 3)  # bias first: the sum takes its layout


def _spread(t: Tensor, weight: Tensor | None) -> Tensor:
    """t (…, nheads, headdim) → (…, nheads, rank, headdim): times weight (nheads, rank, headdim), or rank 1
    without a weight."""
    return t.unsqueeze(-2) if weight is None else t.unsqueeze(-2) * weight.to(t.dtype)


def _scan(
    share: Tensor,
    decay: Tensor,
    v: Tensor,
    k: Tensor,
    q: Tensor,
    h: Tensor,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs y_r = h_r q_r, and the final h.

    h_r has decayed by the token's decay and contains share v ⊗ k of the token's inputs up to r. It is one SSD
    scan, in k's dtype, whose entries are tokens' single inputs.

    An entry's input is divided by its decay, so no decay may be 0: a token's first entry gets its decay less
    (rank - 1) ε, the others ε each. Input r is then written, and output r read, too early by (rank - 1 - r)
    ε; a factor for each undoes this, so that no result depends on ε. ε is an even share of a small decay, and
    bounded where the decay is large, as the factors, powers of e, would overflow.

    Args:
        share: (batch, seqlen, nheads), the factor of v ⊗ k. decay: -A d, of the same shape.
        v, k, q: (batch, seqlen, nheads, rank, …). h: (batch, nheads, headdim, d_state).

    Returns:
        (batch, seqlen, rank, nheads, headdim), and the final h.
    """
    rank = v.shape[3]
    share, steps, early = share[:, :, None], decay[:, :, None], None
    if rank > 1:
        epsilon = steps.detach().clamp(max=1) / rank
        steps = torch.cat([steps - (rank - 1) * epsilon, epsilon.expand(-1, -1, rank - 1, -1)], dim=2)
        left = torch.arange(rank - 1, -1, -1, device=v.device)[:, None]
        early = (left * epsilon).exp()
        share = share * early
        seq_idx = None if seq_idx is None else seq_idx.repeat_interleave(rank, dim=1)
    written = (share / steps)[..., None] * v.transpose(2, 3)
    x, B, C = (t.to(k.dtype).flatten(1, 2) for t in (written, k.transpose(2, 3), q.transpose(2, 3)))
    A = -torch.ones_like(decay[0, 0])
    y, h = ssd_scan(x, steps.flatten(1, 2), A, B, C, initial_state=h, seq_idx=seq_idx)
    y = y.unflatten(1, (-1, rank))
    return (y if early is None else y / early[..., None]), h


def _within(own_share: Tensor, due_share: Tensor, D: Tensor, v: Tensor, k: Tensor, q: Tensor) -> Tensor:
    """Return the correction of `_scan`'s outputs for inputs of the same token, in v's shape.

    It is D v; minus the `due_share` of the inputs up to the output's own, which `_scan` added too early; plus
    the `own_share` of the inputs after it, which `_scan` added too late. k and q are not rotated here: the
    token's own angles cancel."""
    if v.shape[3] == 1:
        return (D[:, None] - due_share[..., None] * (k * q).sum(-1))[..., None] * v
    later = torch.ones(2 * v.shape[3:4], dtype=torch.bool, device=v.device).triu(1)
    weights = torch.where(later, own_share[..., None, None], -due_share[..., None, None]) * (q @ k.mT)
    return weights @ v + D[:, None, None] * v


def _heavy_tail(x: Tensor) -> Tensor:
    """1 + x above 0, 1 / (1 - x) below: positive; its derivative is continuous, and small at small values."""
    return x.clamp_min(0) + 1 / (1 - x.clamp_max(0))


class _Context(Protocol):
    """The values that `_Angles` and `_Frame` store for their backward.

    Attributes:
        angles, dtype: of the turn of a state.
        halves: as in `_Turned`.
    """

    angles: int
    dtype: torch.dtype
    halves: bool
    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Angles(torch.autograd.Function):
    """Angles of all tokens as they are, and those of the last; with gradients that keep float32's digits.

    An angle's gradient is a sum over all later tokens, of terms that cancel: their rounding would add up over
    the whole sequence, however soon states are forgotten. But outputs read only how far keys and queries are
    turned against each other. So where the state before the tokens, their angles and the state after them
    are turned together, nothing changes, and the gradients along this turn (`_Frame`) add up to 0. They say
    what the terms' sum is, without the terms: it goes to the angles before the tokens; and the difference,
    which is rounding, is taken from the terms in equal parts, unless documents begin within.

    Outputs `before` and `after` are zeros, for `_Frame`."""

    @staticmethod
    def forward(
        ctx: _Context, angles: Tensor, angle: Tensor, reset_at: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.save_for_backward(reset_at)
        return angles.view_as(angles), angles[:, -1].clone(), torch.zeros_like(angle), torch.zeros_like(angle)

    @staticmethod
    @differentiable_once("the sum of angles")
    def backward(
        ctx: _Context, d_angles: Tensor, d_last: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        (reset_at,) = ctx.saved_tensors
        # bitwise 0 if no later token's loss depends on all being turned: chunks add no rounding
        d_angle = (d_last + after) - before
        rounding = (d_angles.sum(1, dtype=torch.float64) - (after - before)) / d_angles.shape[1]
        if reset_at is not None:
            begins = reset_at.any(1)[:, None, None]
            d_angle, rounding = torch.where(begins, -before, d_angle), rounding.masked_fill(begins, 0)
        d_angles = d_angles - rounding.to(d_angles.dtype)[:, None]
        d_angles[:, -1].add_(d_last)
        return d_angles, d_angle, None


class _Frame(torch.autograd.Function):
    """A state as it is; the gradient of `turn` (batch, nheads, angles), 0, is that of turning the state."""

    @staticmethod
    def forward(ctx: _Context, state: Tensor, turn: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(state)
        ctx.angles, ctx.dtype, ctx.halves = turn.shape[-1], turn.dtype, halves
        ctx.set_materialize_grads(False)
        return state.view_as(state)

    @staticmethod
    @differentiable_once("the rotation of states")
    def backward(ctx: _Context, d_state: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if d_state is None:
            return None, None, None
        (state,) = ctx.saved_tensors
        assert state is not None
        (a, b), (da, db) = (_pairs(t.to(ctx.dtype), ctx.angles, ctx.halves) for t in (state, d_state))
        return d_state, (a * db - b * da).sum(-2), None


class _Turned(torch.autograd.Function):
    """t (…, d_state) with its first pairs of channels rotated by angles (…, angles): pairs of neighbours, or,
    with `halves`, of channels i and i + d_state / 2. Also a copy of the last token's result: the cotangent of
    a slice would be as large as all tokens' together.

    `turn` is exp(i angles). Only it and t are saved: the derivative of a rotation is a rotation by a further
    right angle, and rotations keep the angles between vectors, so that the unrotated ones serve."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, angles: Tensor, turn: Tensor, halves: bool) -> Any:
        ctx.save_for_backward(t, turn)
        ctx.halves = halves
        ctx.set_materialize_grads(False)
        turned = _turn(t, turn, halves)
        return turned, turned[:, -1].clone()

    @staticmethod
    @differentiable_once("the rotation of keys and queries")
    def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> Any:
        (t, turn), halves = ctx.saved_tensors, ctx.halves
        dt = _turn(torch.zeros_like(t) if dy is None else dy, turn.conj(), halves)
        if d_last is not None:
            dt[:, -1].add_(_turn(d_last, turn[:, -1].conj(), halves))
        before, after = (_complex(x, turn.shape[-1], halves) for x in (t, dt))
        d_angles = (before.conj() * after).imag
        return dt, d_angles if t.shape[-2] == 1 else d_angles.sum(-2, keepdim=True), None, None


def _pairs(t: Tensor, n: int, halves: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second channels of the first n pairs."""
    if halves:
        first, second = t.chunk(2, dim=-1)
        return first[..., :n], second[..., :n]
    a, b = t[..., : 2 * n].unflatten(-1, (-1, 2)).unbind(-1)
    return a, b


def _complex(t: Tensor, n: int, halves: bool) -> Tensor:
    """Return the first n pairs of channels as complex numbers, a view of t if pairs are adjacent."""
    if halves or t.shape[-1] % 2:
        return torch.complex(*_pairs(t, n, halves))
    return torch.view_as_complex(t[..., : 2 * n].unflatten(-1, (-1, 2)))


def _turn(t: Tensor, turn: Tensor, halves: bool) -> Tensor:
    turned = t.clone(memory_format=torch.contiguous_format)
    pairs = _complex(turned, turn.shape[-1], halves)
    pairs *= turn
    if not pairs._is_view():
        for channels, rotated in zip(
            _pairs(turned, turn.shape[-1], halves), (pairs.real, pairs.imag), strict=True
        ):
            channels.copy_(rotated)
    return turned
