"""The forwards that `adjoint.wrap` puts in place of a causal LM's and its backbone's: routes of their calls.

A call is validated here and handed to `engine.runner`, to `MiniSequence`, or to transformers' own forward."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.continuation import goes_on_from
from adjoint.engine.host_weights import device_of
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.runner import run_hidden, run_loss
from adjoint.engine.step import uncompiled
from adjoint.engine.verification import Refused
from adjoint.errors import LOGGER, is_from_user_code
from adjoint.hf import check, mini_sequence
from adjoint.hf.agreed_calls import agree_on_call, refuse_different_parts
from adjoint.hf.call import Call
from adjoint.hf.carried_state import (
    cache_of_state,
    detached,
    fill_cache,
    refuse_if_states_are_lost,
    refusing_gradients,
    returns_dynamic_cache,
    state_of_cache,
    why_not_carried,
)
from adjoint.hf.chunk_context import ChunkRandomness
from adjoint.hf.chunking import refuse_unknown_blocks
from adjoint.hf.head import Output, logits_by_slices
from adjoint.hf.hf_model import HFModel, announce
from adjoint.hf.loss_terms import RouterLogits, RouterLoss
from adjoint.hf.mini_sequence import find_token_wise_mlps
from adjoint.hf.model_parts import (
    backbone_of,
    calling_original_forwards,
    current_weights,
    current_weights_type,
    original_class,
    root_of,
)
from adjoint.hf.original_forward import (
    differs_on_any_rank,
    run_original,
    why_original_differs,
)
from adjoint.hf.outputs import (
    DeferredCache,
    LogitsOfCall,
    LossOutput,
    RoutedLossOutput,
    compute_logits_later,
    defers_logits,
    without_graph,
)
from adjoint.hf.shared_rows import halves_tokens
from adjoint.hf.snapshot import WRAPS, Snapshot
from adjoint.hf.stage import CausalLM
from adjoint.hf.token_values import token_values
from adjoint.hf.transformers_api import CACHE_FIELD, CACHE_NAMES, Cache, ModelOutput, named_cache
from adjoint.hf.verify.first_use import (
    Verification,
    refuse_documents_that_mix,
    refuse_unknown_inputs,
    verification_of,
    verify,
    verify_pieces,
)
from adjoint.hf.verify.trials import ignores_input
from adjoint.hf.wrap_state import CallNeeds, WrapState, wrap_state_or_original
from adjoint.methods import is_plain
from adjoint.parallel.context import telling_ranks
from adjoint.parallel.fsdp import inside_forward

# Takes a module through which calls enter, and the call's arguments by name.
EntryForward = Callable[[PreTrainedModel, dict[str, object]], ModelOutput | tuple[Tensor, ...]]
# Returns whether processes have joined a group.
_has_ranks: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
# Tokens of a row above which an evaluation without gradients is by chunks, if the method has no chunk_size.
LONG_FORWARD = 8192


# ----------------------------------------------------------------------------------------------- class swap

_wrapped_classes: dict[tuple[type[nn.Module], EntryForward], type[nn.Module]] = {}


def wrapped_class(cls: type[nn.Module], forward_function: EntryForward) -> type[nn.Module]:
    """Return a subclass of the same name whose forward is `forward_function(self, arguments by name)`.

    There is one per class and function, so that instances, pickles and copies share it."""
    if (cls, forward_function) in _wrapped_classes:
        return _wrapped_classes[cls, forward_function]
    signature = inspect.signature(cls.forward)
    _, *names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        named_args = dict(zip(names, args, strict=False))
        if len(args) > len(names) or named_args.keys() & kwargs.keys():
            return cls.forward(self, *args, **kwargs)  # Python raises the TypeError
        arguments = {**named_args, **kwargs}
        if not arguments.keys().isdisjoint(CACHE_NAMES):
            arguments = named_cache(arguments, signature.parameters)
        return forward_function(self, arguments)

    # By default pickle would look the class up by its qualified name and find transformers' own.
    def reduce(self: PreTrainedModel, protocol: SupportsIndex) -> tuple[object, ...]:
        reduced = object.__reduce_ex__(self, max(2, operator.index(protocol)))
        assert isinstance(reduced, tuple)
        return (new_instance, (cls, forward_function), *reduced[2:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    identity = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    overrides = {"forward": forward, "__reduce_ex__": reduce, "_adjoint_original": cls, WRAPS: cls}
    _wrapped_classes[cls, forward_function] = type(cls.__name__, (cls,), {**overrides, **identity})
    return _wrapped_classes[cls, forward_function]


def unwrapped_class(cls: type) -> type:
    """Return the class without ours among its bases, also if `fully_shard` has derived a class from ours."""
    if not hasattr(cls, "_adjoint_original"):
        return cls
    rest = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(map(unwrapped_class, cls.__bases__))
    return rest.get("_adjoint_original") or type(cls.__name__, bases, rest)


def accelerate_hooks() -> types.ModuleType | None:
    """Return `hf.parallelism_config`, by which accelerate shares sequences from now on; None without it."""
    if importlib.util.find_spec("accelerate") is None:  # transformers imports it where it is installed
        return None
    from adjoint.hf import parallelism_config

    parallelism_config.install()
    return parallelism_config


def new_instance(cls: type[nn.Module], forward_function: EntryForward) -> nn.Module:
    """Return an empty instance of a wrapped class, for pickle and deepcopy to fill."""
    accelerate_hooks()  # in a process that has wrapped nothing itself
    wrapped = wrapped_class(cls, forward_function)
    return wrapped.__new__(wrapped)


# --------------------------------------------------------------------------------------------------- routes


@uncompiled
def lm_forward(self: PreTrainedModel, arguments: dict[str, object]) -> ModelOutput | tuple[Tensor, ...]:
    """Run the causal LM: with labels its loss by the method, otherwise transformers' forward."""
    call, wrap_state = Call(self, arguments), wrap_state_or_original(self)
    with wrap_state.during_call(lambda: current_weights(self).abandon_call()):
        if wrap_state.uses_original_forward:
            return call.run_original()
        needs = agree_on_call(call) if _has_ranks() else None
        if not call.has_labels:
            return _lm_without_labels(call, wrap_state, needs)
        group = wrap_state.group
        with contextlib.nullcontext() if group is None else telling_ranks(group, device_of(self)):
            method, has_pieces = wrap_state.method, wrap_state.method.pieces is not None
            is_extra = bool(call.extra_outputs) and not _carries_state(call, wrap_state)
            runs_plainly = not (method.has_chunks or has_pieces)
            if runs_plainly or is_extra or (has_pieces and call.logits_index is not None):
                if is_extra and not runs_plainly:
                    _warn_not_chunked(call)
                with calling_original_forwards(self):
                    return call.run_original()
            check.refuse_transforms(self)
            if wrap_state.values_asked is not None:
                return Output(last_hidden_state=token_values(call, wrap_state.values_asked))
            call, logits = _without_unread_count(call), None
            if wrap_state.group is None and call.logits_index is None and defers_logits():
                logits = LogitsOfCall(call, _hidden_for_logits)
            if has_pieces:
                output = _loss_by_mini_sequence(call)
            elif call.extra_outputs:
                output = _loss_with_state(call)
            else:
                at_language_model = _at_language_model(call)
                output = _loss_by_chunks(at_language_model, verify(at_language_model))
            if logits is not None and output.loss is not None:
                # of calls that hang together each would keep the cache before it
                has_gradients = call.cache is not None and detached(call.cache) is not call.cache
                compute_logits_later(output.loss, logits.deferred, until_backward=has_gradients)
    return output if call.returns_dict else output.to_tuple()


