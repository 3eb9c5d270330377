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
ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]
# (cotangents of the results) → (gradients of `grad_inputs`, cotangents of the initial states and embeddings)
Backward = Callable[..., tuple[Gradients, Sequence[Tensor | None]]]


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function, left uncompiled inside a compiled model.

    Compiled, a program would be a graph per tile. This is not `torch.compiler.disable` alone, which imports
    the compiler even if nothing is compiled."""
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> T:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    # the marks of torch.compiler.disable: with fullgraph=True the error then names this function and says why
    vars(run).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="chunks run as they are")
    return run


class Result(NamedTuple):
    """Results of a `ChunkedStep`, differentiable.

    Attributes:
        loss: the mean loss. states: the final states, one tuple per stage.
        windows: each layer's window if the method picked them.
        sums: the totals of the step's `sums`.
    """

    loss: Tensor
    states: list[State]
    windows: list[int] | None = None
    sums: Sequence[Tensor] = ()


class _Chunked(torch.autograd.Function):
    """The autograd node between the results of a `ChunkedStep`, computed before, and its inputs."""

    @staticmethod
    def forward(ctx: Any, steps: ChunkedStep, back: Backward, results: list[Tensor], *inputs: Tensor) -> Any:
        ctx.back, ctx.grad_inputs = back, steps.grad_inputs
        # saved so that autograd refuses a backward after a change in place
        ctx.save_for_backward(*inputs, *steps.batch.tensors)
        ctx.set_materialize_grads(False)
        outputs = tuple(results)
        results.clear()  # a function that held its own results would hold itself
        return outputs

    @staticmethod
    @differentiable_once("a result by chunks")
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        _ = ctx.saved_tensors  # the check happens on access
        gradients, d_initial = ctx.back(*cotangents)
        return None, None, None, *input_gradients(ctx.grad_inputs, gradients), *d_initial


def input_gradients(inputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """Return each input's gradient, or None, for autograd.

    Users' hooks are made to skip None, as if the tensor had no part in the loss; by itself autograd would
    call them with None. A function cannot leave an input out once it has run, and it is the backward that
    shows which inputs had a part."""
    grads = [gradients.get(t) for t in inputs]
    for tensor, gradient in zip(inputs, grads, strict=True):
        if gradient is None and tensor.is_leaf:
            hooks = tensor._backward_hooks or {}
            hooks |= {key: _SkipNone(hook) for key, hook in hooks.items() if not isinstance(hook, _SkipNone)}
    return grads


class _SkipNone:
    """A tensor's hook that is not called with None."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class ChunkedStep:
    """A batch's forward and backward in one process: the program of one worker, cut into two.

    Making it computes nothing; `loss()` and `forward()` make its executor and its program.

    Args:
        stages: all stages of a model.
        batch: with a differentiable state for each stage.
        width: last dimension of the tensors between stages.
        backward_context: makes the context in which the backward runs, which puts the model back as it was in
            the forward: a caller may have replaced its tensors for the forward alone.
        sums: the sums, besides the loss, that stages add to.

    Attributes:
        parameters: the parameters of all stages, each once.
        grad_inputs: the tensors whose gradients a backward returns: `parameters` and, after the forward, the
            unlisted ones that its last chunk has reached (`leaves.UnlistedLeaves`).
        initial: the tensors of the batch's states, and its embeddings if it has them in place of ids.
        has_backward: whether a backward may follow, also if all parameters are frozen: see `grad_inputs`.
        windows: each layer's window, once they are picked.
        worker, tapes, grid: the executor, the number of tapes that the forward keeps, and the program's grid
            as far as it is known; set by `_begin`.
        backward_actions: the backward's part of the program; set by the forward.
        constants: tensors that are not trained, as the forward has left them.
    """

    frozen_too = True  # whether `constants` has frozen parameters
    # How many processes share the sequence, which of them this is, and its messages to the others.
    workers, place = 1, 0
    transport: Transport | None = None
    worker: Executor
    grid: Grid
    tapes: int
    backward_actions: Sequence[Action] = ()

    def __init__(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        backward_context: ContextFactory = contextlib.nullcontext,
        sums: Sequence[Sum] = (),
    ) -> None:
        assert all(stage is not None for stage in stages), "a part of a stack has no loss by itself"
        self.stages, self.batch, self.spec, self.width, self.backward_context = (
            stages,
            batch,
            spec,
            width,
            backward_context,
        )
        self.sums = sums
        self.parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
        self.initial = [s for state in batch.states for s in state]
        self.initial += [batch.ids] if batch.ids.is_floating_point() else []
        self.grad_inputs, self.has_backward = self.parameters, torch.is_grad_enabled()
        self.windows: list[int] | None = None
        self.stateful = [stage.stateful for stage in stages]
        self.reach = max(stage.reach for stage in stages)
        self.owners = Owners((0,) * len(stages), self.workers)

    def _begin(self) -> None:
        """Make the worker, and count the tapes and the states that fit in memory."""
        spec = self.spec
        self.worker = self._worker(spec)
        self.tapes = 0 if spec.backward.window == "auto" else spec.storage.tapes
        if spec.storage.memory is not None and self.has_backward and self.parameters:
            grid, storage = self.worker.grid, spec.storage
            sizes = [grid.tokens(c) for c in range(grid.chunks)]
            room = budget.room_for_chunks(
                spec.storage.memory, self.worker.slab_bytes(), self.batch.ids.device
            )
            measured = self._measure_first_chunk()
            state = self.worker.state_bytes()
            self.tapes, states = budget.tapes_and_states(room, measured, sizes, state, storage.checkpoints)
            in_one_chunk = (measured.tape + measured.backward_peak) * self.batch.seqlen / sizes[0]
            if storage.prefer_single_chunk and in_one_chunk <= room:
                self.spec = dataclasses.replace(spec, chunk_size=self.batch.seqlen)
                self.worker = self._worker(self.spec)
            elif storage.checkpoints is None and states < grid.chunks - self.tapes:
                self.spec = dataclasses.replace(
                    spec, storage=dataclasses.replace(storage, checkpoints=states)
                )
                self.worker = self._worker(self.spec)
        self.grid = self.worker.grid

    def _grid(self, spec: EngineSpec) -> Grid:
        if not any(None in stage.grows for stage in self.stages):  # no state has to be stored at edges
            spec = dataclasses.replace(spec, storage=dataclasses.replace(spec.storage, checkpoints=None))
        return make_grid(spec, self.batch.seqlen, self.stateful, self.reach)

    def _make_worker(self, grid: Grid, batch: Batch, spec: EngineSpec) -> Executor:
        connections = Connections(self.transport)
        return Executor(self.stages, grid, batch, spec, self.width, self._new_gradients(), connections)

    def _new_gradients(self) -> Gradients:
        # in a group every process would have to find the same tensors
        unlisted = UnlistedLeaves(self.parameters, open=self.has_backward and self.transport is None)
        return Gradients(unlisted, self.parameters if self.has_backward else ())

    def _worker(self, spec: EngineSpec, adjoint_scale: tuple[tuple[float, ...], ...] = ()) -> Executor:
        """Make a worker of the batch; without `adjoint_scale` it is drawn, if the spec drops by chance."""
        grid = self._grid(spec)
        if spec.backward.drop_probability and self.has_backward:
            drawn = adjoint_scale or draw_adjoint_scale(
                sum(self.stateful), grid.chunks, spec.backward.drop_probability
            )
            grid = dataclasses.replace(grid, adjoint_scale=drawn)
        detached = [tuple(s.detach() for s in state) for state in self.batch.states]
        batch = dataclasses.replace(self.batch, ids=self.batch.ids.detach(), states=detached)
        return self._make_worker(grid, batch, spec)

    def _measure_first_chunk(self) -> budget.ChunkMemory:
        """Return the first chunk's memory, measured by running it alone, once per model and kind of batch.

        A stage that draws random numbers draws those of this run again for the first chunk."""
        worker, ids = self.worker, self.batch.ids
        size = worker.grid.tokens(0)
        measurements = budget.measurements_of(self.parameters)
        trained = tuple(p.requires_grad for p in self.parameters)
        recompute = self.spec.storage.recompute
        kind = len(ids), size, ids.device, worker.lowest_precision, worker.autocast, recompute, trained
        if kind not in measurements:
            with budget.LiveBytes() as live:
                spec = EngineSpec(size, least=self.spec.least, storage=Storage(keep=self.spec.storage.keep))
                first = dataclasses.replace(self.batch.chunk(0, size), states=worker.batch.states)
                with torch.enable_grad():
                    first_step = ChunkedStep(self.stages, first, spec, self.width)
                with torch.no_grad():
                    before = live.begin()
                    first_step._begin()
                    live_at_begin = live.live
                    loss, final = first_step._forward()
                    tape = live.live - live_at_begin
                    first_step.backward(torch.ones_like(loss), [None] * len(final))
                    measurements[kind] = budget.ChunkMemory(tape, live.peak - before - tape)
        return measurements[kind]

    def loss(self, states: bool = False) -> Result:
        """Run the forward; return the mean loss and the final states, differentiable.

        Args:
            states: whether append-only final states are returned; else they are empty: on the device they
                would take the memory that offloading them has saved.
        """
        loss, final = self.forward(return_final_kv=states)
        loss, *final = self.differentiable([loss, *final], lambda d, *d_final: self.backward(d, d_final))
        sums = final[len(final) - len(self.sums) :]
        return Result(loss, grouped(self.batch.states, final), self.windows, sums)

    def differentiable(self, results: list[Tensor], back: Backward) -> tuple[Tensor, ...]:
        """Return the results of `forward`, differentiable by `back`; empty the list."""
        return _Chunked.apply(self, back, results, *self.grad_inputs, *self.initial)

    @torch.no_grad()
    def forward(self, return_final_kv: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss, and the final states and totals of the sums, not yet differentiable.

        Args:
            return_final_kv: as `states` of `loss`.
        """
        self._begin()
        self.worker.begin_forward(return_final_kv)
        return self._forward()

    def _forward(self) -> tuple[Tensor, list[Tensor]]:
        worker = self.worker
        forward_actions, self.backward_actions = self._programs()
        # A second backward finds its tapes used and recomputes them: what that reads must stay.
        stays = self._read_by_backward() if self.has_backward else set()
        self._run([_without_frees(a, stays) for a in forward_actions])
        self.grad_inputs = [*self.parameters, *worker.gradients.unlisted_leaves.close()]
        if self.has_backward:
            modules = [named for stage in self.stages for named in stage.modules()]
            self.constants = Constants(modules, self.frozen_too)
        if worker.decays is not None:
            decays = [d for d, stateful in zip(worker.decays, self.stateful, strict=True) if stateful]
            self.windows = [d.window(self.spec.backward.tolerance, self.batch.seqlen) for d in decays]
            self.grid = make_grid(
                self.spec, self.batch.seqlen, self.stateful, self.reach, windows=tuple(self.windows)
            )
            self.backward_actions = self._backward_program()
        total, states = self._results()
        # not the worker's own tensors: an autograd function that held its outputs would never be freed
        final = [s.detach() for state in states for s in state]
        return total / self.batch.divisor, final + [s.total for s in self.sums]

    def chunk_losses(self) -> list[Tensor]:
        """Run the forward alone; return the summed loss of each chunk."""
        self.forward()
        losses = self.worker.losses
        return list(losses.select(sorted(losses.written)).unbind())

    def _programs(self) -> tuple[Sequence[Action], Sequence[Action]]:
        """Return this process's actions of the forward, and of the backward that follows it."""
        actions = self._make_actions(backward=self.has_backward, tapes=self.tapes)
        split = next((i for i, a in enumerate(actions) if not _is_forward(a)), len(actions))
        return actions[:split], actions[split:]

    def _backward_program(self) -> Sequence[Action]:
        return self._make_actions(forward=False, tapes=0)

    def _make_actions(self, **options: Any) -> Sequence[Action]:
        """Return this process's program; `options` are those of `make_schedule`."""
        return make_schedule(self.grid, self.owners, **options).programs[self.place]

    def _run(self, actions: Sequence[Action]) -> None:
        self.worker.run(actions)

    def _results(self) -> tuple[Tensor, list[State]]:
        """Return the summed loss and the final states, of all processes, and drop the worker's."""
        total, final = self.worker.results()
        assert total is not None
        return total, final

    def _read_by_backward(self) -> set[Key]:
        grid = self.grid
        if self.spec.backward.window == "auto":  # windows are not known yet: any of it may be read
            return {key for t in grid.forward_tiles() for key in grid.writes(t)}
        keys = [keys_of(grid, action) for action in self._backward_program()]
        # states that it computes again need not stay
        return {key for reads, _ in keys for key in reads} - {key for _, writes in keys for key in writes}

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        worker = self.worker
        for sequence_sum, d in zip(reversed(self.sums), reversed(d_final), strict=False):
            sequence_sum.cotangent = d
            if d_loss is None and d is not None:  # a sum's cotangent reaches stages by the loss's backward
                d_loss = d.new_zeros(())
        scale = None if d_loss is None else d_loss / self.batch.divisor
        worker.begin_backward(scale, grouped(self.batch.states, d_final), self.grid)
        stored_values = {key: value for key, value in worker.store.items() if key[0] != "tape"}
        try:
            with self.backward_context(), self.constants.restored():
                self._run(self.backward_actions)
            d_initial = [d for state in worker.d_initial for d in state]
            embedded = self.batch.ids.is_floating_point()
            return worker.gradients, d_initial + ([worker.d_ids] if embedded else [])
        finally:  # ready for a second backward, also after an interrupt
            worker.begin_again(stored_values)
            self.backward_actions = self._backward_program()


def _is_forward(action: Action) -> bool:
    return isinstance(action, Run) and action.tile.is_forward


def _without_frees(action: Action, stays: set[Key]) -> Action:
    """Return the action, freeing no key in `stays`."""
    return dataclasses.replace(action, frees=tuple(key for key in action.frees if key not in stays))


def grouped(states: Sequence[State], flat: Sequence[Any]) -> list[Any]:
    """Return the flat list as tuples, one per state and of its length."""
    rest = iter(flat)
    return [tuple(next(rest) for _ in state) for state in states]


def draw_adjoint_scale(stateful: int, chunks: int, drop: float) -> tuple[tuple[float, ...], ...]:
    """Draw `Grid.adjoint_scale`: 0 with probability `drop`, else 1 / (1 - drop); () if nothing is dropped.

    The numbers come from PyTorch's CPU generator."""
    if not drop:
        return ()
    drawn = (torch.rand(stateful, chunks) >= drop).double() / (1 - drop)
    return tuple(map(tuple, drawn.tolist()))
