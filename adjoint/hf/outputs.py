"""The outputs of a wrapped causal LM: a loss, and logits and a cache that are computed when they are read.

Chunks never hold the logits (batch, seqlen, vocab_size) of a sequence. Callers that use `out.logits` for
their metrics, as trainers do, get them from a second forward without gradients. Where a gradient reaches
them, the backward runs the hidden states by chunks once more, with gradients, and the head on a slice of the
tokens at a time. Others pay nothing, nor do those that only look whether there are some, of which shape,
dtype and device."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache

from adjoint.engine.continuation import frees_graph
from adjoint.engine.generators import generators_of
from adjoint.engine.late_gradient import LateBackward, refusing_gradient, with_late_gradient
from adjoint.engine.leaves import leaves_of, suspend_hooks
from adjoint.engine.step import uncompiled
from adjoint.engine.tile import Gradients
from adjoint.engine.weights import trained_parameters, whole_shape
from adjoint.errors import UserError
from adjoint.hf.cache import SHAPE_FUNCTIONS
from adjoint.hf.call import HEAD_ARGUMENTS, Call
from adjoint.hf.carried_state import detached
from adjoint.hf.check import ROUTER_LOGITS
from adjoint.hf.head import head_logits, logits_by_slices, vocab_size_of
from adjoint.hf.model_parts import current_weights, current_weights_type, original_class
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.transformers_api import (
    Cache,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    with_cache_names,
)
from adjoint.hf.wrap_state import wrap_state_or_original
from adjoint.loss import tokens_per_slice

LOGITS = "ADJOINT_LOGITS"  # environment variable: whether a call with labels has logits
LOGITS_CHOICES = ("deferred", "none")
_COMPUTE = "adjoint_compute_logits"
_NODES_SEARCHED = 32  # what others put between the loss that they return and ours is one node or two


def defers_logits() -> bool:
    """Whether `out.logits` of a call with labels can be computed later; else it is None.

    Raises:
        UserError: ADJOINT_LOGITS is no choice.
    """
    choice = os.environ.get(LOGITS, LOGITS_CHOICES[0]).lower()
    if choice not in LOGITS_CHOICES:
        raise UserError(f"{LOGITS}: expected one of {', '.join(LOGITS_CHOICES)}; got {choice!r}")
    return choice == LOGITS_CHOICES[0]


def compute_logits_later(
    loss: Tensor, compute: Callable[[Tensor], Tensor], *, until_backward: bool = False
) -> None:
    """Note on a loss how the logits of its output are computed, from a loss with that graph.

    Outputs are copied (accelerate) and so are losses: FSDP2 and DistributedDataParallel return one that comes
    out of an autograd function of theirs. So it is noted in the loss's graph, or on a loss without one.

    Args:
        until_backward: whether the note is dropped, with what it holds, when a backward frees the graph.
    """
    if loss.grad_fn is None:
        setattr(loss, _COMPUTE, compute)
        return
    metadata = _metadata(loss.grad_fn)
    metadata[_COMPUTE] = compute
    if until_backward:

        def forget(*_: object) -> None:
            if frees_graph():
                metadata.pop(_COMPUTE, None)

        loss.grad_fn.register_hook(forget)


def _metadata(node: Node) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what may be noted on a node of autograd's graph; PyTorch's stub has it as a method."""
    return node.metadata  # type: ignore[return-value]


