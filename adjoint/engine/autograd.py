"""One process: a method as torch sees it, one autograd function from parameters and initial states to the
loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adjoint.engine import budget, graphs
from adjoint.engine.first_use import compare_own_layers
from adjoint.engine.grid import Key, Scheme, make_grid
from adjoint.engine.program import Action, Owners, Run, plan
from adjoint.engine.run import Worker
from adjoint.engine.stages import Stage, check_windows, stage_states, stages_of
from adjoint.engine.tile import Gradients
from adjoint.engine.weights import Tensors
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
from adjoint.layers import State
from adjoint.stack import Result, Stack

T = TypeVar("T")


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """A function that runs as it is inside a compiled model: a program is Python's to carry out, and compiled
    would be a graph a tile. `torch.compiler.disable` by itself imports the compiler."""
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return run


@uncompiled
def chunked_loss(
    model: Stack,
    input_ids: Tensor,
    targets: Tensor,
    valid: int | Tensor,
    states: list[State],
    scheme: Scheme,
    seq_idx: Tensor | None = None,
) -> Result:
    """Mean loss and final states, differentiable in the parameters and `states` as the scheme has it.

    Args:
        input_ids, targets: (batch, seqlen) int64, the targets already shifted, `valid` of them not ignored.
        states: to start from, a tuple a layer.
        seq_idx: (batch, seqlen), the documents of a sequence numbered from 0 in rising order; None of one.
    """
    check_windows(model.config, scheme)
    steps = steps_of(model, input_ids, targets, max(int(valid), 1), states, scheme, seq_idx)
    loss, *final = steps.loss()
    return Result(loss, _grouped(states, final), steps.windows if scheme.window == "auto" else None)


def steps_of(
    model: Stack,
    input_ids: Tensor,
    targets: Tensor,
    valid: int,
    states: list[State],
    scheme: Scheme,
    seq_idx: Tensor | None = None,
) -> Steps:
    """A stack's program for a batch; arguments as `chunked_loss`'s."""
    weight, initial = model.embedding.weight, stage_states(model, states)
    parameters: list[Tensor] = list(model.parameters())
    stages: list[Any] = stages_of(model, scheme.recompute)
    given = stages, input_ids, targets, valid, initial, scheme, parameters
    steps = Steps(*given, weight.shape[1], weight.dtype, seq_idx)
    steps.tensors = Tensors(model)
    return steps


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, *tensors: Tensor) -> Any:
        loss, final = steps.forward()
        ctx.steps = steps
        # so that autograd notices what was changed in place before the backward
        ctx.save_for_backward(*tensors, *steps.inputs)
        ctx.set_materialize_grads(False)
        return loss, *final

    @staticmethod
    @differentiable_once("a loss by chunks")
    def backward(ctx: Any, d_loss: Tensor | None, *d_final: Tensor | None) -> Any:
        _ = ctx.saved_tensors  # the check happens on access
        gradients, d_initial = ctx.steps.backward(d_loss, d_final)
        return None, *handed_over(ctx.steps.parameters, gradients), *d_initial


def handed_over(parameters: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """Gradients as autograd is given them. Hooks that users have put on parameters see none where there is
    none, as if these had no part in the loss; autograd by itself would call them with None."""
    found = [gradients.of(p) for p in parameters]
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is None and parameter.is_leaf:
            hooks = parameter._backward_hooks or {}
            hooks.update({key: _Unless(hook) for key, hook in hooks.items() if not isinstance(hook, _Unless)})
    return found


class _Unless:
    """A tensor's hook, called unless there is no gradient."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class Steps:
    """One worker's program cut in two: what autograd calls forward, and what it calls backward.

    Args:
        stages: all of a model's.
        valid: number of targets that are not ignored; the loss's divisor.
        initial: the states before the sequence, a tuple a stage; differentiable.
        parameters: those of all stages, each once.
        width, dtype: of the tensors between stages.

    Attributes:
        inputs: what chunks are made of, and read again in the backward.
        tensors: the model's in their places, which a caller may have changed for the forward alone.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        ids: Tensor,
        targets: Tensor,
        valid: float,
        initial: Sequence[State],
        scheme: Scheme,
        parameters: list[Tensor],
        width: int,
        dtype: torch.dtype,
        seq_idx: Tensor | None = None,
    ) -> None:
        assert all(stage is not None for stage in stages), "a part of a stack has no loss by itself"
        self.scheme, self.valid, self.parameters = scheme, valid, parameters
        self.inputs = [t for t in (ids, targets, seq_idx) if t is not None]
        self.initial = [s for state in initial for s in state]
        self.follows = torch.is_grad_enabled() and any(t.requires_grad for t in (*parameters, *self.initial))
        self.tensors: Tensors | None = None
        self.windows: list[int] | None = None  # of each layer, once they are picked
        self.stateful = [stage.stateful for stage in stages]
        self.reach, self.seqlen = max(stage.reach for stage in stages), ids.shape[1]
        self.owners = Owners((0,) * len(stages))
        passing = None
        if scheme.cut and self.follows:
            chunks = len(scheme.cuts(self.seqlen)) - 1
            passing = draw_passing(sum(self.stateful), chunks, scheme.cut).tolist()
        given = ids, targets, [tuple(s.detach() for s in state) for state in initial]

        def worker(scheme: Scheme) -> Worker:
            return Worker(
                stages,
                make_grid(scheme, self.seqlen, self.stateful, self.reach),
                *given,
                width,
                accumulate_dtype(dtype),
                host=scheme.offload and ids.is_cuda,
                noting=scheme.window == "auto",
                passing=passing,
                seq_idx=seq_idx,
                record=graphs.recorder(ids.device) if scheme.cuda_graphs else None,
            )

        self.worker = worker(scheme)
        self.tapes = 0 if scheme.window == "auto" else scheme.tapes
        if scheme.memory is not None and self.follows:
            sizes = [self.worker.grid.tokens(c) for c in range(self.worker.grid.chunks)]
            room = budget.room_for_tapes(scheme.memory, self.worker.kept_bytes(), ids.device)
            measured = self._measured(valid, ids, targets, width, dtype)
            self.tapes = budget.tapes_within(room, measured, sizes)
            if scheme.whole and (measured.tape + measured.beside) * self.seqlen / sizes[0] <= room:
                self.scheme = dataclasses.replace(scheme, chunk_size=self.seqlen)
                self.worker = worker(self.scheme)
        self.later: Sequence[Action] = ()
        if self.worker.grid.chunks > 1:
            compare_own_layers(stages, given[2], width, dtype, ids.device)

    def _measured(
        self, valid: float, ids: Tensor, targets: Tensor, width: int, dtype: torch.dtype
    ) -> budget.Measured:
        """What the first chunk takes, run forward and back by itself; once a model and kind of batch."""
        size, worker = self.worker.grid.tokens(0), self.worker
        known = budget.of_model(self.parameters)
        kind = len(ids), size, ids.device, dtype, worker.autocast, self.scheme.recompute
        if kind not in known:
            devices = [ids.device] if ids.is_cuda else []
            with torch.random.fork_rng(devices), budget.LiveBytes() as live:
                scheme = Scheme(size, keep=self.scheme.keep, least=self.scheme.least)
                stages = [stage for stage in worker.stages if stage is not None]
                inputs = ids[:, :size], targets[:, :size], valid, worker.initial
                one = Steps(stages, *inputs, scheme, self.parameters, width, dtype)
                with torch.no_grad():
                    before = live.begin()
                    loss, final = one.forward()
                    tape = live.live - before
                    one.backward(torch.ones_like(loss), [None] * len(final))
                    known[kind] = budget.Measured(tape, live.peak - before - tape)
        return known[kind]

    def loss(self) -> Sequence[Tensor]:
        """The loss over `valid`, and the final states of all stages."""
        return _ChunkedLoss.apply(self, *self.parameters, *self.initial)

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        worker = self.worker
        made = plan(worker.grid, self.owners, backward=self.follows, tapes=self.tapes).programs[0]
        first = next((i for i, a in enumerate(made) if not _is_forward(a)), len(made))
        self.later = made[first:]
        # The graph may be gone through again, when tapes are used up: what they came from stays.
        stays = self._read_by_backward() if self.follows else set()
        worker.run([_freeing_less(a, stays) for a in made[:first]])
        if worker.decays is not None:
            decays = [d for d, stateful in zip(worker.decays, self.stateful, strict=True) if stateful]
            self.windows = [d.window(self.scheme.tolerance, self.seqlen) for d in decays]
            worker.grid = make_grid(
                self.scheme, self.seqlen, self.stateful, self.reach, windows=tuple(self.windows)
            )
            self.later = self._backward_program()
        assert worker.total is not None
        # other objects than the worker keeps: a function that held its own outputs would hold itself
        final = [s.detach() for state in worker.final for s in state]
        return worker.total / self.valid, final

    def chunk_losses(self) -> list[Tensor]:
        """The forward alone; the summed loss of each chunk."""
        with torch.no_grad():
            self.forward()
        return [loss for _, loss in sorted(self.worker.losses.items())]

    def _backward_program(self) -> Sequence[Action]:
        return plan(self.worker.grid, self.owners, forward=False, tapes=0).programs[0]

    def _read_by_backward(self) -> set[Key]:
        grid = self.worker.grid
        if self.scheme.window == "auto":  # windows are not known yet: everything stays
            return {key for t in grid.forward_tiles() for key in grid.writes(t)}
        tiles = [a.tile for a in self._backward_program() if isinstance(a, Run)]
        return {key for t in tiles for key in grid.reads(t)}

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        worker = self.worker
        worker.scale = None if d_loss is None else d_loss / self.valid
        worker.d_final = _grouped(worker.initial, d_final)
        worker.d_initial = [(None,) * len(state) for state in worker.initial]
        kept = {key: value for key, value in worker.store.items() if key[0] != "tape"}
        places = contextlib.nullcontext() if self.tensors is None else self.tensors.replaced({})
        try:
            with places:
                worker.run(self.later)
            return worker.gradients, [d for state in worker.d_initial for d in state]
        finally:  # may be gone through again, after an interrupt too
            worker.gradients = Gradients()
            worker.store, self.later = kept, self._backward_program()


def _is_forward(action: Action) -> bool:
    return isinstance(action, Run) and action.tile.kind in "FL"


def _freeing_less(action: Action, stays: set[Key]) -> Action:
    return dataclasses.replace(action, frees=tuple(key for key in action.frees if key not in stays))


def _grouped(states: Sequence[State], flat: Sequence[Any]) -> list[Any]:
    """A flat list as one tuple a state."""
    rest = iter(flat)
    return [tuple(next(rest) for _ in state) for state in states]


def draw_passing(n_layer: int, chunks: int, cut: float) -> Tensor:
    """(n_layer, chunks): 0 with probability `cut`, else 1 / (1 - cut); from the CPU's generator."""
    return (torch.rand(n_layer, chunks) >= cut).double() / (1 - cut)
