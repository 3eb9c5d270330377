"""The Trainer of transformers and what derives from it: TRL, and the frameworks around them."""

from __future__ import annotations

import sys

from torch import nn
from transformers import Trainer, TrainerCallback

from adjoint.errors import UserError
from adjoint.hf import parallelism_config
from adjoint.hf.wrap import entry_modules, wrap
from adjoint.integrations.options import method_from_environment
from adjoint.methods import Method


class AdjointCallback(TrainerCallback):
    """A callback that wraps the Trainer's model, before accelerate prepares it.

        trainer = Trainer(model, arguments, callbacks=[AdjointCallback(adjoint.Exact(chunk_size=4096))])

    It works with TRL's trainers, adapters of PEFT and mixed precision. `adjoint.wrap(model)` in front of the
    Trainer does the same; the callback is for places where only callbacks can be given.

    Args:
        method: as `adjoint.wrap` takes it. None takes it from the environment (`ADJOINT_METHOD__CHUNK_SIZE`);
            without such a variable it is `Exact()`.
    """

    def __init__(self, method: Method | None = None) -> None:
        self.method = method_from_environment() if method is None else method
        parallelism_config.install()

    def models_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the models to wrap in what the Trainer trains."""
        return [model]

    def on_init_end(
        self, args: object, state: object, control: object, model: nn.Module | None = None, **_: object
    ) -> None:
        for wrapped in [] if model is None else self.models_of(model):
            wrap(wrapped, self.method)

    def on_train_begin(
        self, args: object, state: object, control: object, model: nn.Module | None = None, **_: object
    ) -> None:
        """Refuse a model that has taken the place of the wrapped one since.

        Raises:
            UserError: it is not wrapped.
        """
        if model is not None and not all(map(is_wrapped, self.models_of(model))):
            raise UserError(
                f"AdjointCallback: the Trainer's {type(model).__name__} is not the model that was wrapped "
                "(model_init makes a new one for each run): return adjoint.wrap(model) from model_init"
            )


def is_wrapped(model: nn.Module) -> bool:
    """Whether `adjoint.wrap` has been applied to a model."""
    return all("_adjoint" in vars(module) for module in entry_modules(model))


def add_to_every_trainer(method: Method | None = None) -> None:
    """Give each Trainer that is made from now on an `AdjointCallback`.

    For frameworks that import a module, but take no callbacks.
    """
    default_callbacks: list[object] = vars(sys.modules[Trainer.__module__])["DEFAULT_CALLBACKS"]
    if not any(isinstance(callback, AdjointCallback) for callback in default_callbacks):
        default_callbacks.append(AdjointCallback(method))
