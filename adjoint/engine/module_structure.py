"""`structure_of`: what modules have in common that compute the same from tensors of the same shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor, nn

from adjoint.kernels.checks import computes_as, is_untouched

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
INDICES = "idx", "index"  # endings of attributes that number a model's layers


OURS = "adjoint.layers.", "torch.nn.modules."  # modules of the classes whose code is known


def runs_only_our_code(module: nn.Module) -> bool:
    """Whether no code of the user's runs in a module: it reads no trainable tensors but its parameters.

    No class of theirs, hook, parametrization or replaced method is in it, and no tensor beside its own."""
    for submodule in module.modules():
        cls = type(submodule)
        if not cls.__module__.startswith(OURS) or not is_untouched(submodule, cls):
            return False
        if any(buffer is not None and buffer.requires_grad for buffer in submodule._buffers.values()):
            return False
        others = (value for key, value in vars(submodule).items() if key not in _OF_MODULES)
        if any(callable(value) or isinstance(value, Tensor) for value in others):
            return False
    return True


class _Identity:
    """An object that is equal to itself alone, as a part of a key that holds it."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(module: nn.Module) -> Hashable | None:
    """Return a module's classes, settings, and the shapes of its tensors, without numbers of layers.

    It is None if users' code may read or change what the module computes: hooks, a forward that is set on a
    module, or a tensor that is neither a parameter nor a buffer."""
    entries: list[Hashable] = []
    for name, submodule in module.named_modules():
        if not computes_as(submodule, type(submodule)):
            return None
        entries.append((name, type(submodule)))
        for key, value in vars(submodule).items():
            if key in _OF_MODULES or key.endswith(INDICES):
                continue
            if isinstance(value, Tensor):
                return None
            entries.append((key, _comparable(value)))
        for tensors in (submodule._parameters, submodule._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    if type(tensor) not in (Tensor, nn.Parameter) and not hasattr(tensor, "fake_mode"):
                        return None  # such as a DTensor, or quantized weights
                    entries.append((key, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device))
    return tuple(entries)


def _comparable(value: object) -> Hashable:
    """Return a setting in a form in which keys can have it."""
    if isinstance(value, (list, dict, set)):
        return repr(value)
    if dataclasses.is_dataclass(value):
        return _Identity(value)
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return value


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters and buffers, each once."""
    return list(dict.fromkeys([*module.parameters(), *module.buffers()]))