def _lm_without_labels(
    call: Call, wrap_state: WrapState, needs: CallNeeds | None
) -> ModelOutput | tuple[Tensor, ...]:
    """Run transformers' forward of the causal LM, whose backbone is wrapped.

    Some classes do not pass documents on to it, or do not return its cache (RecurrentGemma)."""
    inputs = {name: call.arguments[name] for name in call.document_inputs}
    if wrap_state.outer_model is None:  # of a copy
        wrap_state.outer_model = weakref.ref(call.model)
    with wrap_state.in_lm(inputs, needs) as lm_call:
        output: ModelOutput | tuple[Tensor, ...] = call.run_original()
    is_read = bool(call.arguments.get("use_cache")) and lm_call.cache is not None
    if is_read and isinstance(output, ModelOutput) and CACHE_FIELD not in output:
        output[CACHE_FIELD] = lm_call.cache
        for name in CACHE_NAMES:
            setattr(output, name, lm_call.cache)
    return output


def _without_unread_count(call: Call) -> Call:
    """Return the call without `num_items_in_batch`, if the model's own forward does not read it.

    Before transformers 5.17 Mamba's forward takes it and passes it on to nobody: its loss is the mean."""
    name = "num_items_in_batch"
    if name not in call.provided:
        return call
    verification, key = verification_of(call.model), ("ignored", name, True)
    if key not in verification.results and verification.holding.tensor_parallel_groups:
        refuse_different_parts(call, verification.holding)  # a rank without it would not try it
    if not verification.compute_once(key, ignores_input, call.model, name, True):
        return call
    return Call(call.model, {n: value for n, value in call.arguments.items() if n != name})


