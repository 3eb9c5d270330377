"""The chunk size when none is given, and the memory that a chunk's backward needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.layers import MIXERS, Mixer, StackConfig

UNKNOWN_MEMORY = 40e9  # bytes taken for a GPU whose memory is not known


def default_chunk_size(model: Any, input_ids: Tensor, recompute: str = "none") -> int:
    """`chunk_size_for` a model and its device, with input_ids (batch, seqlen) and the caller's autocast."""
    element = next(model.parameters()).element_size()
    memory = None
    if input_ids.is_cuda:
        memory = torch.cuda.get_device_properties(input_ids.device).total_memory
        if torch.is_autocast_enabled("cuda"):
            element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    batch, seqlen = input_ids.shape
    return chunk_size_for(model.config, batch, seqlen, input_ids.device.type, element, memory, recompute)


def at_most(chunk_size: int, seqlen: int, workers: int) -> int:
    """Tokens of a chunk, fewer where else some worker of a sequence would not have two of them."""
    return min(chunk_size, -(-seqlen // (2 * workers))) if workers > 1 else chunk_size


def chunk_size_for(
    config: StackConfig,
    batch: int,
    seqlen: int,
    device: str,
    element: int,
    memory: float | None = None,
    recompute: str = "none",
) -> int:
    """Tokens per chunk: enough to keep the device busy, few enough that a chunk's activations stay small.

    On a CPU, 1,408 tokens over all rows are within an eighth as fast as more. With fewer, a long sequence's
    states at chunk edges would take more memory than the shorter chunk saves. From 2²⁰ tokens per row on, the
    chunk grows with the square root of the length, which keeps edge states and activations about equal.

    On a GPU, what all layers of one chunk store for its backward gets an eighth of the memory: whatever its
    length, a chunk costs a launch per operation, reads every weight and adds to every parameter's gradient.
    The size is a multiple of 256 tokens, the tiles of matrix products, from 256 to 16,384.

    Args:
        batch: number of rows. seqlen: tokens per row. device: "cpu" or "cuda"; it need not be this machine's.
        element: bytes of an activation's element. memory: bytes of the GPU. recompute: as in `kept_bytes`.
    """
    if device != "cuda":
        return max(64, 1408 // batch, int(1408 * (seqlen / 2**20) ** 0.5))
    tokens = int((memory or UNKNOWN_MEMORY) / 8 / (kept_bytes(config, element, recompute) * batch))
    return min(16384, max(256, tokens // 256 * 256))


def kept_bytes(config: StackConfig, element: int, recompute: str = "none") -> int:
    """Bytes per token stored for a backward through all layers: the residual stream (in float32 at least) and
    its norm, the mixers' (`Mixer.kept_bytes`), and for an MLP the outputs of its norm and in_proj.

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
    kept = sum(mixer.kept_bytes(config, element, recompute == "selective") for mixer in mixers)
    return config.n_layer * (residual + normalised + mlp) + kept