def _find_compute(loss: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Return what `compute_logits_later` noted on the loss that a loss is made of, None if nothing is."""
    if loss is None or loss.grad_fn is None:
        return getattr(loss, _COMPUTE, None)
    nodes: list[Node] = [loss.grad_fn]
    for node in nodes:  # grows meanwhile
        if (compute := _metadata(node).get(_COMPUTE)) is not None:
            return compute
        if len(nodes) < _NODES_SEARCHED:
            nodes += [before for before, _ in node.next_functions if before is not None]
    return None


class _FieldsWithLogits:
    """The fields of a dataclass of outputs, of an instance without its logits until these are stored.

    FSDP2 reads every field of a model's output, and would have logits computed that nobody asked for."""

    def __get__(self, output: _LogitsOnAccess | None, cls: type[_LogitsOnAccess]) -> dict[str, Field[object]]:
        fields: dict[str, Field[object]] = super(_LogitsOnAccess, cls).__dataclass_fields__  # type: ignore[misc]
        if output is None or output.returns_stored_only or output.has_stored_logits:
            return fields
        return {name: field for name, field in fields.items() if name != "logits"}


@with_cache_names
class _LogitsOnAccess:
    """A mixin for outputs of a causal LM whose `logits` may be computed when they are read.

    Attributes:
        returns_stored_only: whether `logits` is None for now if none are stored.
    """

    loss: Tensor | None
    returns_stored_only = False
    __dataclass_fields__ = _FieldsWithLogits()

    def __init__(self, *args: object, **kwargs: object) -> None:
        with self._as_stored():
            super().__init__(*args, **kwargs)

    @property
    def has_stored_logits(self) -> bool:
        """Whether logits are there: the call has asked for them, or they have been read."""
        return vars(self).get("_logits") is not None

    @property
    def logits(self) -> Tensor | None:
        """Logits (batch, seqlen, vocab_size), or None where they cannot be computed.

        Logits that the call asked for are stored; others are computed when they are used, from the weights as
        they are then. By name and number (`out["logits"]`, `out[1]`, `to_tuple()`, `in`) they are there, too;
        keys, items and values have stored ones alone."""
        if not (self.has_stored_logits or self.returns_stored_only):
            compute = _find_compute(self.loss)
            logits = None if compute is None or self.loss is None else compute(self.loss)
            vars(self)["_logits"] = logits  # and no item, which frameworks would walk to at each step
        return vars(self).get("_logits")

    @logits.setter
    def logits(self, value: Tensor | None) -> None:
        vars(self)["_logits"] = value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name == "logits" and self.logits is not None)  # type: ignore[misc]

    def __getitem__(self, key: str | SupportsIndex | slice) -> object:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        is_deferred = key == "logits" and not super().__contains__(key) and self.logits is not None  # type: ignore[misc]
        return self.logits if is_deferred else super().__getitem__(key)  # type: ignore[misc]

    def get(self, name: str, default: object = None) -> object:
        """Return an item, or the logits, as a dictionary does."""
        return self[name] if name in self else default  # noqa: SIM401

    def to_tuple(self) -> tuple[object, ...]:
        """Return all that is there, in the order of transformers' own output."""
        fields = super(_LogitsOnAccess, type(self)).__dataclass_fields__  # type: ignore[misc]
        names = dict.fromkeys([*fields, *self.keys()])  # type: ignore[attr-defined]
        return tuple(self[name] for name in names if name in self)

    @contextlib.contextmanager
    def _as_stored(self) -> Iterator[None]:
        """Compute nothing meanwhile."""
        before = self.returns_stored_only
        vars(self)["returns_stored_only"] = True
        try:
            yield
        finally:
            vars(self)["returns_stored_only"] = before

    def __setattr__(self, name: str, value: object) -> None:
        if self.returns_stored_only:
            return super().__setattr__(name, value)
        with self._as_stored():  # an attribute that is a field becomes an item, too
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        with self._as_stored():
            return super().__repr__()

    def __reduce__(self) -> str | tuple[object, ...]:
        with self._as_stored():
            return super().__reduce__()


class LossOutput(_LogitsOnAccess, CausalLMOutputWithPast):
    """A causal LM's output by chunks or mini-sequences."""


class RoutedLossOutput(_LogitsOnAccess, MoeCausalLMOutputWithPast):
    """A causal LM's output by chunks if the model adds its routers' loss."""


# Functions of a tensor that say what it is, not what is in it.
_DESCRIPTIONS = SHAPE_FUNCTIONS | {
    getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")
}
_HOOKS = {Tensor.register_hook, Tensor.retain_grad}


