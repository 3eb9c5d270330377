"""The length of a wrapped model's chunks, and the tokens at which they end: those of packed documents, in the
forms in which Hugging Face's trainers describe them, and of blocks of tokens that attend to each other."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import Batch, are_values_unknown
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import EngineSpec
from adjoint.errors import UserError
from adjoint.hf import check
from adjoint.hf.cache import Slot
from adjoint.hf.model_parts import backbone_of, original_class
from adjoint.layers.packed_documents import from_cu_seqlens

# Inputs of which some models make masks.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Backbones whose masks let tokens of a type attend to later ones, without a function that tells which. The
# comparison on first use tells whether others do.
SEE_LATER_TOKENS = ("GitModel", "HrmTextModel", "Molmo2Model", "PaliGemmaModel", "PI0Model")
# `Sizes.busy` of wrapped models; of those with attention, outputs of which are kept, too, fewer.
BUSY_TOKENS, BUSY_TOKENS_WITH_ATTENTION = 1280, 1024
Starts = list[tuple[int, ...]]  # for each row, the first tokens of its documents


def kept_features(model: nn.Module) -> int:
    """Estimate how many elements per token a chunk of the backbone keeps for its backward.

    Counted are inputs and outputs of products and convolutions; of experts, only those that a token is
    routed to. For models of several kinds in float32 autograd keeps 0.8 to 1.3 times as much."""
    config = backbone_of(model).config
    experts, total = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1, 0
    for module in backbone_of(model).modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):  # not by the weight's shape, which quantization changes
            total += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            total += module.in_channels + module.out_channels
        else:
            shapes = [p.shape for p in module.parameters(recurse=False) if p.dim() in (2, 3)]
            total += sum(sum(shape[-2:]) * (experts if len(shape) == 3 else 1) for shape in shapes)
    return total


def sizes_of(
    features: int, slots: Sequence[Slot], element: int, width: int, weights_on_host: bool = False
) -> Sizes:
    """Return a model's `Sizes`.

    Args:
        features: from `kept_features`.
        slots: of its cache.
        element: bytes of an activation's element.
        width, weights_on_host: as in `Sizes`.
    """
    states = [math.prod(slot.shape) * slot.dtype.itemsize for slot in slots if slot.grows is None]
    has_attention = len(states) < len(slots)
    return Sizes(
        max(features, 1) * element,
        sum(states),
        BUSY_TOKENS_WITH_ATTENTION if has_attention else BUSY_TOKENS,
        width,
        weights_on_host,
        stream=width * element,
        has_attention=has_attention,
    )


# -------------------------------------------------------------------------------------------------- documents


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


# ----------------------------------------------------------------------------------------------------- blocks


def block_function(
    model: PreTrainedModel, inputs: Mapping[str, object]
) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Return the model's own function from token types to blocks of tokens that attend to each other.

    It takes types (batch, seqlen) and returns the number of each token's block in this shape, -1 for none.
    None if the model's masks do not depend on token types, or these are not among the inputs.

    Args:
        inputs: of a call or a chunk, by name.

    Returns:
        The name of the input with the types, and the function.

    Raises:
        Refused: its blocks are not runs of tokens, which a chunk could hold whole.
    """
    if inputs.keys().isdisjoint(TOKEN_TYPES):
        return None
    kind = original_class(backbone_of(model))
    if blocks := vars(sys.modules[kind.__module__]).get("get_block_sequence_ids_for_mask"):
        name = next(iter(inspect.signature(blocks).parameters))
        return (name, lambda types: blocks(types, device=types.device)) if name in inputs else None
    if kind.__name__ in SEE_LATER_TOKENS:
        name = next(name for name in TOKEN_TYPES if name in inputs)
        check.refuse(model, f"{name} lets tokens attend to later ones, which a chunk does not have")
    return None


def _continues_block(blocks: Tensor) -> Tensor:
    """Return the mask of the tokens whose successor is in the same block, (batch, seqlen - 1) bool."""
    return (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)


def refuse_unknown_blocks(
    model: PreTrainedModel, sees_next: Tensor | None, inputs: Mapping[str, object]
) -> None:
    """Refuse a mask of the model's own in which tokens see later ones, if `block_function` does not tell so.

    Args:
        sees_next: (batch, seqlen - 1) bool, the tokens that attend to the one after them, or None.
        inputs: of the call, by name.
    """
    if sees_next is None:
        return
    named_function = block_function(model, {n: v for n, v in inputs.items() if v is not None})
    if named_function is not None:
        name, blocks_in = named_function
        types = inputs[name]
        assert isinstance(types, Tensor)
        sees_next = sees_next & ~_continues_block(blocks_in(types))
    if bool(sees_next.any()):
        check.refuse(model, "its own mask lets tokens attend to later ones, which a chunk does not have")


def move_edges_out_of_blocks(model: PreTrainedModel, spec: EngineSpec, batch: Batch) -> EngineSpec:
    """Return a spec whose chunks never end inside a block of tokens that attend to each other.

    An edge inside a block moves to the block's end. Without blocks the spec itself is returned."""
    if (named_function := block_function(model, batch.inputs)) is None:
        return spec
    name, blocks_in = named_function
    seqlen = batch.seqlen
    is_within_block = _continues_block(blocks_in(batch.inputs[name])).any(0).tolist()
    documents, moved_edges = (*spec.documents, seqlen), list[int]()
    for start, stop in itertools.pairwise(documents):
        last_edge = start
        for cut in spec.cuts(seqlen):
            edge = cut
            while start < edge < stop and is_within_block[edge - 1]:
                edge += 1
            if last_edge + spec.least <= edge <= stop - spec.least:
                moved_edges.append(last_edge := edge)
    return dataclasses.replace(spec, chunk_size=seqlen, cut_at=tuple(moved_edges))
