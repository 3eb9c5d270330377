"""Log-probabilities of tokens under a causal LM of transformers, wrapped or not, and its head's loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.host_weights import fetched
from adjoint.engine.step import uncompiled
from adjoint.engine.sweep import ContextFactory
from adjoint.errors import UserError
from adjoint.hf.head import HeadCalls, Output, entropies, logprobs, summed_loss
from adjoint.hf.hf_model import hidden_states, weighted_logprobs
from adjoint.hf.model_parts import (
    MISSING,
    backbone_of,
    base_of,
    current_weights,
    forward_parameters,
    overridden,
)
from adjoint.hf.snapshot import HeadState
from adjoint.hf.token_values import two_passes
from adjoint.hf.wrap_state import LOG_PROBS, ValueRequest, WrapState, wrap_state_or_original
from adjoint.parallel.access import weights_type

_REMEDY = "call it under torch.no_grad(), or give the causal LM labels, whose loss works"


@uncompiled
def logprobs_of_model(
    model: nn.Module, input_ids: Tensor, counted: Tensor, temperature: float, attention_mask: Tensor | None
) -> Tensor:
    """Return the log-probabilities of the counted tokens, (tokens,); arguments as `token_logprobs` has them.

    The model is called, so that what is around the causal LM (DistributedDataParallel, PEFT, accelerate's
    autocast) does its part; in the place of the causal LM's forward runs its backbone and, by slices, its
    head. The head is not a call of `lm`: that would make all logits.

    Args:
        counted: (batch, seqlen) bool, False at position 0.
    """
    lm = causal_lm_of(model, "token_logprobs", " or a Stack")
    refuse_unreachable_head(lm, "token_logprobs")
    labels, wrap_state = input_ids[:, 1:][counted[:, 1:]], wrap_state_or_original(lm)
    inputs: dict[str, object] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    if wrap_state.group is not None and wrap_state.runs_chunks:  # no rank has all hidden states
        request = ValueRequest((LOG_PROBS,), temperature)
        return _values_of_ranks(model, wrap_state, inputs, counted, request)[:, 0]

    def of_hidden(hidden: Tensor) -> Tensor:
        with wrap_state.lock:
            chosen = hidden[:, :-1][counted[:, 1:]]
            return logprobs(lm, chosen, labels, temperature, head_as_now(lm))

    def weighted_sum(cotangents: Tensor) -> Tensor:
        weights = torch.zeros(input_ids.shape, dtype=cotangents.dtype, device=cotangents.device)
        weights[:, 1:][counted[:, 1:]] = cotangents
        return weighted_logprobs(lm, inputs, weights, temperature)

    if _takes_two_passes(model, lm):
        return two_passes(lm, lambda: _without_gradients(model, lm, inputs, of_hidden), weighted_sum)
    return on_hidden_states(model, lm, inputs, of_hidden, "token_logprobs")


@uncompiled
def logprobs_and_entropies(
    model: nn.Module, input_ids: Tensor, counted: Tensor, temperature: float, attention_mask: Tensor
) -> Tensor:
    """Return log-probabilities of the counted tokens and the entropies of their predictions, (2, tokens).

    They have no gradients. Arguments as `logprobs_of_model` has them."""
    lm = causal_lm_of(model, "token_logprobs")
    labels, wrap_state = input_ids[:, 1:][counted[:, 1:]], wrap_state_or_original(lm)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    lock = wrap_state.lock
    if wrap_state.group is not None and wrap_state.runs_chunks:  # no rank has all hidden states
        request = ValueRequest((LOG_PROBS, "entropy"), temperature)
        with torch.no_grad():
            return _values_of_ranks(model, wrap_state, inputs, counted, request).T

    def of_hidden(hidden: Tensor) -> Tensor:
        with lock:
            chosen = hidden[:, :-1][counted[:, 1:]]
            values = logprobs(lm, chosen, labels, temperature, lambda: lock)
            return torch.stack([values, entropies(lm, chosen, temperature)])

    return _without_gradients(model, lm, inputs, of_hidden)


def summed_loss_of_model(model: nn.Module, hidden: Tensor, targets: Tensor, caller: str) -> Tensor:
    """Return the loss of a causal LM's head, summed over the targets that are not ignored.

    Args:
        model: a causal LM, also inside the model of PEFT or of DistributedDataParallel.
        hidden: (batch, tokens, hidden_size).
        targets: (batch, tokens), already shifted.
        caller: stands before the message of an error.

    Raises:
        UserError: model is no causal LM, or its head cannot be applied outside of its own forward.
    """
    lm = causal_lm_of(model, caller, ", a Stack or an nn.Linear")
    refuse_unreachable_head(lm, caller)
    with wrap_state_or_original(lm).lock, fetched(lm.get_output_embeddings()):
        return summed_loss(lm, hidden, targets, calls=HeadCalls(slice_context=head_as_now(lm)))


def head_as_now(lm: PreTrainedModel) -> ContextFactory:
    """Return a context for slices of a head, which the backward runs again with the model as it is now.

    Inside, other threads wait for the model."""
    lock = wrap_state_or_original(lm).lock
    if not torch.is_grad_enabled() or weights_type(lm).is_gathered:
        return lambda: lock
    head = HeadState(lm)

    @contextlib.contextmanager
    def restored_head() -> Iterator[None]:
        with lock, head.restored():
            yield

    return restored_head


def _values_of_ranks(
    model: nn.Module,
    wrap_state: WrapState,
    inputs: dict[str, object],
    counted: Tensor,
    request: ValueRequest,
) -> Tensor:
    """Return values (tokens, values) of the counted tokens, of a model whose sequences ranks share."""
    ids = inputs["input_ids"]
    assert isinstance(ids, Tensor)
    with wrap_state.asking(request):
        values: Tensor = model(**inputs, labels=ids.masked_fill(~counted, IGNORE_INDEX)).last_hidden_state
    return values[:, :-1][counted[:, 1:]]


def _takes_two_passes(model: nn.Module, lm: PreTrainedModel) -> bool:
    """Whether the model runs by chunks whose backwards do not wait for the loss's."""
    return wrap_state_or_original(lm).runs_chunks and weights_type(model).is_gathered


