"""Inner names of transformers that we use, and the differences between its releases.

Other files import names of transformers' inner modules from here, else from its top level alone. What only
some releases have is looked up by name; a feature that needs it refuses by name where it is missing.
`adjoint.releases` says which releases are tested.

Raises:
    UserError: on import, if this release lacks a name without which nothing runs by chunks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TypeVar

import torch
import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from adjoint import releases
from adjoint.errors import UserError

try:
    from transformers import cache_utils
    from transformers.activations import ACT2FN
    from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import (
        CausalLMOutputWithPast,
        MoeCausalLMOutputWithPast,
        MoeModelOutputWithPast,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import ModelOutput
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise UserError(
        f"adjoint.wrap: {releases.untested('transformers')}transformers {transformers.__version__} lacks a "
        f"name that chunks need ({error}): pip install '{releases.requirement('transformers')}'"
    ) from error

__all__ = [
    "ACT2FN",
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "CausalLMOutputWithPast",
    "GradientCheckpointingLayer",
    "LinearAttentionLayer",
    "ModelOutput",
    "MoeCausalLMOutputWithPast",
    "MoeModelOutputWithPast",
    "sdpa_attention_forward",
    "sdpa_mask",
    "transformers_logging",
]

T = TypeVar("T")
MODELS = "transformers.models."  # the beginning of the names of the Python modules that define models
RELEASE = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])


def optional(module: str, name: str) -> object:
    """Return a name of one of transformers' inner modules, or None where this release has none."""
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name, None)
    except ImportError:
        return None


# ---------------------------------------------------------------------------------- the cache among arguments

# Names of the cache among a forward's arguments and an output's fields, the newest first. Since 5.24 it is
# "cache" everywhere; the older names, of attention models and of Mamba, are taken until 5.40.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
# The field of outputs that holds it.
CACHE_FIELD = next(name for name in CACHE_NAMES if name in _fields)


def cache_argument(parameters: Mapping[str, object]) -> str:
    """Return the name under which a forward with these parameters takes the cache.

    One that names no cache passes its keyword arguments on to modules of this release."""
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_FIELD)


def named_cache(arguments: dict[str, object], parameters: Mapping[str, object]) -> dict[str, object]:
    """Return a call's arguments with the cache under the name that a forward with these parameters takes.

    Raises:
        UserError: it is given under two names, and they are different caches; or the forward takes its state
            in another form.
    """
    names = [name for name in CACHE_NAMES if arguments.get(name) is not None]
    if not names:
        return arguments
    name = cache_argument(parameters)
    if "state" in parameters and name not in parameters:  # RWKV-4
        raise UserError(f"{names[0]} is not read by this model's forward, which takes its state as `state`")
    if names == [name]:
        return arguments
    if any(arguments[other] is not arguments[names[0]] for other in names):
        raise UserError(f"{' and '.join(names)} are different caches: give one of them")
    others = {n: value for n, value in arguments.items() if n not in CACHE_NAMES}
    return {**others, name: arguments[names[0]]}


def with_cache_names(kind: type[T]) -> type[T]:
    """Give a class of outputs the cache's other names, without transformers' warnings about them."""
    for name in CACHE_NAMES:
        if name != CACHE_FIELD:
            setattr(kind, name, property(operator.attrgetter(CACHE_FIELD)))
    return kind


