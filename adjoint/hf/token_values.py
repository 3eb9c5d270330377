"""Values of each token's prediction, such as its log-probability, where nobody has all hidden states.

The head runs on each chunk, above the backbone, so that the ranks of a group share it, too. With plain
weights the values are the output of one autograd function, and their cotangents go back through the chunks.
Where weights are gathered (FSDP2, ZeRO-3) a chunk's backward runs inside a forward: the values are computed
without gradients first, and their weighted sum again, with gradients, when the cotangents are known."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX, Batch
from adjoint.engine.hidden_states import CollectHiddenStates, hidden_by_chunks
from adjoint.hf import check
from adjoint.hf.call import WEIGHTS, Call
from adjoint.hf.chunk_context import ChunkRandomness
from adjoint.hf.head import logprobs, run_checkpointed, scaled_logits, vocab_size_of
from adjoint.hf.hf_model import HFModel, backward_context
from adjoint.hf.model_parts import current_weights_type
from adjoint.hf.stage import Backbone, CallContext, make_step
from adjoint.hf.two_passes import refuse_other_values, two_passes
from adjoint.hf.verify.first_use import Verification, verify
from adjoint.hf.wrap_state import LOG_PROBS, ValueRequest
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State
from adjoint.loss import tokens_per_slice

# Values of a token's prediction, under the names that TRL has for them.
VALUES = (LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenValues(Backbone):
    """The backbone and the head as a stage: ids → values (batch, tokens, values), 0 where no target counts.

    Attributes:
        request: which values.
    """

    request = ValueRequest()

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.run_backbone(x, state, chunk)
        hidden, targets = output[0].flatten(0, 1), chunk.targets
        labels = targets.clamp(min=0).flatten()  # of all tokens: to choose some, the host would wait
        values = _values_of_tokens(self.model, hidden, labels, self.request).unflatten(0, targets.shape)
        return values.masked_fill((targets == IGNORE_INDEX).unsqueeze(-1), 0), state


class WeightedTokenValues(TokenValues):
    """The backbone and the head as a stage: ids → the weighted sum of the values."""

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        values, state = super().run(x, state, chunk)
        return (values * chunk.inputs[WEIGHTS]).sum(), state


class _CollectValues(CollectHiddenStates):
    """A stage above `TokenValues` that stores the values of this process's chunks; others stay zero."""

    def __init__(self, batch: Batch, request: ValueRequest, dtype: torch.dtype) -> None:
        super().__init__(batch.seqlen)
        shape = batch.rows, batch.seqlen, len(request.names)
        self.hidden = torch.zeros(shape, dtype=dtype, device=batch.ids.device)


def token_values(call: Call, request: ValueRequest) -> Tensor:
    """Return values of the call's labels, (batch, seqlen, values), differentiable; 0 where none counts.

    The values at position t are of the prediction of label t + 1, or of `shift_labels` t.

    Raises:
        Refused: chunks change the model's result, or ranks cannot share it.
    """
    verification = verify(call)
    if call.kind.routed:
        check.refuse(call.model, f"{check.ROUTER_LOGITS}: log-probabilities come without the routers' loss")
    if not current_weights_type(call.model).is_gathered:
        return _differentiable_values(call, verification, request)
    model, wrap_state = call.model, verification.wrap_state
    before = (randomness := ChunkRandomness(model)).states()
    with torch.no_grad():
        values = _differentiable_values(call, verification, request)
    if not torch.is_grad_enabled():
        return values

    def second_pass(cotangents: Tensor) -> None:
        with torch.enable_grad(), wrap_state.during_call(lambda: None), randomness.again(before):
            loss = _weighted_sum(call, verify(call), request, cotangents)
        refuse_other_values(loss.detach(), values * cotangents)
        loss.backward()

    return two_passes(values, second_pass)


