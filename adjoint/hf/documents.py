"""Packed documents: where each begins, from the forms in which Hugging Face's trainers say it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.documents import from_cu_seqlens


def starts_of(kwargs: dict[str, Any], ids: Tensor) -> list[tuple[int, ...]]:
    """Of each row, the first tokens of its documents, 0 being the first.

    Args:
        kwargs: of a forward: `position_ids` (batch or 1, seqlen) that start anew at each document, `seq_idx`
            (batch or 1, seqlen), or `cu_seq_lens_q` (documents + 1,), tokens up to each document and in all;
            if several are given, the first of them.
        ids: (batch, seqlen).

    Raises:
        ValueError: a shape does not fit, cu_seq_lens_q does not begin with 0, falls or does not end with the
            sequence, or position_ids do not count up from 0 in each document.
    """
    batch, seqlen = ids.shape
    positions, index, lengths = (kwargs.get(name) for name in ("position_ids", "seq_idx", "cu_seq_lens_q"))
    if positions is not None:
        begins = _rows("position_ids", positions, ids) == 0
        begins[:, 0] = True
        count = torch.arange(seqlen, device=ids.device)
        since = torch.where(begins, count, 0).cummax(1).values
        if not torch.equal((count - since).expand(batch, -1), _rows("position_ids", positions, ids)):
            raise ValueError("position_ids must count up from 0 in each document: 0, 1, 2, 0, 1 and so on")
    elif index is not None:
        begins = _changes(_rows("seq_idx", index, ids))
    elif lengths is not None:
        begins = _changes(from_cu_seqlens("cu_seq_lens_q", lengths, ids))
    else:
        return [(0,)] * batch
    return [tuple(row.nonzero().flatten().tolist()) for row in begins.cpu()]


def _changes(numbers: Tensor) -> Tensor:
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def _rows(name: str, given: Tensor, ids: Tensor) -> Tensor:
    if given.dim() != 2 or given.shape[1] != ids.shape[1] or given.shape[0] not in (1, ids.shape[0]):
        raise ValueError(f"{name} must have input_ids' shape {tuple(ids.shape)}, got {tuple(given.shape)}")
    return given.expand(ids.shape)


def as_one_row(
    ids: Tensor, targets: Tensor, starts: list[tuple[int, ...]]
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """ids, targets and the documents' starts; rows whose documents differ are laid end to end as one, for a
    row's beginning is a document's too."""
    if len(set(starts)) == 1:
        return ids, targets, starts[0]
    seqlen = ids.shape[1]
    flat = tuple(row * seqlen + start for row, mine in enumerate(starts) for start in mine)
    return ids.reshape(1, -1), targets.reshape(1, -1), flat
