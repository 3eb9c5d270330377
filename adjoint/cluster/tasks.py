"""The tasks of `Truncated` and `LayerLocal`: those of a shard, and those that a helper takes over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from adjoint import sweep
from adjoint.engine import tile
from adjoint.cluster.part import Part
from adjoint.cluster.schedule import Recv, Run, Send
from adjoint.cluster.work import Work
from adjoint.engine.tile import Cotangents, Gradients, State
from adjoint.windowed import Task, vjp

Reads = tuple[Tensor, State, Tensor]  # inputs, state, cotangents of the outputs


class TaskWork(Work):
    """`Truncated` and `LayerLocal`: every layer's inputs are kept, and a layer's chunks are tasks.

    Args:
        tasks: as `adjoint.windowed.tasks` gives them; None without a window, where the adjoint state is
            carried from chunk to chunk of a layer.
        layer_local: every layer gets dL/dy_K for its cotangent.
    """

    def __init__(
        self,
        *arguments: object,
        tasks: list[Task] | None,
        window: int | None,
        layer_local: bool,
        **keywords: object,
    ) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[arg-type]
        span, (batch, seqlen) = self.part.span, self.ids.shape
        shape = (batch, seqlen, self.part.config.d_model)
        self.window, self.layer_local = window, layer_local
        self.tasks = None if tasks is None else {(t.layer, t.chunk): t for t in tasks}
        whole = {"dtype": self.wide, "device": self.ids.device}
        self.inputs = {k: torch.empty(shape, **whole) for k in span} if self.backward_follows else {}  # type: ignore[call-overload]
        # cotangents of the outputs of layer k, added to by the tasks of layer k + 1
        self.d_out = {span.stop - 1: torch.zeros(shape, **whole)}  # type: ignore[call-overload]
        for k in range(span.start - 1, span.stop - 1):
            if not layer_local or k < 0:
                self.d_out[k] = torch.zeros(shape, **whole)  # type: ignore[call-overload]
        self.d_states: dict[int, Cotangents] = {
            k: (None,) * len(state) for k, state in zip(span, self.states, strict=True)
        }
        self.kept: dict[int, Tensor] = {}  # the head's inputs
        # While a task runs its block has other parameters, which threads for helpers must not see.
        self.weights = {k: list(self.part.block(k).parameters()) for k in span}

    def incoming(self, action: Recv, tensor: Tensor) -> None:
        if action.what in ("dy", "d_head"):
            self.d_out[self.part.span.stop - 1][:, self.chunks[action.chunk]] = tensor
        else:
            super().incoming(action, tensor)

    def outgoing(self, action: Send) -> Tensor:
        if action.what == "dy":
            return self.d_out[self.part.span.start - 1][:, self.chunks[action.chunk]].contiguous()
        if action.what == "d_head":
            return self.d_out[self.part.span.stop - 1][:, self.chunks[action.chunk]].contiguous()
        if action.what == "weights":
            assert action.layer is not None
            return flat([p.detach() for p in self.weights[action.layer]])
        if action.what == "task":
            assert action.layer is not None
            inputs, state, dy = self.reads(action.layer, action.chunk)
            return flat([t.to(self.wide) for t in (inputs, *state, dy)])
        return super().outgoing(action)

    def room(self, action: Recv) -> Tensor:
        if action.what == "gradients":
            assert action.layer is not None
            count = sum(p.numel() for p in self.weights[action.layer])
            return torch.empty(count, dtype=self.wide, device=self.ids.device)
        return super().room(action)

    def reads(self, layer: int, chunk: int) -> tuple[Tensor, State, Tensor]:
        """What a task reads: the layer's inputs, the state before the chunk, the outputs' cotangents."""
        dy = self.d_out[self.part.span.stop - 1 if self.layer_local else layer]
        state = self.edges.get(chunk)[layer - self.part.span.start]
        before, around = reach(self.tasks, self.chunks, layer, chunk)
        return self.inputs[layer][:, before], state, dy[:, around]

    def forward_tile(self, chunk: int) -> Tensor:
        if self.backward_follows:
            self.edges.put(chunk, self.states)
        y = self.enter(chunk)
        self.messages.pop(("y", chunk), None)
        for at, (k, block) in enumerate(zip(self.part.span, self.part.blocks(), strict=True)):
            if self.backward_follows:
                self.inputs[k][:, self.chunks[chunk]] = y
            y, self.states[at] = tile.forward(block, y, self.states[at])
        if self.part.last and self.backward_follows:
            self.kept[chunk] = y
        return y

    def head_tile(self, chunk: int) -> None:
        d_head = self.head_cotangent(self.kept.pop(chunk), chunk)
        self.d_out[self.part.span.stop - 1][:, self.chunks[chunk]] = d_head

    def task_tile(self, layer: int, chunk: int) -> None:
        self._task(layer, chunk, self.reads(layer, chunk), self.gradients)

    def unit_tile(self, run: Run, gradients: Gradients) -> None:
        """A task of a pool's unit, as a helper would carry it out; adds to `gradients`."""
        assert run.layer is not None
        inputs, state, dy = self.reads(run.layer, run.chunk)
        reads = (copied(inputs, self.wide), tuple(copied(s, self.wide) for s in state), copied(dy, self.wide))
        with self.precision():
            self._task(run.layer, run.chunk, reads, gradients)

    def unit_sums(self, layer: int, gradients: Gradients) -> list[Tensor]:
        """A unit's sums, one for each parameter of its layer."""
        return sums_of(self.weights[layer], gradients, self.wide)

    def sums_in(self, layer: int, tensor: Tensor) -> list[Tensor]:
        """The same out of a helper's message."""
        return pieces(tensor, [p.shape for p in self.weights[layer]])

    def add_sums(self, layer: int, sums: Sequence[Tensor]) -> None:
        """Adds a unit's sums to the shard's gradients."""
        for parameter, total in zip(self.weights[layer], sums, strict=True):
            self.gradients.add(parameter, total)

    def _task(self, layer: int, chunk: int, reads: Reads, gradients: Gradients) -> None:
        task = None if self.tasks is None else self.tasks[layer, chunk]
        block, d_state = self.part.block(layer), self.d_states[layer]
        dx, self.d_states[layer] = run_task(block, task, self.window, reads, d_state, gradients)
        below = self.d_out.get(layer - 1)
        if below is not None and dx is not None:
            own = self.chunks[chunk]
            below[:, own if task is None else slice(task.left, task.stop)] += dx

    def embedding_tile(self, chunk: int) -> None:
        self.leave(chunk, self.d_out[-1][:, self.chunks[chunk]])


