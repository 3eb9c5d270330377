"""Adapters of PEFT on a model of transformers: made by `model.lora`, and merged into the model's weights."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from adjoint.errors import UserError, why_not_imported
from adjoint.hf.model_parts import MODEL_ERRORS, base_of, original_class
from adjoint.hf.transformers_api import empty_model
from adjoint.parallel.split_tensors import is_split
from adjoint.train.dependencies import Section

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


LoraSettings = Section  # `train.config.LoraConfig` as plain values
# Modules without an adapter where none are named: transformers or a fused kernel reads their weight past it.
_UNADAPTED = {"out_proj", "dt_proj"}
# PEFT's warnings that merging into a tied weight goes wrong, which `merged` prevents.
_TIED_WARNINGS = "(?s)Model (has|with) `tie_word_embeddings|Input and output embeddings are no longer tied"
_PEFT_WARNINGS = f"{_TIED_WARNINGS}|`is_gradient_checkpointing` is deprecated"
TIED = "tie_word_embeddings"


def adapted(model: PreTrainedModel, lora: LoraSettings) -> PeftModel:
    """Return a model with adapters, the rest of it frozen.

    Raises:
        UserError: PEFT is not installed, or has no adapters for these modules; or two modules share a weight
            that the class cannot have for each of them, as `merged` needs.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora: {why_not_imported(error, 'peft')}") from None
    targets, rank = lora["target_modules"], lora["rank"]
    settings = {"r": rank, "lora_alpha": lora["alpha"] or 2 * rank, "lora_dropout": lora["dropout"]}
    settings["target_modules"] = _linear_maps(model) if targets is None else targets
    try:
        with _whole_sizes(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_PEFT_WARNINGS)
            adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        if any(type(module).__name__ == "ParamWrapper" for module in adapted.modules()):
            raise ValueError("PEFT changes the weights of experts in the forward; name other modules")
        for path, module in adapted.named_modules():
            if path.endswith(".base_layer") and not _is_plain(module):
                name = path.removesuffix(".base_layer").removeprefix("base_model.model.")
                kind = "rows of a table" if isinstance(module, nn.Embedding) else "a product"
                raise ValueError(
                    f"{name} is a {type(module).__name__}, which computes more than {kind}: an adapter "
                    "beside it is not a change of its weight; name other modules"
                )
        if inseparable := [names for names in tied_modules(adapted) if names in _tied_always(adapted)]:
            raise ValueError(
                f"{' and '.join(inseparable[0])} share a weight whatever {TIED} says, so that no model has "
                "the weights with different adapters; name other modules"
            )
    except ValueError as error:
        hint = ""
        if any(name.rpartition(".")[2] == targets for name, _ in model.named_modules()):
            hint = f" A text is a pattern for whole names; modules are a list: [{targets}]."
        raise UserError(f"model.lora.target_modules: {' '.join(str(error).split())}{hint}") from None
    return adapted


@contextlib.contextmanager
def _whole_sizes(model: PreTrainedModel) -> Iterator[None]:
    """Let PEFT make adapters of the whole size of a split weight: the same on every rank as in one process.

    Of the size of a rank's part, each rank would draw its own, and those before a row-wise weight fail.

    Raises:
        UserError: PEFT takes sizes from somewhere else.
    """
    if not any(is_split(p, p) for p in model.parameters()):
        yield
        return
    from peft.tuners.lora import layer

    name = "_get_in_out_features"
    if not hasattr(layer, name):
        raise UserError("model.lora: with cluster.tensor it needs another PEFT; pip install peft==0.21.2")
    sizes = getattr(layer, name)

    def whole_sizes(module: nn.Module) -> tuple[int | None, int | None]:
        if isinstance(module, nn.Linear):
            return module.in_features, module.out_features
        return sizes(module)

    setattr(layer, name, whole_sizes)
    try:
        with warnings.catch_warnings():  # where transformers gathers outputs, whole adapters need no hooks
            warnings.filterwarnings("ignore", message="TP plan .* is not supported for LoRA")
            yield
    finally:
        setattr(layer, name, sizes)


