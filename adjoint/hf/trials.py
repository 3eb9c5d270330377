"""Trials on a few tokens besides gradients: padding, packed documents, inputs that a model ignores."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.engine.verification import TOKENS, Refused, alike
from adjoint.hf.check import refuse
from adjoint.hf.kernels import fla
from adjoint.hf.kernels.replacements import pytorch_references
from adjoint.hf.model_parts import (
    MODEL_ERRORS,
    backbone_of,
    calling_original_forwards,
    gathered_runner,
    original_class,
)
from adjoint.hf.trial_copy import TRIAL_CHUNK_SIZE, example_tokens, in_eval_mode


def refuse_left_padding(model: PreTrainedModel) -> None:
    """Refuse padding at the left if the model does more with it than cut it off.

    Raises:
        ValueError: the hidden states after padding are not those of the tokens alone.
    """
    if not _ignores_first_tokens(
        model, attention_mask=(torch.arange(TOKENS)[None] >= TRIAL_CHUNK_SIZE).long()
    ):
        raise ValueError(
            f"rows are padded at the left, and {original_class(model).__name__} counts padding in its "
            "tokens' positions: give position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or pad at "
            "the right (tokenizer.padding_side = 'right')"
        )


def masks_padding(model: PreTrainedModel, compare_padded: Callable[[], float]) -> bool:
    """Whether chunks compute the model's own hidden states of padding at the right.

    Warns if not, as a loss may read them."""
    try:
        compare_padded()
    except Refused:
        warnings.warn(
            f"{original_class(model).__name__}: hidden states at padding, computed by chunks, differ from "
            "the model's own (all others are the same): a loss that reads them gets a different gradient",
            stacklevel=2,
        )
        return False
    return True


def warn_if_documents_mix(model: PreTrainedModel, names: Sequence[str], use_cache: bool | None) -> None:
    """Warn if the model itself does not keep packed documents apart, as chunks do.

    Args:
        names: of the inputs that describe the documents.
        use_cache: of the call; it may decide whether the model looks at them.
    """
    try:
        is_kept_apart = _ignores_first_tokens(model, use_cache=use_cache, **inputs_of_two_documents(names))
    except MODEL_ERRORS:  # the model itself refuses such inputs
        return
    if not is_kept_apart:
        warnings.warn(
            "position_ids start again, so they are read as packed documents, which are kept apart: called "
            f"like this, {original_class(model).__name__} by itself lets documents attend to earlier ones",
            stacklevel=2,
        )


def refuse_if_documents_mix(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse documents described by inputs with these names if the model's own code ignores them.

    Raises:
        Refused: a document's tokens attend to those before it.
    """
    if not _ignores_first_tokens(model, use_cache=False, **inputs_of_two_documents(names)):
        refuse(
            model,
            f"documents are marked by {', '.join(names)}, and its own code lets them attend to earlier ones",
            "adjoint.Exact() keeps them apart",
        )


def inputs_of_two_documents(names: Sequence[str]) -> dict[str, Tensor | int]:
    """Return the inputs of these names for TOKENS; the second document begins at TRIAL_CHUNK_SIZE."""
    positions = torch.arange(TOKENS, dtype=torch.int32)[None]
    document, cuts = (
        (positions >= TRIAL_CHUNK_SIZE).int(),
        torch.tensor([0, TRIAL_CHUNK_SIZE, TOKENS], dtype=torch.int32),
    )
    forms = {
        "position_ids": (positions - TRIAL_CHUNK_SIZE * document).long(),
        "attention_mask": torch.ones_like(positions).long(),
    }
    forms |= {"seq_idx": document, "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    return {name: forms.get(name, TOKENS - TRIAL_CHUNK_SIZE) for name in names}


@torch.no_grad()
def _ignores_first_tokens(model: PreTrainedModel, **inputs: Tensor | int | None) -> bool:
    """Whether, given these inputs, the first TRIAL_CHUNK_SIZE tokens change no later hidden state of the
    backbone."""
    if fla.is_of_fla(model):
        return fla.ignores_other_tokens(inputs)
    backbone, ids = backbone_of(model), example_tokens(model)[0]
    parameters = inspect.signature(original_class(backbone).forward).parameters
    optional = ("position_ids", "attention_mask", "use_cache")
    accepted = {n: v for n, v in inputs.items() if n in parameters or n not in optional}
    accepted = {n: v.to(ids.device) if isinstance(v, Tensor) else v for n, v in accepted.items()}
    forward = functools.partial(original_class(backbone).forward, backbone, return_dict=True)
    with calling_original_forwards(model):
        hidden = gathered_runner(model)(lambda: forward(input_ids=ids, **accepted))[0]
        return alike(
            hidden[:, TRIAL_CHUNK_SIZE:],
            gathered_runner(model)(lambda: forward(input_ids=ids[:, TRIAL_CHUNK_SIZE:]))[0],
        )


@torch.no_grad()
def ignores_input(model: PreTrainedModel, name: str, has_labels: bool) -> bool:
    """Whether a model's own forward accepts an input of this name without reading it.

    It is given NaNs for a few tokens: an output that stays the same does not depend on them.

    Args:
        has_labels: whether the call asks for a loss.
    """
    parameters = inspect.signature(original_class(model).forward).parameters
    if name in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    ids, labels = example_tokens(model)
    inputs = {"input_ids": ids, "use_cache": False, "return_dict": True} | (
        {"labels": labels} if has_labels else {}
    )
    nan_input = torch.full(ids.shape, torch.nan, device=ids.device)
    forward = functools.partial(original_class(model).forward, model, **inputs)
    with calling_original_forwards(model), in_eval_mode(model), pytorch_references(model):
        expected = gathered_runner(model)(forward)[0]
        try:
            output = gathered_runner(model)(lambda: forward(**{name: nan_input}))[0]
        except MODEL_ERRORS:
            return False
    return torch.equal(output, expected)
