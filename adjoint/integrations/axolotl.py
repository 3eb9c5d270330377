"""A plugin of axolotl.

plugins:
  - adjoint.integrations.axolotl.AdjointPlugin
adjoint:
  chunk_size: 4096
"""

from __future__ import annotations

import logging
from typing import Protocol

from pydantic import BaseModel, field_validator
from torch import nn

from adjoint.errors import LOGGER
from adjoint.integrations.options import method_from_options


class AdjointArgs(BaseModel):
    """The plugin's keys in axolotl's configuration.

    Attributes:
        adjoint: options of the method, as in `adjoint.integrations.method_from_options`; a wrong one stops
            axolotl before it loads anything.
    """

    adjoint: dict[str, object] | None = None

    @field_validator("adjoint")
    @classmethod
    def check_options(cls, options: dict[str, object] | None) -> dict[str, object] | None:
        method_from_options(options or {})
        return options


class AxolotlConfig(Protocol):
    """The part of axolotl's configuration that the plugin reads."""

    adjoint: dict[str, object] | None


class _AxolotlHandler(logging.Handler):
    """A handler that passes records on to axolotl's logger: it hides other loggers' INFO."""

    def emit(self, record: logging.LogRecord) -> None:
        from axolotl.utils.logging import get_logger

        # a name below axolotl's, which has the handlers; one below ours would come back here
        get_logger("axolotl.integrations.adjoint").log(record.levelno, record.getMessage())


def _wrap_model(self: object, cfg: AxolotlConfig, model: nn.Module) -> None:
    """Wrap the model, with its adapters, before the trainer gets it (`BasePlugin.post_model_load`)."""
    from adjoint.hf.wrap import wrap

    if not LOGGER.handlers:
        LOGGER.addHandler(_AxolotlHandler())
        LOGGER.propagate = False
    wrap(model, method_from_options(dict(cfg.adjoint or {})))


def __getattr__(name: str) -> type:
    """Make `AdjointPlugin` when it is asked for: its base class is axolotl's."""
    if name != "AdjointPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from axolotl.integrations.base import BasePlugin

    members = {
        "__doc__": "The plugin: it wraps the model after PEFT's adapters and before the trainer.",
        "get_input_args": lambda self: f"{__name__}.AdjointArgs",
        "post_model_load": _wrap_model,
    }
    plugin = globals()[name] = type(name, (BasePlugin,), members)
    return plugin
