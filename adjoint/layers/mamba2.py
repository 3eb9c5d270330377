"""The Mamba-2 mixer (Dao & Gu 2024, section 7), parameters named and initialised as in mamba-ssm."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.ssd_scan import ssd_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.norm import RMSNorm


class SSDScanInputs(NamedTuple):
    """x (batch, seqlen, nheads, headdim), dt (batch, seqlen, nheads), B, C (batch, seqlen, ngroups, d_state),
    z (batch, seqlen, d_inner)."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


class Mamba2Mixer(nn.Module):
    """in_proj → conv1d + SiLU over (x, B, C) → SSD scan → gated RMSNorm → out_proj. State: (conv tail, h)."""

    grows = (None, None)

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.d_state = config.state_size("mamba2")
        self.d_conv_channels = config.d_inner + 2 * config.ngroups * self.d_state
        channels = self.d_conv_channels
        self.in_proj = nn.Linear(config.d_model, config.d_inner + channels + config.nheads, bias=config.bias)
        self.conv1d = nn.Conv1d(channels, channels, config.d_conv, groups=channels, bias=config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.nheads))
        self.A_log = nn.Parameter(torch.empty(config.nheads))
        self.D = nn.Parameter(torch.empty(config.nheads))
        self.norm = RMSNorm(config.d_inner, config.norm_eps, group_size=config.d_inner // config.ngroups)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.norm, self.out_proj)
        self.dt_bias.copy_(inverse_softplus_steps(self.config, self.dt_bias))
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1, 16).log())
        nn.init.ones_(self.D)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros: the conv tail (batch, channels, d_conv - 1) and h (batch, nheads, headdim, d_state)."""
        c = self.config
        conv = torch.zeros(batch, self.d_conv_channels, c.d_conv - 1, dtype=dtype, device=device)
        return conv, torch.zeros(batch, c.nheads, c.headdim, self.d_state, dtype=dtype, device=device)

    def scan_inputs(
        self, x: Tensor, conv_state: Tensor, seq_idx: Tensor | None = None
    ) -> tuple[SSDScanInputs, Tensor]:
        """Everything before the scan: x (batch, seqlen, d_model) → the scan's inputs and the new conv
        tail."""
        c = self.config
        z, xBC, dt = self.in_proj(x).split([c.d_inner, self.d_conv_channels, c.nheads], dim=-1)
        xBC, conv_state = causal_conv1d(
            xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias, conv_state, True, seq_idx
        )
        x, B, C = xBC.split([c.d_inner, c.ngroups * self.d_state, c.ngroups * self.d_state], dim=-1)
        B, C = (v.unflatten(-1, (c.ngroups, self.d_state)) for v in (B, C))
        return SSDScanInputs(x.unflatten(-1, (c.nheads, c.headdim)), dt, B, C, z), conv_state

    def rates(self) -> Tensor:
        """A, below 0, (nheads,): float32, of a float64 model float64."""
        return -torch.exp(self.A_log if self.A_log.dtype == torch.float64 else self.A_log.float())

    def scan(
        self,
        inputs: SSDScanInputs,
        h: Tensor,
        window: int | None = None,
        halo: int = 0,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The recurrence: outputs (batch, seqlen, nheads, headdim) and the final h."""
        x, dt, B, C, _ = inputs
        A = self.rates()
        return ssd_scan(
            x,
            dt,
            A,
            B,
            C,
            self.D,
            None,
            self.dt_bias,
            True,
            initial_state=h,
            window=window,
            halo=halo,
            seq_idx=seq_idx,
        )

    def log_decay(self, inputs: SSDScanInputs) -> Tensor:
        """(batch, seqlen, nheads): the log of each head's decay at each token, 0 or less."""
        A = self.rates()
        return F.softplus(inputs.dt.to(A.dtype) + self.dt_bias.to(A.dtype)) * A

    def scan_outputs(self, y: Tensor, inputs: SSDScanInputs) -> Tensor:
        """Everything after the scan: (batch, seqlen, nheads, headdim) → (batch, seqlen, d_model)."""
        return self.out_proj(self.norm(y.flatten(-2), gate=inputs.z))

    def conv_tail(self, x: Tensor) -> Tensor:
        """The conv tail left by the d_conv - 1 tokens x (batch, d_conv - 1, d_model)."""
        d_inner = self.config.d_inner
        return self.in_proj(x)[..., d_inner : d_inner + self.d_conv_channels].transpose(1, 2)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs, conv_state = self.scan_inputs(x, state[0], seq_idx)
        y, h = self.scan(inputs, state[1], seq_idx=seq_idx)
        return self.scan_outputs(y, inputs), (conv_state, h)
