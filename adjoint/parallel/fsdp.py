"""Training by chunks of models whose layers `fully_shard` (FSDP2) has sharded over processes.

FSDP gathers parameters and reduces gradients in hooks around modules' forwards and backwards. So each chunk
runs a forward and a backward as FSDP expects them: with the modules' own parameters, to whose `.grad`
autograd adds. That cannot happen inside another backward. Therefore the chunks' backwards follow at once,
inside the model's forward; their gradients wait for the factor that the loss's own backward brings."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import custom_layers, tile
from adjoint.engine.budget import refuse_budget
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec
from adjoint.engine.host_weights import device_of, mesh_device
from adjoint.engine.layer_run import as_runs
from adjoint.engine.leaves import UnlistedLeaves, leaves_of, suspend_hooks
from adjoint.engine.parameter_access import ContextFactory, ParameterAccess, Runs
from adjoint.engine.schedule import Run
from adjoint.engine.stage import Layer, Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.engine.verification import (
    COARSE,
    TOKENS,
    Results,
    Trial,
    embeddings_rounded,
    recorded_outputs,
    tolerance,
    verified_kinds,
    verify,
)
from adjoint.errors import UserError
from adjoint.kernels.precision import full_float32
from adjoint.layers import State
from adjoint.parallel.context import SINGLE_RANK, distribution_of
from adjoint.parallel.split_tensors import dtensors, imported_class

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")
UNDER_FSDP = (
    "layers under fully_shard gather their weights in all processes of its mesh at once, and ranks of a "
    "group run chunks of their own: give fully_shard a mesh with one rank of each group, such as "
    'mesh["data"] of a mesh ("data", "sequence"), use DistributedDataParallel, or fully_shard the model alone'
)


def units(model: nn.Module) -> list[Any]:
    """Return the modules of a model for which `fully_shard` was called."""
    kind = imported_class("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)] if kind else []


def uses_fsdp(model: nn.Module) -> bool:
    """Whether FSDP gathers parts of the model one by one.

    A model that is a single unit has all its parameters during a call, and runs like any other."""
    return any(unit is not model for unit in units(model))


def reshard(model: nn.Module) -> None:
    """Put a sharded model's shards back in place of gathered parameters: gradients accumulate in the shards.

    It asks for a state dict, which makes FSDP do this; `FSDPModule.reshard` would skip a root during its
    forward."""
    if uses_fsdp(model):
        model.state_dict(keep_vars=True)


_gathered: WeakKeyDictionary[nn.Module, set[Tensor]] = WeakKeyDictionary()


def gathered_parameters(root: nn.Module) -> set[Tensor]:
    """Return a sharded model's gathered parameters, as its modules see them; FSDP never replaces these."""
    if root not in _gathered:
        parameters = _gathered[root] = set()
        reshard(root)  # some may be gathered now
        shards = set(root.parameters())
        for unit in units(root):
            unit.unshard()
            parameters |= set(unit.parameters()) - shards  # under tensor parallelism they are DTensors too
            unit.reshard()
        reshard(root)
    return _gathered[root]


def largest(model: nn.Module, *values: float) -> list[float]:
    """Return the maximum of each value over the processes that share the model."""
    mesh = dtensors(model)[0].device_mesh
    maxima = torch.tensor(values, dtype=torch.float64, device=mesh_device(mesh))
    for dim in range(mesh.ndim):
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return maxima.tolist()


class Gathering:
    """A runner of code as a forward of a sharded model's root, for FSDP alone: users' hooks are not called.

    Args:
        root: the outermost module for which `fully_shard` was called; without one, each layer is a root.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root: Any = root

    def __call__(self, call: Callable[[], T]) -> T:
        """Run `call` and return its result, whose backward must begin at the result or its first entry."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        if "_adjoint_run" in self.root.__dict__:  # already inside the root's forward
            return call()
        results: list[T] = []

        def run() -> Any:
            results.append(call())
            return results[0][0] if isinstance(results[0], tuple) else results[0]

        self.root.__dict__["_adjoint_run"] = lambda run: run()
        try:
            register_fsdp_forward_method(self.root, "_adjoint_run")
            with warnings.catch_warnings():  # layers return states that are views; nobody writes to them
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
                self.root._adjoint_run(run)
        finally:
            del self.root.__dict__["_adjoint_run"]
        return results[0]


