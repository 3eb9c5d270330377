"""What `adjoint.wrap` notes on a model."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

from adjoint.methods import Backprop


class WrapState:
    """What is noted of a wrapped model, on the causal LM and its backbone. A copy of the model begins with
    the method alone.

    Attributes:
        plain: whether calls go to transformers' own forward for the time being.
        lock: held while a thread runs the model, whose modules are not its own for the time of a chunk.
        known: a `verification.Verification` of the model, or its backbone, each, as it was lately.
        outer: a reference to what was wrapped, where that is a model around it.
        group: the process group whose ranks share sequences.
        announced: whether the first use has been told.
    """

    def __init__(self, method: Any, outer_model: ref[Any] | None = None, group: Any = None) -> None:
        self.group = group
        self.method, self.uses_original_forward, self.lock, self.outer_model = (
            method,
            False,
            threading.RLock(),
            outer_model,
        )
        self.verifications: list[Any] = []
        self.announced = False

    def __reduce__(self) -> Any:
        return WrapState, (self.method,)


def wrap_state_of(model: Any) -> WrapState:
    """A model made by a wrapped one's class, such as by its `from_pretrained`, is not wrapped itself."""
    wrap_state = model.__dict__.get("_adjoint")
    if wrap_state is None:
        wrap_state = WrapState(Backprop())
        wrap_state.uses_original_forward = True
    return wrap_state
