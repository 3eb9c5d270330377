"""Shape of the states that the SSD scan's Triton kernels keep; importable without Triton, for plans."""

from torch import Tensor

# By the size of the inputs' elements: tokens between the states that are kept, and tokens of a matrix tile.
CHUNK = {2: 256, 4: 128, 8: 64}
TILE = {2: 64, 4: 32, 8: 16}


def chunk_tokens(x: Tensor) -> int:
    """Return the tokens per chunk: fewer than CHUNK only when the whole sequence is one chunk."""
    size, seqlen = x.element_size(), x.shape[1]
    return min(CHUNK[size], max(TILE[size], 1 << (seqlen - 1).bit_length()))


def ssd_scan_saved_shape(x: Tensor, B: Tensor) -> tuple[int, ...]:
    """Return (batch, chunks, nheads, headdim, d_state): states at the chunks' entries."""
    batch, seqlen, nheads, headdim = x.shape
    return batch, -(-seqlen // chunk_tokens(x)), nheads, headdim, B.shape[-1]