def gradients(
    root: nn.Module, parameters: Sequence[Tensor], run: Callable[[], object], has_work: bool = True
) -> dict[Tensor, Tensor]:
    """Return the gradients that `run`, forwards and backwards of a sharded model, gives its parameters.

    Their `.grad` stays as it was; hooks on its accumulation are not called.

    Args:
        has_work: False if there is nothing to run here, nor in any process that has a shard of the model.

    Raises:
        UserError: FSDP has not reduced the gradients.
    """
    before: list[tuple[Any, Any, Any]] = []
    try:
        for p in parameters:
            hooks: Any = p._post_accumulate_grad_hooks
            before.append((p, p.grad, hooks))
            p.grad, p._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]
        run()
        for recover in (_reduce, _refuse):
            if has_work and parameters and all(p.grad is None for p in parameters):
                recover(root)
        return {p: p.grad for p in parameters if p.grad is not None}
    finally:
        reshard(root)  # parameters stay gathered after set_reshard_after_backward(False)
        for p, gradient, hooks in before:
            p.grad, p._post_accumulate_grad_hooks = gradient, hooks


def reduce_at_once(root: nn.Module) -> None:
    """Make FSDP reduce gradients in the backward of a plain call.

    This overrides `set_requires_gradient_sync(False)`: unreduced ones would count for a later call by
    chunks."""
    if "_adjoint_run" not in root.__dict__:
        for unit in units(root):
            unit.set_requires_gradient_sync(True, recurse=False)


def _reduce(root: Any) -> None:
    """Reduce the gradients that FSDP has summed since `set_requires_gradient_sync(False)`.

    This takes a forward and a backward of its root, without any work."""
    if root in units(root):
        root.set_requires_gradient_sync(True)
        try:
            with torch.enable_grad():
                nothing = torch.zeros((), device=device_of(root), requires_grad=True)
                Gathering(root)(lambda: nothing.clone()).backward()
        finally:
            root.set_requires_gradient_sync(False)


def set_all_reduce(root: nn.Module, is_on: bool) -> None:
    """Set whether backwards sum gradients over replicas (HSDP), after the shards of each replica are summed.

    Sums that were left out are in the next one: once per call is enough."""
    for unit in units(root):
        unit.set_requires_all_reduce(is_on, recurse=False)


def refuse_gradients_left_out(root: nn.Module) -> None:
    """Refuse a model of which a module was used by some chunks and not by the last one whose backward ran.

    Raises:
        UserError: its gradients have not been summed over replicas.
    """
    names = (
        name for name, module in root.named_modules() if module in units(root) and _holds_partial(module)
    )
    if (name := next(names, None)) is not None:
        raise UserError(
            f"fully_shard of {name or 'the model'} over replicas: it has run in some chunks and not in the "
            "first, so its gradients are not summed; call fully_shard for a module around it instead"
        )


def _holds_partial(unit: FSDPModule) -> bool:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(getattr(group, "_partial_reduce_output", None) is not None for group in groups)


def _refuse(root: Any) -> None:
    raise UserError(
        "FSDP did not reduce the gradients of a chunk's backward: call fully_shard for the whole model "
        "too, and leave set_requires_all_reduce and set_is_last_backward at their defaults"
    )


