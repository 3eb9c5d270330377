"""The cache of a transformers model as the engine's state.

Recurrent tensors go in and out of a chunk as values; keys and values are appended to slabs. transformers'
own cache copies new states into old ones and concatenates keys; both are right for generation, and neither
can be differentiated from chunk to chunk in constant memory."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache, PreTrainedConfig

from adjoint.engine.step import uncompiled
from adjoint.engine.storage import Past, Prefix
from adjoint.fla.functions import attention_windows, is_of_fla
from adjoint.hf.transformers_api import (
    BEGINS_WITH_STATES,
    CACHE_LAYERS,
    REQUIRED_CACHE_CLASS,
    CacheLayerMixin,
    LinearAttentionLayer,
    looped_layers,
    recurrent_layers_unnamed,
)
from adjoint.kernels.attention import join
from adjoint.layers import State
from adjoint.parallel.handoff import StateHandoff

# Dimension along which a tensor grows: keys and values are (batch, heads, tokens, dim), an indexer's keys
# (batch, tokens, dim), keys by which blocks are picked (batch, heads, tokens, dim).
GROWING_DIMS = {"keys": 2, "values": 2, "indexer": 1, "block_index": 2}
# DeepSeek-V4's projections, by the name that its layers have for a compressor, of keys and of their gates.
COMPRESSOR_SLOTS = {name: (f"{name}_kv", f"{name}_gate") for name in ("compressor", "indexer")}
GROWING_DIMS |= {slot: 1 for slots in COMPRESSOR_SLOTS.values() for slot in slots}


class _LastReadState(threading.local):
    """The recurrent state that the cache returned last in this thread."""

    state: Tensor | None = None


last_read = _LastReadState()


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one tensor of the state in the cache.

    Attributes:
        layer: index of the model's layer.
        name: "conv", "recurrent", or one of `GROWING_DIMS`.
        index: which of a layer's several conv or recurrent states.
        shape: without the batch; the growing dimension is 0.
        dtype: of the tensor.
    """

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @functools.cached_property
    def grows(self) -> int | None:
        """The dimension along which the tensor grows, counting the batch as 0, or None for recurrent
        states."""
        return GROWING_DIMS.get(self.name)


def zeros(slots: Sequence[Slot], batch: int, device: torch.device) -> State:
    """Return the state before a sequence: a zero of each dtype, which all elements of its tensors read."""
    zero = {dtype: torch.zeros((), dtype=dtype, device=device) for dtype in {s.dtype for s in slots}}
    return tuple([zero[s.dtype].expand(batch, *s.shape) for s in slots])


@dataclasses.dataclass(frozen=True)
class CarriedState:
    """The state with which a call begins.

    Attributes:
        state: of the model's cache, as `Slot`s have it.
        tokens: number of tokens before the call, of the document that goes on.
        prefix: keys and values before the call, if they are not in the state.
    """

    state: State
    tokens: int
    prefix: Prefix | None = None


class _StateLayer:
    """A cache layer whose recurrent tensors are replaced by new ones and whose keys and values grow.

    Attributes:
        past_length: tokens of the document before the chunk. Needed even if another worker has the layer and
            nothing of it is stored here.
        pasts: keys and values before the chunk, by name; empty at the start of a document.
        pieces: the chunk's own keys and values, by name.
        handoffs: recurrent tensors that are sent to another process meanwhile, by (name, index).
        handed_off: the new values of these, once they have been sent.
    """

    is_croppable = False
    past_length = 0
    pasts: dict[str, Past]
    pieces: dict[str, Tensor]
    handoffs: dict[tuple[str, int], StateHandoff]
    handed_off: dict[tuple[str, int], Tensor]
    dtype: torch.dtype
    device: torch.device
    is_initialized: bool
    keys: Tensor | None
    values: Tensor | None

    def empty_copy(self) -> Self:
        """Return a layer with the same settings; to be called on one that has no state yet."""
        layer = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(layer)[name] = type(value)(value) if isinstance(value, (dict, list, set)) else value
        return layer

    def states(self) -> dict[tuple[str, int], Tensor]:
        """Map (name, index) to the tensors that the chunk has left."""
        states: dict[tuple[str, int], Tensor] = {}
        for name in ("conv", "recurrent"):
            by_index: dict[int, Tensor | None] = getattr(self, f"{name}_states", {})
            for index in by_index:
                if (state := by_index.get(index)) is not None:
                    states[name, index] = state
        for name, piece in self.pieces.items():
            states[name, 0] = piece
        return states | self.handed_off


