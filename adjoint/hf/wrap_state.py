"""The state that `adjoint.wrap` attaches to a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist
from torch import nn

from adjoint.engine.module_tensors import ModelLock
from adjoint.engine.programs import Programs
from adjoint.methods import Backprop, Method
from adjoint.parallel.access import Holding


class CallNeeds(NamedTuple):
    """Properties that the call of any rank has, of ranks that gather weights together.

    Attributes:
        documents: packed documents.
        padded_left: padding at the left, without position_ids. padded_left_with_positions: and with them.
    """

    documents: bool
    padded_left: bool
    padded_left_with_positions: bool


@dataclasses.dataclass
class OuterCall:
    """A causal LM's call of its backbone.

    Attributes:
        has_agreed: whether ranks that gather weights together have agreed on it. needs: on what.
        inputs: the mask of the user's call, and what tells documents apart, by name. Some classes do not
            pass them on: Mamba, Bloom and MPT the documents, RWKV-4 the mask.
        cache: the cache that the backbone has returned, or None.
    """

    inputs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    cache: object = None
    has_agreed: bool = False
    needs: CallNeeds | None = None


LOG_PROBS = "log_probs"


@dataclasses.dataclass(frozen=True)
class ValueRequest:
    """A request for values of each token's prediction in the place of a loss.

    Attributes:
        names: of `token_values.VALUES`.
        temperature: divides the logits.
        in_float32: whether the head's product is in float32.
    """

    names: tuple[str, ...] = (LOG_PROBS,)
    temperature: float = 1.0
    in_float32: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class WrapState:
    """State of a wrapped model: the `_adjoint` attribute of the causal LM and of its backbone, one object.

    A copied or unpickled model keeps the method alone (`__reduce__`). It is verified again, and a sequence
    group has to be given to `adjoint.wrap` again.

    Attributes:
        method: the method that computes gradients.
        uses_original_forward: True while calls run transformers' own forward, as inside a verification.
        lock: held by the thread that runs the model. While a chunk runs, forwards and settings of its modules
            are replaced, which another thread's call would see.
        verifications: a `verification.Verification` per recent state of the model or its backbone, newest
            first. (Any: `verification` imports this file.)
        outer_model: weak reference to the model that the user wrapped: the causal LM, or one around it, such
            as PEFT's; None in a copy.
        group: process group whose ranks share each sequence, or None.
        announced: whether the first use has been logged.
        lm_call: while transformers' forward of the causal LM runs, what its backbone should know of the
            user's call, and returns beside its output.
        holdings: while a call runs, how the weights of the model and of its backbone are held, as far as it
            has been looked; None between calls.
        values_asked: what a call with labels answers in the place of its loss, or None.
        programs: recordings of tiles with `Exact(cuda_graphs=True)`.
    """

    method: Method
    outer_model: ref[nn.Module] | None = None
    group: dist.ProcessGroup | None = None
    uses_original_forward: bool = False
    lock: ModelLock = dataclasses.field(default_factory=ModelLock)
    verifications: list[Any] = dataclasses.field(default_factory=list)
    announced: bool = False
    lm_call: OuterCall = dataclasses.field(default_factory=OuterCall)
    holdings: dict[nn.Module, Holding] | None = None
    values_asked: ValueRequest | None = None
    programs: Programs = dataclasses.field(default_factory=Programs)

    @property
    def runs_chunks(self) -> bool:
        """Whether calls run by chunks now."""
        return self.method.has_chunks and not self.uses_original_forward

    @contextlib.contextmanager
    def during_call(self, abandon: Callable[[], None]) -> Iterator[None]:
        """Hold the model for a call of the user's, which remembers `holdings`; call `abandon` if it fails."""
        with self.lock:
            is_outermost = self.holdings is None
            if is_outermost:
                self.holdings = {}
            try:
                yield
            except Exception:
                if is_outermost:
                    abandon()
                raise
            finally:
                if is_outermost:
                    self.holdings = None

    @contextlib.contextmanager
    def in_lm(self, inputs: Mapping[str, object], needs: CallNeeds | None) -> Iterator[OuterCall]:
        """Let the backbone know inputs of the causal LM's call, and what ranks have agreed that they need;
        yield what it returns beside its output."""
        before, self.lm_call = self.lm_call, OuterCall(inputs, has_agreed=True, needs=needs)
        try:
            yield self.lm_call
        finally:
            self.lm_call = before

    @contextlib.contextmanager
    def asking(self, request: ValueRequest) -> Iterator[None]:
        """Let calls with labels answer a `ValueRequest`: values in the place of hidden states."""
        before, self.values_asked = self.values_asked, request
        try:
            yield
        finally:
            self.values_asked = before

    def __reduce__(self) -> tuple[type[WrapState], tuple[Method]]:
        # For copy and pickle, which cannot take a lock, a weak reference or a process group.
        return WrapState, (self.method,)


def wrap_state_or_original(model: nn.Module) -> WrapState:
    """Return a model's wrap state or, if it has none, a new one that calls the original forward.

    A model may have a wrapped model's class without having been wrapped: `type(model).from_pretrained(…)`
    makes one. The new state is not attached to it."""
    # not getattr, by which a wrapper such as PEFT's finds the attributes of the model inside it
    wrap_state: WrapState | None = model.__dict__.get("_adjoint")
    return WrapState(Backprop(), uses_original_forward=True) if wrap_state is None else wrap_state
