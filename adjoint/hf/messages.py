"""What a wrapped model says: a line on its first use. What transformers says that is untrue is left out."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from adjoint.engine.first_use import TOKENS
from adjoint.engine.grid import Scheme
from adjoint.errors import LOGGER, is_heard
from adjoint.hf import replacements
from adjoint.hf.layers import backbone_of, class_of, layers_of
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dispatch import implementation

# The comparison on first use runs transformers' own functions on a few tokens, which then warn that they are
# slow; what runs in training are ours.
_THEIRS = "transformers.integrations.hub_kernels"
_UNTRUE = "is falling back to its reference PyTorch implementation"
_differences: contextvars.ContextVar[list[float] | None] = contextvars.ContextVar("differences", default=None)


@contextlib.contextmanager
def comparing() -> Iterator[list[float]]:
    """Around a comparison of gradients: lists how far apart they were (`compared`), and keeps back what
    transformers says of its own functions, in this thread."""
    thread, found = threading.get_ident(), list[float]()

    def true(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or _UNTRUE not in record.getMessage()

    theirs, token = logging.getLogger(_THEIRS), _differences.set(found)
    theirs.addFilter(true)
    try:
        yield found
    finally:
        theirs.removeFilter(true)
        _differences.reset(token)


def compared(difference: float) -> None:
    """Notes how far apart gradients were, relative to their norm, for the `comparing` around it."""
    found = _differences.get()
    if found is not None:
        found.append(difference)


def by_chunks(model: nn.Module, method: Any, scheme: Scheme) -> str:
    """How `Exact` or `Truncated` runs a model, in words."""
    return f"{type(method).__name__} in chunks of {scheme.chunk_size:,} tokens; {_kernels(model)}"


def by_pieces(method: Any, mlps: Sequence[str]) -> str:
    """How `MiniSequence` runs a model, in words."""
    return f"MiniSequence: MLPs ({len(mlps)}) in {method.mlp_chunks} pieces, the head in {method.head_chunks}"


def announce(model: Any, how: str, difference: float | None) -> None:
    """Says what runs, at the level INFO: class, layers, how, and what the comparison found. Of several
    processes the first says it.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if is_heard() and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        layers = len(layers_of(backbone_of(model)))
        found = "" if difference is None else f": relative difference {difference:.1e}"
        LOGGER.info(
            f"{class_of(model).__name__} of {layers} layers runs by {how}; gradients compared on {TOKENS} "
            f"tokens{found}"
        )


def _kernels(model: nn.Module) -> str:
    """Which of transformers' functions ours replace, and the backend of the scans."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    dtype = accumulate_dtype(weight.dtype) if weight.device.type == "cpu" else weight.dtype
    backend = implementation("selective_scan", None, weight.device, dtype)
    registries = [id(names) for names, _ in replacements.REGISTRIES]
    names = {n for names, ours in replacements.places(model) if id(names) not in registries for n in ours}
    return f"kernels: backend {backend}, in place of {', '.join(sorted(names)) or 'attention to the past'}"
