"""`StackConfig`: a stack's sizes and kinds of layers, checked when it is made."""

import dataclasses
import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from adjoint.settings import (
    Must,
    NotNegative,
    NotNegativeNumber,
    Positive,
    PositiveNumber,
    check_fields,
    documented,
    option,
)

MixerClass = Any  # a subclass of `layers.mixer.Mixer`, which imports this module


class _Mixers(Mapping[str, MixerClass]):
    """Classes by name, each imported when it is first asked for: names alone need no torch.

    Args:
        classes: of each name its class, as "module of adjoint.layers:class".
    """

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, name: str) -> MixerClass:
        module, _, mixer = self._classes[name].partition(":")
        return getattr(importlib.import_module(f"adjoint.layers.{module}"), mixer)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


# The built-in mixers.
MIXERS = _Mixers(
    {
        "mamba": "mamba:MambaMixer",
        "mamba2": "mamba2:Mamba2Mixer",
        "diagonal": "selective:DiagonalMixer",
        "scalar": "selective:ScalarMixer",
        "dense": "selective:DenseMixer",
        "attention": "attention:AttentionMixer",
        "gated_deltanet": "gated_deltanet:GatedDeltaNetMixer",
        "kda": "gated_deltanet:KDAMixer",
        "mamba3": "mamba3:Mamba3Mixer",
        "rwkv7": "rwkv7_mixer:RWKV7Mixer",
        "hyena_se": "hyena:HyenaSEMixer",
        "hyena_mr": "hyena:HyenaMRMixer",
        "hyena_li": "hyena:HyenaLIMixer",
    }
)
ACTIVATIONS = ("silu", "gelu", "identity")  # of a gated MLP's gate
# The built-in mixers that read an option, for options that not all of them do.
READERS = {
    "d_state": "mamba, mamba2, mamba3, diagonal, scalar, dense, gated_deltanet, kda, rwkv7, hyena_li",
    "d_conv": "mamba, mamba2, gated_deltanet, kda, hyena_se, hyena_mr, hyena_li",
    "expand": "mamba, mamba2, mamba3, gated_deltanet, kda, rwkv7",
    "headdim": "mamba2, mamba3, gated_deltanet, kda, rwkv7",
    "ngroups": "mamba2, mamba3",
    "dt_rank": "mamba",
    "linear_num_key_heads": "gated_deltanet, kda",
    **dict.fromkeys(("rope_fraction", "A_floor", "is_outproj_norm", "is_mimo", "mimo_rank"), "mamba3"),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta"), "attention"),
    **dict.fromkeys(("rope_scaling_factor", "rotary_emb_dim", "attention_bias"), "attention"),
    **dict.fromkeys(("attention_d_conv", "sliding_window"), "attention"),
    "hyena_se_len": "hyena_se",
    "hyena_mr_len": "hyena_mr",
    "hyena_mr_decay": "hyena_mr",
    "hyena_groups": "hyena_se, hyena_mr",
}
Taps = Annotated[int, Must("a whole number from 1 to 16", lambda n: 1 <= n <= 16)]
LongTaps = Annotated[int, Must("a whole number from 1 to 1024", lambda n: 1 <= n <= 1024)]
TapsOrNone = Annotated[int, Must("a whole number from 0 to 16", lambda n: 0 <= n <= 16)]


