"""The parts of a transformers model: backbone, layers, root; and how forwards and settings are replaced for a
while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from adjoint.parallel.fsdp import Gathering, uses_fsdp

MISSING = object()
# What models' own code raises where it is given what it was not made for.
MODEL_ERRORS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def original_class(model: Any) -> Any:
    """The class that transformers gave a model, whatever it is wrapped in."""
    return getattr(type(model), "_adjoint_original", type(model))


def backbone_of(model: Any) -> Any:
    """All of a causal LM below its head; the model itself where that is not to be had apart. transformers'
    `base_model`, or what stands in its place where a class says a name that it does not have."""
    if model.base_model is not model:
        return model.base_model
    inner_models = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner_models[0] if len(inner_models) == 1 else model


def root_of(model: Any) -> Any:
    """What `adjoint.wrap` was given: the causal LM, or PEFT's model around it."""
    wrap_state = vars(model).get("_adjoint")
    outer_model = None if wrap_state is None or wrap_state.outer_model is None else wrap_state.outer_model()
    return model if outer_model is None else outer_model


@contextlib.contextmanager
def calling_original_forwards(model: Any) -> Iterator[None]:
    """Meanwhile calls of a wrapped model, and of its backbone, go to transformers' own forward."""
    with contextlib.ExitStack() as stack:
        if (wrap_state := vars(model).get("_adjoint")) is not None:
            stack.callback(override_attribute(wrap_state, "plain", True))
        yield


def gathered_runner(model: Any) -> Callable[[Callable[[], Any]], Any]:
    """Calls what runs a model's modules one by one: of a sharded model inside the forward of its root."""
    return Gathering(root_of(model)) if uses_fsdp(model) else lambda call: call()


def device_of(model: Any) -> torch.device:
    """The device of its first parameter."""
    return next(model.parameters()).device


def layers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """By name, what transformers itself would recompute; of layers inside layers the outer ones."""
    layers: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, GradientCheckpointingLayer) and not is_nested:
            layers[name] = module
    return layers


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


def override_attribute(holder: Any, attribute: str, value: Any) -> Callable[[], Any]:
    """Sets an entry of `vars(holder)`, or takes it away where the value is `MISSING`; gives what undoes
    that."""
    entries = vars(holder)
    undo = functools.partial(override_attribute, holder, attribute, entries.get(attribute, MISSING))
    if value is MISSING:
        entries.pop(attribute, None)
    else:
        entries[attribute] = value
    return undo


@contextlib.contextmanager
def replaced_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile modules have other forwards: on the instances, which may have such ones already."""
    previous = [(vars(module), vars(module).get("forward")) for module in forwards]
    for (entries, _), forward in zip(previous, forwards.values(), strict=True):
        entries["forward"] = forward
    try:
        yield
    finally:
        for entries, instance_forward in previous:
            if instance_forward is None:
                del entries["forward"]
            else:
                entries["forward"] = instance_forward
