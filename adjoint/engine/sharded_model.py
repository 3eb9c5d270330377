"""`ShardedModel`: what workers that hold a model's layers, and planners, ask of it.

`stack.sharded_stack.ShardedStack` and `hf.split.ShardedPretrained` implement it."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import nn

from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage
from adjoint.layers import State


class ModelSource(Protocol):
    """A StackConfig, or `hf.split.Pretrained`."""

    @property
    def n_layer(self) -> int: ...


class ShardedModel(Protocol):
    """A model of which each worker holds consecutive layers; plain values, which are sent to workers.

    Attributes:
        source: what it was made from.
        n_layer, d_model, num_parameters, tie_embeddings: of the complete model.
        names: of its parameters, in the model's order; a tied table has the embedding's name.
        embedding, head: names of the tables at both ends.
        costs: multiply-adds per token of the embedding, of each layer and of the head.
        stateful: whether each layer has a state. reach: as in `Grid`.
        has_layer_stages: whether each layer can be a stage; else each shard is one.
        exchanges_within_tiles: whether workers that share sequences do (see `Grid`): for keys and values, and
            where stages are always many layers, whose states cross one by one.
        draws_numbers: whether a forward draws random numbers, such as dropout's masks.
        documents: as `Method.engine_spec` takes them.
    """

    n_layer: int
    d_model: int
    num_parameters: int
    tie_embeddings: bool
    names: tuple[str, ...]
    embedding: str
    head: str
    costs: tuple[float, ...]
    stateful: tuple[bool, ...]
    reach: int
    has_layer_stages: bool
    exchanges_within_tiles: bool
    draws_numbers: bool
    documents: tuple[int, ...] | None

    @property
    def source(self) -> ModelSource: ...

    def in_precision(self, precision: str) -> Self:
        """Return the model with the states of "float32", "bfloat16" (autocast) or "float64"."""

    def sizes(self, precision: str, device: str, recompute: str, weights_on_host: bool = False) -> Sizes:
        """Return the memory of one row, from which the chunk size follows.

        Args:
            device: "cpu" or "cuda". recompute: as in `Exact`. weights_on_host: as in `Sizes`.
        """

    def make_part(
        self,
        span: range,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None = None,
        group: object = None,
    ) -> nn.Module:
        """Return a module with the layers of `span`, the embedding if it is first, the head if it is last.

        Args:
            seed: its weights are what one process draws after `torch.manual_seed(seed)`. None, and a
                pretrained model, leave them undefined.
            group: the process group whose ranks split each weight, or None.
        """

    def stages(self, span_module: nn.Module, span: range, spec: EngineSpec) -> list[Stage | None]:
        """Return a stage for the embedding, each layer and the head, None for what is not here.

        Without `has_layer_stages` the first layer's stands for all that is here.

        Args:
            span_module: from `make_part`, with the layers `span`.
        """

    def stage_states(
        self, span_module: nn.Module, span: range, rows: int, states: list[State] | None = None
    ) -> list[State]:
        """Return each stage's state before a sequence, () for those that are not here.

        Args:
            span_module, span: as in `stages`. states: of these layers; None for zeros.
        """


def layer_costs(model: ShardedModel) -> tuple[float, ...]:
    """Return the times of a model's layers relative to each other; the last one includes the head."""
    _, *costs, last, head = model.costs
    return *costs, last + head
