"""RWKV-7's files as RWKV-LM (BlinkDL on GitHub) reads and writes them: as flash-linear-attention's
RWKV7ForCausalLM, and back.

A `Stack` cannot be this model: RWKV-7's later layers mix in values of the first one, and a stack's layer
reads its own input and state alone. fla's class has the same computation; `adjoint.wrap` runs it by chunks.
Names and shapes are those of RWKV-LM's `RWKV-v7/train_temp/src/model.py` and `RWKV-v7/rwkv_v7_demo.py`.

Letters of shapes: V tokens of the vocabulary, C channels in H heads of N, F channels of the channel mix; D,
A, M and G, the ranks of the maps that give decays, learning rates, value mixes and gates.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adjoint.errors import UserError
from adjoint.files import atomic_file
from adjoint.formats.names import Values, Weights
from adjoint.formats.tensor_files import read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KIND, SUFFIX, SUMMARY = "an RWKV-7 file", ".pth", "RWKV-7 in RWKV-LM's names"
LIBRARY = "flash-linear-attention (import fla.models first)"
WHY_NOT_SHARDED: str | None = "shards do not compute RWKV-7's penalty of the largest logit"
_RANKS = {"w": "D", "a": "A", "v": "M", "g": "G"}


def _low_rank_maps() -> dict[str, tuple[str, str]]:
    maps = {}
    for letter, rank in _RANKS.items():
        maps[f"att.{letter}1"] = (f"attn.{letter}_lora.lora.0.weight", f"C{rank}")
        maps[f"att.{letter}2"] = (f"attn.{letter}_lora.lora.2.weight", f"{rank}C")
        if letter != "g":  # gates have no bias
            maps[f"att.{letter}0"] = (f"attn.{letter}_lora.lora.2.bias", "11C")
    return maps


# Tensors of RWKV-LM, in the order in which it saves them: fla's name, and the shape in RWKV-LM's files.
_BLOCK: dict[str, tuple[str, str]] = {
    **{f"ln1.{name}": (f"attn_norm.{name}", "C") for name in ("weight", "bias")},
    **{f"ln2.{name}": (f"ffn_norm.{name}", "C") for name in ("weight", "bias")},
    **{f"ln0.{name}": (f"pre_norm.{name}", "C") for name in ("weight", "bias")},
    **{f"att.x_{letter}": (f"attn.x_{letter}", "11C") for letter in "rwkvag"},
    **_low_rank_maps(),
    **{f"att.k_{letter}": (f"attn.k_{letter}", "11C") for letter in "ka"},
    "att.r_k": ("attn.r_k", "HN"),
    **{
        f"att.{name}.weight": (f"attn.{name[0]}_proj.weight", "CC")
        for name in ("receptance", "key", "value", "output")
    },
    **{f"att.ln_x.{name}": (f"attn.g_norm.{name}", "C") for name in ("weight", "bias")},
    "ffn.x_k": ("ffn.x_k", "11C"),
    "ffn.key.weight": ("ffn.key.weight", "FC"),
    "ffn.value.weight": ("ffn.value.weight", "CF"),
}
_FIRST_BLOCK_ALONE = ("ln0.weight", "ln0.bias")
_LATER_BLOCKS_ALONE = ("att.v0", "att.v1", "att.v2")  # there are no earlier values to mix into the first's
# What RWKV-LM's trainer puts before names under DeepSpeed, and takes off as it loads; and what DDP does.
_PREFIXES = ("_forward_module.", "module.")
# Parts of names that files of other models of RWKV-LM have.
_OTHER_MODELS = {
    ".att.time_state": "a state that begins a sequence, without a model",
    ".lora_": "an adapter, without its base model",
    ".att.time_maa_": "RWKV-6",
    ".att.time_mix_": "RWKV-4 or RWKV-5",
    ".qkv.": "RWKV-7b (with attention)",
    ".ffn.s_emb": "RWKV-7a (with embeddings in its channel mixes)",
}
GROUP_NORM_EPS, LAYER_NORM_EPS = 64e-5, 1e-5
_HEAD_DIM = 64  # of all published models; fla's group norm has the eps above with heads of this size alone
_RECORD = "rwkv_file"  # the attribute of a model that `load` returns


@dataclasses.dataclass
class _File:
    """Order of a file's tensors, and those that no computation reads: neither is in the model itself."""

    names: list[str]
    unused: Weights
    dtype: torch.dtype  # of emb.weight


