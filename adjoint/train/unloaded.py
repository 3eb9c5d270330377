"""Tensors of a Hugging Face folder that a model's class does not load: a vision tower, layers that predict
several tokens ahead. An export copies them, so that a fine-tuned folder has all that its source has."""

from __future__ import annotations

import collections
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOADED_FILE, UNLOADED_FILE = "model-loaded.safetensors", "model-not-loaded.safetensors"
INDEX = "model.safetensors.index.json"
# Files beside weights and tokenizer that a folder of several modalities needs.
PROCESSOR_FILES = ("*processor_config.json", "chat_template.*")


def copy_unloaded(source: Path, folder: Path, model: PreTrainedModel) -> list[str]:
    """Copy the tensors of a source folder that are no part of a model to the folder it was saved to.

    If the folder then has every tensor of the source, and no other, it also gets the source's config.json and
    the files of its processor: the source's own class loads it.

    Args:
        source: the folder that the model was loaded from.
        folder: written by the model's `save_pretrained`, with the source's names.

    Returns:
        the tensors' names.
    """
    stored, saved = tensor_files(source), tensor_files(folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    names = _unloaded([name for name in stored if name not in saved], model, config)
    if not names:
        return []
    saved_shapes = _shapes(saved, saved)
    _write_beside(folder, saved, read_tensors(stored, names))
    if stored.keys() == saved.keys() | set(names) and _shapes(stored, saved) == saved_shapes:
        dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
        config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in PROCESSOR_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
    return names


def _unloaded(names: Sequence[str], model: PreTrainedModel, config: Mapping[str, object]) -> list[str]:
    """Return those of the tensors that a model does not save which it did not load either.

    Tensors tied to others and scales of quantized weights are loaded, though not saved."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    addresses = collections.Counter(t.data_ptr() for t in model.state_dict().values())
    tied = tuple(f".{name}" for name, t in model.state_dict().items() if addresses[t.data_ptr()] > 1)
    is_quantized = "quantization_config" in config
    return [
        name
        for name in names
        if any(re.search(pattern, name) for pattern in patterns)
        or not (is_quantized or f".{name}".endswith(tied))
    ]


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map the names of a folder's tensors to their files: safetensors, or PyTorch's where there are none."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        for file in sorted(folder.glob("pytorch_model*.bin")):
            files |= dict.fromkeys(torch.load(file, "meta", weights_only=True), file)
    return files


def read_tensors(files: Mapping[str, Path], names: Sequence[str]) -> dict[str, Tensor]:
    """Return some tensors of `tensor_files`."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(files[name] for name in names):
        names_in_file = [name for name in names if files[name] == file]
        if file.suffix == ".bin":
            content = torch.load(file, "cpu", weights_only=True, mmap=True)
            tensors |= {name: content[name].contiguous() for name in names_in_file}
            continue
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names_in_file}
    return {name: tensors[name] for name in names}


def _shapes(files: Mapping[str, Path], names: Mapping[str, object]) -> dict[str, list[int]]:
    """Return the shapes of named tensors; of PyTorch's files, their tensors are read on no device."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in set(files.values()):
        if file.suffix == ".bin":
            content = torch.load(file, "meta", weights_only=True)
            shapes |= {name: list(t.shape) for name, t in content.items() if name in names}
            continue
        with safe_open(file, "pt") as opened:
            stored = names.keys() & set(opened.keys())
            shapes |= {name: opened.get_slice(name).get_shape() for name in stored}
    return shapes


def _write_beside(folder: Path, saved: Mapping[str, Path], tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file of their own, and an index of all."""
    from safetensors.torch import save_file

    save_file(tensors, folder / UNLOADED_FILE, {"format": "pt"})
    index_file, size = folder / INDEX, sum(t.nbytes for t in tensors.values())
    if index_file.is_file():
        index = json.loads(index_file.read_text(encoding="utf-8"))
    else:
        (only_file,) = set(saved.values())
        bytes_saved = only_file.stat().st_size
        only_file.rename(folder / LOADED_FILE)
        index = {"metadata": {"total_size": bytes_saved}, "weight_map": dict.fromkeys(saved, LOADED_FILE)}
    index["metadata"]["total_size"] += size
    index["weight_map"] |= dict.fromkeys(tensors, UNLOADED_FILE)
    index_file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
