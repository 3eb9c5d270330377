"""`adjoint.wrap`: the loss of a Hugging Face causal LM by one of our methods, on the same model object.

The classes of the causal LM and of its backbone are swapped for subclasses of the same name. A method
bound to the instance would not do: a deep copy would go on calling the original's weights, and torch.save
would lose it. Both classes are swapped because there are two ways in: labels given to the causal LM (the
head's loss is then part of each chunk), and trainers that call the backbone and compute a loss from the
hidden states themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import Batch
from adjoint.engine.continuation import goes_on_from
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates, HiddenStates, hidden_by_chunks
from adjoint.engine.host_weights import device_of
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.parameter_access import ContextFactory
from adjoint.engine.shared_prefix import Beginning, End, Segment, run_segments
from adjoint.engine.step import uncompiled
from adjoint.engine.verification import TOKENS, NotAttended, Refused
from adjoint.errors import LOGGER, UserError, is_heard
from adjoint.hf import check, mini_sequence
from adjoint.hf.call import DOCUMENT_INPUTS, Call
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
from adjoint.hf.chunking import move_edges_out_of_blocks, refuse_unknown_blocks
from adjoint.hf.head import Output, logits_by_slices
from adjoint.hf.kernels.replacements import REGISTRIES, function_replacements
from adjoint.hf.language_inputs import language_model_of
from adjoint.hf.mini_sequence import find_token_wise_mlps
from adjoint.hf.model_parts import (
    access_kind_of,
    access_to,
    backbone_of,
    calling_original_forwards,
    contained_model,
    is_bare_backbone,
    layers_of,
    original_class,
)
from adjoint.hf.original_forward import run_original, why_original_differs
from adjoint.hf.outputs import (
    DeferredCache,
    LogitsOfCall,
    LossOutput,
    RoutedLossOutput,
    compute_logits_later,
    defers_logits,
    without_graph,
)
from adjoint.hf.quantized import keep_trainable
from adjoint.hf.router_loss import RouterLogits, RouterLoss
from adjoint.hf.shared_rows import halves_tokens, hidden_of_rows, segment_call, segments_of
from adjoint.hf.snapshot import WRAPS, ForwardState, Snapshot
from adjoint.hf.stage import WEIGHTS, Backbone, CallContext, CausalLM, WeightedLogProbs, make_step
from adjoint.hf.tensor_parallel import sum_partial_gradients
from adjoint.hf.transformers_api import CACHE_FIELD, CACHE_NAMES, Cache, ModelOutput, named_cache
from adjoint.hf.trials import ignores_input
from adjoint.hf.verification import (
    Verification,
    refuse_documents_that_mix,
    refuse_unknown_inputs,
    verification_of,
    verify,
    verify_pieces,
)
from adjoint.hf.wrap_state import WrapState, wrap_state_or_original
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dispatch import implementation
from adjoint.methods import Exact, Method, check_wrapped_method
from adjoint.parallel.context import group_of, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Tokens of a row above which an evaluation without gradients is by chunks, if the method has no chunk_size.
LONG_FORWARD = 8192
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=nn.Module)
StageT = TypeVar("StageT", bound=Backbone)
# Takes a module through which calls enter, and the call's arguments by name.
EntryForward = Callable[[PreTrainedModel, dict[str, Any]], ModelOutput | tuple[Tensor, ...]]


def wrap(
    model: ModelT,
    method: Method | None = None,
    sequence_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> ModelT:
    """Make a transformers causal LM compute its loss by a method.

    The object stays the same, with the same parameters, state_dict, config, `generate` and `save_pretrained`.

        model = adjoint.wrap(AutoModelForCausalLM.from_pretrained(...), adjoint.Exact())
        model(input_ids=ids, labels=ids).loss.backward()

    The model's cache is the state: the sequence runs chunk by chunk, recurrent states are stored at the
    chunks' edges, keys and values once together with their gradients, and the backward recomputes one chunk
    at a time. On first use, and again when the model's modules, settings or hooks have changed, a few tokens
    run both ways and the gradients are compared; a model for which they differ is refused. docs/promises.md
    says what is exact, what is refused and what is not noticed. Where labels are given no logits are
    computed, unless they are asked for without gradients (`logits_to_keep`, the Trainer's compute_metrics);
    `out.logits` computes them when they are used, by a second forward. Do not wrap a model whose sequences
    fit in memory anyway if time is all that counts.

    Args:
        model: a `PreTrainedModel` with a language-model head or one for sequences or tokens (a reward model),
            or without a head (`AutoModel`), or any module that contains one of them, such as PEFT's model or
            a head of your own above a backbone; wrapped in place.
        method: `Exact` (the default), `Truncated`, `MiniSequence` or `Backprop`. Truncated drops the
            gradients of states, keys and values at edges `window` tokens apart, rounded down to whole chunks;
            between these edges, and if the window is as long as the sequence, gradients are exact.
        sequence_group: a `torch.distributed` process group, or a `DeviceMesh` of one dimension, whose ranks
            share each sequence: its chunks are dealt to them in turn, and keys and values stay on the rank
            that computed them. All ranks call with the same rows and labels; each gets the loss and gradients
            of the whole sequence. A copy of the model has no group.

    Returns:
        The model.

    Raises:
        UserError: sequence_group is no such group, or the method has no chunks.
        ValueError: the model is none of transformers and contains none or several, its instance has its own
            forward, or the method is none of these. On first use: the gradient by chunks is not the model's
            own, with the reason where it is known.
    """
    method = Exact() if method is None else method
    check_wrapped_method(method)
    group = None
    if sequence_group is not None:
        if not method.has_chunks:
            raise UserError(f"sequence_group: {method.name} has no chunks to share: give Exact()")
        group = group_of(sequence_group)
        if ranks_of(group) == 1:
            group = None
    entries = entry_modules(model)
    for module in entries:
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own on the instance, which calls would use: "
                "wrap the model before accelerate.prepare, or whatever else replaces the forward"
            )
    keep_trainable(model)
    sum_partial_gradients(model)
    wrap_state = WrapState(method, None if model in entries else weakref.ref(model), group)
    for module, forward in entries.items():
        module.__dict__["_adjoint"] = wrap_state
        if original_class(module) is type(module):
            module.__class__ = _wrapped_class(type(module), forward)
    return model


def unwrap(model: ModelT) -> ModelT:
    """Undo `wrap`, so that the model is transformers' own again, and return the model.

    Raises:
        ValueError: `wrap` does not accept the model.
    """
    for module in entry_modules(model):
        module.__dict__.pop("_adjoint", None)
        module.__class__ = _unwrapped_class(type(module))
    return model


def entry_modules(model: nn.Module) -> dict[nn.Module, EntryForward]:
    """Map each module through which calls enter to the forward that replaces its own.

    These are the backbone and, if it has an output embedding, the causal LM (inside PEFT's model, if there is
    one). A model without a head is its own backbone. Where only the backbone is replaced, the head above it
    can be any: a classifier's, or a model that contains a causal LM and computes its own loss from that
    model's logits.

    Raises:
        ValueError: the model neither is one of transformers nor contains exactly one, or it has no backbone
            separate from its head.
    """
    lm = contained_model(model)
    name = type(lm).__name__
    backbone = backbone_of(lm)
    if backbone is lm and is_bare_backbone(lm):
        return {lm: _backbone_forward}
    if backbone is lm:
        submodels = [
            submodel
            for submodel in lm.children()
            if isinstance(submodel, PreTrainedModel) and submodel.can_generate()
        ]
        backbones = [backbone_of(submodel) for submodel in submodels if backbone_of(submodel) is not submodel]
        if len(backbones) == 1:
            return {backbones[0]: _backbone_forward}
        raise ValueError(f"{name} has no backbone apart from its head: its layers cannot be run by chunks")
    entries = {backbone: _backbone_forward}
    return entries if lm.get_output_embeddings() is None else {lm: _lm_forward, **entries}


# ----------------------------------------------------------------------------------------------- class swap

_wrapped_classes: dict[tuple[type[nn.Module], EntryForward], type[nn.Module]] = {}


def _wrapped_class(cls: type[nn.Module], forward_function: EntryForward) -> type[nn.Module]:
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
        return (_new_instance, (cls, forward_function), *reduced[2:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    identity = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    overrides = {"forward": forward, "__reduce_ex__": reduce, "_adjoint_original": cls, WRAPS: cls}
    _wrapped_classes[cls, forward_function] = type(cls.__name__, (cls,), {**overrides, **identity})
    return _wrapped_classes[cls, forward_function]


def _unwrapped_class(cls: type) -> type:
    """Return the class without ours among its bases, also if `fully_shard` has derived a class from ours."""
    if not hasattr(cls, "_adjoint_original"):
        return cls
    rest = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(map(_unwrapped_class, cls.__bases__))
    return rest.get("_adjoint_original") or type(cls.__name__, bases, rest)


def _new_instance(cls: type[nn.Module], forward_function: EntryForward) -> nn.Module:
    """Return an empty instance of a wrapped class, for pickle and deepcopy to fill."""
    wrapped_class = _wrapped_class(cls, forward_function)
    return wrapped_class.__new__(wrapped_class)


# --------------------------------------------------------------------------------------------------- calls


@uncompiled
def _lm_forward(self: PreTrainedModel, arguments: dict[str, Any]) -> ModelOutput | tuple[Tensor, ...]:
    """Run the causal LM: with labels its loss by the method, otherwise transformers' forward."""
    call, wrap_state = Call(self, arguments), wrap_state_or_original(self)
    with wrap_state.during_call(lambda: access_to(self).abandon_call()):
        if wrap_state.uses_original_forward:
            return call.run_original()
        if not call.has_labels:
            return _lm_without_labels(call, wrap_state)
        method, has_pieces = wrap_state.method, wrap_state.method.pieces is not None
        is_extra = bool(call.extra_outputs) and not _carries_state(call, wrap_state)
        if method.is_plain or is_extra or (has_pieces and call.logits_index is not None):
            if is_extra and not method.is_plain:
                _warn_not_chunked(call)
            with calling_original_forwards(self):
                return call.run_original()
        check.refuse_transforms(self)
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


def _lm_without_labels(call: Call, wrap_state: WrapState) -> ModelOutput | tuple[Tensor, ...]:
    """Run transformers' forward of the causal LM, whose backbone is wrapped.

    Some classes do not pass documents on to it, or do not return its cache (RecurrentGemma)."""
    names = (*DOCUMENT_INPUTS, "attention_mask")
    with wrap_state.in_lm({name: call.arguments[name] for name in names if call.has(name)}) as lm_call:
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
    if not call.has(name):
        return call
    verification = verification_of(call.model)
    if not verification.compute_once(("ignored", name, True), ignores_input, call.model, name, True):
        return call
    return Call(call.model, {n: value for n, value in call.arguments.items() if n != name})


def _hidden_for_logits(call: Call) -> Tensor:
    """Return the hidden states (batch, seqlen, hidden_size) of a causal LM's call, differentiable."""
    wrap_state = wrap_state_or_original(call.model)
    with wrap_state.during_call(lambda: access_to(call.model).abandon_call()):
        if wrap_state.method.pieces is not None:
            hidden: Tensor = backbone_of(call.model)(**call.arguments, use_cache=False)[0]
            return hidden
        return _hidden_by_chunks(_at_language_model(call)).last_hidden_state


@uncompiled
def _backbone_forward(self: PreTrainedModel, arguments: dict[str, Any]) -> ModelOutput | tuple[Tensor, ...]:
    """Run the backbone: its hidden states by the method, or transformers' forward.

    The method applies where gradients are on, in training without them too (as for a reference model), and
    where the original forward would not give the result of the whole sequence (`why_original_differs`). Any
    other call that begins with a cache or asks for one is by chunks in training with gradients alone:
    generation and evaluation are transformers' own. A long forward of an evaluation without gradients is by
    chunks to save memory, unless it asks for a cache or is one that chunks refuse."""
    wrap_state = wrap_state_or_original(self)
    call = _with_dropped_inputs(Call(self, arguments), wrap_state.lm_call.inputs)
    with wrap_state.during_call(lambda: access_to(self).abandon_call()):
        is_required = self.training or torch.is_grad_enabled()
        has_pieces = wrap_state.method.pieces is not None
        if wrap_state.uses_original_forward or wrap_state.method.is_plain or call.is_chunk:
            return call.run_original()
        difference = why_original_differs(call)
        with_gradients = self.training and torch.is_grad_enabled()
        if (with_gradients or difference is not None) and _carries_state(call, wrap_state):
            output = _hidden_with_state(call)
            if output is not None:
                wrap_state.lm_call.cache = output.get(CACHE_FIELD)
                return output if call.returns_dict else output.to_tuple()
        if call.extra_outputs or (has_pieces and not is_required):
            if torch.is_grad_enabled() and not has_pieces:
                _warn_not_chunked(call)
            return run_original(call, difference)
        if not is_required:
            output = _hidden_without_gradients(call, wrap_state, difference is not None)
            if output is None:
                return run_original(call, difference)
        else:
            check.refuse_transforms(self)
            if has_pieces:
                return _hidden_by_mini_sequence(call)
            output = _hidden_by_chunks(_at_language_model(call))
        if not self.training and call.returns_cache_by_default and returns_dynamic_cache(self):
            output[CACHE_FIELD] = DeferredCache(_deferred_cache(call, output.last_hidden_state))
    return output if call.returns_dict else output.to_tuple()


def _with_dropped_inputs(call: Call, inputs: Mapping[str, object]) -> Call:
    """Return a backbone's call with those inputs of the causal LM around it that this has not passed on."""
    dropped = {name: value for name, value in inputs.items() if not call.has(name)}
    if not dropped:
        return call
    return Call(call.model, {**call.arguments, **dropped}, for_chunks=frozenset(dropped))


def _hidden_without_gradients(call: Call, wrap_state: WrapState, differs: bool) -> ModelOutput | None:
    """Compute the output of a backbone that is evaluated without gradients, or return None.

    It is None if chunks refuse the forward, and if they would only save memory and the forward is short or of
    several processes: transformers' own forward is right then, too.

    Args:
        differs: whether the original forward would give another result.
    """
    tokens = next((call.arguments[n] for n in ("input_ids", "inputs_embeds") if call.has(n)), None)
    limit = getattr(wrap_state.method, "chunk_size", None) or LONG_FORWARD
    is_long = isinstance(tokens, Tensor) and tokens.dim() > 1 and tokens.shape[1] > limit
    if not differs:
        if wrap_state.group is not None or access_kind_of(call.model).is_collective:
            return None
        if not is_long and not (wrap_state.method.share_prefixes and halves_tokens(call)):
            return None
    refused = verification_of(call.model).results
    names = sorted(name for name in call.arguments if call.has(name))
    key = "refused without gradients", call.has_documents, call.begins_with_padding, *names
    if key in refused:
        return None
    try:
        check.refuse_transforms(call.model)
        return _hidden_by_chunks(_at_language_model(call))
    except ValueError as refusal:
        # A contradiction in the inputs is the original forward's to tell, but it reads no documents.
        if call.has_documents and not isinstance(refusal, Refused):
            raise
        LOGGER.debug(f"this forward without gradients runs as if not wrapped: {refusal}")
        refused[key] = True
        return None


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
        if (kind := access_kind_of(call.model)).is_collective:
            check.refuse(call.model, f"{names}: under {kind.name} it takes text alone")
        if wrap_state_or_original(call.model).group is not None:
            check.refuse(call.model, f"sequence_group: {names} are of the whole sequence in one process")
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
    access_to(call.model).begin_plain_call()


def _cut_into_chunks(call: Call, verification: Verification) -> tuple[Batch, EngineSpec]:
    """Return a call's batch and the spec of its chunks, for `Exact` or `Truncated`.

    Raises:
        Refused: chunks cannot end where blocks of tokens that see each other do.
    """
    batch, starts = call.batch()
    model, method, group = call.model, verification.wrap_state.method, verification.wrap_state.group
    regular = verification.chunk_spec(batch.ids, starts)
    spec = move_edges_out_of_blocks(model, regular, batch) if batch.inputs else regular
    drops = regular.backward.drop_every is not None
    if spec is not regular and (drops or verification.holding.kind.is_collective or group is not None):
        check.refuse(
            model,
            "token_type_ids moves chunks' edges to the ends of blocks, which works only with Exact in one "
            "process",
        )
    description = f"{type(method).__name__} in chunks of {spec.chunk_size:,} tokens"
    _announce(verification, lambda: f"{description}; {_describe_kernels(model)}")
    return batch, spec


def _carries_state(call: Call, wrap_state: WrapState) -> bool:
    """Whether a call's state goes on to the next call by chunks: in one process, for models whose cache is of
    the usual kind. Padding after a cache of keys and values alone is left to the own forward."""
    is_alone = wrap_state.group is None and not access_kind_of(call.model).runs_backward_in_forward
    return (
        call.carries_state
        and wrap_state.method.has_chunks
        and is_alone
        and why_not_carried(call.model) is None
        and not (call.hides_cached_tokens and _has_keys_alone(call.model))
    )


def _has_keys_alone(model: PreTrainedModel) -> bool:
    """Whether a model has no state but keys and values."""
    return all(slot.grows is not None for slot in verification_of(model).slots)


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
    """Compute the loss of a call that begins with a cache or returns one.

    Raises:
        Refused: the state cannot be carried on.
    """
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
    if key in refused:
        return None
    returns_cache = bool(call.arguments.get("use_cache")) or not call.has_padding
    try:
        continued = _after_cache(call, returns_cache)
    except ValueError as refusal:  # of these tokens or this cache
        LOGGER.debug(f"this forward with a cache runs as if not wrapped: {refusal}")
        return None
    try:
        check.refuse_transforms(model)
        _verify_with_state(continued)
    except ValueError as refusal:
        LOGGER.debug(f"forwards with a cache run as if not wrapped: {refusal}")
        refused[key] = True
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
    if (segments := _segments_of(call, verification, returns_cache)) is not None:
        return _reading_prefixes(verification, lambda: _loss_by_segments(call, verification, segments))
    (batch, spec), backward_context = _cut_into_chunks(call, verification), _backward_context(verification)
    model, group = call.model, verification.wrap_state.group
    if group is not None and call.logits_index is not None:
        reason = "logits beside a loss (logits_to_keep) need the whole sequence in one process"
        check.refuse(model, f"sequence_group: {reason}")
    router_loss_factor = verification.router_loss_factor if call.kind.routed else 1.0
    hidden_states = None if call.logits_index is None else _hidden_states_for_logits(call, batch)
    stage = CausalLM.from_call(
        call,
        verification.slots,
        verification.wrap_state.method,
        verification.fetches,
        router_loss_factor,
        CallContext.from_call(call, verification.padding_of(call), verification.parts),
        hidden_states,
    )
    result = make_step([stage], batch, spec, backward_context, group).loss(states=returns_cache)
    cache = None
    if returns_cache:
        cache = cache_of_state(model, result.states[0], verification.slots, call.last_document)
    if group is not None and stage.randomness.has_drawn:
        check.refuse(model, check.DRAWS_RANDOM_NUMBERS)
    logits = None
    if hidden_states is not None and hidden_states.hidden is not None:
        rows, width = len(call.ids), hidden_states.hidden.shape[-1]
        hidden = hidden_states.hidden.reshape(rows, -1, width)[:, call.logits_index]
        logits = access_to(model).run(lambda: logits_by_slices(model, hidden))
    if not isinstance(stage.router, RouterLoss):
        return LossOutput(loss=result.loss, logits=logits, **{CACHE_FIELD: cache})
    router_loss = stage.router.loss(result.sums[0])
    loss = result.loss + router_loss_factor * router_loss
    return RoutedLossOutput(loss=loss, aux_loss=router_loss, logits=logits, **{CACHE_FIELD: cache})


def _segments_of(call: Call, verification: Verification, returns_cache: bool) -> list[Segment] | None:
    """Return the segments of a call with several rows or documents, or None if it is computed as it is."""
    is_divisible = call.num_documents > 1 and not returns_cache
    return segments_of(call, verification) if is_divisible else None


def _loss_by_segments(call: Call, verification: Verification, segments: Sequence[Segment]) -> LossOutput:
    """Compute the loss of a call as that of its segments (`shared_rows`)."""
    method, losses = verification.wrap_state.method, list[Tensor]()

    def run(number: int, segment: Segment, beginning: Beginning | None) -> End:
        inner, weights = segment_call(call, segment, beginning)
        batch, spec = _cut_into_chunks(inner, verification)
        spec = spec if number == len(segments) - 1 else spec.without_tapes()  # its backward comes first
        context = CallContext.from_call(inner, parts=verification.parts)
        stage = CausalLM.from_call(inner, verification.slots, method, verification.fetches, context=context)
        batch = dataclasses.replace(batch, weights=weights)
        result = make_step([stage], batch, spec, _backward_context(verification)).loss()
        losses.append(result.loss)
        return End(result.states, result.slabs)

    run_segments(segments, run, return_states=False)
    return LossOutput(loss=torch.stack(losses).sum())


def _reading_prefixes(verification: Verification, compute: Callable[[], T]) -> T:
    """Return the result of calls of segments, whose attention reads keys and values that rows share.

    Where it is the model's own code, which cannot, each chunk joins them to its own, copied for each row."""
    try:
        return compute()
    except NotAttended:
        verification.fetches = True
        return compute()


def _hidden_states_for_logits(call: Call, batch: Batch) -> HiddenStates:
    """Return storage for the hidden states of which logits are asked for.

    These are the last tokens alone, if the call's rows are the batch's rows, or all tokens."""
    logits_index, num_tokens = call.logits_index, batch.seqlen
    if isinstance(logits_index, slice) and logits_index.start is not None and batch.rows == len(call.ids):
        num_tokens = min(-logits_index.start, num_tokens)
    return HiddenStates(num_tokens, batch.seqlen - num_tokens)


def _hidden_by_chunks(call: Call, returns_cache: bool = False) -> ModelOutput:
    """Compute the backbone's output by `Exact` or `Truncated`.

    Hidden states (batch, seqlen, hidden_size), the logits of the routers if they are asked for, and the cache
    after the last token with `returns_cache`."""
    model = call.model
    if wrap_state_or_original(model).group is not None:
        check.refuse(
            model,
            "sequence_group: no rank has the hidden states of the whole sequence: give labels to the causal "
            "LM, whose loss is shared",
        )
    kind = access_kind_of(model)
    if kind.runs_backward_in_forward and torch.is_grad_enabled():
        check.refuse(
            model,
            f"under {kind.name} a chunk's backward runs inside the forward, before a loss of hidden states "
            "is known: give labels to the causal LM",
        )
    verification = verify(call)
    segments = _segments_of(call, verification, returns_cache)
    if segments is None:
        hidden, end, router = _hidden_and_state(call, verification, returns_cache)
        outputs: dict[str, object] = {}
        if isinstance(router, RouterLogits):
            hidden, *logits = router.split_from(hidden)
            outputs["router_logits"] = tuple(layer.flatten(0, 1) for layer in logits)
        if returns_cache:
            outputs[CACHE_FIELD] = cache_of_state(
                model, end.states[0], verification.slots, call.last_document
            )
        return Output(last_hidden_state=hidden, **outputs)
    hidden = _reading_prefixes(verification, lambda: _hidden_by_segments(call, verification, segments))
    return Output(last_hidden_state=hidden)


def _hidden_by_segments(call: Call, verification: Verification, segments: Sequence[Segment]) -> Tensor:
    """Compute the hidden states of a call as those of its segments (`shared_rows`)."""
    pieces = list[Tensor]()

    def run(number: int, segment: Segment, beginning: Beginning | None) -> End:
        inner, _ = segment_call(call, segment, beginning)
        is_last = number == len(segments) - 1
        hidden, end, _ = _hidden_and_state(inner, verification, keeps_tapes=is_last)
        pieces.append(hidden)
        return end

    run_segments(segments, run, return_states=False)
    return hidden_of_rows(call, segments, pieces)


def _hidden_and_state(
    call: Call, verification: Verification, return_final_kv: bool = False, keeps_tapes: bool = True
) -> tuple[Tensor, End, RouterLogits | RouterLoss | None]:
    """Compute hidden states (batch, seqlen, hidden_size) and the state after the last token.

    Args:
        return_final_kv: whether keys and values are among the state; else they have no tokens there.
        keeps_tapes: false if the backwards of other calls come first.

    Returns:
        Hidden states, which the router logits follow if the call asks for these; the state; what has added
        the router logits.
    """
    model = call.model
    batch, spec = _cut_into_chunks(call, verification)
    spec = spec if keeps_tapes else spec.without_tapes()
    stage = Backbone(
        model,
        verification.slots,
        recompute=verification.wrap_state.method.recompute,
        fetches=verification.fetches,
        context=CallContext.from_call(call, verification.padding_of(call), verification.parts),
        router=RouterLogits() if call.kind.routed else None,
    )
    collect = CollectHiddenStates(batch.seqlen)
    step = make_step([stage, collect], batch, spec, _backward_context(verification))
    hidden, state = hidden_by_chunks(step, collect, return_final_kv)
    return hidden.reshape(*call.ids.shape, -1), End([tuple(state)], step.slabs), stage.router


@torch.no_grad()
def chunk_losses(model: PreTrainedModel, ids: Tensor, spec: EngineSpec) -> list[Tensor]:
    """Return the summed loss of each chunk of ids (batch, seqlen), in the wrapped model's present mode."""
    call = Call(model, {"input_ids": ids, "labels": ids})
    verification = verify(call)
    stage = CausalLM.from_call(call, verification.slots, verification.wrap_state.method)
    return make_step([stage], call.batch()[0], spec).chunk_losses()


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: Tensor, tokens: int, spec: EngineSpec) -> Tensor:
    """Return logits (batch, tokens, vocab_size) of the last `tokens` of ids (batch, seqlen).

    The wrapped model runs in its present mode by chunks, of two tokens at least."""
    verification = verify(Call(model, {"input_ids": ids, "labels": ids}))
    last = CollectHiddenStates(tokens, ids.shape[1] - tokens)
    make_step([Backbone(model, verification.slots), last], Batch(ids, ids), spec).forward()
    assert last.hidden is not None
    return logits_by_slices(model, last.hidden)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, arguments: dict[str, object]) -> Tensor:
    """Return the hidden states (batch, seqlen, hidden_size) of a wrapped causal LM, also under `fully_shard`.

    A call of the backbone alone would be outside of the root, which gathers what no layer's unit has.

    Args:
        arguments: of the call by name, without labels.
    """
    call, stage, batch, spec = _unlabelled(model, arguments, Backbone)
    collect = CollectHiddenStates(batch.seqlen)
    step = make_step([stage, collect], batch, spec)
    return hidden_by_chunks(step, collect)[0].reshape(*call.ids.shape, -1)


