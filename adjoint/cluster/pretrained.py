"""A shard of a transformers model: a span of its layers, its cache being the state."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from adjoint.cluster.shard import Shard
from adjoint.engine.grid import Scheme
from adjoint.errors import UserError
from adjoint.hf.wrap import chunk_size_for, scheme_of
from adjoint.layers import State
from adjoint.layers.init import drawn_from


class PretrainedShard(Shard):
    """See `Shard`; `spec.model` is a `Pretrained`. Its weights come from a checkpoint."""

    def _make_part(self, drawn: bool) -> Any:
        span = self.spec.spans[self.spec.shard]
        self.found = found = self.spec.model.in_precision(self.spec.precision)
        self.embedding_name, self.head_name = found.embedding, found.head
        self.costs = tuple(sum(found.costs[k] for k in s) for s in self.spec.spans)
        dtype = torch.float64 if self.spec.precision == "float64" else torch.float32
        part = found.part(found.empty(), span)
        for module in part.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    made = torch.empty_like(parameter, device=self.device, dtype=dtype)
                    setattr(module, name, torch.nn.Parameter(made, parameter.requires_grad))
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    wide = dtype if buffer.is_floating_point() else buffer.dtype
                    module._buffers[name] = buffer.to(self.device, wide)
        for name, buffer in part.named_buffers():  # those of the model that was examined, to the bit
            if name in found.buffers:
                buffer.copy_(found.buffers[name])
        if found.tie_embeddings and self.is_first and self.is_last:
            part.get_output_embeddings().weight = part.get_input_embeddings().weight
        return part.train()

    def _stages(self, batch: int, states: list[State] | None = None) -> tuple[list[Any], list[Any]]:
        self.part.train(torch.is_grad_enabled())  # it may have dropout
        stages: list[Any] = [None] * self.shards
        recompute = getattr(self.spec.method, "recompute", "none")
        span = self.spec.spans[self.spec.shard]
        stages[self.spec.shard] = self.found.stage(self.part, span, recompute)
        return stages, [self.found.states(span, batch, self.device) for span in self.spec.spans]

    def _drawing(self, number: int) -> contextlib.AbstractContextManager[None]:
        return drawn_from(self.spec.training.seed, number, self.spec.rank)

    def _scheme(self, batch: int, seqlen: int, chunk_size: int) -> Scheme:
        return scheme_of(self.spec.method, batch, seqlen, self.device.type, chunk_size=chunk_size)

    def chunk_size(self, batch: int, seqlen: int) -> int:
        size = self.spec.layout.at_most(chunk_size_for(batch, self.device.type), seqlen)
        return scheme_of(self.spec.method, batch, seqlen, self.device.type, chunk_size=size).chunk_size

    def generate(
        self, prompt: Tensor, max_new_tokens: int, temperature: float, seed: int, chunk_size: int = 1024
    ) -> Tensor | None:
        raise UserError("training.sample_tokens: a pretrained model in shards gives no samples; set it to 0")
