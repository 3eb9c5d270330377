"""Snapshots of a model: everything that its computation depends on besides its inputs.

This is its modules, settings, hooks and configuration, and which parameters are trained, with their dtypes
and devices. Snapshots have two uses. A wrapped model's chunks are recomputed in the backward, and must run
the model as it was in the forward (`ForwardState`); so are slices of a head (`HeadState`). And the
verification of a model on first use stays valid as long as a new snapshot equals the one that was taken
then."""

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
from transformers import PreTrainedConfig, PreTrainedModel

from adjoint.engine.module_tensors import (
    CHANGED_BEFORE_BACKWARD,
    ModuleTensors,
    UntrainedTensors,
    version_of,
)
from adjoint.hf.model_parts import MISSING, backbone_of, override_attribute
from adjoint.parallel.agreement import SAVED_ATTRIBUTES
from adjoint.parallel.zero import BOOKKEEPING, PARTITIONED

SettingsHolder: TypeAlias = nn.Module | PreTrainedConfig
WRAPS = "_adjoint_wraps"  # attribute of the classes that `wrap` gives a model: the class before
PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))
CONTAINER_TYPES = (list, tuple, dict, set, frozenset, OrderedDict)
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of every module that change what it computes; the others are its tensors, submodules and
# bookkeeping. A hook in a `with_kwargs` dictionary is called with other arguments.
SETTINGS_OF_ANY_MODULE = {
    "training",
    *HOOK_ATTRIBUTES,
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
}
IGNORED_ATTRIBUTES = {*vars(nn.Module())} - SETTINGS_OF_ANY_MODULE | {
    "gradient_checkpointing",  # switched off while chunks run (`chunk_context`), so a change has no effect
    "_gradient_checkpointing_func",
    "_adjoint",  # the wrap state, which refers to snapshots
    "warnings_issued",  # transformers' record of what it has already warned about
    "problem_type",  # by which a classifier's head picks its own loss, and which its first call sets
    *BOOKKEEPING,
}
IGNORED_IN_CONFIGURATIONS = {*IGNORED_ATTRIBUTES, *SAVED_ATTRIBUTES}


class Snapshot:
    """A model's structure and settings at one moment, without its tensors' values.

    It holds weak references alone, so it keeps nothing of the model alive. It does not see plain tensor
    attributes, for which `module_tensors.UntrainedTensors` is there, nor anything inside attributes of other
    classes than `PLAIN_TYPES` and `CONTAINER_TYPES`.

    Attributes:
        modules: (reference to the module, its class, `wrap`'s undone) by the module's name.
        holders: references to the objects with settings, by name: the modules and their configurations.
        settings: from `comparable_settings`.
        weights: (requires_grad, dtype, device, class, whether ZeRO-3 holds it) by the parameter's name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            name: (ref(module), vars(type(module)).get(WRAPS, type(module)))
            for name, module in model.named_modules()
        }
        named = settings_holders(model)
        self.holders: dict[str, ref[SettingsHolder]] = dict(zip(named, map(ref, named.values()), strict=True))
        self.settings = comparable_settings(named)
        self.weights = {
            name: (p.requires_grad, p.dtype, p.device, type(p), hasattr(p, PARTITIONED))
            for name, p in model.named_parameters()
        }

    def structure_difference(self, other: Snapshot) -> str | None:
        """Describe the first module that is not the same in `other`, the later snapshot; None if all are."""
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
                for attribute in before | after:
                    if before.get(attribute, MISSING) != after.get(attribute, MISSING):
                        yield name, attribute

    def difference(self, other: Snapshot) -> str | None:
        """Describe the first difference that could change a computation; None if there is none."""
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
        """Raise a RuntimeError unless a model, after its forward, still equals this snapshot."""
        if difference := self.difference(Snapshot(model)):
            raise RuntimeError(f"{difference} {CHANGED_BEFORE_BACKWARD}")


def settings_holders(model: nn.Module) -> dict[str, SettingsHolder]:
    """Map names to the objects that have settings: a model's modules and, once each, their configurations."""
    holders: dict[str, SettingsHolder] = dict(model.named_modules())
    named: list[tuple[str, SettingsHolder]] = list(holders.items())
    configs: set[int] = set()
    for name, holder in named:  # grows meanwhile
        for attribute, value in vars(holder).items():
            if _value_kind(type(value)) == "configuration" and id(value) not in configs:
                configs.add(id(value))
                named.append((f"{name}.{attribute}".lstrip("."), value))
    return dict(named)


def comparable_settings(holders: Mapping[str, SettingsHolder]) -> dict[str, dict[str, object]]:
    """Return the settings of modules or configurations, by the holders' names, in a form that == compares.

    Empty containers are left out to save time: most modules have no hooks, and snapshots are taken at every
    call. So an empty container equals an attribute that is not there."""
    settings = {}
    for holder_name, holder in holders.items():
        values = settings[holder_name] = dict[str, object]()
        ignored = IGNORED_ATTRIBUTES if isinstance(holder, nn.Module) else IGNORED_IN_CONFIGURATIONS
        for name, value in vars(holder).items():
            if name not in ignored:
                value = _lasting_hooks(value) if name in HOOK_ATTRIBUTES and value else value
                kind = _value_kind(type(value))
                is_plain_tuple = type(value) is tuple and PLAIN_TYPES.issuperset(map(type, value))
                if kind == "plain" or (is_plain_tuple and value):
                    values[name] = value
                elif kind == "function" or (kind == "container" and value):
                    values[name] = comparable_value(value)
    return settings


