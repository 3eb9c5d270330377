"""What a stack is made of: one frozen dataclass, checked when it is made."""

import dataclasses
import math

MIXERS = ("mamba", "mamba2", "diagonal", "scalar", "dense")
_DEFAULT_D_STATE = {"mamba": 16, "mamba2": 128, "diagonal": 16, "scalar": 16, "dense": 16}


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """Sizes of a stack of state-space layers.

    Args:
        vocab_size: number of token ids.
        d_model: width of the residual stream.
        n_layer: number of layers.
        mixer: mamba, mamba2, diagonal, scalar or dense; or a list of n_layer of them.
        d_state: state size a channel (mamba), a head's channel (mamba2) or a layer (the generic three); by
            default 16, for mamba2 128.
        d_conv: taps of the causal convolution of mamba and mamba2.
        expand: d_inner = expand * d_model, for mamba and mamba2.
        headdim: channels a head, for mamba2; must divide d_inner.
        ngroups: groups of heads that share B and C, for mamba2; must divide the number of heads.
        dt_rank: rank of the step size's projection, for mamba; ceil(d_model / 16) by default.
        d_intermediate: width of a gated MLP after each mixer; 0 for none.
        tie_embeddings: whether the head's weight is the embedding's.
        norm_eps: epsilon of every RMSNorm.
        bias: whether in_proj and out_proj have biases.
        conv_bias: whether conv1d has a bias.
        dt_min, dt_max, dt_init_floor: range of the step sizes at initialisation.
        initializer_range: standard deviation of the embedding at initialisation.

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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layer", "d_conv", "expand", "headdim", "ngroups"):
            _positive(name, getattr(self, name))
        for name in ("d_state", "dt_rank"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.d_conv > 16:
            raise ValueError(f"d_conv must be at most 16, got {self.d_conv}")
        if self.d_intermediate < 0:
            raise ValueError(f"d_intermediate must be 0 (no MLP) or more, got {self.d_intermediate}")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}")
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(
                f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max, got {self.dt_min} and {self.dt_max}"
            )
        for kind in self.mixers:
            if kind not in MIXERS:
                raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, or a list of them; got {kind!r}")
        if len(self.mixers) != self.n_layer:
            raise ValueError(
                f"mixer lists {len(self.mixers)} layers but n_layer is {self.n_layer}: give one a layer"
            )
        if "mamba2" in self.mixers:
            if self.d_inner % self.headdim:
                raise ValueError(
                    f"headdim {self.headdim} must divide d_inner = expand * d_model = {self.d_inner}"
                )
            if self.nheads % self.ngroups:
                raise ValueError(f"ngroups {self.ngroups} must divide the number of heads, {self.nheads}")

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

    def state_size(self, kind: str) -> int:
        """d_state of a mixer of that kind."""
        return _DEFAULT_D_STATE[kind] if self.d_state is None else self.d_state

    @property
    def step_rank(self) -> int:
        return math.ceil(self.d_model / 16) if self.dt_rank is None else self.dt_rank


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more; got {value!r}")