class DeferredLogits(Tensor):
    """A tensor with shape, dtype and device, whose values `compute` returns when a function needs them.

    They have no graph; but this tensor may be the result of an autograd function: a gradient of the values is
    then one of it."""

    _compute: Callable[[], Tensor]
    _plain: Tensor | None
    _with_graph: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> DeferredLogits:
        logits = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        logits._compute, logits._plain, logits._with_graph = compute, None, None
        return logits

    def values_alone(self) -> Tensor:
        """Return the values without a graph, which are computed once."""
        if self._plain is None:
            self._plain = self._compute()
        return self._plain

    @uncompiled
    def computed(self) -> Tensor:
        """Return the values; where gradients are on with the graph of this tensor, if it has one."""
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self.values_alone()
        if self._with_graph is None:
            self._with_graph = _ComputedLogits.apply(self)
        return self._with_graph

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _HOOKS:
            raise UserError(
                "out.logits: a hook would see the gradient of losses that are made of the logits, without "
                "out.loss's part: call the model without labels, and make the loss of its logits"
            )
        if func in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # below autograd, which has noted this tensor's own graph
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.values_alone, (args, kwargs or {}))
        return func(*args, **kwargs)


class _ComputedLogits(torch.autograd.Function):
    """The node between a `DeferredLogits` and its values."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: DeferredLogits) -> Tensor:
        return logits.values_alone().detach()

    @staticmethod
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> Tensor:
        return cotangent


class DeferredCache(DynamicCache):
    """The cache after a forward by chunks, computed when something of it is read.

    transformers' forward returns a cache in evaluation although nobody asks for one, and causal LMs hand it
    on. Who generates from it needs it; who wants hidden states does not pay for it."""

    def __init__(self, compute: Callable[[], Cache]) -> None:
        self.__dict__["_compute"] = compute

    def _fill(self) -> None:
        if (compute := self.__dict__.pop("_compute", None)) is not None:
            self.__dict__.update(vars(compute()))

    def __getattr__(self, name: str) -> object:
        if "_compute" not in self.__dict__:
            raise AttributeError(name)
        self._fill()
        return getattr(self, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        self._fill()
        return super().__reduce_ex__(protocol)


def without_graph(arguments: dict[str, object]) -> dict[str, object]:
    """Return a call's arguments with tensors and caches detached."""
    return {n: v.detach() if isinstance(v, Tensor) else detached(v) for n, v in arguments.items()}


