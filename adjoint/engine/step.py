"""`ChunkedStep`: a batch by a spec in one process, as one autograd function from parameters to the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine import budget
from adjoint.engine.executor import Connections, Executor, Transport
from adjoint.engine.grid import EngineSpec, Grid, Key, Storage, make_grid
from adjoint.engine.leaves import UnlistedLeaves
from adjoint.engine.schedule import Action, Owners, Run, keys_of, make_schedule
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.engine.tile import Gradients
from adjoint.engine.weights import Constants
from adjoint.kernels.checks import differentiable_once
from adjoint.layers import State

T = TypeVar("T")
Around = Callable[[], contextlib.AbstractContextManager[Any]]
# (cotangents of the results) → (gradients of what is asked, cotangents of the initial states and embeddings)
Backward = Callable[..., tuple[Gradients, Sequence[Tensor | None]]]


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function, left uncompiled inside a compiled model: compiled, a program would be a graph per tile.
    Not `torch.compiler.disable` alone, as that imports the compiler, also where nothing is compiled."""
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    # the marks of torch.compiler.disable: with fullgraph=True the error then names this function and says why
    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="chunks run as they are")
    return run


class Result(NamedTuple):
    """The mean loss; the final states, one tuple per stage; each layer's window if the method picked them;
    the totals of the steps' `sums`."""

    loss: Tensor
    states: list[State]
    windows: list[int] | None = None
    sums: Sequence[Tensor] = ()


class _Chunked(torch.autograd.Function):
    """Results of a `ChunkedStep`, which have been computed, and the tensors that they were computed from."""

    @staticmethod
    def forward(ctx: Any, steps: ChunkedStep, back: Backward, results: list[Tensor], *inputs: Tensor) -> Any:
        ctx.back, ctx.asked = back, steps.asked
        # saved so that autograd refuses a backward after a change in place
        ctx.save_for_backward(*inputs, *steps.batch.tensors)
        ctx.set_materialize_grads(False)
        found = tuple(results)
        results.clear()  # a function that held its own results would hold itself
        return found

    @staticmethod
    @differentiable_once("a result by chunks")
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        _ = ctx.saved_tensors  # the check happens on access
        gradients, d_initial = ctx.back(*cotangents)
        return None, None, None, *handed_over(ctx.asked, gradients), *d_initial


