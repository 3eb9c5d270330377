"""`ChunkedStep`: a batch by a spec, as one autograd function from parameters to the loss or as a program."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from adjoint import memory
from adjoint.batch import Batch
from adjoint.engine import budget, chunk_size
from adjoint.engine.continuation import STEP, frees_graph
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Connections, Executor
from adjoint.engine.grid import EngineSpec, Grid, Storage
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.schedule import Action, Run, Schedule, Send, forward_and_backward, keep_for
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Stage
from adjoint.engine.storage import IN_FORWARD, Slab
from adjoint.engine.sweep import Sweep
from adjoint.engine.tile import Gradients, Tape
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype, differentiable_once
from adjoint.layers import State

T = TypeVar("T")
# (cotangents of the results) → (gradients of `grad_inputs`, cotangents of the initial states and embeddings)
Backward = Callable[..., tuple[Gradients, Sequence[Tensor | None]]]
# The hook of DistributedDataParallel on one parameter, which reads the gradients of others.
DELAYED_HOOK = "_delayed_all_reduce_hook"


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


def unseen_by_checkpoint() -> contextlib.AbstractContextManager[object]:
    """Return a context for a forward, whose tapes a checkpoint around the call does not see.

    It would run the call again where a saved tensor is first read, for each backward of autograd by itself:
    also in the middle of the one that reads a tape, with a chunk's tensors in the place of the model's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)


class Result(NamedTuple):
    """Results of a `ChunkedStep`, differentiable.

    Attributes:
        loss: the mean loss. states: the final states, one tuple per stage of the model.
        windows: each layer's window if the method picked them.
        sums: the totals of the step's `sums`.
        slabs: keys and values by stage, from which other steps can go on (`Prefix`).
    """

    loss: Tensor
    states: list[State]
    windows: list[int] | None = None
    sums: Sequence[Tensor] = ()
    slabs: Mapping[int, Sequence[Slab]] = {}


class _Chunked(torch.autograd.Function):
    """The autograd node between the results of a `ChunkedStep`, computed before, and its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: ChunkedStep,
        back: Backward,
        results: list[Tensor],
        copied: Set[int],
        *inputs: Tensor,
    ) -> Any:
        ctx.back, ctx.grad_inputs = back, steps.grad_inputs
        ctx.executor = getattr(steps, "executor", None)  # None if the backward is done already
        setattr(ctx, STEP, steps)
        # saved so that autograd refuses a backward after a change in place, which does not reach a copy
        kept_inputs = [t for t in inputs if id(t) not in copied] if copied else inputs
        ctx.save_for_backward(*kept_inputs, *steps.batch.tensors)
        ctx.set_materialize_grads(False)
        outputs = tuple(results)
        results.clear()  # a function that held its own results would hold itself
        return outputs

    @staticmethod
    @uncompiled
    @differentiable_once("a result by chunks")
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        for cotangent in cotangents:
            if cotangent is not None and torch._C._functorch.is_legacy_batchedtensor(cotangent):
                raise UserError(
                    "is_grads_batched=True does not work with a result by chunks: call torch.autograd.grad "
                    "for each cotangent, with retain_graph=True"
                )
        _ = ctx.saved_tensors  # the check happens on access
        for value in ctx.executor.store.values() if ctx.executor is not None else ():
            if isinstance(value, Tape):
                value.check_is_ours()
            del value  # of a cotangent, which would stay
        gradients, d_initial = ctx.back(*cotangents)
        grad_inputs = ctx.grad_inputs
        if frees_graph():  # with the step: of many that hang together, each is freed as its backward ends
            ctx.back = ctx.executor = ctx.grad_inputs = None
            setattr(ctx, STEP, None)
        return None, None, None, None, *input_gradients(grad_inputs, gradients), *d_initial


def input_gradients(inputs: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """Return each input's gradient, or None, for autograd.

    Users' hooks are made to skip None, as if the tensor had no part in the loss; by itself autograd would
    call them with None. A function cannot leave an input out once it has run, and it is the backward that
    shows which inputs had a part.

    Raises:
        UserError: DistributedDataParallel delays the reduction of some gradients until another one comes.
    """
    grads = [gradients.get(t) for t in inputs]
    for tensor, gradient in zip(inputs, grads, strict=True):
        hooks = tensor._backward_hooks if tensor.is_leaf else None
        if not hooks:
            continue
        if DELAYED_HOOK in [getattr(hook, "__name__", "") for hook in hooks.values()]:
            raise UserError(
                "DistributedDataParallel(delay_all_reduce_named_params=…) averages when the gradient of "
                "param_to_hook_all_reduce comes, but by chunks all gradients come at once: leave both out"
            )
        if gradient is None:
            hooks |= {key: _SkipNone(hook) for key, hook in hooks.items() if not isinstance(hook, _SkipNone)}
    return grads


class _SkipNone:
    """A tensor's hook that is not called with None."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


