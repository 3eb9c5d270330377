"""States from call to call: transformers' own cache read as the engine's state, and made of one.

A call with `use_cache=True` returns the cache after its last token; one that is given such a cache goes on
from it. If the tensors of a cache require gradients they get them: they are trained, come from transformers'
own forward, or from a call before with gradients, whose backward has not run yet."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self, SupportsIndex, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from adjoint.engine.continuation import ReturnedState
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.late_gradient import refusing_gradient
from adjoint.engine.verification import alike
from adjoint.fla.functions import is_of_fla
from adjoint.hf import check
from adjoint.hf.cache import (
    CACHE_MIXINS,
    MODELS_CACHE_MIXINS,
    CarriedState,
    Slot,
    zeros,
)
from adjoint.hf.call import Call
from adjoint.hf.model_parts import calling_original_forwards
from adjoint.hf.stage import Backbone, CallContext, make_step
from adjoint.hf.transformers_api import (
    CACHE_LAYERS,
    REQUIRED_CACHE_CLASS,
    STATE_CACHE_CLASS,
    Cache,
    looped_layers,
)
from adjoint.hf.verify.first_use import verification_of
from adjoint.hf.verify.trial_copy import TRIAL_CHUNK_SIZE, example_tokens, in_eval_mode
from adjoint.layers import State

INDEXER_KEYS = ("indexer", "block_index")  # names of slots that only picking keys reads
CacheT = TypeVar("CacheT")
_PARTS = ("layers", "linear_cache", "rnn_state", "seqlen_offset")  # attributes of caches that hold states


def why_not_carried(model: PreTrainedModel) -> str | None:
    """Return the reason why a model's states are not carried from call to call, or None."""
    config = model.config.get_text_config()
    if is_of_fla(config):
        return "its own cache is not of transformers' usual class"
    if config.model_type == "deepseek_v4":
        return "its own cache keeps compressed keys alone, and chunks need the projections of all tokens"
    return None


def returns_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether the cache of a model whose states are carried is a plain `DynamicCache`."""
    model_type = model.config.get_text_config().model_type
    return why_not_carried(model) is None and model_type not in (*REQUIRED_CACHE_CLASS, *STATE_CACHE_CLASS)


def state_of_cache(model: PreTrainedModel, cache: object, slots: Sequence[Slot], ids: Tensor) -> CarriedState:
    """Return the state that a cache of transformers holds, with its gradients; zeros if it holds nothing yet.

    Args:
        ids: (batch, seqlen) of the call that goes on from it.

    Raises:
        Refused: it is no cache of the model's usual kind.
        ValueError: it has another number of rows.
    """
    layers = getattr(cache, "layers", ())
    if not _is_cache_of(model, cache) or not (layers or _lists_states(cache)):
        check.refuse(
            model, f"past_key_values is a {type(cache).__name__}, not the cache that a call returned"
        )
    tokens, state = 0, []
    config = model.config.get_text_config()
    loops = range(config.num_hidden_layers, config.num_hidden_layers + len(looped_layers(config)))
    has_place = dict.fromkeys(slots, True)
    for slot in slots:
        layer = layers[slot.layer] if slot.layer < len(layers) else None
        if slot.grows is None and _lists_states(cache):
            value = _listed_state(cache, slot)
        elif layer is None and slot.layer in loops:
            value = None  # the model's own forward adds these layers
        else:
            kind = type(layer)
            if kind not in CACHE_MIXINS and kind.__name__ not in MODELS_CACHE_MIXINS:
                check.refuse(
                    model, f"past_key_values has a {kind.__name__}, a kind of state that chunks cannot carry"
                )
            if getattr(layer, "record_past", False):
                check.refuse(model, "past_key_values records the past of its states, to be cropped")
            has_place[slot] = _has_place(layer, slot)
            value = _value(layer, slot) if has_place[slot] else None
        if layer is not None and slot.grows is not None and slot.name == "keys":
            tokens = max(tokens, layer.get_seq_length())
        elif value is not None:
            tokens = max(tokens, 1)
        state.append(value)
    initial = zeros(slots, len(ids), ids.device)
    if all(value is None for value in state):
        return CarriedState(initial, 0)
    state = [
        value if value is not None or has_place[slot] else zero
        for slot, value, zero in zip(slots, state, initial, strict=True)
    ]
    for slot, value in zip(slots, state, strict=True):
        name = f"past_key_values: {slot.name} of layer {slot.layer}"
        if value is None:
            check.refuse(model, f"{name} is missing")
        if value.shape[0] != len(ids):
            raise ValueError(f"{name} has {value.shape[0]} rows, and input_ids {len(ids)}")
        if slot.grows is not None and value.shape[slot.grows] != _stored(layers[slot.layer], tokens):
            check.refuse(model, f"{name} has {value.shape[slot.grows]} tokens, of {tokens} that were seen")
    # Only a key that attention reads has a gradient; the others' would be zero instead of None.
    tensors = [
        v.detach() if slot.name in INDEXER_KEYS else v
        for slot, v in zip(slots, state, strict=True)
        if v is not None
    ]
    if ids.shape[1] == 1:  # the models' code for a single token writes over recurrent states
        tensors = [v.clone() if s.grows is None else v for s, v in zip(slots, tensors, strict=True)]
    return CarriedState(tuple(v.to(ids.device) for v in tensors), tokens)


def _is_cache_of(model: PreTrainedModel, cache: object) -> bool:
    """Whether a cache's class is one that the model's own forward takes."""
    model_type = model.config.get_text_config().model_type
    if model_type in STATE_CACHE_CLASS:
        return isinstance(cache, _models_class(*STATE_CACHE_CLASS[model_type]))
    if model_type in REQUIRED_CACHE_CLASS:
        return isinstance(cache, _models_class(*REQUIRED_CACHE_CLASS[model_type][1:]))
    return isinstance(cache, Cache)


def _models_class(module: str, name: str) -> type:
    """Return a cache class of a model's own Python module."""
    cache_class: type = getattr(importlib.import_module(module), name)
    return cache_class