def load(source: str | Path | Mapping[str, Tensor], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model of an RWKV-7 file (`.pth`) as a `RWKV7ForCausalLM` of flash-linear-attention.

        model = adjoint.wrap(adjoint.formats.rwkv7.load("rwkv7-g1.pth", torch.float32), adjoint.Exact())

    Its sizes are read from the tensors' shapes. As RWKV-LM's trainer and fla by default, it penalises each
    token's largest logit; set `model.config.use_l2warp = False` to train without. Token 0 ends a text, as in
    both published vocabularies.

    Args:
        source: the file, or its tensors by name.
        dtype: of the parameters; None for the file's, which is bfloat16 for published models.

    Raises:
        UserError: it is no such file, fla is not installed, or a tensor is missing, superfluous or of another
            shape.
    """
    called = "the tensors" if isinstance(source, Mapping) else str(source)
    tensors = source if isinstance(source, Mapping) else _read(Path(source))
    try:
        values, weights, file = read_weights(tensors)
    except ValueError as error:
        raise UserError(f"{called}: {error}") from None
    del tensors
    config = _fla_config(values)
    from fla.models import RWKV7ForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        # The layers advise comparing them with RWKV-LM, which the tests of this module do.
        warnings.filterwarnings("ignore", message="According to Bo")
        model = RWKV7ForCausalLM(config)
    for name in list(weights):  # copied one by one: tensors of a file may share memory
        weights[name] = weights[name].to(dtype or weights[name].dtype, copy=True)
    model.load_state_dict(weights, assign=True)
    for layer in model.model.layers:
        layer.attn.g_norm.eps = GROUP_NORM_EPS
    if reason := why_no_folder(config):
        warnings.warn(f"{called}: {reason}; do not write it with save_pretrained", stacklevel=2)
    file.unused = {name: t.clone() for name, t in file.unused.items()}
    setattr(model, _RECORD, file)
    return model.eval()


def save(model: PreTrainedModel, file: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write fla's `RWKV7ForCausalLM` to a file that RWKV-LM loads, in one piece.

    A model from `load` is written with the names, order and unused tensors of its file: bit for bit as it
    was, if it was not trained. Others are written as published files are, without the first block's `att.v0`,
    `att.v1` and `att.v2`, which nothing reads; RWKV-LM's trainer makes them with `--load_partial 1`.

    Args:
        model: wrapped or not.
        dtype: of the tensors; None for the model's.

    Raises:
        UserError: the model has parts or settings that RWKV-LM has not.
    """
    try:
        tensors = convert(model)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    tensors = {name: _compact(t.to(dtype or t.dtype)) for name, t in tensors.items()}
    with atomic_file(file) as unfinished:
        torch.save(tensors, unfinished)


def holds(place: Path) -> bool:
    """Whether a place is a file with the ending of RWKV-LM's."""
    return place.suffix == SUFFIX and place.is_file()


def why_no_folder(config: PreTrainedConfig) -> str | None:
    """Return why a folder of transformers cannot be this model; None if it can."""
    if config.head_dim == _HEAD_DIM:
        return None
    return (
        f"with heads of {config.head_dim} channels fla's config.json cannot say that the group norm's eps is "
        f"{GROUP_NORM_EPS:g}, as a .pth file's is"
    )


def configuration(file: str | Path) -> PreTrainedConfig:
    """Return fla's configuration of a file's model, without reading the values of its tensors.

    Raises:
        UserError: as of `load`.
    """
    return _fla_config(sizes_of_file(file))


def sizes_of_file(file: str | Path) -> Values:
    """Return the sizes of a file's model by the keys of fla's configuration, from its tensors' shapes.

    Raises:
        UserError: as of `load`.
    """
    tensors = _read(Path(file), "meta")
    try:
        return read_weights(tensors)[0]
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


def stored_dtypes(file: str | Path) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and size of the tensors in a file, by the names in fla's model.

    Raises:
        UserError: as of `load`.
    """
    tensors = _read(Path(file), "meta")
    try:
        weights = read_weights(tensors)[1]
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    return {name: (t.dtype, t.numel()) for name, t in weights.items()}


def _fla_config(values: Values) -> PreTrainedConfig:
    """Return fla's RWKV7Config with these sizes.

    Raises:
        UserError: fla is not installed.
    """
    try:
        from fla.models import RWKV7Config
    except ImportError as error:
        raise UserError(
            f"RWKV-7's files are models of flash-linear-attention, which is not there ({error}); "
            "pip install flash-linear-attention"
        ) from None
    # fla's fused norms make unit vectors of keys with an eps of 1e-6 in the root, RWKV-LM with none.
    config = RWKV7Config(**values, fuse_norm=False, norm_eps=LAYER_NORM_EPS, bos_token_id=0, eos_token_id=0)
    config.architectures = ["RWKV7ForCausalLM"]
    return config


def read_weights(tensors: Mapping[str, Tensor]) -> tuple[Values, Weights, _File]:
    """Return sizes by the keys of fla's configuration, weights by fla's names, and what fla's model lacks.

    Raises:
        ValueError: a tensor is missing, superfluous, of another shape or no floating-point one; or these are
            of another model.
    """
    tensors = _without_prefix(tensors)
    blocks = [int(block[1]) for name in tensors if (block := re.match(r"blocks\.(\d+)\.", name))]
    n_layer = max(blocks, default=-1) + 1
    expected = _names(n_layer)
    unused = {name: t for name, t in tensors.items() if name in _unused_names(n_layer)}
    read = {name: t for name, t in tensors.items() if name not in unused}
    _check_names(read, expected)
    if n_layer == 1:
        raise ValueError("has one block; fla's RWKV7ForCausalLM, like RWKV-LM's trainer, needs two or more")
    sizes = _check_shapes(read, expected)
    values = {
        "vocab_size": sizes["V"],
        "hidden_size": sizes["C"],
        "num_hidden_layers": n_layer,
        "head_dim": sizes["N"],
        "intermediate_size": sizes["F"],
        "hidden_ratio": sizes["F"] / sizes["C"],
        "decay_low_rank_dim": sizes["D"],
        "a_low_rank_dim": sizes["A"],
        "v_low_rank_dim": sizes["M"],
        "gate_low_rank_dim": sizes["G"],
        "dtype": str(tensors["emb.weight"].dtype).removeprefix("torch."),
    }
    weights = {expected[name][0]: _as_fla_has_it(expected[name][0], t) for name, t in read.items()}
    return values, weights, _File(list(tensors), unused, tensors["emb.weight"].dtype)


def convert(model: PreTrainedModel) -> Weights:
    """Return a model's tensors under RWKV-LM's names, in its shapes, on the CPU.

    Raises:
        ValueError: the model has parts or settings that RWKV-LM has not.
    """
    if getattr(getattr(model, "config", None), "model_type", None) != "rwkv7":
        raise ValueError(f"is for RWKV7ForCausalLM of flash-linear-attention, not {type(model).__name__}")
    if model.config.hidden_act != "sqrelu":
        raise ValueError(f"hidden_act is {model.config.hidden_act!r}; RWKV-LM's is 'sqrelu'")
    _check_norms(model)
    state, expected = dict(model.state_dict()), _names(model.config.num_hidden_layers)
    weights: Weights = {}
    for name, (fla_name, shape) in expected.items():
        if fla_name in state:
            weights[name] = _as_file_has_it(fla_name, state.pop(fla_name), shape)
    if state:
        raise ValueError(
            f"RWKV-LM has no tensor for {next(iter(state))}; merge adapters first (merge_and_unload)"
        )
    _check_names(weights, expected)
    _check_shapes(weights, expected)
    file: _File | None = getattr(model, _RECORD, None)
    if file is None:
        return weights
    dtype = weights["emb.weight"].dtype  # a model that was cast takes its unused tensors along
    unused = {name: t if dtype == file.dtype else t.to(dtype) for name, t in file.unused.items()}
    return {name: unused[name] if name in unused else weights[name] for name in file.names}


def _names(n_layer: int) -> dict[str, tuple[str, str]]:
    """Map RWKV-LM's names of a model's tensors, in its order, to fla's and to RWKV-LM's shapes."""
    names = {"emb.weight": ("model.embeddings.weight", "VC")}
    for i in range(n_layer):
        left_out = _FIRST_BLOCK_ALONE if i else _LATER_BLOCKS_ALONE
        for name, (fla_name, shape) in _BLOCK.items():
            if name not in left_out:
                names[f"blocks.{i}.{name}"] = (f"model.layers.{i}.{fla_name}", shape)
    names |= {f"ln_out.{name}": (f"model.norm.{name}", "C") for name in ("weight", "bias")}
    return names | {"head.weight": ("lm_head.weight", "VC")}


def _unused_names(n_layer: int) -> set[str]:
    """Return names of tensors that RWKV-LM's modules may have and never read."""
    later = (f"blocks.{i}.{name}" for i in range(1, n_layer) for name in _FIRST_BLOCK_ALONE)
    return {*(f"blocks.0.{name}" for name in _LATER_BLOCKS_ALONE), *later}


def _without_prefix(tensors: Mapping[str, Tensor]) -> Weights:
    for prefix in _PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
    return dict(tensors)


def _check_names(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> None:
    """Raise a ValueError unless the tensors are those of RWKV-7."""
    for fragment, model in _OTHER_MODELS.items():
        if name := next((name for name in tensors if fragment in f".{name}"), None):
            raise ValueError(f"is {model}: it has {name}; name a file of RWKV-7 (x070)")
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(
            f"has no {missing[0]} ({len(missing)} tensors of RWKV-7 are missing); name a file that RWKV-LM "
            "wrote"
        )
    if others := [name for name in tensors if name not in set(expected)]:
        raise ValueError(
            f"{others[0]} is no tensor of RWKV-7 ({len(others)} are not); name a file that RWKV-LM wrote"
        )


def _check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """Return the size that each letter of the shapes stands for.

    Raises:
        ValueError: a tensor's shape does not agree with those before it; or it is no floating-point tensor.
    """
    sizes = {"1": 1}
    for name, (_, letters) in expected.items():
        tensor = tensors[name]
        shape = tuple(tensor.shape)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; name a file of weights that are not quantized")
        if len(shape) == len(letters):
            for letter, size in zip(letters, shape, strict=True):
                sizes.setdefault(letter, size)
        agreed = tuple(sizes.get(letter, letter) for letter in letters)
        if shape != agreed:
            said = ", ".join(map(str, agreed))
            raise ValueError(f"{name} has shape {shape}, and the tensors before it ask for ({said})")
    if sizes["H"] * sizes["N"] != sizes["C"]:
        raise ValueError(
            f"att.r_k has {sizes['H']} heads of {sizes['N']} channels, emb.weight {sizes['C']} channels"
        )
    return sizes


def _check_norms(model: PreTrainedModel) -> None:
    """Raise a ValueError if a norm of fla's model has an eps that RWKV-LM's has not."""
    for name, module in model.named_modules():
        if not hasattr(module, "eps"):
            continue
        eps = GROUP_NORM_EPS if name.endswith(".g_norm") else LAYER_NORM_EPS
        if not math.isclose(module.eps, eps):
            raise ValueError(
                f"{name} has eps {module.eps:g}; RWKV-LM's code has {eps:g}, and no setting for it"
            )


def _is_transposed(fla_name: str) -> bool:
    """Whether fla multiplies with the transposed matrix of RWKV-LM's."""
    return re.search(r"_lora\.lora\.\d\.weight$", fla_name) is not None


def _as_fla_has_it(fla_name: str, tensor: Tensor) -> Tensor:
    if _is_transposed(fla_name):
        return tensor.t().contiguous()
    is_vector = tensor.shape[:-1] == (1, 1) and ".attn.x_" not in fla_name
    return tensor.flatten() if is_vector else tensor


def _as_file_has_it(fla_name: str, tensor: Tensor, shape: str) -> Tensor:
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"{fla_name} is spread over ranks; gather the weights in one process first")
    tensor = tensor.detach().cpu()
    if _is_transposed(fla_name):
        return tensor.t().contiguous()
    return tensor.reshape(1, 1, -1) if shape == "11C" else tensor


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor in memory of its own: torch.save writes all memory that a tensor is a part of."""
    is_compact = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_compact else tensor.clone(memory_format=torch.contiguous_format)


def _read(file: Path, device: str = "cpu") -> Weights:
    """Return the tensors of a file by name, on a device.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file; download one, such as of BlinkDL/rwkv7-g1 on Hugging Face")
    if file.suffix == ".safetensors":
        raise UserError(f"{file}: is a safetensors file, which RWKV-LM does not write; name the .pth file")
    tensors = read_tensors(file, device)
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file}: holds more than tensors by name; name a file of weights that RWKV-LM wrote")
    return dict(tensors)