def _differentiable_values(call: Call, verification: Verification, request: ValueRequest) -> Tensor:
    """Return the values of one forward by chunks, of all ranks that share it."""
    group = verification.wrap_state.group
    batch, spec = HFModel(verification).cut(call, group)
    dtype = accumulate_dtype(call.model.get_output_embeddings().weight.dtype)
    collect = _CollectValues(batch, request, dtype)
    stage = _stage_of(TokenValues, call, verification, request)
    step = make_step([stage, collect], batch, spec, backward_context(verification), group)
    values = hidden_by_chunks(step, collect).hidden
    if step.distribution.shares_sequence and stage.randomness.has_drawn:
        check.refuse(call.model, check.DRAWS_RANDOM_NUMBERS)
    return values.reshape(*call.ids.shape, -1)


def _weighted_sum(call: Call, verification: Verification, request: ValueRequest, weights: Tensor) -> Tensor:
    """Return the sum of the values times weights (batch, seqlen, values), differentiable."""
    group = verification.wrap_state.group
    batch, spec = HFModel(verification).cut(call, group)
    tensors, _ = call.joined({"ids": call.ids, "weights": weights})
    inputs = {**batch.inputs, WEIGHTS: tensors["weights"]}
    batch = dataclasses.replace(batch, inputs=inputs, divisor=1)
    stage = _stage_of(WeightedTokenValues, call, verification, request)
    return make_step([stage], batch, spec, backward_context(verification), group).loss().loss


def _stage_of(
    kind: type[TokenValues], call: Call, verification: Verification, request: ValueRequest
) -> TokenValues:
    stage = kind(
        call.model,
        verification.slots,
        recompute=verification.wrap_state.method.storage.recompute,
        fetches=verification.fetches,
        context=CallContext.from_call(call, verification.padding_of(call), verification.parts),
    )
    stage.request = request
    return stage


# -------------------------------------------------------------------------------------------------- the head


def _values_of_tokens(
    model: PreTrainedModel, hidden: Tensor, labels: Tensor, request: ValueRequest
) -> Tensor:
    """Return values (tokens, values) of hidden states (tokens, hidden_size), by slices of the tokens."""
    if request.in_float32:
        hidden = hidden.float()
    if request.names == (LOG_PROBS,) and not request.in_float32:
        return logprobs(model, hidden, labels, request.temperature).unsqueeze(1)

    def slice_values(hidden: Tensor, labels: Tensor) -> Tensor:
        precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if request.in_float32:
            precision = torch.autocast(hidden.device.type, enabled=False)
        with precision:
            logits = scaled_logits(model, hidden, request.temperature)
        return values_of_logits(logits, labels, request.names)

    tokens = tokens_per_slice(len(labels), vocab_size_of(model), hidden.is_cuda)
    pieces = zip(hidden.split(tokens), labels.split(tokens), strict=True)
    return torch.cat([run_checkpointed(slice_values, *piece) for piece in pieces])


def values_of_logits(logits: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """Return values (tokens, values) of logits (tokens, vocab); log_probs and entropy have gradients.

    log_probs: of the labels. entropy: H = log Z - Σ p·logit. log_sum_sq_probs: log Σ p². mean_logits: over
    the vocabulary. is_top1: whether the label has the largest logit, 0 or 1."""
    log_normalizer = logits.logsumexp(-1)
    detached = logits.detach()

    def value(name: str) -> Tensor:
        if name == LOG_PROBS:
            return logits.gather(1, labels.unsqueeze(1)).squeeze(1) - log_normalizer
        if name == "entropy":
            probabilities = (logits - log_normalizer.unsqueeze(1)).exp()
            # where p is 0, so is its term, also if its logit is -∞
            return log_normalizer - (probabilities * logits.masked_fill(probabilities == 0, 0)).sum(-1)
        if name == "log_sum_sq_probs":
            return (2 * detached).logsumexp(-1) - 2 * log_normalizer.detach()
        if name == "mean_logits":
            return detached.mean(-1)
        assert name == "is_top1", name
        return (detached.argmax(-1) == labels).to(logits.dtype)

    return torch.stack([value(name) for name in names], dim=1)