def holds_tokens(cache: object) -> bool:
    """Whether a cache of transformers holds the state of any token."""
    if not isinstance(cache, Cache):
        return cache is not None
    lengths = (layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    has_linear_states = any(isinstance(state, torch.Tensor) for state in getattr(cache, "linear_cache", ()))
    return has_linear_states or any(map(bool, lengths)) or has_recurrent_states(cache)


def has_recurrent_states(cache: object) -> bool:
    """Whether a cache's layers hold recurrent states."""
    layers = cache.layers if isinstance(cache, Cache) else ()
    return any(any(getattr(layer, "has_previous_state", {}).values()) for layer in layers)


# ----------------------------------------------------------------------------------------------- cache layers

# Cache layers are looked up by name: `DynamicIndexedLayer` is there since 5.11, a recurrence beside a sliding
# window since 5.14, `DummyLayer` (of layers without a state) since 5.22.
CACHE_LAYERS: dict[str, type] = {
    name: kind
    for name in (
        "DynamicLayer",
        "DynamicIndexedLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
    if (kind := getattr(cache_utils, name, None)) is not None
}
# The cache class that a model checks for, by model_type: prefix of our subclass's name, module, class.
REQUIRED_CACHE_CLASS = {
    "minimax": ("MiniMax", "transformers.models.minimax.modeling_minimax", "MiniMaxCache")
}

# Cache classes that are none of `Cache`, by model_type: module, class.
STATE_CACHE_CLASS = {"xlstm": ("transformers.models.xlstm.modeling_xlstm", "xLSTMCache")}


def recurrent_layers_unnamed(config: PreTrainedConfig) -> list[int]:
    """Return the layers that are recurrent where the cache that this release makes has attention alone.

    Before 5.22 RecurrentGemma kept its states on its modules."""
    if config.model_type != "recurrent_gemma":
        return []
    layers = DynamicCache(config=config).layers
    kinds = enumerate(config.layers_block_type)
    return [k for k, kind in kinds if kind == "recurrent" and not isinstance(layers[k], LinearAttentionLayer)]


# Models that run some layers in loops, by model_type: attributes for the first of these layers, for the one
# after the last (None where the configuration counts them), and for the number of loops.
_LOOPS = {
    "inkling2_loop_text": ("loop_layer_index_start", "loop_layer_index_end", "loop_num_passes"),
    "dory": ("n_input_layers", None, "n_recurrent_loops"),
}


def looped_layers(config: PreTrainedConfig) -> list[int]:
    """Return the layers that run again, in the order in which they do.

    Each such run has cache layers of its own, which follow those of the model's layers."""
    if config.model_type not in _LOOPS:
        return []
    first, end, loops = _LOOPS[config.model_type]
    start = getattr(config, first)
    stop = start + config.n_recurrent_layers if end is None else getattr(config, end)
    return [*range(start, stop)] * (getattr(config, loops) - 1)


def keeps_states_on_modules(config: PreTrainedConfig) -> bool:
    """Whether a model's own forward keeps its recurrent states on its modules, and returns no cache."""
    return config.model_type == "recurrent_gemma"


# Before 5.14 a layer had a single state, with which mixers began calls of one token alone.
BEGINS_WITH_STATES = RELEASE >= (5, 14)
# Before 5.10 the Trainer multiplies a loss by the number of all processes, also of those with the same rows.
SCALES_BY_ALL_PROCESSES = RELEASE < (5, 10)


# -------------------------------------------------------------------------------------------------- functions

_HUB_KERNELS = "integrations.hub_kernels"
# The logger that says where transformers runs PyTorch code because a kernel is missing.
FALLBACK_LOGGER = f"transformers.{_HUB_KERNELS}"


def tensor_parallel_style(name: str) -> object:
    """Return the style by which transformers splits a module over ranks, by its name in a model's plan, or
    None."""
    styles = optional("distributed.tensor_parallel", "ALL_PARALLEL_STYLES")  # since 5.16
    return styles.get(name) if isinstance(styles, Mapping) else None


def is_hub_function(function: object) -> bool:
    """Whether transformers runs a function by another library if that is installed.

    Then `function.__wrapped__` is its own code."""
    if not hasattr(function, "__wrapped__"):  # first: asked of every function of a model's Python modules
        return False
    kernels = optional("integrations", "hub_kernels")
    return kernels is not None and getattr(function, "__globals__", None) is vars(kernels)


def expert_functions() -> MutableMapping[str, Callable[..., object]]:
    """Return the namespace in which transformers looks up the functions of its mixtures of experts; empty
    where there is none."""
    module = optional("integrations", "moe")
    return {} if module is None else vars(module)


def use_float64_experts(model: nn.Module) -> None:
    """Let a model in float64 multiply with each expert by itself, as the default, grouped products, takes no
    float64; leave others as they are."""
    if not isinstance(model, PreTrainedModel) or model.dtype != torch.float64:
        return
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def install_output_hooks(backbone: nn.Module) -> None:
    """Register the hooks by which transformers collects hidden states and routers' logits.

    It does so itself in the first call that asks for them."""
    if callable(install := optional("utils.output_capturing", "maybe_install_capturing_hooks")):
        install(backbone)


# --------------------------------------------------------------------------------------- loading and sharding


def distributed_config_class() -> type | None:
    """Return transformers' `DistributedConfig`, of tensor parallelism, or None."""
    kind = optional("distributed.configuration_utils", "DistributedConfig")
    return kind if isinstance(kind, type) else None


def loads_unchanged(model: PreTrainedModel) -> bool:
    """Whether a checkpoint's tensors are the model's parameters, under its own names or others."""
    mapping = optional("conversion_mapping", "get_model_conversion_mapping")
    renaming = optional("conversion_mapping", "WeightRenaming")
    return callable(mapping) and all(type(change) is renaming for change in mapping(model))


def empty_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel | None:
    """Return a model of a class that occupies no memory, as transformers makes one before it loads weights,
    in `dtype` or the configuration's; None if the class cannot be made so."""
    safe_creation = optional("initialization", "meta_device_safe_creation_ops")
    config = copy.deepcopy(config)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.device("meta"))
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        if callable(safe_creation):
            contexts.enter_context(safe_creation())
        try:
            return kind._from_config(config, **({} if dtype is None else {"dtype": dtype}))
        except Exception:  # of code that comes with a folder, whatever it does with tensors without memory
            return None


def loaded_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Map the names of a folder's tensors to the names of the model's that transformers makes of them, alone
    or with others; a tensor that is not loaded is left out."""
    rename = optional("core_model_loading", "rename_source_key")
    renaming = optional("core_model_loading", "WeightRenaming")
    converter = optional("core_model_loading", "WeightConverter")
    changes = getattr(model, "_weight_conversions", None) or []
    tensors, prefix = model.state_dict(), model.base_model_prefix
    renamings = [change for change in changes if isinstance(renaming, type) and isinstance(change, renaming)]
    converters = [
        change for change in changes if isinstance(converter, type) and isinstance(change, converter)
    ]
    names: dict[str, str] = {}
    for name in stored:
        candidates = [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
        if callable(rename):
            candidates.insert(0, rename(name, renamings, converters, prefix, tensors)[0])
        if (loaded := next((each for each in candidates if each in tensors), None)) is not None:
            names[name] = loaded
    return names
