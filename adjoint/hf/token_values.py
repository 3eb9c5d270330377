"""Values of each token's prediction, such as its log-probability, where nobody has all hidden states.

The head runs on each chunk, above the backbone, so that the ranks of a group share it, too. With plain
weights the values are the output of one autograd function, and their cotangents go back through the chunks.
Where weights are gathered (FSDP2, ZeRO-3) a chunk's backward runs inside a forward: the values are computed
without gradients first, and their weighted sum again, with gradients, when the cotangents are known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX, Batch
from adjoint.engine.executor import RECOMPUTE_RTOL
from adjoint.engine.hidden_states import CollectHiddenStates, hidden_by_chunks
from adjoint.engine.leaves import ChunkChangedError
from adjoint.hf import check
from adjoint.hf.call import WEIGHTS, Call
from adjoint.hf.chunk_context import ChunkRandomness
from adjoint.hf.head import logprobs, run_checkpointed, scaled_logits, vocab_size_of
from adjoint.hf.hf_model import HFModel, backward_context
from adjoint.hf.model_parts import current_weights_type
from adjoint.hf.stage import Backbone, CallContext, make_step
from adjoint.hf.transformers_api import ModelOutput
from adjoint.hf.verify.first_use import Verification, verify
from adjoint.hf.wrap_state import LOG_PROBS, ValueRequest, WrapState, wrap_state_or_original
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
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
    if call.kind.routed:
        check.refuse(call.model, f"{check.ROUTER_LOGITS}: log-probabilities come without the routers' loss")
    verification = verify(call)
    if not current_weights_type(call.model).is_gathered:
        return _differentiable_values(call, verification, request)
    return two_passes(
        call.model,
        lambda: _differentiable_values(call, verification, request),
        lambda weights: _weighted_sum(call, verify(call), request, weights),
    )


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
        check.refuse_shared(call.model, check.DRAWS_RANDOM_NUMBERS)
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


# ------------------------------------------------------------------------------------------------ two passes


def two_passes(
    model: PreTrainedModel, compute: Callable[[], Tensor], weighted_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return values of a model that runs by chunks; their gradient takes a second pass.

    Args:
        compute: returns the values; it runs without gradients.
        weighted_sum: returns the sum of the values times weights, differentiable. It runs at the end of the
            backward, when the cotangents are known, as FSDP's hooks do not work inside of one.

    Raises:
        ChunkChangedError: in the backward, the second pass has other values.
    """
    before = (randomness := ChunkRandomness(model)).states()
    with torch.no_grad():
        values = compute()
    if not torch.is_grad_enabled():
        return values
    kind, anchor = values.device.type, torch.zeros((), requires_grad=True)
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    in_call = functools.partial(wrap_state_or_original(model).during_call, lambda: None)

    def second_pass(cotangents: Tensor) -> None:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            with torch.enable_grad(), in_call(), randomness.again(before):
                loss = weighted_sum(cotangents)
            _refuse_other_values(loss.detach(), values * cotangents)
            loss.backward()

    result: Tensor = _TwoPasses.apply(values, anchor, second_pass)
    return result


class _TwoPassesContext(FunctionCtx):
    """The values that `_TwoPasses` keeps from its forward for its backward."""

    second_pass: Callable[[Tensor], None]
    saved_tensors: tuple[Tensor, ...]


