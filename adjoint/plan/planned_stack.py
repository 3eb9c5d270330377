"""A `Stack` as the planner sees it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from adjoint.engine.chunk_size import Sizes, chunk_size_for, kept_bytes, state_numel
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage, check_windows, costs_of
from adjoint.engine.worker_rules import CutModel
from adjoint.layers import MIXERS, Block, Mixer, StackConfig, State
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.bidirectional_mixer import directions_of
from adjoint.methods import Method, check_bidirectional_method
from adjoint.plan.model_sizes import EMBEDDING, HEAD, LayerSize, Model, sizes_of, width
from adjoint.plan.stage_memory import Conditions, fake_tensors
from adjoint.plan.worker_devices import Machine
from adjoint.stack import Stack
from adjoint.train.config import plain
from adjoint.train.layout import Layout
from adjoint.train.optimizer import share_in_8bit

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


class StackModel(Model):
    """A `Stack`.

    Args:
        config: the configuration of the complete stack.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            stack = Stack(config, 0)
        self.source, self.d_model, self.strands = config, config.d_model, config.strands
        _, *costs, head = costs_of(stack.all_stages())
        if config.bidirectional is not None:  # each direction multiplies with what they share, on each strand
            costs, head = (
                [config.strands * _products(layer) for layer in stack.blocks()],
                config.strands * head,
            )
        self.costs = (*costs[:-1], costs[-1] + head)
        self.table, self.tie_embeddings = config.vocab_size * config.d_model, config.tie_embeddings
        self.first = self.table
        self.last = config.d_model + self.table
        self.parameter_sizes = tuple(p.numel() for p in stack.parameters())
        self.num_parameters, self.in_8bit = stack.num_parameters(), share_in_8bit(stack.parameters())
        self.head_flops = 2.0 * head
        self.layers = tuple(
            self._size(k, layer, cost, state)
            for k, (layer, cost, state) in enumerate(
                zip(stack.blocks(), costs, stack.initial_state(1), strict=True)
            )
        )

    def _size(self, k: int, layer: Block, cost: float, state: State) -> LayerSize:
        config, grows = self.source, layer.mixer.grows
        kind = config.mixers[k]
        mixer = MIXERS.get(kind, Mixer)
        linear = [m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear)]
        grown = sum(width(s.shape, dim) for s, dim in zip(state, grows, strict=True) if dim is not None)
        recurrent = sum(s.numel() for s, dim in zip(state, grows, strict=True) if dim is None)
        if config.bidirectional is not None:
            recurrent = config.strands * sum(map(state_numel, directions_of(layer.mixer)))
        # eight operations per element of the recurrent state, and as many for each further
        # input and output of a token that share it
        serial = 8.0 * mixer.inputs_per_token(config) * recurrent
        return LayerSize(
            kind,
            *sizes_of(layer.parameters()),
            sum(linear),
            recurrent,
            grown,
            grown if kind in MIXERS else 0,
            flops=2 * cost + serial,  # two operations a weight
            # of each query head, two a channel of keys and of values
            pairs=4.0 * mixer.attended_channels(config),
            serial=serial,
            window=config.sliding_window,
            heads=layer.mixer.sizes.heads if mixer is AttentionMixer else 0,
            scans=1 if config.bidirectional is None else 2 * config.strands,
        )

    def stage(self, piece: int, on: Conditions) -> tuple[FakeTensorMode, Stage, State]:
        mode, stack = self._one_layer_stack(piece, on.dtype)
        with fake_tensors(on.dtype), mode:
            initial = stack.initial_state(on.batch)[0] if piece >= 0 else ()
        stage = stack.all_stages(on.recompute)[{EMBEDDING: 0, HEAD: -1}.get(piece, 1)]
        assert stage is not None
        return mode, stage, initial

    def _one_layer_stack(self, piece: int, dtype: torch.dtype) -> tuple[FakeTensorMode, Stack]:
        """Return a stack of fake tensors with one layer like `piece`, and its mode."""
        kind = self.source.mixers[max(piece, 0)]
        if (kind, dtype) not in self.fakes:
            with fake_tensors(dtype) as mode, mode:
                config = dataclasses.replace(self.source, mixer=kind, n_layer=1, complement_map=None)
                self.fakes[kind, dtype] = mode, Stack(config, 0)
        mode, stack = self.fakes[kind, dtype]
        assert isinstance(stack, Stack)
        return mode, stack

    def engine_spec(
        self, method: Method, size: tuple[int, int], layout: Layout, machine: Machine
    ) -> EngineSpec:
        element = 2 if machine.precision == "bfloat16" and machine.kind == "cuda" else machine.element
        rows, seqlen = size
        states = sum(layer.state for layer in self.layers) * machine.element / self.source.strands
        activations: float = kept_bytes(self.source, element, method.storage.recompute)
        if self.source.bidirectional is not None:  # one layer's activations at a time
            check_bidirectional_method(method)
            activations, rows = activations / self.n_layer, rows * self.source.strands
        sizes = Sizes(
            activations,
            states,
            width=self.source.d_model,
            weights_on_host=machine.weights_on_host,
        )
        default = chunk_size_for(
            sizes, rows, seqlen, machine.kind, machine.memory, method.storage.checkpoints
        )
        spec = method.engine_spec(seqlen, layout.chunk_size(method, seqlen, default))
        check_windows(self.source, spec)
        if self.source.bidirectional is not None and method.has_chunks:  # scans keep no tapes
            return spec.without_tapes()
        return spec

    def described(self) -> dict[str, object]:
        return plain(dataclasses.asdict(self.source))


def _products(layer: Block) -> float:
    """Return the multiply-adds per token of a layer, where tied projections count for each direction."""
    return float(sum(p.numel() for _, p in layer.named_parameters(remove_duplicate=False) if p.dim() > 1))


def model_of(model: Model | StackConfig | CutModel) -> Model:
    """Return the planner's view of a StackConfig or a `Pretrained`."""
    if isinstance(model, Model):
        return model
    if isinstance(model, StackConfig):
        return StackModel(model)
    from adjoint.hf.split import Pretrained
    from adjoint.plan.planned_pretrained import PretrainedModel

    assert isinstance(model, Pretrained)
    return PretrainedModel(model)
