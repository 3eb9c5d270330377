"""The time mix of RWKV-7 (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution",
section 4)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.kernels import checks
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.plain_recurrence import zero_where
from adjoint.layers.config import StackConfig
from adjoint.layers.init import reset
from adjoint.layers.mixer import Mixer, arrived, check_heads, handed_on
from adjoint.layers.weight_splits import (
    RankConfig,
    Section,
    Split,
    Splits,
    by_columns,
    by_rows,
    every_rank_has,
    rank_config,
)

MAX_LOG_DECAY = math.exp(-0.5)  # log decays lie between its negative and 0
# What reads mixed inputs: receptance, decays, keys, values, learning rates, gate. At initialisation the token
# before has the share 1 - (place among the channels)^power of a channel.
SHIFT_POWERS = {"r": 0.1, "w": 0.45, "k": 0.35, "v": 0.35, "a": 0.45, "g": 0.1}


class RWKV7Mixer(Mixer):
    """Token shift → receptance, keys, values, decays, in-context learning rates, gate → DPLR delta rule →
    LayerNorm per head, plus a bonus for the token's value, gated → out_proj. State: the last token's input
    (batch, d_model), and S (batch, nheads, d_state, headdim).

        S_t = (diag(w_t) - (α_t ∘ κ̂_t) κ̂_tᵀ) S_{t-1} + k̃_t v_tᵀ
        κ̂ = k ∘ k_k normalised per head,    k̃ = k ∘ (1 + (α - 1) ∘ k_a)

    The paper's sizes are expand = 1 and d_state = headdim = 64. Three parts of its model are not built: the
    first layer's values, which later layers mix into theirs (a mixer sees no other layer); the channel mix, a
    squared ReLU with a token shift (`d_intermediate` adds the stack's gated MLP instead); and LayerNorm
    before each layer (a stack has RMSNorm). So RWKV-7's published weights do not fit; `adjoint.formats.rwkv7`
    reads them into flash-linear-attention's model.
    """

    default_d_state = 64
    takes_state_handoff = True
    undecayed = frozenset({"token_shift", "k_k", "k_a", "r_k", "norm_weight", "norm_bias"})
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor

    def __init__(self, config: StackConfig) -> None:
        c, n, nheads = config, self.state_size(config), config.nheads
        super().__init__(c, (c.d_model,), (nheads, n, c.headdim))
        self.d_state, keys, low = n, nheads * n, self.low_ranks(c)
        self.token_shift = nn.Parameter(torch.empty(len(SHIFT_POWERS), c.d_model))
        self.r_proj = nn.Linear(c.d_model, keys, bias=c.bias)
        self.k_proj = nn.Linear(c.d_model, keys, bias=c.bias)
        self.v_proj = nn.Linear(c.d_model, c.d_inner, bias=c.bias)
        self.w_a_proj = nn.Linear(c.d_model, low["w"], bias=False)
        self.w_b_proj = nn.Linear(low["w"], keys)
        self.a_a_proj = nn.Linear(c.d_model, low["a"], bias=False)
        self.a_b_proj = nn.Linear(low["a"], keys)
        self.g_a_proj = nn.Linear(c.d_model, low["g"], bias=False)
        self.g_b_proj = nn.Linear(low["g"], c.d_inner, bias=False)
        for name in ("k_k", "k_a", "r_k"):
            self.register_parameter(name, nn.Parameter(torch.empty(nheads, n)))
        self.norm_weight = nn.Parameter(torch.empty(nheads, c.headdim))
        self.norm_bias = nn.Parameter(torch.empty(nheads, c.headdim))
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.bias)
        self.reset_parameters()

    @classmethod
    def low_ranks(cls, config: StackConfig) -> dict[str, int]:
        """Return the ranks of the maps to decays, learning rates and the gate, as in flash-linear-attention's
        layer: a few times √d_model, in steps of 32."""
        per_key = 2.5 * cls.state_size(config) / 64
        factors = {"w": per_key, "a": per_key, "g": 5.0}
        return {name: max(32, 32 * round(f * config.d_model**0.5 / 32)) for name, f in factors.items()}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw projections as other mixers do; set the rest as RWKV-7 does in the middle of the depth.

        Channels start with decays and token shifts of many speeds, second factors of low-rank maps small."""
        low_rank = [self.w_a_proj, self.w_b_proj, self.a_a_proj, self.a_b_proj, self.g_a_proj, self.g_b_proj]
        reset(self.r_proj, self.k_proj, self.v_proj, *low_rank, self.out_proj)
        like = self.token_shift
        channel = torch.arange(like.shape[1], dtype=torch.float64) / like.shape[1]
        for row, power in zip(like, SHIFT_POWERS.values(), strict=True):
            row.copy_(1 - channel**power)
        keys = self.k_k.numel()
        place = torch.linspace(0, 1, keys, dtype=torch.float64)
        within = torch.linspace(-1, 1, self.d_state, dtype=torch.float64).repeat(self.config.nheads)
        zigzag = within * within.abs()
        self.w_b_proj.bias.copy_(-5.5 + 6 * place**1.8 + 2.5 * zigzag)
        self.a_b_proj.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (place - 0.5))
        for module in (self.w_b_proj, self.a_b_proj, self.g_b_proj):
            module.weight.mul_(0.1)
        self.k_k.copy_((0.76 - 0.1 * place).view_as(self.k_k))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)

    @classmethod
    def check(cls, config: StackConfig) -> None:
        check_heads(config)

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Counts the mixed inputs, outputs of projections, what is made of them for each head, and one state
        per 64 tokens."""
        c, keys, low = config, config.nheads * cls.state_size(config), sum(cls.low_ranks(config).values())
        states, accumulated = keys * c.headdim // 64, max(element, 4)
        if selective:
            return (4 * keys + 2 * c.d_inner + low) * element + (c.d_inner + states) * accumulated
        narrow = len(SHIFT_POWERS) * c.d_model + 2 * c.d_inner + low
        return narrow * element + (c.d_model + 12 * keys + 4 * c.d_inner + states) * accumulated

    def splits(self) -> Splits:
        c = self.config
        keys = Section("the number of heads", c.nheads, self.d_state)
        values, heads = (
            Section("the number of heads", c.nheads, c.headdim),
            Section("the number of heads", c.nheads),
        )
        of_keys = ("r_proj", "k_proj", "w_b_proj", "a_b_proj")
        rows = by_rows(
            **{name: [keys] for name in of_keys},
            **{name: [values] for name in ("v_proj", "g_b_proj")},
            **{name: [heads] for name in ("k_k", "k_a", "r_k", "norm_weight", "norm_bias")},
        )
        return {**rows, **by_columns(out_proj=[values])}

    def state_splits(self) -> tuple[Split | None, ...]:
        return Split(1, [every_rank_has(self.config.d_model)]), None

    def rank_config(self, ranks: int) -> RankConfig:
        return rank_config(self.config, ranks)

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        c, (last, before) = self.config, state
        shifted, last = self._shifted(x, last, seq_idx)
        r, w, k, v, a, g = (torch.addcmul(x, shifted, mix.to(x.dtype)) for mix in self.token_shift)
        dtype = accumulate_dtype(x.dtype)
        r, k = (self._heads(t, dtype) for t in (self.r_proj(r), self.k_proj(k)))
        v = self.v_proj(v).unflatten(-1, (c.nheads, -1))  # whose dtype kernels may take for their products
        decay = -MAX_LOG_DECAY * self._heads(self.w_b_proj(torch.tanh(self.w_a_proj(w))), dtype).sigmoid()
        rate = self._heads(self.a_b_proj(self.a_a_proj(a)), dtype).sigmoid()
        gate = self.g_b_proj(torch.sigmoid(self.g_a_proj(g)))
        removed = F.normalize(k * self.k_k.to(dtype), dim=-1)
        k = k * (1 + (rate - 1) * self.k_a.to(dtype))
        S = arrived(before)
        checks.shapes(initial_state=(S, x.shape[0], c.nheads, self.d_state, c.headdim))
        y, S = dplr_delta_rule(r, k, v, removed, -(removed * rate), decay, S, seq_idx)
        S = handed_on(before, S)
        y = F.layer_norm(y, y.shape[-1:], eps=c.headdim * c.norm_eps)
        y = torch.addcmul(self.norm_bias.to(dtype), y, self.norm_weight.to(dtype))
        y = y + (r * k * self.r_k.to(dtype)).sum(-1, keepdim=True) * v.to(dtype)
        return self.out_proj(y.flatten(-2).to(gate.dtype) * gate), (last, S)

    def _heads(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.to(dtype).unflatten(-1, (self.config.nheads, -1))

    def _shifted(self, x: Tensor, last: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return each token's difference to the token before, which is zero before a document, and the last
        token."""
        before = arrived(last)
        checks.shapes(initial_state=(before, x.shape[0], x.shape[2]))
        after = handed_on(last, x[:, -1].to(before.dtype, copy=True))
        earlier = torch.cat([before.to(x.dtype)[:, None], x[:, :-1]], dim=1)
        reset = None if seq_idx is None else checks.reset_of(seq_idx, *x.shape[:2])
        earlier = zero_where(earlier, reset)
        return earlier - x, after
