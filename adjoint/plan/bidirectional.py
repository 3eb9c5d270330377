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

from adjoint.layers import StackConfig
from adjoint.plan.memory import PARTS, RESERVED, Memory, Setup, edges_of, pinned, weights
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.stack import Stack

FEW_LAYERS = 3, 5
FEW_CHUNKS = 3, 5
FEW_TOKENS = 1024, 2048  # of plain autograd, which has one chunk


def memory_of(setup: Setup) -> Memory:
    """Return the memory of the only worker of a setup whose layers read in both directions."""
    config, machine, spec, span = setup.model.source, setup.machine, setup.spec, range(setup.model.n_layer)
    parts = dict.fromkeys(PARTS, 0) | weights(setup, span, True, True)
    parts["ids"] = 2 * 8 * setup.batch * setup.seqlen
    largest = max(setup.model.largest_end, *(layer.largest for layer in setup.model.layers))
    if not setup.plain_autograd:
        parts["states"] = sum(map(setup.state, span)) * edges_of(setup)
    work = _peak(setup) - sum(parts[name] for name in ("weights", "gradients", "ids", "states"))
    row, host = config.strands * setup.y(setup.seqlen), 0
    if not setup.plain_autograd or setup.method.checkpoints_layers:  # layers' inputs, and sums before MLPs
        inputs = len(span) * (1 + bool(config.d_intermediate)) * row
        parts["kept"] = min(inputs, max(0, int(work)))
    work -= parts["kept"]
    if spec.storage.offload and machine.kind == "cuda":
        host = sum(pinned(setup.state(k) * edges_of(setup)) for k in span)
        host += round(parts["kept"] / row) * pinned(row)
        parts |= {"kept": 0, "states": 3 * sum(map(setup.state, span))}
    parts["chunk"] = max(int(work), 2 * machine.element * largest)  # or AdamW's step of one tensor
    fixed, share = RESERVED[machine.kind]
    parts["reserved"] = int(fixed + share * sum(parts.values())) if machine.reserve else 0
    return Memory(parts, host)


def _peak(setup: Setup) -> float:
    """Return the bytes of all tensors at the peak of a step, weights and gradients included."""
    config, size = setup.model.source, setup.seqlen if setup.plain_autograd else setup.spec.chunk_size
    few = FEW_TOKENS if setup.plain_autograd else tuple(n * size for n in FEW_CHUNKS)
    lengths = few if setup.seqlen > few[-1] else (setup.seqlen,)
    is_uniform = len(set(config.mixers)) == 1
    depths = FEW_LAYERS if is_uniform and config.n_layer > FEW_LAYERS[-1] else (config.n_layer,)
    shares = _shares(lengths, setup.seqlen), _shares(depths, config.n_layer)
    terms = zip(itertools.product(lengths, depths), itertools.product(*shares), strict=True)
    return sum(a * b * _counted(setup, tokens, n_layer) for (tokens, n_layer), (a, b) in terms)


def _shares(points: Sequence[int], at: int) -> tuple[float, ...]:
    """Return the factors by which values at one or two points add up to that of the line at `at`."""
    if len(points) == 1:
        return (1.0,)
    first, last = points
    share = (at - first) / (last - first)
    return 1 - share, share


def _counted(setup: Setup, tokens: int, n_layer: int) -> int:
    """Return the peak of a step on fake tensors; steps that are alike are counted once."""
    machine, spec, is_plain = setup.machine, setup.spec, setup.plain_autograd
    checkpoint = setup.method.checkpoints_layers
    on = Conditions(setup.batch, tokens, 0, machine.precision, machine.kind, spec.storage.recompute)
    key = on, n_layer, is_plain, checkpoint, 0 if is_plain else spec.chunk_size, spec.storage.checkpoints
    if key not in setup.model.tasks:
        config: StackConfig = setup.model.source
        if n_layer != config.n_layer:
            config = dataclasses.replace(config, mixer=config.mixers[0], n_layer=n_layer)
        with fake_tensors(on.dtype) as mode, counting(on, mode) as live:
            stack, ids = Stack(config, 0), torch.zeros(setup.batch, tokens, dtype=torch.long)
            by_chunks = None if is_plain else spec
            stack.masked_loss(ids, ids.clone(), by_chunks, checkpoint).backward()
        setup.model.tasks[key] = live.peak
    return setup.model.tasks[key]
