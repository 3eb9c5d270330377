"""A `Stack` or a wrapped model of transformers behind one interface, by chunks and as a whole."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Backprop
from tests.model_helpers import UNWINDOWED, VARIANTS, make_model

STACKS = VARIANTS | UNWINDOWED


class ModelOfEitherKind:
    """A model in float64 that runs by chunks or as a whole: a `Stack` by autograd, another one not wrapped.

    Args:
        name: of a variant in `tests.model_helpers` or of a class of transformers.
        stack: the model, if it is a `Stack` that no name has.
        options: of its configuration.
    """

    def __init__(self, name: str, stack: adjoint.Stack | None = None, **options: Any) -> None:
        self.is_stack, self.double = name in STACKS or stack is not None, contextlib.nullcontext
        self.wrapped_with: Any = None
        if self.is_stack:
            self.model: Any = make_model(name, **options) if stack is None else stack
            return
        pytest.importorskip("transformers")
        from tests.hf.hf_models import float64_throughout, make

        self.double, self.model = float64_throughout, make(name, **options)

    def inputs(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the arguments of a call; a wrapped model's ids are above those of special tokens.

        Args:
            ids: (rows, seqlen), below the number of ids of a `Stack`.
            documents: number of each token's document.
            mask: attention mask, of wrapped models alone.
        """
        if self.is_stack:
            inputs = {"input_ids": ids, "labels": labels, "seq_idx": documents}
        else:
            inputs = {"input_ids": ids + 3, "attention_mask": mask}
            if labels is not None:
                inputs["labels"] = labels.where(labels < 0, labels + 3)
            if documents is not None:
                tokens = torch.arange(ids.shape[1]).expand_as(ids)
                begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
                inputs["position_ids"] = tokens - (tokens * begins).cummax(dim=1).values
        return {name: value for name, value in inputs.items() if value is not None}

    def prepare(self, method: Any, group: Any = None) -> Any:
        """Return the model with a method, or unwrapped if it is None; trials of first use run once."""
        if method is None or self.wrapped_with != (method, group):
            self.model = adjoint.unwrap(self.model)
            self.wrapped_with = None
        if method is not None and self.wrapped_with is None:
            self.model = adjoint.wrap(self.model, method, sequence_group=group)
            self.wrapped_with = method, group
        return self.model

    def call(self, method: Any, inputs: dict[str, Tensor], group: Any = None, **options: Any) -> Any:
        """Return the output of a call by a method, or by the reference if it is None."""
        if self.is_stack:
            return self.model(**inputs, method=method or Backprop(), sequence_group=group, **options)
        return self.prepare(method, group)(**inputs, **options)

    def hidden_states(self, method: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the last hidden states of a call without labels."""
        if self.is_stack:
            return self.model(**inputs, method=method, return_hidden_states=True).hidden_states
        from adjoint.hf.model_parts import backbone_of

        return backbone_of(self.prepare(method))(**inputs).last_hidden_state

    def results(self, method: Any, inputs: dict[str, Tensor], weights: Any = None, **options: Any) -> Any:
        """Return loss and gradients by name.

        Args:
            weights: of a loss of hidden states, in place of the model's own loss.
        """
        self.model.zero_grad()
        with self.double():
            if weights is None:
                loss = self.call(method, inputs, **options).loss
            else:
                loss = (self.hidden_states(method, inputs).sin() * weights).sum()
            loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return gradients | {"loss": loss.detach()}
