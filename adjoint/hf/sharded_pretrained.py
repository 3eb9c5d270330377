"""A transformers model whose layers workers hold (`engine.sharded_model.ShardedModel`)."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage
from adjoint.hf.chunking import sizes_of
from adjoint.hf.split import Pretrained
from adjoint.hf.transformers_api import use_float64_experts
from adjoint.layers import State


class ShardedPretrained:
    """A causal LM of transformers of which each worker holds consecutive layers: see `ShardedModel`.

    A shard is one stage, whose cache is the state. It loads its weights from a checkpoint."""

    has_layer_stages, exchanges_within_tiles, draws_numbers = False, True, True  # it may have dropout
    documents: tuple[int, ...] | None = (0,)
    reach = 0

    def __init__(self, pretrained: Pretrained) -> None:
        self.source, self.n_layer, self.d_model = pretrained, pretrained.n_layer, pretrained.d_model
        self.num_parameters, self.tie_embeddings = pretrained.num_parameters, pretrained.tie_embeddings
        self.names, self.embedding, self.head = pretrained.names, pretrained.embedding, pretrained.head
        *costs, last = pretrained.costs
        head = float(pretrained.config.get_text_config().vocab_size * pretrained.d_model)
        self.costs = (0.0, *costs, last - head, head)
        self.stateful = (True,) * pretrained.n_layer

    def in_precision(self, precision: str) -> ShardedPretrained:
        return ShardedPretrained(self.source.in_precision(precision))

    def sizes(self, precision: str, device: str, recompute: str, weights_on_host: bool = False) -> Sizes:
        element, slots = {"bfloat16": 2, "float64": 8}.get(precision, 4), self.source.slots
        sizes = sizes_of(self.source.features, slots, element, self.d_model, weights_on_host)
        return dataclasses.replace(sizes, layers=self.n_layer)

    def make_part(
        self,
        span: range,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None = None,
        group: object = None,
    ) -> PreTrainedModel:
        source = self.source
        span_model = source.make_part(source.make_empty_model(), span)
        for module in span_model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    storage = torch.empty_like(parameter, device=device, dtype=dtype)
                    setattr(module, name, nn.Parameter(storage, parameter.requires_grad))
        span_model.to(device, dtype)  # buffers
        use_float64_experts(span_model)
        for name, buffer in span_model.named_buffers():  # those of the model that was examined, to the bit
            if name in source.buffers:
                buffer.copy_(source.buffers[name])
        if self.tie_embeddings and span == range(self.n_layer):
            span_model.get_output_embeddings().weight = span_model.get_input_embeddings().weight
        return span_model.train()

    def stages(self, span_module: nn.Module, span: range, spec: EngineSpec) -> list[Stage | None]:
        span_module.train(torch.is_grad_enabled())  # it may have dropout
        stage = self.source.make_stage(cast(PreTrainedModel, span_module), span, spec.storage.recompute)
        return [stage if k == 1 + span.start else None for k in range(self.n_layer + 2)]

    def stage_states(
        self, span_module: nn.Module, span: range, rows: int, states: list[State] | None = None
    ) -> list[State]:
        zeros = self.source.initial_states(span, rows, next(span_module.parameters()).device)
        return [zeros if k == 1 + span.start else () for k in range(self.n_layer + 2)]
