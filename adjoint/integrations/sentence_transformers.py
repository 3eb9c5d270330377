"""sentence-transformers: the backbone of an embedding model, by chunks of each text."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from adjoint.hf.wrap import wrap
from adjoint.integrations.options import method_from_environment
from adjoint.methods import Method

ModelT = TypeVar("ModelT", bound=nn.Module)
