"""`adjoint export`: a run's model as a folder that transformers, mamba-ssm or Caduceus' code loads, or as a
file in one of `FILE_FORMATS`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from adjoint.checkpoint import RNG, TRAINER, StoredTensors, model_tensors, read_trainer
from adjoint.data.tokenizer import (
    CharTokenizer,
    byte_tokenizer_files,
    char_tokenizer_files,
    has_no_files,
    load_tokenizer,
    special_ids,
    tokenizer_files,
)
from adjoint.errors import UserError
from adjoint.files import disk_errors, flush, folder_in_cache, unfinished_path
from adjoint.files.distributed_checkpoint import (
    CARRIED,
    METADATA,
    MODEL,
    OPTIMIZER,
    write_distributed_checkpoint,
)
from adjoint.files.remote import Place, RemotePath, is_remote
from adjoint.formats import FILE_FORMATS, FORMATS, file_format_of, file_format_to_write, file_kinds
from adjoint.formats.folders import checkpoint_config, from_checkpoint
from adjoint.formats.names import Weights
from adjoint.train.checkpoint import merged_model, write_file
from adjoint.train.dependencies import check_tokenizer, not_there
from adjoint.train.flags import Flags, new_folder, reads
from adjoint.train.peft_adapters import TIED, is_tied
from adjoint.train.pretrained import configuration
from adjoint.train.quantization import described
from adjoint.train.rundir import read_named_checkpoint
from adjoint.train.stored_dtypes import FLOATING, cast_as_stored
from adjoint.train.unloaded import copy_unloaded

Dtype = Literal["float32", "bfloat16", "float16"]
DCP = "dcp"


def _parser() -> Flags:
    files = "".join(f"|FILE{row.SUFFIX}" for row in FILE_FORMATS)
    parser = Flags(
        prog="adjoint export",
        usage=f"%(prog)s RUN --to DIR{files} [--format mamba-ssm|{DCP}] [--dtype bfloat16]",
        description="Write a run's model to a folder that AutoModelForCausalLM.from_pretrained of "
        "transformers, MambaLMHeadModel.from_pretrained of mamba-ssm, or for layers that read in both "
        "directions CaduceusForMaskedLM.from_pretrained can load, with the run's tokenizer. A run that began "
        f"with {file_kinds()} can be written to such a file.",
    )
    parser.add("run", "a run's folder (its newest checkpoint) or a checkpoint", metavar="RUN")
    parser.add("--to", "folder or address to write, new or empty; or a new file", _destination, required=True)
    layout = f"layout of the folder: {', '.join(FORMATS)}; or {DCP}, weights and optimizer state for "
    layout += "torch.distributed.checkpoint.load, whatever its number of ranks"
    parser.add("--format", layout, reads(Literal[(*FORMATS, DCP)]), default="transformers")
    dtype = f"dtype of the weights: {', '.join(get_args(Dtype))}; default: that of model.from_pretrained, or"
    dtype += " of the run"
    parser.add("--dtype", dtype, reads(Dtype))
    return parser


def main(argv: list[str]) -> int:
    """`adjoint export`: exit code 0."""
    request = _parser().parse_args(argv)
    write = _export_to_address if isinstance(request.to, RemotePath) else export

    def write_checkpoint(checkpoint: Place) -> str:
        summary = write(checkpoint, request.to, request.format, request.dtype)
        source = checkpoint if isinstance(checkpoint, RemotePath) else os.path.relpath(checkpoint)
        return f"{summary}, from {source}"

    print(f"{request.to}: {read_named_checkpoint(request.run, write_checkpoint)}")
    return 0


def _destination(text: str) -> Place:
    """Return the file or folder to write to that a flag names, or its address."""
    if is_remote(text):
        return RemotePath(text)
    if file_format_to_write(text) is None:
        return new_folder(text)
    if Path(text).exists():
        raise ValueError(f"{text}: is there already; name a new file")
    return Path(text)


def _export_to_address(checkpoint: Place, place: RemotePath, layout: str, dtype: str | None) -> str:
    """Export to a folder of the cache and upload that; return what was written, in words. The file that
    describes the others is uploaded last.

    Raises:
        UserError: something is at the address, or its store refuses.
    """
    if place.is_file() or place.iterdir():
        raise UserError(f"--to {place}: is not empty; name another address, or remove what is there first")
    with folder_in_cache() as folder:
        local = folder / place.name
        summary = export(checkpoint, local, layout, dtype)
        if local.is_file():
            place.upload(local)
        else:
            place.upload_folder(local, METADATA if layout == DCP else "config.json")
    return summary


def export(checkpoint: Place, folder: Path, layout: str, dtype: str | None = None) -> str:
    """Write a verified checkpoint's model to a folder in one piece; return what was written, in words.

    Args:
        folder: to write; or a file with the ending of one of `FILE_FORMATS`, for a model of its kind.
        dtype: of the weights; None for those that the tensors have in the model that the run began with, or
            else of the run.

    Raises:
        UserError: the layout has no such model, or something is in the folder's place.
        OSError: the disk refused; nothing is left.
    """
    if layout == DCP:
        return _export_dcp(checkpoint, folder, dtype)
    check_tokenizer(checkpoint)
    trained = read_trainer(checkpoint).get("config", {})
    source = trained.get("model", {}).get("from_pretrained")
    if source is not None and layout != "transformers":
        raise UserError(f"--format {layout}: the run trains the transformers model in {source}; leave it out")
    if (file_format := file_format_to_write(folder)) is not None:
        if source is None:
            raise UserError(
                f"--to {folder}: is for a run that began with {file_format.KIND} (model.from_pretrained), "
                "and this run trains a Stack; name a folder"
            )
        model = merged_model(checkpoint)
        configured = _dtype_of(source, trained["model"].get("trust_remote_code", False))
        cast_as_stored(model, Path(source), _torch_dtype(configured), _torch_dtype(dtype))
        file_format.save(model, folder, None)
        dtypes = _named_dtypes(model.state_dict())
        return f"{file_format.SUMMARY}, {model.num_parameters():,} parameters, {dtypes}"
    config = checkpoint_config(checkpoint) if source is None else None
    reason = None if config is None else FORMATS[layout].why_not(config)
    if config is not None and reason is not None:
        others = [other for other, its in FORMATS.items() if its.why_not(config) is None]
        remedy = f"give --format {others[0]}" if others else "adjoint.Stack.from_pretrained reads the run"
        raise UserError(f"--format {layout}: {reason}; {remedy}")
    return _written(folder, lambda work: _write_all(work, checkpoint, layout, dtype))


def _export_dcp(checkpoint: Place, folder: Path, dtype: str | None) -> str:
    """Write a checkpoint's weights and optimizer state, as they are, to a folder of DCP; return what was
    written, in words."""
    if file_format_to_write(folder) is not None:
        raise UserError(f"--to {folder}: --format {DCP} writes a folder; name one")
    if dtype is not None:
        raise UserError(f"--dtype {dtype}: --format {DCP} keeps the run's, to go on from it; leave it out")
    stored = {stem: StoredTensors(checkpoint, stem) for stem in ("optimizer", "state")}
    stored["model"] = model_tensors(checkpoint)
    entries = [name.rpartition("|") for name in stored["optimizer"].files_by_name]
    if any("." in key for _, _, key in entries):
        raise UserError(
            f"--format {DCP}: the run has moments in 8 bits (training.optimizer), for which it has no form; "
            "export to another format, without them"
        )

    def write(work: Path) -> str:
        tensors = {
            MODEL: {name: stored["model"][name] for name in stored["model"].files_by_name},
            OPTIMIZER: {f"{name}.{key}": stored["optimizer"][f"{name}|{key}"] for name, _, key in entries},
            CARRIED: {name: stored["state"][name] for name in stored["state"].files_by_name},
        }
        write_distributed_checkpoint(work, tensors)
        for name in (TRAINER, RNG):
            if (checkpoint / name).is_file():
                (work / name).write_bytes((checkpoint / name).read_bytes())
        size = sum(tensor.numel() for tensor in tensors[MODEL].values())
        return f"{size:,} parameters and the optimizer's state for torch.distributed.checkpoint"

    return _written(folder, write)


def _written(folder: Path, write: Callable[[Path], str]) -> str:
    """Write a folder in one piece; return what was written, in words.

    Args:
        write: writes the files to the folder that it is given, and returns what it wrote.

    Raises:
        UserError: the folder is not empty.
        OSError: the disk refused; nothing is left.
    """
    folder = folder.resolve()  # a link to an empty folder leads to where things are written
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--to {folder}: is not empty; name a new folder, or remove that one first")
    work = unfinished_path(folder)
    work.mkdir(parents=True)
    try:
        with disk_errors(folder):
            summary = write(work)
            for written in (*work.iterdir(), work):
                flush(written)
            os.replace(work, folder)  # of an empty folder too, and of nothing else
            flush(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return summary


def _write_all(work: Path, checkpoint: Place, layout: str, dtype: str | None) -> str:
    """Write model and tokenizer of a checkpoint to a folder; return what was written, in words."""
    trained = read_trainer(checkpoint).get("config", {})
    settings = trained.get("model", {})
    source, trusted = settings.get("from_pretrained"), settings.get("trust_remote_code", False)
    if source is None:
        stack, weights = from_checkpoint(checkpoint)
        weights = {name: _cast(t, dtype) for name, t in weights.items()}
        summary = _write(work, layout, *FORMATS[layout].convert(stack, weights))
    else:
        summary = _write_pretrained(work, checkpoint, source, trusted, dtype)
        summary += _named_weights(settings, source, trusted)
    data = trained.get("data", {})
    summary += _write_tokenizer(work, data)
    tokenizer = data.get("tokenizer")
    if layout == "transformers" and tokenizer_files(str(work)) and (source is None or tokenizer != source):
        place = tokenizer if has_no_files(tokenizer) else str(work)
        ids = special_ids(load_tokenizer(place, data.get("separator"), trusted), work)
        _write_special_ids(work, ids)
    return summary


def _write_special_ids(work: Path, ids: dict[str, int | None]) -> None:
    """Write the ids of the run's special tokens to config.json and generation_config.json, by which
    transformers ends a text: those that were there are another tokenizer's."""
    for name in ("config.json", "generation_config.json"):
        file = work / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        content |= ids
        if isinstance(text_config := content.get("text_config"), dict):
            text_config |= ids
        if name == "generation_config.json":
            content = {key: value for key, value in content.items() if value is not None}
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cast(tensor: Tensor, dtype: str | None) -> Tensor:
    return tensor.to(_torch_dtype(dtype)) if dtype and tensor.is_floating_point() else tensor


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _dtype_of(source: str, trust_remote_code: bool) -> str | None:
    """Return the dtype of a Hugging Face folder's weights; None for the run's."""
    config = configuration(source, trust_remote_code)
    dtype = config.dtype if config.dtype is not None else config.get_text_config().dtype
    name = str(dtype).removeprefix("torch.")
    return name if getattr(torch, name, None) in FLOATING.values() else None