@documented
@dataclasses.dataclass(frozen=True)
class StackConfig:
    """Sizes of a stack of recurrent and attention layers.

    Raises:
        ValueError: a size is not positive, or sizes do not divide as they must.
    """

    vocab_size: Positive = option(256, "number of token ids.")
    d_model: Positive = option(256, "width of the residual stream.")
    n_layer: Positive = option(4, "number of layers.")
    mixer: str | list[str] = option(
        "mamba",
        "mamba, mamba2, mamba3, diagonal, scalar, dense, gated_deltanet, kda, rwkv7, hyena_se, hyena_mr, "
        "hyena_li or attention; "
        '"module:Class", a layer of your own (docs/own_layer.md); or a list with one of these for each of '
        "the n_layer layers.",
    )
    d_state: Positive | None = option(
        None,
        "state size: per channel (mamba; default 16), per channel of a head (mamba2, mamba3; 128), key "
        "channels of a head (gated_deltanet, kda, rwkv7; 64), per layer (diagonal, scalar, dense; 16), modes "
        "of a channel's filter (hyena_li; 16).",
    )
    d_conv: Taps = option(
        4, "width of the short causal convolution of mamba, mamba2, gated_deltanet, kda and the hyena mixers."
    )
    expand: Positive = option(
        2, "d_inner = expand * d_model; not for diagonal, scalar, dense, attention and the hyena mixers."
    )
    headdim: Positive = option(
        64, "channels per head, for mamba2, mamba3, gated_deltanet, kda and rwkv7; must divide d_inner."
    )
    ngroups: Positive = option(
        1, "groups of heads that share B and C, for mamba2 and mamba3; must divide the number of heads."
    )
    dt_rank: Positive | None = option(
        None, "rank of the step size's projection, for mamba; default ceil(d_model / 16)."
    )
    d_intermediate: NotNegative = option(0, "width of a gated MLP after each mixer; 0 for none.")
    mlp_activation: str | list[str] = option(
        "silu",
        "what the gated MLPs apply to their gate: silu, gelu or identity; or a list with one of these for "
        "each of the n_layer layers.",
    )
    tie_embeddings: bool = option(True, "whether head and embedding share their weight.")
    norm_eps: PositiveNumber = option(1e-5, "epsilon of every RMSNorm.")
    bias: bool = option(False, "whether in_proj and out_proj have biases.")
    out_proj_bias: bool | None = option(
        None,
        "whether out_proj of attention and the hyena mixers has a bias; default: as their in_proj.",
    )
    conv_bias: bool = option(True, "whether conv1d has a bias.")
    dt_min: PositiveNumber = option(0.001, "smallest step size at initialisation.")
    dt_max: PositiveNumber = option(0.1, "largest step size at initialisation.")
    dt_init_floor: NotNegativeNumber = option(1e-4, "lower bound of step sizes at initialisation.")
    initializer_range: NotNegativeNumber = option(
        0.02, "standard deviation of the embedding at initialisation."
    )
    num_attention_heads: Positive | None = option(
        None, "query heads, for attention; default d_model / 64, at least 1."
    )
    num_key_value_heads: Positive | None = option(
        None,
        "key and value heads, for grouped-query attention; must divide num_attention_heads, the default.",
    )
    head_dim: Positive | None = option(
        None, "channels per attention head; default d_model / num_attention_heads."
    )
    rope_theta: PositiveNumber = option(10000.0, "base of the rotary embedding's frequencies.")
    rope_scaling_factor: PositiveNumber = option(
        1.0, "number by which the rotary embedding divides positions (linear interpolation)."
    )
    rotary_emb_dim: NotNegative | None = option(
        None,
        "how many channels of a head, from the first, get rotary embeddings: an even number; 0 for none, "
        "default all.",
    )
    attention_bias: bool | None = option(
        None, "whether attention's in_proj and out_proj have biases; default: the value of `bias`."
    )
    attention_d_conv: TapsOrNone = option(
        0,
        "width of a causal convolution, with a bias, over attention's queries, keys and values; 0 for none.",
    )
    sliding_window: Positive | None = option(
        None, "tokens that a query attends to, including its own; None for all."
    )
    linear_num_key_heads: Positive | None = option(
        None,
        "query and key heads, for gated_deltanet and kda; must divide the number of value heads, d_inner "
        "/ headdim, the default.",
    )
    rope_fraction: PositiveNumber = option(0.5, "share of d_state that is rotated, for mamba3: 0.5 or 1.")
    A_floor: PositiveNumber = option(1e-4, "smallest decay rate, for mamba3.")
    is_outproj_norm: bool = option(False, "whether each head is normalised before the gate, for mamba3.")
    is_mimo: bool = option(
        False,
        "whether each token has several inputs and outputs that share the state, for mamba3; d_state must "
        "then be even.",
    )
    mimo_rank: Positive = option(4, "number of inputs and outputs per token, with is_mimo.")
    hyena_se_len: LongTaps = option(7, "taps of hyena_se's filters.")
    hyena_mr_len: LongTaps = option(128, "taps of hyena_mr's filters.")
    hyena_groups: Positive | None = option(
        None,
        "groups of channels that share a filter, for hyena_se and hyena_mr; must divide d_model; default "
        "d_model / 16, or d_model where that is no whole number.",
    )
    hyena_mr_decay: Literal["weak", "normal", "strong"] | None = option(
        "weak",
        "rates at which hyena_mr's filters decay over their length, from 0.01 (weak), 0.1 (normal) or 1 "
        "(strong) in the first group to 100 in the last; null for no decay.",
    )
    bidirectional: Literal["tied", "separate"] | None = option(
        None,
        "whether layers read the sequence in both directions, for masked-token objectives: each mixer's "
        'output is then the sum of two scans. "tied" shares in_proj and out_proj between them, as Caduceus '
        'does; "separate" shares nothing; null reads forward only. Labels are not shifted.',
    )
    bidirectional_strategy: Literal["add", "ew_multiply"] = option(
        "add",
        'how a bidirectional layer joins its two scans: their sum, or "ew_multiply", their product element '
        "by element.",
    )
    complement_map: list[int] | None = option(
        None,
        "each token id's complement, for a bidirectional model of both strands of DNA (Caduceus-PS): it "
        "reads the sequence and its reverse complement with the same weights, so that logits of the reverse "
        "complement are the reverse complement of the logits. Ids beyond the list's end are their own.",
    )

    def __post_init__(self) -> None:
        check_fields("model", self)
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min must be at most dt_max, got {self.dt_min} and {self.dt_max}")
        if len(self.mixers) != self.n_layer:
            raise ValueError(
                f"mixer lists {len(self.mixers)} layers but n_layer is {self.n_layer}: give one for each "
                "layer"
            )
        if (listed := len(self.mlp_activations)) != self.n_layer:
            raise ValueError(
                f"mlp_activation lists {listed} layers but n_layer is {self.n_layer}: give one for each layer"
            )
        for activation in self.mlp_activations:
            if activation not in ACTIVATIONS:
                raise ValueError(
                    f"mlp_activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
                )
        for kind in dict.fromkeys(self.mixers):
            if kind in MIXERS:
                MIXERS[kind].check(self)
                self._check_directions(kind)
            elif ":" not in kind:
                suggestions = difflib.get_close_matches(kind, MIXERS, n=1)
                raise ValueError(
                    f"mixer must be one of {', '.join(MIXERS)}, module:Class, or a list of them; got {kind!r}"
                    + "".join(f": did you mean {name}?" for name in suggestions)
                )
        self._check_strands()

    def unread_options(self) -> list[str]:
        """Return the names of options that are not at their default, and that no layer reads."""
        if not all(kind in MIXERS for kind in self.mixers):
            return []
        read = {name for name, readers in READERS.items() if {*self.mixers} & {*readers.split(", ")}}
        return [
            name for name in READERS if getattr(self, name) != getattr(StackConfig, name) and name not in read
        ]

    def _check_directions(self, kind: str) -> None:
        """Raise a ValueError if a built-in mixer cannot read in both directions as the settings say."""
        if self.bidirectional is not None and MIXERS[kind].attended_channels(self):
            raise ValueError(
                f"bidirectional is for recurrent mixers, and mixer has {kind}: list recurrent ones only, "
                "such as mamba, or leave bidirectional out"
            )
        if self.bidirectional == "tied" and not MIXERS[kind].projected:
            raise ValueError(
                f'bidirectional="tied" shares in_proj and out_proj, which {kind} does not have: '
                'use "separate"'
            )

    def _check_strands(self) -> None:
        """Raise a ValueError for settings that need bidirectional layers, or for a wrong complement_map."""
        if self.bidirectional is None:
            for name, default in (("bidirectional_strategy", "add"), ("complement_map", None)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f'{name} is for layers that read in both directions: set bidirectional to "tied" or '
                        f'"separate", or leave it out; got {value!r}'
                    )
        complements = self.complement_map or []
        if len(complements) > self.vocab_size or not all(0 <= i < self.vocab_size for i in complements):
            raise ValueError(
                f"complement_map must have ids below vocab_size, {self.vocab_size}, and at most one for "
                f"each; got {complements}"
            )
        full = self.complements
        for i, complement in enumerate(full):
            if full[complement] != i:
                raise ValueError(
                    f"complement_map: {i}'s complement is {complement}, whose complement is "
                    f"{full[complement]}: it must be {i} again"
                )

    @property
    def mixers(self) -> tuple[str, ...]:
        """Kinds of the layers' mixers, one per layer."""
        return (self.mixer,) * self.n_layer if isinstance(self.mixer, str) else tuple(self.mixer)

    @property
    def mlp_activations(self) -> tuple[str, ...]:
        """Functions that the MLPs apply to their gate, one per layer."""
        if isinstance(self.mlp_activation, str):
            return (self.mlp_activation,) * self.n_layer
        return tuple(self.mlp_activation)

    @property
    def complements(self) -> list[int]:
        """The complement of every token id: ids beyond the end of `complement_map` are their own."""
        complements = list(self.complement_map or [])
        return complements + list(range(len(complements), self.vocab_size))

    @property
    def strands(self) -> int:
        """Number of rows that each sequence has inside the model: two with `complement_map`."""
        return 1 if self.complement_map is None else 2

    @property
    def d_inner(self) -> int:
        return self.expand * self.d_model

    @property
    def nheads(self) -> int:
        return self.d_inner // self.headdim
