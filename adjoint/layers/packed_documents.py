"""Packed documents: the document that each token belongs to, from `seq_idx`, `cu_seqlens` or a separator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.kernels.checks import reset_of


def document_numbers(
    ids: Tensor, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor | None:
    """Return each token's document, (batch, seqlen) int64, numbered from 0 in each row.

    If neither seq_idx nor cu_seqlens is given, the result is None.

    Args:
        ids: (batch, seqlen).
        seq_idx: (batch, seqlen) integers: a document begins where they change (mamba-ssm's form).
        cu_seqlens: (documents + 1,), the offsets at which documents begin in the flattened batch, and its
            number of tokens (flash-attention's form). A row's first token always begins a document.

    Raises:
        ValueError: both are given, seq_idx has another shape or is no integer, or cu_seqlens does not rise
            from 0 to the number of tokens.
    """
    if cu_seqlens is not None:
        if seq_idx is not None:
            raise ValueError("give seq_idx or cu_seqlens, not both: they say the same")
        return from_cu_seqlens("cu_seqlens", cu_seqlens, ids)
    if seq_idx is None:
        return None
    if seq_idx.shape != ids.shape or seq_idx.is_floating_point():
        raise ValueError(
            f"seq_idx must be integers of input_ids' shape {tuple(ids.shape)}; got {seq_idx.dtype} of shape "
            f"{tuple(seq_idx.shape)}"
        )
    return reset_of(seq_idx, *ids.shape).cumsum(1)


def from_cu_seqlens(name: str, cu_seqlens: Tensor, ids: Tensor) -> Tensor:
    """Return `document_numbers` from cu_seqlens alone; errors call it `name`."""
    cuts = torch.as_tensor(cu_seqlens).flatten().tolist()
    rising = all(a <= b for a, b in itertools.pairwise(cuts))
    if len(cuts) < 2 or cuts[0] != 0 or not rising or cuts[-1] != ids.numel():
        raise ValueError(f"{name} must rise from 0 to the {ids.numel()} tokens of the batch; got {cuts[:8]}")
    begins = torch.zeros(ids.numel(), dtype=torch.int64, device=ids.device)
    begins[[cut for cut in cuts if cut < ids.numel()]] = 1
    begins = begins.view(ids.shape)
    begins[:, 0] = 0
    return begins.cumsum(1)


def from_separator(ids: Tensor, separator: Sequence[int]) -> Tensor:
    """Return `document_numbers` of ids (batch, seqlen) whose documents end with the tokens `separator`."""
    begins = torch.nn.functional.pad(document_ends(ids, separator), (1, 0))[:, :-1]
    return begins.long().cumsum(1)


def document_ends(ids: Tensor, separator: Sequence[int]) -> Tensor:
    """Return whether each token is the last one of a document, (batch, seqlen) bool."""
    ends = torch.ones_like(ids, dtype=torch.bool)
    for i, token in enumerate(reversed(separator)):
        ends &= torch.nn.functional.pad(ids, (i, 0), value=-1)[:, : ids.shape[1]] == token
    return ends
