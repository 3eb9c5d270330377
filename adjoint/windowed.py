"""`Truncated` and `LayerLocal` with a window: a layer's chunks are independent tasks.

Tokens [s, e) of a layer, windowed to W tokens, need the layer's inputs and output cotangents up to token
e + W - 2 (the halo), the recurrent state before s, and the d_conv - 1 inputs before s: the convolution's
short paths are not windowed, so a task carries its own copy of them instead of waiting for its neighbour.
Nothing else passes between tasks; their contributions are added up, in any order.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from adjoint import sweep
from adjoint.engine import tile
from adjoint.engine.decay import Decays
from adjoint.engine.tile import Cotangents, Gradients, State

if TYPE_CHECKING:
    from adjoint.layers import Block
    from adjoint.stack import Stack


@dataclasses.dataclass(frozen=True)
class Task:
    """The vjp of one layer on the tokens [start, stop), `chunk` being the layer's how-manieth.

    It reads the layer's inputs on [left, halo_stop), the cotangents of its outputs on [start, halo_stop) and
    the recurrent state before `start`; it writes the parameters' gradients and the cotangents of the inputs
    on [left, stop).
    """

    layer: int
    chunk: int
    left: int
    start: int
    stop: int
    halo_stop: int


def tasks(n_layer: int, seqlen: int, chunk_size: int, window: int, d_conv: int) -> list[Task]:
    """All tasks of a backward pass, layers from the top; tasks of one layer are independent of each other."""
    return [
        task
        for layer in reversed(range(n_layer))
        for task in layer_tasks(layer, seqlen, chunk_size, window, d_conv)
    ]


def layer_tasks(layer: int, seqlen: int, chunk_size: int, window: int, d_conv: int) -> list[Task]:
    """The tasks of one layer, which may run in any order."""
    return [
        Task(
            layer,
            chunk=i,
            left=max(0, chunk.start - (d_conv - 1)),
            start=chunk.start,
            stop=chunk.stop,
            halo_stop=min(seqlen, chunk.stop + window - 1),
        )
        for i, chunk in enumerate(sweep.chunks_of(seqlen, chunk_size))
    ]


def vjp(
    block: "Block",
    task: Task,
    inputs: Tensor,
    state: State,
    dy: Tensor,
    d_final: Cotangents,
    window: int | None,
    gradients: Gradients,
) -> tuple[Tensor, Cotangents]:
    """Runs one task.

    Args:
        inputs: (batch, halo_stop - left, d_model), the layer's inputs on [left, halo_stop).
        state: the recurrent state before `start`; its conv tail is used at the start of the sequence only.
        dy: (batch, halo_stop - start, d_model), cotangents of the layer's outputs.
        d_final: cotangents of the state after the task's halo, for tasks that reach the end; else None each.
        window: tokens; None where nothing is truncated (then there is no halo, and d_final carries on what
            the next chunk handed down).
        gradients: the parameters' gradients are added here.

    Returns:
        The contribution to the inputs' cotangents on [left, stop), and the cotangents of `state`.
    """
    halo = task.halo_stop - task.stop
    x = inputs[:, : task.stop - task.left].detach().requires_grad_()
    y_halo = inputs[:, task.stop - task.left :]
    state = tuple(s.detach().requires_grad_() for s in state)
    named = {f"block.{name}": p for name, p in block.named_parameters() if p.requires_grad}
    parameters, leaves = list(named.values()), tile.aliases(named.values())
    with torch.enable_grad():
        y_left, y_own = x.split([task.start - task.left, task.stop - task.start], dim=1)
        call = (y_left, y_own, y_halo, state, window)
        y, scan_halo, ahead, state_out = functional_call(
            _TaskForward(block), dict(zip(named, leaves, strict=True)), call
        )
    given = [(y, dy[:, : task.stop - task.start])]
    if halo:
        # what the tokens ahead say about the states; their own gradients belong to the tasks that own them
        with torch.enable_grad():
            scan_ahead = scan_halo.detach().requires_grad_()
            after = block.feed_forward(block.mixer.scan_outputs(scan_ahead, ahead), residual=y_halo)
        (d_ahead,) = tile.vjp([(after, dy[:, task.stop - task.start :])], [scan_ahead])
        assert d_ahead is not None
        given.append((scan_halo, d_ahead))
    given += [
        (end, d) for end, d in zip(state_out, d_final, strict=True) if end is not None and d is not None
    ]
    grads = tile.vjp(given, [x, *state, *leaves])
    for parameter, gradient in zip(parameters, grads[1 + len(state) :], strict=True):
        gradients.add(parameter, gradient)
    assert grads[0] is not None
    return grads[0], grads[1 : 1 + len(state)]


class _TaskForward(nn.Module):
    """A block on the tokens a task owns, its recurrence run on through the halo: a module, so that
    `functional_call` applies."""

    def __init__(self, block: "Block") -> None:
        super().__init__()
        self.block = block

    def forward(self, y_left: Tensor, y_own: Tensor, y_halo: Tensor, state: State, window: int | None) -> Any:
        block, mixer, halo = self.block, self.block.mixer, y_halo.shape[1]
        conv_state = state[0] if len(state) > 1 else None
        if conv_state is not None and y_left.shape[1]:
            tail = mixer.conv_tail(block.norm(y_left))
            missing = conv_state.shape[2] - tail.shape[2]  # the oldest, from before the sequence
            conv_state = torch.cat([conv_state[:, :, :missing], tail.to(conv_state.dtype)], dim=2)
        scanned, tail = mixer.scan_inputs(block.norm(y_own), conv_state)
        joined, ahead = scanned, None
        if halo:
            with torch.no_grad():
                ahead, _ = mixer.scan_inputs(block.norm(y_halo), tail)
            joined = type(scanned)(*(torch.cat(pair, dim=1) for pair in zip(scanned, ahead, strict=True)))
        y_scan, h = mixer.scan(joined, state[-1], window, halo)
        scan_own, scan_halo = y_scan.split([y_own.shape[1], halo], dim=1)
        y = block.feed_forward(mixer.scan_outputs(scan_own, scanned), residual=y_own)
        return y, scan_halo, ahead, (h,) if len(state) == 1 else (None if halo else tail, h)


def forward_noting_decay(block: "Block", y: Tensor, state: State, decays: Decays) -> tuple[Tensor, State]:
    """`tile.forward`, with the recurrence's decays noted on the way."""
    mixer, *tail = block.mixer, *state[:-1]
    inputs, new_tail = mixer.scan_inputs(block.norm(y), *tail)
    decays.add(mixer.log_decay(inputs))
    scanned, h = mixer.scan(inputs, state[-1])
    y = block.feed_forward(mixer.scan_outputs(scanned, inputs), residual=y)
    return y, ((new_tail, h) if tail else (h,))


