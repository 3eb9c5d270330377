"""The outputs of a wrapped causal LM: a loss, and logits that are computed when they are read.

Chunks never hold the logits (batch, seqlen, vocab_size) of a sequence. Callers that read `out.logits` for
their metrics, as trainers do, get them from a second forward, without gradients; others pay nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

COMPUTE = "_adjoint_logits"  # an attribute of the loss, as accelerate copies outputs but not the loss


class _LogitsOnAccess:
    """A mixin for outputs of a causal LM whose `logits` may be computed when they are read."""

    loss: Tensor | None

    def __post_init__(self) -> None:
        with self._as_stored():
            super().__post_init__()  # type: ignore[misc]

    @property
    def cache_params(self) -> Cache | None:
        """The cache, under the name that Mamba's classes give it."""
        return self.past_key_values  # type: ignore[attr-defined]

    @property
    def logits(self) -> Tensor | None:
        """Logits (batch, seqlen, vocab_size), or None where they cannot be computed.

        Logits that the call asked for are stored; others are computed when they are read, from the weights
        as they are then and without gradients."""
        entries = vars(self)
        compute: Callable[[], Tensor] | None = getattr(self.loss, COMPUTE, None)
        if entries.get("_logits") is None and compute is not None and not entries.get("_is_stored_only"):
            entries["_logits"] = compute()
        return entries.get("_logits")

    @logits.setter
    def logits(self, value: Tensor | None) -> None:
        vars(self)["_logits"] = value

    @contextlib.contextmanager
    def _as_stored(self) -> Iterator[None]:
        """Compute nothing meanwhile."""
        vars(self)["_is_stored_only"] = True
        try:
            yield
        finally:
            del vars(self)["_is_stored_only"]

    def __repr__(self) -> str:
        with self._as_stored():
            return super().__repr__()

    def __reduce__(self) -> str | tuple[object, ...]:
        with self._as_stored():
            return super().__reduce__()


class LossOutput(_LogitsOnAccess, CausalLMOutputWithPast):
    """A causal LM's output by chunks or mini-sequences."""


class RoutedLossOutput(_LogitsOnAccess, MoeCausalLMOutputWithPast):
    """A causal LM's output by chunks if the model adds its routers' loss."""
