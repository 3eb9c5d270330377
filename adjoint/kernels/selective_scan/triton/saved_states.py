"""Shape of the states that the selective scan's Triton kernels keep; importable without Triton, for plans."""

from torch import Tensor

CHECKPOINT = 64  # tokens between the states that the forward keeps


def selective_scan_saved_shape(u: Tensor, A: Tensor) -> tuple[int, ...]:
    """Return (batch, checkpoints, d_state, d_inner): states before every CHECKPOINT tokens."""
    batch, seqlen, d_inner = u.shape
    return batch, -(-seqlen // CHECKPOINT), A.shape[1], d_inner