class WindowedSweep(sweep.Sweep):
    """Layer by layer, every layer's inputs kept: n_layer × seqlen × d_model, beside the states at the chunks'
    edges.

    Args:
        window: tokens in every layer; None picks one a layer by `tolerance` (see `adjoint.engine.decay`).
    """

    def __init__(
        self,
        model: "Stack",
        input_ids: Tensor,
        targets: Tensor,
        valid: int | Tensor,
        states: list[State],
        chunk_size: int,
        window: int | None,
        layer_local: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        super().__init__(model, input_ids, targets, valid, states, chunk_size)
        self.layer_local, self.tolerance, self.chunk_size = layer_local, tolerance, chunk_size
        self.windows = None if window is None else [window] * len(model.layers)
        self.edges: list[list[State]] = []  # states before each chunk, a tuple a layer
        self.inputs: list[Tensor] = []  # inputs of each layer and of the head, (batch, seqlen, d_model)

    def apply(self) -> sweep.Result:
        picked = self.windows is None
        result = super().apply()
        return result._replace(windows=self.windows) if picked else result

    def forward(self) -> tuple[Tensor, list[State]]:
        model, states = self.model, [tuple(s.detach() for s in state) for state in self.initial]
        decays = [Decays() for _ in model.layers] if self.windows is None else None
        total: Tensor | None = None
        with torch.no_grad(), self.precision():
            for chunk in self.chunks:
                self.edges.append(list(states))
                y = model.embed(self.ids[:, chunk])
                for k, block in enumerate(model.blocks()):
                    self._keep(k, chunk, y)
                    if decays is None:
                        y, states[k] = tile.forward(block, y, states[k])
                    else:
                        y, states[k] = forward_noting_decay(block, y, states[k], decays[k])
                self._keep(len(model.layers), chunk, y)
                loss = model.head_loss(y, self.targets[:, chunk])
                total = loss if total is None else total + loss
            if decays is not None:
                self.windows = [d.window(self.tolerance, self.ids.shape[1]) for d in decays]
        assert total is not None
        return total / self.valid, states

    def _keep(self, k: int, chunk: slice, y: Tensor) -> None:
        """Keeps what layer k, or after the last one the head, reads on a chunk."""
        if not self.backward_follows:
            return
        if chunk.start == 0:
            self.inputs.append(y.new_empty(*self.ids.shape, y.shape[2]))
        self.inputs[k][:, chunk] = y

    def backward(
        self, d_loss: Tensor | None, d_final: tuple[Tensor | None, ...]
    ) -> tuple[Gradients, list[Tensor | None]]:
        model = self.model
        gradients = Gradients()
        d_initial: list[Cotangents] = sweep.by_layer(self.initial, [None] * len(d_final))
        final = sweep.by_layer(self.initial, list(d_final))
        d_head = torch.zeros_like(self.inputs[-1])
        with self.precision():
            if d_loss is not None:
                for chunk in self.chunks:
                    d_chunk = self.head_pullback(
                        self.inputs[-1][:, chunk], chunk, d_loss / self.valid, gradients
                    )
                    assert d_chunk is not None
                    d_head[:, chunk] = d_chunk
            d_below = d_head
            for k in reversed(range(len(model.layers))):
                dy = d_head if self.layer_local else d_below
                d_below, d_initial[k] = self._layer_backward(k, dy, final[k], gradients)
            for chunk in self.chunks:
                self.embedding_pullback(d_below[:, chunk], chunk, gradients)
        return gradients, [d for state in d_initial for d in state]

    def _layer_backward(
        self, k: int, dy: Tensor, d_final: Cotangents, gradients: Gradients
    ) -> tuple[Tensor, Cotangents]:
        """The cotangents of layer k's inputs and of its initial states, from those of its outputs and final
        states."""
        assert self.windows is not None
        block, seqlen, window = self.model.blocks()[k], self.ids.shape[1], self.windows[k]
        nothing: Cotangents = (None,) * len(d_final)
        d_below, d_initial, carried = torch.zeros_like(dy), nothing, d_final
        whole = window >= seqlen
        # Nothing is truncated: the adjoint state is handed on from chunk to chunk, as in `Exact`. Else tasks
        # take several chunks at a time where the window is longer than one: halos at most double the work.
        size = self.chunk_size * (1 if whole else -(-window // self.chunk_size))
        d_conv = self.model.config.d_conv
        for task in reversed(layer_tasks(k, seqlen, size, 1 if whole else window, d_conv)):
            dx, d_state = vjp(
                block,
                task,
                self.inputs[k][:, task.left : task.halo_stop],
                self.edges[task.start // self.chunk_size][k],
                dy[:, task.start : task.halo_stop],
                carried if whole else d_final if task.halo_stop == seqlen else nothing,
                None if whole else window,
                gradients,
            )
            carried = (*nothing[1:], d_state[-1])
            d_below[:, task.left : task.stop] += dx
            d_initial = self._initial(task, d_state, d_initial)
        return d_below, d_initial

    def _initial(self, task: Task, d_state: Cotangents, so_far: Cotangents) -> Cotangents:
        """The initial states' cotangents: from the first task; of the conv tail also from tasks that still
        reach before the sequence."""
        kept = d_state
        if task.start > 0:
            d_tail = d_state[0] if len(d_state) > 1 else None
            if d_tail is None or task.start >= d_tail.shape[2]:
                return so_far
            # this chunk's tail is the initial one moved on by `start` tokens
            kept = (F.pad(d_tail[:, :, : d_tail.shape[2] - task.start], (task.start, 0)), None)
        return tuple(a if b is None else b if a is None else a + b for a, b in zip(so_far, kept, strict=True))
