"""A transformers model as the planner sees it; it needs a configuration alone.

The model is made of fake tensors, so no weight is read. Its pieces, embedding, single layers and head, are
counted one by one, with the stages that train."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine.stage import Stage
from adjoint.engine.tile import MAX_PENDING_BYTES
from adjoint.hf.cache import ChunkCache, Slot
from adjoint.hf.model_parts import backbone_of
from adjoint.hf.split import Pretrained, ShardedPretrained
from adjoint.hf.stage import Backbone, CausalLM
from adjoint.layers import StackConfig, State
from adjoint.methods import ModelKind
from adjoint.plan.model_sizes import EMBEDDING, HEAD, LayerSize, Model, sizes_of, width
from adjoint.plan.outline import countable
from adjoint.plan.stage_memory import Conditions, fake_tensors

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel


WIDEST = 1024  # d_model of the layer that is timed in the place of a model's own


class PretrainedModel(Model):
    """A causal LM of transformers."""

    kind: ModelKind = "wrapped"
    values_apart: ClassVar[bool] = False
    waiting: ClassVar[float] = MAX_PENDING_BYTES

    def __init__(self, pretrained: Pretrained) -> None:
        self.config = pretrained.config.get_text_config()
        self.caches = ChunkCache(pretrained.config).layers
        super().__init__(ShardedPretrained(pretrained))
        self.largest_end = self.table

    def _modules(self, spans: Sequence[range]) -> tuple[nn.Module, Sequence[nn.Module], list[nn.Module]]:
        model, source = self._fake_model(torch.float32)[1], self.source
        layers = getattr(backbone_of(model), source.layers)
        return model, layers, [source.make_part(model, span) for span in spans]

    def _size(self, k: int, layer: nn.Module) -> LayerSize:
        slots, narrow = _slots_of_layer(self.source.slots, k), _slots_of_layer(self.source.autocast, k)
        window = getattr(self.caches[k], "window", None) if k < len(self.caches) else None
        recurrent = sum(math.prod(slot.shape) for slot in slots if slot.name == "recurrent")
        heads = getattr(self.config, "num_attention_heads", 0)
        described = layer, [(s.name, s.index, s.shape) for s in slots], window, self.source.outputs[k]
        return LayerSize(
            "\n".join(map(str, described)),
            *sizes_of(layer.parameters()),
            casts=0,  # autocast makes them again in every tile
            state=sum(math.prod(slot.shape) for slot in slots if slot.grows is None),
            grown=sum(_width(slot) for slot in slots),
            narrow=sum(_width(slot) for slot in narrow if slot.dtype == torch.bfloat16),
            flops=2 * self.sharded.costs[1 + k] + 8 * recurrent,
            pairs=2.0 * heads * sum(slot.shape[-1] for slot in slots if slot.grows is not None),
            serial=8.0 * recurrent,
            window=window,
            heads=heads,
        )

    def _fake_model(self, dtype: torch.dtype) -> tuple[FakeTensorMode, PreTrainedModel]:
        """Return a FakeTensorMode and the model made in it."""
        if dtype not in self.fakes:
            with fake_tensors(dtype) as mode, mode, self._countable():
                self.fakes[dtype] = mode, self.source.kind(copy.deepcopy(self.source.config)).train()
        return self.fakes[dtype]

    def stage(self, piece: int, on: Conditions) -> tuple[FakeTensorMode, Stage, State]:
        pretrained, n = self.source.in_precision(on.precision), self.n_layer
        mode, model = self._fake_model(on.dtype)
        span = {EMBEDDING: range(0), HEAD: range(n, n)}.get(piece, range(piece, piece + 1))
        slots = [] if on.plain else _slots_of_layer(pretrained.slots, piece)
        multiplier = None if piece == EMBEDDING else 1.0
        with fake_tensors(on.dtype), mode:
            piece_model = pretrained.make_part(model, span)
            state = tuple(
                torch.zeros(on.batch, *s.shape, dtype=on.dtype if s.grows is None else s.dtype) for s in slots
            )
            if on.plain:
                return mode, _Plain(piece_model, multiplier, piece == HEAD), state
            if piece == HEAD:
                return mode, CausalLM(piece_model, [], multiplier), state
            return mode, Backbone(piece_model, slots, multiplier, on.recompute), state

    def stand_in(self) -> StackConfig:
        width = min(WIDEST, self.d_model)
        return StackConfig(d_model=width, d_intermediate=4 * width, n_layer=1, mixer="attention")

    def _countable(self) -> contextlib.AbstractContextManager[None]:
        return countable(self.source.kind)

    def described(self) -> dict[str, object]:
        return {
            "class": self.source.kind.__name__,
            "vocab_size": self.config.vocab_size,
            "d_model": self.d_model,
            "n_layer": self.n_layer,
            "tie_embeddings": self.tie_embeddings,
        }


class _Plain(Backbone):
    """A piece that runs by transformers' own code."""

    def __init__(self, piece_model: PreTrainedModel, multiplier: float | None, head: bool) -> None:
        super().__init__(piece_model, [], multiplier)
        self.chunk_context = contextlib.nullcontext
        self.head = head

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        inputs = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        if self.head:
            return self.model(**inputs, labels=chunk.targets).loss, ()
        return self.backbone(**inputs)[0], ()


def _slots_of_layer(slots: Sequence[Slot], layer: int) -> list[Slot]:
    return [slot for slot in slots if slot.layer == layer]


def _width(slot: Slot) -> int:
    """Return the elements per token of a growing slot; 0 for a recurrent one."""
    return 0 if slot.grows is None else width(slot.shape, slot.grows - 1)