def _lists_states(cache: object) -> bool:
    """Whether a cache has its recurrent states in a list of its own: MiniMax's and xLSTM's."""
    return hasattr(cache, "linear_cache") or hasattr(cache, "rnn_state")


def _listed_state(cache: object, slot: Slot) -> Tensor | None:
    """Return a recurrent state of a cache that lists its states, or None if it has none yet."""
    attributes = vars(cache)
    if "rnn_state" in attributes:
        state: Tensor = attributes["rnn_state"][slot.layer][slot.index]
        return state if bool(attributes["seqlen_offset"]) else None
    states = attributes["linear_cache"]
    value = states[slot.layer] if slot.layer < len(states) else None
    return value.mT if isinstance(value, Tensor) else None  # of keys and values; ours of values and keys


def _has_place(layer: object, slot: Slot) -> bool:
    """Whether a cache layer can hold a slot's state. Prefix tuning gives a recurrent layer a cache layer of
    keys and values, which it does not read: it begins without a state."""
    return slot.name not in ("conv", "recurrent") or hasattr(layer, f"{slot.name}_states")


def _value(layer: object, slot: Slot) -> Tensor | None:
    """Return a slot's tensor in a cache layer of transformers, or None if it has none yet."""
    if slot.name in ("conv", "recurrent"):
        value: Tensor | None = getattr(layer, f"{slot.name}_states").get(slot.index)
        return value
    name = {"indexer": "indexer_keys", "block_index": "idx_keys"}.get(slot.name, slot.name)
    value = getattr(layer, name)
    return None if value is None or value.numel() == 0 else value


def _stored(layer: object, tokens: int) -> int:
    """Return how many of the last tokens a cache layer keeps: those that the next token can see."""
    window = getattr(layer, "sliding_window", None)
    return tokens if window is None else min(tokens, window - 1)