def handed_over(inputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """Each input's gradient, or None, for autograd. Users' hooks are made to skip None, as if the tensor had
    no part in the loss; by itself autograd would call them with None. A function cannot leave an input out
    once it has run, and it is the backward that shows which inputs had a part."""
    found = [gradients.of(t) for t in inputs]
    for tensor, gradient in zip(inputs, found, strict=True):
        if gradient is None and tensor.is_leaf:
            hooks = tensor._backward_hooks or {}
            hooks |= {key: _SkipNone(hook) for key, hook in hooks.items() if not isinstance(hook, _SkipNone)}
    return found


class _SkipNone:
    """A tensor's hook that is not called with None."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class ChunkedStep:
    """A single worker's program, cut into autograd's forward and its backward. It holds what it is given;
    `loss()` and `forward()` make what it runs with.

    Args:
        stages: all of a model's.
        batch: with a differentiable state for each stage.
        width: of the tensors between stages.
        around: makes a context, entered around the backward, that puts the model back as it was in the
            forward: a caller may have replaced its tensors for the forward alone.
        sums: the sums, besides the loss, that stages add to.

    Attributes:
        parameters: those of all stages, each once.
        asked: the tensors whose gradients a backward gives: `parameters` and, after the forward, those that
            its last chunk has reached besides (`leaves.UnlistedLeaves`).
        initial: the tensors of the batch's states, and its embeddings if it has them in place of ids.
        follows: whether a backward may follow. Where all parameters are frozen it may: see `asked`.
        windows: of each layer, once they are picked.
        worker, tapes, grid: what runs, how many tapes stay, and the program's grid as far as it is known;
            from `_begin` on, as are `later`, the backward's actions.
        constants: tensors that are not trained, as the forward has left them.
    """

    frozen_too = True  # whether `constants` has frozen parameters
    # How many processes share the sequence, which of them this is, and its messages to the others.
    workers, place = 1, 0
    transport: Transport | None = None
    worker: Executor
    grid: Grid
    tapes: int
    later: Sequence[Action] = ()

    def __init__(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        around: Around = contextlib.nullcontext,
        sums: Sequence[Sum] = (),
    ) -> None:
        assert all(stage is not None for stage in stages), "a part of a stack has no loss by itself"
        self.stages, self.batch, self.spec, self.width, self.around = stages, batch, spec, width, around
        self.sums = sums
        self.parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
        self.initial = [s for state in batch.states for s in state]
        self.initial += [batch.ids] if batch.ids.is_floating_point() else []
        self.asked, self.has_backward = self.parameters, torch.is_grad_enabled()
        self.windows: list[int] | None = None
        self.stateful = [stage.stateful for stage in stages]
        self.reach = max(stage.reach for stage in stages)
        self.owners = Owners((0,) * len(stages), self.workers)

    def _begin(self) -> None:
        """Makes the worker, with room for what stays of the whole batch, and finds how many tapes fit."""
        spec = self.spec
        self.worker = self._worker(spec)
        self.tapes = 0 if spec.backward.window == "auto" else spec.storage.tapes
        if spec.storage.memory is not None and self.has_backward and self.parameters:
            grid, device = self.worker.grid, self.batch.ids.device
            sizes = [grid.tokens(c) for c in range(grid.chunks)]
            room = budget.room_for_tapes(spec.storage.memory, self.worker.kept_bytes(), device)
            measured = self._measured()
            self.tapes = budget.tapes_within(room, measured, sizes)
            whole = (measured.tape + measured.beside) * self.batch.seqlen / sizes[0] <= room
            if spec.storage.whole and whole:
                self.spec = dataclasses.replace(spec, chunk_size=self.batch.seqlen)
                self.worker = self._worker(self.spec)
        self.grid = self.worker.grid

    def _grid(self, spec: EngineSpec) -> Grid:
        return make_grid(spec, self.batch.seqlen, self.stateful, self.reach)

    def _make_worker(self, grid: Grid, batch: Batch, spec: EngineSpec) -> Executor:
        connections = Connections(self.transport)
        return Executor(self.stages, grid, batch, spec, self.width, self._new_gradients(), connections)

    def _new_gradients(self) -> Gradients:
        # in a group the tensors that one process finds would have to be those of every other
        outside = UnlistedLeaves(self.parameters, open=self.has_backward and self.transport is None)
        return Gradients(outside, self.parameters if self.has_backward else ())

    def _worker(self, spec: EngineSpec, adjoint_scale: tuple[tuple[float, ...], ...] = ()) -> Executor:
        """A worker of the batch; without `adjoint_scale` it is drawn, if the spec drops by chance."""
        grid = self._grid(spec)
        if spec.backward.drop_probability and self.has_backward:
            drawn = adjoint_scale or draw_adjoint_scale(
                sum(self.stateful), grid.chunks, spec.backward.drop_probability
            )
            grid = dataclasses.replace(grid, adjoint_scale=drawn)
        detached = [tuple(s.detach() for s in state) for state in self.batch.states]
        batch = dataclasses.replace(self.batch, ids=self.batch.ids.detach(), states=detached)
        return self._make_worker(grid, batch, spec)

    def _measured(self) -> budget.Measured:
        """The first chunk's memory, measured by running it alone; remembered per model and kind of batch. A
        stage that draws random numbers draws those of this run again for the first chunk."""
        worker, ids = self.worker, self.batch.ids
        size = worker.grid.tokens(0)
        known = budget.of_model(self.parameters)
        trained = tuple(p.requires_grad for p in self.parameters)
        recompute = self.spec.storage.recompute
        kind = len(ids), size, ids.device, worker.lowest_precision, worker.autocast, recompute, trained
        if kind not in known:
            with budget.LiveBytes() as live:
                spec = EngineSpec(size, least=self.spec.least, storage=Storage(keep=self.spec.storage.keep))
                first = dataclasses.replace(self.batch.chunk(0, size), states=worker.batch.states)
                with torch.enable_grad():
                    one = ChunkedStep(self.stages, first, spec, self.width)
                with torch.no_grad():
                    before = live.begin()
                    one._begin()
                    begun = live.live
                    loss, final = one._forward()
                    tape = live.live - begun
                    one.backward(torch.ones_like(loss), [None] * len(final))
                    known[kind] = budget.Measured(tape, live.peak - before - tape)
        return known[kind]

    def loss(self, states: bool = False) -> Result:
        """Runs the forward: the loss divided by the batch's divisor, and the final states, differentiable.

        Args:
            states: whether append-only final states are asked for; else they are empty, as on the device they
                would take as much memory as those that are offloaded leave there.
        """
        loss, final = self.forward(return_final_kv=states)
        loss, *final = self.differentiable([loss, *final], lambda d, *d_final: self.backward(d, d_final))
        sums = final[len(final) - len(self.sums) :]
        return Result(loss, grouped(self.batch.states, final), self.windows, sums)

    def differentiable(self, results: list[Tensor], back: Backward) -> tuple[Tensor, ...]:
        """The results of `forward`, differentiable by `back`; the list is emptied."""
        return _Chunked.apply(self, back, results, *self.asked, *self.initial)

    @torch.no_grad()
    def forward(self, return_final_kv: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The mean loss, and the final states and totals of the sums, none of them differentiable yet.

        Args:
            ends: as `states` of `loss`.
        """
        self._begin()
        self.worker.begin_forward(return_final_kv)
        return self._forward()

    def _forward(self) -> tuple[Tensor, list[Tensor]]:
        worker = self.worker
        now, self.later = self._programs()
        # A second backward finds its tapes used and recomputes them: what that reads must stay.
        stays = self._read_by_backward() if self.has_backward else set()
        self._run([_keeping(a, stays) for a in now])
        self.asked = [*self.parameters, *worker.gradients.outside.close()]
        if self.has_backward:
            modules = [named for stage in self.stages for named in stage.modules()]
            self.constants = Constants(modules, self.frozen_too)
        if worker.decays is not None:
            decays = [d for d, stateful in zip(worker.decays, self.stateful, strict=True) if stateful]
            self.windows = [d.window(self.spec.backward.tolerance, self.batch.seqlen) for d in decays]
            self.grid = make_grid(
                self.spec, self.batch.seqlen, self.stateful, self.reach, windows=tuple(self.windows)
            )
            self.later = self._backward_program()
        total, states = self._results()
        # not the worker's own tensors: an autograd function that held its outputs would never be freed
        final = [s.detach() for state in states for s in state]
        return total / self.batch.divisor, final + [s.total for s in self.sums]

    def chunk_losses(self) -> list[Tensor]:
        """Runs the forward alone: the summed loss of each chunk."""
        self.forward()
        losses = self.worker.losses
        return list(losses.of(sorted(losses.known)).unbind())

    def _programs(self) -> tuple[Sequence[Action], Sequence[Action]]:
        """This process's actions of the forward, and of the backward that follows it."""
        made = self._planned(backward=self.has_backward, tapes=self.tapes)
        first = next((i for i, a in enumerate(made) if not _is_forward(a)), len(made))
        return made[:first], made[first:]

    def _backward_program(self) -> Sequence[Action]:
        return self._planned(forward=False, tapes=0)

    def _planned(self, **which: Any) -> Sequence[Action]:
        """This process's part of a `make_schedule`."""
        return make_schedule(self.grid, self.owners, **which).programs[self.place]

    def _run(self, actions: Sequence[Action]) -> None:
        self.worker.run(actions)

    def _results(self) -> tuple[Tensor, list[State]]:
        """The summed loss and the final states, of all processes; the worker has neither any more."""
        total, final = self.worker.results()
        assert total is not None
        return total, final

    def _read_by_backward(self) -> set[Key]:
        grid = self.grid
        if self.spec.backward.window == "auto":  # windows are not known yet: any of it may be read
            return {key for t in grid.forward_tiles() for key in grid.writes(t)}
        return {key for action in self._backward_program() for key in keys_of(grid, action)[0]}

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        worker = self.worker
        for one, d in zip(reversed(self.sums), reversed(d_final), strict=False):
            one.cotangent = d
            if d_loss is None and d is not None:  # a sum's cotangent reaches stages by the loss's backward
                d_loss = d.new_zeros(())
        scale = None if d_loss is None else d_loss / self.batch.divisor
        worker.begin_backward(scale, grouped(self.batch.states, d_final), self.grid)
        kept = {key: value for key, value in worker.store.items() if key[0] != "tape"}
        try:
            with self.around(), self.constants.restored():
                self._run(self.later)
            d_initial = [d for state in worker.d_initial for d in state]
            embedded = self.batch.ids.is_floating_point()
            return worker.gradients, d_initial + ([worker.d_ids] if embedded else [])
        finally:  # ready for a second backward, also after an interrupt
            worker.begin_again(kept)
            self.later = self._backward_program()


def _is_forward(action: Action) -> bool:
    return isinstance(action, Run) and action.tile.is_forward


def _keeping(action: Action, stays: set[Key]) -> Action:
    """The action, which frees no key in `stays`."""
    return dataclasses.replace(action, frees=tuple(key for key in action.frees if key not in stays))


def grouped(states: Sequence[State], flat: Sequence[Any]) -> list[Any]:
    """The flat list as tuples, one per state and of its length."""
    rest = iter(flat)
    return [tuple(next(rest) for _ in state) for state in states]


def draw_adjoint_scale(stateful: int, chunks: int, drop: float) -> tuple[tuple[float, ...], ...]:
    """`Grid.passing`: 0 with probability `drop`, else 1 / (1 - drop), from PyTorch's CPU generator; none
    where nothing is dropped."""
    if not drop:
        return ()
    drawn = (torch.rand(stateful, chunks) >= drop).double() / (1 - drop)
    return tuple(map(tuple, drawn.tolist()))
