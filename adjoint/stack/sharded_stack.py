"""A `Stack` whose layers workers hold (`engine.sharded_model.ShardedModel`)."""

from __future__ import annotations

from typing import Self, cast

import torch
from torch import nn

from adjoint.engine.chunk_size import Sizes, sizes_of_layers, state_numel
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage, costs_of
from adjoint.layers import Block, StackConfig, State
from adjoint.layers.bidirectional_mixer import directions_of
from adjoint.layers.init import draw_seed
from adjoint.layers.mixer import reach_of
from adjoint.parallel.tensor import reads_windows
from adjoint.stack.calls import Stack


class ShardedStack:
    """A `Stack` of which each worker holds consecutive layers: see `ShardedModel`."""

    embedding, head = "embedding.weight", "lm_head.weight"
    has_layer_stages, draws_numbers = True, False
    documents: tuple[int, ...] | None = None

    def __init__(self, config: StackConfig) -> None:
        stack, self.source = self.without_weights(config), config
        self.n_layer, self.d_model, self.tie_embeddings = (
            config.n_layer,
            config.d_model,
            config.tie_embeddings,
        )
        self.names = tuple(name for name, _ in stack.named_parameters())
        self.num_parameters, self.costs = stack.num_parameters(), costs_of(stack.all_stages())
        if config.bidirectional is not None:
            *_, head = self.costs
            layers = [config.strands * _products(layer) for layer in stack.blocks()]
            self.costs = 0.0, *layers, config.strands * head
        grows, both = [layer.mixer.grows for layer in stack.blocks()], config.bidirectional is not None
        self.stateful = tuple(both or bool(dims) for dims in grows)
        self.exchanges_within_tiles = any(dim is not None for dims in grows for dim in dims)
        self.reach, self.state_elements = reach_of(config), sum(map(_state_elements, stack.blocks()))

    @staticmethod
    def without_weights(config: StackConfig) -> Stack:
        """Return a stack whose tensors take no memory."""
        with torch.device("meta"):
            return Stack(config, seed=0)

    def in_precision(self, precision: str) -> Self:
        return self

    def sizes(self, precision: str, device: str, recompute: str, weights_on_host: bool = False) -> Sizes:
        config, stored = self.source, 8 if precision == "float64" else 4
        element = 2 if precision == "bfloat16" and device == "cuda" else stored
        return sizes_of_layers(config, element, self.state_elements * stored, recompute, weights_on_host)

    def make_part(
        self,
        span: range,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None = None,
        group: object = None,
    ) -> Stack:
        stack = self.without_weights(self.source).split(span).to_empty(device="cpu")
        if self.tie_embeddings and stack.is_first and stack.is_last:
            stack.lm_head.weight = stack.embedding.weight  # to_empty made two of one
        if seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                drawn = draw_seed()
            stack.reset_parameters(drawn)
        if group is not None:
            stack.parallelize(group, "cluster.tensor", same_weights=True)
        return stack.to(device, dtype)

    def stages(self, span_module: nn.Module, span: range, spec: EngineSpec) -> list[Stage | None]:
        return cast(Stack, span_module).stages(spec.storage.recompute, reads_windows(spec))

    def stage_states(
        self, span_module: nn.Module, span: range, rows: int, states: list[State] | None = None
    ) -> list[State]:
        stack = cast(Stack, span_module)
        return stack.stage_states(stack.initial_state(rows) if states is None else states)


def _products(layer: Block) -> float:
    """Return the multiply-adds per token of a layer, where tied projections count for each direction."""
    return float(sum(p.numel() for _, p in layer.named_parameters(remove_duplicate=False) if p.dim() > 1))


def _state_elements(layer: Block) -> int:
    """Return the elements of a layer's recurrent state in one row."""
    mixer, state = layer.mixer, layer.mixer.initial_state(1, torch.float32, torch.device("meta"))
    if not mixer.grows:  # of layers that read in both directions, whose scans begin at zeros
        return sum(map(state_numel, directions_of(mixer)))
    return sum(s.numel() for s, dim in zip(state, mixer.grows, strict=True) if dim is None)
