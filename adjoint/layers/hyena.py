"""The mixers of StripedHyena 2: gated causal convolutions with short, medium and unbounded filters.

Ku et al. 2025, "Systems and Algorithms for Convolutional Multi-Hybrid Language Models at Scale", section 2:

    q, k, v = conv1d(in_proj(x)),   u = k v,   y = h * u + D u,   output out_proj(q y)

with h * u the causal convolution of each channel with its filter h. What differs is h:

    hyena_se  h has a few explicit taps, shared by a group of channels; no D
    hyena_mr  h_t = e^(-r t / (taps - 1)) g_t: more taps, each group of them with a fixed rate of decay r
    hyena_li  h_t = sum over n of R_n e^(A_n t), as long as the sequence, in the modal form with real poles
"""

import math
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.modal_scan import modal_scan
from adjoint.layers.config import StackConfig
from adjoint.layers.conv1d import CausalConv1d
from adjoint.layers.init import reset
from adjoint.layers.mixer import ScanMixer, rates
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Split,
    Splits,
    by_columns,
    by_rows,
    local_units,
    rank_config,
)

CHANNELS_A_GROUP = 16  # that share an explicit filter, unless the configuration says otherwise
DECAY_EXPONENTS = {"weak": -2, "normal": -1, "strong": 0}  # rates of decay are 10^these to 10^2


class HyenaInputs(NamedTuple):
    """The filter's inputs u and the gate q, each (batch, seqlen, channels)."""

    u: Tensor
    q: Tensor


class HyenaMixer(ScanMixer):
    """in_proj → short conv1d over (q, k, v) → filter of k v, gated by q → out_proj.

    State: the conv tail (batch, 3 d_model, d_conv - 1), and the filter's state. A subclass has the filter as
    `scan`."""

    projected = True
    undecayed = frozenset({"h", "D", "A_log", "residues"})

    def __init__(self, config: StackConfig, *filter_state: int) -> None:
        c, channels = config, self.count_channels(config)
        super().__init__(c, (3 * channels, c.d_conv - 1), filter_state)
        self.in_proj = nn.Linear(c.d_model, 3 * channels, bias=c.bias)
        self.conv1d = CausalConv1d(3 * channels, c.d_conv, c.conv_bias)
        bias = c.bias if c.out_proj_bias is None else c.out_proj_bias
        self.out_proj = nn.Linear(channels, c.d_model, bias=bias)

    @classmethod
    def count_channels(cls, config: StackConfig) -> int:
        """Return the number of channels here: d_model, or a rank's share of them."""
        return config.d_model // (config.ranks if isinstance(config, RankConfig) else 1)

    @classmethod
    def reach(cls, config: StackConfig) -> int:
        return config.d_conv - 1

    def unit(self) -> Section:
        """Return the channels as ranks share them out."""
        return Section("d_model", self.config.d_model)

    def splits(self) -> Splits:
        channels = self.unit()
        rows = by_rows(in_proj=[channels] * 3, conv1d=[channels] * 3)
        return {**rows, **by_columns(out_proj=[channels])}

    def state_splits(self) -> tuple[Split | None, ...]:
        return self.splits()["conv1d"]._replace(dim=1), None

    def rank_config(self, ranks: int) -> RankConfig:
        local_units("d_model", self.config.d_model, ranks)
        return rank_config(self.config, ranks)

    def scan_inputs(
        self, x: Tensor, conv_tail: Tensor, seq_idx: Tensor | None = None
    ) -> tuple[HyenaInputs, Tensor]:
        qkv, conv_tail = self.conv1d(self.in_proj(x), conv_tail, False, seq_idx)
        q, k, v = qkv.chunk(3, dim=-1)
        return HyenaInputs(k * v, q), conv_tail

    def scan_outputs(self, y: Tensor, inputs: HyenaInputs) -> Tensor:
        return self.out_proj(inputs.q * y)

    def conv_tail(self, x: Tensor) -> Tensor:
        return self.in_proj(x).transpose(1, 2)


