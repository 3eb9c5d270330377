"""How many tokens a chunk has where nobody says."""

from __future__ import annotations

import torch
from torch import Tensor

from adjoint.layers import StackConfig
from adjoint.stack import Stack

UNKNOWN_MEMORY = 40e9  # bytes of a GPU that is not here and of which nobody says how much it has


def default_chunk_size(model: Stack, input_ids: Tensor, recompute: str = "none") -> int:
    """`chunk_size_for` on the device of input_ids (batch, seqlen), under the caller's autocast."""
    element = next(model.parameters()).element_size()
    memory = None
    if input_ids.is_cuda:
        memory = torch.cuda.get_device_properties(input_ids.device).total_memory
        if torch.is_autocast_enabled("cuda"):
            element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    return chunk_size_for(model.config, input_ids.shape[0], input_ids.device.type, element, memory, recompute)


def chunk_size_for(
    config: StackConfig,
    batch: int,
    device: str,
    element: int,
    memory: float | None = None,
    recompute: str = "none",
) -> int:
    """Tokens a chunk: enough work to keep the device busy, few enough that a chunk's activations stay small.

    On a CPU 1,408 tokens are within an eighth as fast as any more; with fewer, a long sequence's states at
    the edges would outweigh what a chunk saves. On a GPU what all layers of one chunk keep for its backward
    gets an eighth of the memory: a GPU wants much work at a time, as a chunk costs a launch an operation,
    reads every weight and adds up every parameter's gradient, whatever its length. A multiple of 256 tokens,
    the tiles of matrix products; 256 to 16,384.

    Args:
        batch: sequences. device: "cpu" or "cuda", which need not be here.
        element: bytes of an activation. memory: bytes of the GPU. recompute: as `kept_bytes`'.
    """
    if device != "cuda":
        return max(64, 1408 // batch)
    tokens = int((memory or UNKNOWN_MEMORY) / 8 / (kept_bytes(config, element, recompute) * batch))
    return min(16384, max(256, tokens // 256 * 256))


def kept_bytes(config: StackConfig, element: int, recompute: str = "none") -> int:
    """Bytes a token that a backward through all layers keeps, activations being of `element` bytes.

    The residual stream (float32 at least) and its norm; of Mamba-1 and Mamba-2 five tensors as wide as
    d_inner (in_proj's two halves, the convolution's output, the step sizes or the gated output, the scan's),
    B and C, and the scan's sparse states; of the generic mixers B, C and a dense A; of attention queries,
    keys and values, repeated for each head, its output, and in_proj's if there is a convolution; of
    gated_deltanet and mamba3 what is made of keys and queries besides, with is_mimo for each of a token's
    inputs; of an MLP its norm's output and in_proj's. Within a fifth of what autograd was seen to keep.

    Args:
        recompute: "selective" keeps of the residual stream, of in_proj's and of the scan's results alone,
            "full" of the residual stream (see `Exact`).
    """
    total, wide = 0, max(element, 4)
    for kind in config.mixers:
        total += config.d_model * (wide + element * (recompute == "none"))
        if recompute == "full":
            continue
        total += _kept_by_mixer(config, kind, element, recompute == "selective")
        if config.d_intermediate:
            narrow = element < 4  # then the gated product is kept as well, for a linear map of a cast weight
            rows = (config.d_model + (2 + narrow) * config.d_intermediate) * element
            total += config.d_model * wide + (
                rows if recompute == "none" else 2 * config.d_intermediate * element
            )
    return total


def _kept_by_mixer(config: StackConfig, kind: str, element: int, selective: bool) -> int:
    """Bytes a token that a mixer's backward keeps, beside the residual stream."""
    wide = max(element, 4)
    if kind == "attention":
        heads, kv_heads, dim = config.attention_heads
        bands = 2 if config.sliding_window else 1  # keys and values lie there twice, and queries in bands
        convolved = (heads + 2 * kv_heads) * dim if config.attention_d_conv else 0
        if selective:  # products as wide as the residual stream are made again
            return (2 * kv_heads * dim * (kv_heads < heads) + convolved) * element
        return (5 * bands * heads * dim + convolved) * element + (config.rotary_dim + heads) * wide
    if ":" in kind:  # a layer of one's own: a guess
        return 8 * config.d_model * element
    n, nheads, d_inner = config.state_size(kind), config.nheads, config.d_inner
    if kind == "gated_deltanet":
        channels = 2 * config.key_heads * n + d_inner
        states = n * config.headdim // 64  # one in 64 tokens
        if selective:
            return (channels + d_inner) * element + (d_inner + nheads * states) * wide
        return (2 * channels + 5 * d_inner) * element + nheads * (2 * n + states) * wide
    if kind == "mamba3":
        rank, mimo = config.mamba3_rank, config.is_mimo
        states = rank * d_inner * n * wide * element // 512
        if selective:
            return (2 * d_inner + 2 * rank * n * config.ngroups) * element + rank * d_inner * wide + states
        turned = nheads * (2 * config.rope_angles + 10) + 2 * rank * (nheads * n + d_inner)
        narrow = rank * (4 + config.is_outproj_norm + mimo) * d_inner + 2 * mimo * d_inner
        narrow += 2 * rank * n * (config.ngroups + nheads)
        return turned * wide + narrow * element + states
    if kind in ("mamba", "mamba2"):
        groups = config.ngroups if kind == "mamba2" else 1
        every = 64 if kind == "mamba" else 512 // element  # tokens between saved states
        rows = 3 * d_inner if selective else 5 * d_inner + 4 * groups * n
        return rows * element + d_inner * n * wide // every
    return (2 * n * config.d_model + (3 * n * n if kind == "dense" else 0)) * element
