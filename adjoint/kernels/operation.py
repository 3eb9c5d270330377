"""The record of an operation, and the registry of all records.

An operation is a folder of this package: its public function and its record in ``__init__.py``, the
reference in ``reference.py``, the trial's problem in ``trial.py``, the Triton kernel in ``triton.py`` or a
folder of that name. The C++ code of all operations is in ``cpu/``. Whatever needs a list of operations reads
it from `all_operations`.
"""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

PACKAGE = __name__.rpartition(".")[0]
BACKENDS = ("cpu", "triton")  # that have code of ours; besides them the reference, and other libraries
Shape = tuple[int, ...]


def no_states(*tensors: Tensor) -> Shape:
    """Return the shape of the states that an operation without states saves."""
    return (0,)


@dataclass(frozen=True)
class Implementation:
    """An operation's forward and backward by one backend.

    Attributes:
        backend: name of the backend whose code this is; "reference" also where a backend has no code for the
            operation.
        forward: the operation's tensors and options → its outputs, and what its backward needs of them.
        backward: cotangents of the outputs, the same arguments, what forward saved → gradients of the
            tensors. All backends have the reference's arguments and results, in its order.
        saved_shape: shape of the states that forward saves for backward, from the tensors that the
            operation's fake kernel gives it; for a compiler, which runs neither.
    """

    backend: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    saved_shape: Callable[..., Shape] = no_states


@dataclass(frozen=True)
class Code:
    """The module with an operation's code in a backend, imported on first use: it may need a compiler, or
    Triton.

    Attributes:
        module: full name of the module. It has the functions NAME_forward, NAME_backward and, if the
            operation saves states, NAME_saved_shape; NAME as in `Operation.code_name`.
        limits: largest sizes that the code takes, under the names that the public function gives to
            `dispatch.fitting`. Beyond them a call runs in plain PyTorch, with a warning.
        saved_shape: for Triton's code of an operation that saves states: the module's NAME_saved_shape, from
            a file that does not import Triton. A plan for a GPU reads it on machines without Triton.
    """

    module: str
    limits: Mapping[str, int] = field(default_factory=dict)
    saved_shape: Callable[..., Shape] | None = None
    takes_windows: bool = True


CPU = Code(f"{PACKAGE}.cpu.backend")  # in C++, all operations in one module


