"""What a wrapped model is called with, read once. What chunks know goes on to them; everything else is
refused by its name, or, where a call asks for more than a loss, run as if the model were not wrapped."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX, Batch, divisor_of, shift_labels
from adjoint.hf import check, documents
from adjoint.hf.layers import backbone_of, class_of

# What more a call may ask for, all of which transformers' own forward gives.
CACHES = ("past_key_values", "cache_params")
MORE = (*CACHES, "use_cache", "output_attentions", "output_hidden_states")
DOCUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# A causal LM called without labels hands on to its backbone what is its loss's.
KNOWN = {"input_ids", "attention_mask", "return_dict", "num_items_in_batch", *DOCUMENTS}
KNOWN_WITH_LABELS = {*KNOWN, "labels", "shift_labels"}
# Inputs with a value a token, which a backbone may take beside ids.
TOKEN_WISE = ("token_type_ids",)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a causal LM with labels, or of its backbone.

    Attributes:
        batch: of a backbone's call the targets are the ids; rows may lie end to end, as documents.
        starts: first tokens of the documents, by which chunks are cut.
        shape: batch and seqlen as they were given.
        return_dict: whether the result has names.
        counted: whether `num_items_in_batch` is given. masked: whether an attention_mask is.
        use_cache: as given.
        padded_left: whether rows were padded at the left without position_ids.
        packed: whether position_ids told several documents apart.
    """

    batch: Batch
    starts: tuple[int, ...]
    shape: tuple[int, int]
    return_dict: bool
    counted: bool
    masked: bool
    use_cache: bool | None
    padded_left: bool
    packed: bool


def asks_for(model: Any, kwargs: dict[str, Any]) -> str | None:
    """The name of what a call asks for beyond its loss or hidden states, by argument or by configuration;
    None if it asks for nothing else."""
    for name in MORE:
        given = kwargs.get(name)
        if given is None and name in ("output_attentions", "output_hidden_states"):
            given = getattr(model.config, name, False)
        if isinstance(given, (list, tuple)) or given:
            return name
    return None if kwargs.get("input_ids") is not None else "inputs_embeds instead of input_ids"


def are_packed(kwargs: dict[str, Any]) -> bool:
    """Whether a call tells documents apart."""
    positions = kwargs.get("position_ids")
    again = positions is not None and positions.dim() == 2 and bool((positions[:, 1:] == 0).any())
    return again or any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seq_lens_q"))


