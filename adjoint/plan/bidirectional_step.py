"""The memory of a stack whose layers read in both directions: a step is counted as one.

No chunk passes through all layers, so that there are no tiles whose programs could be followed. The step
itself runs on fake tensors, of a few tokens and layers, and every storage is counted. Its peak is a constant,
and amounts for each chunk (of plain autograd each token), for each layer, and for each chunk of each layer:
four peaks give these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from adjoint.engine.grid import EngineSpec
from adjoint.layers import StackConfig
from adjoint.plan.model_sizes import Model
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.stack import Stack

FEW_LAYERS = 3, 5
FEW_CHUNKS = 3, 5
FEW_TOKENS = 1024, 2048  # of plain autograd, which has one chunk


def step_peak(model: Model, on: Conditions, spec: EngineSpec | None, checkpoint: bool) -> float:
    """Return the bytes of all tensors at the peak of a step, weights and gradients included.

    Args:
        on: the conditions, of all tokens of the batch.
        spec: the chunks by which layers run; None if autograd goes through them.
        checkpoint: whether autograd then recomputes each layer.
    """
    config: StackConfig = model.source
    few = FEW_TOKENS if spec is None else tuple(n * spec.chunk_size for n in FEW_CHUNKS)
    lengths = few if on.tokens > few[-1] else (on.tokens,)
    is_uniform = len(set(config.mixers)) == 1
    depths = FEW_LAYERS if is_uniform and config.n_layer > FEW_LAYERS[-1] else (config.n_layer,)
    shares = _shares(lengths, on.tokens), _shares(depths, config.n_layer)
    peak = 0.0
    points = itertools.product(lengths, depths)
    for (tokens, n_layer), (a, b) in zip(points, itertools.product(*shares), strict=True):
        peak += a * b * _counted(model, n_layer, on._replace(tokens=tokens), spec, checkpoint)
    return peak


def _shares(points: Sequence[int], at: int) -> tuple[float, ...]:
    """Return the factors by which values at one or two points add up to that of the line at `at`."""
    if len(points) == 1:
        return (1.0,)
    first, last = points
    share = (at - first) / (last - first)
    return 1 - share, share


def _counted(model: Model, n_layer: int, on: Conditions, spec: EngineSpec | None, checkpoint: bool) -> int:
    """Return the peak of a step on fake tensors; steps that are alike are counted once."""
    chunks = None if spec is None else (spec.chunk_size, spec.storage.checkpoints)
    key = on, n_layer, chunks, checkpoint
    if key not in model.tasks:
        config: StackConfig = model.source
        if n_layer != config.n_layer:
            config = dataclasses.replace(config, mixer=config.mixers[0], n_layer=n_layer)
        with fake_tensors(on.dtype) as mode, counting(on, mode) as live:
            stack, ids = Stack(config, 0), torch.zeros(on.batch, on.tokens, dtype=torch.long)
            stack.masked_loss(ids, ids.clone(), spec, checkpoint).backward()
        model.tasks[key] = live.peak
    return model.tasks[key]
