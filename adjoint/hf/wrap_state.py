"""The state that `adjoint.wrap` attaches to a model."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import nn

from adjoint.methods import Backprop, Method


class WrapState:
    """State of a wrapped model, shared by the causal LM and its backbone.

    A copy of the model starts with the method alone: verifications hold for one model, and a group and a lock
    cannot be copied.

    Attributes:
        uses_original_forward: whether calls go to transformers' forward for the time being.
        lock: held while a thread runs the model, whose modules have other forwards during a chunk.
        verifications: a `verification.Verification` for each recent state of the model or its backbone.
        outer_model: weak reference to the model that was wrapped, if that is a model around the causal LM.
        group: process group whose ranks share sequences.
        announced: whether the first use has been logged.
    """

    def __init__(
        self,
        method: Method,
        outer_model: ref[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.method, self.uses_original_forward, self.lock, self.outer_model = (
            method,
            False,
            threading.RLock(),
            outer_model,
        )
        self.verifications: list[Any] = []
        self.announced = False

    def __reduce__(self) -> tuple[type[WrapState], tuple[Method]]:
        return WrapState, (self.method,)


def wrap_state_of(model: nn.Module) -> WrapState:
    """Return a model's wrap state.

    A model made by a wrapped model's class, for example by its `from_pretrained`, has none: it gets a
    state that calls the original forward."""
    wrap_state = model.__dict__.get("_adjoint")
    if wrap_state is None:
        wrap_state = WrapState(Backprop())
        wrap_state.uses_original_forward = True
    return wrap_state
