"""What a stack is made of: one frozen dataclass, checked when it is made."""

import dataclasses
import math

MIXERS = ("mamba", "mamba2", "diagonal", "scalar", "dense", "attention", "gated_deltanet", "mamba3")
# Those whose recurrences can be cut to a window.
WINDOWED = ("mamba", "mamba2", "diagonal", "scalar", "dense")
_DEFAULT_D_STATE = {"mamba": 16, "mamba2": 128, "diagonal": 16, "scalar": 16, "dense": 16}
_DEFAULT_D_STATE |= {"gated_deltanet": 64, "mamba3": 128}


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """Sizes of a stack of recurrent and attention layers.

    Args:
        vocab_size: number of token ids.
        d_model: width of the residual stream.
        n_layer: number of layers.
        mixer: mamba, mamba2, mamba3, diagonal, scalar, dense, gated_deltanet or attention; "module:Class", a
            layer of your own (docs/own_layer.md); or a list of n_layer of them.
        d_state: state size a channel (mamba), a head's channel (mamba2, mamba3), channels of a key
            (gated_deltanet) or state size a layer (the generic three); by default 16, for mamba2 and mamba3
            128, for gated_deltanet 64.
        d_conv: taps of the causal convolution of mamba, mamba2 and gated_deltanet.
        expand: d_inner = expand * d_model; not of the generic three and attention.
        headdim: channels a head, for mamba2, mamba3 and gated_deltanet; must divide d_inner.
        ngroups: groups of heads that share B and C, for mamba2 and mamba3; must divide the number of heads.
        dt_rank: rank of the step size's projection, for mamba; ceil(d_model / 16) by default.
        d_intermediate: width of a gated MLP after each mixer; 0 for none.
        tie_embeddings: whether the head's weight is the embedding's.
        norm_eps: epsilon of every RMSNorm.
        bias: whether in_proj and out_proj have biases.
        conv_bias: whether conv1d has a bias.
        dt_min, dt_max, dt_init_floor: range of the step sizes at initialisation.
        initializer_range: standard deviation of the embedding at initialisation.
        num_attention_heads: heads of queries, for attention; by default d_model / 64, at least 1.
        num_key_value_heads: heads of keys and values, shared by groups of queries' (grouped-query attention);
            must divide num_attention_heads, by default as many.
        head_dim: channels of a head of attention; by default d_model / num_attention_heads.
        rope_theta: base of the rotary embedding's frequencies.
        rotary_emb_dim: channels of a head that the rotary embedding turns, the first ones, an even number; by
            default all, 0 for none.
        attention_bias: whether attention's in_proj and out_proj have biases; by default as `bias` says.
        attention_d_conv: taps of a causal convolution, with a bias, over attention's queries, keys and
            values; 0 for none.
        sliding_window: tokens that a query sees, its own included; None for all.
        linear_num_key_heads: heads of queries and keys, shared by groups of values', for gated_deltanet; must
            divide the number of heads, d_inner / headdim, by default as many.
        rope_fraction: share of d_state that is turned, for mamba3: 0.5 or 1.
        A_floor: the least decay rate, for mamba3.
        is_outproj_norm: whether a norm of each head stands before the gate, for mamba3.
        is_mimo: whether a token has several inputs and outputs that share the state, for mamba3; d_state must
            be even then.
        mimo_rank: how many, with is_mimo.

    Raises:
        ValueError: a size is not positive, or sizes do not divide as they must.
    """

    vocab_size: int = 256
    d_model: int = 256
    n_layer: int = 4
    mixer: str | list[str] = "mamba"
    d_state: int | None = None
    d_conv: int = 4
    expand: int = 2
    headdim: int = 64
    ngroups: int = 1
    dt_rank: int | None = None
    d_intermediate: int = 0
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    initializer_range: float = 0.02
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rotary_emb_dim: int | None = None
    attention_bias: bool | None = None
    attention_d_conv: int = 0
    sliding_window: int | None = None
    linear_num_key_heads: int | None = None
    rope_fraction: float = 0.5
    A_floor: float = 1e-4
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 4

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "n_layer",
            "d_conv",
            "expand",
            "headdim",
            "ngroups",
            "mimo_rank",
        ):
            _whole(name, getattr(self, name))
        attention = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
        for name in ("d_state", "dt_rank", *attention, "linear_num_key_heads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        _whole("attention_d_conv", self.attention_d_conv, least=0)
        if self.rotary_emb_dim is not None:
            _whole("rotary_emb_dim", self.rotary_emb_dim, least=0)
        for name in ("d_conv", "attention_d_conv"):
            if getattr(self, name) > 16:
                raise ValueError(f"{name} must be at most 16, got {getattr(self, name)}")
        if self.d_intermediate < 0:
            raise ValueError(f"d_intermediate must be 0 (no MLP) or more, got {self.d_intermediate}")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}")
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(
                f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {self.dt_min} and {self.dt_max}"
            )
        for kind in self.mixers:
            if kind not in MIXERS and ":" not in str(kind):
                raise ValueError(
                    f"mixer must be one of {', '.join(MIXERS)}, module:Class, or a list of them; got {kind!r}"
                )
        if len(self.mixers) != self.n_layer:
            raise ValueError(
                f"mixer lists {len(self.mixers)} layers but n_layer is {self.n_layer}: give one a layer"
            )
        self._check_heads()

    def _check_heads(self) -> None:
        kinds = set(self.mixers)
        if kinds & {"mamba2", "mamba3", "gated_deltanet"} and self.d_inner % self.headdim:
            raise ValueError(
                f"headdim {self.headdim} must divide d_inner = expand * d_model = {self.d_inner}"
            )
        if kinds & {"mamba2", "mamba3"} and self.nheads % self.ngroups:
            raise ValueError(f"ngroups {self.ngroups} must divide the number of heads, {self.nheads}")
        if "gated_deltanet" in kinds and self.nheads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads {self.key_heads} must divide the number of heads, d_inner / headdim = "
                f"{self.nheads}"
            )
        if "mamba3" in kinds:
            if self.rope_fraction not in (0.5, 1.0):
                raise ValueError(f"rope_fraction must be 0.5 or 1, got {self.rope_fraction}")
            if self.rope_angles < 1:
                least = int(2 / self.rope_fraction)
                raise ValueError(
                    f"d_state must be at least {least}, so that there is a pair to turn; got "
                    f"{self.state_size('mamba3')}"
                )
            if self.is_mimo and self.state_size("mamba3") % 2:
                size = self.state_size("mamba3")
                raise ValueError(f"d_state must be even with is_mimo, which turns its halves; got {size}")
            if not self.A_floor > 0:
                raise ValueError(f"A_floor must be positive, got {self.A_floor}")
        if "attention" in kinds:
            heads, kv_heads, dim = self.attention_heads
            if heads % kv_heads:
                raise ValueError(
                    f"num_key_value_heads {kv_heads} must divide num_attention_heads, which is {heads}"
                )
            if self.rotary_emb_dim is None and dim % 2:
                raise ValueError(f"head_dim must be even, as rotary embedding turns pairs; got {dim}")
            if self.rotary_dim % 2 or self.rotary_dim > dim:
                raise ValueError(
                    f"rotary_emb_dim must be even, and at most head_dim {dim}; got {self.rotary_emb_dim}"
                )
            if not self.rope_theta > 1:
                raise ValueError(f"rope_theta must be a number above 1, such as 10000; got {self.rope_theta}")

    @property
    def mixers(self) -> tuple[str, ...]:
        """The kind of each layer's mixer."""
        return (self.mixer,) * self.n_layer if isinstance(self.mixer, str) else tuple(self.mixer)

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def nheads(self) -> int:
        return self.d_inner // self.headdim

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Attention's heads of queries, heads of keys and values, and channels a head."""
        heads = self.num_attention_heads or max(1, self.d_model // 64)
        dim = self.head_dim or max(2, self.d_model // heads // 2 * 2)
        return heads, self.num_key_value_heads or heads, dim

    @property
    def rotary_dim(self) -> int:
        """Channels of attention's heads that the rotary embedding turns."""
        return self.attention_heads[2] if self.rotary_emb_dim is None else self.rotary_emb_dim

    @property
    def attention_has_bias(self) -> bool:
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def key_heads(self) -> int:
        """gated_deltanet's heads of queries and keys."""
        return self.linear_num_key_heads or self.nheads

    @property
    def rope_angles(self) -> int:
        """Pairs of channels that mamba3 turns."""
        return int(self.state_size("mamba3") * self.rope_fraction) // 2

    @property
    def mamba3_rank(self) -> int:
        """mamba3's inputs and outputs of a token."""
        return self.mimo_rank if self.is_mimo else 1

    def state_size(self, kind: str) -> int:
        """d_state of a mixer of that kind."""
        return _DEFAULT_D_STATE[kind] if self.d_state is None else self.d_state

    @property
    def step_rank(self) -> int:
        return math.ceil(self.d_model / 16) if self.dt_rank is None else self.dt_rank


def _whole(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more; got {value!r}")
