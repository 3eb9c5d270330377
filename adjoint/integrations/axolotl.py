"""A plugin of axolotl.

plugins:
  - adjoint.integrations.axolotl.AdjointPlugin
adjoint:
  chunk_size: 4096
context_parallel_size: 2  # ranks that share each sequence, in place of axolotl's ring attention
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Protocol

from pydantic import BaseModel, field_validator
from torch import nn

from adjoint.errors import LOGGER, UserError
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
    batch_size: int
    fsdp: object
    fsdp_config: object
    dp_shard_size: int | None
    dp_replicate_size: int | None
    tensor_parallel_size: int | None


class Plugin(Protocol):
    """The plugin's own attribute.

    Attributes:
        sequence_ranks: number of ranks that share each sequence.
    """

    sequence_ranks: int


class _AxolotlHandler(logging.Handler):
    """A handler that passes records on to axolotl's logger: it hides other loggers' INFO."""

    def emit(self, record: logging.LogRecord) -> None:
        from axolotl.utils.logging import get_logger

        # a name below axolotl's, which has the handlers; one below ours would come back here
        get_logger("axolotl.integrations.adjoint").log(record.levelno, record.getMessage())


def _register(self: Plugin, cfg: MutableMapping[str, object]) -> None:
    """Take `context_parallel_size` out of the configuration, as it was read (`BasePlugin.register`).

    axolotl would ask for flash attention and split each sequence for its own ring attention."""
    sizes = [cfg.pop(name, None) for name in ("context_parallel_size", "sequence_parallel_degree")]
    self.sequence_ranks = max([1, *(int(str(size)) for size in sizes if size)])


def _correct_batch_size(self: Plugin, cfg: AxolotlConfig, preprocess: bool = False) -> None:
    """Count the rows of a step of the ranks that have rows of their own (`BasePlugin.load_datasets`)."""
    cfg.batch_size //= self.sequence_ranks


def _training_arguments(self: Plugin, cfg: AxolotlConfig) -> dict[str, object]:
    """Return the Trainer's arguments (`BasePlugin.get_training_args`).

    Raises:
        UserError: the processes cannot be divided so.
    """
    if self.sequence_ranks == 1:
        return {}
    from adjoint.integrations.accelerate import SequenceGroupConfig

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if (cfg.tensor_parallel_size or 1) > 1:
        raise UserError("context_parallel_size beside tensor_parallel_size is not supported: leave one out")
    if processes % self.sequence_ranks:
        raise UserError(
            f"context_parallel_size: {processes} processes cannot be divided into groups of "
            f"{self.sequence_ranks}"
        )
    replicas, data_ranks = cfg.dp_replicate_size or 1, processes // self.sequence_ranks
    if cfg.fsdp or cfg.fsdp_config:
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": cfg.dp_shard_size or data_ranks // replicas}
    else:
        sizes = {"dp_replicate_size": data_ranks, "dp_shard_size": 1}
    config = SequenceGroupConfig(cp_size=self.sequence_ranks, **sizes)
    # axolotl has False; the Trainer would then divide numbers of labels by cp_size
    return {"parallelism_config": config, "average_tokens_across_devices": True}


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
        "sequence_ranks": 1,
        "register": _register,
        "load_datasets": _correct_batch_size,
        "get_training_args": _training_arguments,
        "get_input_args": lambda self: f"{__name__}.AdjointArgs",
        "post_model_load": _wrap_model,
    }
    plugin = globals()[name] = type(name, (BasePlugin,), members)
    return plugin
