"""Kernels run once before the first message: see `warm_up`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch

from adjoint.engine.grid import Key, Tile
from adjoint.engine.schedule import Action, Run, Send, tiles_of


def kinds_of(worker: Any, actions: Iterable[Action]) -> dict[Hashable, Action]:
    """Map each kind of work in a program to its first action.

    A kernel that is compiled, tried or tuned on first use is ready for all actions of a kind once one has
    run.

    Lengths count by their size and by what kernels are specialised for, multiples of 16, so that documents,
    which cut chunks anywhere, do not make a kind each."""
    settings = (
        worker.batch.rows,
        worker.device,
        worker.autocast,
        worker.lowest_precision,
        torch.is_grad_enabled(),
    )
    noting, first_actions = worker.decays is not None, dict[Hashable, Action]()
    for action in actions:
        if isinstance(action, Send):
            first_actions.setdefault((settings, "send", action.key[0], action.key[1]), action)
        for t in tiles_of(action):
            left, _, _, right = worker.grid.extent(t) if t.kind == "windowed" else (0, 0, 0, 0)
            tokens = right - left or worker.grid.tokens(t.chunk)
            begins = t.chunk == 0, worker.grid.reads_state(t.chunk), worker.batch.seq_idx is not None
            size = tokens.bit_length(), tokens % 16 == 0, tokens == 1
            first_actions.setdefault((settings, noting, t.kind, t.stage, size, begins), Run(t))
    return first_actions


def warm_up(worker: Any, actions: Collection[Action], warmed_up: set[Hashable]) -> None:
    """Run the first action of each kind on zeros, without a message.

    A message between GPUs is a kernel that waits on the device until the other end has come to it. Whatever
    waits for the whole device meanwhile waits for that other end, too, and the other end perhaps for us:
    kernels that are tuned or loaded when they are first used, as Triton's are. So all are used before.

    Args:
        worker: an executor made for this, with the batch, the grid and the stages of the one that will run
            the program; its results are worth nothing.
        warmed_up: the kinds that have run in this process; the function adds to them.
    """
    worker.begin_backward(torch.ones((), dtype=worker.accumulate_dtype, device=worker.device))
    worker.exchange.count_edges(worker, actions)
    with worker.running():
        for kind, action in kinds_of(worker, actions).items():
            if kind in warmed_up:
                continue
            if isinstance(action, Send):
                _fill(worker, [action.key])
                worker.message(action.key)
            elif isinstance(action, Run):
                _run(worker, action.tile)
            worker.clear()
            warmed_up.add(kind)


def _run(worker: Any, t: Tile) -> None:
    if t.kind == "backward":
        again = Tile("recompute", t.stage, t.chunk)
        _fill(worker, worker.grid.reads(again))
        worker.tile(again)
        for slab in worker.slabs.get(t.stage, ()):
            if slab.cotangents is None:
                slab.begin_backward(None)
    _fill(worker, [key for key in worker.grid.reads(t) if key[0] != "tape"])
    worker.tile(t)


def _fill(worker: Any, keys: Iterable[Key]) -> None:
    """Store zeros for values that other workers would have written."""
    for key in keys:
        worker.store[key] = worker.room(key).zero_()