def weighted_logprobs(
    model: PreTrainedModel, arguments: dict[str, object], weights: Tensor, temperature: float
) -> Tensor:
    """Return the weighted sum of the log-probabilities of tokens, differentiable.

    Args:
        arguments: as in `hidden_states`.
        weights: (batch, seqlen), 0 at position 0.
        temperature: divides the logits.
    """
    call, stage, batch, spec = _unlabelled(model, arguments, WeightedLogProbs)
    shifted = {"ids": call.ids.roll(-1, 1), "weights": weights.roll(-1, 1)}
    tensors, _ = call.joined(shifted)
    inputs = {**batch.inputs, WEIGHTS: tensors["weights"]}
    batch = dataclasses.replace(batch, labels=tensors["ids"], inputs=inputs)
    stage.temperature = temperature
    return make_step([stage], batch, spec).loss().loss


def _unlabelled(
    model: PreTrainedModel, arguments: dict[str, object], kind: type[StageT]
) -> tuple[Call, StageT, Batch, EngineSpec]:
    """Return the call of a causal LM without labels, its stage, its batch and its spec."""
    ids, call = arguments["input_ids"], Call(model, arguments)
    verification = verify(Call(model, {"input_ids": ids, "labels": ids}))
    stage = kind(
        model,
        verification.slots,
        recompute=verification.wrap_state.method.recompute,
        fetches=verification.fetches,
        context=CallContext.from_call(call, verification.padding_of(call), verification.parts),
    )
    return call, stage, *_cut_into_chunks(call, verification)


