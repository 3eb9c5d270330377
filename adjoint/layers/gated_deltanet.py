"""The Gated DeltaNet mixer (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"), as in
flash-linear-attention and Qwen3-Next; parameters named after Mamba-2's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels import checks
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.norm import RMSNorm


class GatedDeltaNetMixer(nn.Module):
    """in_proj → conv1d + SiLU over (q, k, v), q and k normalised → gated delta rule → RMSNorm a head, gated →
    out_proj. State: (conv tail, S)."""

    grows = (None, None)

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.d_state, self.key_heads = config.state_size("gated_deltanet"), config.key_heads
        # q and k, v; and beside them, not convolved: gate, beta, decay
        self.sizes = [self.key_heads * self.d_state] * 2 + [config.d_inner]
        channels = self.d_conv_channels = sum(self.sizes)
        width = channels + config.d_inner + 2 * config.nheads
        self.in_proj = nn.Linear(config.d_model, width, bias=config.bias)
        self.conv1d = nn.Conv1d(channels, channels, config.d_conv, groups=channels, bias=config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.nheads))
        self.A_log = nn.Parameter(torch.empty(config.nheads))
        self.norm = RMSNorm(config.headdim, config.norm_eps)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.norm, self.out_proj)
        self.dt_bias.copy_(inverse_softplus_steps(self.config, self.dt_bias))
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(0, 16).clamp_min(1e-3).log())

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros: the conv tail (batch, channels, d_conv - 1) and S (batch, nheads, d_state, headdim)."""
        c = self.config
        conv = torch.zeros(batch, self.d_conv_channels, c.d_conv - 1, dtype=dtype, device=device)
        return conv, torch.zeros(batch, c.nheads, self.d_state, c.headdim, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x (batch, seqlen, d_model) → the same shape, and the new state; where seq_idx (batch, seqlen)
        changes another document begins."""
        c, (tail, S) = self.config, state
        checks.shape("initial_state", S, x.shape[0], c.nheads, self.d_state, c.headdim)
        qkv, z, b, a = self.in_proj(x).split([self.d_conv_channels, c.d_inner, c.nheads, c.nheads], dim=-1)
        qkv, tail = causal_conv1d(qkv, self.conv1d.weight.squeeze(1), self.conv1d.bias, tail, True, seq_idx)
        q, k, v = qkv.split(self.sizes, dim=-1)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k = (self._key_heads(t.to(wide)) for t in (q, k))
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        beta = torch.sigmoid(b.to(wide))
        v = v.unflatten(-1, (c.nheads, -1))
        y, S = gated_delta_rule(q * self.d_state**-0.5, k, v, g, beta, S, seq_idx)
        y = self.norm(y.to(z.dtype)) * F.silu(z.unflatten(-1, (c.nheads, -1)))
        return self.out_proj(y.flatten(-2)), (tail, S)

    def _key_heads(self, t: Tensor) -> Tensor:
        """Unit vectors (batch, seqlen, nheads, d_state), each shared by a group of heads."""
        t = t.unflatten(-1, (self.key_heads, self.d_state))
        t = t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        shared = self.config.nheads // self.key_heads
        return t if shared == 1 else t.repeat_interleave(shared, dim=2)
