"""Weights in host memory (`model.offload weights`): what crosses the link to the device, what the host adds,
and when both hide behind computation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from adjoint.engine import binomial
from adjoint.plan.run_memory import Setup

SUSTAINED_LINK = 0.8  # of a link's peak, what copies of pinned memory are assumed to keep up
# bytes per second of host memory: what the threads that add gradients are assumed to read and write together
SUSTAINED_HOST = 50e9


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


def adding_seconds(setup: Setup, weights: int) -> float:
    """Return the seconds in which the host adds the gradients of so many weights; 0 if the device does.

    It reads the gradient and the sum, which is in float32 at least, and writes the sum."""
    if setup.host_link is None:
        return 0.0
    return weights * (setup.machine.element + 2 * max(4, setup.machine.element)) / SUSTAINED_HOST


def hiding_chunk(
    setup: Setup, forward: Sequence[float], backward: Sequence[float], bytes_per_second: float
) -> int:
    """Return the tokens of a chunk from which copies and additions hide behind computation.

    The forward of the layer before, which takes the shortest, then takes as long as the copy of a layer's
    weights, and a layer's backward, with its forward again, as long as its gradients are added.

    Args:
        forward, backward: seconds per token of each layer's forward and backward.
    """
    layers = setup.model.layers
    copies = [setup.machine.element * layer.weights / bytes_per_second for layer in layers]
    before = [forward[-1], *forward[:-1]]
    tokens = [copy / seconds for copy, seconds in zip(copies, before, strict=True)]
    for layer, *seconds in zip(layers, forward, backward, strict=True):
        tokens.append(adding_seconds(setup, layer.weights) / sum(seconds))
    return math.ceil(max(tokens) / 256) * 256
