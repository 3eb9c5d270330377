"""Packed documents, in the forms in which Hugging Face's trainers describe them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.batch import are_values_unknown
from adjoint.errors import UserError
from adjoint.layers.packed_documents import from_cu_seqlens

Starts = list[tuple[int, ...]]  # for each row, the first tokens of its documents


def document_starts(kwargs: dict[str, Any], ids: Tensor, mask: Tensor | None = None) -> Starts:
    """Return the first tokens of each row's documents; the first of them is 0.

    Args:
        kwargs: a forward's arguments: `position_ids` (batch or 1, seqlen) that start again at each document,
            `seq_idx` (batch or 1, seqlen), or `cu_seq_lens_q` (documents + 1,), the number of tokens before
            each document and in all.
        ids: (batch, seqlen).
        mask: (batch, seqlen) bool, False where a row is padded, at one or both of its ends; None without
            padding. A document begins where padding at the left ends.

    Raises:
        UserError: a CUDA graph is captured, and there are documents or padding.
        ValueError: a shape does not fit; cu_seq_lens_q does not begin with 0, falls or does not end with
            the sequence; position_ids do not count up from 0 in each document; or two of them disagree.
    """
    refuse_while_captured("packed documents and padding")
    is_real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    # (batch, seqlen): token 0, and the first token after padding at the left
    is_row_start = torch.zeros_like(is_real)
    is_row_start[:, 0] = True
    if mask is not None:  # a row of padding alone has no other start
        first = leading_zeros(mask) % mask.shape[1]
        is_row_start[torch.arange(len(mask), device=mask.device), first] = True
    starts_by_input: dict[str, Tensor] = {}
    if (positions := kwargs.get("position_ids")) is not None:
        starts_by_input["position_ids"] = _starts_from_positions(
            expand_to_rows("position_ids", positions, ids), is_real, is_row_start
        )
    for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
        if (values := kwargs.get(name)) is not None:
            numbers = (expand_to_rows if name == "seq_idx" else from_cu_seqlens)(name, values, ids)
            starts_by_input[name] = _is_first_of_run(numbers) & is_real | is_row_start
    is_start = next(iter(starts_by_input.values()), is_row_start)
    for name, other_starts in starts_by_input.items():
        if not torch.equal(other_starts, is_start):
            raise ValueError(
                f"{next(iter(starts_by_input))} and {name} describe different documents: give one of them"
            )
    return [tuple(row.nonzero().flatten().tolist()) for row in is_start.cpu()]


def refuse_while_captured(subject: str) -> None:
    """Raise a UserError if a CUDA graph is captured, as the host reads where `subject` is."""
    if are_values_unknown():
        raise UserError(
            f"{subject} cannot be captured in a CUDA graph, as the host reads where they are: leave "
            "attention_mask, position_ids, seq_idx and cu_seq_lens out"
        )


def _starts_from_positions(positions: Tensor, is_real: Tensor, is_row_start: Tensor) -> Tensor:
    """Return the mask of document starts read from position_ids (batch, seqlen).

    Positions must count up from 0 in each document; those of padding are ignored."""
    is_start = (positions == 0) & is_real | is_row_start
    is_valid = positions == 0  # at a start; elsewhere a token's is the next after that of the token before it
    is_valid[:, 1:] |= ~is_start[:, 1:] & (positions[:, 1:] == positions[:, :-1] + 1)
    if not bool((is_valid | ~is_real).all()):
        raise ValueError("position_ids must count up from 0 in each document: 0, 1, 2, 0, 1 and so on")
    return is_start


def leading_zeros(mask: Tensor) -> Tensor:
    """Return how many tokens of each row, of a mask (batch, seqlen) bool, come before the first True; all if
    there is none.

    It takes a byte per token, where a cumulative sum takes eight."""
    first = mask.view(torch.uint8).argmax(1)
    return torch.where(mask.any(1), first, mask.shape[1])


def _is_first_of_run(numbers: Tensor) -> Tensor:
    """Return the mask of the tokens whose number differs from the previous token's, (batch, seqlen) bool."""
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return is_first


def expand_to_rows(name: str, values: Tensor, ids: Tensor) -> Tensor:
    """Return values per token, given for each row or once for all rows, as (batch, seqlen)."""
    if values.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"{name} must have input_ids' shape {tuple(ids.shape)}, got {tuple(values.shape)}")
    return values.expand(ids.shape)


def join_rows(tensors: dict[str, Tensor], starts: Starts) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Return tensors (batch, seqlen, …), joined end to end as a single row, and the starts of its documents.

    The start of a row is then the start of a document."""
    seqlen = next(iter(tensors.values())).shape[1]
    joined_starts = tuple(
        row * seqlen + start for row, row_starts in enumerate(starts) for start in row_starts
    )
    return {name: t.flatten(0, 1)[None] for name, t in tensors.items()}, joined_starts
