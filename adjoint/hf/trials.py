"""What is tried on a few tokens besides gradients: padding, packed documents, inputs that a model ignores."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.compare import TOKENS, alike
from adjoint.hf.check import Refused, refuse
from adjoint.hf.kernels import fla
from adjoint.hf.kernels.replacements import by_pytorch
from adjoint.hf.model_parts import ERRORS, backbone_of, class_of, gathering, plainly
from adjoint.hf.trial_copy import in_eval_mode, some_tokens

CHUNK = 5  # of the TOKENS that are compared


def left_padding(model: Any) -> None:
    """Refuses padding at the left where cutting it off is not what the model does with it.

    Raises:
        ValueError: hidden states of padded tokens are not those of the tokens alone.
    """
    if not _apart(model, attention_mask=(torch.arange(TOKENS)[None] >= CHUNK).long()):
        raise ValueError(
            f"rows are padded at the left, and {class_of(model).__name__} counts padding in its tokens' "
            "positions: give position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or pad at the "
            "right (tokenizer.padding_side = 'right')"
        )


def masks_padding(model: Any, compare_padded: Callable[[], float]) -> bool:
    """Whether chunks make the hidden states of padding at the right that the model makes; warns if not, as a
    loss may read them."""
    try:
        compare_padded()
    except Refused:
        warnings.warn(
            f"{class_of(model).__name__}: chunks make other hidden states of padded tokens than the model "
            "does (those of all other tokens are the same): a loss that reads them gets another gradient",
            stacklevel=2,
        )
        return False
    return True


def packing(model: Any, names: Sequence[str], use_cache: bool | None) -> None:
    """Warns where packed documents, told by inputs with these names, are not kept apart without chunks;
    whether the call asks for a cache may make the difference."""
    try:
        apart = _apart(model, use_cache=use_cache, **two_documents(names))
    except ERRORS:  # by itself the model refuses them
        return
    if not apart:
        warnings.warn(
            f"position_ids start again, and are read as packed documents, which are kept apart: called like "
            f"this, {class_of(model).__name__} by itself lets documents see those before them",
            stacklevel=2,
        )


def documents_of_its_own(model: Any, names: Sequence[str]) -> None:
    """Refuses documents told by inputs with these names where the model's own code does not look at them.

    Raises:
        Refused: a document's tokens see those before it.
    """
    if not _apart(model, use_cache=False, **two_documents(names)):
        refuse(
            model,
            f"documents are told apart by {', '.join(names)}, and its own code lets them see those before "
            "them",
            "adjoint.Exact() keeps them apart",
        )


def two_documents(names: Sequence[str]) -> dict[str, Any]:
    """The inputs of these names for TOKENS of which the second document begins at CHUNK."""
    places = torch.arange(TOKENS, dtype=torch.int32)[None]
    number, cuts = (places >= CHUNK).int(), torch.tensor([0, CHUNK, TOKENS], dtype=torch.int32)
    forms = {
        "position_ids": (places - CHUNK * number).long(),
        "attention_mask": torch.ones_like(places).long(),
    }
    forms |= {"seq_idx": number, "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    return {name: forms.get(name, TOKENS - CHUNK) for name in names}


@torch.no_grad()
def _apart(model: Any, **given: Any) -> bool:
    """Whether the backbone by itself, given this, makes the same hidden states of all but the first CHUNK
    tokens as without these."""
    if fla.is_of_fla(model):
        return fla.keeps_apart(given)
    backbone, ids = backbone_of(model), some_tokens(model)[0]
    takes = inspect.signature(class_of(backbone).forward).parameters
    usual = ("position_ids", "attention_mask", "use_cache")
    known = {n: v for n, v in given.items() if n in takes or n not in usual}
    known = {n: v.to(ids.device) if isinstance(v, Tensor) else v for n, v in known.items()}
    forward = functools.partial(class_of(backbone).forward, backbone, return_dict=True)
    with plainly(model):
        whole = gathering(model)(lambda: forward(input_ids=ids, **known))[0]
        return alike(whole[:, CHUNK:], gathering(model)(lambda: forward(input_ids=ids[:, CHUNK:]))[0])


@torch.no_grad()
def ignores(model: Any, name: str, labelled: bool) -> bool:
    """Whether a model's own forward takes an input of this name without reading it: seen by giving it
    numbers that are none, for a few tokens.

    Args:
        labelled: whether it is asked for a loss.
    """
    parameters = inspect.signature(class_of(model).forward).parameters
    if name in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    ids, labels = some_tokens(model)
    given = {"input_ids": ids, "use_cache": False, "return_dict": True} | (
        {"labels": labels} if labelled else {}
    )
    probe = torch.full(ids.shape, torch.nan, device=ids.device)
    forward = functools.partial(class_of(model).forward, model, **given)
    with plainly(model), in_eval_mode(model), by_pytorch(model):
        expected = gathering(model)(forward)[0]
        try:
            found = gathering(model)(lambda: forward(**{name: probe}))[0]
        except ERRORS:
            return False
    return torch.equal(found, expected)