def _hidden_for_logits(call: Call) -> Tensor:
    """Return the hidden states (batch, seqlen, hidden_size) of a causal LM's call, differentiable."""
    wrap_state = wrap_state_or_original(call.model)
    with wrap_state.during_call(lambda: current_weights(call.model).abandon_call()):
        if wrap_state.method.pieces is not None:
            hidden: Tensor = backbone_of(call.model)(**call.arguments, use_cache=False)[0]
            return hidden
        return _hidden_by_chunks(_at_language_model(call)).last_hidden_state


@uncompiled
def backbone_forward(self: PreTrainedModel, arguments: dict[str, object]) -> ModelOutput | tuple[Tensor, ...]:
    """Run the backbone: its hidden states by the method, or transformers' forward.

    The method applies where gradients are on, in training without them too (as for a reference model), and
    where the original forward would not give the result of the whole sequence (`why_original_differs`). Any
    other call that begins with a cache or asks for one is by chunks in training with gradients alone:
    generation and evaluation are transformers' own. A long forward of an evaluation without gradients is by
    chunks to save memory, unless it asks for a cache or is one that chunks refuse."""
    wrap_state = wrap_state_or_original(self)
    call = _with_dropped_inputs(Call(self, arguments), wrap_state.lm_call.inputs)
    with wrap_state.during_call(lambda: current_weights(self).abandon_call()):
        if wrap_state.uses_original_forward or call.is_chunk:
            return call.run_original()
        lm_call = wrap_state.lm_call
        needs = lm_call.needs if lm_call.has_agreed else agree_on_call(call) if _has_ranks() else None
        if is_plain(wrap_state.method):
            return call.run_original()
        if needs is None:
            return _route_backbone(call, wrap_state)
        with inside_forward(root_of(self)):
            return _route_backbone(call, wrap_state, needs)


def _route_backbone(
    call: Call, wrap_state: WrapState, needs: CallNeeds | None = None
) -> ModelOutput | tuple[Tensor, ...]:
    """Run a backbone by the method or by transformers' forward.

    Args:
        needs: of any rank's call, if ranks gather weights together.
    """
    model, difference = call.model, why_original_differs(call, needs)
    has_pieces, is_required = wrap_state.method.pieces is not None, model.training or torch.is_grad_enabled()
    with_gradients = model.training and torch.is_grad_enabled()
    if (with_gradients or difference is not None) and _carries_state(call, wrap_state):
        output = _hidden_with_state(call)
        if output is not None:
            wrap_state.lm_call.cache = output.get(CACHE_FIELD)
            return output if call.returns_dict else output.to_tuple()
    if call.extra_outputs or (has_pieces and not is_required):
        if torch.is_grad_enabled() and not has_pieces:
            _warn_not_chunked(call)
        return run_original(call, difference, needs)
    if not is_required:
        output = _hidden_without_gradients(call, wrap_state, difference is not None, needs)
        if output is None:
            return run_original(call, difference, needs)
    else:
        check.refuse_transforms(model)
        if has_pieces:
            return _hidden_by_mini_sequence(call)
        output = _hidden_by_chunks(_at_language_model(call))
    if not model.training and call.returns_cache_by_default and returns_dynamic_cache(model):
        output[CACHE_FIELD] = DeferredCache(_deferred_cache(call, output.last_hidden_state))
    return output if call.returns_dict else output.to_tuple()


def _with_dropped_inputs(call: Call, inputs: Mapping[str, object]) -> Call:
    """Return a backbone's call with those inputs of the causal LM around it that this has not passed on."""
    dropped = {name: value for name, value in inputs.items() if not call.has(name)}
    if not dropped:
        return call
    return Call(call.model, {**call.arguments, **dropped}, for_chunks=frozenset(dropped))


