"""Contracts of the rows of the tables in `adjoint.formats`: a module has these names, or any other object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from adjoint.formats.names import Values, Weights
from adjoint.layers import StackConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class StackFormat(Protocol):
    """Folders with a config.json, whose model a `Stack` can be.

    Attributes:
        WEIGHTS_FILE: the file of weights that `adjoint export` writes, as safetensors or, with another
            ending, as PyTorch does.
        WHY_NOT_EVALUATED: what such a folder is, where `adjoint eval` cannot read it; None where it can.
    """

    WEIGHTS_FILE: str
    WHY_NOT_EVALUATED: str | None

    def holds(self, config_json: Values, /) -> bool:
        """Whether a folder with this config.json is of this format."""

    def read_config(self, config_json: Values, /) -> StackConfig:
        """Return the configuration of a stack with the sizes of a config.json.

        Raises:
            ValueError: the model has parts that a stack lacks.
            KeyError: a key is missing.
        """

    def read_weights(
        self, config_json: Values, config: StackConfig, weights: Weights, /
    ) -> tuple[StackConfig, Weights]:
        """Return the configuration and the weights under a stack's names.

        Raises:
            ValueError: they are not those of one stack.
        """

    def why_not(self, config: StackConfig, /) -> str | None:
        """Return why a stack of this configuration cannot be written; None if it can."""

    def convert(self, config: StackConfig, weights: Weights, /) -> tuple[Values, Weights]:
        """Return config.json and weights of a stack in this format, if `why_not` has no objection."""

    def class_name(self, config_json: Values, /) -> str:
        """Return the name of the class that loads a folder with this config.json."""


class FileFormat(Protocol):
    """Files that hold a whole model for `adjoint.wrap`, as a library other than transformers writes them.

    Attributes:
        KIND: what users call such a file, with its article.
        SUFFIX: the ending of the files that `save` writes.
        SUMMARY: what was written, in words.
        LIBRARY: whose class the model is; how a folder that `save_pretrained` wrote of it is read.
        WHY_NOT_SHARDED: why layer shards do not train such a model; None if they do.
    """

    KIND: str
    SUFFIX: str
    SUMMARY: str
    LIBRARY: str
    WHY_NOT_SHARDED: str | None

    def holds(self, place: Path, /) -> bool:
        """Whether a place is a file of this format."""

    def sizes_of_file(self, file: Path, /) -> Values:
        """Return the model's sizes and settings, by which a checkpoint tells that the model is another one.

        Raises:
            UserError: the file cannot be read, or holds another model.
        """

    def configuration(self, file: Path, /) -> PreTrainedConfig:
        """Return the model's configuration, without reading its weights; raise errors as `sizes_of_file`."""

    def load(self, file: Path, dtype: torch.dtype | None, /) -> PreTrainedModel:
        """Return the model on the CPU, with parameters in `dtype`; raise errors as `sizes_of_file`."""

    def stored_dtypes(self, file: Path, /) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and size of each of the model's tensors in a file; raise errors as `sizes_of_file`."""

    def save(self, model: PreTrainedModel, file: Path, dtype: torch.dtype | None, /) -> None:
        """Write a model to a file in one piece, in `dtype` or else in the model's.

        Raises:
            UserError: the model has parts or settings that such a file has no place for.
        """

    def why_no_folder(self, config: PreTrainedConfig, /) -> str | None:
        """Return why a folder that `save_pretrained` writes cannot be this model; None if it can."""