def cache_of_state(
    model: PreTrainedModel, state: Sequence[Tensor], slots: Sequence[Slot], tokens: int
) -> DynamicCache:
    """Return a cache of transformers that holds a state, with its gradients.

    Args:
        state: after a call; keys and values may begin earlier than the last `tokens` tokens.
        tokens: number of tokens of the document that goes on.
    """
    cache = _empty_cache(model, len(state[0]), state[0].device)
    trained: dict[Slot, Tensor] = {}
    values: dict[Slot, Tensor] = {}
    for slot, value in zip(slots, state, strict=True):
        if slot.grows is not None:
            layer = cache.layers[slot.layer]
            length = _stored(layer, tokens)
            value = value.narrow(slot.grows, value.shape[slot.grows] - length, length)
        if value.requires_grad and slot.name not in INDEXER_KEYS:
            trained[slot] = value = ReturnedState.apply(value)
        elif slot.grows is not None:
            value = value.clone()  # else the whole slab would stay
        values[slot] = value.detach()
    if _lists_states(cache):
        recurrent = {s: v for s, v in ({**values, **trained}).items() if s.grows is None}
        _list_states(cache, recurrent, model.dtype, tokens)
        trained = {s: v for s, v in trained.items() if s.grows is not None}
        values = {s: v for s, v in values.items() if s.grows is not None}
    for slot, value in values.items():
        layer = cache.layers[slot.layer]
        if slot.name == "conv":
            layer.update_conv_state(value, slot.index, conv_kernel_size=value.shape[-1])
        elif slot.name == "recurrent":
            layer.update_recurrent_state(value, slot.index)
            layer.has_previous_state[slot.index] = True
    for slot, value in values.items():
        layer = cache.layers[slot.layer]
        if slot.name == "keys":
            layer.update(
                value, next(v for s, v in values.items() if (s.layer, s.name) == (slot.layer, "values"))
            )
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = tokens
        elif slot.name == "indexer":
            layer.update_indexer(value)
            positions = torch.arange(tokens, device=value.device)
            layer.indexer_position_ids = positions.expand(3, len(value), tokens)
        elif slot.name == "block_index":
            layer.update_index(value)
    if any(tensor.requires_grad for tensor in state) or hasattr(cache, "linear_cache"):
        make_differentiable(cache)
    for slot, value in trained.items():  # transformers' methods copy values into tensors of their own
        if slot.grows is None:
            getattr(cache.layers[slot.layer], f"{slot.name}_states")[slot.index] = value
        else:
            setattr(cache.layers[slot.layer], slot.name, value)
    return cache


def _empty_cache(model: PreTrainedModel, rows: int, device: torch.device) -> DynamicCache:
    """Return a cache of the class that the model's own forward makes, with a layer for each of its layers.

    xLSTM's is none of `DynamicCache`, and has none of its attributes."""
    config = model.config
    model_type = config.get_text_config().model_type
    cache: DynamicCache
    if model_type in STATE_CACHE_CLASS:
        kind = _models_class(*STATE_CACHE_CLASS[model_type])
        cache = kind(config, rows, dtype=model.dtype, device=device)
        return cache
    if model_type not in REQUIRED_CACHE_CLASS:
        cache = DynamicCache(config=config)
        cache.layers += [copy.deepcopy(cache.layers[k]) for k in looped_layers(config.get_text_config())]
        return cache
    cache = _models_class(*REQUIRED_CACHE_CLASS[model_type][1:])()
    cache.layers = [CACHE_LAYERS["DynamicLayer"]() for _ in range(config.num_hidden_layers)]
    vars(cache)["linear_cache"] = [[] for _ in cache.layers]
    return cache


def _list_states(cache: object, values: Mapping[Slot, Tensor], dtype: torch.dtype, tokens: int) -> None:
    """Put recurrent states after so many tokens into a cache that lists its states, in the model's dtype."""
    attributes = vars(cache)
    for slot, value in values.items():
        if "linear_cache" in attributes:
            attributes["linear_cache"][slot.layer] = value.to(dtype).mT
        else:
            states = list(attributes["rnn_state"][slot.layer])
            states[slot.index] = value.to(dtype)
            attributes["rnn_state"][slot.layer] = tuple(states)
    if "rnn_state" in attributes:
        attributes["seqlen_offset"] += tokens


