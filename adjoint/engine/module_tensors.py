"""The tensors that modules hold: swapped for a while (`ModuleTensors`), or guarded against changes between
the forward and the backward that recomputes it (`UntrainedTensors`)."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# The end of an error message: "buffer mean was changed in place …".
CHANGED_BEFORE_BACKWARD = (
    "between forward and backward, which computes chunks again: call backward before the change"
)
P = ParamSpec("P")
T = TypeVar("T")
MAX_RESTORED_ELEMENTS = (
    1 << 16
)  # of a tensor that is copied, so that it can be compared and restored by value
_MISSING = object()


class ModelLock:
    """A lock, as a context, by which one thread at a time runs a model; it may enter several times.

    While it is held, backwards that this thread starts run in this thread: autograd's thread of the device
    may be waiting for the lock, with another thread's backward."""

    def __init__(self) -> None:
        self._lock, self._were_multithreaded = threading.RLock(), list[bool]()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._were_multithreaded.append(torch._C._is_multithreading_enabled())
        torch._C._set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_multithreading_enabled(self._were_multithreaded.pop())
        self._lock.release()


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_new_lock = threading.Lock()


def one_thread(model: nn.Module) -> ModelLock:
    """Return the lock of a model's forwards and backwards by chunks; other threads' calls wait.

    While a chunk runs, other tensors stand in the place of the model's, which another thread's call would
    see."""
    with _new_lock:
        return _locks.setdefault(model, ModelLock())


def in_one_thread(model: nn.Module, function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, whose calls hold a model as `one_thread` does."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with one_thread(model):
            return function(*args, **kwargs)

    return run


class ModuleTensors:
    """A model's parameters and buffers as they are when this object is made.

    A slot is an entry of some module's `_parameters` or `_buffers`. A tied tensor has several.

    Args:
        buffers: whether to include buffers.

    Attributes:
        slots: (dictionary, key, tensor) of each slot.
    """

    def __init__(self, model: nn.Module, buffers: bool = True) -> None:
        self.slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers if buffers else {})
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    @contextlib.contextmanager
    def replaced(self, replacements: dict[Tensor, Tensor]) -> Iterator[None]:
        """Fill each slot with the replacement of its tensor, or else with the tensor itself; undo it at the
        end.

        A slot that the model itself refills meanwhile, such as that of a buffer that grows, is left to it."""
        before = []
        try:
            for tensors, name, tensor in self.slots:
                replacement, current = replacements.get(tensor, tensor), tensors.get(name)
                if current is not replacement:
                    before.append((tensors, name, current, replacement))
                    tensors[name] = replacement
            yield
        finally:
            for tensors, name, previous, replacement in before:
                if tensors.get(name) is replacement:
                    tensors[name] = previous

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which each slot has the tensor that it had when this object was made."""
        return self.replaced({})


class _UntrainedTensor(NamedTuple):
    """A tensor, the entry of a module that holds it, and a copy of its values.

    Attributes:
        entries: the module's `_parameters`, `_buffers` or `__dict__`. key: of the tensor in it.
        values: None for a parameter, and for a tensor of more than `MAX_RESTORED_ELEMENTS`.
    """

    name: str
    entries: dict[str, Any]
    key: str
    tensor: Tensor
    values: Tensor | None
    is_buffer: bool

    @property
    def current(self) -> Tensor:
        """The buffer of the same shape that a forward has put in the tensor's place, else the tensor itself.

        A replaced attribute may be a mere record of the last call, a buffer of another shape a longer cache.
        """
        t = self.entries.get(self.key)
        if self.is_buffer and isinstance(t, Tensor) and t.shape == self.tensor.shape:
            return t
        return self.tensor


class UntrainedTensors:
    """Modules' frozen parameters, buffers and plain tensor attributes, as they are when this object is made.

    A backward that recomputes chunks must read the values that the forward read, and must leave them as they
    were: else a buffer that the forward updates, such as a count of tokens, would be updated twice.

    Args:
        modules: (name, module) pairs.
        frozen: whether to include frozen parameters.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], frozen: bool = True) -> None:
        self.tensors: list[_UntrainedTensor] = []
        copies = dict[Tensor, Tensor]()  # of a tensor that many modules have, one
        for prefix, module in modules:
            for entries in (module._parameters, module._buffers, vars(module)):
                is_parameters = entries is module._parameters
                for key, t in entries.items() if frozen or not is_parameters else ():
                    if isinstance(t, Tensor) and not (is_parameters and t.requires_grad):
                        is_copied = not is_parameters and t.numel() <= MAX_RESTORED_ELEMENTS
                        if is_copied and t not in copies:
                            copies[t] = t.detach().clone()
                        values = copies[t] if is_copied else None
                        name, is_buffer = f"{prefix}.{key}".lstrip("."), entries is module._buffers
                        self.tensors.append(_UntrainedTensor(name, entries, key, t, values, is_buffer))
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return list(map(version_of, map(operator.attrgetter("tensor"), self.tensors)))

    def modified(self) -> Iterator[_UntrainedTensor]:
        """Yield the tensors that were modified in place since this object was made or last restored."""
        for untrained, before in zip(self.tensors, self.versions, strict=True):
            if version_of(untrained.tensor) != before:
                yield untrained

    def changed(self) -> list[str]:
        """Return the names of the tensors that were replaced, or modified in place, since this was made."""
        replaced = {t.name for t in self.tensors if t.entries.get(t.key) is not t.tensor}
        modified = {untrained.name for untrained in self.modified()}
        return [untrained.name for untrained in self.tensors if untrained.name in replaced | modified]

    def check(self) -> None:
        """Check that all tensors have the values that they had.

        Raises:
            RuntimeError: one has other values, or was modified in place and is too large to be compared.
        """
        for untrained in self.modified():
            if untrained.values is None or not _same_values(untrained.tensor, untrained.values):
                raise RuntimeError(f"{untrained.name} was changed in place {CHANGED_BEFORE_BACKWARD}")

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the tensors back where they were; at the end undo this, and what was written to them inside.

        Frozen parameters may be written to: PEFT parametrizes them for the time of a forward
        (torch.nn.utils.parametrize), which counts as a write.

        Raises:
            RuntimeError: a tensor was modified before, or a large one inside.
        """
        self.check()
        before = [untrained.entries.get(untrained.key, _MISSING) for untrained in self.tensors]
        for untrained in self.tensors:
            untrained.entries[untrained.key] = untrained.tensor
        self.versions = self._versions()
        try:
            yield
        finally:
            not_restored = []
            for untrained in self.modified():
                if untrained.values is not None:
                    with torch.no_grad():
                        untrained.tensor.copy_(untrained.values)
                elif not isinstance(untrained.tensor, nn.Parameter):
                    not_restored.append(untrained.name)
            for untrained, previous in zip(self.tensors, before, strict=True):
                if previous is _MISSING:
                    del untrained.entries[untrained.key]
                else:
                    untrained.entries[untrained.key] = previous
            self.versions = self._versions()  # restoring has written to the tensors, too
        if not_restored:
            raise RuntimeError(
                f"{not_restored[0]} is written to in the forward, which the backward repeats chunk by chunk, "
                "and is too large to be put back"
            )


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of any dtype are equal; NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def version_of(tensor: Tensor) -> int:
    """Return autograd's version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
