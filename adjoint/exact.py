"""The chunked forward and the reverse sweep of `Exact` (and of `LayerLocal` without a window)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adjoint import sweep
from adjoint.edges import Edges
from adjoint.engine import tile
from adjoint.engine.tile import Cotangents, Gradients, Pullback, State

if TYPE_CHECKING:
    from adjoint.stack import Stack


class ExactSweep(sweep.Sweep):
    """Chunk by chunk forward, keeping the states at the chunks' edges; chunk by chunk in reverse, carrying
    the adjoint state.

    With `layer_local` every layer gets dL/dy_K for its cotangent (Prop. 3, eq. 7) instead of the one from the
    layer above. With `cut` the adjoint state is dropped at an edge with that probability, each layer by its
    own draw, and weighted by 1 / (1 - cut) where it passes: what arrives is right in expectation.
    """

    def __init__(
        self,
        model: "Stack",
        input_ids: Tensor,
        targets: Tensor,
        valid: int | Tensor,
        states: list[State],
        chunk_size: int,
        keep: str = "edges",
        layer_local: bool = False,
        cut: float = 0.0,
    ) -> None:
        super().__init__(model, input_ids, targets, valid, states, chunk_size)
        self.keep, self.layer_local = keep, layer_local
        # what the adjoint state is multiplied by as it leaves each chunk, a row a layer
        self.passing = (
            draw_passing(len(model.layers), len(self.chunks), cut) if cut and self.backward_follows else None
        )
        self.edges = Edges(len(self.chunks), keep == "offload" and self.device != "cpu")
        # inputs of each layer and of the head, a list a chunk; empty with keep="edges"
        self.inputs: list[list[Tensor]] = []
        self.last: tuple[Tensor, list[Pullback]] | None = None  # the last chunk, linearised by the forward
        self.last_gradients: Gradients | None = None

    # -------------------------------------------------------------------------------------------------
    # forward

    def forward(self) -> tuple[Tensor, list[State]]:
        states = [tuple(s.detach() for s in state) for state in self.initial]
        total: Tensor | None = None
        with torch.no_grad(), self.precision():
            for i, chunk in enumerate(self.chunks):
                if self.backward_follows:
                    self.edges.put(i, states)
                y = self.model.embed(self.ids[:, chunk])
                if self.backward_follows and self.keep == "edges" and i == len(self.chunks) - 1:
                    # the reverse sweep starts here: keep this chunk linearised instead of recomputing it
                    self.last_gradients = Gradients()
                    y, states, pullbacks = self._linearize_column(y, states, self.last_gradients)
                    self.last = y, pullbacks
                else:
                    inputs = []
                    for k, layer in enumerate(self.model.layers):
                        inputs.append(y)
                        y, states[k] = tile.forward(layer, y, states[k])
                    if self.backward_follows and self.keep != "edges":
                        self.inputs.append([self.edges.stow(x) for x in (*inputs, y)])
                loss = self.model.head_loss(y, self.targets[:, chunk])
                total = loss if total is None else total + loss
        assert total is not None
        return total / self.valid, states

    def _linearize_column(
        self, y: Tensor, states: list[State], gradients: Gradients
    ) -> tuple[Tensor, list[State], list[Pullback]]:
        pullbacks, after = [], []
        for layer, state in zip(self.model.layers, states, strict=True):
            y, state, pullback = tile.linearize(layer, y, state, gradients)
            pullbacks.append(pullback)
            after.append(state)
        return y, after, pullbacks

    # ------------------------------------------------------------------------------------------------
    # backward

    def backward(
        self, d_loss: Tensor | None, d_final: tuple[Tensor | None, ...]
    ) -> tuple[Gradients, list[Tensor | None]]:
        model = self.model
        gradients = self.last_gradients or Gradients()
        last, self.last, self.last_gradients = self.last, None, None
        d_states: list[Cotangents] = sweep.by_layer(self.initial, list(d_final))
        scale = None if d_loss is None else d_loss / self.valid
        with self.precision():
            for i in reversed(range(len(self.chunks))):
                chunk = self.chunks[i]
                if self.keep == "edges":
                    if last is None:
                        with torch.no_grad():
                            y = model.embed(self.ids[:, chunk])
                        y, _, pullbacks = self._linearize_column(y, self.edges.get(i), gradients)
                    else:
                        (y, pullbacks), last = last, None
                    d_head = dy = self.head_pullback(y, chunk, scale, gradients)
                    for k in reversed(range(len(model.layers))):
                        dy, d_states[k] = pullbacks.pop()(d_head if self.layer_local else dy, d_states[k])
                else:
                    *inputs, y = (self.edges.fetch(x, self.ids.device) for x in self.inputs[i])
                    states = self.edges.get(i)
                    d_head = dy = self.head_pullback(y, chunk, scale, gradients)
                    for k in reversed(range(len(model.layers))):
                        state = tuple(self.edges.fetch(s, self.ids.device) for s in states[k])
                        _, _, pullback = tile.linearize(model.layers[k], inputs[k], state, gradients)
                        dy, d_states[k] = pullback(d_head if self.layer_local else dy, d_states[k])
                if self.passing is not None and i > 0:
                    d_states = [
                        _pass_on(d, m) for d, m in zip(d_states, self.passing[:, i].tolist(), strict=True)
                    ]
                self.embedding_pullback(dy, chunk, gradients)
        return gradients, [d for state in d_states for d in state]


def draw_passing(n_layer: int, n_chunks: int, cut: float) -> Tensor:
    """(n_layer, n_chunks): 0 with probability `cut`, else 1 / (1 - cut); from the CPU's generator."""
    return (torch.rand(n_layer, n_chunks) >= cut).double() / (1 - cut)


def _pass_on(d_state: Cotangents, multiplier: float) -> Cotangents:
    """The recurrence's adjoint state, the last of the tuple, times the multiplier; the convolution's short
    paths are not truncated."""
    *tail, d = d_state
    return (*tail, None if d is None or multiplier == 0 else d * multiplier)
