"""Agreement of ranks on the calls that they make of one model.

Those that gather weights together (`fully_shard`, ZeRO-3) gather every weight at the same time, so they run
the same trials and the same number of chunks. One may have documents or padding where another has none, and
all run what any of them needs. A rank that gives another argument, or another mode, is refused: it would run
a trial that the others do not wait for. Where all run the model's own forward (`Backprop`), only the method
has to be the same. Those that split weights (tensor parallelism) must give the same tensors, too."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from adjoint.engine.host_weights import device_of
from adjoint.hf.call import DOCUMENT_INPUTS, LABEL_INPUTS, SUPPORTED_INPUTS, Call
from adjoint.hf.language_inputs import POSITIONS
from adjoint.hf.model_parts import (
    current_holding,
    current_weights,
    forward_parameters,
    original_class,
    root_of,
)
from adjoint.hf.transformers_api import holds_tokens
from adjoint.hf.wrap_state import CallNeeds, wrap_state_or_original
from adjoint.methods import is_plain
from adjoint.parallel import agreement
from adjoint.parallel.access import Holding, has_all_weights
from adjoint.parallel.split_tensors import local

# Arguments that some ranks may give and others not, and one that changes nothing but the output's type.
FREE_ARGUMENTS = {*DOCUMENT_INPUTS, "attention_mask", "return_dict"}
OTHER_ARGUMENTS = "arguments that its forward does not name"


def agree_on_call(call: Call) -> CallNeeds | None:
    """Return what the calls of all ranks need that gather this model's weights; None if none do.

    It is None as well where this rank has all weights and nothing is tried: for one token after a cache, as
    in generation, and for the model's own forward without gradients. There ranks may make different numbers
    of calls.

    Raises:
        UserError: the ranks' calls differ in an argument or a mode; all of them raise it.
    """
    if not current_holding(call.model).kind.is_gathered:
        return None
    weights, has_past = current_weights(call.model), holds_tokens(call.cache)
    is_evaluation = is_plain(vars(call.model)["_adjoint"].method) and not torch.is_grad_enabled()
    is_alone = is_evaluation or (has_past and call.seqlen == 1)
    if is_alone and has_all_weights(weights.root):
        return None
    tokens_after_cache = None if not has_past else "one" if call.seqlen == 1 else "several"
    described = _describe(call, tokens_after_cache)
    is_padded = call.begins_with_padding and not call.has_documents and not has_past
    padded = [is_padded and call.has(POSITIONS) == has_positions for has_positions in (False, True)]
    documents, *padded_anywhere = agreement.agree_on_call(
        weights, original_class(call.model).__name__, described, call.has_documents, *padded
    )
    without_positions, with_positions = map(bool, padded_anywhere)
    return CallNeeds(bool(documents), without_positions, with_positions)


def _describe(call: Call, tokens_after_cache: str | None) -> dict[str, object]:
    """Map names to what must be the same on all ranks: which arguments are given, flags, and modes."""
    named = {*forward_parameters(call.model), *SUPPORTED_INPUTS, *LABEL_INPUTS}
    described: dict[str, object] = {
        name: value if isinstance(value := call.arguments.get(name), bool) else value is not None
        for name in sorted(named - FREE_ARGUMENTS)
    }
    positions = call.arguments.get(POSITIONS)
    described |= {
        "the components of position_ids": len(positions)
        if isinstance(positions, Tensor) and positions.dim() == 3
        else 1,
        "how many tokens come after a cache": tokens_after_cache,
        OTHER_ARGUMENTS: sorted(call.provided - named),
        "whether gradients are on": torch.is_grad_enabled(),
        "training or evaluation mode": root_of(call.model).training,
        "the outputs asked for": agreement.describe(call.extra_outputs),
    }
    method = vars(call.model)["_adjoint"].method
    if is_plain(method):
        described = dict.fromkeys(described, agreement.NOT_COMPARED)
    return {**described, "the method": repr(method)}


def refuse_different_parts(call: Call, holding: Holding) -> None:
    """Refuse ranks that split a model's weights and differ in a buffer, a setting, a hook or in their calls.

    Their collectives would not meet, or add up parts of different tokens."""
    model = call.model
    described_call: list[tuple[str, Hashable]] = [
        ("the method", repr(wrap_state_or_original(model).method)),
        ("whether gradients are on", torch.is_grad_enabled()),
    ]
    argument_names = {*forward_parameters(model), *SUPPORTED_INPUTS, *LABEL_INPUTS, *call.arguments}
    for name in ("input_ids", *sorted(argument_names - {"input_ids"})):  # some another rank alone may give
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            described_call.append((name, (*value.shape, agreement.digest([local(value)]))))
        else:
            described_call.append((name, agreement.describe(value)))
    for group in holding.tensor_parallel_groups:
        subject = f"{original_class(model).__name__} under tensor parallelism"
        agreement.refuse_different_models(
            model.named_modules(), group, device_of(model), subject, described_call
        )
