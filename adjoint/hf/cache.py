"""The cache of a transformers model as the engine's state: recurrent tensors in and out of a chunk as values,
keys and values joined to slabs.

transformers' own cache copies new states into old ones and concatenates keys; both are right for generation,
and neither can be differentiated from chunk to chunk in flat memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers import cache_utils as theirs

from adjoint.engine.step import uncompiled
from adjoint.engine.storage import Past
from adjoint.hf.kernels.fla import is_of_fla
from adjoint.kernels.attention import join
from adjoint.layers import State
from adjoint.parallel.handoff import StateHandoff

# Dimensions along which tensors grow, with the batch: keys and values are (batch, heads, tokens, dim),
# an indexer's keys (batch, tokens, dim).
GROWS = {"keys": 2, "values": 2, "indexer": 1}


class _Handed(threading.local):
    state: Tensor | None = None


handed = _Handed()  # the recurrent state that the cache gave last


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one tensor of the state is in the cache.

    Attributes:
        layer: the model's. name: "conv", "recurrent", "keys", "values" or "indexer". index: of a layer's
            several conv or recurrent states.
        shape: without the batch; what grows, of no token.
    """

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def grows(self) -> int | None:
        """The dimension along which it grows, counted with the batch."""
        return GROWS.get(self.name)


def zeros(slots: Sequence[Slot], batch: int, device: torch.device) -> State:
    """The state before a sequence."""
    return tuple(torch.zeros(batch, *s.shape, dtype=s.dtype, device=device) for s in slots)


class _Layer:
    """What of a cache's layer is state: recurrent tensors, whose new ones take the place of the old, and what
    grows.

    Attributes:
        before: of what grows, by name, its past; empty at the very start. pieces: its chunk's own.
        crossings: by (name, index), recurrent tensors that cross to another process meanwhile. left: of
            these, the new ones.
    """

    is_croppable = False
    before: dict[str, Past]
    pieces: dict[str, Tensor]
    crossings: dict[tuple[str, int], StateHandoff]
    left: dict[tuple[str, int], Tensor]
    dtype: Any
    device: Any
    conv_states: Any
    conv_kernel_size: Any
    has_previous_state: Any

    def found(self) -> dict[tuple[str, int], Tensor]:
        """(name, index) → what is there."""
        held: dict[str, Any] = {name: getattr(self, f"{name}_states", {}) for name in ("conv", "recurrent")}
        held |= {name: {0: piece} for name, piece in self.pieces.items()}
        found = {(name, i): s for name, states in held.items() for i, s in states.items() if s is not None}
        return found | self.left


class _Awaited(dict[int, Any]):
    """A layer's states by their index; functions are called for theirs when they are read."""

    def __getitem__(self, index: int) -> Any:
        value = super().__getitem__(index)
        if callable(value) and not isinstance(value, Tensor):
            self[index] = value = value()
        return value

    def get(self, index: int, default: Any = None) -> Any:
        if index not in self:
            return default
        return self[index]

    def values(self) -> Any:
        return [self[index] for index in self]

    def items(self) -> Any:
        return [(index, self[index]) for index in self]


