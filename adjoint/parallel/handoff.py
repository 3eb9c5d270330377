"""Recurrent states that cross chunk edges, from rank to rank, while chunks run: a layer waits for its state
when it reads it, and hands the new one on as soon as it is there, so that the layers of a model that is one
stage follow one another over the ranks like a wave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adjoint.engine.executor import Pending
from adjoint.errors import UserError
from adjoint.parallel.transport import Messages


class StateHandoff:
    """A recurrent tensor of a state at both edges of a chunk that runs: the one before it arrives, the one
    after it leaves. A stage that is `lazy` gets it in the tensor's place.

    Args:
        transport, tag: of its messages.
        value: the state before the chunk, or where it will be.
        pending: waits for it; None where it is there.
        onward: the rank that has the next chunk, and reads this state; None of none, or where it has it.
        back: the rank that gets the cotangent of the state before the chunk; None of none.
        ahead: the rank that gives the cotangent of the state after the chunk; None of none.
        dtype: of messages.

    Attributes:
        anchor: a tensor that requires a gradient, to which the arrived state's graph leads.
        left: the state after the chunk, once it has left.
        d: the cotangent of the state before the chunk.
    """

    def __init__(
        self,
        transport: Messages,
        tag: int,
        value: Tensor,
        dtype: torch.dtype,
        onward: int | None,
        back: int | None,
        ahead: int | None,
    ) -> None:
        self.transport, self.tag, self.value, self.dtype = transport, tag, value, dtype
        self.onward, self.back, self.ahead = onward, back, ahead
        self.pending: Pending | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        self.given: Tensor | None = None
        self.rows: Tensor | None = None
        self.left: Tensor | None = None
        self.d: Tensor | None = None
        self.awaited: Pending | None = None
        self.sends: list[Any] = []
        self.closed = False

    def expect(self, source: int) -> None:
        """Gets ready for the state before the chunk."""
        self.pending = self.transport.post(source, self.value, self.tag)

    def arrive(self) -> Tensor:
        """The state before the chunk, for which it waits. Once closed it is computed again: as the first
        time, and without a message."""
        if self.pending is not None:
            self.pending()
            self.pending = None
        if self.given is not None:
            return self.given
        given = _Arrived.apply(self.anchor, self) if torch.is_grad_enabled() else self.value.clone()
        if self.rows is not None:
            given = given.masked_fill(self.rows.view(-1, *[1] * (given.dim() - 1)), 0)
        if not self.closed:  # kept any longer, it would hold this through its graph
            self.given = given
        return given

    def reset(self, rows: Tensor) -> None:
        """Lets the state arrive with zeros in `rows` (batch,) bool."""
        self.rows = rows

    def leave(self, state: Tensor) -> Tensor:
        """Hands on the state after the chunk; gives what the stage returns in its place."""
        if self.closed:
            return state
        if self.left is not None:
            raise UserError(
                "sequence_group: a layer writes its state more than once in a chunk, which has left for the "
                "next rank by then: leave sequence_group out"
            )
        if self.onward is not None:
            self._send(self.onward, state.detach())
        followed = self.ahead is not None and torch.is_grad_enabled()
        self.left = _Left.apply(state, self) if followed else state
        return self.left

    def close(self) -> None:
        """At the end of the chunk: from now on it is computed again at most."""
        assert self.left is not None, "a lazy stage hands on all of its state"
        self.closed, self.left, self.given = True, None, None

    def begin_backward(self) -> None:
        """Gets ready for the cotangent of the state after the chunk."""
        if self.ahead is not None:
            room = torch.empty(self.value.shape, dtype=self.dtype, device=self.value.device)
            self.awaited = self.transport.post(self.ahead, room, self.tag)

    def cotangent(self) -> Tensor | None:
        """That of the state after the chunk, for which it waits; None if there is none."""
        if self.awaited is None:
            return None
        wait, self.awaited = self.awaited, None
        return wait()

    def hand_back(self, d: Tensor | None) -> None:
        """Hands on the cotangent of the state before the chunk."""
        if self.back is not None:
            self._send(self.back, torch.zeros_like(self.value) if d is None else d)
            self.back = None
        else:
            self.d = d

    def end_backward(self) -> None:
        """Receives and sends what the chunk's graph has had no use for."""
        self.cotangent()
        if self.back is not None:
            self.hand_back(None)

    def wait(self) -> None:
        """Waits until what was sent has left."""
        while self.sends:
            self.sends.pop()()

    def _send(self, to: int, t: Tensor) -> None:
        own = torch.empty(t.shape, dtype=self.dtype, device=t.device).copy_(t)  # of no chunk's memory
        self.sends.append(self.transport.start(to, own, self.tag))


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, crossing: StateHandoff) -> Tensor:
        ctx.crossing = crossing
        return crossing.value.clone()  # which the layer may write to

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        ctx.crossing.hand_back(d)
        return None, None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, crossing: StateHandoff) -> Tensor:
        ctx.crossing, ctx.dtype = crossing, state.dtype
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        d = ctx.crossing.cotangent()
        return None if d is None else d.to(ctx.dtype), None
