"""The outputs of a wrapped causal LM: a loss, and logits and a cache that are computed when they are read.

Chunks never hold the logits (batch, seqlen, vocab_size) of a sequence. Callers that use `out.logits` for
their metrics, as trainers do, get them from a second forward, without gradients. Others pay nothing, nor do
those that only look whether there are some, of which shape, dtype and device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from typing import SupportsIndex

import torch
from torch import Tensor
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
    loss: Tensor, compute: Callable[[], Tensor], *, until_backward: bool = False
) -> None:
    """Note on a loss how the logits of its output are computed.

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


def _metadata(node: Node) -> dict[str, Callable[[], Tensor]]:
    """Return what may be noted on a node of autograd's graph; PyTorch's stub has it as a method."""
    return node.metadata  # type: ignore[return-value]


def _find_compute(loss: Tensor | None) -> Callable[[], Tensor] | None:
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
        they are then and without gradients."""
        if not (self.has_stored_logits or self.returns_stored_only):
            compute = _find_compute(self.loss)
            vars(self)["_logits"] = None if compute is None else compute()  # and no item, which others count
        return vars(self).get("_logits")

    @logits.setter
    def logits(self, value: Tensor | None) -> None:
        vars(self)["_logits"] = value

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

    Args:
        compute: returns the values.
        shape, dtype, device: of the values.
    """

    _compute: Callable[[], Tensor]
    _logits: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> DeferredLogits:
        logits = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        logits._compute, logits._logits = compute, None
        return logits

    def computed(self) -> Tensor:
        """Return the values, which are computed once."""
        if self._logits is None:
            self._logits = self._compute()
        return self._logits

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
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


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
