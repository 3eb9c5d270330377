"""Snapshots of a model: everything that its computation depends on besides its inputs.

This is its modules, settings, hooks, the configuration, and tensors that are not trained. A wrapped
model's chunks are recomputed in the backward, so they must find all of this as it was in the forward; and
a decision about a model holds as long as its snapshot does."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, TypeAlias
from weakref import WeakMethod, ref

import torch
from torch import nn
from transformers import PreTrainedConfig

from adjoint.engine.module_tensors import CHANGED_BEFORE_BACKWARD, ModuleTensors
from adjoint.hf.model_parts import MISSING, original_class, override_attribute

Holder: TypeAlias = nn.Module | PreTrainedConfig  # an object that has settings
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CONTAINER_TYPES = (list, tuple, dict, set, frozenset, OrderedDict)
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of the attributes that every module has, its mode and hooks are settings. Gradient checkpointing is not one,
# as it is switched off while chunks run.
IGNORED_ATTRIBUTES = {*vars(nn.Module())} - {"training", *HOOK_ATTRIBUTES}
IGNORED_ATTRIBUTES -= {"_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
IGNORED_ATTRIBUTES |= {
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_adjoint",
    "warnings_issued",
}


class Snapshot:
    """A model's structure and settings at one moment, without its tensors' values.

    It keeps nothing of the model alive. It does not see tensors that are plain attributes instead of buffers,
    nor inside objects of other classes.

    Attributes:
        modules: reference to each module and its class, by name.
        holders: references to the objects that have settings, by name: the modules and their configurations.
        settings: comparable settings, by holder and attribute.
        weights: whether each parameter is trained, its dtype, device and class, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: (ref(module), original_class(module)) for name, module in model.named_modules()}
        named = settings_holders(model)
        self.holders: dict[str, ref[Holder]] = {name: ref(holder) for name, holder in named.items()}
        self.settings = {name: comparable_settings(holder) for name, holder in named.items()}
        self.weights = {
            name: (p.requires_grad, p.dtype, p.device, type(p)) for name, p in model.named_parameters()
        }

    def structure_difference(self, other: Snapshot) -> str | None:
        """Describe a module that is not the same in both snapshots, or return None."""
        if self.modules.keys() != other.modules.keys():
            name = min(self.modules.keys() ^ other.modules.keys())
            return f"module {name} was {'removed' if name in self.modules else 'added'}"
        for name, (module, kind) in self.modules.items():
            if (module, kind) != other.modules[name]:
                return f"module {name or kind.__name__} was replaced"
        return None

    def changed_settings(self, other: Snapshot) -> Iterator[tuple[str, str]]:
        """Yield (holder's name, attribute) of each setting that differs in `other`."""
        for name, before in self.settings.items():
            after = other.settings.get(name, {})
            if before != after:
                yield from ((name, a) for a in before | after if before.get(a, a) != after.get(a, a))

    def difference(self, other: Snapshot) -> str | None:
        """Describe a difference that could change a computation, or return None."""
        if structure := self.structure_difference(other):
            return structure
        for name, attribute in self.changed_settings(other):
            changed = "a hook" if attribute in HOOK_ATTRIBUTES else attribute
            return f"{name or 'the model'}: {changed} was changed"
        if self.weights != other.weights:
            names = self.weights.keys() | other.weights.keys()
            name = min(n for n in names if self.weights.get(n) != other.weights.get(n))
            return f"parameter {name} was frozen, unfrozen, cast or moved"
        return None

    def check(self, model: nn.Module) -> None:
        """Check that a model is still the same.

        Raises:
            RuntimeError: it is not.
        """
        if difference := self.difference(Snapshot(model)):
            raise RuntimeError(f"{difference} {CHANGED_BEFORE_BACKWARD}")


def settings_holders(model: nn.Module) -> dict[str, Holder]:
    """Map names to the objects that have settings: a model's modules and, once each, their configurations."""
    holders: dict[str, Holder] = {}
    configs: set[int] = set()

    def note(name: str, holder: Holder) -> None:
        holders[name] = holder
        for attribute, value in vars(holder).items():
            if _value_kind(type(value)) == "configuration" and id(value) not in configs:
                configs.add(id(value))
                note(f"{name}.{attribute}".lstrip("."), value)

    for name, module in model.named_modules():
        note(name, module)
    return holders