def _hidden_without_gradients(
    call: Call, wrap_state: WrapState, differs: bool, needs: CallNeeds | None
) -> ModelOutput | None:
    """Compute the output of a backbone that is evaluated without gradients, or return None.

    It is None if chunks refuse the forward, and if they would only save memory and the forward is short or of
    several processes: transformers' own forward is right then, too.

    Args:
        differs: whether the original forward would give another result.
        needs: of any rank's call, if ranks gather weights together: by chunks all of them run, or none.
    """
    limit = getattr(wrap_state.method, "chunk_size", None) or LONG_FORWARD
    is_long = call.seqlen is not None and call.seqlen > limit
    if not (differs if needs is None else differs_on_any_rank(call.model, needs)):
        if wrap_state.group is not None or current_weights_type(call.model).is_gathered:
            return None
        if not is_long and not (wrap_state.method.share_prefixes and halves_tokens(call)):
            return None
    refused = verification_of(call.model).results
    names = sorted(name for name in call.arguments if call.has(name))
    key: tuple[object, ...] = (
        "refused without gradients",
        call.has_documents,
        call.begins_with_padding,
        *names,
    )
    key = key if needs is None else (key[0], needs)  # the same on all ranks
    if refused.get(key):
        return None
    try:
        check.refuse_transforms(call.model)
        return _hidden_by_chunks(_at_language_model(call))
    except Exception as error:
        # A contradiction in the inputs is the original forward's to tell, but it reads no documents.
        if not _is_left_to_original(error) or (call.has_documents and not isinstance(error, Refused)):
            raise
        LOGGER.debug(f"this forward without gradients runs as if not wrapped: {error}")
        refused[key] = not is_from_user_code(error)
        return None


def _is_left_to_original(error: Exception) -> bool:
    """Whether transformers' own forward may run in place of one by chunks that ended with this error.

    A user's hook may fail on a chunk, or end each forward by an error once it has what it reads."""
    return isinstance(error, ValueError) or is_from_user_code(error)


def _deferred_cache(call: Call, hidden: Tensor) -> Callable[[], Cache]:
    """Return a function that computes the cache that transformers' forward returns for a call.

    A gradient that reaches it is refused, if the call's hidden states require one."""
    arguments = without_graph(call.arguments)
    arguments |= {"use_cache": True, "return_dict": True}

    def compute() -> Cache:
        warnings.warn(
            "past_key_values was read: a forward by chunks makes none, so it is computed now, by a second "
            "forward; use_cache=True asks for it at once, use_cache=False for none",
            stacklevel=4,
        )
        with torch.no_grad(), ChunkRandomness(call.model).undone():
            output = call.model(**arguments)
        cache: Cache = next(output[name] for name in CACHE_NAMES if name in output.keys())  # noqa: SIM118
        if not hidden.requires_grad:
            return cache
        message = (
            f"a gradient has reached past_key_values of {original_class(call.model).__name__}'s call, which "
            "was made without it: ask for it by use_cache=True, or detach it"
        )
        return refusing_gradients(cache, hidden, message)

    return compute


def _at_language_model(call: Call) -> Call:
    """Return the call as one of the language model: its images' features are computed, for all tokens.

    Raises:
        Refused: several processes share the model or the sequence.
    """
    if modalities := call.modalities:
        names = ", ".join(modalities)
        if (kind := current_weights_type(call.model)).is_gathered:
            check.refuse(call.model, f"{names}: under {kind.name} it takes text alone")
        if wrap_state_or_original(call.model).group is not None:
            check.refuse_shared(call.model, f"{names} are of the whole sequence in one process")
        call = call.at_language_model()
        assert call.language_inputs is not None
        refuse_unknown_blocks(call.model, call.language_inputs.sees_next, call.arguments)
    return call


def _warn_not_chunked(call: Call) -> None:
    """Warn that a call asks for what only the original forward has."""
    reason = (
        "padding between a cache and a row's tokens" if call.hides_cached_tokens else call.extra_outputs[0]
    )
    warnings.warn(f"{reason}: this call is backpropagated as if not wrapped", stacklevel=4)
    current_weights(call.model).begin_plain_call()


def _carries_state(call: Call, wrap_state: WrapState) -> bool:
    """Whether a call's state goes on to the next call by chunks: in one process, for models whose cache is of
    the usual kind. Padding after a cache of keys and values alone is left to the own forward."""
    model = call.model
    return (
        call.carries_state
        and wrap_state.method.has_chunks
        and wrap_state.group is None
        and not current_weights_type(model).is_gathered
        and why_not_carried(model) is None
        and not (call.hides_cached_tokens and all(s.grows is not None for s in verification_of(model).slots))
    )


