"""Arguments that several of flash-linear-attention's functions have."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(q: Tensor, scale: float | None) -> Tensor:
    """Return queries (…, d_k) times the scale, by default 1/√d_k."""
    return q * (q.shape[-1] ** -0.5 if scale is None else scale)


def documents(cu_seqlens: Tensor | None, initial_state: object, final: bool | None) -> Tensor | None:
    """Return document numbers (1, seqlen) of the rows that fla's layers join without their padding.

    A chunk's rows are not joined, and only chunks have states: both at once are refused."""
    if cu_seqlens is None:
        return None
    refuse_arguments(initial_state=initial_state, output_final_state=final or None)
    lengths = cu_seqlens.diff()
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)[None]


def refuse_arguments(**unsupported: object) -> None:
    """Refuse arguments of fla's functions that ours do not support, if they are given."""
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{name} is given to one of fla's functions, and ours in its place takes none")
