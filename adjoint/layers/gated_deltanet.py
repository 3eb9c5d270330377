"""The Gated DeltaNet mixer (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks"), as in
flash-linear-attention and Qwen3-Next, and Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"); parameters
named after Mamba-2's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.kernels import checks
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.columns import split_columns
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.rms_norm import l2_norm
from adjoint.layers.config import StackConfig
from adjoint.layers.conv1d import CausalConv1d
from adjoint.layers.init import inverse_softplus_steps, reset
from adjoint.layers.mixer import Mixer, arrived, check_heads, handed_on, rates
from adjoint.layers.norm import RMSNorm
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Split,
    Splits,
    by_columns,
    by_rows,
    every_rank_has,
    local_units,
    rank_config,
)


class GatedDeltaNetMixer(Mixer):
    """in_proj → conv1d + SiLU over (q, k, v), q and k normalised → gated delta rule → RMSNorm a head, gated →
    out_proj. State: (conv tail (batch, channels, d_conv - 1), S (batch, nheads, d_state, headdim))."""

    default_d_state = 64
    projected, takes_state_handoff = True, True
    undecayed = frozenset({"dt_bias", "A_log"})

    def __init__(self, config: StackConfig) -> None:
        n, key_heads = self.state_size(config), self.count_key_heads(config)
        sizes = [key_heads * n, key_heads * n, config.d_inner]  # of q, k and v
        channels = sum(sizes)  # those that are convolved; gate, beta and decay are not
        super().__init__(config, (channels, config.d_conv - 1), (config.nheads, n, config.headdim))
        self.d_state, self.key_heads, self.sizes, self.d_conv_channels = n, key_heads, sizes, channels
        self.in_proj = nn.Linear(config.d_model, channels + sum(self.gate_sizes(config)), bias=config.bias)
        self.conv1d = CausalConv1d(channels, config.d_conv, config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.nheads * self.count_decays(config)))
        self.A_log = nn.Parameter(torch.empty(config.nheads))
        self.norm = RMSNorm(config.headdim, config.norm_eps)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=config.bias)
        self._add_gates(config)
        self.reset_parameters()

    def _add_gates(self, config: StackConfig) -> None:
        """Make the further weights of a subclass."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset(self.in_proj, self.conv1d, self.norm, self.out_proj)
        self.dt_bias.copy_(inverse_softplus_steps(self.config, self.dt_bias))
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(0, 16).clamp_min(1e-3).log())

    @classmethod
    def gate_sizes(cls, config: StackConfig) -> tuple[int, int, int]:
        """Return the sizes of in_proj's outputs for the output gate, beta and the decay."""
        return config.d_inner, config.nheads, config.nheads

    @classmethod
    def count_decays(cls, config: StackConfig) -> int:
        """Return the number of decays per head."""
        return 1

    @classmethod
    def count_key_heads(cls, config: StackConfig) -> int:
        """Return the number of query heads, which is also that of key heads."""
        return config.linear_num_key_heads or config.nheads

    @classmethod
    def check(cls, config: StackConfig) -> None:
        check_heads(config)
        key_heads = cls.count_key_heads(config)
        if config.nheads % key_heads:
            raise ValueError(
                f"linear_num_key_heads {key_heads} must divide the number of heads, d_inner / headdim = "
                f"{config.nheads}"
            )

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts in_proj's and the convolution's outputs, each head's values, keys and queries, and one state
        per 64 tokens."""
        n, nheads, d_inner = cls.state_size(config), config.nheads, config.d_inner
        channels = 2 * cls.count_key_heads(config) * n + d_inner
        states, accumulated = n * config.headdim // 64, max(element, 4)
        if selective:
            return (channels + d_inner) * element + (d_inner + nheads * states) * accumulated
        return (2 * channels + 5 * d_inner) * element + nheads * (2 * n + states) * accumulated

    def splits(self) -> Splits:
        c = self.config
        heads, values = (
            Section("the number of heads", c.nheads),
            Section("the number of heads", c.nheads, c.headdim),
        )
        keys = Section("the number of key heads", self.key_heads, self.d_state, shared=True)
        convolved = [keys, keys, values]
        rows = by_rows(
            in_proj=[*convolved, *self._gate_sections()],
            conv1d=convolved,
            dt_bias=[Section("the number of heads", c.nheads, self.count_decays(c))],
            A_log=[heads],
        )
        return {**rows, **by_columns(out_proj=[values])}

    def state_splits(self) -> tuple[Split | None, ...]:
        return self.splits()["conv1d"]._replace(dim=1), None

    def _gate_sections(self) -> list[Section]:
        """Return the sections of in_proj's outputs for the output gate, beta and the decay."""
        nheads = self.config.nheads
        return [
            Section("the number of heads", nheads, size // nheads) for size in self.gate_sizes(self.config)
        ]

    def rank_config(self, ranks: int) -> RankConfig:
        key_heads = local_units("the number of key heads", self.key_heads, ranks, shared=True)
        return rank_config(self.config, ranks, linear_num_key_heads=key_heads)

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        c, (tail, before) = self.config, state
        qkv, z, b, a = split_columns(self.in_proj(x), [self.d_conv_channels, *self.gate_sizes(c)])
        qkv, tail = self.conv1d(qkv, tail, True, seq_idx)
        q, k, v = split_columns(qkv, self.sizes)
        dtype = accumulate_dtype(x.dtype)
        q, k = (self._key_heads(t.to(dtype)) for t in (q, k))
        g = self.log_decay(a, dtype)
        beta = torch.sigmoid(b.to(dtype))
        v = v.unflatten(-1, (c.nheads, -1))
        S = arrived(before)
        checks.shapes(initial_state=(S, x.shape[0], c.nheads, self.d_state, c.headdim))
        y, S = gated_delta_rule(q * self.d_state**-0.5, k, v, g, beta, S, seq_idx)
        S = handed_on(before, S)
        y = self.norm(y.to(z.dtype)) * self.gate(z).unflatten(-1, (c.nheads, -1))
        return self.out_proj(y.flatten(-2)), (tail, S)

    def log_decay(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rule's g, from in_proj's output for it."""
        return rates(self.A_log) * F.softplus(a.to(dtype) + self.dt_bias.to(dtype))

    def gate(self, z: Tensor) -> Tensor:
        """Return the output's factor, (…, d_inner)."""
        return F.silu(z)

    def _key_heads(self, t: Tensor) -> Tensor:
        """Return keys or queries as unit vectors (…, nheads, d_state), repeated for heads that share them."""
        t = t.unflatten(-1, (self.key_heads, self.d_state))
        t = l2_norm(t)
        shared = self.config.nheads // self.key_heads
        return t if shared == 1 else t.repeat_interleave(shared, dim=2)


class KDAMixer(GatedDeltaNetMixer):
    """Gated DeltaNet with a decay for each channel of a head's keys.

    Decays and the output gate, a sigmoid, come from headdim channels each, which f_b_proj and g_b_proj widen:
    in_proj is what fla's layer has as q_proj, k_proj, v_proj, b_proj and the first halves of f_proj and
    g_proj."""

    def _add_gates(self, config: StackConfig) -> None:
        self.f_b_proj = nn.Linear(config.headdim, len(self.dt_bias), bias=False)
        self.g_b_proj = nn.Linear(config.headdim, config.d_inner)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset(self.f_b_proj, self.g_b_proj)
        self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1, 16).log())

    def splits(self) -> Splits:
        c = self.config
        decays = Section("the number of heads", c.nheads, self.count_decays(c))
        return {
            **super().splits(),
            **by_rows(f_b_proj=[decays], g_b_proj=[Section("the number of heads", c.nheads, c.headdim)]),
        }

    def _gate_sections(self) -> list[Section]:
        gate, beta, decay = self.gate_sizes(self.config)
        return [every_rank_has(gate), Section("the number of heads", beta), every_rank_has(decay)]

    @classmethod
    def gate_sizes(cls, config: StackConfig) -> tuple[int, int, int]:
        return config.headdim, config.nheads, config.headdim

    @classmethod
    def count_decays(cls, config: StackConfig) -> int:
        return cls.state_size(config)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts besides the decays of each head's channels, before and after softplus and as they enter the
        rule, and what makes them and the gate."""
        decays, low = config.nheads * cls.count_decays(config), 2 * config.headdim
        stored = super().kept_bytes(config, element, selective) + low * element
        if selective:
            return stored - config.d_inner * element
        return stored + 3 * decays * max(element, 4)

    def log_decay(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        steps = F.softplus(self.f_b_proj(a).to(dtype) + self.dt_bias.to(dtype))
        return rates(self.A_log)[:, None] * steps.unflatten(-1, (self.config.nheads, -1))

    def gate(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.g_b_proj(z))
