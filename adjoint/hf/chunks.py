"""Where chunks of a call begin and end: by its method, at documents, and not within blocks of tokens that see
each other."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.documents import from_cu_seqlens
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import Scheme
from adjoint.hf import check
from adjoint.hf.cache import Slot
from adjoint.hf.layers import backbone_of, class_of
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated

BUSY = 1024  # tokens of a chunk on a CPU where nobody says; see `adjoint.engine.chunk_size`
TYPES = "token_type_ids"  # of which some models make masks

# ----------------------------------------------------------------------------------------- methods


def check_method(method: Any) -> None:
    """Raises a ValueError where a method is not for transformers models."""
    if isinstance(method, Truncated) and (method.window == "auto" or method.unbiased):
        raise ValueError(
            "a wrapped model takes Truncated(window) with a window in tokens: auto and unbiased need layers "
            "of a Stack"
        )
    if isinstance(method, (Exact, Truncated)) and 1 in (method.chunk_size, getattr(method, "window", None)):
        raise ValueError(
            "a wrapped model's chunks have two tokens at least, as transformers takes one for decoding: "
            f"chunk_size and window are 2 or more; got {method!r}"
        )
    if not isinstance(method, (Backprop, Exact, Truncated, MiniSequence)):
        raise ValueError(
            f"a wrapped model takes Exact(), Truncated(window), MiniSequence() or Backprop(): got {method!r}"
        )


def recompute_of(method: Any) -> str:
    """How much of a layer's tape is computed again."""
    return getattr(method, "recompute", "none")


def scheme_of(method: Any, seqlen: int, chunk_size: int, starts: tuple[int, ...] = (0,)) -> Scheme:
    """A method's scheme, for whole models: chunks are cut at documents' starts, and a continuation has two
    tokens at least, as transformers takes one for decoding.

    Args:
        chunk_size: tokens a chunk where the method does not say. starts: first tokens of the documents.
    """
    size = max(2, min(getattr(method, "chunk_size", None) or chunk_size, seqlen))
    if isinstance(method, Truncated):
        assert isinstance(method.window, int)
        size = max(2, min(size, method.window))
        span = None if method.window >= seqlen else method.window // size * size
        return Scheme(size, documents=starts, span=span, least=2)
    return dataclasses.replace(method.scheme(seqlen, size), documents=starts, least=2)


def kept_features(model: nn.Module) -> int:
    """About as many elements a token as a chunk of the backbone keeps for its backward: what its products and
    convolutions read and write, of experts those of the ones that a token goes to. For models of several
    kinds in float32 autograd keeps 0.8 to 1.3 of it."""
    config: Any = backbone_of(model).config
    experts, total = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1, 0
    for module in backbone_of(model).modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):  # of quantized ones the weight's shape says nothing
            total += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            total += module.in_channels + module.out_channels
        else:
            shapes = [p.shape for p in module.parameters(recurse=False) if p.dim() in (2, 3)]
            total += sum(sum(shape[-2:]) * (experts if len(shape) == 3 else 1) for shape in shapes)
    return total


def sizes_of(features: int, slots: Sequence[Slot], element: int) -> Sizes:
    """A model's `Sizes`.

    Args:
        features: of `kept_features`. slots: of its cache. element: bytes of an activation's element.
    """
    states = (math.prod(slot.shape) * slot.dtype.itemsize for slot in slots if slot.grows is None)
    return Sizes(max(features, 1) * element, sum(states), BUSY)


# ------------------------------------------ documents, in the forms in which Hugging Face's trainers say them

Starts = list[tuple[int, ...]]


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


# ------------------------------------------------------------------------------------------ blocks


def blocks_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Of token types (batch, seqlen) the blocks whose tokens see each other, numbers of this shape, -1 for
    none, by the model's own code; None where masks are made without token types.

    Raises:
        Refused: its blocks are no runs of tokens, which a chunk could hold whole.
    """
    kind = class_of(backbone_of(model))
    if blocks := vars(sys.modules[kind.__module__]).get("get_block_sequence_ids_for_mask"):
        return functools.partial(blocks, device=None)
    if "block_sequence_ids" in inspect.getsource(kind.forward):
        check.refuse(model, "token_type_ids lets tokens see those after them, which a chunk does not know")
    return None


def blocks_in(model: Any, batch: Batch) -> Tensor | None:
    """The blocks of a batch, (batch, seqlen); None where there are none."""
    if (types := batch.inputs.get(TYPES)) is None or (blocks := blocks_of(model)) is None:
        return None
    return blocks(types)


def around_blocks(scheme: Scheme, blocks: Tensor) -> Scheme:
    """The scheme whose chunks end no earlier than a block does.

    Args:
        blocks: (batch, seqlen), the blocks' numbers, -1 for none; see `blocks_of`.
    """
    seqlen = blocks.shape[1]
    within = ((blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)).any(0).tolist()
    documents, moved = (*scheme.documents, seqlen), list[int]()
    for start, stop in itertools.pairwise(documents):
        last = start
        for cut in scheme.cuts(seqlen):
            at = cut
            while start < at < stop and within[at - 1]:
                at += 1
            if last + scheme.least <= at <= stop - scheme.least:
                moved.append(last := at)
    return dataclasses.replace(scheme, chunk_size=seqlen, cut_at=tuple(moved))