def _after_cache(call: Call, returns_state: bool) -> Call:
    """Return a call that begins with a cache or returns one as a call that begins with a state.

    Args:
        returns_state: whether the caller reads the state after the call.

    Raises:
        Refused: the state cannot be carried on.
    """
    model = call.model
    if modalities := call.modalities:
        reason = (
            "where tokens stand after an image is not in the cache: leave use_cache and past_key_values out"
        )
        check.refuse(model, f"{', '.join(modalities)}: {reason}")
    slots = verification_of(model).slots
    carried = None if call.cache is None else state_of_cache(model, call.cache, slots, call.ids)
    if carried is not None and torch.is_grad_enabled():
        if carried.tokens and call.ids.shape[1] == 1 and any(slot.grows is None for slot in slots):
            reason = "its code for a single token writes recurrent states over those that a backward needs"
            check.refuse(model, f"past_key_values: {reason}: give two tokens or more")
        carried = dataclasses.replace(carried, state=goes_on_from(carried.state))
    return call.after(carried, returns_state, any(slot.grows is not None for slot in slots))


def _verify_with_state(call: Call) -> Verification:
    """Return the verification of a call that begins with a state or returns one, and of its model's cache.

    Raises:
        Refused: chunks or the cache change the result.
    """
    verification = verify(call)
    verification.compute_once("carried states", refuse_if_states_are_lost, call.model, verification.slots)
    return verification


def _loss_with_state(call: Call) -> LossOutput | RoutedLossOutput:
    """Compute the loss of a call that begins with a cache or returns one, if its state can be carried on."""
    returns_cache = bool(call.arguments.get("use_cache"))
    continued = _after_cache(call, returns_cache)
    return _loss_by_chunks(continued, _verify_with_state(continued), returns_cache)


def _hidden_with_state(call: Call) -> ModelOutput | None:
    """Compute the output of a backbone's call that begins with a cache or returns one, or return None.

    It is None if the state cannot be carried on: transformers' own forward can have gradients through its
    cache, too, and takes only more memory. As there, a cache that is given holds the state at the end; not so
    if rows end with padding and the call does not ask for a cache."""
    model = call.model
    names = sorted(name for name in call.arguments if call.has(name))
    refused, key = verification_of(model).results, ("refused with a cache", *names)
    if refused.get(key):
        return None
    returns_cache = bool(call.arguments.get("use_cache")) or not call.has_padding
    try:
        continued = _after_cache(call, returns_cache)
    except Exception as error:  # of these tokens or this cache
        if not _is_left_to_original(error):
            raise
        LOGGER.debug(f"this forward with a cache runs as if not wrapped: {error}")
        return None
    try:
        check.refuse_transforms(model)
        _verify_with_state(continued)
    except Exception as error:
        if not _is_left_to_original(error):
            raise
        LOGGER.debug(f"forwards with a cache run as if not wrapped: {error}")
        refused[key] = not is_from_user_code(error)
        return None
    output = _hidden_by_chunks(continued, returns_cache)
    if not returns_cache:
        return output
    if call.cache is not None:
        fill_cache(call.cache, output[CACHE_FIELD])
        output[CACHE_FIELD] = call.cache
    return output if call.returns_cache else Output(**{n: v for n, v in output.items() if n != CACHE_FIELD})


def _loss_by_chunks(
    call: Call,
    verification: Verification,
    returns_cache: bool = False,
) -> LossOutput | RoutedLossOutput:
    """Compute the causal LM's loss by `Exact` or `Truncated`; the model must have been verified.

    Args:
        returns_cache: whether the output has the cache after the last token.
    """
    model, group = call.model, verification.wrap_state.group
    hf_model = HFModel(verification, packs_rows=not returns_cache)
    if group is not None and call.logits_index is not None:
        check.refuse_shared(
            model, "logits beside a loss (logits_to_keep) need the whole sequence in one process"
        )
    result = run_loss(hf_model, call, returns_cache, group)
    cache, stage = None, hf_model.stage
    assert isinstance(stage, CausalLM)
    if returns_cache:
        cache = cache_of_state(model, result.states[0], verification.slots, call.last_document)
    if group is not None and stage.randomness.has_drawn:
        check.refuse_shared(model, check.DRAWS_RANDOM_NUMBERS)
    logits = None
    if stage.hidden_states is not None and stage.hidden_states.hidden is not None:
        hidden = stage.hidden_states.hidden
        hidden = hidden.reshape(len(call.ids), -1, hidden.shape[-1])[:, call.logits_index]
        logits = current_weights(model).run(lambda: logits_by_slices(model, hidden))
    if not isinstance(stage.router, RouterLoss):
        return LossOutput(loss=result.loss, logits=logits, **{CACHE_FIELD: cache})
    router_loss = stage.router.loss(result.sums[0])
    loss = result.loss + verification.router_loss_factor * router_loss
    return RoutedLossOutput(loss=loss, aux_loss=router_loss, logits=logits, **{CACHE_FIELD: cache})