class HelperWork:
    """Tasks of a shard's layers by a worker that owns none of them: weights and inputs arrive, a unit's sums
    of gradients go back. Layer-local tasks alone: what they hand down to the layer below is not needed.

    Args:
        part: the shard's layers once more; their weights are overwritten.
        batch, seqlen: of the token ids.
        tasks, window: as `TaskWork`'s.
        precision: the shard's.
    """

    def __init__(
        self,
        part: Part,
        batch: int,
        seqlen: int,
        chunk_size: int,
        tasks: list[Task] | None,
        window: int | None,
        precision: str,
    ) -> None:
        weight = next(part.parameters())
        self.part, self.batch, self.window, self.precision = part, batch, window, precision
        self.wide, self.device = weight.dtype, weight.device
        self.chunks = sweep.chunks_of(seqlen, chunk_size)
        self.tasks = None if tasks is None else {(t.layer, t.chunk): t for t in tasks}
        self.states = dict(zip(part.span, part.initial_state(batch), strict=True))
        self.d_states: dict[int, Cotangents] = {k: (None,) * len(s) for k, s in self.states.items()}
        self.gradients = Gradients()
        self.arrived: dict[tuple[int, int], Tensor] = {}

    def shapes(self, layer: int, chunk: int) -> list[torch.Size]:
        """Of what a task reads."""
        before, around = reach(self.tasks, self.chunks, layer, chunk)
        d_model = self.part.config.d_model
        inputs, dy = ((self.batch, s.stop - s.start, d_model) for s in (before, around))
        return [torch.Size(inputs), *(s.shape for s in self.states[layer]), torch.Size(dy)]

    def room(self, action: Recv) -> Tensor:
        """An empty tensor for a message."""
        assert action.layer is not None
        if action.what == "weights":
            count = sum(p.numel() for p in self.part.block(action.layer).parameters())
        else:
            count = sum(shape.numel() for shape in self.shapes(action.layer, action.chunk))
        return torch.empty(count, dtype=self.wide, device=self.device)

    def incoming(self, action: Recv, tensor: Tensor) -> None:
        """Takes weights or a task's inputs in."""
        assert action.layer is not None
        if action.what == "weights":
            weights = list(self.part.block(action.layer).parameters())
            with torch.no_grad():
                for weight, piece in zip(weights, pieces(tensor, [w.shape for w in weights]), strict=True):
                    weight.copy_(piece)
        else:
            self.arrived[action.layer, action.chunk] = tensor

    def run(self, action: Run) -> None:
        """Carries a task out."""
        assert action.layer is not None
        key = action.layer, action.chunk
        inputs, *state, dy = (copied(t, self.wide) for t in pieces(self.arrived.pop(key), self.shapes(*key)))
        task = None if self.tasks is None else self.tasks[key]
        reads, block = (inputs, tuple(state), dy), self.part.block(action.layer)
        d_state = self.d_states[action.layer]
        # No cache, as in the shard: gradients of two products with one cast would be added in low precision.
        low = self.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            _, self.d_states[action.layer] = run_task(
                block, task, self.window, reads, d_state, self.gradients
            )

    def outgoing(self, action: Send) -> Tensor:
        """The gradients of a layer's parameters, summed over the unit just done."""
        assert action.layer is not None
        gradients, self.gradients = self.gradients, Gradients()
        return flat(sums_of(self.part.block(action.layer).parameters(), gradients, self.wide))