def _linear_maps(model: PreTrainedModel) -> list[str]:
    """Return the modules that get an adapter where none are named."""
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    left_out = set(_UNADAPTED)
    if any(name.endswith(".experts") for name in modules):  # whose own these names stand for too
        left_out |= {"gate", "gate_proj", "up_proj", "down_proj"}
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and module is not head and _is_plain(module)
    ]
    return [name for name in linear if name.rpartition(".")[2] not in left_out]


def _is_plain(module: nn.Module) -> bool:
    """Whether a linear layer or an embedding computes what its kind does, as far as PEFT knows: a class of a
    model's own may normalise the result, or multiply in groups."""
    kind = next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), None)
    weight = getattr(module, "weight", None)
    if kind is None or weight is None or type(module).forward is kind.forward:
        return True
    if not weight.is_floating_point():  # quantized, by a library that PEFT knows
        return True
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        if isinstance(module, nn.Linear):
            x = torch.randn(2, 3, module.in_features, generator=generator).to(weight)
            expected = nn.functional.linear(x, weight, module.bias)
        else:
            x = torch.arange(min(6, len(weight)), device=weight.device).view(1, -1)
            expected = nn.functional.embedding(x, weight) * getattr(module, "embed_scale", 1.0)
        try:
            difference = module(x) - expected
        except MODEL_ERRORS:
            return False
    tolerance = 0.02 if weight.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return bool(difference.norm() <= tolerance * expected.norm())


def merged(model: PeftModel) -> PreTrainedModel:
    """Return the model inside PEFT's, with the adapters merged into its weights.

    Modules that share a weight of which one has an adapter, such as a tied head, no longer share it: each
    gets its own, and the configuration says so (`tie_word_embeddings`). PEFT would change the weight of both.
    """
    if tied_modules(model):
        base = base_of(model)
        always = _tied_always(model)
        for places in _shared_parameters(base):
            if [place.name for place in places] in always:
                continue
            for place in places[1:]:
                parameter = getattr(place.module, place.key)
                separate = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(place.module, place.key, separate)
        _set_untied(base.config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_TIED_WARNINGS)
        return model.merge_and_unload()


def tied_modules(model: nn.Module) -> list[list[str]]:
    """Return the names of modules that share a parameter, where one of them has an adapter; none for a model
    without adapters."""
    shared = [places for places in _shared_parameters(base_of(model)) if any(p.adapted for p in places)]
    return [[place.name for place in places] for places in shared]


class _Place(NamedTuple):
    """A module's parameter: the module's name without PEFT's parts, and whether it has an adapter."""

    name: str
    module: nn.Module
    key: str
    adapted: bool


def _shared_parameters(model: nn.Module) -> list[list[_Place]]:
    """Return where parameters are that several modules have."""
    places: dict[int, list[_Place]] = defaultdict(list)
    for path, module in model.named_modules():
        name = path.removesuffix(".base_layer")
        for key, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append(_Place(name, module, key, name != path))
    return [each for each in places.values() if len(each) > 1]


def _tied_always(model: nn.Module) -> list[list[str]]:
    """Return the names of modules that share a parameter in a model whose configuration ties nothing."""
    config = copy.deepcopy(base_of(model).config)
    _set_untied(config)
    empty = empty_model(original_class(base_of(model)), config)
    return [] if empty is None else [[p.name for p in places] for places in _shared_parameters(empty)]


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether a configuration, or one in it, says that the head's weight is the embeddings'."""
    return any(getattr(section, TIED, False) for section in _parts(config))


def _set_untied(config: PreTrainedConfig) -> None:
    """Have a configuration, and those in it, say that modules have weights of their own."""
    for section in _parts(config):
        if getattr(section, TIED, False):
            setattr(section, TIED, False)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and those in it."""
    yield config
    for key in config.sub_configs:
        if (section := getattr(config, key, None)) is not None:
            yield from _parts(section)
