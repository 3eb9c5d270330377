"""Transformers models in shards: a span of layers each, whose cache is the state."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from adjoint.checkpoint import StoredTensors
from adjoint.cluster.shard import PipelineWorker
from adjoint.engine.chunk_size import memory_of
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage
from adjoint.errors import UserError
from adjoint.hf.model_parts import PassThrough, backbone_of
from adjoint.hf.split import Pretrained, verify_description
from adjoint.hf.transformers_api import loads_unchanged
from adjoint.hf.verify.trial_copy import duplicate_layers
from adjoint.layers import State
from adjoint.layers.init import drawn_from
from adjoint.methods import Method, check_wrapped_method
from adjoint.plan.planned_pretrained import outlined
from adjoint.plan.stage_memory import Uncountable
from adjoint.train.pretrained import KEY, configuration, damaged_weights


class PretrainedPipelineWorker(PipelineWorker):
    """A `PipelineWorker` whose `spec.model` is a `Pretrained`, with weights from a checkpoint."""

    def _make_part(self, drawn: bool) -> PreTrainedModel:
        span = self.spec.spans[self.spec.shard]
        self.found = pretrained = self.spec.model.in_precision(self.spec.precision)
        self.embedding_name, self.head_name = pretrained.embedding, pretrained.head
        self.costs = tuple(sum(pretrained.costs[k] for k in s) for s in self.spec.spans)
        dtype = self.spec.dtype
        span_model = pretrained.make_part(pretrained.make_empty_model(), span)
        for module in span_model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    storage = torch.empty_like(parameter, device=self.device, dtype=dtype)
                    setattr(module, name, torch.nn.Parameter(storage, parameter.requires_grad))
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    buffer_dtype = dtype if buffer.is_floating_point() else buffer.dtype
                    module._buffers[name] = buffer.to(self.device, buffer_dtype)
        for name, buffer in span_model.named_buffers():  # those of the model that was examined, to the bit
            if name in pretrained.buffers:
                buffer.copy_(pretrained.buffers[name])
        if pretrained.tie_embeddings and self.is_first and self.is_last:
            span_model.get_output_embeddings().weight = span_model.get_input_embeddings().weight
        return span_model.train()

    def _stages(self, engine_spec: EngineSpec) -> list[Stage | None]:
        self.part.train(torch.is_grad_enabled())  # it may have dropout
        stages: list[Stage | None] = [None] * self.shards
        recompute = self.spec.method.storage.recompute
        span = self.spec.spans[self.spec.shard]
        stages[self.spec.shard] = self.found.make_stage(self.part, span, recompute)
        return stages

    def _states(self, rows: int, states: list[State] | None = None) -> list[State]:
        return [self.found.initial_states(span, rows, self.device) for span in self.spec.spans]

    def drawing(self, number: int) -> contextlib.AbstractContextManager[None]:
        return drawn_from(self.spec.training.seed, number, self.spec.rank)

    def _spec(self, seqlen: int, chunk_size: int) -> EngineSpec:
        return self.spec.method.engine_spec(seqlen, chunk_size, (0,))

    def chunk_size(self, batch: int, seqlen: int) -> int:
        element = 2 if self.spec.precision == "bfloat16" else self.spec.dtype.itemsize
        device, method = self.device, self.spec.method
        on = device.type, memory_of(device)
        picked = self.found.chunk_size(batch, seqlen, element, *on, method.storage.checkpoints)
        size = self.spec.layout.at_most(picked, seqlen)
        return method.engine_spec(seqlen, size, (0,)).chunk_size


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
