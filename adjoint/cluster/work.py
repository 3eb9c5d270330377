"""What a shard computes of one batch: the tiles of a schedule's program, and what its messages carry.

The arithmetic is that of `adjoint.exact` and `adjoint.windowed` in one process, tile by tile in the same
order. What differs is where a tile's input comes from: each shard keeps what arrives from below, a tensor
(batch, chunk, d_model) a chunk, so that its layers are recomputed without the shards below it. That is seqlen
× d_model a shard, the price of a backward wavefront with no second forward one in front of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjoint import sweep
from adjoint.engine import tile
from adjoint.cluster.part import Part
from adjoint.cluster.schedule import Recv, Run, Send
from adjoint.edges import Edges
from adjoint.engine.tile import Cotangents, Gradients, Pullback, State


class Work(sweep.Sweep):
    """The forward tiles, and what all methods share.

    Args:
        part: the shard's layers.
        input_ids, targets: (batch, seqlen) int64 of the whole batch, the targets already shifted; `valid` of
            them count.
        batches: of how many batches the gradients are averaged.
        keep: as `adjoint.Exact`'s; "offload" puts what is kept into host memory.
    """

    def __init__(
        self,
        part: Part,
        input_ids: Tensor,
        targets: Tensor,
        valid: int,
        chunk_size: int,
        batches: int = 1,
        keep: str = "edges",
    ) -> None:
        states = part.initial_state(input_ids.shape[0])
        super().__init__(part, input_ids, targets, valid, states, chunk_size)  # type: ignore[arg-type]
        self.part, self.keep = part, keep
        self.states: list[State] = list(states)
        self.edges = Edges(len(self.chunks), keep == "offload" and self.device != "cpu")
        self.gradients = Gradients()
        self.total: Tensor | None = None
        weight = next(part.parameters())
        self.wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        one = torch.ones((), dtype=self.wide, device=input_ids.device)
        self.batches, self.scale = batches, one / batches / self.valid
        self.messages: dict[tuple[str, int], Tensor] = {}  # arrived, or ready to go
        self._settled = False

    # ------------------------------------------------------------------------------------------ messages

    def room(self, action: Recv) -> Tensor:
        """An empty tensor for a message."""
        if action.what == "table_gradient":
            return torch.empty_like(self.part.lm_head.weight)
        chunk = self.chunks[action.chunk]
        shape = (self.ids.shape[0], chunk.stop - chunk.start, self.part.config.d_model)
        return torch.empty(shape, dtype=self.wide, device=self.ids.device)

    def incoming(self, action: Recv, tensor: Tensor) -> None:
        """Takes a message in."""
        if action.what == "table_gradient":
            self.settle()
            _add_gradient(self.part.lm_head.weight, tensor)
        else:
            self.messages[action.what, action.chunk] = tensor

    def outgoing(self, action: Send) -> Tensor:
        """Gives a message out; it is not written to afterwards."""
        if action.what == "table_gradient":
            self.settle()
            gradient = self.part.table.weight.grad
            assert gradient is not None
            return gradient
        return self.messages.pop((action.what, action.chunk)).contiguous()

    # --------------------------------------------------------------------------------------------- tiles

    def run(self, action: Run) -> None:
        """Carries one tile out."""
        with self.precision():
            if action.kind == "forward":
                with torch.no_grad():
                    y = self.forward_tile(action.chunk)
                    if self.part.last:
                        loss = self.part.head_loss(y, self.targets[:, self.chunks[action.chunk]])
                        self.total = loss if self.total is None else self.total + loss
                    else:
                        self.messages["y", action.chunk] = y
            elif action.kind == "backward":
                self.backward_tile(action.chunk)
            elif action.kind == "head":
                self.head_tile(action.chunk)
            elif action.kind == "task":
                assert action.layer is not None
                self.task_tile(action.layer, action.chunk)
            else:
                self.embedding_tile(action.chunk)

    def forward_tile(self, chunk: int) -> Tensor:
        """The output of the shard's last layer on a chunk; `self.states` moves on."""
        if self.backward_follows:
            self.edges.put(chunk, self.states)
        y = self.enter(chunk)
        for k, block in enumerate(self.part.blocks()):
            y, self.states[k] = tile.forward(block, y, self.states[k])
        return y

    def enter(self, chunk: int) -> Tensor:
        """The input of the shard's first layer on a chunk."""
        if self.part.first:
            with torch.no_grad():
                return self.part.embed(self.ids[:, self.chunks[chunk]])
        return self.messages["y", chunk]

    def backward_tile(self, chunk: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no such tile")

    def head_tile(self, chunk: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no such tile")

    def task_tile(self, layer: int, chunk: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no such tile")

    def embedding_tile(self, chunk: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no such tile")

    def leave(self, chunk: int, dy: Tensor | None) -> None:
        """The cotangent of the shard's inputs on a chunk: down, or to the embedding."""
        if self.part.first:
            table = self.part.table.weight
            if dy is not None:
                self.gradients.add_rows(table, self.ids[:, self.chunks[chunk]].flatten(), dy.flatten(0, 1))
        else:
            assert dy is not None
            self.messages["dy", chunk] = dy

    def head_cotangent(self, y: Tensor, chunk: int) -> Tensor:
        """dL/dy_K on a chunk."""
        dy = self.head_pullback(y, self.chunks[chunk], self.scale, self.gradients)
        assert dy is not None
        return dy

    def settle(self) -> None:
        """Adds this batch's gradients to the parameters' `.grad`; once."""
        if self._settled:
            return
        self._settled = True
        tables = [self.part.table.weight] if self.part.has_copy else []
        for parameter in [*self.part.parameters(), *tables]:
            gradient = self.gradients.of(parameter)
            if gradient is not None:
                _add_gradient(parameter, gradient)
        self.gradients = Gradients()


class ExactWork(Work):
    """`Exact`: chunks in reverse, the layers recomputed and the adjoint states carried across the edges."""

    def __init__(self, *arguments: object, **keywords: object) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
        self.d_states: list[Cotangents] = [(None,) * len(s) for s in self.states]
        self.kept: dict[int, list[Tensor]] = {}  # a chunk's inputs of each layer and of what follows them
        self.linear: tuple[Tensor, list[Pullback]] | None = None  # the last chunk, linearised by the forward

    def forward_tile(self, chunk: int) -> Tensor:
        if not self.backward_follows:
            y = super().forward_tile(chunk)
            self.messages.pop(("y", chunk), None)
            return y
        if self.keep == "edges" and chunk == len(self.chunks) - 1:  # the backward starts here
            self.edges.put(chunk, self.states)
            y, pullbacks = self.linearize(chunk)
            self.linear = y, pullbacks
            return y
        if self.keep == "edges":
            y = super().forward_tile(chunk)
        else:
            self.edges.put(chunk, self.states)
            y, kept = self.enter(chunk), []
            for k, block in enumerate(self.part.blocks()):
                kept.append(y)
                y, self.states[k] = tile.forward(block, y, self.states[k])
            self.kept[chunk] = [self.edges.stow(x) for x in ([*kept, y] if self.part.last else kept)]
            self.messages.pop(("y", chunk), None)
        if self.keep == "edges" and not self.part.first:
            self.kept[chunk] = [self.messages.pop(("y", chunk))]
        return y

    def linearize(self, chunk: int) -> tuple[Tensor, list[Pullback]]:
        y = self.kept.pop(chunk)[0] if chunk in self.kept else self.enter(chunk)
        self.messages.pop(("y", chunk), None)
        pullbacks = []
        for k, (block, state) in enumerate(zip(self.part.blocks(), self.edges.get(chunk), strict=True)):
            y, self.states[k], pullback = tile.linearize(block, y, state, self.gradients)
            pullbacks.append(pullback)
        return y, pullbacks

    def backward_tile(self, chunk: int) -> None:
        blocks = self.part.blocks()
        if self.keep == "edges":
            y, pullbacks = self.linear or self.linearize(chunk)
            self.linear = None
            dy: Tensor | None = self.cotangent(y, chunk)
            del y
            for k in reversed(range(len(blocks))):
                dy, self.d_states[k] = pullbacks.pop()(dy, self.d_states[k])
        else:
            inputs = [self.edges.fetch(x, self.ids.device) for x in self.kept.pop(chunk)]
            states = self.edges.get(chunk)
            dy = self.cotangent(inputs[-1], chunk)
            for k in reversed(range(len(blocks))):
                state = tuple(self.edges.fetch(s, self.ids.device) for s in states[k])
                _, _, pullback = tile.linearize(blocks[k], inputs[k], state, self.gradients)
                dy, self.d_states[k] = pullback(dy, self.d_states[k])
        self.leave(chunk, dy)

    def cotangent(self, y: Tensor, chunk: int) -> Tensor:
        return self.head_cotangent(y, chunk) if self.part.last else self.messages.pop(("dy", chunk))


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
