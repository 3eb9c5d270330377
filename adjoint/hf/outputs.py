"""The outputs of a wrapped causal LM: a loss, and logits and a cache that are computed when they are read.

Chunks never hold the logits (batch, seqlen, vocab_size) of a sequence. Callers that use `out.logits` for
their metrics, as trainers do, get them from a second forward (`hf.logits`). Others pay nothing, nor do those
that only look whether there are some, of which shape, dtype and device."""

from __future__ import annotations

import contextlib
import os
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
from adjoint.errors import UserError
from adjoint.hf.transformers_api import (
    Cache,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    with_cache_names,
)

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

    def __post_init__(self) -> None:
        with self._as_stored():
            super().__post_init__()  # type: ignore[misc]

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
_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "is_meta", "nbytes")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
}


class DeferredLogits(Tensor):
    """A tensor with shape, dtype and device, whose values are computed when a function needs them.

    It may be the result of an autograd function: a gradient of the values is then one of this tensor.

    Args:
        compute: returns the values, without a graph.
        shape, dtype, device: of the values.
    """

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
    on. Who generates from it needs it; who wants hidden states does not pay for it.

    Args:
        compute: returns the cache.
    """

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
