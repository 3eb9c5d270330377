"""The Mamba-1 mixer (Gu & Dao 2023, section 3.4), parameters named and initialised as in mamba-ssm."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.kernels.checks import is_untouched
from adjoint.kernels.collectives import copy_to_ranks, sum_over_ranks
from adjoint.kernels.columns import split_columns
from adjoint.kernels.selective_scan import selective_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.conv1d import CausalConv1d
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.mixer import ScanMixer, rates
from adjoint.layers.weight_splits import RankConfig, Section, Splits, by_columns, by_rows, rank_config


class MambaScanInputs(NamedTuple):
    """The scan's inputs: u, delta (before softplus and bias), z (batch, seqlen, d_inner); B, C (batch,
    seqlen, d_state)."""

    u: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


class MambaMixer(ScanMixer):
    """in_proj → conv1d + SiLU → x_proj, dt_proj → selective scan, gated → out_proj. State: (conv tail
    (batch, d_inner, d_conv - 1), h (batch, d_inner, d_state))."""

    projected = True
    undecayed = frozenset({"A_log", "D"})

    def __init__(self, config: StackConfig) -> None:
        d_inner, d_state, rank = config.d_inner, self.state_size(config), self.step_rank(config)
        super().__init__(config, (d_inner, config.d_conv - 1), (d_inner, d_state))
        self.in_proj = nn.Linear(config.d_model, 2 * d_inner, bias=config.bias)
        self.conv1d = CausalConv1d(d_inner, config.d_conv, config.conv_bias)
        self.x_proj = nn.Linear(d_inner, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, d_inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state))
        self.D = nn.Parameter(torch.empty(d_inner))
        self.out_proj = nn.Linear(d_inner, config.d_model, bias=config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.x_proj, self.out_proj)
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        self.dt_proj.bias.copy_(inverse_softplus_steps(self.config, self.dt_proj.bias))
        d_state = self.A_log.shape[1]  # S4D-real: A = -(1, 2, …, d_state) in every channel
        self.A_log.copy_(torch.arange(1, d_state + 1, dtype=self.A_log.dtype).log().expand_as(self.A_log))
        nn.init.ones_(self.D)

    @classmethod
    def reach(cls, config: StackConfig) -> int:
        return config.d_conv - 1

    @classmethod
    def step_rank(cls, config: StackConfig) -> int:
        return math.ceil(config.d_model / 16) if config.dt_rank is None else config.dt_rank

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts five tensors of d_inner channels (in_proj's two halves, the outputs of convolution, scan and
        gate), B and C, and one state of the scan per 64 tokens."""
        d_inner, n = config.d_inner, cls.state_size(config)
        rows = 3 * d_inner if selective else 5 * d_inner + 4 * n
        return rows * element + d_inner * n * max(element, 4) // 64

    def splits(self) -> Splits:
        channels = [Section("d_inner", self.config.d_inner)]
        rows = by_rows(in_proj=2 * channels, conv1d=channels, dt_proj=channels, A_log=channels, D=channels)
        return {**rows, **by_columns(x_proj=channels, out_proj=channels)}

    def rank_config(self, ranks: int) -> RankConfig:
        return rank_config(self.config, ranks)

    def scan_inputs(
        self, x: Tensor, conv_tail: Tensor, seq_idx: Tensor | None = None
    ) -> tuple[MambaScanInputs, Tensor]:
        d_inner, d_state = self.A_log.shape
        u, z = split_columns(self.in_proj(x), [d_inner, d_inner])
        u, conv_tail = self.conv1d(u, conv_tail, True, seq_idx)
        projected = self.x_proj(u)
        if self.tensor_group is not None:  # all channels have a part in it, and all read it
            projected = copy_to_ranks(sum_over_ranks(projected, self.tensor_group), self.tensor_group)
        delta, B, C = projected.split([self.dt_proj.in_features, d_state, d_state], dim=-1)
        return MambaScanInputs(u, self._steps(delta), B, C, z), conv_tail

    def _steps(self, delta: Tensor) -> Tensor:
        """Return dt_proj's output, to which the scan adds `_step_bias`."""
        if is_untouched(self.dt_proj, nn.Linear):
            return F.linear(delta, self.dt_proj.weight)
        steps: Tensor = self.dt_proj(delta)
        return steps

    def _step_bias(self) -> Tensor | None:
        """Return dt_proj's bias; None if the module adds it, as one with hooks or an adapter does."""
        return self.dt_proj.bias if is_untouched(self.dt_proj, nn.Linear) else None

    def scan(self, inputs: MambaScanInputs, h: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return gated outputs (batch, seqlen, d_inner) and the final h."""
        u, delta, B, C, z = inputs
        A, bias = rates(self.A_log), self._step_bias()
        return selective_scan(u, delta, A, B, C, self.D, z, bias, True, initial_state=h, **options)

    def log_decay(self, inputs: MambaScanInputs) -> Tensor:
        """Return the slowest log decay of each channel's states, (batch, seqlen, d_inner)."""
        slowest = rates(self.A_log).amin(1)
        bias = self._step_bias()
        steps = inputs.delta.to(slowest.dtype) + (0 if bias is None else bias.to(slowest.dtype))
        return F.softplus(steps) * slowest

    def scan_outputs(self, y: Tensor, inputs: MambaScanInputs) -> Tensor:
        return self.out_proj(y)

    def conv_tail(self, x: Tensor) -> Tensor:
        return self.in_proj(x)[..., : self.config.d_inner].transpose(1, 2)