def _write_pretrained(work: Path, checkpoint: Place, source: str, trusted: bool, dtype: str | None) -> str:
    """Write a run of a Hugging Face model by its own `save_pretrained`, with the run's weights.

    Tensors of the source folder that its class does not load are copied.

    Args:
        trusted: whether Python files of the folder may run.
        dtype: of the weights; None for those that the tensors have in the folder or file.
    """
    model = merged_model(checkpoint)
    configured = _dtype_of(source, trusted)
    main_dtype = dtype or configured
    file_format = file_format_of(source)
    if file_format is not None and (reason := file_format.why_no_folder(model.config)):
        raise UserError(f"--to: {reason}; write one, --to NAME{file_format.SUFFIX}")
    cast_as_stored(model, Path(source), _torch_dtype(configured), _torch_dtype(dtype))
    model.save_pretrained(work)
    if main_dtype is not None:  # not that of the first parameter
        config_json = json.loads((work / "config.json").read_text(encoding="utf-8")) | {"dtype": main_dtype}
        (work / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
    dtypes = _named_dtypes(model.state_dict())
    library = "transformers" if file_format is None else file_format.LIBRARY
    summary = f"{type(model).__name__} of {library}, {model.num_parameters():,} parameters, {dtypes}"
    if is_tied(configuration(source, trusted)) and not is_tied(model.config):
        summary += (
            f", modules that shared a weight have one each, as adapters made them differ ({TIED} false)"
        )
    if file_format is None and (copied := copy_unloaded(Path(source), work, model)):
        groups = ", ".join(sorted({".".join(name.split(".")[:2]) for name in copied})[:5])
        summary += f", and {len(copied)} tensors of {source} that it does not load, as they are ({groups})"
    return summary


def _named_weights(settings: Mapping[str, object], source: str, trusted: bool) -> str:
    """Say into which weights the adapters of a quantized base were merged; "" for other runs."""
    if (kind := settings.get("quantization")) is not None:
        return f", adapters merged into the weights of {source} (trained on these in {kind})"
    if (stored := described(configuration(source, trusted))) is not None:
        return f", adapters merged into what the quantized weights of {source} ({stored}) stand for"
    return ""


def _named_dtypes(weights: Weights) -> str:
    return ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in weights.values()}))


