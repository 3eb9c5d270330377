"""StripedHyena 2 as vortex (PyPI `vtx`) reads it, in whose form Evo 2 is published: its settings, and its
file of weights, as a stack's. Also savanna's tensors of one whole model, from which vortex's files are made.

vortex's filters are hyena_se's, hyena_mr's and hyena_li's, in other forms:

- Rows of projections and of the short filter go q, k, v, q, k, v, … from channel to channel (`interleave`).
- A short filter (below 128 taps) has the oldest input's tap first, a longer one the newest's, and it has a
  gain D.
- Longer filters are stored with their decays multiplied in (`hyena_mr_decay` is null then), and the
  logarithms of poles as they are.
- Norms add eps to the root of the mean square, a `Stack` inside of it: outputs differ by eps / root, 1e-6 for
  published models.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from adjoint.errors import UserError
from adjoint.formats.names import EMBEDDING, HEAD, Values, Weights, with_tied_table
from adjoint.formats.tensor_files import read_tensors
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import StackConfig
from adjoint.settings import NotNegative, Positive, PositiveNumber, read_value

LONG = 128  # taps from which on vortex convolves by FFT, with a gain
_KINDS = {
    "attn_layer_idxs": "attention",
    "hcl_layer_idxs": "hyena_li",
    "hcm_layer_idxs": "hyena_mr",
    "hcs_layer_idxs": "hyena_se",
}
# savanna's names of a block's tensors, and vortex's; of filters' tensors those that vortex has as they are.
_SAVANNA = {
    "input_layernorm.weight": "pre_norm.scale",
    "pre_mlp_layernorm.weight": "post_norm.scale",
    "post_attention_layernorm.weight": "post_norm.scale",
    **{f"mlp.w{i}.weight": f"mlp.l{i}.weight" for i in (1, 2, 3)},
    "mixer.hyena_proj_conv.short_conv_bias": "filter.short_filter_bias",
    "mixer.mixer.short_conv.short_conv_weight": "filter.h",
    "mixer.mixer.filter.R": "filter.residues",
    "mixer.mixer.conv_bias": "filter.D",
}
_SAVANNA_PROJECTIONS = {  # the same names in attention and hyena layers
    "mixer.dense_projection.weight": ("inner_mha_cls.Wqkv.weight", "projections.weight"),
    "mixer.dense.weight": ("inner_mha_cls.out_proj.weight", "out_filter_dense.weight"),
    "mixer.dense.bias": ("inner_mha_cls.out_proj.bias", "out_filter_dense.bias"),
}
# Settings with one value in a stack, and the value that vortex takes where they are left out.
_FIXED: dict[str, tuple[object, object]] = {
    "column_split_hyena": (False, True),
    "final_norm": (True, True),
    "hyena_filter_groups": (1, 1),
    "mlp_activation": ("gelu", "gelu"),
    "proj_groups": (1, 1),
    "qkv_proj_bias": (False, True),
    "smeared_gqa": (False, False),
}
# What kind of value each setting has, where it is given.
_HINTS: dict[str, object] = {
    **dict.fromkeys(_KINDS, list[NotNegative]),
    **dict.fromkeys(("eps", "rotary_emb_base", "rotary_emb_scaling_factor"), PositiveNumber),
    **dict.fromkeys(
        (
            *("hcm_filter_groups", "hcm_filter_length", "hcs_filter_groups", "hcs_filter_length"),
            *("hidden_size", "inner_mlp_size", "inner_size_multiple_of", "model_parallel_size"),
            *("num_attention_heads", "num_filters", "num_layers"),
            *("short_filter_length", "state_size", "vocab_size"),
        ),
        Positive,
    ),
    **dict.fromkeys(
        (
            *("column_split", "evo2_style_activations", "hyena_flip_x1x2", "hyena_out_proj_bias"),
            *("interleave", "mha_out_proj_bias", "short_filter_bias", "tie_embeddings"),
            "use_interpolated_rotary_pos_emb",
        ),
        bool,
    ),
}
_MLP = {"l1": "in_proj", "l2": "in_proj", "l3": "out_proj"}


def read(file: Path, settings: Path | Values) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights of a model in a file of vortex, in the dtypes it is stored in.

    Args:
        settings: the model's, a file in YAML or their values.

    Raises:
        UserError: a file cannot be read, or the model has parts that a stack lacks.
    """
    values = settings if isinstance(settings, dict) else read_settings(settings)
    with _naming(file):
        values = _typed(values)
        config = read_config(values)
    tensors = _read_tensors(file)
    with _naming(file):
        return read_weights(values, config, from_savanna(values, config, tensors))


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise errors about settings and tensors as a UserError of one line that begins with the file's name."""
    try:
        yield
    except (ValueError, KeyError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{file}: {missing}") from None
    except (RuntimeError, IndexError) as error:  # torch's, of a tensor without the shape that it should have
        raise UserError(f"{file}: {' '.join(str(error).split())[:200]}") from None


def _typed(settings: Values) -> Values:
    """Return the settings, those that are read converted to the kinds of value that they have.

    Raises:
        ValueError: one is of another kind.
    """
    typed = dict(settings)
    for name in typed.keys() & _HINTS.keys():
        try:
            typed[name] = read_value(typed[name], _HINTS[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return typed


def _read_tensors(file: Path) -> Weights:
    """Return the tensors of a file by name.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; download one, such as of arcinstitute/evo2_7b on Hugging Face"
        )
    with torch.serialization.safe_globals([io.BytesIO]):  # which Transformer Engine stores beside weights
        values: object = read_tensors(file)
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UserError(f"{file}: holds no tensors by name; name a file of weights that vortex reads")
    return {name: tensor for name, tensor in values.items() if isinstance(tensor, Tensor)}


def read_settings(file: Path) -> Values:
    """Return the settings of a file in YAML.

    Raises:
        UserError: it cannot be read.
    """
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: has no settings")
    return values


def read_config(settings: Values) -> StackConfig:
    """Return the configuration of a stack with vortex's settings.

    Raises:
        ValueError: the model has parts that a stack lacks.
        KeyError: a setting is missing.
    """
    for name, (value, default) in _FIXED.items():
        if (setting := settings.get(name, default)) != value:
            raise ValueError(f"{name} is {setting!r}, a Stack has only {value!r}")
    d_model, n_layer = settings["hidden_size"], settings["num_layers"]
    kinds = {k: kind for name, kind in _KINDS.items() for k in settings[name]}
    if sorted(k for name in _KINDS for k in settings[name]) != list(range(n_layer)):
        raise ValueError(f"{', '.join(_KINDS)} do not name each of the {n_layer} layers once")
    if settings["num_filters"] != d_model:
        raise ValueError(f"num_filters is {settings['num_filters']}, a Stack has only hidden_size, {d_model}")
    if settings["hcs_filter_length"] >= LONG or settings["hcm_filter_length"] < LONG:
        raise ValueError(
            f"hcs_filter_length must be below {LONG} and hcm_filter_length at least {LONG}, from which on "
            f"vortex adds a gain; got {settings['hcs_filter_length']} and {settings['hcm_filter_length']}"
        )
    pairs = ("hcs_filter_groups", "hcm_filter_groups"), ("mha_out_proj_bias", "hyena_out_proj_bias")
    for first, second in pairs:
        if settings[first] != settings[second]:
            raise ValueError(
                f"{first} is {settings[first]} and {second} {settings[second]}: a Stack has one for both"
            )
    others = "identity" if settings.get("evo2_style_activations", False) else "gelu"
    interpolated = settings.get("use_interpolated_rotary_pos_emb", False)
    return StackConfig(
        vocab_size=settings["vocab_size"],
        d_model=d_model,
        n_layer=n_layer,
        mixer=[kinds[k] for k in range(n_layer)],
        d_state=settings["state_size"],
        d_conv=settings["short_filter_length"],
        conv_bias=bool(settings["short_filter_bias"]),
        d_intermediate=_mlp_width(settings),
        mlp_activation=["gelu"] + [others] * (n_layer - 1),
        tie_embeddings=bool(settings["tie_embeddings"]),
        norm_eps=settings["eps"] ** 2,
        out_proj_bias=bool(settings["hyena_out_proj_bias"]),
        num_attention_heads=settings["num_attention_heads"],
        rope_theta=float(settings.get("rotary_emb_base", 1000000)),
        rope_scaling_factor=float(settings.get("rotary_emb_scaling_factor", 1.0)) if interpolated else 1.0,
        hyena_se_len=settings["hcs_filter_length"],
        hyena_mr_len=settings["hcm_filter_length"],
        hyena_groups=settings["hcs_filter_groups"],
        hyena_mr_decay=None,
    )


def _mlp_width(settings: Values) -> int:
    """Return the width of the MLPs: 8/3 of the model's, rounded up, unless the settings have it."""
    multiple = settings.get("inner_size_multiple_of", 64) * settings.get("model_parallel_size", 1)
    width = int(2 * settings["hidden_size"] * 4 / 3)
    return int(settings.get("inner_mlp_size", -(-width // multiple) * multiple))


def read_weights(settings: Values, config: StackConfig, weights: Weights) -> tuple[StackConfig, Weights]:
    """Return the configuration and the weights under a stack's names.

    Raises:
        ValueError: a pole is above 1, or a tensor does not fit.
        KeyError: a tensor is missing.
    """
    tables = {"embedding_layer.weight": EMBEDDING, "unembed.weight": HEAD, "norm.scale": "norm_f.weight"}
    renamed = {ours: weights[theirs] for theirs, ours in tables.items() if theirs in weights}
    for k, kind in enumerate(config.mixers):
        theirs, ours = f"blocks.{k}.", f"layers.{k}."
        layer = {n.removeprefix(theirs): tensor for n, tensor in weights.items() if n.startswith(theirs)}
        try:
            block = _block(settings, kind, layer)
        except KeyError as error:
            raise KeyError(f"{theirs}{error.args[0]}") from None
        except (RuntimeError, IndexError, ValueError) as error:
            raise ValueError(f"block {k}: {' '.join(str(error).split())[:200]}") from None
        renamed |= {f"{ours}{name}": tensor for name, tensor in block.items()}
    for name, tensor in renamed.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of {tensor.dtype}: weights are numbers of floating point")
    return with_tied_table(renamed, config)


def _block(settings: Values, kind: str, layer: Weights) -> Weights:
    """Return a block's weights under the names that a stack's block has."""
    mixer = _attention(settings, layer) if kind == "attention" else _hyena(settings, kind, layer)
    mlp = {name: layer[f"mlp.{name}.weight"] for name in _MLP}
    return {
        "norm.weight": layer["pre_norm.scale"],
        "norm2.weight": layer["post_norm.scale"],
        "mlp.in_proj.weight": torch.cat([mlp["l1"], mlp["l2"]]),
        "mlp.out_proj.weight": mlp["l3"],
        **{f"mixer.{name}": tensor for name, tensor in mixer.items()},
    }


def from_savanna(settings: Values, config: StackConfig, weights: Weights) -> Weights:
    """Return the tensors under vortex's names, if they are savanna's; else as they are.

    savanna numbers blocks among other modules, with the embedding first and the last norm last. Its modal
    filters have poles e^(-e^(p + gamma)), and decays of longer filters are tensors of their own.

    Raises:
        ValueError: blocks are missing, or a tensor does not fit.
        KeyError: a tensor is missing.
    """
    named = {name.removeprefix("module.").removeprefix("sequential."): t for name, t in weights.items()}
    numbers = sorted({int(n.partition(".")[0]) for n in named if n[:1].isdigit() and ".mixer." in n})
    if not numbers:
        return weights
    if len(numbers) != config.n_layer:
        raise ValueError(f"has {len(numbers)} blocks, and num_layers is {config.n_layer}")
    renamed: Weights = {}
    for name, tensor in named.items():
        number, _, rest = name.partition(".")
        if rest == "word_embeddings.weight":
            renamed["embedding_layer.weight"] = tensor
        elif rest in ("norm.weight", "norm.scale"):
            renamed["norm.scale"] = tensor
        elif number.isdigit() and int(number) in numbers:
            k = numbers.index(int(number))
            is_hyena = config.mixers[k] != "attention"
            theirs = _SAVANNA_PROJECTIONS[rest][is_hyena] if rest in _SAVANNA_PROJECTIONS else None
            if (theirs := theirs or _SAVANNA.get(rest)) is not None:
                renamed[f"blocks.{k}.{theirs}"] = tensor
    for place, (k, kind) in zip(numbers, enumerate(config.mixers), strict=True):
        ours, prefix = f"blocks.{k}.filter.", f"{place}.mixer.mixer.filter."
        if kind != "attention":
            short = named[f"{place}.mixer.hyena_proj_conv.short_conv_weight"]
            renamed[f"{ours}short_filter_weight"] = short.reshape(len(short), 1, -1)
        if kind == "hyena_mr":
            taps = settings["hcm_filter_length"]
            h, decay = (named[prefix + name][:, :taps] for name in ("h", "decay"))
            renamed[f"{ours}h"] = (h.to(accumulate_dtype(h.dtype)) * decay).unsqueeze(1)
        elif kind == "hyena_li":
            p, gamma = (named[prefix + name] for name in ("p", "gamma"))
            log_poles = -(p.to(accumulate_dtype(p.dtype)) + gamma).exp()
            renamed[f"{ours}log_poles"] = log_poles.reshape(config.d_model, -1, 1)
            residues = renamed[f"{ours}residues"]
            renamed[f"{ours}residues"] = residues.reshape(config.d_model, -1)
    return renamed


def _attention(settings: Values, layer: Weights) -> Weights:
    """Return an attention layer's weights; with column_split its rows go from head to head."""
    qkv = layer["inner_mha_cls.Wqkv.weight"]
    if settings.get("column_split", True):
        heads = settings["num_attention_heads"]
        qkv = qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    mixer = {"in_proj.weight": qkv, "out_proj.weight": layer["inner_mha_cls.out_proj.weight"]}
    if settings["mha_out_proj_bias"]:
        mixer["out_proj.bias"] = layer["inner_mha_cls.out_proj.bias"]
    return mixer


def _hyena(settings: Values, kind: str, layer: Weights) -> Weights:
    """Return a hyena layer's weights."""

    def by_kind(rows: Tensor) -> Tensor:
        """Return rows for q, k and v, (3 d_model, …), those of each together."""
        q, k, v = (rows[i::3] for i in range(3)) if settings.get("interleave") else rows.chunk(3)
        return torch.cat([k, q, v] if settings.get("hyena_flip_x1x2", False) else [q, k, v])

    mixer = {
        "in_proj.weight": by_kind(layer["projections.weight"]),
        "conv1d.weight": by_kind(layer["filter.short_filter_weight"]),
        "out_proj.weight": layer["out_filter_dense.weight"],
    }
    if settings["short_filter_bias"]:
        mixer["conv1d.bias"] = by_kind(layer["filter.short_filter_bias"])
    if settings["hyena_out_proj_bias"]:
        mixer["out_proj.bias"] = layer["out_filter_dense.bias"]
    if kind == "hyena_li":
        log_poles, residues = layer["filter.log_poles"].squeeze(-1), layer["filter.residues"]
        log_poles = log_poles.to(accumulate_dtype(log_poles.dtype))
        if bool((log_poles > 0).any()):
            raise ValueError("filter.log_poles has positive numbers: its filters grow along the sequence")
        smallest = torch.finfo(torch.float32).tiny
        mixer["A_log"] = log_poles.neg().clamp_min(smallest).log()
        mixer["residues"] = residues.to(accumulate_dtype(residues.dtype))
    elif kind == "hyena_mr":
        mixer["h"] = layer["filter.h"].squeeze(1)
    else:
        mixer["h"] = layer["filter.h"].squeeze(1).flip(-1)
    if kind != "hyena_se":
        mixer["D"] = layer["filter.D"]
    return mixer