def _lasting_hooks(registered: Mapping[int, object]) -> tuple[object, ...]:
    """Return the hooks to compare, in the order in which they run, without the numbers of their handles.

    Hooks that make an embedding's output require a gradient are left out. Chunks do not need them, and TRL
    registers one more at each step, which would otherwise be a change."""
    return tuple(hook for hook in registered.values() if not makes_inputs_require_grad(hook))


def makes_inputs_require_grad(hook: object) -> bool:
    """Whether a hook is that of transformers' `enable_input_require_grads`, or PEFT's or TRL's copy of it.

    Reentrant checkpointing needs an input that requires a gradient; chunks do not."""
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad")


def _classify(cls: type) -> str | None:
    """Return how values of a class are compared.

    "plain": by ==. "container": by their contents. "function": by identity; this is any callable that is not
    a module. "configuration": as a holder of its own. None: by class alone."""
    if cls in PLAIN_TYPES:
        return "plain"
    if cls in CONTAINER_TYPES:
        return "container"
    if issubclass(cls, Callable) and not issubclass(cls, nn.Module):  # type: ignore[arg-type]
        return "function"
    return "configuration" if issubclass(cls, PreTrainedConfig) else None


# Not a decorator: mypy takes no class for the Hashable that a cached function's arguments are.
_value_kind: Callable[[type], str | None] = functools.cache(_classify)


def comparable_value(value: Any) -> object:
    """Return an object by which a setting's value is compared (see `_classify`).

    Modules and objects of unknown classes compare by class alone: a model that keeps, say, a table of
    positions in an object of its own is not seen to change."""
    kind = _value_kind(type(value))
    if kind == "plain":
        return value
    if kind == "container":
        contents = value.values() if isinstance(value, dict) else value
        if not PLAIN_TYPES.issuperset(map(type, contents)):
            contents = map(comparable_value, contents)
        if isinstance(value, dict):
            return tuple(zip(value, contents, strict=True))
        return frozenset(contents) if isinstance(value, (set, frozenset)) else tuple(contents)
    if kind == "function":
        # Weak, so that a snapshot does not keep a hook's closure alive; a dead reference equals itself alone.
        # A bound method is made anew at each access, hence WeakMethod. Builtins take no weak references.
        with contextlib.suppress(TypeError):
            return WeakMethod(value) if isinstance(value, MethodType) else ref(value)
        return value
    return type(value)


class ForwardState:
    """A model's settings, hooks and tensors as they were in a forward, to be restored for its backward.

    Unlike a snapshot it holds the objects themselves, and so keeps the model alive until the backward.
    """

    def __init__(self, model: nn.Module, snapshot: Snapshot) -> None:
        self.model, self.snapshot, self.tensors = model, snapshot, ModuleTensors(model)
        self.holders = {name: holder() for name, holder in snapshot.holders.items()}
        self.requires_grad_flags = [(p, p.requires_grad) for p in model.parameters()]
        self.attributes: dict[str, dict[str, object]] = {}
        for name, holder in self.holders.items():
            self.attributes[name] = attributes = {}
            settings = snapshot.settings[name]
            for attribute, value in vars(holder).items():
                if attribute in settings:
                    is_container = type(value) in CONTAINER_TYPES
                    attributes[attribute] = copy.copy(value) if is_container else value

    def restore_settings(self, current: Snapshot, hooks: bool = True) -> list[Callable[[], object]]:
        """Restore the settings that differ in the snapshot `current`.

        Args:
            hooks: whether to restore hooks. Use False unless it will be undone: a module gets another
                dictionary of hooks, and a handle removes its hook only from the dictionary in which it was
                registered.

        Returns:
            Functions that undo it, one per setting.
        """
        undo = []
        for name, attribute in self.snapshot.changed_settings(current):
            if attribute in HOOK_ATTRIBUTES and not hooks:
                continue
            previous = self.attributes[name].get(attribute, MISSING)
            kind = type(vars(self.holders[name]).get(attribute))
            # A container that has been filled since may have been there empty: see `comparable_settings`.
            if previous is MISSING and kind in CONTAINER_TYPES:
                previous = kind()
            undo.append(override_attribute(self.holders[name], attribute, previous))
        return undo

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore settings, hooks, tensors and `requires_grad` inside the context, and undo it at the end.

        Raises:
            RuntimeError: the model has other modules, or something else that cannot be restored.
        """
        # Tensors first: the flags below are those of the forward's parameters, which may have been replaced.
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


class _WithoutBackbone(nn.Module):
    """A causal LM without its backbone: the module itself, its head, and their tensors."""

    def __init__(self, model: nn.Module, backbone: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"], self.__dict__["backbone"] = model, backbone

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        model: nn.Module = self.__dict__["model"]
        return model.named_modules({*(memo or ()), self.__dict__["backbone"]}, prefix, remove_duplicate)


class HeadState:
    """A causal LM beside its backbone as it was in a forward, for the backward that runs its head again.

    A step by chunks has a `ForwardState` of the whole model; this is for a head that is computed by slices
    outside of one, from hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = _WithoutBackbone(model, backbone_of(model))
        self.state = ForwardState(head, Snapshot(head))
        self.untrained = UntrainedTensors(head.named_modules())
        self.versions = [(name, p, version_of(p)) for name, p in head.named_parameters() if p.requires_grad]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what `ForwardState.restored` does inside the context, and undo it at the end.

        Raises:
            RuntimeError: something was changed that cannot be restored, such as a weight in place.
        """
        self.untrained.check()
        for name, parameter, version in self.versions:
            if version_of(parameter) != version:
                raise RuntimeError(f"{name} was changed in place {CHANGED_BEFORE_BACKWARD}")
        with self.state.restored():
            yield
