"""Recurrent states that move between context-parallel ranks while their chunks run.

Each rank runs every n-th chunk. A layer needs the state that the chunk before left, which is on another rank:

    forward   rank r-1 --- state --->  rank r  (before the layer's first token)
    backward  rank r-1 <-- cotangent - rank r  (when autograd reaches the state)

The layer itself decides when it reads and writes its state. So the layers of a model that is a single stage
overlap across ranks like a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.executor import Pending
from adjoint.engine.stage import Handoff
from adjoint.errors import UserError
from adjoint.parallel.transport import Messages


class StateHandoff(Handoff):
    """A recurrent tensor of a stage's state, at both edges of a running chunk.

    A stage with `takes_state_handoff` gets this object in the tensor's place. It reads the state before the
    chunk with `receive`, and publishes the state after it with `send`.

    Each run of a tile has its own; one that recomputes a tape has no `next_rank`. Calls come in this order:
    `post_receive` if the state is on another rank, `receive`, `send`, `end_forward`, `begin_backward`,
    `end_backward`, `wait`. Activation checkpointing inside the tile calls `receive` and `send` again in the
    backward, when they exchange nothing.

    Args:
        messages: transport to the other ranks.
        tag: distinguishes this tensor's messages from those of others.
        initial_state: the state before the chunk, or the buffer that it will be received into; it may be in
            host memory.
        empty_message: a tensor with the messages' dtype, on the device that computes: the layer reads the
            state there.
        next_rank: the rank that reads the state after the chunk; None if there is none, or if it has got the
            state already.
        previous_rank: the rank that waits for the cotangent of the state before the chunk, or None.
        gradient_source: the rank that sends the cotangent of the state after the chunk, or None.

    Attributes:
        anchor: gives the received state a place in autograd's graph, although it is no parameter.
        grad_initial_state: cotangent of the state before the chunk, if no other rank waits for it.
    """

    def __init__(
        self,
        messages: Messages,
        tag: int,
        initial_state: Tensor,
        empty_message: Tensor,
        next_rank: int | None,
        previous_rank: int | None,
        gradient_source: int | None,
    ) -> None:
        self.messages, self.tag, self.initial_state = messages, tag, initial_state
        self.device, self.message_dtype = empty_message.device, empty_message.dtype
        self.next_rank, self.previous_rank, self.gradient_source = next_rank, previous_rank, gradient_source
        self._wait_for_state: Pending | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        self._received: Tensor | None = None
        self.rows_to_reset: Tensor | None = None
        self._sent: Tensor | None = None
        self.grad_initial_state: Tensor | None = None
        self._wait_for_gradient: Pending | None = None
        self._unfinished_sends: list[Callable[[], None]] = []
        self._forward_ended = False

    def post_receive(self, source: int) -> None:
        """Start to receive the state before the chunk from rank `source`."""
        self._wait_for_state = self.messages.post(source, self.initial_state, self.tag)

    def receive(self) -> Tensor:
        """Return the state before the chunk, waiting for its message if necessary.

        When activation checkpointing runs the layer again, the state is there already."""
        if self._wait_for_state is not None:
            self._wait_for_state()
            self._wait_for_state = None
        if self._received is not None:
            return self._received
        state = (
            _TakeState.apply(self.anchor, self) if torch.is_grad_enabled() else self.copy_of_initial_state()
        )
        if self.rows_to_reset is not None:
            state = state.masked_fill(self.rows_to_reset.view(-1, *[1] * (state.dim() - 1)), 0)
        if not self._forward_ended:  # storing a recomputed state would keep its whole graph alive
            self._received = state
        return state

    def copy_of_initial_state(self) -> Tensor:
        """Return a copy on the device, as the layer may write to it in place."""
        return self.initial_state.to(self.device, non_blocking=True, copy=True)

    def reset(self, rows: Tensor) -> None:
        """Zero the state in `rows` (batch,) bool when it is read: a document begins there."""
        self.rows_to_reset = rows

    def send(self, state: Tensor) -> Tensor:
        """Send the state after the chunk; return the tensor that the stage returns in its place.

        Raises:
            UserError: the layer writes this state for the second time in a chunk.
        """
        if self._forward_ended:
            return state
        if self._sent is not None:
            raise UserError(
                "sequence_group: a layer writes its state more than once in a chunk, which has left for the "
                "next rank by then: leave sequence_group out"
            )
        if self.next_rank is not None:
            self._send(self.next_rank, state.detach())
        followed = self.gradient_source is not None and torch.is_grad_enabled()
        self._sent = _PassStateOn.apply(state, self) if followed else state
        return self._sent

    def end_forward(self) -> None:
        """Note the end of the forward: what activation checkpointing runs from now on exchanges nothing."""
        assert self._sent is not None, "a stage that takes StateHandoffs sends all of its state"
        self._forward_ended, self._sent, self._received = True, None, None

    def begin_backward(self) -> None:
        """Start to receive the cotangent of the state after the chunk."""
        if self.gradient_source is not None:
            room = torch.empty(self.initial_state.shape, dtype=self.message_dtype, device=self.device)
            self._wait_for_gradient = self.messages.post(self.gradient_source, room, self.tag)

    def receive_cotangent(self) -> Tensor | None:
        """Wait for and return the cotangent of the state after the chunk; None if no rank sends one."""
        if self._wait_for_gradient is None:
            return None
        wait, self._wait_for_gradient = self._wait_for_gradient, None
        return wait()

    def send_cotangent(self, d: Tensor | None) -> None:
        """Send the cotangent of the state before the chunk, or store it if no rank waits for it."""
        if self.previous_rank is not None:
            self._send(self.previous_rank, torch.zeros_like(self.initial_state) if d is None else d)
            self.previous_rank = None
        else:
            self.grad_initial_state = d

    def end_backward(self) -> None:
        """Exchange the cotangents that autograd has not reached, for which other ranks wait."""
        self.receive_cotangent()
        if self.previous_rank is not None:
            self.send_cotangent(None)

    def wait(self) -> None:
        """Wait until everything sent has left."""
        while self._unfinished_sends:
            self._unfinished_sends.pop()()

    def _send(self, to: int, t: Tensor) -> None:
        # a copy: a view would keep the chunk's memory
        message = torch.empty(t.shape, dtype=self.message_dtype, device=t.device).copy_(t)
        self._unfinished_sends.append(self.messages.start(to, message, self.tag))


class _TakeState(torch.autograd.Function):
    """The state before the chunk; the backward hands its cotangent to the rank that it came from."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, handoff: StateHandoff) -> Tensor:
        ctx.handoff = handoff
        return handoff.copy_of_initial_state()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        ctx.handoff.send_cotangent(d)
        return None, None


class _PassStateOn(torch.autograd.Function):
    """The state after the chunk, as it is; the backward waits for the cotangent of the rank that reads it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, handoff: StateHandoff) -> Tensor:
        ctx.handoff, ctx.dtype = handoff, state.dtype
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        d = ctx.handoff.receive_cotangent()
        return None if d is None else d.to(ctx.dtype), None
