"""The chunk size when none is given, and the memory that a chunk's backward needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from adjoint.layers import MIXERS, Mixer, StackConfig

UNKNOWN_MEMORY = 40e9  # bytes taken for a GPU whose memory is not known


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Memory that a model takes for one row of a batch.

    Attributes:
        bytes_per_token: bytes that its layers keep per token of a chunk for their backward.
        states: bytes of its recurrent states at one chunk edge.
        busy: tokens of a chunk, over all rows, with which a CPU is within an eighth as fast as with more.
    """

    bytes_per_token: float
    states: float = 0.0
    busy: int = 1408


def default_chunk_size(
    model: Any, input_ids: Tensor, recompute: str = "none", checkpoints: int | None = None
) -> int:
    """Return `chunk_size_for` a `Stack`, or its part on a shard, on its device.

    Args:
        input_ids: (batch, seqlen). The caller's autocast counts.
        recompute, checkpoints: the method's (see `methods.Exact`).
    """
    element, config, blocks = next(model.parameters()).element_size(), model.config, model.blocks()
    states = sum(state_numel(block.mixer) for block in blocks) * max(element, 4)
    if input_ids.is_cuda and torch.is_autocast_enabled("cuda"):
        element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    sizes = Sizes(kept_bytes(config, element, recompute), states * config.n_layer / max(len(blocks), 1))
    batch, seqlen = input_ids.shape
    return chunk_size_on(input_ids.device, sizes, batch, seqlen, checkpoints)


def chunk_size_on(
    device: torch.device, sizes: Sizes, batch: int, seqlen: int, checkpoints: int | None = None
) -> int:
    """Return `chunk_size_for` a device of this machine."""
    return chunk_size_for(sizes, batch, seqlen, device.type, memory_of(device), checkpoints)


def memory_of(device: torch.device) -> float | None:
    """Return the bytes of a GPU's memory; None for a CPU, whose chunks do not depend on it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def at_most(chunk_size: int, seqlen: int, workers: int) -> int:
    """Return chunk_size, or less, so that each worker that shares the sequence has two chunks at least."""
    return min(chunk_size, -(-seqlen // (2 * workers))) if workers > 1 else chunk_size


def chunk_size_for(
    sizes: Sizes,
    batch: int,
    seqlen: int,
    device: str,
    memory: float | None = None,
    checkpoints: int | None = None,
) -> int:
    """Return the tokens per chunk: enough to keep the device busy, with small activations.

    On a CPU that is `sizes.busy` over all rows. On a GPU, what all layers of one chunk store for its backward
    gets an eighth of the memory: whatever its length, a chunk costs a launch per operation, reads every
    weight and adds to every parameter's gradient. The size is a multiple of 256 tokens, the tiles of matrix
    products, from 256 to 16,384.

    A long sequence's states at chunk edges would take more memory than so short a chunk saves: the chunk
    grows with the square root of the length, which keeps edge states and activations equal, and their sum the
    least there is. With checkpoints there are only so many states: the chunk grows until its activations take
    as much memory as they do, and no further, however long the sequence; each chunk less is computed again.

    Args:
        batch: number of rows. seqlen: tokens per row. device: "cpu" or "cuda"; it need not be this machine's.
        memory: bytes of the GPU.
        checkpoints: number of states that are stored at a time; None for those at all edges.
    """
    state = sizes.states / sizes.bytes_per_token  # in tokens whose activations take as much
    equal = int(min((seqlen * state) ** 0.5, math.inf if checkpoints is None else checkpoints * state))
    if device != "cuda":
        return max(64, sizes.busy // batch, equal)
    tokens = max(int((memory or UNKNOWN_MEMORY) / 8 / (sizes.bytes_per_token * batch)), equal)
    return min(16384, max(256, tokens // 256 * 256))


def state_numel(mixer: Any) -> int:
    """Return the elements of a mixer's recurrent state in one row; 0 for a user's layer that does not say."""
    shapes = [shape for shape in getattr(mixer, "state_shapes", ()) if None not in shape]
    return sum(math.prod(shape) for shape in shapes)


def kept_bytes(config: StackConfig, element: int, recompute: str = "none") -> int:
    """Return the bytes per token stored for a backward through all layers.

    They are those of the residual stream (in float32 at least) and its norm, the mixers'
    (`Mixer.kept_bytes`), and for an MLP the outputs of its norm and in_proj.

    Args:
        element: bytes of an activation's element.
        recompute: with "selective" only the residual stream and the outputs of in_proj and scans are stored,
            with "full" only the residual stream (see `methods.Exact`).
    """
    residual, mlp = config.d_model * max(element, 4), 0
    if config.d_intermediate:
        narrow = element < 4  # then the gated product is stored as well, for the linear map by a cast weight
        rows = config.d_model + (2 + narrow) * config.d_intermediate
        mlp = residual + (rows if recompute == "none" else 2 * config.d_intermediate) * element
    if recompute == "full":
        return config.n_layer * residual
    normalised = config.d_model * element * (recompute == "none")
    mixers = (MIXERS.get(kind, Mixer) for kind in config.mixers)
    mixer_bytes = sum(mixer.kept_bytes(config, element, recompute == "selective") for mixer in mixers)
    return config.n_layer * (residual + normalised + mlp) + mixer_bytes
