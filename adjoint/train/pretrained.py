"""Hugging Face folders for `adjoint train`: sizes, models, and what layer shards begin from."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from adjoint.errors import UserError
from adjoint.files import flush
from adjoint.formats import file_format_of
from adjoint.formats.folders import refuse_adapter
from adjoint.hf.quantized import keep_trainable, set_compute_dtype
from adjoint.hf.split import Pretrained, examine
from adjoint.hf.transformers_api import (
    distributed_config_class,
    transformers_logging,
    use_float64_experts,
)
from adjoint.hf.verify.trial_copy import example_tokens
from adjoint.hf.wrap import unwrap, wrap
from adjoint.memory import out_of_memory
from adjoint.methods import Method
from adjoint.train import quantization as quantized
from adjoint.train.peft_adapters import LoraSettings, adapted
from adjoint.train.places import is_local_model, no_configuration, not_on_hub

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


KEY = "model.from_pretrained"
_NEEDS_NEWER = "needs a newer transformers; pip install -U transformers"
# What is downloaded of a model of the hub: weights as safetensors where there are any.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.bin")


def folder_of(name: str, weights: bool = True, key: str = KEY) -> str:
    """Return a folder as it is; for a name of the hub, the folder in huggingface_hub's cache that its files
    are downloaded to.

    Args:
        weights: whether the model's weights are needed too.
        key: what the name was given as, for an error.

    Raises:
        UserError: it is a name, and the hub does not give its files: with what the hub says.
    """
    if is_local_model(name):
        return name
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=[*_BESIDE, *_WEIGHTS[:1] * weights])
        if weights and not any(Path(folder).glob(_WEIGHTS[0])):
            folder = snapshot_download(name, allow_patterns=[*_BESIDE, *_WEIGHTS])
    except (OSError, ValueError) as error:
        raise not_on_hub(name, key, error) from None
    return folder


def configuration(place: str, trust_remote_code: bool = False, key: str = KEY) -> PreTrainedConfig:
    """Read the config.json of a folder, or a file like it; or return that of a file's model.

    Args:
        trust_remote_code: whether Python files of the folder may run (`model.trust_remote_code`).
        key: what the folder was given as, for an error.

    Raises:
        UserError: there is none, or it describes no causal LM.
    """
    from transformers import AutoConfig

    path = Path(place)
    if (file_format := file_format_of(path)) is not None:
        return file_format.configuration(path)
    if not path.is_file() and not (path / "config.json").is_file():
        refuse_adapter(path, key)
        raise no_configuration(place, key)
    file = path if path.is_file() else path / "config.json"
    with _reading(place, key, trust_remote_code):
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=trust_remote_code)
        missing = [name for name in _SIZES.values() if not hasattr(config.get_text_config(), name)]
        if missing:
            raise ValueError(f"{file.name} describes no causal language model (it has no {missing[0]})")
        return config


_SIZES = {"vocab_size": "vocab_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers"}


def sizes(directory: str, trust_remote_code: bool = False) -> dict[str, int]:
    """Return vocab_size, d_model and n_layer of the model in a folder.

    Raises:
        UserError: there is none.
    """
    config = configuration(directory, trust_remote_code).get_text_config()
    return {ours: getattr(config, theirs) for ours, theirs in _SIZES.items()}


def load(
    directory: str,
    method: Method,
    lora: LoraSettings | None = None,
    trust_remote_code: bool = False,
    key: str = KEY,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Return the model of a folder, wrapped.

    Args:
        lora: settings of `model.lora`, for a model with adapters.
        trust_remote_code, dtype, device: as in `unwrapped`.
        key: what the folder was given as, for an error.

    Raises:
        UserError: it is no causal LM that transformers knows, lacks weights, or cannot be wrapped.
    """
    model = unwrapped(directory, dtype, trust_remote_code, key, None, device)
    return prepared(model, directory, method, lora, key)


def prepared(
    model: PreTrainedModel, directory: str, method: Method, lora: LoraSettings | None, key: str = KEY
) -> PreTrainedModel:
    """Return a folder's model wrapped, and with adapters where there are settings of them: see `load`."""
    with _naming(directory, key):
        wrapped = wrap(model, method)
    return wrapped if lora is None else adapted(wrapped, lora)