class HyenaSEMixer(HyenaMixer):
    """The short explicit filter. Its state is its last inputs, (batch, d_model, taps - 1).

    Parameters: h (groups, taps), the newest input's tap first.

    Attributes:
        gains: whether each channel's input is also added to its output, times D.
    """

    windowed = False
    gains: ClassVar[bool] = False

    def __init__(self, config: StackConfig) -> None:
        taps = self.count_taps(config)
        super().__init__(config, self.count_channels(config), taps - 1)
        self.h = nn.Parameter(torch.empty(self.count_groups(config), taps))
        if self.gains:
            self.D = nn.Parameter(torch.empty(self.count_channels(config)))
        self.reset_parameters()

    @classmethod
    def count_taps(cls, config: StackConfig) -> int:
        """Return the filter's length."""
        return config.hyena_se_len

    @classmethod
    def count_groups(cls, config: StackConfig) -> int:
        """Return the number of groups of channels that share a filter; of a rank's part, those here."""
        if config.hyena_groups is not None:
            return config.hyena_groups
        return config.d_model // (1 if config.d_model % CHANNELS_A_GROUP else CHANNELS_A_GROUP)

    @classmethod
    def check(cls, config: StackConfig) -> None:
        if config.d_model % cls.count_groups(config):
            raise ValueError(f"hyena_groups {config.hyena_groups} must divide d_model, {config.d_model}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.out_proj)
        bound = self.h.shape[1] ** -0.5
        self.h.uniform_(-bound, bound)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts the outputs of in_proj and conv1d, and the filter's input, its output and that gated."""
        return (3 if selective else 9) * config.d_model * element

    def unit(self) -> Section:
        groups = self.count_groups(self.config)
        return Section("the number of hyena's groups", groups, self.config.d_model // groups)

    def splits(self) -> Splits:
        unit = self.unit()
        filters = by_rows(h=[unit._replace(width=1)], **({"D": [unit]} if self.gains else {}))
        return {**super().splits(), **filters}

    def rank_config(self, ranks: int) -> RankConfig:
        unit = self.unit()
        return rank_config(self.config, ranks, hyena_groups=local_units(unit.unit, unit.units, ranks))

    def filters(self) -> Tensor:
        """Return each group's filter, (groups, taps), the newest input's tap first."""
        return self.h

    def scan(self, inputs: HyenaInputs, h: Tensor, seq_idx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the filter's outputs, like u, and its last inputs."""
        filters = self.filters()
        weight = filters.repeat_interleave(inputs.u.shape[-1] // len(filters), dim=0)
        if self.gains:
            weight = torch.cat([weight[:, :1] + self.D.to(weight.dtype)[:, None], weight[:, 1:]], dim=1)
        return causal_conv1d(inputs.u, weight.flip(1), None, h, seq_idx=seq_idx)


class HyenaMRMixer(HyenaSEMixer):
    """The filter of medium length, whose taps decay at a fixed rate of each group's own.

    Parameters besides h: D. Without `hyena_mr_decay` h is the filter itself."""

    gains = True

    @classmethod
    def count_taps(cls, config: StackConfig) -> int:
        return config.hyena_mr_len

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.out_proj)
        bound = self.h.shape[1] ** -0.5
        nn.init.normal_(self.h, std=bound)
        self.D.uniform_(-bound, bound)

    def filters(self) -> Tensor:
        preset, (groups, taps) = self.config.hyena_mr_decay, self.h.shape
        if preset is None:
            return self.h
        rank, ranks = 0, self.config.ranks if isinstance(self.config, RankConfig) else 1
        if self.tensor_group is not None:
            rank = dist.get_rank(self.tensor_group)
        dtype, device = accumulate_dtype(self.h.dtype), self.h.device
        decay_rates = torch.logspace(DECAY_EXPONENTS[preset], 2, groups * ranks, dtype=dtype, device=device)[
            rank * groups : (rank + 1) * groups
        ]
        times = torch.linspace(0, 1, taps, dtype=dtype, device=device)
        return self.h.to(dtype) * torch.exp(-decay_rates[:, None] * times)


class HyenaLIMixer(HyenaMixer):
    """The filter of unbounded length, a sum of d_state decaying exponentials in each channel. Its state is
    h (batch, d_model, d_state).

    Parameters: A_log, of which -e^A_log is a pole's logarithm, and residues, (d_model, d_state) each; D
    (d_model,)."""

    def __init__(self, config: StackConfig) -> None:
        channels, order = self.count_channels(config), self.state_size(config)
        super().__init__(config, channels, order)
        self.A_log = nn.Parameter(torch.empty(channels, order))
        self.residues = nn.Parameter(torch.empty(channels, order))
        self.D = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw poles that last from 27 to 272 tokens, and small residues, as savanna does."""
        reset(self.in_proj, self.conv1d, self.out_proj)
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(0.01, 0.1).log() - 1)
        nn.init.normal_(self.residues, std=0.1 / math.sqrt(self.residues.shape[1]))
        bound = self.residues.shape[1] ** -0.5
        self.D.uniform_(-bound, bound)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts as `HyenaSEMixer` does, and one state per 64 tokens."""
        states = config.d_model * cls.state_size(config) * max(element, 4) // 64
        return (4 if selective else 9) * config.d_model * element + states

    def splits(self) -> Splits:
        channels = [self.unit()]
        return {**super().splits(), **by_rows(A_log=channels, residues=channels, D=channels)}

    def scan(
        self,
        inputs: HyenaInputs,
        h: Tensor,
        window: int | None = None,
        halo: int = 0,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the filter's outputs, like u, and the final h."""
        A = rates(self.A_log)
        return modal_scan(inputs.u, A, self.residues, self.D, h, window, seq_idx, halo=halo)

    def log_decay(self, inputs: HyenaInputs) -> Tensor:
        """Return the slowest mode's log decay for each token, (1, seqlen, 1): it is the same in all."""
        return rates(self.A_log).amax().expand(1, inputs.u.shape[1], 1)
