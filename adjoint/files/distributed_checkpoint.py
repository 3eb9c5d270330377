"""Folders that `torch.distributed.checkpoint` (DCP) writes, read tensor by tensor.

    .metadata       a pickle: each tensor's size and dtype, its pieces, and where in which file each piece is
    __0_0.distcp    pieces that a rank wrote, each as torch.save writes a tensor

Ranks write the pieces that they have. A reader puts a tensor together from them, whatever number of ranks
wrote it, and needs no process group. Only the classes below are read of the pickle: none of its code runs.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch

from adjoint.errors import UserError
from adjoint.files.remote import Place, RemoteError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

METADATA = ".metadata"
MODEL, OPTIMIZER, CARRIED = "model.", "optimizer.state.", "carried."  # what we write begins with
# Prefixes by which training loops keep an optimizer's state apart; the last one is torchtitan's.
_OPTIMIZERS = (OPTIMIZER, "optim.state.", "app.optimizer.state.", "app.optim.state.", "state.")
_OF_THE_LOOP = ("train_state.", "dataloader.", "lr_scheduler.")  # torchtitan's own state, of no model
# Beginnings of names below a training loop's own "model.", which transformers' names do not have.
_NESTED = ("model.model.", "model.lm_head.", "model.embedding.", "model.backbone.")
_DESCRIPTIONS = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)
_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _DESCRIPTIONS),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


def is_distributed_checkpoint(folder: Place) -> bool:
    """Whether a folder has been written by `torch.distributed.checkpoint`."""
    return (folder / METADATA).is_file()


class DistributedTensors:
    """The tensors of a folder of `torch.distributed.checkpoint`.

    Attributes:
        by_stem: each tensor's name in the folder, by the file of a checkpoint that would have it ("model",
            "optimizer" or "state") and its name there.

    Raises:
        UserError: the folder is damaged, or its metadata is of something else.
    """

    def __init__(self, folder: Place) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder, self.metadata = folder, _read_metadata(folder)
        stored = self.metadata.state_dict_metadata
        self.entries = {
            key: entry for key, entry in stored.items() if isinstance(entry, TensorStorageMetadata)
        }
        self.by_stem = _names_by_stem(list(self.entries))

    def verify(self) -> None:
        """Raise a UserError where a file is missing or cut short."""
        ends: dict[str, int] = {}
        for piece in self._pieces().values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in ends.items():
            file = self.folder / name
            if not file.is_file():
                raise UserError(f"{self.folder}: {name} is missing; copy all its files")
            if file.stat().st_size < end:
                raise UserError(
                    f"{self.folder}: {name} is cut short; copy it again from where it was written"
                )

    def get_tensor(self, key: str) -> torch.Tensor:
        """Return a tensor by its name in the folder, put together from its pieces."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        entry = self.entries[key]
        out = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            piece = self._pieces()[MetadataIndex(key, chunk.offsets)]
            if piece.transform_descriptors:
                raise UserError(f"{self.folder}: {key} is compressed; write the folder without extensions")
            with (self.folder / piece.relative_path).open("rb") as stream:
                stream.seek(piece.offset)
                data = io.BytesIO(stream.read(piece.length))
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            places = tuple(
                slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            out[places] = tensor
        return out

    def _pieces(self) -> Mapping[MetadataIndex, _StorageInfo]:
        """Return where each piece is, by its tensor and its first element."""
        return self.metadata.storage_data


class NamedTensor:
    """A tensor of a folder as an entry of `StoredTensors.files_by_name`."""

    def __init__(self, tensors: DistributedTensors, key: str) -> None:
        self.tensors, self.key = tensors, key

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors.get_tensor(self.key)


def write_distributed_checkpoint(folder: PurePath, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads, from this process alone.

    Args:
        tensors: by `MODEL`, `OPTIMIZER` or `CARRIED`, and by their names there.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {prefix + name: tensor for prefix, named in tensors.items() for name, tensor in named.items()}
    with warnings.catch_warnings():  # that it takes no process group for one process, which is meant
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(str(folder)), no_dist=True)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads classes of DCP's metadata and of torch's description of tensors, and no others."""

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of it")


def _read_metadata(folder: Place) -> Metadata:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _MetadataUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no metadata")
    except RemoteError:
        raise
    except Exception as error:  # a damaged pickle shows as errors of many kinds
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: {METADATA} cannot be read ({said}); copy the folder again") from None
    return metadata


def _names_by_stem(keys: list[str]) -> dict[str, dict[str, str]]:
    """Map names in checkpoints of ours to a folder's keys, by the file that would have the tensors."""
    optimizer = next((p for p in _OPTIMIZERS if any(key.startswith(p) for key in keys)), None)
    by_stem: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}, "state": {}}
    of_model, parameters = list[str](), set[str]()
    for key in keys:
        if optimizer is not None and key.startswith(optimizer):
            name, _, entry = key.removeprefix(optimizer).rpartition(".")
            by_stem["optimizer"][f"{name}|{entry}"] = key
            parameters.add(name)
        elif key.startswith(CARRIED):
            by_stem["state"][key.removeprefix(CARRIED)] = key
        elif not key.startswith(_OF_THE_LOOP):
            of_model.append(key)
    prefix = _prefix_of(of_model, parameters)
    by_stem["model"] = {key.removeprefix(prefix): key for key in of_model if key.startswith(prefix)}
    return by_stem


def _prefix_of(keys: list[str], parameters: set[str]) -> str:
    """Return what a training loop has put before the names of a model's tensors.

    Args:
        parameters: names of those that have optimizer state.
    """
    prefixes = ("", MODEL, "app.model.")
    for prefix in prefixes if parameters else ():
        if parameters <= {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}:
            return prefix
    if any(key.startswith(prefixes[2]) for key in keys):
        return prefixes[2]
    return MODEL if any(key.startswith(_NESTED) for key in keys) else ""
