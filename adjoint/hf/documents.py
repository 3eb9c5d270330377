"""Packed documents, in the forms in which Hugging Face's trainers tell them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.documents import from_cu_seqlens

Starts = list[tuple[int, ...]]  # of each row, the first tokens of its documents


def starts_of(kwargs: dict[str, Any], ids: Tensor, mask: Tensor | None = None) -> Starts:
    """Of each row, the first tokens of its documents, 0 being the first.

    Args:
        kwargs: of a forward: `position_ids` (batch or 1, seqlen) that start again at each document, `seq_idx`
            (batch or 1, seqlen), or `cu_seq_lens_q` (documents + 1,), tokens up to each document and in all.
        ids: (batch, seqlen).
        mask: (batch, seqlen) bool, False where a row is padded, at one or both of its ends; None of no
            padding. Where the padding at the left ends a document begins.

    Raises:
        ValueError: a shape does not fit, cu_seq_lens_q does not begin with 0, falls or does not end with the
            sequence, position_ids do not count up from 0 in each document, or two of them disagree.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    first = _changes(real.cumsum(1) > 0)  # (batch, seqlen), of token 0 and where padding at the left ends
    found: dict[str, Tensor] = {}
    if (positions := kwargs.get("position_ids")) is not None:
        found["position_ids"] = _from_positions(rows_of("position_ids", positions, ids), real, first)
    if (numbers := kwargs.get("seq_idx")) is not None:
        found["seq_idx"] = _changes(rows_of("seq_idx", numbers, ids)) & real | first
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            found[name] = _changes(from_cu_seqlens(name, kwargs[name], ids)) & real | first
    begins = next(iter(found.values()), first)
    for name, others in found.items():
        if not torch.equal(others, begins):
            raise ValueError(f"{next(iter(found))} and {name} describe different documents: give one of them")
    return [tuple(row.nonzero().flatten().tolist()) for row in begins.cpu()]


def _from_positions(positions: Tensor, real: Tensor, first: Tensor) -> Tensor:
    """Those of padding may be any."""
    begins = (positions == 0) & real | first
    count = torch.arange(positions.shape[1], device=positions.device)
    since = count - torch.where(begins, count, 0).cummax(1).values
    if not bool(((since == positions) | ~real).all()):
        raise ValueError("position_ids must count up from 0 in each document: 0, 1, 2, 0, 1 and so on")
    return begins


def _changes(numbers: Tensor) -> Tensor:
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def rows_of(name: str, given: Tensor, ids: Tensor) -> Tensor:
    """What has a value per token, or one for all rows, as (batch, seqlen)."""
    if given.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"{name} must have input_ids' shape {tuple(ids.shape)}, got {tuple(given.shape)}")
    return given.expand(ids.shape)


def as_one_row(tensors: dict[str, Tensor], starts: Starts) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors (batch, seqlen, …) and the documents' starts; rows whose documents differ are laid end to end
    as one, for a row's beginning is a document's too."""
    if len(set(starts)) == 1:
        return tensors, starts[0]
    seqlen = next(iter(tensors.values())).shape[1]
    flat = tuple(row * seqlen + start for row, mine in enumerate(starts) for start in mine)
    return {name: t.flatten(0, 1)[None] for name, t in tensors.items()}, flat