class _LazyStates(dict[int, "Tensor | Callable[[], Tensor] | None"]):
    """States of a layer by index; a function in a state's place is called when the state is read."""

    def __getitem__(self, index: int) -> Tensor | None:
        value = super().__getitem__(index)
        if callable(value) and not isinstance(value, Tensor):
            self[index] = value = value()
        return value

    def get(self, index: int, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        if index not in self:
            return default
        return _LazyStates.__getitem__(self, index)

    def values(self) -> list[Tensor | None]:  # type: ignore[override]
        return [self.get(index) for index in self]

    def items(self) -> list[tuple[int, Tensor | None]]:  # type: ignore[override]
        return [(index, self.get(index)) for index in self]


class _RecurrentStatesByIndex(dict[int, "Tensor | None"]):
    """Recurrent states of a layer, which note in `last_read` that the model's code has read one.

    Mamba-1's mixers do not pass the state that they read to their scan. Releases differ in how they read it:
    since 5.21 by `get_recurrent_state`, before from the layer."""

    def __getitem__(self, index: int) -> Tensor | None:
        last_read.state = value = super().__getitem__(index)
        return value


class _LazyRecurrentStates(_RecurrentStatesByIndex, _LazyStates):
    """Recurrent states, some of which are received from another process when they are read."""


class RecurrentLayer(_StateLayer):
    """A cache layer with convolution tails and recurrent states."""

    # By index of the layer's several states: transformers' own attributes.
    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]
    conv_kernel_size: dict[int, int | None]
    has_previous_state: dict[int, bool]
    # Whether compiled code has called a layer of this process: such code cannot read `_JoinedInputs`.
    is_compiled: ClassVar[bool] = False

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """Append a chunk's inputs to the convolution's tail and store the new tail.

        Args:
            conv_states: (batch, channels, tokens), or ids (batch, tokens).
            conv_kernel_size: length of the tail, where the layer does not know it.

        Returns:
            The tail followed by the inputs.
        """
        if torch.compiler.is_compiling():
            return self._update_for_compiled_code(conv_states, state_idx, conv_kernel_size)
        size = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        previous, tokens = self.conv_states[state_idx], conv_states.shape[-1]
        self.dtype, self.device = conv_states.dtype, conv_states.device
        self.conv_kernel_size[state_idx] = size
        if conv_states.dim() < 3 or tokens < size:
            if previous is None:
                extended = F.pad(conv_states, (max(0, size - tokens), 0))
            else:
                extended = torch.cat([previous.to(conv_states.dtype), conv_states], dim=-1)
            self.store_state("conv", state_idx, extended[..., -size:])
            return extended
        parts = ConvInputs(None if previous is None else previous.to(conv_states.dtype), conv_states)
        new_tail = conv_states[..., -size:]
        if torch.is_grad_enabled():
            parts.inputs, new_tail = _WithTail.apply(conv_states, size, parts.gradient)
        self.store_state("conv", state_idx, new_tail)
        if isinstance(conv_states, FakeTensor):  # it can have no class of ours
            joined = _FakeJoin.apply(parts.tail, parts.inputs)
        elif type(conv_states) is not Tensor or RecurrentLayer.is_compiled:
            return parts.joined()
        else:
            length = tokens if previous is None else tokens + previous.shape[-1]
            joined = conv_states.new_empty(()).expand(*conv_states.shape[:2], length)
            joined = joined.as_subclass(_JoinedInputs)
        joined.parts = parts
        return joined

    @uncompiled
    def _update_for_compiled_code(
        self, conv_states: Tensor, state_idx: int, conv_kernel_size: int | None
    ) -> Tensor:
        """Do what `update_conv_state` does, from now on without a class of our own for its result."""
        RecurrentLayer.is_compiled = True
        return self.update_conv_state(conv_states, state_idx, conv_kernel_size)

    @uncompiled
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        self.store_state("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def store_state(self, name: str, index: int, value: Tensor) -> None:
        """Put a state into transformers' attributes; send it on at once if another process waits for it."""
        getattr(self, f"{name}_states")[index] = value
        getattr(self, f"is_{name}_states_initialized")[index] = True
        self.has_previous_state[index] = True
        if name == "conv":
            self.conv_kernel_size[index] = value.shape[-1]
        if (handoff := self.handoffs.get((name, index))) is not None:
            self.handed_off[name, index] = handoff.send(value)

    def load_handoff(self, slot: Slot, handoff: StateHandoff) -> None:
        """Have the state before the chunk received when it is read."""
        name, index = slot.name, slot.index
        self.store_state(name, index, torch.empty(slot.shape, device="meta"))  # until it is received
        lazy_class = _LazyStates if name == "conv" else _LazyRecurrentStates
        states = lazy_class(getattr(self, f"{name}_states"))
        states[index] = lambda: handoff.receive().to(slot.dtype)
        setattr(self, f"{name}_states", states)


# What a convolution reads in a chunk. transformers' code joins the inputs before the chunk to the chunk's;
# the convolution runs over all, and the first outputs are cut off: a copy of the inputs in each forward, and
# several in the backward. Our convolution takes the inputs before the chunk as its initial state.


class _Gradient:
    """The gradient of a convolution's inputs.

    Attributes:
        is_owned: whether it is in memory of its own, as our convolution makes it that alone reads the inputs;
            None before anybody has read them.
    """

    is_owned: bool | None = None


@dataclasses.dataclass
class ConvInputs:
    """The inputs of a convolution in a chunk and before it, which the tensor that joins them has as `parts`.

    Attributes:
        tail: the inputs before the chunk, (batch, channels, n); None at the start of a document.
        inputs: the chunk's own, (batch, channels, tokens).
        gradient: of `inputs`. The graph has it, and must not have the inputs: a cycle would keep its memory.
    """

    tail: Tensor | None
    inputs: Tensor
    gradient: _Gradient = dataclasses.field(default_factory=_Gradient)

    def joined(self) -> Tensor:
        """Return a tensor that any code can read."""
        self.gradient.is_owned = False
        if self.tail is None:
            return self.inputs.view_as(self.inputs)
        # Along tokens: the memory layout of the chunk's inputs, (batch, tokens, channels), stays.
        return torch.cat([self.tail.transpose(1, 2), self.inputs.transpose(1, 2)], dim=1).transpose(1, 2)


class _TailContext(FunctionCtx):
    """The values that `_WithTail` keeps from its forward for its backward."""

    shape: torch.Size
    size: int
    gradient: _Gradient


class _JoinContext(FunctionCtx):
    """The values that `_FakeJoin` keeps from its forward for its backward."""

    tokens: int
    needs_input_grad: tuple[bool, ...]


class _WithTail(torch.autograd.Function):
    """Inputs (batch, channels, tokens) → the inputs, and a copy of the last ones of them.

    Autograd by itself would fill a gradient as long as the chunk with zeros for the copy's sake."""

    @staticmethod
    def forward(ctx: _TailContext, inputs: Tensor, size: int, gradient: _Gradient) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.size, ctx.gradient = inputs.shape, size, gradient
        return inputs.view_as(inputs), inputs[..., -size:].clone()

    @staticmethod
    def backward(
        ctx: _TailContext, d_inputs: Tensor | None, d_tail: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if d_tail is None:
            return d_inputs, None, None
        if d_inputs is None:
            d_inputs = d_tail.new_zeros(ctx.shape)
        elif not ctx.gradient.is_owned:
            d_inputs = d_inputs.clone()
        d_inputs[..., -ctx.size :].add_(d_tail)
        return d_inputs, None, None


class _FakeJoin(torch.autograd.Function):
    """A tail and inputs, (batch, channels, tokens) → their join, without memory.

    It is for plans, which count the memory of what runs: there nobody joins them."""

    @staticmethod
    def forward(ctx: _JoinContext, tail: Tensor | None, inputs: Tensor) -> Tensor:
        ctx.tokens = 0 if tail is None else tail.shape[2]
        return inputs.new_empty(()).expand(*inputs.shape[:2], ctx.tokens + inputs.shape[2])

    @staticmethod
    def backward(ctx: _JoinContext, d: Tensor) -> tuple[Tensor | None, Tensor]:
        return d[..., : ctx.tokens] if ctx.needs_input_grad[0] else None, d[..., ctx.tokens :]


# Functions of a tensor that say of which size and kind it is, without its values.
SHAPE_FUNCTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    *(getattr(Tensor, name).__get__ for name in ("is_meta", "nbytes")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
}


class _JoinedInputs(Tensor):
    """Inputs (batch, channels, n + tokens) of a chunk behind those before it, joined if others read them."""

    parts: ConvInputs

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func not in SHAPE_FUNCTIONS:
            args, kwargs = tree_map_only(cls, lambda x: x.parts.joined(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class AttentionLayer(_StateLayer):
    """A cache layer whose keys and values are joined to those before the chunk."""

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store the chunk's keys and values, and return them joined to those before the chunk."""
        self.is_initialized = True
        self.dtype, self.device = key_states.dtype, key_states.device
        self.pieces |= {"keys": key_states, "values": value_states}
        keys, values = key_states, value_states
        if self.pasts:
            reach = None if self.window is None else self.window - 1
            keys, values = (join(self.pasts[name], self.pieces[name], reach) for name in ("keys", "values"))
        # Some indexers read how many keys there are; the tensors themselves are only in the slabs.
        self.keys, self.values = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (keys, values))
        return keys, values

    def _append(self, name: str, piece: Tensor) -> Tensor:
        """Store the chunk's piece of a tensor that grows, and return it joined to those before the chunk."""
        self.pieces[name] = piece
        return self.pasts[name].join(piece) if name in self.pasts else piece

    @property
    def window(self) -> int | None:
        """Number of tokens that a query attends to, itself included, or None for all."""
        return getattr(self, "sliding_window", None)

    def get_seq_length(self) -> int:
        return self.past_length + (self.pieces["keys"].shape[2] if "keys" in self.pieces else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the chunk sees, and the index of the first of them."""
        visible = self.past_length if self.window is None else min(self.past_length, self.window - 1)
        return visible + query_length, self.past_length - visible


def has_plain_attention(layer: _StateLayer) -> bool:
    """Whether attention to a cache layer's keys reads nothing else of the layer, and all of the keys."""
    return AttentionLayer in type(layer).__bases__ and getattr(layer, "sliding_window", None) is None


class _IndexedAttentionLayer(AttentionLayer):
    """A cache layer of sparse attention, whose indexer picks keys of the past by keys of its own.

    The indexer's keys get no gradient."""

    # Positions of the past's keys, for models that cache keys before their rotation.
    indexer_position_ids: Tensor | None = None

    @uncompiled
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the chunk's indexer keys, and return them joined to those before the chunk."""
        return self._append("indexer", indexer_key_states.detach())


class _BlockIndexedAttentionLayer(AttentionLayer):
    """A cache layer of sparse attention, whose indexer picks blocks of the past by keys of its own.

    The indexer's keys get no gradient."""

    @uncompiled
    def update_index(self, idx_k: Tensor) -> Tensor:
        """Store the chunk's indexer keys, and return them joined to those before the chunk."""
        return self._append("block_index", idx_k.detach())


class _CompressedAttentionLayer(AttentionLayer):
    """A cache layer of DeepSeek-V4, whose attention reads a weighted mean of each window of tokens, too.

    transformers stores the means, one for `compress_rate` tokens, and the projections of an open window. Here
    the projections of all tokens are stored, and each chunk computes the means of all closed windows again:
    a state with an entry per token, for chunks of any length. The indexer's projections get no gradient."""

    def __init__(self, sliding_window: int, compress_rate: int) -> None:
        # past the model's own class, which asks for its configuration
        sliding_layer = CACHE_LAYERS["DynamicSlidingWindowLayer"]
        sliding_layer.__init__(self, sliding_window=sliding_window)  # type: ignore[misc]
        self.compress_rate = compress_rate

    @uncompiled
    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store the chunk's projections; return those of all closed windows, and the first one's position."""
        joined = []
        for slot, projected in zip(COMPRESSOR_SLOTS[name], (kv, gate), strict=True):
            joined.append(self._append(slot, projected.detach() if name == "indexer" else projected))
        closed = joined[0].shape[1] // self.compress_rate * self.compress_rate
        return joined[0][:, :closed], joined[1][:, :closed], 0

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Return the means, which are those of all windows already."""
        return compressed

    def update_overlap_state(self, *_: object) -> tuple[None, None]:
        """Return nothing of an earlier window: the first one is among those that are computed."""
        return None, None


# The mixins that make our cache layer of each of transformers'; some layers have a recurrence and attention.
_MIXINS_BY_NAME: dict[str, tuple[type, ...]] = {
    "DynamicLayer": (AttentionLayer,),
    "DynamicIndexedLayer": (_IndexedAttentionLayer,),
    "DynamicSlidingWindowLayer": (AttentionLayer,),
    "LinearAttentionLayer": (RecurrentLayer,),
    "LinearAttentionAndFullAttentionLayer": (AttentionLayer, RecurrentLayer),
    "LinearAttentionAndSlidingWindowAttentionLayer": (AttentionLayer, RecurrentLayer),
}
CACHE_MIXINS = {
    CACHE_LAYERS[name]: mixins for name, mixins in _MIXINS_BY_NAME.items() if name in CACHE_LAYERS
}
CHUNK_LAYER_CLASSES: dict[type, type] = {
    kind: type(kind.__name__, (*others, kind), {}) for kind, others in CACHE_MIXINS.items()
}
# Cache layers in a model's own module, by the name of their class: it is not imported before it is used.
MODELS_CACHE_MIXINS = {
    "DeepseekV4CSACache": _CompressedAttentionLayer,
    "DeepseekV4HCACache": _CompressedAttentionLayer,
    "MiniMaxM3VLSparseCacheLayer": _BlockIndexedAttentionLayer,
}


# How many states a layer has, by model_type, where the configuration does not say what its cache holds.
STATES_PER_LAYER = {"xlstm": 3}
# flash-linear-attention's layers have up to three tails of convolutions, and up to two recurrent states,
# which their MLP's state follows.
FLA_STATES, FLA_RECURRENT_STATES = 3, 2


class RowLengths(NamedTuple):
    """Numbers of keys that a model's own code picks from.

    Attributes:
        chunk, document: that the last tokens of a chunk and of its document can see.
        real: of the document's, those up to the last one that is no padding in some row.
        follows_padding: whether tokens that were cut off before the document are in the whole's rows, too.
    """

    chunk: int
    document: int
    real: int
    follows_padding: bool = False


class ChunkCache(DynamicCache):
    """A cache that gives one chunk its state and collects the new one.

    The stage uses `layers_with_state` and `collect_state` only; everything else is for the model's code.

    Raises:
        ValueError: the model's cache has a kind of layer that is not supported.
    """

    linear_cache: Sequence[Tensor] = ()  # MiniMax's cache lists its states here; ours are in layers
    seqlen_offset = 0  # xLSTM counts tokens in its cache
    row_lengths: RowLengths | None = None  # set for each chunk

    def __init__(self, config: PreTrainedConfig) -> None:
        DynamicCache.__init__(self, config=config)
        if self.layer_class_to_replicate is not None:
            raise ValueError(f"{type(config).__name__} does not say which layers its cache has")
        layers: list[CacheLayerMixin] = self.layers
        states = FLA_STATES if is_of_fla(config) else STATES_PER_LAYER.get(config.model_type)
        if states is not None:
            number = config.num_hidden_layers
            layers = [LinearAttentionLayer(number_of_states=states) for _ in range(number)]
        if is_of_fla(config):
            for index, window in attention_windows(config).items():
                name = "DynamicLayer" if window is None else "DynamicSlidingWindowLayer"
                settings = {} if window is None else {"sliding_window": window}
                layers[index] = CACHE_LAYERS[name](**settings)
        for index in recurrent_layers_unnamed(config):
            layers[index] = LinearAttentionLayer()
        layers = [*layers, *(layers[k] for k in looped_layers(config.get_text_config()))]
        self.empty_layers = [_to_chunk_layer(layer) for layer in layers]
        self.layers: list[_StateLayer] = self.layers_with_state((), (), 0)

    @property
    def rnn_state(self) -> list[_RecurrentStates]:
        """The recurrent states, in the form of xLSTM's cache."""
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]  # all of them are
        return [_RecurrentStates(layer, tuple(layer.recurrent_states.values())) for layer in layers]

    def layers_with_state(
        self, slots: Sequence[Slot], state: State, past_length: int, positions: Tensor | None = None
    ) -> list[_StateLayer]:
        """Return new cache layers that hold a state.

        Args:
            slots: the places of the state's tensors.
            state: before the chunk; a `StateHandoff` stands for a tensor that is still to be received.
            past_length: tokens between the document's start and the chunk. At 0 no recurrent state is loaded.
            positions: of these tokens, (components, batch, past_length), or None if they count up from 0.
        """
        layers = list(self.empty_layers)
        for k, layer in enumerate(layers):
            if isinstance(layer, _StateLayer):  # layers that have no state are shared
                layers[k] = layer = layer.empty_copy()
                layer.past_length = past_length
            if isinstance(layer, AttentionLayer):
                layer.is_initialized = past_length > 0
        for slot, value in zip(slots, state, strict=True):
            layer = layers[slot.layer]
            if slot.grows is not None:
                layer.pasts[slot.name] = cast(Past, value)
            elif isinstance(layer, RecurrentLayer):
                if not isinstance(value, Tensor):
                    if past_length:
                        layer.load_handoff(slot, value)
                    layer.handoffs[slot.name, slot.index] = value
                elif past_length:
                    layer.store_state(slot.name, slot.index, value.to(slot.dtype))
            if isinstance(layer, _IndexedAttentionLayer) and slot.name == "indexer" and past_length:
                keys = layer.pasts["indexer"].slab.values
                if positions is None:  # time, height and width are equal in text
                    count = torch.arange(past_length, device=keys.device)
                    positions = count.expand(3, keys.shape[0], past_length)
                layer.indexer_position_ids = positions
        return layers

    def collect_state(self, slots: Sequence[Slot]) -> State:
        """Return the new state; of keys and values, the chunk's own piece."""
        states_by_layer: dict[_StateLayer, dict[tuple[str, int], Tensor]] = {}
        new_state = []
        for slot in slots:
            layer, key = self.layers[slot.layer], (slot.name, slot.index)
            if layer not in states_by_layer:
                states_by_layer[layer] = layer.states()
            value = states_by_layer[layer][key]
            is_unsent = key in layer.handoffs and key not in layer.handed_off
            new_state.append(layer.handoffs[key].send(value) if is_unsent else value)
        return tuple(new_state)

    def find_slots(self) -> list[Slot]:
        """Return the places of all tensors that the model has put into an empty cache."""
        slots = []
        for i, layer in enumerate(self.layers):
            for (name, index), value in layer.states().items() if hasattr(layer, "states") else ():
                shape = list(value.shape)
                if name in GROWING_DIMS:
                    shape[GROWING_DIMS[name]] = 0
                slots.append(Slot(i, name, index, tuple(shape[1:]), value.dtype))
        return slots


class _FLAInterface:
    """flash-linear-attention's methods of a cache, for a `ChunkCache`: a dictionary per layer.

    A layer with a single recurrent state or convolution's tail has it as a tensor, others have tuples."""

    layers: list[RecurrentLayer]  # of attention the mixers of `kernels.mixers` take care

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> dict[str, Tensor | tuple[Tensor, ...] | None] | None:
        """Return a layer's states, or None before the first token."""
        layer = self.layers[index]
        if layer.recurrent_states.get(0) is None:
            return None
        recurrent = [layer.recurrent_states.get(i) for i in range(FLA_RECURRENT_STATES)]
        return {
            "recurrent_state": _single_or_tuple(recurrent),
            "conv_state": _single_or_tuple(layer.conv_states.values()),
            "ffn_state": layer.recurrent_states.get(FLA_RECURRENT_STATES),
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of the document's tokens before the chunk."""
        return self.layers[layer_idx].past_length

    @uncompiled
    def update(
        self,
        layer_idx: int,
        recurrent_state: Tensor | Sequence[Tensor] | None = None,
        conv_state: Tensor | Sequence[Tensor] | None = None,
        ffn_state: Tensor | None = None,
        offset: int = 1,
    ) -> None:
        layer = self.layers[layer_idx]
        for name, states in (("conv", conv_state), ("recurrent", recurrent_state)):
            for index, value in enumerate((states,) if isinstance(states, Tensor) else states or ()):
                layer.store_state(name, index, value)
        if ffn_state is not None:
            layer.store_state("recurrent", FLA_RECURRENT_STATES, ffn_state)


def _single_or_tuple(states: Iterable[Tensor | None]) -> Tensor | tuple[Tensor, ...] | None:
    """Return the states that there are: None, one, or a tuple."""
    present = tuple(state for state in states if state is not None)
    return present if len(present) > 1 else next(iter(present), None)


def make_chunk_cache(config: PreTrainedConfig) -> ChunkCache:
    """Return a chunk cache that is also an instance of the cache class that the model requires."""
    if is_of_fla(config):
        cache = ChunkCache(config)  # the required class's constructor takes other arguments
        cache.__class__ = _chunk_cache_class("FLA", "fla.models.utils", "Cache", _FLAInterface)
        return cache
    required = REQUIRED_CACHE_CLASS.get(config.model_type)
    return ChunkCache(config) if required is None else _chunk_cache_class(*required)(config)


def why_no_recurrence(config: PreTrainedConfig) -> str | None:
    """Return the reason why a model's recurrent layers cannot run by chunks under this release, or None."""
    if BEGINS_WITH_STATES:
        return None
    is_recurrent = (
        is_of_fla(config)
        or config.model_type in STATES_PER_LAYER
        or bool(recurrent_layers_unnamed(config))
        or any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=config).layers)
    )
    if not is_recurrent:
        return None
    return (
        f"recurrent layers of transformers {transformers.__version__} begin several tokens without the state "
        "before them: pip install 'transformers>=5.15'"
    )


@functools.cache  # a cache is made for every chunk
def _chunk_cache_class(prefix: str, module: str, name: str, *mixins: type) -> type[ChunkCache]:
    """Return a subclass of mixins, `ChunkCache` and a class of a module, by name, which a model requires."""
    required_class = getattr(importlib.import_module(module), name)
    return type(f"{prefix}ChunkCache", (*mixins, ChunkCache, required_class), {})


@dataclasses.dataclass(frozen=True)
class _RecurrentStates:
    """A layer's recurrent states as a tuple; its items take new values by `copy_`, as xLSTM's code assigns
    them."""

    layer: RecurrentLayer
    values: tuple[Tensor | None, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.values)

    def __getitem__(self, i: int) -> _RecurrentStateEntry:
        return _RecurrentStateEntry(self.layer, i)


@dataclasses.dataclass(frozen=True)
class _RecurrentStateEntry:
    """Recurrent state of a layer, to be replaced by `copy_`."""

    layer: RecurrentLayer
    index: int

    def copy_(self, value: Tensor) -> None:
        self.layer.store_state("recurrent", self.index, value)


def _to_chunk_layer(layer: CacheLayerMixin) -> _StateLayer:
    """Return our layer for one of transformers' cache layers, with the same settings and no state.

    Raises:
        ValueError: layers of this class are not supported.
    """
    if type(layer) is CACHE_LAYERS.get("DummyLayer"):
        return cast(_StateLayer, layer)
    if (kind := type(layer)) not in CHUNK_LAYER_CLASSES:
        if kind.__name__ not in MODELS_CACHE_MIXINS:
            raise ValueError(f"its cache has a {kind.__name__}, a kind of state that chunks cannot carry")
        mixin = MODELS_CACHE_MIXINS[kind.__name__]
        # transformers makes layers of the last class of a type
        CHUNK_LAYER_CLASSES[kind] = type(kind.__name__, (mixin, kind), {"_layer_type": None})
    names = [name for name in ("sliding_window", "compress_rate", "number_of_states") if hasattr(layer, name)]
    settings = {name: getattr(layer, name) for name in names}
    chunk_layer: _StateLayer = CHUNK_LAYER_CLASSES[type(layer)](**settings)
    chunk_layer.pasts, chunk_layer.pieces, chunk_layer.handoffs, chunk_layer.handed_off = {}, {}, {}, {}
    if isinstance(chunk_layer, RecurrentLayer):
        chunk_layer.recurrent_states = _RecurrentStatesByIndex(chunk_layer.recurrent_states)
    return chunk_layer
