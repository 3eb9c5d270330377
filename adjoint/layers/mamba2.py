"""The Mamba-2 mixer (Dao & Gu 2024, section 7), parameters named and initialised as in mamba-ssm."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.columns import split_columns
from adjoint.kernels.ssd_scan import ssd_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.conv1d import CausalConv1d
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.mixer import ScanMixer, check_heads, rates
from adjoint.layers.norm import RMSNorm, norm_over_ranks
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Split,
    Splits,
    by_columns,
    by_rows,
    rank_config_by_groups,
)


class SSDScanInputs(NamedTuple):
    """The scan's inputs: x (batch, seqlen, nheads, headdim), dt (batch, seqlen, nheads), B, C (batch, seqlen,
    ngroups, d_state); and the gate z (batch, seqlen, d_inner)."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


class Mamba2Mixer(ScanMixer):
    """in_proj → conv1d + SiLU over (x, B, C) → SSD scan → gated RMSNorm → out_proj. State: (conv tail (batch,
    channels, d_conv - 1), h (batch, nheads, headdim, d_state))."""

    default_d_state = 128
    projected = True
    undecayed = frozenset({"dt_bias", "A_log", "D"})

    def __init__(self, config: StackConfig) -> None:
        n = self.state_size(config)
        channels = config.d_inner + 2 * config.ngroups * n
        super().__init__(config, (channels, config.d_conv - 1), (config.nheads, config.headdim, n))
        self.d_state, self.d_conv_channels = n, channels
        self.in_proj = nn.Linear(config.d_model, config.d_inner + channels + config.nheads, bias=config.bias)
        self.conv1d = CausalConv1d(channels, config.d_conv, config.conv_bias)
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

    @classmethod
    def reach(cls, config: StackConfig) -> int:
        return config.d_conv - 1

    @classmethod
    def check(cls, config: StackConfig) -> None:
        check_heads(config, config.ngroups)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts as `MambaMixer` does; one state per 128 tokens, with 16-bit activations per 256."""
        d_inner, n = config.d_inner, cls.state_size(config)
        rows = 3 * d_inner if selective else 5 * d_inner + 4 * config.ngroups * n
        return rows * element + d_inner * n * max(element, 4) * element // 512

    def splits(self) -> Splits:
        c = self.config
        heads, channels = (
            Section("the number of heads", c.nheads),
            Section("the number of heads", c.nheads, c.headdim),
        )
        groups = Section("ngroups", c.ngroups, self.d_state, shared=True)
        rows = by_rows(
            in_proj=[channels, channels, groups, groups, heads],
            conv1d=[channels, groups, groups],
            dt_bias=[heads],
            A_log=[heads],
            D=[heads],
            norm=[channels],
        )
        return {**rows, **by_columns(out_proj=[channels])}

    def state_splits(self) -> tuple[Split | None, ...]:
        return self.splits()["conv1d"]._replace(dim=1), None

    def rank_config(self, ranks: int) -> RankConfig:
        return rank_config_by_groups(self.config, ranks)

    def scan_inputs(
        self, x: Tensor, conv_tail: Tensor, seq_idx: Tensor | None = None
    ) -> tuple[SSDScanInputs, Tensor]:
        c = self.config
        z, xBC, dt = split_columns(self.in_proj(x), [c.d_inner, self.d_conv_channels, c.nheads])
        xBC, conv_tail = self.conv1d(xBC, conv_tail, True, seq_idx)
        x, B, C = split_columns(xBC, [c.d_inner, c.ngroups * self.d_state, c.ngroups * self.d_state])
        B, C = (v.unflatten(-1, (c.ngroups, self.d_state)) for v in (B, C))
        return SSDScanInputs(x.unflatten(-1, (c.nheads, c.headdim)), dt, B, C, z), conv_tail

    def scan(self, inputs: SSDScanInputs, h: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return outputs (batch, seqlen, nheads, headdim) and the final h."""
        x, dt, B, C, _ = inputs
        A, D, bias = rates(self.A_log), self.D, self.dt_bias
        return ssd_scan(x, dt, A, B, C, D, None, bias, True, initial_state=h, **options)

    def log_decay(self, inputs: SSDScanInputs) -> Tensor:
        """Return the log decays, (batch, seqlen, nheads)."""
        A = rates(self.A_log)
        return F.softplus(inputs.dt.to(A.dtype) + self.dt_bias.to(A.dtype)) * A

    def scan_outputs(self, y: Tensor, inputs: SSDScanInputs) -> Tensor:
        y, c = y.flatten(-2), self.config
        if isinstance(c, RankConfig) and c.ranks_per_group > 1:
            assert self.tensor_group is not None
            return self.out_proj(
                norm_over_ranks(self.norm, y, inputs.z, self.tensor_group, c.ranks_per_group)
            )
        return self.out_proj(self.norm(y, gate=inputs.z))

    def conv_tail(self, x: Tensor) -> Tensor:
        d_inner = self.config.d_inner
        return self.in_proj(x)[..., d_inner : d_inner + self.d_conv_channels].transpose(1, 2)
