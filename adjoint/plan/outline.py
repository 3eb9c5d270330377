"""Descriptions of transformers models from the files of their folders, for planners and layer shards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from adjoint.checkpoint import StoredTensors
from adjoint.errors import UserError
from adjoint.hf.kernels.replacements import rebound_functions
from adjoint.hf.model_parts import PassThrough, backbone_of
from adjoint.hf.split import Pretrained, describe, verify_description
from adjoint.hf.transformers_api import expert_functions, loads_unchanged
from adjoint.hf.verify.trial_copy import duplicate_layers
from adjoint.methods import Method, check_wrapped_method
from adjoint.plan.stage_memory import Uncountable, fake_tensors
from adjoint.train.pretrained import KEY, configuration, damaged_weights


def outlined(directory: str, trust_remote_code: bool = False) -> Pretrained:
    """Describe the causal LM of a folder's config.json: its layers, states and costs.

    The embeddings' multiplier is left at 1: memory does not depend on it.

    Raises:
        UserError: transformers has no causal LM for the configuration, its layers cannot be divided, or its
            code does not run on fake tensors.
    """
    config = configuration(directory, trust_remote_code)
    kind: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise UserError(
            f"{KEY}: {directory}: transformers has no causal LM for a {type(config).__name__}; a model with "
            "code of its own trains in one process or under torchrun, and is not planned"
        )
    try:
        with fake_tensors(torch.float32) as mode, countable(kind), mode:
            model = kind(copy.deepcopy(config))
            return describe(model, torch.zeros(1, 13, dtype=torch.int64))
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None
    except ValueError as error:
        raise UserError(f"{KEY}: {directory}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def countable(kind: type[PreTrainedModel]) -> Iterator[None]:
    """Turn errors of fake tensors into one line that names the class."""
    from torch._subclasses import fake_tensor

    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    # PyTorch's grouped product of matrices says its shape for bfloat16 alone
    functions = expert_functions()
    other = {name: lambda *_: False for name in ("_can_use_grouped_mm",) if name in functions}
    try:
        with rebound_functions([(functions, other)]):
            yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # a ValueError may come of a `Refused`, or of an operator's error inside the model's code
        cause = error.__cause__ or error
        if isinstance(error, ValueError) and not isinstance(cause, (RuntimeError, NotImplementedError)):
            raise
        why = " ".join(str(cause).split())[:120]
        raise Uncountable(
            f"{kind.__name__}: its memory cannot be counted without running it ({why}); train a few steps "
            "and read peak_memory_bytes in metrics.jsonl"
        ) from None
    finally:
        logger.setLevel(level)


# Of what safetensors files call their dtypes, those that loading in float32 does not change.
DTYPES = ("F32", "BF16", "F16")


def described_by_files(directory: str, method: Method, trust_remote_code: bool = False) -> Pretrained | None:
    """Describe the model of a folder for shards that read their weights from its files themselves.

    Memory does not grow with the number of layers: of each third of the model one layer of each kind is read
    for the comparison that `examine` makes, and the tables at both ends.

    Returns:
        None where only transformers' own loading knows what the files hold: they are no safetensors, or have
        other names or shapes than the model's parameters, or the model does not run on fake tensors.

    Raises:
        UserError: the model cannot be cut, or the method is not for it.
    """
    config = configuration(directory, trust_remote_code)
    if damaged := damaged_weights(Path(directory)):
        raise UserError(f"{KEY}: {directory}: {damaged}")
    stored = StoredTensors(Path(directory), "model")
    if not stored.files_by_name or getattr(config, "quantization_config", None) is not None:
        return None
    try:
        pretrained = outlined(directory, trust_remote_code)
    except Uncountable:
        return None
    model = pretrained.make_empty_model()
    if not _has_all(stored, model, pretrained):
        return None
    try:
        check_wrapped_method(method)
        return dataclasses.replace(_read(stored, model, pretrained), slots=pretrained.slots)
    except ValueError as error:
        raise UserError(f"{KEY}: {directory}: {' '.join(str(error).split())}") from None


def _has_all(stored: StoredTensors, model: PreTrainedModel, pretrained: Pretrained) -> bool:
    """Whether the files hold all of a model's parameters unchanged, under the model's own names."""
    if not loads_unchanged(model):
        return False
    if pretrained.tie_embeddings and pretrained.head in stored.files_by_name:
        return False  # perhaps not tied after all
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name == pretrained.head and pretrained.tie_embeddings:
            continue
        if name not in stored.files_by_name:
            return False
        tensor = stored.files_by_name[name].get_slice(name)
        if tensor.get_shape() != list(parameter.shape) or tensor.get_dtype() not in DTYPES:
            return False
    return True


def _read(stored: StoredTensors, model: PreTrainedModel, pretrained: Pretrained) -> Pretrained:
    """Load the layers needed to compare an empty model's spans with the whole model, and compare them."""
    layers = getattr(backbone_of(model), pretrained.layers)
    compared: list[int] = []
    for span in pretrained.trial_spans():
        left_out = duplicate_layers([layers[k] for k in span])
        compared += [k for k in span if not any(layers[k] is layer for layer in left_out)]
    for k, layer in enumerate(list(layers)):
        if k not in compared:
            layers[k] = PassThrough(layer, pretrained.outputs[k])
    with torch.no_grad():
        for name, _ in list(model.named_parameters(remove_duplicate=False)):
            if name != pretrained.head or not pretrained.tie_embeddings:
                module_name, _, parameter = name.rpartition(".")
                model.get_submodule(module_name)._parameters[parameter] = nn.Parameter(stored[name].float())
        for name, buffer in model.named_buffers():
            if name in stored.files_by_name:
                buffer.copy_(stored[name])
    if pretrained.tie_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    few = dataclasses.replace(
        pretrained, slots=tuple(slot for slot in pretrained.slots if slot.layer in compared)
    )
    return verify_description(model, few)