def gives_names(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call's result has names, or is a tuple."""
    given = kwargs.get("return_dict")
    return bool(getattr(model.config, "return_dict", True) if given is None else given)


def has_labels(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for a loss."""
    return any(kwargs.get(name) is not None for name in ("labels", "shift_labels"))


def targets_of(kwargs: dict[str, Any]) -> Tensor:
    """The labels of a call that has some, (batch, seqlen) int64, shifted.

    Raises:
        ValueError: they have another shape than input_ids, or are no whole numbers.
    """
    ids = kwargs["input_ids"]
    name = "labels" if kwargs.get("shift_labels") is None else "shift_labels"
    labels = kwargs[name]
    if labels.is_floating_point() or labels.shape != ids.shape:
        raise ValueError(
            f"{name} must be whole numbers of input_ids' shape {tuple(ids.shape)}, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    labels = labels.to(ids.device, torch.int64)
    return labels if name == "shift_labels" else shift_labels(labels)


def asked_divisor(kwargs: dict[str, Any], targets: Tensor) -> int | Tensor:
    """What the summed loss is divided by: `num_items_in_batch`, or the number of labels that count."""
    given = kwargs.get("num_items_in_batch")
    if given is None:
        return divisor_of(targets)
    return given.to(targets.device) if isinstance(given, Tensor) else given


def read(model: Any, kwargs: dict[str, Any]) -> Call:
    """A call that chunks are made of, of the causal LM or of the backbone.

    Raises:
        ValueError: an input is not known, or what it says cannot be.
    """
    targets = targets_of(kwargs) if has_labels(kwargs) else None
    refuse_unknown(model, kwargs, KNOWN if targets is None else KNOWN_WITH_LABELS)
    ids = kwargs["input_ids"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] == 0 or ids.shape[0] == 0:
        raise ValueError(
            f"input_ids must be (batch, seqlen) whole numbers, got {ids.dtype} {tuple(ids.shape)}"
        )
    ids = ids.long()
    mask = _mask(model, kwargs.get("attention_mask"), ids, targets)
    starts = documents.starts_of(kwargs, ids, mask)
    tensors = {"ids": ids, "targets": ids if targets is None else targets}
    for name in TOKEN_WISE:
        if kwargs.get(name) is not None:
            tensors[name] = _token_wise(name, kwargs[name], ids)
    divisor = 1 if targets is None else asked_divisor(kwargs, targets)
    left = mask is not None and not bool(mask[:, 0].all())
    by_position = kwargs.get("position_ids") is not None
    several = any(
        len(row) > 1 + (start > 0) for row, start in zip(starts, _first_real(mask, ids), strict=True)
    )
    tensors, flat = documents.as_one_row(tensors, starts)
    return Call(
        Batch(tensors.pop("ids"), tensors.pop("targets"), divisor, inputs=tensors),
        flat,
        (ids.shape[0], ids.shape[1]),
        return_dict=gives_names(model, kwargs),
        counted=kwargs.get("num_items_in_batch") is not None,
        masked=kwargs.get("attention_mask") is not None,
        use_cache=kwargs.get("use_cache"),
        padded_left=left and not by_position,
        packed=by_position and several,
    )


def refuse_unknown(model: Any, kwargs: dict[str, Any], known: set[str], *, explicit: bool = False) -> None:
    """Refuses what is neither known nor left at its default.

    Args:
        explicit: whether what the backbone's forward names is known too.

    Raises:
        Refused: an input is given that chunks do not know.
    """
    own = inspect.signature(class_of(model).forward).parameters
    takes = inspect.signature(class_of(backbone_of(model)).forward).parameters
    for name, value in kwargs.items():
        default = own[name].default if name in own else None
        same = value is None or value is False or value is default or (_plain(value) and value == default)
        if same or name in known or (name in takes and (explicit or name in TOKEN_WISE)):
            continue
        if name in MORE or name == "output_router_logits":  # asked for with a value that means no
            continue
        if name == "ignore_index" and value == IGNORE_INDEX:
            continue
        remedy = "set the labels that do not count to -100" if name == "ignore_index" else "leave it out"
        check.refuse(model, f"{name} is not an input that chunks know: {remedy}")


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _mask(model: Any, mask: Any, ids: Tensor, targets: Tensor | None) -> Tensor | None:
    """Which tokens are no padding, (batch, seqlen) bool; None if all of them are.

    Right padding is what causal models do not see, and padding at the left is cut off.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = (
            f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
        )
        check.refuse(model, f"an attention_mask {kind} is not understood, only (batch, seqlen)")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have input_ids' shape {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    mask = mask.to(ids.device)
    real = mask != 0
    if not torch.equal(real.to(mask.dtype), mask):
        raise ValueError(
            "attention_mask has other values than 0 and 1: give packed documents as position_ids or seq_idx"
        )
    begun, goes_on = (t.long().cumsum(1) > 0 for t in (real, real.flip(1)))
    if bool((begun & goes_on.flip(1) & ~real).any()):
        raise ValueError("attention_mask has zeros between ones: only the ends of a row can be padding")
    if targets is not None and bool(((targets != IGNORE_INDEX) & ~real).any()):
        raise ValueError(
            "labels count padded tokens, or a first one that padding precedes: set them to -100 where "
            "attention_mask is 0, and that of the first token after padding"
        )
    return None if bool(real.all()) else real


def _first_real(mask: Tensor | None, ids: Tensor) -> list[int]:
    """Of each row, how many tokens of padding are before its first."""
    return [0] * len(ids) if mask is None else (mask.cumsum(1) == 0).sum(1).tolist()


def _token_wise(name: str, given: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(given, Tensor) or given.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"{name} must have input_ids' shape {tuple(ids.shape)}, got {tuple(given.shape)}")
    return given.expand(ids.shape)