def unwrapped(
    directory: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    key: str = KEY,
    quantization: str | None = None,
    device: torch.device | str | None = None,
    tensor: int = 1,
) -> PreTrainedModel:
    """Return the model of a folder as transformers makes it, or of a file in one of `FILE_FORMATS`; where
    weights are quantized, linear layers multiply in `dtype`.

    Args:
        trust_remote_code: whether Python files of the folder may run.
        quantization: `model.quantization`, by which weights are quantized as they are loaded.
        device: of a quantized model; None for the CPU. Another model is loaded to the CPU.
        tensor: ranks in a row over which its weights are split. Each reads its parts alone, to its device.

    Raises:
        UserError: it is no causal LM that transformers knows, its files are damaged or lack weights, or the
            library that its weights are quantized by is not installed.
    """
    from transformers import AutoModelForCausalLM

    if (file_format := file_format_of(directory)) is not None:
        if quantization is not None:
            raise UserError(
                f"model.quantization: {directory} is {file_format.KIND}, loaded as it is; leave it out"
            )
        return file_format.load(Path(directory), dtype)
    stored = quantized.described(configuration(directory, trust_remote_code, key))
    _check_generation_config(Path(directory) / "generation_config.json", key)
    # With mismatched shapes ignored, transformers lists them; else it prints a table and names no tensor.
    options: dict[str, object] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    if quantization is not None:
        options["quantization_config"] = quantized.transformers_config(quantization)
    if quantization is not None or stored is not None:
        options["device_map"] = {"": device or "cpu"}  # else transformers takes a GPU where there is one
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says in each layer that it casts inputs
    if tensor > 1:
        options["distributed_config"] = tensor_parallel_config(tensor)
    with _reading(directory, key, trust_remote_code, stored), quiet_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
        # which transformers would leave at random
        for name, stored, expected in sorted(report["mismatched_keys"]):
            raise ValueError(
                f"its tensor {name} has shape {tuple(stored)}, and {type(model).__name__} with its "
                f"config.json has {tuple(expected)}; download both again, or correct config.json"
            )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"{len(missing)} weights of {type(model).__name__} are missing, such as {missing[0]}; name "
                "a folder that save_pretrained wrote of it"
            )
    keep_trainable(model)
    set_compute_dtype(model, dtype)
    use_float64_experts(model)
    return model


def check_tensor_parallel(config: PreTrainedConfig, ranks: int, quantization: str | None) -> None:
    """Raise a UserError where transformers cannot split a model's weights over so many ranks."""
    name, text = (config.architectures or [config.model_type])[0], config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UserError(
            f"cluster.tensor: transformers has no plan by which the weights of {name} are split "
            "(base_model_tp_plan); leave it out: cluster.shards, over Ray, splits any model by layers"
        )
    if quantization is not None or quantized.described(config) is not None:
        raise UserError("cluster.tensor: quantized weights are not split; leave one of the two out")
    keys = ("k_proj", "qkv_proj", "query_key_value")
    by_heads = any(style == "colwise" and name.endswith(keys) for name, style in plan.items())
    for key in ("num_attention_heads", "num_key_value_heads") if by_heads else ():
        heads = getattr(text, key, None) or text.num_attention_heads
        if heads % ranks:
            raise UserError(
                f"cluster.tensor: {ranks} ranks cannot share the {heads} heads of {name} ({key}) evenly; "
                f"give a divisor of {heads}"
            )


def tensor_parallel_config(ranks: int) -> object:
    """Return transformers' configuration that splits weights over each run of so many ranks.

    Raises:
        UserError: this version of transformers has no such configuration.
    """
    config_class = distributed_config_class()
    if config_class is None:
        raise UserError(f"cluster.tensor: {_NEEDS_NEWER}")
    groups = dist.get_world_size() // ranks
    if groups == 1:
        return config_class(tp_size=ranks)
    if not hasattr(config_class, "dp_size"):
        raise UserError(f"cluster.tensor: {groups} groups of {ranks} processes: {_NEEDS_NEWER}")

    class TensorParallel(config_class):  # type: ignore[valid-type,misc]
        """Tensor parallelism alone: over the groups transformers is not to spread weights by FSDP."""

        @property
        def dp_size(self) -> int:
            return 1

    return TensorParallel(tp_size=ranks, dp_replicate_size=groups)


