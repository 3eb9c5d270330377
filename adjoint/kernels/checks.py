"""Argument checks shared by the operations: one clear ValueError each."""

import torch
from torch import Tensor


def shape(name: str, x: Tensor | None, *expected: int) -> None:
    if x is not None and tuple(x.shape) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(x.shape)}")


def window_and_halo(window: int | None, halo: int, seqlen: int) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(
            f"window must be a whole number of tokens, 1 or more, or None for no window; got {window!r}"
        )
    if not 0 <= halo < seqlen:
        raise ValueError(f"halo must be from 0 to seqlen - 1 = {seqlen - 1} tokens, got {halo}")


def reset_of(seq_idx: Tensor | None, batch: int, seqlen: int) -> Tensor | None:
    """Bool (batch, seqlen), True where seq_idx changes; the initial state belongs to the first token's
    document."""
    if seq_idx is None:
        return None
    shape("seq_idx", seq_idx, batch, seqlen)
    reset = torch.zeros_like(seq_idx, dtype=torch.bool)
    reset[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return reset