def fill_cache(cache: object, filled: object) -> None:
    """Put what another cache of the same kind holds into a cache that a call was given."""
    vars(cache).update({name: value for name, value in vars(filled).items() if name in _PARTS})
    if isinstance(filled, CarriesGradients) and type(cache) is filled.values_class:
        cache.__class__ = type(filled)


class CarriesGradients:
    """Mixin of caches whose tensors may carry gradients to the call that has made them.

    A deep copy carries them, too. What is pickled is transformers' own class, without gradients.

    Attributes:
        values_class: transformers' own class.
    """

    values_class: ClassVar[type]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        for tensor in _tensors(self):
            if tensor.grad_fn is not None:  # deepcopy takes leaves alone
                memo[id(tensor)] = tensor.clone()
        twin = self.__copy__()
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(vars(self), memo))
        return twin

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(vars(self))
        return twin

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[object, ...]:
        return copy.copy, (_replaced(self, Tensor.detach),)


class DifferentiableCache(CarriesGradients, DynamicCache):
    """A `DynamicCache` whose tensors may carry gradients."""

    values_class: ClassVar[type] = DynamicCache

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: object
    ) -> Tensor:
        """Store a state that transformers' own forward has computed, in a tensor of its own.

        transformers copies it into the tensor of the state before, which the graph of the new one has saved:
        a circle in autograd that Python's collector does not see, and that would keep the step before."""
        states = self.layers[layer_idx].recurrent_states
        if torch.is_grad_enabled() and states[state_idx].requires_grad:
            states[state_idx] = torch.empty_like(states[state_idx].detach())
        stored: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)
        return stored

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, with the states of recurrent layers, which transformers' layers leave or lack."""
        self.reorder_cache(self._row_numbers().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows alone, in this order."""
        self.reorder_cache(self._row_numbers()[indices.cpu()])

    def _row_numbers(self) -> Tensor:
        return torch.arange(next((len(t) for t in _tensors(self) if t.dim() > 1), 0))


class ListedStatesCache(DifferentiableCache):
    """A MiniMax cache that counts its tokens and moves its rows with all of their states.

    transformers' own asks the first layer, which has no keys, for the number of tokens, so that a token after
    the cache attends to padding; and a beam search moves keys and values alone."""

    linear_cache: list[Tensor | list[Tensor]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer with keys."""
        return super().get_seq_length(self._layer_with_keys(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return number and offset of the keys that a mask is for."""
        return super().get_mask_sizes(query_length, self._layer_with_keys(layer_idx))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows."""
        super().reorder_cache(beam_idx)
        moved = [s[beam_idx.to(s.device)] if isinstance(s, Tensor) else s for s in self.linear_cache]
        self.linear_cache = moved

    def _layer_with_keys(self, layer_idx: int) -> int:
        return next((k for k, layer in enumerate(self.layers) if layer.get_seq_length()), layer_idx)


_differentiable_classes: dict[type, type] = {DynamicCache: DifferentiableCache}


def make_differentiable(cache: object) -> None:
    """Make a cache of transformers one of the subclass whose tensors carry gradients, in place."""
    kind, lists_states = type(cache), hasattr(cache, "linear_cache")
    if isinstance(cache, CarriesGradients):
        return
    if kind not in _differentiable_classes:
        dynamic = ListedStatesCache if lists_states else DifferentiableCache
        bases = (dynamic if isinstance(cache, DynamicCache) else CarriesGradients, kind)
        _differentiable_classes[kind] = type(f"Differentiable{kind.__name__}", bases, {"values_class": kind})
    cache.__class__ = _differentiable_classes[kind]


def _tensors(cache: object) -> Iterator[Tensor]:
    """Iterate over a cache's tensors."""
    yield from (state for state in getattr(cache, "linear_cache", ()) if isinstance(state, Tensor))
    yield from itertools.chain(*getattr(cache, "rnn_state", {}).values())
    for layer in getattr(cache, "layers", ()):
        for value in vars(layer).values():
            yield from (
                t for t in (value.values() if isinstance(value, dict) else (value,)) if isinstance(t, Tensor)
            )


def detached(cache: object) -> object:
    """Return a cache that shares a cache's tensors, without their gradients; anything else as it is."""
    is_cache = isinstance(cache, Cache) or _lists_states(cache)
    if not is_cache or not any(t.requires_grad for t in _tensors(cache)):
        return cache
    return _replaced(cache, Tensor.detach)


def refusing_gradients(cache: Cache, anchor: Tensor, message: str) -> Cache:
    """Return a cache with a cache's values, whose gradients are refused as by `refusing_gradient`."""
    return _replaced(cache, lambda t: refusing_gradient(t, anchor, message) if t.is_floating_point() else t)


def _replaced(cache: CacheT, replace: Callable[[Tensor], Tensor]) -> CacheT:
    """Return a cache with other tensors in the place of a cache's own."""
    memo: dict[int, object] = {id(t): replace(t) for t in _tensors(cache)}
    kind: type = cache.values_class if isinstance(cache, CarriesGradients) else type(cache)
    twin: CacheT = object.__new__(kind)
    parts = {name: value for name, value in vars(cache).items() if name in _PARTS}
    twin.__dict__.update({**vars(cache), **copy.deepcopy(parts, memo)})
    return twin


def states_by_layer(model: PreTrainedModel, cache: object, ids: Tensor) -> list[State]:
    """Return the recurrent states in a cache, a tuple for each layer of a wrapped model.

    Args:
        ids: as in `state_of_cache`.
    """
    slots = verification_of(model).slots
    state = state_of_cache(model, cache, slots, ids).state
    layers = range(model.config.get_text_config().num_hidden_layers)
    return [tuple(s for slot, s in zip(slots, state, strict=True) if slot.layer == k) for k in layers]


def cache_by_layer(model: PreTrainedModel, states: Sequence[State]) -> DynamicCache:
    """Return a cache of transformers with the states of `states_by_layer`."""
    slots = sorted(verification_of(model).slots, key=lambda slot: slot.layer)  # stable: as in the states
    return cache_of_state(model, [s for state in states for s in state], slots, tokens=1)


def why_not_from_batch_to_batch(model: PreTrainedModel) -> str | None:
    """Return the reason why a training loop cannot carry a wrapped model's states from batch to batch."""
    if reason := why_not_carried(model):
        return reason
    if any(slot.grows is not None for slot in verification_of(model).slots):
        return "attention's keys and values would grow without limit"
    return None


def refuse_if_states_are_lost(model: PreTrainedModel, slots: Sequence[Slot]) -> None:
    """Refuse a model whose hidden states of a few tokens differ where transformers' cache carried its state.

    Both runs have the same chunks, so that only what the cache keeps can differ."""
    ids, _ = example_tokens(model)

    def run(ids: Tensor, carried: CarriedState | None = None) -> tuple[Tensor, CarriedState]:
        call = Call(model, {"input_ids": ids}, carried=carried)
        stage = Backbone(model, slots, context=CallContext.from_call(call, None))
        batch, _ = call.batch()
        collect = CollectHiddenStates(batch.seqlen)
        step = make_step([stage, collect], batch, EngineSpec(TRIAL_CHUNK_SIZE, least=2))
        _, final = step.forward()
        assert collect.hidden is not None
        cache = cache_of_state(model, final[: len(slots)], slots, batch.seqlen)
        return collect.hidden, state_of_cache(model, cache, slots, ids)

    with torch.no_grad(), in_eval_mode(model), calling_original_forwards(model), check.as_refusal(model):
        _, carried = run(ids[:, :TRIAL_CHUNK_SIZE])
        hidden, _ = run(ids[:, TRIAL_CHUNK_SIZE:], carried)
        expected, _ = run(ids)
    if not alike(hidden, expected[:, TRIAL_CHUNK_SIZE:]):
        check.refuse(model, "its state is more than transformers' cache keeps between calls")
