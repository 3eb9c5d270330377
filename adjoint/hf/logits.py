"""Logits of a call with labels, which makes none: computed when they are used, differentiable.

Their values come from a second forward without gradients. Where a gradient reaches them, the backward runs
the hidden states by chunks once more, with gradients, and the head on a slice of the tokens at a time. Who
only looks at logits pays for no graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adjoint.engine.late_gradient import LateBackward, refusing_gradient, with_late_gradient
from adjoint.engine.leaves import leaves_of, suspend_hooks
from adjoint.engine.tile import Gradients
from adjoint.hf.call import Call
from adjoint.hf.carried_state import detached
from adjoint.hf.check import ROUTER_LOGITS
from adjoint.hf.chunk_context import ChunkRandomness
from adjoint.hf.head import head_logits, logits_by_slices, vocab_size_of
from adjoint.hf.mini_sequence import HEAD_ARGUMENTS
from adjoint.hf.model_parts import access_kind_of, access_to, original_class
from adjoint.hf.outputs import LOGITS, DeferredLogits
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.loss import tokens_per_slice


def without_graph(arguments: dict[str, object]) -> dict[str, object]:
    """Return a call's arguments with tensors and caches detached."""
    return {n: v.detach() if isinstance(v, Tensor) else detached(v) for n, v in arguments.items()}


class LogitsOfCall:
    """The logits that a call with labels would have had.

    Make it before the call's forward: logits draw the random numbers, such as dropout's, that the loss drew.

    Args:
        call: with labels.
        compute_hidden: returns a call's hidden states (batch, seqlen, hidden_size), differentiable.
    """

    def __init__(self, call: Call, compute_hidden: Callable[[Call], Tensor]) -> None:
        self.model, self.shape, self.compute_hidden = call.model, call.ids.shape, compute_hidden
        self.arguments, self.has_gradients = without_graph(call.arguments), torch.is_grad_enabled()
        self.trained_arguments = {
            name: value
            for name, value in call.arguments.items()
            if isinstance(value, Tensor) and value.requires_grad and self.has_gradients
        }
        self.continues = call.cache is not None
        self.device, kind = call.ids.device, call.ids.device.type
        self.autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # numbers are drawn in training; evaluation is spared looking for generators in all modules
        self.randomness = ChunkRandomness(call.model) if self.has_gradients and call.model.training else None
        self.states_before = [] if self.randomness is None else self.randomness.states()
        self.forward_state: ForwardState | None = None

    def end_forward(self) -> None:
        """Note that the call's own forward is done."""
        if self.randomness is not None and not self.randomness.have_drawn(self.states_before):
            self.states_before = []

    @contextlib.contextmanager
    def _as_in_the_call(self) -> Iterator[None]:
        """Draw the call's random numbers again, under its autocast."""
        dtype, is_enabled = self.autocast
        draws = self.randomness or ChunkRandomness(self.model)
        replayed = draws.again(self.states_before) if self.states_before else draws.undone()
        with replayed, torch.autocast(self.device.type, dtype, is_enabled):
            yield

    def deferred(self, loss: Tensor) -> Tensor:
        """Return the logits, without their values until somebody uses them.

        Args:
            loss: the call's, with its graph.
        """
        model = self.model
        weight = model.get_output_embeddings().weight
        width = access_to(model).shape(weight)[1]
        token = torch.zeros(1, 1, width, dtype=weight.dtype, device=self.device)
        with torch.no_grad(), self._as_in_the_call():
            logits = access_to(model).run(lambda: logits_by_slices(model, token))
        result = DeferredLogits(self._values, (*self.shape, logits.shape[-1]), logits.dtype, logits.device)
        if not (self.has_gradients and loss.requires_grad):
            return result
        if (reason := self._why_no_gradient()) is not None:
            message = (
                f"a gradient has reached out.logits of {original_class(model).__name__}'s call with labels, "
                f"{reason}, or read out.logits under torch.no_grad()"
            )
            return refusing_gradient(result, loss, message)
        leaves = list(dict.fromkeys([*access_to(model).trained_parameters(), *leaves_of([loss])]))
        return with_late_gradient(result, [*leaves, *self.trained_arguments.values()], self._backward(leaves))

    def _why_no_gradient(self) -> str | None:
        """Return why the logits' gradient cannot be computed, and what to do, or None."""
        kind, remedy = access_kind_of(self.model), "call it without labels, and make the loss of its logits"
        if kind.runs_backward_in_forward:
            return f"which has none under {kind.name}: wrap the model with adjoint.Backprop()"
        if kind.is_collective or kind.copies_from_host:
            return f"which has none under {kind.name}: {remedy}"
        return f"which goes on from a cache and has none: {remedy}" if self.continues else None

    def _values(self) -> Tensor:
        """Compute the logits (batch, seqlen, vocab_size), without gradients."""
        warnings.warn(
            "out.logits was used: a call with labels makes none, so they are computed now, by a second "
            "forward; their gradient, where one reaches them, takes another; torch.no_grad() and "
            f"logits_to_keep=N give those of N tokens; {LOGITS}=none in the environment makes out.logits "
            "None",
            stacklevel=5,
        )
        arguments = {**self.arguments, "logits_to_keep": self.shape[1], "return_dict": True}
        if self.has_gradients:
            self.forward_state = ForwardState(self.model, Snapshot(self.model))
        with torch.no_grad(), self._as_in_the_call():
            logits: Tensor = self.model(**arguments).logits  # by its hooks, which may gather its weights
        return logits

    def _backward(self, leaves: list[Tensor]) -> LateBackward:
        """Return the function from the logits' gradient to those of leaves and trained arguments."""

        def compute(cotangent: Tensor) -> Gradients:
            model, gradients = self.model, Gradients()
            copies = {name: value.detach().requires_grad_() for name, value in self.trained_arguments.items()}
            arguments = {n: v for n, v in {**self.arguments, **copies}.items() if n not in HEAD_ARGUMENTS}
            if ROUTER_LOGITS in arguments:
                arguments[ROUTER_LOGITS] = False
            reached = {leaf: leaf for leaf in leaves}
            reached |= {copies[name]: value for name, value in self.trained_arguments.items()}

            def backpropagate(outputs: Tensor, cotangents: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
                """Add the gradients of `reached`, and return those of others."""
                tensors = [leaf for leaf in leaves_of([outputs]) if leaf in reached]
                # not freed, as hidden states may hang on a graph from before the call
                parts = torch.autograd.grad(
                    outputs, [*others, *tensors], cotangents, retain_graph=True, allow_unused=True
                )
                for tensor, gradient in zip(tensors, parts[len(others) :], strict=True):
                    gradients.add(reached[tensor], gradient)
                return parts[: len(others)]

            assert self.forward_state is not None  # as values have been computed
            restored = self.forward_state.restored()
            with torch.enable_grad(), suspend_hooks(leaves), restored, self._as_in_the_call():
                hidden = self.compute_hidden(Call(model, arguments))
                y, pieces = hidden.detach().requires_grad_(), list[Tensor]()
                slice_tokens = tokens_per_slice(len(y) * y.shape[1], vocab_size_of(model), y.is_cuda)
                for dy, piece in zip(cotangent.split(slice_tokens, 1), y.split(slice_tokens, 1), strict=True):
                    pieces += backpropagate(head_logits(model, piece), dy, piece)
                backpropagate(hidden, torch.cat(pieces, dim=1))
            return gradients

        return compute
