"""Recomputation segment by segment as one writes it by hand, in plain PyTorch.

It is the honest opponent of `Exact`. The sequence is cut into segments. Forward, without a graph, the state
at each segment's start is kept. Backward, from the last segment on, each is run again with its graph; the
cotangent of its final state comes from the segment after it.
"""

from __future__ import annotations

from collections.abc import Callable

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


def run_of(model: Stack) -> Run:
    """Return a run of a segment, through the same scans as all methods."""

    def run(ids: Tensor, state: States) -> tuple[Tensor, States]:
        pairs = [*zip(state[::2], state[1::2], strict=True)] or None
        out = model(ids, state=pairs, return_state=True)
        return out.logits, [tensor for pair in out.state for tensor in pair]

    return run