def _announce(verification: Verification, describe: Callable[[], str]) -> None:
    """Log once for each wrapped model what runs, at the level INFO.

    The line names class, layers, what `describe()` returns, and the relative difference of gradients that the
    comparison measured. Only rank 0 logs it.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if verification.wrap_state.announced:
        return
    verification.wrap_state.announced = True
    if is_heard() and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        model = verification.model
        layers = len(layers_of(language_model_of(model) or backbone_of(model)))
        LOGGER.info(
            f"{original_class(verification.model).__name__} of {layers} layers runs by {describe()}; "
            f"gradients compared on {TOKENS} tokens: relative difference {verification.difference:.1e}"
        )


def _describe_kernels(model: nn.Module) -> str:
    """Name the functions of transformers that ours replace, and the backend of the scans."""
    weight, device = next(p for p in model.parameters() if p.is_floating_point()), device_of(model)
    dtype = accumulate_dtype(weight.dtype) if device.type == "cpu" else weight.dtype
    backend = implementation("selective_scan", None, device, dtype)
    registries = [id(names) for names, _ in REGISTRIES]
    names = {n for names, ours in function_replacements(model) if id(names) not in registries for n in ours}
    return f"kernels: backend {backend}, in place of {', '.join(sorted(names)) or 'attention to the past'}"


def _backward_context(verification: Verification) -> ContextFactory:
    """Return a context for the backward: the model as it is now, locked against other threads."""
    if not torch.is_grad_enabled() or verification.holding.kind.runs_backward_in_forward:
        return contextlib.nullcontext
    lock, forward_state = (
        verification.wrap_state.lock,
        ForwardState(verification.model, verification.snapshot),
    )

    @contextlib.contextmanager
    def restored_model() -> Iterator[None]:
        with lock, forward_state.restored():
            yield

    return restored_model


# -------------------------------------------------------------------------------------------- mini-sequences


def _loss_by_mini_sequence(call: Call) -> LossOutput:
    """Compute the causal LM's loss by `MiniSequence`."""
    model, verification = call.model, verify_pieces(call)
    pieces, mlps = verification.wrap_state.method.pieces, verification.examine_once(find_token_wise_mlps)
    assert pieces is not None
    description = f"MiniSequence: MLPs ({len(mlps)}) in {pieces.mlps} pieces, the head in {pieces.head}"
    _announce(verification, lambda: description)
    with calling_original_forwards(model):
        total = access_to(model).run(lambda: mini_sequence.total_loss(call, pieces, mlps))
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
