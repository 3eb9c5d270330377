"""The parts of a transformers model (backbone, layers, root), and temporary replacements of forwards and
attributes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.weights import Weights
from adjoint.hf.transformers_api import GradientCheckpointingLayer
from adjoint.parallel.access import Holding, holding_of, weights_type

ModuleT = TypeVar("ModuleT", bound=nn.Module)
MISSING = object()
Forward = Callable[..., object]  # a module's forward: its arguments and result are the model's own
# Errors that models' own code raises for inputs that it was not made for.
MODEL_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def original_class(model: nn.Module) -> type[PreTrainedModel]:
    """Return the class that transformers gave a model, wrapped or not."""
    return getattr(type(model), "_adjoint_original", type(model))


def is_of_library(model: nn.Module) -> bool:
    """Whether a model's forward is transformers' or fla's own, which leaves the loss to `loss_function`."""
    return original_class(model).forward.__module__.startswith(("transformers.", "fla."))


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the forward that transformers gave a model, by name."""
    return _parameters_of(original_class(model).forward)


@functools.lru_cache(maxsize=64)
def _parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return everything of a causal LM below its head, or the model itself if that is no separate module.

    It is transformers' `base_model`, or the only inner model of a class whose `base_model_prefix` names no
    attribute."""
    if model.base_model is not model:
        return model.base_model
    inner_models = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner_models[0] if len(inner_models) == 1 else model


def is_bare_backbone(model: PreTrainedModel) -> bool:
    """Whether a model has decoder layers and no head, such as `AutoModel` makes."""
    is_alone = not any(
        isinstance(child, PreTrainedModel) and child.can_generate() for child in model.children()
    )
    has_head = model.get_output_embeddings() is not None or model.can_generate()
    return is_alone and not has_head and bool(layers_of(model)) and not model.config.is_encoder_decoder


def base_of(model: nn.Module) -> nn.Module:
    """Return the model of transformers inside PEFT's model, or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def contained_model(module: nn.Module) -> PreTrainedModel:
    """Return the one model of transformers that a module contains or is: PEFT's around it is looked through.

    Raises:
        ValueError: it contains none, or several.
    """
    base = base_of(module)
    if isinstance(base, PreTrainedModel):
        return base
    models = _outermost(module, PreTrainedModel)
    if len(models) == 1:
        return next(iter(models.values()))
    cls = type(module).__name__
    if not models:
        raise ValueError(
            "adjoint.wrap takes a causal LM of transformers, a classifier, an AutoModel, or a module that "
            f"contains one of them: this is a {cls}"
        )
    listed = ", ".join(f"{name} ({type(model).__name__})" for name, model in models.items())
    raise ValueError(f"{cls} contains {len(models)} models of transformers: wrap each by itself: {listed}")


def root_of(model: nn.Module) -> nn.Module:
    """Return what was passed to `adjoint.wrap`: the causal LM, PEFT's model or another module around it."""
    wrap_state = vars(model).get("_adjoint")
    outer_model = None if wrap_state is None or wrap_state.outer_model is None else wrap_state.outer_model()
    return model if outer_model is None else outer_model


def calling_original_forwards(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let calls of a wrapped model, and of its backbone, run transformers' own forward."""
    wrap_state = vars(model).get("_adjoint")
    return (
        contextlib.nullcontext()
        if wrap_state is None
        else overridden(wrap_state, "uses_original_forward", True)
    )


def current_holding(model: nn.Module) -> Holding:
    """Return how a model's weights are held; it is looked for once at most in each call of the user's."""
    wrap_state = vars(model).get("_adjoint")
    if wrap_state is None or wrap_state.holdings is None:
        return holding_of(model, root_of(model))
    if model not in wrap_state.holdings:
        wrap_state.holdings[model] = holding_of(model, root_of(model))
    holding: Holding = wrap_state.holdings[model]
    return holding


def current_weights_type(model: nn.Module) -> type[Weights]:
    """Return the class of a model's `Weights`: of its holding, if this call has looked for it."""
    wrap_state = vars(model).get("_adjoint")
    holdings: Mapping[nn.Module, Holding] = {} if wrap_state is None else wrap_state.holdings or {}
    return holdings[model].kind if model in holdings else weights_type(model)


def current_weights(model: nn.Module) -> Weights:
    """Return a model's `Weights`, for one call."""
    return current_weights_type(model)(model, root_of(model))


def layers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Map names to the modules that transformers itself would checkpoint; of nested ones the outer only."""
    return _outermost(backbone, GradientCheckpointingLayer)


def _outermost(module: nn.Module, kind: type[ModuleT]) -> dict[str, ModuleT]:
    """Map names to the modules of a kind, but for those inside of another one."""
    modules: dict[str, ModuleT] = {}
    for name, submodule in module.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in modules)
        if isinstance(submodule, kind) and not is_nested:
            modules[name] = submodule
    return modules


class PassThrough(nn.Module):
    """A module in a layer's place that returns its input in the form in which the layer returns its output.

    Args:
        layer: whose plain attributes the module gets, as models read them.
        output: length of the tuple that the layer returns, None if it returns a tensor.
    """

    def __init__(self, layer: nn.Module, output: int | None = None) -> None:
        super().__init__()
        plain = {
            name: v for name, v in vars(layer).items() if not name.startswith("_") and name != "training"
        }
        self.__dict__.update({name: v for name, v in plain.items() if not isinstance(v, (Tensor, nn.Module))})
        self.__dict__["output"] = output

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor | None, ...]:
        output = self.__dict__["output"]
        return hidden_states if output is None else (hidden_states, *(None,) * (output - 1))


class Entry(PassThrough):
    """A module in the first layer's place that returns hidden states which other layers have computed.

    Attributes:
        hidden: these hidden states; None between calls.
    """

    hidden: Tensor | None = None

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor | None, ...]:
        assert self.hidden is not None
        return super().forward(self.hidden)


def override_attribute(holder: object, attribute: str, value: object) -> Callable[[], object]:
    """Set an entry of `vars(holder)`, or remove it if the value is `MISSING`; return a function that
    undoes it."""
    entries = vars(holder)
    undo = functools.partial(override_attribute, holder, attribute, entries.get(attribute, MISSING))
    if value is MISSING:
        entries.pop(attribute, None)
    else:
        entries[attribute] = value
    return undo


@contextlib.contextmanager
def overridden(holder: object, attribute: str, value: object) -> Iterator[None]:
    """Do what `override_attribute` does, for the time of the context."""
    undo = override_attribute(holder, attribute, value)
    try:
        yield
    finally:
        undo()


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Give modules other forwards for the time of the context.

    They are set on the instances, which may have such forwards already (accelerate's hooks)."""
    previous = []
    for module, forward in forwards.items():
        entries = vars(module)
        previous.append((entries, entries.get("forward")))
        entries["forward"] = forward
    try:
        yield
    finally:
        for entries, instance_forward in previous:
            if instance_forward is None:
                del entries["forward"]
            else:
                entries["forward"] = instance_forward