class _MeasuringTapes(Distribution):
    """A single process that notes how many bytes the tape of each segment of layers takes."""

    def __init__(self, live: budget.LiveBytes) -> None:
        self.live = live
        self.segments: tuple[int, ...] = ()
        self.bytes_of_segment = collections.Counter[int]()

    def columns(self) -> tuple[int, ...]:
        """Return the bytes of all segments' tapes, in the order of the backward."""
        return tuple(self.bytes_of_segment[segment] for segment in sorted(self.bytes_of_segment)[::-1])

    def connections(self, grid: Grid) -> Connections:
        self.segments = grid.segments
        return Connections(traced=self._measured)

    @contextlib.contextmanager
    def _measured(self, action: object) -> Iterator[None]:
        before = self.live.live
        yield
        if isinstance(action, Run) and action.tile.kind == "recompute":
            self.bytes_of_segment[self.segments[action.tile.stage]] += self.live.live - before


class ChunkedStep:
    """A batch's forward and backward as this process runs them.

    As one autograd function (`loss`, `differentiable`) its program is cut into two; `accumulate` runs it
    whole, for a loop that needs no autograd. Making it computes nothing.

    Args:
        stages: all stages of a model; None for those that other workers have. Those of a worker run as one,
            unless the method's tasks are layers.
        batch: with a differentiable state for each stage.
        width: last dimension of the tensors between stages.
        sums: the sums, besides the loss, that stages add to.
        distribution: the workers that run the batch together; by default this process alone.
        sweep: how the step reaches its weights; by default they are plain tensors.

    Attributes:
        parameters: the parameters of this process's stages, each once.
        grad_inputs: the tensors whose gradients a backward returns: `parameters` and, after the forward, the
            unlisted ones that its last chunk has reached (`leaves.UnlistedLeaves`), as the sweep gives them
            to autograd.
        initial: the tensors of the batch's states, and its embeddings if it has them in place of ids.
        model_states: the batch's states, one tuple per stage of the model; those of `batch` are one per stage
            that the engine runs.
        has_backward: whether a backward may follow, also if all parameters are frozen: see `grad_inputs`.
        windows: each layer's window, once they are picked.
        inputs_are_freed: whether a backward has begun that frees the inputs of segments as it reads them.
        executor, tapes, grid: the executor, the number of tapes that the forward keeps, and the program's
            grid as far as it is known; set by `_begin`.
        backward_actions: the backward's part of the program; set by the forward.
        untrained_tensors: tensors that are not trained, as the forward has left them.
    """

    executor: Executor
    grid: Grid
    tapes: int
    backward_actions: Collection[Action] = ()

    def __init__(
        self,
        stages: Sequence[Stage | None],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        sums: Sequence[Sum] = (),
        distribution: Distribution | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        self.distribution, self.sweep = distribution or Distribution(), sweep or Sweep()
        self.model_states = batch.states
        runs = self.distribution.runs(spec, stages)
        is_divided = spec.storage.keep != "edges" and self.distribution.is_alone
        length = (spec.storage.segment_layers or 1) if is_divided else None
        self.stages, states = self.sweep.arrange(stages, batch.states, runs, length)
        self.batch = batch = dataclasses.replace(batch, states=states)
        self.spec, self.width, self.sums = spec, width, sums
        self.local_stages = [stage for stage in self.stages if stage is not None]
        parameters = itertools.chain.from_iterable([stage.parameters() for stage in self.local_stages])
        self.parameters = list(dict.fromkeys(parameters))
        self.initial = [s for state in batch.states for s in state]
        self.initial += [batch.ids] if batch.ids.is_floating_point() else []
        self.grad_inputs, self.has_backward = self.parameters, torch.is_grad_enabled()
        self.windows: list[int] | None = None
        self.inputs_are_freed = False

    def verify(self) -> None:
        """Refuse layers that are not ours if chunks compute something else than the whole; on first use."""
        self.sweep.verify(self.stages, self.batch, self.spec, self.width, self.distribution)

    # --------------------------------------------------------------------------------------------- executor

    def _begin(self, in_turn: bool = False) -> None:
        """Make the executor, and count the tapes and the states that fit in memory.

        Args:
            in_turn: whether the processes have agreed on the chunks of all steps of the call.
        """
        if self.batch.ids.device.type == "cpu":
            memory.keep_freed_memory()
        begin = self.sweep.begin_in_turn if in_turn else self.sweep.begin
        self.spec = spec = begin(self.batch, self.spec, self.distribution)
        self.distribution.begin(self.stages, spec, self.batch.ids.device)
        self._make_executor()
        self.tapes = 0 if spec.backward.window == "auto" else spec.storage.tapes
        alone = self.distribution.is_alone  # a budget is one process's
        if spec.storage.memory is not None and alone and self.has_backward and self.parameters:
            grid, storage = self.grid, spec.storage
            sizes = [grid.tokens(c) for c in range(grid.chunks)]
            room = budget.room_for_chunks(
                spec.storage.memory, self.executor.slab_bytes(), self.batch.ids.device
            )
            attention_bytes = max(0.0, min(storage.attention_bytes, chunk_size.ATTENTION_SHARE * room))
            storage = dataclasses.replace(storage, attention_bytes=attention_bytes)
            room -= attention_bytes
            measured, state = self._measure_first_chunk(), self.executor.state_bytes()
            states = grid.chunks
            if grid.stores_inputs:
                self.tapes = budget.tapes_of_segments(room, measured, grid.chunks, state)
            else:
                self.tapes, states = budget.tapes_and_states(
                    room, measured, sizes, state, storage.checkpoints
                )
            bytes_in_one_chunk = (measured.tape + measured.backward_peak) * self.batch.seqlen / sizes[0]
            if storage.prefer_single_chunk and bytes_in_one_chunk <= room:
                spec = dataclasses.replace(spec, chunk_size=self.batch.seqlen)
                self.tapes = max(1, len(measured.columns))
            elif storage.checkpoints is None and states < grid.chunks - self.tapes:
                storage = dataclasses.replace(storage, checkpoints=states)
            self.spec = dataclasses.replace(spec, storage=storage)
            self._make_executor()
        agreed = self.distribution.agree(self.executor, self.spec, self.parameters, self.has_backward)
        if agreed is not self.grid:
            self._make_executor(agreed)

    def _make_executor(self, grid: Grid | None = None) -> None:
        """Make the executor of a grid; by default of the spec's, with cuts drawn if it drops by chance."""
        if grid is None:
            grid = self.distribution.grid(self.spec, self.batch.seqlen, self.stages)
            if self.spec.backward.drop_probability and self.has_backward:
                scale = self.distribution.adjoint_scale(self.spec, grid)
                grid = dataclasses.replace(grid, adjoint_scale=scale)
        self.grid, self.executor = grid, self._executor_of(grid)
        self.sweep.check(self.executor, self.has_backward)

    def _executor_of(self, grid: Grid) -> Executor:
        # Append-only states say whether they are trained: see `Past.anchored`.
        detached = [
            tuple(
                [
                    s.detach() if dim is None else s.detach().requires_grad_(s.requires_grad)
                    for s, dim in zip(
                        state, (None,) * len(state) if stage is None else stage.grows, strict=True
                    )
                ]
            )
            if state
            else ()
            for stage, state in zip(self.stages, self.batch.states, strict=True)
        ]
        gradients = self.sweep.gradients(self.parameters, self.has_backward, self.distribution.is_alone)
        # without tapes the backwards of other steps come first: each would hold sums until then
        if self.has_backward and self.spec.storage.tapes and not self.sweep.runs_back_in_forward:
            gradients.reserve(self.parameters)
        batch = dataclasses.replace(self.batch, ids=self.batch.ids.detach(), states=detached)
        connections, spec = self.distribution.connections(grid), self.spec
        if not self.has_backward:
            storage = dataclasses.replace(spec.storage, attention_bytes=0, increments=0)
            spec = dataclasses.replace(spec, storage=storage)
        return Executor(self.stages, grid, batch, spec, self.width, gradients, connections)

    def _measure_first_chunk(self) -> budget.ChunkMemory:
        """Return the first chunk's memory, measured by running it alone, once per model and kind of batch.

        A stage that draws random numbers draws those of this run again for the first chunk."""
        executor, ids = self.executor, self.batch.ids
        size = executor.grid.tokens(0)
        measurements = budget.measurements_of(self.parameters)
        trained = tuple(p.requires_grad for p in self.parameters)
        recompute = self.spec.storage.recompute
        dtypes = executor.lowest_precision, executor.autocast
        increments = self.spec.storage.increments
        kind = len(ids), size, ids.device, *dtypes, recompute, trained, executor.grid.segments, increments
        if kind not in measurements:
            in_segments = executor.grid.stores_inputs
            with budget.LiveBytes() as live:
                tapes = 0 if in_segments else 1
                storage = Storage(keep=self.spec.storage.keep, tapes=tapes, increments=increments)
                spec = EngineSpec(size, least=self.spec.least, storage=storage)
                first = dataclasses.replace(self.batch.chunk(0, size), states=executor.batch.states)
                distribution = _MeasuringTapes(live)
                with torch.enable_grad():
                    first_step = ChunkedStep(self.stages, first, spec, self.width, distribution=distribution)
                with torch.no_grad():
                    before = live.begin()
                    first_step._begin()
                    live_at_begin = live.live
                    loss, final = first_step._run_forward()
                    tape = live.live - live_at_begin
                    inputs = first_step.executor.input_bytes()
                    first_step._run_backward(torch.ones_like(loss), [None] * len(final))
                    peak = live.peak - before
                if not in_segments:
                    measurements[kind] = budget.ChunkMemory(tape, peak - tape)
                else:
                    columns = distribution.columns()
                    peak -= inputs + max(columns)
                    measurements[kind] = budget.ChunkMemory(sum(columns), peak, inputs, columns)
        return measurements[kind]

    # ------------------------------------------------------------------------------ as an autograd function

    def loss(self, states: bool = False) -> Result:
        """Run the forward; return the mean loss and the final states, differentiable.

        Args:
            states: whether append-only final states are returned; else they are empty: on the device they
                would take the memory that offloading them has saved.
        """
        loss, final = self.forward(return_final_kv=states)
        loss, *final = self.differentiable([loss, *final], lambda d, *d_final: self.backward(d, d_final))
        sums = final[len(final) - len(self.sums) :]
        return Result(loss, grouped(self.model_states, final), self.windows, sums, self.slabs)

    @property
    def slabs(self) -> Mapping[int, Sequence[Slab]]:
        """The keys and values that the forward has left, by stage; none if the backward is done already."""
        executor = getattr(self, "executor", None)
        return {} if executor is None else executor.slabs

    def differentiable(
        self,
        results: list[Tensor],
        back: Backward,
        more_inputs: Iterable[Tensor] = (),
        copied_inputs: Iterable[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Return the results of `forward`, differentiable by `back`; empty the list.

        Args:
            more_inputs: tensors that the stages read besides `initial`; `back` returns their cotangents last.
            copied_inputs: those of `more_inputs` whose values the backward reads from copies.
        """
        copied = {id(t) for t in copied_inputs}
        inputs = *self.grad_inputs, *self.initial, *more_inputs
        return _Chunked.apply(self, back, results, copied, *inputs)

    def drop_tapes(self) -> None:
        """Free the tapes that the forward has kept; the backward recomputes them."""
        executor = getattr(self, "executor", None)  # None if the backward is done already
        if executor is not None and any(key[0] == "tape" for key in executor.store):
            executor.begin_again({key: value for key, value in executor.store.items() if key[0] != "tape"})
            self.backward_actions = self._backward_program()

    @torch.no_grad()
    def forward(self, return_final_kv: bool = True) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss, and the final states and totals of the sums, not yet differentiable.

        Args:
            return_final_kv: as `states` of `loss`.
        """
        with unseen_by_checkpoint():
            self._begin()
            self.executor.begin_forward(return_final_kv)
            if not (self.has_backward and self.sweep.runs_back_in_forward):
                with self.sweep.running():
                    return self._run_forward()
            trained = [p for p in self.parameters if p.requires_grad]
            with self.sweep.collected(trained, self.distribution.has_chunk(self.grid)) as gradients:
                loss, final = self._run_forward()
                others, d_initial = self.run_back(loss, final)
            self.sweep.keep(gradients, others, d_initial, trained, self.distribution)
            return loss, final

    @torch.no_grad()
    def forward_in_turn(self, return_final_kv: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Return what `forward` does, of one of several steps whose backwards the caller runs (`run_back`).

        Args:
            return_final_kv: as `states` of `loss`.
        """
        with unseen_by_checkpoint():
            self._begin(in_turn=True)
            self.executor.begin_forward(return_final_kv)
            return self._run_forward()

    @torch.no_grad()
    def run_back(
        self,
        loss: Tensor,
        final: Sequence[Tensor],
        d_states: Sequence[Tensor | None] = (),
        is_last: bool = True,
    ) -> tuple[dict[Tensor, Tensor], list[Tensor | None]]:
        """Run the chunks back inside the forward, where the sweep does so, and free what they needed.

        Args:
            loss, final: results of the forward.
            d_states: cotangents of the final states, if steps have gone on from them.
            is_last: whether no other step of the call runs back after this one.

        Returns:
            The gradients of tensors that nobody gathers, and the cotangents of `initial`.
        """
        actions = [action for action in self.backward_actions if isinstance(action, Run)]
        chunks = [action.tile.chunk for action in actions if not action.tile.is_forward]
        start_of_last = self.grid.cuts[chunks[-1]] if chunks else 0
        d_loss, d_final = self.sweep.cotangents(loss, final, self.sums, start_of_last if is_last else None)
        d_final = [*d_states, *d_final[len(d_states) :]]
        with unseen_by_checkpoint():
            others, d_initial = self._run_backward(d_loss, d_final, graph_task=IN_FORWARD)
        del self.executor  # its stored states grow with the sequence
        return {t: d for t in self.grad_inputs if (d := others.get(t)) is not None}, d_initial

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Return the gradients of parameters, and the cotangents of `initial`.

        Args:
            d_loss: cotangent of the mean loss. d_final: of the final states and the totals of the sums.
        """
        self.distribution.check_same_scale(d_loss)
        if self.sweep.runs_back_in_forward:
            return self.sweep.scaled(d_loss, d_final, self.sums)
        with self.sweep.running():
            gradients, d_initial = self._run_backward(d_loss, d_final)
        self.sweep.finish(self.parameters, gradients)
        return gradients, d_initial

    def _run_forward(self) -> tuple[Tensor, list[Tensor]]:
        """Run the forward's part of the program; return what `forward` returns."""
        executor = self.executor
        schedule, forward_actions, self.backward_actions = self._cut_program()
        self._run(schedule, forward_actions)
        leaves = [*self.parameters, *executor.gradients.unlisted_leaves.close()]
        self.grad_inputs = self.sweep.autograd_inputs(leaves, executor.device)
        if self.has_backward:
            modules = [named for stage in self.local_stages for named in stage.modules()]
            self.untrained_tensors = UntrainedTensors(modules, not self.sweep.runs_back_in_forward)
        if executor.decays is not None:
            self._pick_windows()
            self.backward_actions = self._backward_program()
        total, states = self.distribution.results(executor, self.sums)
        # not the executor's own tensors: an autograd function that held its outputs would never be freed
        final = [s.detach() for state in states for s in state]
        return total / self.batch.divisor, final + [s.total for s in self.sums]

    def _run_backward(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None], graph_task: int | None = None
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Run the backward's part of the program; return what `backward` returns.

        Args:
            graph_task: as in `Executor.begin_backward`.
        """
        executor = self.executor
        for sequence_sum, d in zip(reversed(self.sums), reversed(d_final), strict=False):
            sequence_sum.cotangent = d
            if d_loss is None and d is not None:  # a sum's cotangent reaches stages by the loss's backward
                d_loss = d.new_zeros(())
        scale = None if d_loss is None else d_loss / self.batch.divisor
        if self.inputs_are_freed:
            raise UserError(
                "this backward was interrupted after it had freed what it needs: run the forward again, or "
                "begin with backward(retain_graph=True)"
            )
        # no second backward follows: inputs are freed as they are read
        self.inputs_are_freed = executor.grid.stores_inputs and frees_graph()
        freed = {"tape", "y", "dy"} if self.inputs_are_freed else {"tape"}
        stored_values = {key: value for key, value in executor.store.items() if key[0] not in freed}
        d_states, rounds_sums = grouped(self.batch.states, d_final), self.distribution.is_alone
        try:
            with self.sweep.backward_context(), self.untrained_tensors.restored():
                frees = self.inputs_are_freed
                executor.begin_backward(scale, d_states, self.grid, frees, rounds_sums, graph_task)
                if frees:
                    self._drop_unread_inputs()
                self._run(self._schedule(forward=False, tapes=0), self.backward_actions)
            d_initial = [d for state in executor.d_initial for d in state]
            embedded = self.batch.ids.is_floating_point()
            return self._summed(executor.gradients, d_initial + ([executor.d_ids] if embedded else []))
        finally:  # ready for a second backward, also after an interrupt
            executor.begin_again(stored_values)
            self.backward_actions = self._backward_program()

    def _drop_unread_inputs(self) -> None:
        """Drop inputs of segments that the backward neither reads nor sends: those of tapes that are kept."""
        executor = self.executor
        tiles = [action.tile for action in self.backward_actions if isinstance(action, Run)]
        read = {key for tile in tiles for key in executor.grid.reads(tile)}
        read |= {action.key for action in self.backward_actions if isinstance(action, Send)}
        for key in [key for key in executor.store if key[0] == "y" and key not in read]:
            executor.drop(key)

    def _summed(
        self, gradients: Gradients, d_initial: list[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]:
        """Return gradients and cotangents summed over the workers with the same stages."""
        listed = self.parameters

        def zeros(i: int) -> Tensor:
            if i < len(listed):
                return torch.zeros_like(listed[i], dtype=accumulate_dtype(listed[i].dtype))
            return torch.zeros_like(self.initial[i - len(listed)])

        terms = [*map(gradients.sums.get, listed), *d_initial]
        totals = self.distribution.summed(terms, zeros)
        if totals is terms:  # nobody else has these stages
            return gradients, d_initial
        gradients.replace({p: total for p, total in zip(listed, totals, strict=False) if total is not None})
        return gradients, list(totals[len(listed) :])

    def chunk_losses(self) -> list[Tensor]:
        """Run the forward alone; return the summed loss of each chunk."""
        self.forward()
        losses = self.executor.losses
        return list(losses.select(sorted(losses.written)).unbind())

    # --------------------------------------------------------------------------------------- without autograd

    def accumulate(self, divisor: float = 1, return_final_kv: bool = False) -> Executor:
        """Run the whole program, or without gradients that of the forward, as a loop of its own needs it.

        Args:
            divisor: of the mean loss, whose cotangent it divides.
            return_final_kv: as `states` of `loss`.

        Returns:
            The executor, which holds this worker's share of the summed loss, its stages' final states and the
            sums of its gradients.
        """
        self._begin()
        executor = self.executor
        executor.begin_forward(return_final_kv)
        unit = torch.ones((), dtype=executor.accumulate_dtype, device=executor.device)
        scale = unit / divisor / self.batch.divisor
        executor.begin_backward(scale)
        if not self.has_backward:
            self._run(self._schedule(backward=False, tapes=0))
        elif executor.decays is None:
            self._run(self._schedule(tapes=self.tapes))
        else:
            schedule = self._schedule(backward=False, tapes=0)
            actions = schedule.programs[self.distribution.worker]
            self._run(schedule, [dataclasses.replace(a, frees=()) for a in actions])
            self._pick_windows()
            executor.begin_backward(scale, grid=self.grid)
            self._run(self._schedule(forward=False, tapes=0))
        return executor

    # --------------------------------------------------------------------------------------------- programs

    def _schedule(self, *, forward: bool = True, backward: bool = True, tapes: int) -> Schedule:
        return self.distribution.schedule(
            self.spec, self.grid, forward=forward, backward=backward, tapes=tapes
        )

    def _backward_program(self) -> Collection[Action]:
        return self._schedule(forward=False, tapes=0).programs[self.distribution.worker]

    def _cut_program(self) -> tuple[Schedule, Collection[Action], Collection[Action]]:
        """Return the schedule of the forward, its actions, and those of the backward that follows it."""
        grid, worker = self.grid, self.distribution.worker
        again = self._schedule(forward=False, tapes=0) if self.has_backward else None
        if grid.has_windows and not self.distribution.is_alone:
            # inputs of other ranks' windows travel in the backward alone: there may be none
            schedule = self._schedule(backward=False, tapes=0)
            later = () if again is None else again.programs[worker]
            return schedule, keep_for(grid, schedule.programs[worker], later), later
        schedule = self._schedule(backward=self.has_backward, tapes=self.tapes)
        # with checkpoints a backward computes all that it reads, from the state before the sequence
        reads = again if grid.checkpoints is None else None
        forward_actions, backward_actions = forward_and_backward(schedule, worker, reads)
        if self.has_backward and self.spec.backward.window == "auto":  # any of it may be read
            forward_actions = [dataclasses.replace(a, frees=()) for a in forward_actions]
        return schedule, forward_actions, backward_actions

    def _run(self, schedule: Schedule, actions: Collection[Action] | None = None) -> None:
        """Run this worker's program of a schedule, or those of its actions that are given."""
        if actions is None:
            actions = schedule.programs[self.distribution.worker]
        with self.distribution.running(schedule, lambda: self._executor_of(self.grid)):
            self.executor.run(actions)

    def _pick_windows(self) -> None:
        """Pick each layer's window by the decays that the forward has noted; set the backward's grid."""
        assert self.executor.decays is not None
        tolerance, seqlen = self.spec.backward.tolerance, self.batch.seqlen
        widths = [
            0 if stage is None else decays.window(tolerance, seqlen)
            for stage, decays, stateful in zip(
                self.stages, self.executor.decays, self.grid.stateful, strict=True
            )
            if stateful
        ]
        self.windows = self.distribution.windows(self.sweep.windows(widths))
        self.grid = self.distribution.grid(self.spec, seqlen, self.stages, self.windows)


def grouped(states: Sequence[State], flat: Sequence[T]) -> list[tuple[T, ...]]:
    """Return the flat list as tuples, one per state and of its length."""
    rest = iter(flat)
    return [tuple(itertools.islice(rest, len(state))) for state in states]
