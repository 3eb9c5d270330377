"""The Mamba-1 mixer (Gu & Dao 2023, section 3.4), parameters named and initialised as in mamba-ssm."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.selective_scan import selective_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.init import inverse_softplus_steps, reset


class MambaScanInputs(NamedTuple):
    """What the scan reads, token by token: u, delta, z (batch, seqlen, d_inner), B, C (batch, seqlen,
    d_state)."""

    u: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


class MambaMixer(nn.Module):
    """in_proj → conv1d + SiLU → x_proj, dt_proj → selective scan, gated → out_proj. State: (conv tail, h)."""

    grows = (None, None)

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        d_inner, d_state = config.d_inner, config.state_size("mamba")
        self.in_proj = nn.Linear(config.d_model, 2 * d_inner, bias=config.bias)
        self.conv1d = nn.Conv1d(d_inner, d_inner, config.d_conv, groups=d_inner, bias=config.conv_bias)
        self.x_proj = nn.Linear(d_inner, config.step_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(config.step_rank, d_inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = nn.Linear(d_inner, config.d_model, bias=config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.x_proj, self.out_proj)
        bound = self.config.step_rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        self.dt_proj.bias.copy_(inverse_softplus_steps(self.config, self.dt_proj.bias))
        d_state = self.A_log.shape[1]  # S4D-real: A = -(1, 2, …, d_state) in every channel
        self.A_log.copy_(torch.arange(1, d_state + 1, dtype=self.A_log.dtype).log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros: the conv tail (batch, d_inner, d_conv - 1) and h (batch, d_inner, d_state)."""
        d_inner, d_state = self.A_log.shape
        conv = torch.zeros(batch, d_inner, self.config.d_conv - 1, dtype=dtype, device=device)
        return conv, torch.zeros(batch, d_inner, d_state, dtype=dtype, device=device)

    def scan_inputs(
        self, x: Tensor, conv_state: Tensor, seq_idx: Tensor | None = None
    ) -> tuple[MambaScanInputs, Tensor]:
        """Everything before the scan: x (batch, seqlen, d_model) → the scan's inputs and the new conv
        tail."""
        d_inner, d_state = self.A_log.shape
        u, z = self.in_proj(x).split(d_inner, dim=-1)
        u, conv_state = causal_conv1d(
            u, self.conv1d.weight.squeeze(1), self.conv1d.bias, conv_state, True, seq_idx
        )
        delta, B, C = self.x_proj(u).split([self.config.step_rank, d_state, d_state], dim=-1)
        return MambaScanInputs(u, F.linear(delta, self.dt_proj.weight), B, C, z), conv_state

    def rates(self) -> Tensor:
        """A, below 0, (d_inner, d_state): float32, of a float64 model float64."""
        return -torch.exp(self.A_log if self.A_log.dtype == torch.float64 else self.A_log.float())

    def scan(
        self,
        inputs: MambaScanInputs,
        h: Tensor,
        window: int | None = None,
        halo: int = 0,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The recurrence: gated outputs (batch, seqlen, d_inner) and the final h."""
        u, delta, B, C, z = inputs
        A = self.rates()
        bias = self.dt_proj.bias
        return selective_scan(
            u,
            delta,
            A,
            B,
            C,
            self.D,
            z,
            bias,
            True,
            initial_state=h,
            window=window,
            halo=halo,
            seq_idx=seq_idx,
        )

    def log_decay(self, inputs: MambaScanInputs) -> Tensor:
        """(batch, seqlen, d_inner): the log of each channel's slowest decay at each token, 0 or less."""
        slowest = self.rates().amin(1)
        step = F.softplus(inputs.delta.to(slowest.dtype) + self.dt_proj.bias.to(slowest.dtype))
        return step * slowest

    def scan_outputs(self, y: Tensor, inputs: MambaScanInputs) -> Tensor:
        """Everything after the scan: (batch, seqlen, d_inner) → (batch, seqlen, d_model)."""
        return self.out_proj(y)

    def conv_tail(self, x: Tensor) -> Tensor:
        """The conv tail left by the d_conv - 1 tokens x (batch, d_conv - 1, d_model)."""
        return self.in_proj(x)[..., : self.config.d_inner].transpose(1, 2)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...], seq_idx: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs, conv_state = self.scan_inputs(x, state[0], seq_idx)
        y, h = self.scan(inputs, state[1], seq_idx=seq_idx)
        return self.scan_outputs(y, inputs), (conv_state, h)
