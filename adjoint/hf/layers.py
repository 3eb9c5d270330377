"""The backbone of a transformers model, its layers, and other forwards and functions in the places of their
own."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def class_of(model: Any) -> Any:
    """The class that transformers gave a model, whatever it is wrapped in."""
    return getattr(type(model), "_adjoint_original", type(model))


def backbone_of(model: Any) -> Any:
    """All of a causal LM below its head; the model itself where that is not to be had apart. transformers'
    `base_model`, or what stands in its place where a class says a name that it does not have."""
    if model.base_model is not model:
        return model.base_model
    found = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return found[0] if len(found) == 1 else model


def layers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """By name, what transformers itself would recompute; of layers inside layers the outer ones."""
    found: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not within:
            found[name] = module
    return found


class PassThrough(nn.Module):
    """Stands where a layer would: gives back what it is given, in the form in which the layer would."""

    def __init__(self, layer: nn.Module, output: int | None = None) -> None:
        super().__init__()
        plain = {
            name: v for name, v in vars(layer).items() if not name.startswith("_") and name != "training"
        }
        self.__dict__.update({name: v for name, v in plain.items() if not isinstance(v, (Tensor, nn.Module))})
        self.__dict__["output"] = output

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        output = self.__dict__["output"]
        return hidden_states if output is None else (hidden_states, *(None,) * (output - 1))


@contextlib.contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile modules have other forwards: on the instances, which may have such ones already."""
    before = [(module, module.__dict__.get("forward")) for module in forwards]
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward")
            if own is not None:
                module.__dict__["forward"] = own


class _Running(threading.local):
    chunks = 0  # of wrapped models that this thread is in


_running = _Running()
_lock = threading.Lock()
_inside: dict[int, int] = {}  # of each mapping, how many threads want other values in it
_before: dict[int, dict[str, Any]] = {}


@contextlib.contextmanager
def rebound(places: Sequence[tuple[MutableMapping[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Meanwhile names have other functions in this thread: (mapping, {name: function}) each, the names of a
    module or a registry. Every thread sees these mappings, so what stands there asks whose call it is; models
    that run in other threads get what was there before. A mapping is always given the same functions."""
    with _lock:
        for mapping, functions in places:
            if not _inside.get(id(mapping)):
                _before[id(mapping)] = {name: mapping[name] for name in functions}
                mapping.update({name: _told_apart(ours, mapping[name]) for name, ours in functions.items()})
            _inside[id(mapping)] = _inside.get(id(mapping), 0) + 1
    _running.chunks += 1
    try:
        yield
    finally:
        _running.chunks -= 1
        with _lock:
            for mapping, _ in places:
                _inside[id(mapping)] -= 1
                if not _inside[id(mapping)]:
                    mapping.update(_before.pop(id(mapping)))


def _told_apart(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if _running.chunks else theirs)(*args, **kwargs)

    return either
