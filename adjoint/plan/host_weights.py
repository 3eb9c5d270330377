"""Weights in host memory (`model.offload weights`): what crosses the link to the device, and when copies hide
behind computation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from adjoint.engine import binomial
from adjoint.plan.memory import Setup

SUSTAINED_LINK = 0.8  # of a link's peak, what copies of pinned memory are assumed to keep up


@dataclass(frozen=True)
class LinkBytes:
    """Bytes between host memory and the device, in a step.

    Attributes:
        to_device: copies of weights, and embeddings. to_host: gradients.
        per_chunk: both directions, on average.
    """

    to_device: int
    to_host: int
    per_chunk: int


def link_bytes(setup: Setup) -> LinkBytes:
    """Return what a step with `Exact` moves.

    A chunk's layers are copied when its forward runs, when it is recomputed, and when the backward recomputes
    each layer; the head's weights twice. The last chunk's forward is the one that its backward needs."""
    model, element, chunks = setup.model, setup.machine.element, setup.chunks
    layers, head = (element * n for n in (sum(layer.weights for layer in model.layers), model.last))
    again, checkpoints = 0, setup.spec.storage.checkpoints
    if checkpoints is not None:  # chunks whose states are computed again
        again = binomial.recomputed_chunks(chunks, checkpoints) - (chunks - 1)
    embeddings, batches = setup.y(setup.seqlen), setup.training.grad_accumulation
    to_device = batches * ((3 * chunks - 1 + again) * layers + (2 * chunks - 1) * head + 2 * embeddings)
    to_host = batches * (chunks * (layers + head) + embeddings)
    return LinkBytes(to_device, to_host, (to_device + to_host) // (batches * chunks))


def in_host_memory(setup: Setup, bytes_per_second: float) -> Setup:
    """Return the setup with the model's weights in host memory; layers are then recomputed."""
    method = setup.method
    if getattr(method, "recompute", None) == "none":
        method = dataclasses.replace(method, recompute="full")
    machine = dataclasses.replace(setup.machine, weights_on_host=True)
    return dataclasses.replace(setup, method=method, machine=machine, host_link=bytes_per_second)


def copy_seconds(setup: Setup, weights: int) -> float:
    """Return the seconds in which so many weights cross the link; 0 if the device has them."""
    return 0.0 if setup.host_link is None else setup.machine.element * weights / setup.host_link


def hiding_chunk(setup: Setup, forward: Sequence[float], bytes_per_second: float) -> int:
    """Return the tokens of a chunk from which the copies of weights hide behind the layer before.

    Its forward, which takes the shortest, then takes as long as a layer's copy.

    Args:
        forward: seconds per token of each layer's forward.
    """
    copies = [setup.machine.element * layer.weights / bytes_per_second for layer in setup.model.layers]
    before = [forward[-1], *forward[:-1]]
    tokens = max(copy / seconds for copy, seconds in zip(copies, before, strict=True))
    return math.ceil(tokens / 256) * 256
