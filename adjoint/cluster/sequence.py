"""`Exact` with the sequence split over workers: each has the whole model and a stretch of the tokens.

A stretch maps a layer's recurrent state affinely, h_out = a · h_in + h_ext, where neither a, the product of
its tokens' transitions, nor h_ext, what it makes of a zero state, needs to know h_in (docs/method.md §4). All
workers compute them at once and send them to those on their right, and each puts its own h_in together from
what comes from its left. The adjoint state is the mirror image, with a transposed. That is the exchange
"affine". With "wavefront" a worker waits for its neighbour's true state instead: no second pass over the
tokens, but worker d starts d layers late.

Layer by layer, from the bottom, then from the top:

    prefix     a and h_ext of the stretch, chunk by chunk (affine; h_ext alone on the first worker)
    forward    the layer, from the true state; states at chunks' edges are kept, and inputs of `kept` layers
    again      the layer once more, from what is kept, for the inputs of the layer above
    head       the head's loss, and its pullback, on a chunk
    suffix     what the stretch makes of a zero adjoint state (affine; not on the first worker)
    backward   the vjp of the layer on a chunk, from the true adjoint state
    embedding  the embedding's gradient on a chunk

Messages: "state" and "d_state" of a layer, (a, h_ext) and (a, μ_ext) to all on the right and on the left, or
h and μ to the neighbour; "y", the last d_conv - 1 inputs of a layer, which the right neighbour's convolution
reads, and "dy", the cotangents it found for them. None of them depends on the length of the sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from adjoint.cluster.schedule import Action, Recv, Run, Schedule, Send
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.methods import Exact

if TYPE_CHECKING:
    from adjoint.cluster.memory import Setup

EXCHANGES = ("affine", "wavefront")


def reach(config: StackConfig) -> list[int]:
    """For each layer, how many tokens to the left its convolution looks."""
    return [config.d_conv - 1 if mixer in ("mamba", "mamba2") else 0 for mixer in config.mixers]


def stretches(config: StackConfig, seqlen: int, workers: int) -> list[slice]:
    """The tokens of each worker, about as many each: at least as many as a convolution looks to the left, so
    that only neighbours need each other's inputs. A short sequence has fewer stretches than workers."""
    count = max(1, min(workers, seqlen // max(1, *reach(config))))
    return [slice(seqlen * i // count, seqlen * (i + 1) // count) for i in range(count)]


def pick_exchange(workers: int, n_layer: int) -> str:
    """The faster exchange. The second passes of "affine" cost 0.6 of what a layer's forward and backward cost
    without them (docs/method.md §4), whatever the number of workers; "wavefront" makes workers - 1 layers of
    n_layer wait."""
    return "wavefront" if workers - 1 <= 0.6 * n_layer else "affine"


def spacing(n_layer: int, keep: str) -> int:
    """With "edges" the inputs of every so-manieth layer are kept, and those between are computed again when
    the backward comes to them: the square root of n_layer, where what is kept and what is computed again at
    a time are about as much. Else 1: all are kept."""
    return math.ceil(math.sqrt(n_layer)) if keep == "edges" else 1


def kept(layer: int, n_layer: int, every: int) -> bool:
    """Whether a layer's inputs are kept from the forward to the backward. Those from the last multiple of
    `every` on are, for the backward begins there."""
    return layer % every == 0 or layer >= (n_layer - 1) // every * every


def stretches_held(n_layer: int, every: int) -> int:
    """How many tensors (batch, stretch, d_model) a worker holds at most: inputs, and the cotangents of a
    layer's inputs and outputs."""
    tops = [layer for layer in range(n_layer) if layer + 1 == n_layer or (layer + 1) % every == 0]
    segments = [layer // every + 1 + layer % every for layer in tops]
    return max(segments) + 2


def check_setup(method: Any, shards: int | str, helpers: int, workers: int) -> None:
    """Raises a UserError where a sequence is to be split in a way that there is none."""
    if not isinstance(method, Exact):
        raise UserError(
            f"cluster.sequence: {method} does not run on {workers} stretches of a sequence; "
            "use --method.name exact, or --cluster.sequence 1"
        )
    if shards != 1 or helpers:
        raise UserError(
            f"cluster.sequence: each of the {workers} workers of a sequence has all layers; "
            "use --cluster.shards 1 --cluster.helpers 0, or --cluster.sequence 1"
        )


def check_stretches(config: StackConfig, seqlen: int, workers: int) -> None:
    """Raises a UserError where a sequence is too short to be split over so many workers."""
    most = len(stretches(config, seqlen, workers))
    if most < workers:
        raise UserError(
            f"cluster.sequence: {workers} stretches of {seqlen} tokens would be shorter than the convolution "
            f"({config.d_conv} tokens) or empty; take at most {most}, or a longer data.seqlen"
        )


def plan(
    config: StackConfig,
    seqlen: int,
    workers: int,
    chunk_size: int,
    exchange: str = "affine",
    every: int = 1,
    backward: bool = True,
) -> tuple[list[slice], Schedule]:
    """The stretches of a sequence, and the schedule of the workers on them."""
    cuts = stretches(config, seqlen, workers)
    chunks = [-(-(cut.stop - cut.start) // chunk_size) for cut in cuts]
    return cuts, schedule(reach(config), chunks, workers, exchange, every, backward)


def stretched(setup: Setup, workers: int) -> Setup:
    """A run in one process that takes about as much memory as one worker's: with all inputs kept, on a
    sequence of as many tokens as makes them as large."""
    method, n_layer = setup.method, setup.model.n_layer
    held = stretches_held(n_layer, spacing(n_layer, method.keep))
    seqlen = -(-setup.seqlen * held // (workers * (n_layer + 1)))
    keep = "inputs" if method.keep == "edges" else method.keep
    return dataclasses.replace(setup, seqlen=seqlen, method=dataclasses.replace(method, keep=keep))


def schedule(
    reaches: Sequence[int],
    chunks: Sequence[int],
    workers: int,
    exchange: str = "affine",
    every: int = 1,
    backward: bool = True,
    buffers: int = 2,
) -> Schedule:
    """Who does which tile when, and what is sent.

    Args:
        reaches: as `reach` gives them, one a layer.
        chunks: of each stretch; workers beyond these have nothing to do.
        every: as `spacing` gives it.
        backward: False for the loss alone.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}; got {exchange!r}")
    last, affine = len(chunks) - 1, exchange == "affine"

    def forward(worker: int, layer: int) -> Iterator[Action]:
        tiles = range(chunks[worker])
        if layer and worker and reaches[layer]:  # the tokens below the first layer are known to all
            yield Recv(worker - 1, "y", 0, layer)
        if affine and worker < last:
            yield from (Run("prefix", chunk, layer) for chunk in tiles)
            yield from (Send(other, "state", 0, layer) for other in range(worker + 1, last + 1))
        sources = range(worker) if affine else range(max(0, worker - 1), worker)
        yield from (Recv(source, "state", 0, layer) for source in sources)
        yield from (Run("forward", chunk, layer) for chunk in tiles)
        if not affine and worker < last:
            yield Send(worker + 1, "state", 0, layer)
        if worker < last and layer + 1 < len(reaches) and reaches[layer + 1]:
            yield Send(worker + 1, "y", 0, layer + 1)

    def back(worker: int, layer: int) -> Iterator[Action]:
        tiles = range(chunks[worker] - 1, -1, -1)
        if affine and worker:
            yield from (Run("suffix", chunk, layer) for chunk in tiles)
            yield from (Send(other, "d_state", 0, layer) for other in range(worker - 1, -1, -1))
        sources = range(last, worker, -1) if affine else range(worker + 1, min(last, worker + 1) + 1)
        yield from (Recv(source, "d_state", 0, layer) for source in sources)
        yield from (Run("backward", chunk, layer) for chunk in tiles)
        if not affine and worker:
            yield Send(worker - 1, "d_state", 0, layer)
        if layer and worker and reaches[layer]:
            yield Send(worker - 1, "dy", 0, layer)
        if layer and not kept(layer - 1, len(reaches), every) and layer % every == 0:
            below = range(layer - every, layer - 1)  # nobody need be waited for
            yield from (Run("again", chunk, k) for k in below for chunk in range(chunks[worker]))
        if layer and worker < last and reaches[layer]:
            yield Recv(worker + 1, "dy", 0, layer)

    programs: list[tuple[Action, ...]] = []
    for worker in range(workers):
        program: list[Action] = []
        if worker <= last:
            for layer in range(len(reaches)):
                program += forward(worker, layer)
            program += [Run("head", chunk) for chunk in range(chunks[worker])]
            if backward:
                for layer in reversed(range(len(reaches))):
                    program += back(worker, layer)
                program += [Run("embedding", chunk) for chunk in range(chunks[worker])]
        programs.append(tuple(program))
    return Schedule(f"sequence, {exchange}", workers, max(chunks), buffers, tuple(programs))
