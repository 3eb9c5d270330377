"""The Mamba-3 mixer, single-input form, parameters named and initialised as in mamba-ssm (modules/mamba3.py).

    h_t = α_t h_{t-1} + (1 - λ_t) d_t α_t v_{t-1} ⊗ k_{t-1} + λ_t d_t v_t ⊗ k_t        y_t = h_t q_t + D v_t

with α_t = exp(A_t d_t): the trapezoidal rule where the Mamba-2 recurrence is Euler's. Keys and queries are
turned by angles that add up over time, a complex-valued state in real numbers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import checks
from adjoint.kernels.ssd_scan import ssd_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.norm import RMSNorm

TINY = 1e-12  # at least so much is -A d, by which inputs are divided: exp(-TINY) is 1 but for rounding


class Mamba3Mixer(nn.Module):
    """in_proj → B and C normalised, with biases, turned → SSD scan → (norm,) gate → out_proj. State: (angle,
    h, last k, last v)."""

    grows = (None, None, None, None)

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = c = config
        self.d_state = n = c.state_size("mamba3")
        self.angles = c.rope_angles
        d_inner, nheads = c.d_inner, c.nheads
        # z, x, B, C, dt, A, trap, angle
        self.sizes = [d_inner, d_inner, c.ngroups * n, c.ngroups * n, nheads, nheads, nheads, self.angles]
        self.in_proj = nn.Linear(c.d_model, sum(self.sizes), bias=c.bias)
        self.dt_bias = nn.Parameter(torch.empty(nheads))
        self.B_bias = nn.Parameter(torch.empty(nheads, 1, n))
        self.C_bias = nn.Parameter(torch.empty(nheads, 1, n))
        self.B_norm = RMSNorm(n, c.norm_eps)
        self.C_norm = RMSNorm(n, c.norm_eps)
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

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros: angle (batch, nheads, angles), h (batch, nheads, headdim, d_state), and of the last token k,
        turned, (batch, nheads, d_state) and v (batch, nheads, headdim)."""
        nheads, headdim, n = self.config.nheads, self.config.headdim, self.d_state
        shapes = (nheads, self.angles), (nheads, headdim, n), (nheads, n), (nheads, headdim)
        return tuple(torch.zeros(batch, *shape, dtype=dtype, device=device) for shape in shapes)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x (batch, seqlen, d_model) → the same shape, and the new state; where seq_idx (batch, seqlen)
        changes another document begins."""
        c, (angle, h, k_before, v_before) = self.config, state
        checks.shape("initial_state", h, x.shape[0], c.nheads, c.headdim, self.d_state)
        z, v, B, C, dt, a, trap, turns = self.in_proj(x).split(self.sizes, dim=-1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        decay = (_heavy_tail(a.to(wide)).clamp_min(c.A_floor) * dt).clamp_min(TINY)  # -A d
        trap = torch.sigmoid(trap.to(wide))
        turns = math.pi * torch.tanh(turns.to(wide))[:, :, None] * dt[..., None]
        angles = angle.to(wide)[:, None] + turns.cumsum(1)
        reset_at = checks.reset_of(seq_idx, *x.shape[:2])
        if reset_at is not None:
            angles = angles - _before_documents(angles - turns, reset_at)
        k, q = (
            _turned(self._heads(t, norm, bias.to(wide)), angles)
            for t, norm, bias in ((B, self.B_norm, self.B_bias), (C, self.C_norm, self.C_bias))
        )
        v = v.unflatten(-1, (c.nheads, c.headdim))
        # A token's k and v enter h when it is read and once more with the next token, whose share this is; of
        # the last token that share is the next chunk's, and of the token before the first it is still due.
        shares = (1 - trap) * dt
        due = F.pad(shares[:, 1:], (0, 0, 0, 1))
        if reset_at is not None:  # nor is anything due to another document
            due = due.masked_fill(F.pad(reset_at[:, 1:], (0, 1))[..., None], 0)
        v_before = shares[:, 0, :, None] * v_before.to(wide)
        h = h.to(wide) + v_before[..., None] * k_before.to(wide)[:, :, None]
        # Both shares at once: h as if the next token had been read already, which the output then takes back.
        written = ((trap * dt + due) / decay)[..., None] * v.to(wide)
        A = -torch.ones_like(decay[0, 0])
        y, h = ssd_scan(
            written.to(z.dtype), decay, A, k.to(z.dtype), q.to(z.dtype), initial_state=h, seq_idx=seq_idx
        )
        y = y + (self.D.to(wide) - due * (k * q).sum(-1))[..., None] * v.to(wide)
        y = y.flatten(-2).to(z.dtype)
        y = (y if self.norm is None else self.norm(y)) * F.silu(z)
        # copies: whoever keeps the last token's must not keep all of them
        return self.out_proj(y), (angles[:, -1] % math.tau, h, k[:, -1].clone(), v[:, -1].clone())

    def _heads(self, t: Tensor, norm: RMSNorm, bias: Tensor) -> Tensor:
        """(batch, seqlen, nheads, d_state): each group's normalised vector with each of its heads' bias."""
        t = norm(t.unflatten(-1, (self.config.ngroups, self.d_state)))
        return t.repeat_interleave(self.config.nheads // self.config.ngroups, dim=2) + bias.squeeze(1)


def _before_documents(angles: Tensor, begins: Tensor) -> Tensor:
    """Of each token the angles (batch, seqlen, nheads, angles) at its document's first one; 0 for a row's
    first document, which goes on from the state. begins: (batch, seqlen), where others begin."""
    places = torch.arange(begins.shape[1], device=begins.device)
    first = torch.where(begins, places, 0).cummax(1).values
    found = angles.gather(1, first[..., None, None].expand(-1, -1, *angles.shape[2:]))
    return found.masked_fill((first == 0)[..., None, None], 0)


def _heavy_tail(x: Tensor) -> Tensor:
    """1 + x above 0, 1 / (1 - x) below: positive, smooth to first order, and slow to leave small values."""
    return x.clamp_min(0) + 1 / (1 - x.clamp_max(0))


def _turned(t: Tensor, angles: Tensor) -> Tensor:
    """t (…, d_state) with its first pairs of neighbouring channels turned by angles (…, angles)."""
    cos, sin = angles.cos(), angles.sin()
    n = 2 * angles.shape[-1]
    a, b = t[..., :n].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([turned, t[..., n:]], dim=-1)