def _write_tokenizer(work: Path, data: Mapping[str, Any]) -> str:
    """Write the tokenizer that a run was trained with, by its `data` settings; return what was written, in
    words."""
    tokenizer: str = data.get("tokenizer") or "byte"
    if has_no_files(tokenizer):
        loaded = load_tokenizer(tokenizer, data.get("separator"))
        if isinstance(loaded, CharTokenizer):
            files, kind = char_tokenizer_files(loaded), "characters"
        else:
            files, kind = byte_tokenizer_files(data.get("separator")), "bytes"
        for name, content in files.items():
            (work / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return f", its tokenizer ({kind})"
    originals = tokenizer_files(tokenizer)
    for file in originals:
        shutil.copyfile(file, work / ("tokenizer.json" if Path(tokenizer) == file else file.name))
    return (
        ", its tokenizer" if originals else f", without its tokenizer ({tokenizer}, {not_there(tokenizer)})"
    )


def _write(work: Path, layout: str, config: dict[str, Any], weights: Weights) -> str:
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stack_format = FORMATS[layout]
    file = work / stack_format.WEIGHTS_FILE
    if file.suffix == ".safetensors":  # transformers asks for the word "pt"
        write_file(file, _in_memory_of_their_own(weights), {"format": "pt"})
    else:
        torch.save(weights, file)
    name = stack_format.class_name(config)
    weights = {name: t for name, t in weights.items() if t.is_floating_point()}
    size = sum({tensor.data_ptr(): tensor.numel() for tensor in weights.values()}.values())
    return f"{name} of {layout}, {size:,} parameters, {_named_dtypes(weights)}"


def _in_memory_of_their_own(weights: Weights) -> Weights:
    """Return the weights with copies of tensors that share memory: safetensors has none under two names."""
    storages: set[int] = set()
    separate: Weights = {}
    for name, tensor in weights.items():
        memory = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if memory in storages else tensor
        storages.add(memory)
    return separate