def _hidden_by_chunks(call: Call, returns_cache: bool = False) -> ModelOutput:
    """Compute the backbone's output by `Exact` or `Truncated`.

    Hidden states (batch, seqlen, hidden_size), the logits of the routers if they are asked for, and the cache
    after the last token with `returns_cache`."""
    model = call.model
    if wrap_state_or_original(model).group is not None:
        check.refuse_shared(
            model,
            "no rank has the hidden states of the whole sequence: give labels to the causal LM, whose loss "
            "is shared",
        )
    kind = current_weights_type(model)
    if kind.is_gathered and torch.is_grad_enabled():
        check.refuse(
            model,
            f"under {kind.name} a chunk's backward runs inside the forward, before a loss of hidden states "
            "is known: give labels to the causal LM",
        )
    verification = verify(call)
    hf_model = HFModel(verification, with_router_logits=True)
    result = run_hidden(hf_model, call, returns_cache)
    hidden = result.hidden.reshape(*call.ids.shape, -1)
    outputs: dict[str, object] = {}
    if isinstance(router := hf_model.stage.router, RouterLogits):
        hidden, *logits = router.split_from(hidden)
        outputs["router_logits"] = tuple(layer.flatten(0, 1) for layer in logits)
    if returns_cache:
        states, slots = result.states[0], verification.slots
        outputs[CACHE_FIELD] = cache_of_state(model, states, slots, call.last_document)
    return Output(last_hidden_state=hidden, **outputs)


# -------------------------------------------------------------------------------------------- mini-sequences


def _loss_by_mini_sequence(call: Call) -> LossOutput:
    """Compute the causal LM's loss by `MiniSequence`."""
    model, verification = call.model, verify_pieces(call)
    pieces, mlps = verification.wrap_state.method.pieces, verification.examine_once(find_token_wise_mlps)
    assert pieces is not None
    description = f"MiniSequence: MLPs ({len(mlps)}) in {pieces.mlps} pieces, the head in {pieces.head}"
    announce(verification, lambda: description)
    with calling_original_forwards(model):
        total = current_weights(model).run(lambda: mini_sequence.total_loss(call, pieces, mlps))
    _check_model_in_backward(total, verification)
    divisor = call.divisor
    divisor = divisor.to(total.device) if isinstance(divisor, Tensor) else divisor
    return LossOutput(loss=total / divisor)


def _hidden_by_mini_sequence(call: Call) -> ModelOutput:
    """Return the output of the backbone's own forward, run by `MiniSequence`."""
    verification = verification_of(call.model)
    refuse_unknown_inputs(verification, call, call.unknown_to_backbone())
    refuse_documents_that_mix(verification, call)
    pieces, mlps = verification.wrap_state.method.pieces, verification.examine_once(find_token_wise_mlps)
    assert pieces is not None
    with mini_sequence.splitting(call.model, mlps, pieces.mlps):
        output = call.run_original(use_cache=False)
    _check_model_in_backward(output[0], verification)
    return output


def _check_model_in_backward(output: Tensor, verification: Verification) -> None:
    """Make the backward, in which layers run again, start with a check that the model is unchanged."""
    if output.requires_grad:
        # A snapshot of now: RecurrentGemma's own forward leaves its states on its modules. One for each call,
        # as what a forward leaves may depend on its input (rotary caches grow with the length).
        model, snapshot = verification.model, Snapshot(verification.model)
        untrained = UntrainedTensors(model.named_modules())

        def check_both(_: Tensor) -> None:
            untrained.check()
            snapshot.check(model)

        output.register_hook(check_both)