def _without_gradients(
    model: nn.Module, lm: PreTrainedModel, inputs: dict[str, object], function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return function(hidden states) of a call without gradients, however the weights are held.

    Arguments as `on_hidden_states` has them."""
    with torch.no_grad():
        if not _takes_two_passes(model, lm):
            return on_hidden_states(model, lm, inputs, function, "token_logprobs")
        with wrap_state_or_original(lm).lock:
            hidden = hidden_states(lm, inputs)
            return current_weights(lm).run(lambda: function(hidden))


def on_hidden_states(
    model: nn.Module,
    lm: PreTrainedModel,
    inputs: dict[str, object],
    function: Callable[[Tensor], Tensor],
    caller: str,
) -> Tensor:
    """Call a model and return function(hidden states), computed in the place of its causal LM's logits.

    Args:
        lm: the causal LM inside the model.
        inputs: of the call, with input_ids.
        function: gets the backbone's hidden states (batch, seqlen, hidden_size).
        caller: stands before the message of an error.

    Raises:
        UserError: there are more hidden states than tokens.
    """
    backbone, results, tokens = backbone_of(lm), list[Tensor](), inputs["input_ids"]
    takes = forward_parameters(backbone)
    lm_forward, backbone_forward = (vars(m).get("forward", MISSING) for m in (lm, backbone))

    def of_hidden(hidden: Tensor) -> Tensor:
        assert isinstance(tokens, Tensor)
        if hidden.shape[:2] != tokens.shape:
            raise UserError(
                f"{caller}: the backbone returned {hidden.shape[1]} tokens of {tokens.shape[1]}: "
                "prompts that PEFT has learnt move the tokens, which only the model's own call knows"
            )
        return function(hidden)

    def run_lm(*_: object, **arguments: object) -> Tensor:
        arguments = {n: value for n, value in arguments.items() if value is not None and n in takes}
        with overridden(lm, "forward", lm_forward):
            return of_hidden(backbone(**arguments, return_dict=True)[0])

    def run_backbone(*args: object, **arguments: object) -> Output:
        with overridden(backbone, "forward", backbone_forward):  # which the comparison on first use copies
            hidden: Tensor = backbone.forward(*args, **{**arguments, "return_dict": True})[0]
            results.append(of_hidden(hidden))
        return Output(last_hidden_state=hidden[:, :1].detach())  # logits of one token that nobody reads

    if "forward" in vars(lm):  # accelerate's, around the forward that it has found
        with overridden(backbone, "forward", run_backbone):
            model(**inputs)
    else:
        with overridden(lm, "forward", run_lm):
            results.append(model(**inputs))
    return results[-1]


def causal_lm_of(model: nn.Module, caller: str, others: str = "") -> PreTrainedModel:
    """Return the causal LM inside DistributedDataParallel's, a compiled or PEFT's model.

    Args:
        caller, others: for the message of an error: who asks, and what else it takes.

    Raises:
        UserError: there is none.
    """
    inner: nn.Module = model
    while isinstance(wrapped := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
        inner = wrapped
    lm = base_of(inner)
    if not isinstance(lm, PreTrainedModel) or lm.get_output_embeddings() is None or backbone_of(lm) is lm:
        raise UserError(
            f"{caller} takes a causal LM of transformers{others}, got {type(model).__name__}: a "
            "model without a language-model head gives no probabilities"
        )
    return lm


def refuse_unreachable_head(lm: PreTrainedModel, caller: str) -> None:
    """Raise a UserError of `caller` for a model whose head works in its own forward alone."""
    if not torch.is_grad_enabled():
        return
    if weights_type(lm).copies_from_host:
        raise UserError(
            f"{caller}: offload_weights fetches the head's weight for its forward, and the backward "
            f"would not find it: {_REMEDY}"
        )