def comparable_settings(holder: Holder) -> dict[str, object]:
    """Return the attributes of a module or configuration that can be compared.

    Empty containers are left out, above all the hooks that most modules do not have."""
    values = {}
    for name, value in vars(holder).items():
        if name not in IGNORED_ATTRIBUTES:
            value = _lasting_hooks(value) if name in HOOK_ATTRIBUTES else value
            kind = _value_kind(type(value))
            if kind == "plain":
                values[name] = value
            elif kind == "function" or (kind == "container" and value):
                values[name] = comparable_value(value)
    return values


def _lasting_hooks(registered: Mapping[int, object]) -> tuple[object, ...]:
    """Return hooks without their handles' numbers.

    Left out are the hooks of transformers and PEFT that make an embedding's output require a gradient: TRL
    registers one more at each step."""
    return tuple(hook for hook in registered.values() if not makes_inputs_require_grad(hook))


def makes_inputs_require_grad(hook: object) -> bool:
    """Whether a hook is the one by which transformers, PEFT and TRL make an embedding's
    output require a gradient."""
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _classify(cls: type) -> str | None:
    """Return how objects of a class are compared: "plain", "container", "function", "configuration" or
    None."""
    if cls in PLAIN_TYPES:
        return "plain"
    if cls in CONTAINER_TYPES:
        return "container"
    if issubclass(cls, Callable) and not issubclass(cls, nn.Module):  # type: ignore[arg-type]
        return "function"
    return "configuration" if issubclass(cls, PreTrainedConfig) else None


_value_kind: Callable[[type], str | None] = functools.cache(_classify)


def comparable_value(value: Any) -> object:
    """Return an object that equals another's if no computation can tell their values apart.

    It is the value, a container's contents, a weak reference to a function, or, for other objects, the
    class alone."""
    kind = _value_kind(type(value))
    if kind == "plain":
        return value
    if kind == "container":
        if isinstance(value, dict):
            return tuple((key, comparable_value(v)) for key, v in value.items())
        contents = map(comparable_value, value)
        return frozenset(contents) if isinstance(value, (set, frozenset)) else tuple(contents)
    if kind == "function":
        with contextlib.suppress(TypeError):
            return WeakMethod(value) if isinstance(value, MethodType) else ref(value)
        return value
    return type(value)


class ForwardState:
    """A model's state during a forward, to be restored for its backward."""

    def __init__(self, model: nn.Module, snapshot: Snapshot) -> None:
        self.model, self.snapshot, self.tensors = model, snapshot, ModuleTensors(model)
        self.holders = {name: holder() for name, holder in snapshot.holders.items()}
        self.requires_grad_flags = [(p, p.requires_grad) for p in model.parameters()]
        self.attributes = {
            name: {
                a: copy.copy(v) if type(v) in CONTAINER_TYPES else v
                for a, v in vars(holder).items()
                if a in snapshot.settings[name]
            }
            for name, holder in self.holders.items()
        }

    def restore_settings(self, current: Snapshot, hooks: bool = True) -> list[Callable[[], object]]:
        """Restore the settings that differ in the snapshot `current`.

        Args:
            hooks: whether to restore hooks, too.

        Returns:
            Functions that undo it.
        """
        undo = []
        for name, attribute in self.snapshot.changed_settings(current):
            # A handle removes its hook from the dictionary it was made with, which must stay in place.
            if attribute in HOOK_ATTRIBUTES and not hooks:
                continue
            previous = self.attributes[name].get(attribute, MISSING)
            kind = type(vars(self.holders[name]).get(attribute))
            if previous is MISSING and kind in CONTAINER_TYPES:  # empty containers are not among the settings
                previous = kind()
            undo.append(override_attribute(self.holders[name], attribute, previous))
        return undo

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore settings, hooks, tensors and `requires_grad` as they were, for the time of the context.

        Raises:
            RuntimeError: the model has other modules.
        """
        with self.tensors.restored(), contextlib.ExitStack() as undo:
            for parameter, was_trained in self.requires_grad_flags:
                if parameter.requires_grad != was_trained and parameter.is_leaf:
                    undo.callback(parameter.requires_grad_, not was_trained)
                    parameter.requires_grad_(was_trained)
            current = Snapshot(self.model)
            if not self.snapshot.structure_difference(current):
                undo_steps = self.restore_settings(current)
                for undo_step in undo_steps:
                    undo.callback(undo_step)
                current = Snapshot(self.model) if undo_steps else current
            if difference := self.snapshot.difference(current):
                raise RuntimeError(f"{difference} {CHANGED_BEFORE_BACKWARD}")
            yield
