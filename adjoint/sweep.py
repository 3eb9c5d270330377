"""What all chunked methods share: one autograd function from parameters to loss around a forward and a
reverse sweep."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adjoint.engine import tile
from adjoint.engine.tile import Gradients, State

if TYPE_CHECKING:
    from adjoint.stack import Stack


class Result(NamedTuple):
    """What a method's `run` gives back: the mean loss, the final states (a tuple a layer) and, where the
    method picked them itself, each layer's window."""

    loss: Tensor
    states: list[State]
    windows: list[int] | None = None


class Sweep:
    """One forward over the chunks and what the backward needs of it. Subclasses write `forward` and
    `backward`.

    input_ids, targets: (batch, seqlen) int64, targets already shifted, `valid` of them not ignored. states:
        one tuple a layer.
    """

    def __init__(
        self,
        model: "Stack",
        input_ids: Tensor,
        targets: Tensor,
        valid: int | Tensor,
        states: list[State],
        chunk_size: int,
    ) -> None:
        self.model, self.ids, self.targets = model, input_ids, targets
        self.valid, self.initial = max(int(valid), 1), states
        self.parameters = list(model.parameters())
        self.chunks = chunks_of(input_ids.shape[1], chunk_size)
        flat = [s for state in states for s in state]
        self.backward_follows = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*self.parameters, *flat)
        )
        self.device = device = input_ids.device.type
        self.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    def forward(self) -> tuple[Tensor, list[State]]:
        """Mean loss and final states."""
        raise NotImplementedError

    def backward(
        self, d_loss: Tensor | None, d_final: tuple[Tensor | None, ...]
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Parameter gradients and the initial states' cotangents, from those of the loss and of the final
        states (flat)."""
        raise NotImplementedError

    def apply(self) -> Result:
        """Runs the forward; mean loss and final states, differentiable in the parameters and the initial
        states."""
        loss, *final = _SweepFunction.apply(
            self, *self.parameters, *(s for state in self.initial for s in state)
        )
        return Result(loss, by_layer(self.initial, final))

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The caller's autocast, also in the backward. Its weight cache is off: casts made without gradients
        must not be reused."""
        enabled, dtype = self.autocast
        with torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield

    def head_pullback(
        self, y: Tensor, chunk: slice, scale: Tensor | None, gradients: Gradients
    ) -> Tensor | None:
        """dL/dy_K of a chunk from its summed loss times `scale`; adds the head's gradients."""
        if scale is None:
            return None
        targets, model = self.targets[:, chunk], self.model
        return tile.head_pullback(
            lambda h, parameters: model.head_loss(h, targets, parameters),
            model.head_parameters(),
            y,
            scale,
            gradients,
        )

    def embedding_pullback(self, dy: Tensor | None, chunk: slice, gradients: Gradients) -> None:
        """Adds the embedding's gradient from the cotangent of y_0 on a chunk."""
        table = self.model.embedding.weight
        if dy is not None and table.requires_grad:
            gradients.add_rows(table, self.ids[:, chunk].flatten(), dy.flatten(0, 1))


class _SweepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: Sweep, *tensors: Tensor) -> Any:
        loss, states = sweep.forward()
        ctx.sweep = sweep
        ctx.save_for_backward(
            *tensors
        )  # so that autograd notices parameters changed in place before the backward
        ctx.set_materialize_grads(False)
        return loss, *(s for state in states for s in state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor | None, *d_final: Tensor | None) -> Any:
        _ = ctx.saved_tensors  # the check happens on access
        gradients, d_initial = ctx.sweep.backward(d_loss, d_final)
        return None, *(gradients.of(p) for p in ctx.sweep.parameters), *d_initial


def chunks_of(seqlen: int, chunk_size: int) -> list[slice]:
    """Tokens of each chunk; the last one may be shorter."""
    return [slice(s, min(s + chunk_size, seqlen)) for s in range(0, seqlen, chunk_size)]


def by_layer(states: list[State], flat: list[Any]) -> list[Any]:
    """Regroups a flat list as one tuple a layer."""
    grouped, at = [], 0
    for state in states:
        grouped.append(tuple(flat[at : at + len(state)]))
        at += len(state)
    return grouped
