"""Lightning: a callback that wraps the transformers model inside a LightningModule.

trainer = lightning.Trainer(callbacks=[AdjointCallback(adjoint.Exact(chunk_size=4096))])
"""

from __future__ import annotations

import contextlib

from torch import nn

from adjoint.errors import UserError
from adjoint.integrations.options import method_from_environment
from adjoint.methods import Method


class _WrapsModel:
    """A callback that wraps the module's transformers model, before a strategy shards or moves it.

    A model that `configure_model` makes is wrapped when the fit starts; under FSDP2 wrap it there yourself,
    before `fully_shard`. Lightning leaves modules in the mode in which they are, and `from_pretrained`
    returns models in evaluation mode: the callback puts the model into training mode.

    Args:
        method: as `adjoint.wrap` takes it; None takes it from the environment, or `Exact()`.
            `adjoint.Truncated(window)` is the truncated backpropagation through time that Lightning had once.
        model: name of the attribute with the model; None looks for the only one.
    """

    def __init__(self, method: Method | None = None, model: str | None = None) -> None:
        self.method = method_from_environment() if method is None else method
        self.model = model
        self.has_wrapped = False

    def setup(self, trainer: object, pl_module: nn.Module, stage: str) -> None:
        if stage == "fit" and (self.model is not None or models_of(pl_module)):
            self._wrap(pl_module)

    def on_fit_start(self, trainer: object, pl_module: nn.Module) -> None:
        if not self.has_wrapped:
            self._wrap(pl_module)

    def _wrap(self, module: nn.Module) -> None:
        from adjoint.hf.wrap import wrap

        wrap(model_of(module, self.model), self.method).train()
        self.has_wrapped = True


def __getattr__(name: str) -> type:
    """Make `AdjointCallback` when it is asked for: its base class is Lightning's."""
    if name != "AdjointCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning import Callback

    callback = globals()[name] = type(name, (_WrapsModel, Callback), {"__doc__": _WrapsModel.__doc__})
    return callback


def models_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the models of transformers, or PEFT's around one, among a module's children, by name."""
    from adjoint.hf.wrap import entry_modules

    models = dict[str, nn.Module]()
    for name, child in module.named_children():
        with contextlib.suppress(ValueError):
            entry_modules(child)
            models[name] = child
    return models


def model_of(module: nn.Module, name: str | None) -> nn.Module:
    """Return the model that is wrapped: a submodule's by name, or the only one.

    Raises:
        UserError: there is none, or there are several and no name.
    """
    if name is not None:
        return module.get_submodule(name)
    models = models_of(module)
    if len(models) != 1:
        raise UserError(
            f"AdjointCallback: {type(module).__name__} has {len(models)} models of transformers "
            f"({', '.join(models) or 'none among its attributes'}): name one, AdjointCallback(model=NAME)"
        )
    return next(iter(models.values()))
