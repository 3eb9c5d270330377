"""Calls for which a model's original forward does not give the result of the whole sequence.

A wrapped model runs its original forward where no gradient is asked for: in generation and evaluation. For
some calls that is not the result of the whole sequence: with several tokens after a cache (Mamba-1's scan
begins without the state), with padding at the left (xLSTM reads it as tokens), with packed documents.
`why_original_differs` decides which calls these are, for all of a wrapped model's calls without labels. They
run by chunks; where these refuse them, the original forward runs with a warning.

What depends on the class is tried on a few tokens, once for each state of the model. A call of one token
after a cache, as in generation, needs no trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from adjoint.fla.functions import is_of_fla
from adjoint.hf.call import Call
from adjoint.hf.carried_state import make_differentiable
from adjoint.hf.language_inputs import POSITIONS
from adjoint.hf.model_parts import current_weights, forward_parameters, original_class
from adjoint.hf.transformers_api import (
    Cache,
    CacheLayerMixin,
    ModelOutput,
    has_recurrent_states,
    holds_tokens,
    keeps_states_on_modules,
)
from adjoint.hf.verify.first_use import verification_of
from adjoint.hf.verify.trial_copy import in_eval_mode
from adjoint.hf.verify.trials import (
    continues_from_cache,
    counts_cached_tokens,
    hides_left_padding,
    keeps_documents_apart,
)
from adjoint.hf.wrap_state import CallNeeds


def why_original_differs(call: Call, needs: CallNeeds | None = None) -> str | None:
    """Return why the original forward may not give a call's result, or None.

    The text follows "whose own forward". Packed documents are not tried here: they always run by chunks.

    Args:
        needs: of any rank's call, if ranks gather weights together: all run the trials of padding.
    """
    model = call.model
    if needs is not None:
        differs_on_any_rank(model, needs)
    if keeps_states_on_modules(model.config) and (
        has_recurrent_states(call.cache) or (call.cache is None and call.arguments.get("use_cache"))
    ):
        return "keeps its states on its modules, not in a cache: give rows without padding"
    if call.seqlen is None or is_of_fla(model.config.get_text_config()):
        return None
    if call.seqlen == 1:
        is_recurrent = call.begins_with_padding and any(s.grows is None for s in verification_of(model).slots)
        return "masks no padding in a call of one token: give two tokens or more" if is_recurrent else None
    if call.has_documents:
        return "lets documents read those before them: call it once for each document"
    if holds_tokens(call.cache):
        has_positions = call.has(POSITIONS) or _positions_after(call) is not None
        key = "continues", has_positions
        if not verification_of(model).compute_once(key, continues_from_cache, model, has_positions):
            return (
                "does not go on from its cache with several tokens as it does token by token: give rows "
                "without padding, or one token at a time"
            )
    elif call.begins_with_padding and not _hides_left_padding(model, call.has(POSITIONS)):
        return "reads padding at the left as tokens, or counts it in their positions: pad at the right"
    return None


def _hides_left_padding(model: PreTrainedModel, has_positions: bool) -> bool:
    """Whether the original forward hides padding at the left."""
    key, verification = ("hides padding at the left", has_positions), verification_of(model)
    with in_eval_mode(model):
        return verification.compute_once(key, hides_left_padding, model, has_positions)


def differs_on_any_rank(model: PreTrainedModel, needs: CallNeeds) -> bool:
    """Whether the original forward may not give the result of any rank's call without a cache.

    All ranks that gather weights together ask it with the same needs, and run the same trials."""
    padded = needs.padded_left, needs.padded_left_with_positions
    hides = [
        _hides_left_padding(model, has_positions) for has_positions in (False, True) if padded[has_positions]
    ]
    return needs.documents or not all(hides)


def run_original(call: Call, difference: str | None = None, needs: CallNeeds | None = None) -> ModelOutput:
    """Run the original forward of a backbone, with a warning where it does not give the call's result.

    Args:
        difference, needs: as `why_original_differs` returns and takes it.
    """
    if needs is not None and needs.documents:
        _try_documents_on_ranks(call)
    if difference is not None and not (call.has_documents and _keeps_documents_apart(call)):
        warnings.warn(
            f"this call runs as if not wrapped, by {original_class(call.model).__name__}, whose own forward "
            f"{difference}",
            stacklevel=5,
        )
    output = call.run_original(**_corrections(call))
    for value in output.values() if isinstance(output, Mapping) else output:
        if hasattr(value, "linear_cache"):  # MiniMax's
            make_differentiable(value)
    return output


def _corrections(call: Call) -> dict[str, Tensor]:
    """Return arguments without which the original forward misreads a cache."""
    if call.cache is None:
        return {}
    if hasattr(call.cache, "linear_cache"):
        make_differentiable(call.cache)
    changed: dict[str, Tensor] = {}
    if (positions := _positions_after(call)) is not None:
        changed[POSITIONS] = positions
    mask, seqlen = call.arguments.get("attention_mask"), call.seqlen
    if not isinstance(mask, Tensor) or mask.dim() != 2 or seqlen is None or mask.shape[1] == seqlen:
        return changed
    if isinstance(call.cache, Cache) and all(call.cache.is_linear):
        changed["attention_mask"] = mask[:, -seqlen:]  # its tokens would be multiplied by the mask of all
    return changed


def _positions_after(call: Call) -> Tensor | None:
    """Return the positions of a call's tokens after its cache, where the original forward would miscount.

    Bamba counts from 0, MiniMax asks a layer without keys for the number of tokens. In other models the
    positions may be more than a count (of images), so that they are left to the model."""
    cache, model = call.cache, call.model
    if not isinstance(cache, DynamicCache) or not (any(cache.is_linear) or hasattr(cache, "linear_cache")):
        return None
    if call.has(POSITIONS) or POSITIONS not in forward_parameters(model) or call.seqlen is None:
        return None
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    if not (tokens := max(lengths, default=0)):
        return None
    if verification_of(model).compute_once("counts cached tokens", counts_cached_tokens, model):
        return None
    device = next(model.parameters()).device
    return torch.arange(tokens, tokens + call.seqlen, device=device)[None]


def _keeps_documents_apart(call: Call) -> bool:
    """Whether the original forward keeps the call's documents apart."""
    names, use_cache, model = call.document_inputs, call.arguments.get("use_cache"), call.model
    if call.for_chunks.intersection(names):  # it does not even get them
        return False
    verification, key = verification_of(model), ("documents apart", names, use_cache)
    with in_eval_mode(model):
        return verification.compute_once(key, keeps_documents_apart, model, names, use_cache)


def _try_documents_on_ranks(call: Call) -> None:
    """Run the trial of documents on all ranks that gather weights together, if any rank's call needs it."""
    model, names, use_cache = call.model, call.document_inputs, call.arguments.get("use_cache")
    verification, key = verification_of(model), ("documents apart", names, use_cache)
    is_needed = call.has_documents and key not in verification.results
    is_needed = is_needed and not call.for_chunks.intersection(names)
    if not current_weights(model).largest(is_needed)[0]:
        return
    if is_needed:
        _keeps_documents_apart(call)
        return
    with in_eval_mode(model):  # for another rank
        verification.without_traces(keeps_documents_apart, model, ("position_ids",), False)