# (implementation, window, whether documents begin inside of the sequence, device, dtype) → outputs and
# gradients by name, on inputs that are the same numbers for each implementation, device and dtype.
Problem = Callable[[Implementation, int | None, bool, torch.device, torch.dtype], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The description of an operation that the rest of the package works with.

    Attributes:
        name: of the operation for backends, trials, messages and `adjoint doctor`.
        function: the public function, whose docstring has the formula.
        operator: name of its operator in `torch.ops.adjoint`. Operations may share one: then the operator's
            kernel picks among them, by the shapes that it gets.
        code_name: with what the names of its functions begin in the modules of all backends: its own name, or
            that of an operation whose code it shares.
        reference: the module with its plain PyTorch code.
        backends: its code in each of `BACKENDS`, None for one that leaves it to the reference; empty if the
            function picks among PyTorch's own kernels, with no backends and no trial.
        saves_states: whether forward saves states for backward, of a shape that is the backend's choice.
        under_recompute: what activation checkpointing does in a layer with recompute="selective": "save" the
            operator's results, because they cost more to compute than to store, or "recompute" them.
        trial: the small problem on which a backend is compared with the reference before its first use.
    """

    name: str
    function: Callable[..., Any]
    operator: str
    code_name: str
    reference: ModuleType
    backends: Mapping[str, Code | None]
    saves_states: bool
    under_recompute: Literal["save", "recompute"]
    trial: Problem | None

    def __post_init__(self) -> None:
        """Raise TypeError, which names the operation and the part, where a part is missing."""
        self._need("name", isinstance(self.name, str) and self.name, "the name that backends know it by")
        self._need("function", callable(self.function), "the public function")
        registered = isinstance(self.operator, str) and hasattr(torch.ops.adjoint, self.operator)
        self._need("operator", registered, "the name of an operator in torch.ops.adjoint")
        self._need(
            "code_name", isinstance(self.code_name, str) and self.code_name, "a name, as in NAME_forward"
        )
        self._need("saves_states", isinstance(self.saves_states, bool), "True or False")
        self._need("under_recompute", self.under_recompute in ("save", "recompute"), '"save" or "recompute"')
        self._need("reference", isinstance(self.reference, ModuleType), "the module with its PyTorch code")
        implementation_in(self.reference, self, "reference")
        self._need("backends", isinstance(self.backends, Mapping), "its code by the backend's name")
        unknown = {*self.backends} - {*BACKENDS}
        self._need("backends", not unknown, f"only of {' and '.join(BACKENDS)}, not of {unknown}")
        for backend in BACKENDS if self.backends else ():
            entry, code = f"backends[{backend!r}]", self.backends.get(backend, "missing")
            fits = code is None or isinstance(code, Code)
            self._need(entry, fits, "its Code, or None to leave it to the reference")
            if isinstance(code, Code):
                self._need(entry, _exists(code.module), f"in a module that exists; there is no {code.module}")
                shaped = backend != "triton" or not self.saves_states or callable(code.saved_shape)
                self._need(entry, shaped, "with saved_shape, the shape of the states that its forward saves")
        tried = callable(self.trial) or not self.backends
        self._need("trial", tried, "the problem on which backends are compared with the reference")

    def _need(self, attribute: str, fits: object, expected: str) -> None:
        if not fits:
            raise TypeError(
                f"operation {self.name!r}: {attribute} is missing or wrong; it should be {expected}"
            )

    def limits(self, backend: str) -> Mapping[str, int]:
        """Largest sizes that a backend's code takes, by name; those that are not there have none."""
        code = self.backends.get(backend)
        return {} if code is None else code.limits

    @property
    def takes_windows(self) -> bool:
        """Whether the public function takes a window, and so every backend's backward."""
        return "window" in inspect.signature(self.function).parameters

    @property
    def takes_documents(self) -> bool:
        """Whether the public function keeps documents of a row apart."""
        return "seq_idx" in inspect.signature(self.function).parameters


def _exists(module: str) -> bool:
    """Whether there is a module of this name; it is not imported, only the packages that hold it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of these packages
        return False


def implementation_in(holder: ModuleType | object, operation: Operation, backend: str) -> Implementation:
    """Collect an operation's functions from a backend's module or object.

    Raises:
        TypeError: one is missing; the message names it.
    """
    names = ["forward", "backward", *(["saved_shape"] if operation.saves_states else [])]
    functions: dict[str, Callable[..., Any]] = {}
    for name in names:
        full = f"{operation.code_name}_{name}"
        function = getattr(holder, full, None)
        if not callable(function):
            place = getattr(holder, "__name__", type(holder).__name__)
            raise TypeError(
                f"operation {operation.name!r}: the function {full} is missing in {place} ({backend})"
            )
        functions[name] = function
    return Implementation(backend, **functions)


_registered: dict[str, Operation] = {}


def register(operation: Operation) -> Operation:
    """Enter an operation into the registry, and return it."""
    if operation.name in _registered:
        raise TypeError(f"operation {operation.name!r} is registered twice: rename one")
    _registered[operation.name] = operation
    return operation


def registered(name: str) -> Operation:
    """Return the record of an operation, whose folder is imported if it has to be.

    Raises:
        KeyError: no folder registers an operation of this name.
    """
    return _registered[name] if name in _registered else all_operations()[name]


@functools.cache
def all_operations() -> Mapping[str, Operation]:
    """Return the records of all operations, by name: imports every folder of this package that is not a
    backend's.

    Raises:
        TypeError: a folder registers no operation.
    """
    for folder in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__):
        if folder.ispkg and folder.name not in BACKENDS:
            module = f"{PACKAGE}.{folder.name}"
            importlib.import_module(module)
            if all(operation.function.__module__ != module for operation in _registered.values()):
                raise TypeError(
                    f"{module} registers no operation: its __init__.py should call operation.register"
                )
    return dict(sorted(_registered.items()))


@functools.cache
def operators_saved_under_recompute() -> frozenset[str]:
    """Return the operators of `torch.ops.adjoint` whose results selective activation checkpointing stores."""
    return frozenset(o.operator for o in all_operations().values() if o.under_recompute == "save")