class ShardedModelStage(Stage):
    """A sharded model as one stage; to what shards it each chunk is a forward and a backward of the model.

    Args:
        stage: the model as a stage; its forward may also be called with gradients on.
        access: runs chunks, and their backwards.

    Attributes:
        start_of_last: the first token of the chunk whose backward is this process's last.
    """

    stateful: ClassVar[bool] = True
    takes_state_handoff: ClassVar[bool] = True
    is_many_layers: ClassVar[bool] = True

    def __init__(self, stage: Stage, access: GatheredAccess) -> None:
        self.stage, self.access = stage, access
        self.start_of_last = 0

    @property
    def grows(self) -> tuple[int | None, ...]:
        return self.stage.grows

    @property
    def fetches(self) -> bool:
        return self.stage.fetches

    @property
    def precisions(self) -> set[torch.dtype]:
        """Dtypes of the gathered parameters, which may differ from the shards'."""
        return self.access.gathered_precisions()

    def parameters(self) -> Iterable[Tensor]:
        return self.stage.parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.stage.modules()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.access.run(lambda: self.stage.forward(x, state, chunk))

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.access.run(lambda: self.stage.advance(x, state, chunk))

    def forget(self, start: int) -> None:
        self.stage.forget(start)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        y, after, pullback = tile.linearize(
            lambda _, x, state: self.forward(x, state, chunk), (), x, state, gradients
        )

        def pull_back(dy: Tensor | None, d_state: Cotangents) -> tuple[Tensor | None, Cotangents]:
            is_last = chunk.start == self.start_of_last
            return self.access.run_backward(lambda: pullback(dy, d_state), is_last)

        return y, after, pull_back