class _TwoPasses(torch.autograd.Function):
    """The node of `two_passes`."""

    @staticmethod
    def forward(
        ctx: _TwoPassesContext, values: Tensor, anchor: Tensor, second_pass: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.second_pass = second_pass
        ctx.save_for_backward(anchor)  # so that torch refuses a second backward through a graph that is freed
        return values.clone()

    @staticmethod
    @differentiable_once("token_logprobs")
    def backward(ctx: _TwoPassesContext, cotangents: Tensor) -> tuple[None, None, None]:
        _, second_pass = ctx.saved_tensors, ctx.second_pass
        torch.autograd.Variable._execution_engine.queue_callback(lambda: second_pass(cotangents))
        return None, None, None


def _refuse_other_values(loss: Tensor, terms: Tensor) -> None:
    """Raise ChunkChangedError unless the second pass's loss is the sum of the first one's terms."""
    dtype = torch.bfloat16 if torch.is_autocast_enabled(terms.device.type) else terms.dtype
    size = terms.abs().sum()
    if bool((loss - terms.sum()).abs() > max(RECOMPUTE_RTOL[dtype], 1e-4) * size):
        raise ChunkChangedError(
            f"the weighted log-probabilities summed to {float(terms.sum()):.6g} in the forward and to "
            f"{float(loss):.6g} when they were computed again for the backward: weights or settings of the "
            "model have changed in between"
        )


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


# ------------------------------------------------------------------------------------------- TRL's fused head

# TRL's trainers put a forward of their own on the causal LM. Called with `fused_lm_head=True` it runs the
# backbone on all tokens and then the head, for each label's log-probability and further values. With a
# `sequence_group`, and under FSDP2 with gradients, nobody has these hidden states: values come from chunks.

TRL_MODULE, FUNCTION = "trl.trainer.utils", "add_fused_lm_head"


def replace_fused_head() -> None:
    """Replace TRL's `add_fused_lm_head` in its modules that have been imported: one that knows chunks."""
    module = sys.modules.get(TRL_MODULE)
    original = getattr(module, FUNCTION, None)
    if original is None:  # TRL is not imported, or an older one
        return
    replacement = original if hasattr(original, "_adjoint") else _adding_by_chunks(original)
    for name, importer in [*sys.modules.items()]:
        if name.startswith("trl.") and FUNCTION in vars(importer):
            setattr(importer, FUNCTION, replacement)


def _adding_by_chunks(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    output_class: Callable[..., ModelOutput] = vars(sys.modules[TRL_MODULE])["FusedCausalLMOutput"]

    @functools.wraps(original)
    def add(model: PreTrainedModel, *args: object, **kwargs: object) -> None:
        forward = model.forward
        original(model, *args, **kwargs)
        if "_adjoint" not in vars(model):
            return
        arguments = signature.bind(model, *args, **kwargs)
        arguments.apply_defaults()
        options = arguments.arguments
        names = (LOG_PROBS, *(name for name in options["outputs"] if name != LOG_PROBS))
        request = ValueRequest(names, options["temperature"], options["cast_lm_head_to_fp32"])
        by_chunks = _forward_by_chunks(model.forward, forward, request, output_class)
        model.forward = types.MethodType(by_chunks, model)

    vars(add)["_adjoint"] = True
    return add


def _forward_by_chunks(
    fused: Callable[..., ModelOutput],
    forward_of_model: Callable[..., ModelOutput],
    request: ValueRequest,
    output_class: Callable[..., ModelOutput],
) -> Callable[..., ModelOutput]:
    """Return a method in the place of TRL's own, `fused`, which calls the forward that was there before."""

    @functools.wraps(fused)
    def forward(
        self: PreTrainedModel,
        *args: object,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        wrap_state = wrap_state_or_original(self)  # the forward stays on a model that is unwrapped
        if not fused_lm_head or not _runs_by_chunks(self, wrap_state):
            counts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return fused(*args, fused_lm_head=fused_lm_head, **counts, **kwargs)
        with wrap_state.asking(request):
            output = forward_of_model(*args, **{**kwargs, "use_cache": False})
        values: Tensor = output.last_hidden_state
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if isinstance(shifted, Tensor):
            is_counted = shifted != IGNORE_INDEX
        else:
            assert isinstance(labels, Tensor)
            values, is_counted = values[:, :-1], labels[:, 1:] != IGNORE_INDEX
        columns = [column.clone() for column in values.unbind(-1)]  # of views FSDP2 warns
        by_name: dict[str, Tensor | None] = dict(zip(request.names, columns, strict=True))
        if (is_top1 := by_name.get("is_top1")) is not None:
            by_name["is_top1"] = is_top1.detach() > 0
        divisor = is_counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return output_class(
            loss=-columns[0].sum() / divisor,
            label_mask=is_counted.to(values.device),
            **{name: by_name.get(name) for name in VALUES},
        )

    return forward


def _runs_by_chunks(model: PreTrainedModel, wrap_state: WrapState) -> bool:
    """Whether no process has a call's hidden states, so that TRL's own forward would be refused."""
    is_gathered = torch.is_grad_enabled() and current_weights_type(model).is_gathered
    return wrap_state.runs_chunks and (wrap_state.group is not None or is_gathered)