def dequantized(model: PreTrainedModel, directory: str) -> PreTrainedModel:
    """Return a model with the floating-point weights that its quantized ones stand for.

    Raises:
        UserError: transformers has no code for it.
    """
    method = quantized.described(model.config)
    try:
        with quiet_transformers():
            model = model.dequantize(torch.float32)
    except NotImplementedError:
        raise UserError(
            f"{directory}: transformers cannot turn its weights ({method}) into floating-point ones; merge "
            "the run's adapters into the model that they were quantized from"
        ) from None
    # save_pretrained undoes what loading did to the files' tensors, of which a model need not keep a list; to
    # quantize them again it has no code
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [change for change in conversions if _is_reversible(change)] or None
    return model


class _Conversion(Protocol):
    """A conversion of tensors that transformers does as it loads them."""

    def reverse_transform(self) -> object: ...


def _is_reversible(conversion: _Conversion) -> bool:
    """Whether transformers can undo a conversion of tensors, of its `core_model_loading`."""
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _check_generation_config(file: Path, key: str) -> None:
    """Raise a UserError where a generation_config.json is damaged: transformers would go on without it."""
    try:
        readable = not file.exists() or isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        readable = False
    if not readable:
        raise UserError(f"{key}: {file.parent}: {file.name} is damaged; download it again")


def described(
    directory: str,
    method: Method,
    folder: Path | None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Pretrained:
    """Describe the model of a folder to the layer shards that train it.

    Args:
        folder: to write its weights to, by the names of its parameters; None writes none. A folder's own
            files may have others, which only transformers' loading knows.
        dtype: in which these are written.

    Raises:
        UserError: there is no such model, or it cannot be cut.
    """
    from safetensors.torch import save_file

    model = unwrap(load(directory, method, None, trust_remote_code, dtype=dtype))
    with _naming(directory):
        outline = examine(model, example_tokens(model)[0])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        named = dict(model.named_parameters())
        save_file(
            {name: named[name].detach().contiguous() for name in outline.names}, folder / "model.safetensors"
        )
        flush(folder / "model.safetensors")
    return outline


@torch.no_grad()
def continued(
    model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, temperature: float, seed: int
) -> Tensor:
    """Return the prompt (1, seqlen) with sampled tokens after it; the random numbers go on as if none were
    drawn.

    Raises:
        UserError: the model's own `generate` fails, as that of a model with code of its own may, or one whose
            kernels need a GPU.
    """
    model.eval()
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(seed)
        try:
            return model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=temperature,
                top_k=0,
            )
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if out_of_memory(error):
                raise
            raise UserError(f"generate failed ({' '.join(str(error).split())[:200]})") from error


@contextlib.contextmanager
def _naming(directory: str, key: str = KEY) -> Iterator[None]:
    """Errors as `UserError`, in a line that names the folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {directory}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def _reading(place: str, key: str, trust_remote_code: bool, stored: str | None = None) -> Iterator[None]:
    """Whatever reading a model's files raises, as a `UserError` that names the folder: a damaged file shows
    as an error of any kind, from anywhere in transformers, safetensors or the folder's own code.

    Args:
        stored: how the folder's weights are quantized, by a library that may be missing or refuse the device.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if stored is not None and isinstance(error, ImportError | RuntimeError) and not out_of_memory(error):
            reason = f"its weights ({stored}) cannot be loaded: {said[:300]}"
            raise UserError(f"{key}: {place}: {reason}") from None
        if out_of_memory(error) or isinstance(error, ImportError) or "can't start new thread" in said:
            raise
        if "trust_remote_code" in said and not trust_remote_code:
            raise UserError(
                f"{key}: {place}: the model comes with Python code of its own; read it, and if you trust "
                f"it, set --{'model.trust_remote_code true' if key == KEY else 'trust-remote-code'}"
            ) from None
        if damaged := damaged_weights(Path(place)):
            said = damaged
        elif not isinstance(error, OSError | ValueError):
            said = f"its files cannot be read ({type(error).__name__}: {said}); download them again"
        raise UserError(f"{key}: {place}: {said[:600]}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' tables and advice of a load from the user, for whom what matters is an error; and
    its progress bars from what is no terminal."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def damaged_weights(folder: Path) -> str | None:
    """Name the first safetensors file of a folder that cannot be read, and say why; None if all can."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            safe_open(str(file), "pt")
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            return f"{file.name} is damaged ({reason}); download it again"
    return None
