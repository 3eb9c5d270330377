"""Files of tensors, of safetensors and of PyTorch."""

import pickle
import zipfile
from pathlib import Path

import torch

from adjoint.errors import UserError
from adjoint.formats.names import Weights


def read_tensors(file: Path, device: str = "cpu") -> Weights:
    """Return the tensors of a file, safetensors by its ending or else PyTorch's, on a device.

    Raises:
        UserError: it is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.is_file():
        raise UserError(f"{file}: no such file, but the index beside it lists it; download all files")
    try:
        if file.suffix == ".safetensors":  # parts of a mapped file: copied, to be the model's own
            return {name: tensor.clone() for name, tensor in load_file(str(file), device).items()}
        # On the meta device nothing is read: tensors of a mapped file have shapes alone.
        is_mapped = device == "meta" and zipfile.is_zipfile(file)
        return torch.load(file, map_location=device, weights_only=True, mmap=is_mapped)
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be read ({reason}); download it again") from None
