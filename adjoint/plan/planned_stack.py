"""A `Stack` as the planner sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from adjoint.engine.chunk_size import state_numel
from adjoint.engine.grid import EngineSpec
from adjoint.engine.sharded_model import ModelSource
from adjoint.engine.stage import Stage, check_windows
from adjoint.layers import MIXERS, Block, Mixer, StackConfig, State
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.bidirectional_mixer import directions_of
from adjoint.methods import Method
from adjoint.plan.model_sizes import EMBEDDING, HEAD, LayerSize, Model, sizes_of, width
from adjoint.plan.stage_memory import Conditions, fake_tensors
from adjoint.stack import Stack
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.config import plain

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


class StackModel(Model):
    """A `Stack`, by the configuration of the complete one."""

    def __init__(self, config: StackConfig) -> None:
        self.strands = config.strands
        self.kind = "stack" if config.bidirectional is None else "bidirectional"
        super().__init__(ShardedStack(config))

    def _modules(self, spans: Sequence[range]) -> tuple[nn.Module, Sequence[nn.Module], list[nn.Module]]:
        stack = ShardedStack.without_weights(self.source)
        return stack, stack.blocks(), [stack.split(span) for span in spans]

    def _size(self, k: int, layer: nn.Module) -> LayerSize:
        assert isinstance(layer, Block)
        config, grows = self.source, layer.mixer.grows
        state = layer.mixer.initial_state(1, torch.float32, torch.device("meta"))
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
            flops=2 * self.sharded.costs[1 + k] + serial,  # two operations a weight
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

    def adapted_spec(self, spec: EngineSpec, method: Method) -> EngineSpec:
        check_windows(self.source, spec)
        # scans of bidirectional layers keep no tapes
        return spec.without_tapes() if self.kind == "bidirectional" and method.has_chunks else spec

    def described(self) -> dict[str, object]:
        return plain(dataclasses.asdict(self.source))


def model_of(source: ModelSource) -> Model:
    """Return the planner's view of a StackConfig or a `Pretrained`."""
    if isinstance(source, StackConfig):
        return StackModel(source)
    from adjoint.hf.split import Pretrained
    from adjoint.plan.planned_pretrained import PretrainedModel

    assert isinstance(source, Pretrained)
    return PretrainedModel(source)
