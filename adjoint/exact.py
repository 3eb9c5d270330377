"""The chunked forward and the reverse sweep of `Exact`, as one autograd function from parameters to loss."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from adjoint import tile
from adjoint.tile import Cotangents, Gradients, Pullback, State

if TYPE_CHECKING:
    from adjoint.stack import Stack


def run(
    model: "Stack", input_ids: Tensor, targets: Tensor, valid: int, states: list[State], chunk_size: int, keep: str
) -> tuple[Tensor, list[State]]:
    """Mean loss over `valid` targets and the final states, differentiable in the parameters and the initial states.

    input_ids, targets: (batch, seqlen) int64, targets already shifted. states: one tuple a layer.
    """
    parameters = list(model.parameters())
    flat = [s for state in states for s in state]
    backward_follows = torch.is_grad_enabled() and any(t.requires_grad for t in (*parameters, *flat))
    sweep = _Sweep(model, input_ids, targets, valid, states, chunk_size, keep, backward_follows)
    loss, *final = _Exact.apply(sweep, *parameters, *flat)
    return loss, _like(states, final)


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: "_Sweep", *tensors: Tensor):  # type: ignore[override]
        loss, states = sweep.forward()
        ctx.sweep = sweep
        ctx.save_for_backward(*tensors)  # so that autograd notices parameters changed in place before the backward
        ctx.set_materialize_grads(False)
        return loss, *(s for state in states for s in state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor | None, *d_final: Tensor | None):  # type: ignore[override]
        tensors = ctx.saved_tensors
        gradients, d_initial = ctx.sweep.backward(d_loss, d_final)
        n = len(tensors) - len(d_final)
        return None, *(gradients.of(p) for p in ctx.sweep.parameters[:n]), *d_initial


class _Sweep:
    """One forward over the chunks and what the reverse sweep needs of it."""

    def __init__(
        self,
        model: "Stack",
        input_ids: Tensor,
        targets: Tensor,
        valid: int,
        states: list[State],
        chunk_size: int,
        keep: str,
        backward_follows: bool,
    ) -> None:
        self.model, self.ids, self.targets = model, input_ids, targets
        self.valid, self.initial, self.keep = max(valid, 1), states, keep
        self.parameters = list(model.parameters())
        seqlen = input_ids.shape[1]
        self.chunks = [slice(s, min(s + chunk_size, seqlen)) for s in range(0, seqlen, chunk_size)]
        self.backward_follows = backward_follows
        self.edges: list[list[State]] = []  # states before each chunk, a tuple a layer
        self.edge_memory: list[State] = []  # where all edges but the first lie
        self.inputs: list[list[Tensor]] = []  # inputs of each layer and of the head, a list a chunk; empty with keep="edges"
        self.last: tuple[Tensor, list[Pullback]] | None = None  # the last chunk, still linearised from the forward
        self.last_gradients: Gradients | None = None
        device = input_ids.device.type
        self.device = device
        self.autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The caller's autocast, also in the backward. Its weight cache is off: casts made without gradients must not be reused."""
        enabled, dtype = self.autocast
        with torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield

    # ------------------------------------------------------------------------------------------------- forward

    def forward(self) -> tuple[Tensor, list[State]]:
        states = [tuple(s.detach() for s in state) for state in self.initial]
        total: Tensor | None = None
        with torch.no_grad(), self._precision():
            for i, chunk in enumerate(self.chunks):
                if self.backward_follows:
                    self._keep_edge(states)
                y = self.model.embed(self.ids[:, chunk])
                last = self.backward_follows and self.keep == "edges" and i == len(self.chunks) - 1
                if last:  # the reverse sweep starts here: keep this chunk linearised instead of recomputing it
                    self.last_gradients = Gradients(self.parameters)
                    y, states, pullbacks = self._linearize_column(y, states, self.last_gradients)
                    self.last = y, pullbacks
                else:
                    inputs = []
                    for k, layer in enumerate(self.model.layers):
                        inputs.append(y)
                        y, states[k] = tile.forward(layer, y, states[k])
                    if self.backward_follows and self.keep != "edges":
                        self.inputs.append([t for (t,) in map(self._stow, ((x,) for x in (*inputs, y)))])
                loss = self.model.head_loss(y, self.targets[:, chunk])
                total = loss if total is None else total + loss
        assert total is not None
        return total / self.valid, states

    def _linearize_column(self, y: Tensor, states: list[State], gradients: Gradients) -> tuple[Tensor, list[State], list[Pullback]]:
        pullbacks, after = [], []
        for layer, state in zip(self.model.layers, states, strict=True):
            y, state, pullback = tile.linearize(layer, y, state, gradients)
            pullbacks.append(pullback)
            after.append(state)
        return y, after, pullbacks

    def _keep_edge(self, states: list[State]) -> None:
        """Copies the states into memory taken at once: small blocks that stay, put between large ones that go, break up the heap.

        The first edge is the caller's own, and may be of other dtypes than the later ones.
        """
        if not self.edges:
            self.edges.append([self._stow(state) for state in states])
            return
        if not self.edge_memory:
            host = self.keep == "offload" and self.device != "cpu"
            device = torch.device("cpu") if host else self.ids.device
            self.edge_memory = [
                tuple(s.new_empty(len(self.chunks) - 1, *s.shape, device=device, pin_memory=host) for s in state) for state in states
            ]
        at = len(self.edges) - 1
        self.edges.append(
            [
                tuple(room[at].copy_(s, non_blocking=True) for room, s in zip(rooms, state, strict=True))
                for rooms, state in zip(self.edge_memory, states, strict=True)
            ]
        )

    def _stow(self, tensors: State) -> State:
        """Puts tensors where `keep` says. Copies to pinned host memory run behind the computation, in stream order."""
        if self.keep != "offload" or self.device == "cpu":
            return tensors
        stowed = (torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors)
        return tuple(host.copy_(t, non_blocking=True) for host, t in zip(stowed, tensors, strict=True))

    def _fetch(self, tensors: State) -> State:
        return tuple(t.to(self.ids.device, non_blocking=True) for t in tensors)

    # ------------------------------------------------------------------------------------------------ backward

    def backward(self, d_loss: Tensor | None, d_final: tuple[Tensor | None, ...]) -> tuple[Gradients, list[Tensor | None]]:
        model = self.model
        gradients = self.last_gradients or Gradients(self.parameters)
        last, self.last, self.last_gradients = self.last, None, None
        d_states: list[Cotangents] = _like(self.initial, list(d_final))
        scale = None if d_loss is None else d_loss / self.valid
        with self._precision():
            for i in reversed(range(len(self.chunks))):
                chunk = self.chunks[i]
                if self.keep == "edges":
                    if last is None:
                        with torch.no_grad():
                            y = model.embed(self.ids[:, chunk])
                        y, _, pullbacks = self._linearize_column(y, self.edges[i], gradients)
                    else:
                        (y, pullbacks), last = last, None
                    dy = self._head(y, chunk, scale, gradients)
                    for k in reversed(range(len(model.layers))):
                        dy, d_states[k] = pullbacks.pop()(dy, d_states[k])
                else:
                    *inputs, y = self._fetch(tuple(self.inputs[i]))
                    dy = self._head(y, chunk, scale, gradients)
                    for k in reversed(range(len(model.layers))):
                        state = self._fetch(self.edges[i][k])
                        _, _, pullback = tile.linearize(model.layers[k], inputs[k], state, gradients)
                        dy, d_states[k] = pullback(dy, d_states[k])
                table = model.embedding.weight
                if dy is not None and table.requires_grad:
                    gradients.add_rows(table, self.ids[:, chunk].flatten(), dy.flatten(0, 1))
        return gradients, [d for state in d_states for d in state]

    def _head(self, y: Tensor, chunk: slice, scale: Tensor | None, gradients: Gradients) -> Tensor | None:
        if scale is None:
            return None
        targets = self.targets[:, chunk]
        return tile.head_pullback(lambda h: self.model.head_loss(h, targets), self.model.head_parameters(), y, scale, gradients)


def _like(states: list[State], flat: list[Any]) -> list[Any]:
    """Regroups a flat list as one tuple a layer."""
    grouped, at = [], 0
    for state in states:
        grouped.append(tuple(flat[at : at + len(state)]))
        at += len(state)
    return grouped