def run_task(
    block: nn.Module,
    task: Task | None,
    window: int | None,
    reads: Reads,
    d_state: Cotangents,
    gradients: Gradients,
) -> tuple[Tensor | None, Cotangents]:
    """The vjp of a layer on a chunk: of a window's task, or, where `task` is None, of a chunk whose adjoint
    state `d_state` comes from the chunk after it. Gives the inputs' cotangents and the adjoint state before
    it."""
    inputs, state, dy = reads
    if task is None:
        _, _, pullback = tile.linearize(block, inputs, state, gradients)
        return pullback(dy, d_state)
    assert window is not None
    nothing: Cotangents = (None,) * len(state)
    dx, _ = vjp(block, task, inputs, state, dy, nothing, window, gradients)  # type: ignore[arg-type]
    return dx, nothing


def reach(
    tasks: Mapping[tuple[int, int], Task] | None, chunks: Sequence[slice], layer: int, chunk: int
) -> tuple[slice, slice]:
    """The tokens whose inputs, and those whose cotangents, a task reads."""
    if tasks is None:
        return chunks[chunk], chunks[chunk]
    task = tasks[layer, chunk]
    return slice(task.left, task.halo_stop), slice(task.start, task.halo_stop)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All of them one behind the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def pieces(tensor: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Undoes `flat`."""
    parts = tensor.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in memory of its own. How a product is rounded may depend on strides and alignment, which a
    message's content has not in common with what it was made from."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def sums_of(parameters: Iterable[Tensor], gradients: Gradients, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of all parameters of a layer, zeros where there is none."""
    found = [(p, gradients.sums.get(p)) for p in parameters]
    return [torch.zeros_like(p, dtype=dtype) if g is None else g.to(dtype) for p, g in found]
