"""Recomputation segment by segment as one writes it by hand, in plain PyTorch.

It is the honest opponent of `Exact`. The sequence is cut into segments. Forward, without a graph, the state
at each segment's start is kept. Backward, from the last segment on, each is run again with its graph; the
cotangent of its final state comes from the segment after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint import Stack

States = list[Tensor]
Run = Callable[[Tensor, States], tuple[Tensor, States]]  # ids, state (none at the start) → logits, state


def loss_by_segments(run: Run, ids: Tensor, size: int) -> Tensor:
    """The mean loss of ids (batch, seqlen), whose backward has been run: parameters have their gradients."""
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    pieces = list(zip(ids.split(size, dim=1), targets.split(size, dim=1), strict=True))
    starts: list[States] = [[]]
    with torch.no_grad():
        for piece, _ in pieces[:-1]:
            starts.append(run(piece, starts[-1])[1])
    total, cotangents = torch.zeros((), device=ids.device), list[Tensor | None]()
    for piece, labels in reversed(pieces):
        state = [tensor.requires_grad_() for tensor in starts.pop()]
        logits, final = run(piece, state)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / (ids.numel() - len(ids))
        torch.autograd.backward([loss, *final[: len(cotangents)]], [None, *cotangents])
        cotangents = [tensor.grad for tensor in state]
        total += loss.detach()
    return total.requires_grad_()


def run_of(model: Any) -> Run:
    """A segment of our stack, through the same scans as all its methods; or of transformers' Mamba-2."""
    return _stack(model) if isinstance(model, Stack) else _mamba2(model)


def _stack(model: Stack) -> Run:
    def run(ids: Tensor, state: States) -> tuple[Tensor, States]:
        pairs = [*zip(state[::2], state[1::2], strict=True)] or None
        out = model(ids, state=pairs, return_state=True)
        return out.logits, [tensor for pair in out.state for tensor in pair]

    return run


def _mamba2(model: Any) -> Run:
    """Return a run of Mamba-2 with another cache than its own, whose copies in place have no gradient."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    class Assigned(LinearAttentionLayer):
        """A cache's layer whose new states take the places of the old ones."""

        def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            before, width = self.conv_states[0], model.config.conv_kernel
            pad = F.pad(conv_states, (width, 0)) if before is None else torch.cat([before, conv_states], -1)
            self.conv_states[0] = pad[..., -width:]
            return pad if before is not None else conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            self.recurrent_states[0] = recurrent_states
            return recurrent_states

    def run(ids: Tensor, state: States) -> tuple[Tensor, States]:
        layers = [Assigned() for _ in range(model.config.num_hidden_layers)]
        for layer, conv, recurrent in zip(layers, state[::2], state[1::2], strict=bool(state)):
            layer.conv_states[0], layer.recurrent_states[0] = conv, recurrent
            layer.has_previous_state[0] = True
        logits = model(input_ids=ids, cache_params=Cache(layers=layers), use_cache=True).logits
        return logits, [t for layer in layers for t in (layer.conv_states[0], layer.recurrent_states[0])]

    return run
