"""Layers that read in both directions, by chunks: layer after layer, and in a layer scan after scan.

Each output of such a layer reads the whole sequence, so that a chunk cannot pass through all layers: the
engine's grid of layers and chunks does not apply. What is stored is each layer's input, the sum before its
MLP if it has one, and the states at the chunk edges of both scans; with `offload` all in host memory. The
backward computes the activations of one chunk of one scan of one layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from adjoint.engine import tile
from adjoint.engine.custom_layers import custom_class
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Layer
from adjoint.engine.storage import stores_on_host
from adjoint.errors import UserError
from adjoint.kernels.checks import is_untouched
from adjoint.layers import Block, State
from adjoint.layers.bidirectional_mixer import BidirectionalMixer, initial_state_of
from adjoint.stack.recurrence import HostInputs, RecurrenceSetting, run_by_chunks


def block_by_chunks(block: Block, y: Tensor, seq_idx: Tensor | None, spec: EngineSpec) -> Tensor:
    """Return a bidirectional block's output for y (batch, seqlen, d_model), differentiable.

    Args:
        seq_idx: (batch, seqlen), each token's document, or None.
        spec: of which the chunk size, what is stored and where, and the recomputation count.

    Raises:
        UserError: the block or its mixer has hooks, which would see no call.
    """
    mixer = block.mixer
    if not (is_untouched(block, Block) and is_untouched(mixer, BidirectionalMixer)):
        raise UserError(
            "a bidirectional layer with hooks on it, or with a forward of its own, does not run by chunks: "
            "put the hooks on the modules in it, or use Backprop(checkpoint=True)"
        )
    is_ours = custom_class(Layer(block, grows=())) is None
    recompute, verify_for = spec.storage.recompute, None if is_ours else block
    offloads = stores_on_host(spec, y.device)
    layer_input = HostInputs() if offloads else None  # both scans read it

    def run(
        function: Callable[..., tuple[Tensor, State]],
        name: str,
        x: tuple[Tensor, ...],
        state: State,
        modules: Iterable[nn.Module],
        reverse: bool = False,
        on_host: HostInputs | None = None,
    ) -> Tensor:
        def chunk(x: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
            if recompute == "none" or not torch.is_grad_enabled():
                return function(state, *x)
            return tile.recomputed(call, (x[0], state, *x[1:]), recompute, random=not is_ours)

        def call(y: Tensor, state: State, *documents: Tensor) -> tuple[Tensor, State]:
            return function(state, y, *documents)

        chunk.__name__ = chunk.__qualname__ = name
        setting = RecurrenceSetting(nn.ModuleList(modules), verify_for, on_host)
        return run_by_chunks(chunk, x, state, spec, reverse, setting)[0]

    def scan(direction: nn.Module, name: str, reverse: bool) -> Tensor:
        def read(state: State, x: Tensor, *documents: Tensor) -> tuple[Tensor, State]:
            if documents:
                numbers, begins = documents
                state, documents = tile.reset_rows(state, begins[:, 0]), (numbers,)
            return direction(block.norm(x), state, *documents)

        x = (y,) if seq_idx is None else (y, seq_idx, _begins(seq_idx, reverse))
        name = f"{type(direction).__name__}, {name},"
        state = initial_state_of(direction, y)
        return run(read, name, x, state, (block.norm, direction), reverse, layer_input)

    def feed_forward(state: State, x: Tensor) -> tuple[Tensor, State]:
        return block.feed_forward(x), ()

    forward = scan(mixer.forward_mixer, "read forward", False)
    backward = scan(mixer.reverse_mixer, "read in reverse", True)
    with save_on_cpu(pin_memory=True) if offloads else contextlib.nullcontext():  # factors of a product
        y = y + mixer.joined(forward, backward)
    del forward, backward
    if block.mlp is None or block.norm2 is None:
        return y
    host = HostInputs() if offloads else None
    return run(feed_forward, "feed_forward", (y,), (), (block.norm2, block.mlp), on_host=host)


def _begins(seq_idx: Tensor, reverse: bool) -> Tensor:
    """Return (batch, seqlen) bool: where the scan's previous token is of another document."""
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    edge = torch.zeros_like(changes[:, :1]) if changes.shape[1] else changes.new_zeros(len(seq_idx), 1)
    return torch.cat([changes, edge] if reverse else [edge, changes], dim=1)
