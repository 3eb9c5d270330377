"""Hugging Face folders for `adjoint train`: sizes, models, and what layer shards begin from."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.errors import UserError
from adjoint.files import flush
from adjoint.hf.split import Pretrained, examine
from adjoint.hf.trial_copy import some_tokens
from adjoint.hf.wrap import unwrap, wrap

KEY = "model.from_pretrained"
# Modules without an adapter where none are named: transformers or a fused kernel reads their weight past it.
_UNADAPTED = {"out_proj", "dt_proj"}
# What is downloaded of a model of the hub: weights as safetensors where there are any.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.bin")


def folder_of(name: str, weights: bool = True, key: str = KEY) -> str:
    """A folder as it is; of a name of the hub the folder in huggingface_hub's cache that its files are
    downloaded to.

    Args:
        weights: whether the model's weights are needed too.
        key: what the name was given as, for an error.

    Raises:
        UserError: it is a name, and the hub does not give its files: with what the hub says.
    """
    if Path(name).expanduser().exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return name
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=[*_BESIDE, *_WEIGHTS[:1] * weights])
        if weights and not any(Path(folder).glob(_WEIGHTS[0])):
            folder = snapshot_download(name, allow_patterns=[*_BESIDE, *_WEIGHTS])
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{key}: there is no folder {name}, and the Hugging Face hub says: {said}") from None
    return folder


def configuration(directory: str) -> Any:
    """What the config.json of a folder says.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoConfig

    if not (Path(directory) / "config.json").is_file():
        raise UserError(
            f"{KEY}: {directory} has no config.json; name a folder that save_pretrained wrote, or a model of "
            "the Hugging Face hub"
        )
    with _naming(directory):
        return AutoConfig.from_pretrained(directory, local_files_only=True)


def sizes(directory: str) -> dict[str, int]:
    """vocab_size, d_model and n_layer of the model in a folder.

    Raises:
        UserError: there is none.
    """
    config = configuration(directory).get_text_config()
    names = {"vocab_size": "vocab_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers"}
    return {ours: getattr(config, theirs) for ours, theirs in names.items()}


def load(directory: str, method: Any, lora: Mapping[str, Any] | None = None) -> Any:
    """The model of a folder, in float32, wrapped.

    Args:
        lora: settings of `model.lora`, for a model with adapters.

    Raises:
        UserError: it is no causal LM that transformers knows, lacks weights, or cannot be wrapped.
    """
    with _naming(directory):
        wrapped = wrap(unwrapped(directory, torch.float32), method)
    return wrapped if lora is None else _adapted(wrapped, lora)


def unwrapped(directory: str, dtype: torch.dtype) -> Any:
    """The model of a folder, as transformers makes it.

    Raises:
        UserError: it is no causal LM that transformers knows, or lacks weights.
    """
    from transformers import AutoModelForCausalLM

    with _naming(directory):
        model, found = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        # which transformers would leave at random
        if lacking := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
            raise ValueError(
                f"{len(lacking)} weights of {type(model).__name__} are not there or of another shape, such "
                f"as {lacking[0]}; name a folder that save_pretrained wrote of it"
            )
    return model


def _adapted(model: Any, lora: Mapping[str, Any]) -> Any:
    """A model with adapters, the rest of it frozen."""
    try:
        import peft
    except ImportError:
        raise UserError("model.lora: needs PEFT, which is not installed; pip install peft") from None
    targets, rank = lora["target_modules"], lora["rank"]
    settings = {"r": rank, "lora_alpha": lora["alpha"] or 2 * rank, "lora_dropout": lora["dropout"]}
    settings["target_modules"] = _linear_maps(model) if targets is None else targets
    try:
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        if any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()):
            raise ValueError("PEFT changes the weights of experts in the forward; name other modules")
    except ValueError as error:
        raise UserError(f"model.lora.target_modules: {' '.join(str(error).split())}") from None
    return adapted


def _linear_maps(model: Any) -> list[str]:
    """The modules that get an adapter where none are named."""
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    left_out = set(_UNADAPTED)
    if any(name.endswith(".experts") for name in modules):  # whose own these names stand for too
        left_out |= {"gate", "gate_proj", "up_proj", "down_proj"}
    linear = [
        name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head
    ]
    return [name for name in linear if name.rpartition(".")[2] not in left_out]


def described(directory: str, method: Any, folder: Path | None) -> Pretrained:
    """What layer shards have to know of the model of a folder.

    Args:
        folder: to write its weights to, by the names of its parameters; None writes none. A folder's own
            files may have others, which only transformers' loading knows.

    Raises:
        UserError: there is no such model, or it cannot be cut.
    """
    from safetensors.torch import save_file

    model = unwrap(load(directory, method))
    with _naming(directory):
        found = examine(model, some_tokens(model)[0])
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        named = dict(model.named_parameters())
        save_file(
            {name: named[name].detach().contiguous() for name in found.names}, folder / "model.safetensors"
        )
        flush(folder / "model.safetensors")
    return found


@torch.no_grad()
def continued(model: Any, prompt: Tensor, max_new_tokens: int, temperature: float, seed: int) -> Tensor:
    """The prompt (1, seqlen) with sampled tokens after it; the random numbers go on as if none were drawn."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
        )


@contextlib.contextmanager
def _naming(directory: str) -> Iterator[None]:
    """Errors as `UserError`, in a line that names the folder."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{KEY}: {directory}: {' '.join(str(error).split())}") from None