class _Recurrent(_Layer):
    """Convolution tails and recurrent states."""

    @uncompiled
    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        size = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        before = self.conv_states[state_idx]
        if before is None:
            whole = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        elif conv_states.dim() == 2:  # (batch, tokens): ids
            whole = torch.cat([before.to(conv_states.dtype), conv_states], dim=1)
        else:
            pieces = before.to(conv_states.dtype), conv_states
            # token by token in memory, as the chunk's inputs come out of their projection
            whole = torch.cat([t.transpose(1, 2) for t in pieces], dim=1).transpose(1, 2)
        self.dtype, self.device = conv_states.dtype, conv_states.device
        self.conv_kernel_size[state_idx] = size
        self.set("conv", state_idx, whole[..., -size:])
        return whole

    @uncompiled
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.set("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def set(self, name: str, index: int, value: Tensor) -> None:
        self._put(name, index, value, value.shape[-1])
        if (crossing := self.crossings.get((name, index))) is not None:
            self.left[name, index] = crossing.send(value)

    def begin(self, slot: Slot, value: Any) -> None:
        """Puts the state before the chunk there, or what waits for it when it is read."""
        if isinstance(value, Tensor):
            return self._put(slot.name, slot.index, value.to(slot.dtype), slot.shape[-1])
        held = f"{slot.name}_states"
        if not isinstance(getattr(self, held), _Awaited):
            setattr(self, held, _Awaited(getattr(self, held)))
        self._put(slot.name, slot.index, lambda: value.receive().to(slot.dtype), slot.shape[-1])

    def _put(self, name: str, index: int, value: Any, taps: int) -> None:
        getattr(self, f"{name}_states")[index] = value
        getattr(self, f"is_{name}_states_initialized")[index] = True
        self.has_previous_state[index] = True
        if name == "conv":
            self.conv_kernel_size[index] = taps


class _Growing(_Layer):
    """Keys and values, joined to what is before them."""

    seen = 0  # tokens before the chunk, also where the layer is another worker's and nothing is kept of it

    @uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.dtype, self.device = key_states.dtype, key_states.device
        self.pieces |= {"keys": key_states, "values": value_states}
        if not self.before:
            return key_states, value_states
        reach = None if self.window is None else self.window - 1
        keys, values = (join(self.before[name], self.pieces[name], reach) for name in ("keys", "values"))
        return keys, values

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included."""
        return getattr(self, "sliding_window", None)

    def get_seq_length(self) -> int:
        return self.seen + (self.pieces["keys"].shape[2] if "keys" in self.pieces else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.seen if self.window is None else min(self.seen, self.window - 1)
        return kept + query_length, self.seen - kept


class _Indexed(_Growing):
    """Sparse attention, whose indexer picks some keys of the past by keys of its own; no gradient goes
    there."""

    indexer_position_ids: Tensor | None = None  # of its past, where a model keeps keys without their rotation

    @uncompiled
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        piece = self.pieces["indexer"] = indexer_key_states.detach()
        return self.before["indexer"].join(piece) if "indexer" in self.before else piece


# Of each of transformers' layers what ours does otherwise, and ours; some have a recurrence and attention.
CACHE_MIXINS: dict[type, tuple[type, ...]] = {
    theirs.DynamicLayer: (_Growing,),
    theirs.DynamicIndexedLayer: (_Indexed,),
    theirs.DynamicSlidingWindowLayer: (_Growing,),
    theirs.LinearAttentionLayer: (_Recurrent,),
    theirs.LinearAttentionAndFullAttentionLayer: (_Growing, _Recurrent),
    theirs.LinearAttentionAndSlidingWindowAttentionLayer: (_Growing, _Recurrent),
}
OURS: dict[type, type] = {
    kind: type(kind.__name__, (*others, kind), {}) for kind, others in CACHE_MIXINS.items()
}


# By model_type: how many states a layer has, where the configuration does not say what its cache has ...
UNTOLD = {"xlstm": 3}
# ... and of which class a model insists that its cache is: whose it is, the module, the name.
REQUIRED_CACHE_CLASS = {
    "minimax": ("MiniMax", "transformers.models.minimax.modeling_minimax", "MiniMaxCache")
}


class ChunkCache(DynamicCache):
    """A cache that hands one chunk its state and takes the new one; `layers_with_state` and `out_of` are all
    that the stage uses of it.

    Raises:
        ValueError: the model's cache has a kind of layer that this does not know.
    """

    linear_cache: Sequence[Any] = ()  # MiniMax's, whose states are in layers here
    seqlen_offset = 0  # xLSTM's, which counts tokens there

    def __init__(self, config: Any) -> None:
        DynamicCache.__init__(self, config=config)
        if self.layer_class_to_replicate is not None:
            raise ValueError(f"{type(config).__name__} does not say which layers its cache has")
        self.kinds: list[Any] = self.layers
        states = 3 if is_of_fla(config) else UNTOLD.get(config.model_type)
        if states is not None:
            layers = config.num_hidden_layers
            self.kinds = [theirs.LinearAttentionLayer(number_of_states=states) for _ in range(layers)]
        self.layers: list[Any] = [_ours(layer) for layer in self.kinds]

    @uncompiled
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        handed.state = state  # Mamba-1's mixers do not give it to their scan
        return state

    @property
    def rnn_state(self) -> list[_States]:
        """As xLSTM's cache has them."""
        return [_States(layer, tuple(layer.recurrent_states.values())) for layer in self.layers]

    def layers_with_state(self, slots: Sequence[Slot], state: State, seen: int) -> list[Any]:
        """Layers that hold a state, `seen` tokens after its document's start; there only what grows has
        one."""
        layers = [_ours(layer) for layer in self.kinds]
        for layer in layers:
            if isinstance(layer, _Growing):
                layer.seen, layer.is_initialized = seen, seen > 0
        for slot, value in zip(slots, state, strict=True):
            layer = layers[slot.layer]
            if slot.grows is not None:
                layer.before[slot.name] = value
            else:
                if not isinstance(value, Tensor):
                    layer.crossings[slot.name, slot.index] = value
                if seen:
                    layer.begin(slot, value)
            if slot.name == "indexer" and seen:
                held = layer.before["indexer"].slab.values
                positions = torch.arange(seen, device=held.device)
                # in time, height and width, which are the same for text
                layer.indexer_position_ids = positions.expand(3, held.shape[0], seen)
        return layers

    def out_of(self, slots: Sequence[Slot]) -> State:
        """The new state: of what grows, the chunk's own piece."""
        found = [layer.found() if hasattr(layer, "found") else {} for layer in self.layers]
        out = []
        for slot in slots:
            layer, key = self.layers[slot.layer], (slot.name, slot.index)
            value = found[slot.layer][key]
            waits = key in getattr(layer, "crossings", ()) and key not in layer.left
            out.append(layer.crossings[key].send(value) if waits else value)
        return tuple(out)

    def slots(self) -> list[Slot]:
        """What the model put into an empty cache."""
        out = []
        for i, layer in enumerate(self.layers):
            for (name, index), value in layer.found().items() if hasattr(layer, "found") else ():
                shape = list(value.shape)
                if name in GROWS:
                    shape[GROWS[name]] = 0
                out.append(Slot(i, name, index, tuple(shape[1:]), value.dtype))
        return out


class _OfFLA:
    """flash-linear-attention's way into a `ChunkCache`: a dictionary per layer."""

    layers: list[Any]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        """A layer's states; None before the first token."""
        states = self.layers[index].recurrent_states.get(0)
        if states is None:
            return None
        tails = tuple(tail for tail in self.layers[index].conv_states.values() if tail is not None)
        return {"recurrent_state": states, "conv_state": tails or None}

    @uncompiled
    def update(
        self,
        layer_idx: int,
        recurrent_state: Tensor | None = None,
        conv_state: Sequence[Tensor] | None = None,
        offset: int = 1,
    ) -> None:
        for index, tail in enumerate(conv_state or ()):
            self.layers[layer_idx].set("conv", index, tail)
        if recurrent_state is not None:
            self.layers[layer_idx].set("recurrent", 0, recurrent_state)


def chunk_cache(config: Any) -> ChunkCache:
    """Of the class that a model insists on."""
    if is_of_fla(config):
        cache = ChunkCache(config)  # made first: the two classes' constructors do not go together
        cache.__class__ = _insisted("FLA", "fla.models.utils", "Cache", _OfFLA)
        return cache
    insisted = REQUIRED_CACHE_CLASS.get(config.model_type)
    return ChunkCache(config) if insisted is None else _insisted(*insisted)(config)


@functools.cache  # a cache is made for every chunk
def _insisted(whose: str, module: str, name: str, *before: type) -> Any:
    """A `ChunkCache` that is of a class of theirs, too."""
    insisted = getattr(importlib.import_module(module), name)
    return type(f"{whose}ChunkCache", (*before, ChunkCache, insisted), {})


@dataclasses.dataclass(frozen=True)
class _States:
    """A layer's recurrent states as a tuple, as they are now; its items take the new ones in `copy_`."""

    layer: Any
    values: tuple[Tensor | None, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.values)

    def __getitem__(self, i: int) -> _State:
        return _State(self.layer, i)


@dataclasses.dataclass(frozen=True)
class _State:
    layer: Any
    index: int

    def copy_(self, value: Tensor) -> None:
        self.layer.set("recurrent", self.index, value)


def _ours(layer: Any) -> Any:
    if type(layer) is getattr(theirs, "DummyLayer", None):  # since 5.22
        return layer
    if type(layer) not in OURS:
        raise ValueError(f"its cache has a {type(layer).__name__}, whose state is not known here")
    names = [name for name in ("sliding_window", "number_of_states") if hasattr(layer, name)]
    made: Any = OURS[type(layer)](**{name: getattr(layer, name) for name in names})
    made.before, made.pieces, made.crossings, made.left = {}, {}, {}, {}
    return made
