"""Dtypes of tensors in a model's folder or file, which an export of the trained model keeps."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adjoint.formats import file_format_of
from adjoint.hf.model_parts import original_class
from adjoint.hf.transformers_api import empty_model, loaded_names
from adjoint.train.unloaded import tensor_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# safetensors' names
FLOATING = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HALF = (torch.bfloat16, torch.float16)


def cast_as_stored(
    model: PreTrainedModel, place: Path, configured: torch.dtype | None, dtype: torch.dtype | None = None
) -> None:
    """Cast a model in float32 or float64, in place, to the dtypes that its tensors have where it is from.

    A tensor that transformers itself loads in float32, such as a router's bias, stays float32. One that it
    makes of several, such as all experts' matrices, has the widest of their dtypes. A tensor without a
    counterpart gets the dtype that most of the place's weights have.

    Args:
        place: a folder of transformers, or a file of one of `FILE_FORMATS`.
        configured: the dtype that the folder's config.json names, for weights that are quantized.
        dtype: in place of the dtype that most of the weights have; where both are of 16 bits, tensors that
            are float32 in the place stay so. None keeps all dtypes.
    """
    file_format, stored = file_format_of(place), _stored_at(place)
    usual = _usual_dtype(stored.values()) or configured or torch.float32
    default = dtype or usual
    sources: dict[str, set[torch.dtype | None]] = collections.defaultdict(set)
    loaded = loaded_names(model, stored) if file_format is None else {name: name for name in stored}
    for stored_name, name in loaded.items():
        sources[name].add(stored[stored_name][0])
    halves = [default, *(kind for kind, _ in stored.values())]  # few of a folder's weights may be in 16 bits
    in_float32 = float32_names(model, next((kind for kind in halves if kind in HALF), default))
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if t.is_floating_point()}
    targets: dict[int, torch.dtype] = {}
    for name, tensor in tensors.items():
        is_wider = torch.float32 in sources[name] and usual in HALF and default in HALF
        if name in in_float32 or (dtype is not None and is_wider):
            targets[id(tensor)] = torch.float32
        elif dtype is None and (widest := _widest(sources[name])) is not None:
            targets.setdefault(id(tensor), widest)
    stored_ids = {id(tensor) for name, tensor in tensors.items() if sources[name]}
    for tensor, other in _embeddings(model):
        if id(tensor) not in stored_ids:  # a head that was tied in the folder
            targets.setdefault(id(tensor), targets.get(id(other), default))
    for tensor in tensors.values():
        tensor.data = tensor.data.to(targets.get(id(tensor), default))


def read_dtype(place: Path) -> torch.dtype:
    """Return the dtype that holds the values of all tensors of a place: float64 if one has it, else float32.

    Args:
        place: as of `cast_as_stored`.
    """
    is_double = any(dtype == torch.float64 for dtype, _ in _stored_at(place).values())
    return torch.float64 if is_double else torch.float32


def _stored_at(place: Path) -> Mapping[str, tuple[torch.dtype | None, int]]:
    """Map the names of a place's tensors to dtype and size; the dtype is None where they are quantized."""
    file_format = file_format_of(place)
    return _stored_in_folder(place) if file_format is None else file_format.stored_dtypes(place)


def _widest(dtypes: set[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype that holds all values of some; None if one is quantized, or there is none."""
    floating = [dtype for dtype in dtypes if dtype is not None]
    if not dtypes or len(floating) < len(dtypes):
        return None
    return functools.reduce(torch.promote_types, floating)


def _embeddings(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """Return the weights of the head and of the embeddings, each as (one, the other)."""
    modules = model.get_output_embeddings(), model.get_input_embeddings()
    head, table = (getattr(module, "weight", None) for module in modules)
    return [] if head is None or table is None else [(head, table), (table, head)]


def _stored_in_folder(folder: Path) -> dict[str, tuple[torch.dtype | None, int]]:
    """Return `_stored_at` of a folder of transformers."""
    from safetensors import safe_open

    files = tensor_files(folder)
    stored: dict[str, tuple[torch.dtype | None, int]] = {}
    for file in set(files.values()):
        if file.suffix == ".bin":
            for name, tensor in torch.load(file, "meta", weights_only=True).items():
                stored[name] = (tensor.dtype if tensor.dtype in FLOATING.values() else None, tensor.numel())
            continue
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                entry = opened.get_slice(name)
                stored[name] = (FLOATING.get(entry.get_dtype()), torch.Size(entry.get_shape()).numel())
    return stored


def _usual_dtype(stored: Iterable[tuple[torch.dtype | None, int]]) -> torch.dtype | None:
    """Return the dtype that most of a folder's weights have; None where most are quantized."""
    counts: dict[torch.dtype | None, int] = collections.Counter()
    for dtype, size in stored:
        counts[dtype] += size
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return the names of tensors that transformers has in float32 in a model that it loads in `dtype`."""
    if dtype not in HALF:
        return set()
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in plan]
    empty = empty_model(original_class(model), model.config, dtype)
    created = {} if empty is None else empty.state_dict()
    return {
        name
        for name in model.state_dict()
        if any(pattern.search(name) for pattern in patterns)
        or (name in created and created[name].dtype == torch.float32)
    }
