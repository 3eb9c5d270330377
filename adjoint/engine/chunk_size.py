"""How many tokens a chunk has where nobody says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.layers import MIXERS, Mixer, StackConfig

UNKNOWN_MEMORY = 40e9  # bytes of a GPU that is not here and of which nobody says how much it has


def default_chunk_size(model: Any, input_ids: Tensor, recompute: str = "none") -> int:
    """`chunk_size_for` on the device of input_ids (batch, seqlen), under the caller's autocast."""
    element = next(model.parameters()).element_size()
    memory = None
    if input_ids.is_cuda:
        memory = torch.cuda.get_device_properties(input_ids.device).total_memory
        if torch.is_autocast_enabled("cuda"):
            element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    batch, seqlen = input_ids.shape
    return chunk_size_for(model.config, batch, seqlen, input_ids.device.type, element, memory, recompute)


def chunk_size_for(
    config: StackConfig,
    batch: int,
    seqlen: int,
    device: str,
    element: int,
    memory: float | None = None,
    recompute: str = "none",
) -> int:
    """Tokens a chunk: enough work to keep the device busy, few enough that a chunk's activations stay small.

    On a CPU 1,408 tokens in all rows are within an eighth as fast as any more; with fewer, a long sequence's
    states at the edges would outweigh what a chunk saves. A chunk as long as the square root of the length
    asks for, 1,408 tokens a row at 2²⁰, keeps edges and activations about equal: memory grows with the square
    root beyond it. On a GPU what all layers of one chunk keep for its backward gets an eighth of the memory:
    a GPU needs much work at a time, as a chunk costs a launch an operation, reads every weight and adds up
    every parameter's gradient, whatever its length. A multiple of 256 tokens, the tiles of matrix products;
    256 to 16,384.

    Args:
        batch: sequences. seqlen: tokens of each. device: "cpu" or "cuda", which need not be here.
        element: bytes of an activation. memory: bytes of the GPU. recompute: as `kept_bytes`'.
    """
    if device != "cuda":
        return max(64, 1408 // batch, int(1408 * (seqlen / 2**20) ** 0.5))
    tokens = int((memory or UNKNOWN_MEMORY) / 8 / (kept_bytes(config, element, recompute) * batch))
    return min(16384, max(256, tokens // 256 * 256))


def kept_bytes(config: StackConfig, element: int, recompute: str = "none") -> int:
    """Bytes per token that a backward through all layers keeps: of the residual stream (float32 at least) and
    its norm, of the mixers (`Mixer.kept_bytes`), and of an MLP its norm's output and in_proj's.

    Args:
        element: bytes of an activation.
        recompute: "selective" keeps of the residual stream, of in_proj's and of the scan's results alone,
            "full" of the residual stream (see `Exact`).
    """
    residual, mlp = config.d_model * max(element, 4), 0
    if config.d_intermediate:
        narrow = element < 4  # then the gated product is kept as well, for a linear map of a cast weight
        rows = config.d_model + (2 + narrow) * config.d_intermediate
        mlp = residual + (rows if recompute == "none" else 2 * config.d_intermediate) * element
    if recompute == "full":
        return config.n_layer * residual
    normalised = config.d_model * element * (recompute == "none")
    mixers = (MIXERS.get(kind, Mixer) for kind in config.mixers)
    kept = sum(mixer.kept_bytes(config, element, recompute == "selective") for mixer in mixers)
    return config.n_layer * (residual + normalised + mlp) + kept
