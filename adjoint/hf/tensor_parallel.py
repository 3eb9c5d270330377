"""Modules that transformers' tensor parallelism has changed, made fit for chunks and for copies."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, MutableMapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from adjoint.hf.transformers_api import TENSOR_PARALLEL_STYLES
from adjoint.kernels.collectives import copy_to_ranks

T = TypeVar("T")
# transformers' style of norms that see this rank's heads alone, such as Qwen3's q_norm
_PARTIAL_GRADIENTS = "ReplicatedWithGradAllReduce."


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients of weights that each rank applies to its own heads where they arise, in the graph.

    transformers sums a parameter's `.grad` over ranks once a backward has added to it. That would sum the
    gradient of an earlier batch again, and it finds the parameter by its identity, but chunks read leaves in
    its place."""
    for module in model.modules():
        if (group := _remove_hooks(module)) is not None:
            _install(module, group)


def _remove_hooks(module: nn.Module) -> dist.ProcessGroup | None:
    """Undo transformers' style on a module; return the ranks to sum over, None if it is not of this style."""
    forward = vars(module).get("forward")
    if forward is not None and _is_of_style(forward):  # its first call registers a hook of the parameter
        variables = inspect.getclosurevars(forward).nonlocals
        module.__dict__["forward"] = variables["original_forward"]
        # FSDP's gathered parameters are not the module's, but the dictionary has them
        for parameter in (*module.parameters(recurse=False), *variables["is_already_hooked"].values()):
            _take_hooks(parameter._post_accumulate_grad_hooks or {})
        hooks = [variables["_all_reduce_grad"]]
    else:
        hooks = _take_hooks(module._backward_hooks)  # before transformers 5.22
    return inspect.getclosurevars(hooks[0]).nonlocals["mesh"].get_group() if hooks else None


def _is_of_style(function: object) -> bool:
    return getattr(function, "__qualname__", "").startswith(_PARTIAL_GRADIENTS)


def _take_hooks(hooks: MutableMapping[int, T]) -> list[T]:
    """Remove the hooks of transformers' style, and return them."""
    return [hooks.pop(key) for key in [key for key, hook in hooks.items() if _is_of_style(hook)]]


def _install(module: nn.Module, group: dist.ProcessGroup) -> None:
    original_forward = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        parameters = dict(module._parameters)  # in a chunk these are leaves of its own
        if torch.is_grad_enabled():
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = copy_to_ranks(parameter, group)  # type: ignore[assignment]
        try:
            return original_forward(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.__dict__["forward"] = forward


def splits_tokens(module: nn.Module) -> bool:
    """Whether a parallel style of torch or transformers splits a module's input or output by tokens.

    A style is in the closure of a hook or of the module's own forward."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    values: list[object] = [*hooks, vars(module).get("forward")]
    visited = {id(value) for value in values}
    for value in values:  # breadth first: the list grows while the loop runs
        if _shards_tokens(value):
            return True
        for inner in _contents(value):
            if id(inner) not in visited:
                visited.add(id(inner))
                values.append(inner)
    return False


def _shards_tokens(value: object) -> bool:
    """Whether a value is a placement, or a style, that splits tensors (batch, tokens, channels) by tokens."""
    if type(value).__name__ == "Shard":
        return getattr(value, "dim", None) == 1
    return type(value).__module__ in TENSOR_PARALLEL_STYLES and getattr(value, "sequence_dim", None) == 1


def _contents(value: object) -> Iterable[object]:
    """Return what a function closes over, what a style holds, and the items of collections of these."""
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, types.FunctionType):
        return _closed_over(value).values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if type(value).__module__ in TENSOR_PARALLEL_STYLES else ()


def _closed_over(function: types.FunctionType) -> dict[int, object]:
    """Return the contents of a function's cells by their position; a cell may be empty."""
    contents = {}
    for i, cell in enumerate(function.__closure__ or ()):
        with contextlib.suppress(ValueError):
            contents[i] = cell.cell_contents
    return contents


def use_copies(copied: nn.Module, memo: dict[int, object]) -> None:
    """Let the forwards that modules of a copy hold themselves call the copy's modules.

    `copy.deepcopy` shares functions, and those of transformers' parallel styles close over the module.

    Args:
        memo: of the deepcopy.
    """
    for module in copied.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType):
            module.__dict__["forward"] = _on_copies(forward, memo)


def _on_copies(value: object, memo: dict[int, object]) -> object:
    """Return the copy of a module, of its method, or of a function that closes over these; else the value."""
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _on_copies(value.__self__, memo))
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return value
    if id(value) not in memo:
        cells = tuple(types.CellType() for _ in value.__closure__)
        function = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        function.__kwdefaults__, function.__qualname__ = value.__kwdefaults__, value.__qualname__
        memo[id(value)] = function
        for i, content in _closed_over(value).items():
            cells[i].cell_contents = _on_copies(content, memo)
    return memo[id(value)]
