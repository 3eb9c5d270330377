"""Files outside a run's folder that its checkpoints depend on, and whether these are as they were.

A run of a pretrained model makes it from its folder: the configurations always, and with adapters the weights
too, of which a checkpoint then holds none. Evaluation and export read the tokenizer's files. A checkpoint
records a digest of each, so that it is not joined to files that have changed meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from adjoint.checkpoint import read_trainer
from adjoint.data.tokenizer import has_no_files, tokenizer_files
from adjoint.errors import UserError
from adjoint.files.remote import Place
from adjoint.formats import file_format_of

Section = Mapping[str, Any]  # of a configuration, as plain values by key
ConfigDict = Mapping[str, Section]  # a configuration by section
RECORD: Final = "dependencies"  # the key of trainer.json
# What transformers writes into config.json besides the model itself.
_NOT_THE_MODEL = {"transformers_version", "_name_or_path"}
_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 4
_SAMPLES_PER_FILE = 2048
_MODEL_FILES = {
    "sizes": ("the shapes of the tensors", "the checkpoint is of the model as it was"),
    "config": ("the config.json", "the checkpoint is of the model as it was"),
    "generation": ("the generation_config.json", "samples and exports would be made by other settings"),
    "code": ("the Python code", "the checkpoint is of the model as it was"),
    "weights": ("the weights", "the checkpoint's adapters are for those as they were"),
}


def record(model: Section, tokenizer: Sequence[Path]) -> dict[str, str]:
    """Return a digest of each dependency of a run, by its kind, for its checkpoints to keep.

    Args:
        model: of the run's configuration. tokenizer: the tokenizer's files, if any.
    """
    digests = _model_digests(model)
    if tokenizer:
        digests["tokenizer"] = _content_digest(tokenizer)
    return digests


def check_model(checkpoint: Place, config: ConfigDict) -> None:
    """Raise a UserError where the folder of the pretrained model is missing, or not as when the run began."""
    recorded, model = _recorded(checkpoint), config["model"]
    kinds = [kind for kind in _MODEL_FILES if kind in recorded]
    if not kinds:
        return
    place = model["from_pretrained"]
    if place is not None and not Path(place).exists():
        raise UserError(f"{checkpoint}: the run began with the model {place}, {not_there(place)}")
    digests = _model_digests(model)
    for kind in kinds:
        if digests.get(kind) != recorded[kind]:
            subject, why = _MODEL_FILES[kind]
            raise UserError(
                f"{checkpoint}: {subject} in {place} changed since the run began, and "
                f"{why}; put the folder back as it was, or start another run"
            )


def check_tokenizer(checkpoint: Place) -> None:
    """Raise a UserError where the tokenizer's files are there and not as they were when the run began."""
    config, recorded = read_trainer(checkpoint).get("config", {}), _recorded(checkpoint).get("tokenizer")
    name = config.get("data", {}).get("tokenizer")
    files = [] if name is None or has_no_files(name) else tokenizer_files(name)
    if files and recorded not in (None, _content_digest(files)):
        raise UserError(
            f"{checkpoint}: the tokenizer {name} changed since the run began, and the "
            "model knows the tokens of the earlier one; put its files back as they were"
        )


def not_there(place: str) -> str:
    """Say of a file or folder of a run that it is missing, and what helps."""
    remedy = "put it back" if Path(place).is_absolute() else "call this in the folder the run began in"
    return f"which is not there; {remedy}"


def records_model(checkpoint: Place) -> bool:
    """Whether a checkpoint can tell its pretrained model's folder by content, wherever that is now."""
    return not {"config", "sizes"}.isdisjoint(_recorded(checkpoint))


def _recorded(checkpoint: Place) -> dict[str, str]:
    return read_trainer(checkpoint).get(RECORD, {})


def _model_digests(model: Section) -> dict[str, str]:
    if model.get("from_pretrained") is None:
        return {}
    folder = Path(model["from_pretrained"])
    if (file_format := file_format_of(folder)) is not None:
        sizes = json.dumps(file_format.sizes_of_file(folder), sort_keys=True)
        weights = {"weights": _digest([_file_samples(folder)])} if model.get("lora") else {}
        return {"sizes": _digest([sizes.encode()]), **weights}
    files = {"config": "config.json", "generation": "generation_config.json"}
    digests = {kind: _config_digest(folder / name) for kind, name in files.items()}
    if model.get("trust_remote_code"):
        digests["code"] = _content_digest(folder.glob("*.py"))
    if model.get("lora"):
        digests["weights"] = weights_digest(folder)
    return digests


def _config_digest(file: Path) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "unreadable"
    relevant = {key: value for key, value in content.items() if key not in _NOT_THE_MODEL}
    return _digest([json.dumps(relevant, sort_keys=True).encode()])


def _content_digest(files: Iterable[Path]) -> str:
    return _digest(chunk for file in sorted(files) for chunk in (file.name.encode(), file.read_bytes()))


def weights_digest(folder: Path) -> str:
    """Digest of a folder's weights: every tensor's name, dtype, shape and some of its bytes, whatever files
    they are distributed over; of formats other than safetensors, the files' sizes and some of their bytes.
    Reads some megabytes, however large the model is."""
    entries: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries |= _tensor_samples(file)
    if not entries:
        for file in sorted(folder.glob("*.bin")):
            entries[file.name] = _file_samples(file)
    return _digest(chunk for name in sorted(entries) for chunk in (name.encode(), entries[name]))


def _tensor_samples(file: Path) -> dict[str, bytes]:
    """Return the header entry and sampled bytes of each tensor of a safetensors file."""
    entries = {}
    try:
        with open(file, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(size, file.stat().st_size)))
        for name, entry in header.items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                header_entry = json.dumps([entry["dtype"], entry["shape"]]).encode()
                entries[name] = header_entry + _sampled(
                    file, 8 + size + first, end - first, _SAMPLES_PER_TENSOR
                )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        return {file.name: b"damaged"}
    return entries


def _file_samples(file: Path) -> bytes:
    return _sampled(file, 0, file.stat().st_size, _SAMPLES_PER_FILE)


def _sampled(file: Path, first: int, length: int, samples: int) -> bytes:
    """Return the length of a span of a file, and evenly spaced samples of it, its beginning and end among
    them."""
    last = max(0, length - _SAMPLE_BYTES)
    starts = sorted({last * k // (samples - 1) for k in range(samples)})
    parts = [str(length).encode()]
    with open(file, "rb") as stream:
        for start in starts:
            stream.seek(first + start)
            parts.append(stream.read(min(_SAMPLE_BYTES, length)))
    return b"".join(parts)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for chunk in parts:
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()