class _AutogradGradients(Gradients):
    """Sums that leave parameters' gradients to autograd, which adds them to `.grad`."""

    def vjp(self, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Cotangents:
        tile.seeded(pairs).backward()
        return tuple(t.grad for t in inputs)


class GatheredAccess(ParameterAccess):
    """Weights that are gathered for each chunk's forward and backward, which follow at once.

    The step's forward computes the gradients; its backward multiplies them by the loss's factor. In a group
    that shares the sequence, gradients are reduced among processes that run the same chunks; once all have
    run, they are summed over the group. The layers of a `Stack` run as one stage by any method: to what
    shards the stack, a chunk is a forward of it.
    """

    is_collective: ClassVar[bool] = True
    runs_backward_in_forward: ClassVar[bool] = True
    is_on_device: ClassVar[bool] = False  # a weight is there while its layer runs
    frozen_may_change: ClassVar[bool] = False  # what gathers writes, and nobody else can before the backward
    stage: ShardedModelStage
    parts: Sequence[Stage]
    layers: Sequence[Layer]

    def __init__(
        self,
        model: nn.Module | None = None,
        root: nn.Module | None = None,
        backward_context: ContextFactory = contextlib.nullcontext,
    ) -> None:
        super().__init__(model, root)  # chunks run back inside the forward: nothing has changed since
        self.gradients_of_forward: dict[Tensor, Tensor] | None = None
        self.factor = 1.0  # of the loss, in these gradients
        self.d_initial: list[Tensor | None] = []

    # ------------------------------------------------------------------- what differs between kinds of shards

    def gathered_parameters(self) -> set[Tensor]:
        """Return the parameters as modules see them while they run."""
        raise NotImplementedError

    def gathered_precisions(self) -> set[torch.dtype]:
        """Return the dtypes of `gathered_parameters`."""
        return {p.dtype for p in self.gathered_parameters()}

    def run_backward(self, call: Callable[[], T], is_last: bool) -> T:
        """Return the result of `call`, a chunk's backward; `is_last`: no other of the step follows."""
        return call()

    def gradients_of(
        self, parameters: Sequence[Tensor], run: Callable[[], object], has_work: bool = True
    ) -> dict[Tensor, Tensor]:
        """Return the gradients that forwards and backwards give parameters, reduced; `.grad` stays as it was.

        Args:
            run: runs them. has_work: False if no process that has a shard of the model has any.
        """
        raise NotImplementedError

    def loss_factor(self) -> float:
        """Return the factor of the loss in the chunks' backwards, by which gradients are divided later."""
        return 1.0

    def hand_over(self, gradients: Gradients) -> None:
        """Take the gradients that autograd cannot hand to parameters out of the sums, and hand them over."""

    # ------------------------------------------------------------------------------------ common to all kinds

    def precisions(self) -> set[torch.dtype]:
        return super().precisions() | self.gathered_precisions()

    def can_copy(self) -> bool:
        return False

    def loss_and_gradients(
        self, parameters: Sequence[Tensor], compute_loss: Callable[[], Tensor]
    ) -> tuple[float, dict[Tensor, Tensor]]:
        """Return a loss and gradients, reduced in a backward of the model's own parameters."""
        losses: list[Tensor] = []

        def run() -> None:
            losses.append(compute_loss())
            if losses[0].requires_grad:
                self.backpropagate(losses[0])

        by_parameter = self.gradients_of(self.trained_parameters(), run)
        return float(losses[0].detach()), by_parameter

    def backpropagate(self, loss: Tensor) -> None:
        """Backpropagate a loss, adding to the gradients of the model's own parameters alone."""
        model_parameters = self.gathered_parameters() | set(self.root.parameters())
        others = [t for t in leaves_of([loss]) if t not in model_parameters]
        with suspend_hooks(others):
            loss.backward(retain_graph=bool(others))  # for the call that follows

    def arrange(
        self,
        stages: Sequence[Stage | None],
        states: Sequence[State],
        runs: Sequence[int],
    ) -> tuple[list[Stage | None], Sequence[State]]:
        self.parts = [stage for stage in stages if stage is not None]
        self.layers = [stage for stage in self.parts if isinstance(stage, Layer)]
        if self.layers:
            stages, states = as_runs(stages, states, [0] * len(stages))
        first, *others = stages
        assert first is not None
        self.stage = ShardedModelStage(first, self)
        return [self.stage, *others], states

    def verify(self, step: Runs) -> None:
        """Compare a stack's gradients by chunks with those of plain autograd, on first use.

        A stack has layers that need not be ours; other models are verified by what wraps them."""
        if not self.layers:
            return
        device, group = step.batch.ids.device, SINGLE_RANK if step.distribution.shares_sequence else None
        dtype = next(self.model.parameters()).dtype
        kind = (*(custom_layers.kind_of(layer, dtype, device) for layer in self.layers), group)
        verified = verified_kinds(self.model)
        if kind in verified or not torch.is_grad_enabled():
            return
        stages, width = self.parts, step.width

        def step_of(batch: Batch, spec: EngineSpec) -> ChunkedStep:
            access, distribution = type(self)(self.model), distribution_of(group)
            return ChunkedStep(stages, batch, spec, width, distribution=distribution, access=access)

        _verify_stack(self, step_of, device)
        verified.add(kind)

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Refuse what cannot be done; return the spec with as many chunks as any process has.

        Raises:
            UserError: processes that have shards of the same weights are at different places of their groups.
        """
        if distribution.shares_sequence:
            place, group_size = distribution.worker, distribution.ranks
            low, high, fewest, most = self.largest(-place, place, -group_size, group_size)
            if -low != high or -fewest != most:
                raise UserError(
                    "sequence_group: processes that have shards of the same weights must have the same "
                    "rank in their groups, and the groups one size: make both from one mesh, "
                    '("data", "sequence")'
                )
        backward = spec.backward
        if backward.window is not None or backward.drop_probability or backward.dy_from != "above":
            raise UserError(f"Truncated and LayerLocal do not run on a stack under {self.name}: use Exact()")
        refuse_budget(spec.storage.memory, f"under {self.name} all processes")
        if spec.storage.checkpoints is not None and self.largest(len(spec.documents))[0] > 1:
            raise UserError(
                f"checkpoints= computes states again from the start of a document, but under {self.name} all "
                "processes must run the same chunks, and their documents differ: leave it out, or give one "
                "document per row"
            )
        self.rest()
        return self._align_chunks(batch, spec)

    def _align_chunks(self, batch: Batch, spec: EngineSpec) -> EngineSpec:
        """Return the spec with the most chunks of any process: all gather parameters per chunk."""
        cuts = list(spec.cuts(batch.seqlen))
        possible = sum(max(1, (stop - start) // spec.least) for start, stop in itertools.pairwise(cuts))
        most_chunks, negative_limit = self.largest(len(cuts) - 1, -possible)
        if most_chunks > -negative_limit:
            raise UserError(
                f"one process has {most_chunks:.0f} chunks, and another's sequence can be divided into "
                f"{-negative_limit:.0f} at most: give the processes sequences of more "
                "similar lengths, or a larger chunk_size"
            )
        while len(cuts) - 1 < most_chunks:
            size, start = max((stop - start, start) for start, stop in itertools.pairwise(cuts))
            cuts = sorted([*cuts, start + size // 2])
        return dataclasses.replace(spec, cut_at=tuple(cuts[1:-1]))

    def gradients(self, parameters: Sequence[Tensor], has_backward: bool, is_alone: bool) -> Gradients:
        left_to_autograd = self.gathered_parameters() | set(parameters)
        return _AutogradGradients(
            UnlistedLeaves(left_to_autograd=left_to_autograd, open=has_backward and is_alone)
        )

    def forward(self, step: Runs) -> tuple[Tensor, list[Tensor]]:
        """Run forward and backward; keep the gradients for the factor that the loss's backward brings."""
        if not step.has_backward:
            return step.run_forward()
        results: list[tuple[Tensor, list[Tensor], Gradients]] = []

        def run() -> None:
            loss, final = step.run_forward()
            chunks = [
                a.tile.chunk for a in step.backward_actions if isinstance(a, Run) and not a.tile.is_forward
            ]
            self.stage.start_of_last = step.grid.cuts[chunks[-1]] if chunks else 0
            states = len(final) - len(step.sums)
            totals = zip(step.sums, final[states:], strict=True)
            d_sums = [sequence_sum.cotangent_of(total) for sequence_sum, total in totals]
            factor = self.factor = self.loss_factor()
            d_final = [*[None] * states, *(None if d is None else d * factor for d in d_sums)]
            others, self.d_initial = step.run_backward(torch.full_like(loss, factor), d_final)
            results.append((loss, final, others))

        trained = [p for p in step.parameters if p.requires_grad]
        distribution = step.distribution
        grads = self.gradients_of(trained, run, distribution.has_chunk(step.grid))
        if distribution.shares_sequence:
            self._sum(distribution, trained, grads)
        step.drop_executor()
        loss, final, others = results[0]
        self.gradients_of_forward = grads | {
            t: d for t in step.grad_inputs if (d := others.get(t)) is not None
        }
        return loss, final

    def _sum(
        self, distribution: Distribution, parameters: Sequence[Tensor], grads: dict[Tensor, Tensor]
    ) -> None:
        """Sum gradients over a group."""
        terms = [grads.get(p) for p in parameters]
        totals = distribution.summed(terms, lambda i: torch.zeros_like(parameters[i]))
        grads |= {p: total for p, total in zip(parameters, totals, strict=True) if total is not None}

    def backward(
        self, step: Runs, d_loss: Tensor | None, d_final: Sequence[Tensor | None]
    ) -> tuple[Gradients, list[Tensor | None]]:
        states = len(d_final) - len(step.sums)
        if any(d is not None for d in d_final[:states]):
            raise UserError(
                f"under {self.name} gradients are computed before the final state's is known: detach the "
                "final state"
            )
        if self.gradients_of_forward is None:
            raise RuntimeError(f"under {self.name} a loss can be backpropagated only once")
        scaled, unscaled, self.gradients_of_forward = Gradients(), self.gradients_of_forward, None
        scale = 0.0 if d_loss is None else float(d_loss) / self.factor
        high, low = self.largest(scale, -scale)
        if high != -low:
            raise UserError(
                f"the loss is multiplied by {-low:g} on one process and by {high:g} on another, but its "
                "gradients are averaged already: give num_items_in_batch to the model instead"
            )
        for sequence_sum, d in zip(step.sums, d_final[states:], strict=True):
            assert sequence_sum.cotangent is not None
            expected = scale * sequence_sum.cotangent
            if not torch.allclose(
                torch.zeros_like(expected) if d is None else d, expected, rtol=1e-4, atol=0
            ):
                raise UserError(
                    f"under {self.name} aux_loss has the factor that it has in the model's loss: "
                    "backpropagate that loss, not aux_loss by itself or with another factor"
                )
        for p in list(unscaled):
            scaled.sums[p] = unscaled.pop(p).mul_(scale)
        self.hand_over(scaled)
        return scaled, [None if d is None else d * scale for d in self.d_initial]


class FSDPAccess(GatheredAccess):
    """Weights that FSDP2 gathers."""

    name: ClassVar[str] = "fully_shard"

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return uses_fsdp(model)

    def rest(self) -> None:
        reshard(self.model)

    def gathered_parameters(self) -> set[Tensor]:
        return gathered_parameters(self.root)

    def run(self, call: Callable[[], T]) -> T:
        return Gathering(self.root)(call)

    def run_backward(self, call: Callable[[], T], is_last: bool) -> T:
        set_all_reduce(self.root, is_last)
        return call()

    def gradients_of(
        self, parameters: Sequence[Tensor], run: Callable[[], object], has_work: bool = True
    ) -> dict[Tensor, Tensor]:
        try:
            by_parameter = gradients(self.root, parameters, run, has_work)
            refuse_gradients_left_out(self.root)
        finally:
            set_all_reduce(self.root, True)
        return by_parameter

    def begin_plain_call(self) -> None:
        reduce_at_once(self.root)

    def largest(self, *values: float) -> list[float]:
        return largest(self.model, *values)

    def why_not_shared(self, group: object) -> str | None:
        """Return why the ranks of a group cannot share a sequence of a sharded model; None if they can.

        A layer's weights are gathered by all processes that have a shard of it at the same time, so these
        must run the same chunks: they must be ranks of different groups."""
        members = set(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else set()
        meshes = (set(p.device_mesh.mesh.flatten().tolist()) for p in dtensors(self.model))
        return UNDER_FSDP if any(len(members & mesh) > 1 for mesh in meshes) else None

    def check(self, executor: Executor, has_backward: bool) -> None:
        dtypes = self.gathered_precisions() | {executor.lowest_precision}
        if has_backward and (torch.float16 in dtypes or executor.autocast == (True, torch.float16)):
            raise UserError(
                "float16 under fully_shard: gradients are computed before a GradScaler has scaled the "
                "loss, so that small ones would be lost; use bfloat16"
            )


class FSDPUnitAccess(ParameterAccess):
    """Weights of a model for which alone `fully_shard` was called: they are there for the time of a call."""

    name: ClassVar[str] = "fully_shard"

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return bool(units(model)) and not uses_fsdp(model)

    def can_copy(self) -> bool:
        return False


@full_float32()
def _verify_stack(
    access: GatheredAccess, step_of: Callable[[Batch, EngineSpec], ChunkedStep], device: torch.device
) -> None:
    """Compare the gradients of a few tokens computed by chunks with those of plain autograd.

    Raises:
        Refused: they differ, in this process or another.
    """
    stack: Any = access.model
    parameters = access.trained_parameters()
    names = [name for name, p in stack.named_parameters() if p.requires_grad]
    layers = {f"layers.{k}": layer for k, layer in enumerate(stack.layers)}
    ids = torch.arange(TOKENS, device=device)[None] % stack.config.vocab_size

    def loss_by_chunks() -> Tensor:
        batch = Batch.from_labels(ids, ids, states=stack.stage_states(stack.initial_state(1)))
        return step_of(batch, EngineSpec(custom_layers.CHUNK_SIZE)).loss().loss

    def loss_by_autograd() -> Tensor:
        return access.run(lambda: type(stack).forward(stack, ids, labels=ids).loss)

    def results(compute_loss: Callable[[], Tensor]) -> Results:
        with recorded_outputs(layers) as hidden_states:
            loss, grads = access.loss_and_gradients(parameters, compute_loss)
        by_name = {name: grads.get(p) for name, p in zip(names, parameters, strict=True)}
        return Results(by_name, loss, hidden_states=hidden_states)

    def run_whole(is_rounded: bool) -> Results:
        rounded = embeddings_rounded(stack.embedding) if is_rounded else contextlib.nullcontext()
        with rounded:
            return results(loss_by_autograd)

    limit = tolerance([*access.precisions()], device)
    trial = Trial(
        f"a stack under {access.name}",
        custom_layers.CUSTOM_LAYER,
        lambda: results(loss_by_chunks),
        limit,
        each_gradient=limit != COARSE,
        named_parameters=stack.named_parameters,
        run_whole=run_whole if limit == COARSE else None,
        largest_over_ranks=access.largest,
    )
    verify(trial, results(loss_by_autograd))