class LogitsOfCall:
    """The logits that a call with labels would have had, of the hidden states (batch, seqlen, hidden_size)
    that `compute_hidden` returns for it, differentiable.

    Make it before the call's forward: logits draw the random numbers, such as dropout's, that the loss drew.
    """

    def __init__(self, call: Call, compute_hidden: Callable[[Call], Tensor]) -> None:
        self.model, self.shape, self.compute_hidden = call.model, call.ids.shape, compute_hidden
        self.arguments, self.has_gradients = without_graph(call.arguments), torch.is_grad_enabled()
        self.trained_arguments = {
            name: value
            for name, value in call.arguments.items()
            if isinstance(value, Tensor) and value.requires_grad and self.has_gradients
        }
        self.continues = call.cache is not None
        self.device, kind = call.ids.device, call.ids.device.type
        self.autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # numbers are drawn in training; evaluation is spared looking for generators in all modules
        self.randomness = generators_of(call.model) if self.has_gradients and call.model.training else None
        self.states_before = [] if self.randomness is None else self.randomness.states()
        self.forward_state: ForwardState | None = None

    @contextlib.contextmanager
    def _as_in_the_call(self) -> Iterator[None]:
        """Hold the model, and draw the call's random numbers again, under its autocast."""
        dtype, is_enabled = self.autocast
        draws, lock = self.randomness or generators_of(self.model), wrap_state_or_original(self.model).lock
        replayed = draws.again(self.states_before) if self.states_before else draws.undone()
        with lock, replayed, torch.autocast(self.device.type, dtype, is_enabled):
            yield

    def deferred(self, loss: Tensor) -> Tensor:
        """Return the logits beside the call's loss, without their values until somebody uses them."""
        model = self.model
        weight = model.get_output_embeddings().weight
        width = whole_shape(weight)[1]
        token = torch.zeros(1, 1, width, dtype=weight.dtype, device=self.device)
        with torch.no_grad(), self._as_in_the_call():
            logits = current_weights(model).run(lambda: logits_by_slices(model, token))
        result = DeferredLogits(self._values, (*self.shape, logits.shape[-1]), logits.dtype, logits.device)
        if not (self.has_gradients and loss.requires_grad):
            return result
        if (reason := self._why_no_gradient()) is not None:
            message = (
                f"a gradient has reached out.logits of {original_class(model).__name__}'s call with labels, "
                f"{reason}, or read out.logits under torch.no_grad()"
            )
            return refusing_gradient(result, loss, message)
        arguments = self.trained_arguments.values()  # of which leaves are leaves of the loss, too
        reached = dict.fromkeys([*trained_parameters(current_weights(model)), *leaves_of([loss])])
        leaves = [leaf for leaf in reached if not any(leaf is argument for argument in arguments)]
        return with_late_gradient(result, [*leaves, *arguments], self._backward(leaves))

    def _why_no_gradient(self) -> str | None:
        """Return why the logits' gradient cannot be computed, and what to do, or None."""
        kind = current_weights_type(self.model)
        remedy = "call it without labels, and make the loss of its logits"
        if kind.is_gathered:
            return f"which has none under {kind.name}: wrap the model with adjoint.Backprop()"
        if kind.copies_from_host:
            return f"which has none under {kind.name}: {remedy}"
        return f"which goes on from a cache and has none: {remedy}" if self.continues else None

    def _values(self) -> Tensor:
        """Compute the logits (batch, seqlen, vocab_size), without gradients."""
        warnings.warn(
            "out.logits was used: a call with labels makes none, so they are computed now, by a second "
            "forward; their gradient, where one reaches them, takes another; torch.no_grad() and "
            f"logits_to_keep=N give those of N tokens; {LOGITS}=none in the environment makes out.logits "
            "None",
            stacklevel=5,
        )
        arguments = {**self.arguments, "logits_to_keep": self.shape[1], "return_dict": True}
        with torch.no_grad(), self._as_in_the_call():
            if self.has_gradients:
                self.forward_state = ForwardState(self.model, Snapshot(self.model))
            logits: Tensor = self.model(**arguments).logits  # by its hooks, which may gather its weights
        return logits

    def _backward(self, leaves: list[Tensor]) -> LateBackward:
        """Return the function from the logits' gradient to those of leaves and trained arguments."""

        def compute(cotangent: Tensor) -> Gradients:
            model, gradients = self.model, Gradients()
            copies = {name: value.detach().requires_grad_() for name, value in self.trained_arguments.items()}
            arguments = {n: v for n, v in {**self.arguments, **copies}.items() if n not in HEAD_ARGUMENTS}
            if ROUTER_LOGITS in arguments:
                arguments[ROUTER_LOGITS] = False
            reached = {leaf: leaf for leaf in leaves}
            reached |= {copies[name]: value for name, value in self.trained_arguments.items()}

            def backpropagate(outputs: Tensor, cotangents: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
                """Add the gradients of `reached`, and return those of others."""
                tensors = [leaf for leaf in leaves_of([outputs]) if leaf in reached]
                # not freed, as hidden states may hang on a graph from before the call
                parts = torch.autograd.grad(
                    outputs, [*others, *tensors], cotangents, retain_graph=True, allow_unused=True
                )
                for tensor, gradient in zip(tensors, parts[len(others) :], strict=True):
                    gradients.add(reached[tensor], gradient)
                return parts[: len(others)]

            assert self.forward_state is not None  # as values have been computed
            restored = self.forward_state.restored()
            with torch.enable_grad(), self._as_in_the_call(), suspend_hooks(leaves), restored:
                hidden = self.compute_hidden(Call(model, arguments))
                y, pieces = hidden.detach().requires_grad_(), list[Tensor]()
                slice_tokens = tokens_per_slice(len(y) * y.shape[1], vocab_size_of(model), y.is_cuda)
                for dy, piece in zip(cotangent.split(slice_tokens, 1), y.split(slice_tokens, 1), strict=True):
                    pieces += backpropagate(head_logits(model, piece), dy, piece)
                backpropagate(hidden, torch.cat(pieces, dim=1))
            return gradients

        return compute
