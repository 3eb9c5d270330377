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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Layer, Stage, StageAround
from adjoint.engine.step import ChunkedStep
from adjoint.engine.sweep import ContextFactory, Sweep
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
from adjoint.engine.weights import Weights, precisions, trained_parameters
from adjoint.errors import UserError
from adjoint.kernels.precision import full_float32
from adjoint.layers import State
from adjoint.parallel.context import SINGLE_RANK, distribution_of
from adjoint.parallel.split_tensors import dtensors, imported_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
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


_meshes: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()


def mesh_of(model: nn.Module) -> DeviceMesh:
    """Return the mesh of the processes that share a sharded model."""
    if model not in _meshes:
        if not dtensors(model):  # all are gathered now
            reshard(model)
        _meshes[model] = dtensors(model)[0].device_mesh
    return _meshes[model]


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


@contextlib.contextmanager
def collected_gradients(
    root: nn.Module, parameters: Sequence[Tensor], has_work: bool = True
) -> Iterator[dict[Tensor, Tensor]]:
    """Collect the gradients that forwards and backwards of a sharded model give its parameters.

    They are in the dict once the context has ended. The parameters' `.grad` stays as it was; hooks on its
    accumulation are not called.

    Args:
        has_work: False if there is nothing to run here, nor in any process that has a shard of the model.

    Raises:
        UserError: FSDP has not reduced the gradients.
    """
    before: list[tuple[Any, Any, Any]] = []
    by_parameter: dict[Tensor, Tensor] = {}
    try:
        for p in parameters:
            hooks: Any = p._post_accumulate_grad_hooks
            before.append((p, p.grad, hooks))
            p.grad, p._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]
        yield by_parameter
        for recover in (_reduce, _refuse):
            if has_work and parameters and all(p.grad is None for p in parameters):
                recover(root)
        by_parameter.update((p, p.grad) for p in parameters if p.grad is not None)
    finally:
        reshard(root)  # parameters stay gathered after set_reshard_after_backward(False)
        for p, gradient, hooks in before:
            p.grad, p._post_accumulate_grad_hooks = gradient, hooks


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


@contextlib.contextmanager
def inside_forward(root: nn.Module) -> Iterator[None]:
    """Gather at the end what a forward of a sharded model, inside which the context is, has gathered.

    What runs in the context may put weights to rest."""
    states = ((unit, unit._get_fsdp_state()._training_state) for unit in units(root))
    running = [unit for unit, state in states if state.name == "FORWARD"]
    yield
    for unit in running:
        unit.unshard()


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


def all_gathered(model: nn.Module) -> bool:
    """Whether all parameters that `fully_shard` shards are gathered now."""
    return all(all(_of_groups(unit, "is_unsharded")) for unit in units(model))


def _of_groups(unit: FSDPModule, attribute: str) -> list[object]:
    """Return an attribute of FSDP's groups of the parameters of one module; None where a group has none."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [getattr(group, attribute, None) for group in groups if group is not None]


def _holds_partial(unit: FSDPModule) -> bool:
    return any(output is not None for output in _of_groups(unit, "_partial_reduce_output"))


def _refuse(root: Any) -> None:
    raise UserError(
        "FSDP did not reduce the gradients of a chunk's backward: call fully_shard for the whole model "
        "too, and leave set_requires_all_reduce and set_is_last_backward at their defaults"
    )


class ShardedModelStage(StageAround):
    """A sharded model as one stage; to what shards it each chunk is a forward and a backward of the model.

    Args:
        stage: the model as a stage; its forward may also be called with gradients on.
        weights: run chunks, and their backwards.

    Attributes:
        start_of_last: the first token of the chunk whose backward is this process's last; None if another
            step has it.
    """

    takes_state_handoff = True

    def __init__(self, stage: Stage, weights: GatheredWeights) -> None:
        super().__init__(stage)
        self.stateful = self.is_many_layers = True
        self.weights = weights
        self.start_of_last: int | None = 0

    @property
    def precisions(self) -> set[torch.dtype]:
        """Dtypes of the gathered parameters, which may differ from the shards'."""
        return {p.dtype for p in self.weights.running_parameters()}

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.weights.run(lambda: self.stage.forward(x, state, chunk))

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.weights.run(lambda: self.stage.advance(x, state, chunk))

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(_: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            with _gradients_from(self.weights.model, state):
                return self.forward(x, state, chunk)

        y, after, pullback = tile.linearize(call, (), x, state, gradients)

        def pull_back(dy: Tensor | None, d_state: Cotangents) -> tuple[Tensor | None, Cotangents]:
            is_last = chunk.start == self.start_of_last
            return self.weights.run_backward(lambda: pullback(dy, d_state), is_last)

        return y, after, pull_back


@contextlib.contextmanager
def _gradients_from(model: nn.Module, state: State) -> Iterator[None]:
    """Let hidden states depend on the state before the chunk, from a frozen embedding on, by adding zero.

    Gathering and reducing begin in hooks of modules whose outputs get a gradient. Above frozen weights, these
    would be those of chunks that read a state, and not of a document's first: processes that are at different
    places of their documents would not meet."""
    leaf = next((s for s in state if isinstance(s, Tensor) and s.requires_grad and s.numel()), None)
    get_embedding = getattr(model, "get_input_embeddings", lambda: getattr(model, "embedding", None))
    embedding = get_embedding()
    if leaf is None or not isinstance(embedding, nn.Module):
        yield
        return
    zero = 0 * leaf.flatten()[0]

    def depend(_: nn.Module, __: object, y: object) -> object:
        return y if not isinstance(y, Tensor) or y.requires_grad else y + zero.to(y)

    with embedding.register_forward_hook(depend):
        yield


class _AutogradGradients(Gradients):
    """Sums that leave parameters' gradients to autograd, which adds them to `.grad`."""

    def vjp(self, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Cotangents:
        tile.seeded(pairs).backward()
        return tuple(t.grad for t in inputs)


class GatheredWeights(Weights):
    """Weights that are gathered for each chunk's forward and backward, which follow at once.

    In a group that shares the sequence, gradients are reduced among processes that run the same chunks; once
    all have run, they are summed over the group (`GatheredSweep`)."""

    is_gathered: ClassVar[bool] = True
    can_copy: ClassVar[bool] = False

    def run_backward(self, call: Callable[[], T], is_last: bool) -> T:
        """Return the result of `call`, a chunk's backward; `is_last`: no other of the step follows."""
        return call()

    def collected(
        self, parameters: Sequence[Tensor], has_work: bool = True
    ) -> contextlib.AbstractContextManager[dict[Tensor, Tensor]]:
        """Return a context that collects the reduced gradients of forwards and backwards in it.

        They are in its dict at the end; `.grad` stays as it was.

        Args:
            has_work: False if no process that has a shard of the model has any.
        """
        raise NotImplementedError

    def loss_factor(self) -> float:
        """Return the factor of the loss in the chunks' backwards, by which gradients are divided later."""
        return 1.0

    def autograd_inputs(self, leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the inputs of a step's node: as `Sweep.autograd_inputs`."""
        return [*leaves]

    def hand_over(self, gradients: Gradients) -> None:
        """Take the gradients that autograd cannot hand to parameters out of the sums, and hand them over."""

    def refuse_precision(self, executor: Executor, has_backward: bool) -> None:
        """Raise a UserError if an executor's precision does not go with these weights."""

    def loss_and_gradients(
        self, parameters: Sequence[Tensor], compute_loss: Callable[[], Tensor]
    ) -> tuple[float, dict[Tensor, Tensor]]:
        """Return a loss and gradients, reduced in a backward of the model's own parameters."""
        with self.collected(trained_parameters(self)) as by_parameter:
            loss = compute_loss()
            if loss.requires_grad:
                self.backpropagate(loss)
        return float(loss.detach()), by_parameter

    def backpropagate(self, loss: Tensor) -> None:
        """Backpropagate a loss, adding to the gradients of the model's own parameters alone."""
        model_parameters = self.running_parameters() | set(self.root.parameters())
        others = [t for t in leaves_of([loss]) if t not in model_parameters]
        with suspend_hooks(others):
            loss.backward(retain_graph=bool(others))  # for the call that follows

    def sweep(self, backward_context: ContextFactory = contextlib.nullcontext) -> Sweep:
        return GatheredSweep(self)  # chunks run back inside the forward: nothing has changed since


class GatheredSweep(Sweep):
    """A step over gathered weights, whose forward computes the gradients, and whose backward multiplies them
    by the loss's factor.

    The layers of a `Stack` run as one stage by any method: to what shards the stack, a chunk is a forward of
    it."""

    runs_back_in_forward: ClassVar[bool] = True
    stage: ShardedModelStage
    parts: Sequence[Stage]
    layers: Sequence[Layer]

    def __init__(self, weights: GatheredWeights) -> None:
        super().__init__()
        self.weights = weights
        self.gradients_of_forward: dict[Tensor, Tensor] | None = None
        self.factor = 1.0  # of the loss, in these gradients
        self.d_initial: list[Tensor | None] = []

    def arrange(
        self,
        stages: Sequence[Stage | None],
        states: Sequence[State],
        runs: Sequence[int],
        segment_layers: int | None,
    ) -> tuple[list[Stage | None], Sequence[State]]:
        self.parts = [stage for stage in stages if stage is not None]
        self.layers = [stage for stage in self.parts if isinstance(stage, Layer)]
        if self.layers:
            stages, states = as_runs(stages, states, [0] * len(stages))
        first, *others = stages
        assert first is not None
        self.stage = ShardedModelStage(first, self.weights)
        return [self.stage, *others], states

    def verify(
        self,
        stages: Sequence[Stage | None],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        distribution: Distribution,
    ) -> None:
        """Compare a stack's gradients by chunks with those of plain autograd, on first use.

        A stack has layers that need not be ours; other models are verified by what wraps them."""
        if not self.layers:
            return
        device, group = batch.ids.device, SINGLE_RANK if distribution.shares_sequence else None
        model = self.weights.model
        dtype = next(model.parameters()).dtype
        kind = (*(custom_layers.kind_of(layer, dtype, device) for layer in self.layers), group)
        verified = verified_kinds(model)
        if kind in verified or not torch.is_grad_enabled():
            return
        parts, weights = self.parts, self.weights

        def step_of(batch: Batch, spec: EngineSpec) -> ChunkedStep:
            sweep = type(weights)(model).sweep()
            return ChunkedStep(parts, batch, spec, width, distribution=distribution_of(group), sweep=sweep)

        _verify_stack(weights, step_of, device)
        verified.add(kind)

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Refuse what cannot be done; return the spec with as many chunks as any process has.

        Raises:
            UserError: processes that have shards of the same weights are at different places of their groups.
        """
        weights = self.weights
        if distribution.shares_sequence:
            place, group_size = distribution.worker, distribution.ranks
            low, high, fewest, most = weights.largest(-place, place, -group_size, group_size)
            if -low != high or -fewest != most:
                raise UserError(
                    "sequence_group: processes that have shards of the same weights must have the same "
                    "rank in their groups, and the groups one size: make both from one mesh, "
                    '("data", "sequence")'
                )
        self.begin_in_turn(batch, spec, distribution)
        if spec.storage.checkpoints is not None and weights.largest(len(spec.documents))[0] > 1:
            raise UserError(
                f"checkpoints= computes states again from the start of a document, but under {weights.name} "
                "all processes must run the same chunks, and their documents differ: leave it out, or give "
                "one document per row"
            )
        weights.rest()
        return align_chunks(weights, batch, spec)

    def begin_in_turn(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Refuse what cannot be done.

        Weights stay where they are: put to rest, they would be gathered once more than elsewhere."""
        backward = spec.backward
        if backward.window is not None or backward.drop_probability or backward.dy_from != "above":
            raise UserError(
                f"Truncated and LayerLocal do not run on a stack under {self.weights.name}: use Exact()"
            )
        refuse_budget(spec.storage.memory, f"under {self.weights.name} all processes")
        return spec

    def check(self, executor: Executor, has_backward: bool) -> None:
        self.weights.refuse_precision(executor, has_backward)

    def gradients(self, parameters: Sequence[Tensor], has_backward: bool, is_alone: bool) -> Gradients:
        left_to_autograd = self.weights.running_parameters() | set(parameters)
        return _AutogradGradients(
            UnlistedLeaves(left_to_autograd=left_to_autograd, open=has_backward and is_alone)
        )

    def autograd_inputs(self, leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        return self.weights.autograd_inputs(leaves, device)

    def collected(
        self, parameters: Sequence[Tensor], has_work: bool
    ) -> contextlib.AbstractContextManager[dict[Tensor, Tensor]]:
        return self.weights.collected(parameters, has_work)

    def cotangents(
        self, loss: Tensor, final: Sequence[Tensor], sums: Sequence[Sum], start_of_last: int | None
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        self.stage.start_of_last = start_of_last
        states = len(final) - len(sums)
        totals = zip(sums, final[states:], strict=True)
        d_sums = [sequence_sum.cotangent_of(total) for sequence_sum, total in totals]
        factor = self.factor = self.weights.loss_factor()
        d_final = [*[None] * states, *(None if d is None else d * factor for d in d_sums)]
        return torch.full_like(loss, factor), d_final

    def keep(
        self,
        gradients: dict[Tensor, Tensor],
        others: Mapping[Tensor, Tensor],
        d_initial: list[Tensor | None],
        parameters: Sequence[Tensor],
        distribution: Distribution,
    ) -> None:
        if distribution.shares_sequence:  # sum over the group
            terms = [gradients.get(p) for p in parameters]
            totals = distribution.summed(terms, lambda i: torch.zeros_like(parameters[i]))
            gradients |= {p: t for p, t in zip(parameters, totals, strict=True) if t is not None}
        self.gradients_of_forward, self.d_initial = {**gradients, **others}, d_initial

    def scaled(
        self, d_loss: Tensor | None, d_final: Sequence[Tensor | None], sums: Sequence[Sum]
    ) -> tuple[Gradients, list[Tensor | None]]:
        states, name = len(d_final) - len(sums), self.weights.name
        if any(d is not None for d in d_final[:states]):
            raise UserError(
                f"under {name} gradients are computed before the final state's is known: detach the final "
                "state"
            )
        if self.gradients_of_forward is None:
            raise RuntimeError(f"under {name} a loss can be backpropagated only once")
        scaled, unscaled, self.gradients_of_forward = Gradients(), self.gradients_of_forward, None
        scale = 0.0 if d_loss is None else float(d_loss) / self.factor
        high, low = self.weights.largest(scale, -scale)
        if high != -low:
            raise UserError(
                f"the loss is multiplied by {-low:g} on one process and by {high:g} on another, but its "
                "gradients are averaged already: give num_items_in_batch to the model instead"
            )
        for sequence_sum, d in zip(sums, d_final[states:], strict=True):
            assert sequence_sum.cotangent is not None
            expected = scale * sequence_sum.cotangent
            if not torch.allclose(
                torch.zeros_like(expected) if d is None else d, expected, rtol=1e-4, atol=0
            ):
                raise UserError(
                    f"under {name} aux_loss has the factor that it has in the model's loss: backpropagate "
                    "that loss, not aux_loss by itself or with another factor"
                )
        for p in list(unscaled):
            scaled.sums[p] = unscaled.pop(p).mul_(scale)
        self.weights.hand_over(scaled)
        return scaled, [None if d is None else d * scale for d in self.d_initial]


def align_chunks(weights: Weights, batch: Batch, spec: EngineSpec) -> EngineSpec:
    """Return the spec with the most chunks of any process: all gather weights per chunk.

    Raises:
        UserError: one process has more chunks than another's sequence can be divided into.
    """
    cuts = list(spec.cuts(batch.seqlen))
    possible = sum(max(1, (stop - start) // spec.least) for start, stop in itertools.pairwise(cuts))
    most_chunks, negative_limit = weights.largest(len(cuts) - 1, -possible)
    if most_chunks > -negative_limit:
        raise UserError(
            f"one process has {most_chunks:.0f} chunks, and another's sequence can be divided into "
            f"{-negative_limit:.0f} at most: give the processes sequences of more "
            "similar lengths, or a larger chunk_size"
        )
    while len(cuts) - 1 < most_chunks:
        size, start = max((stop - start, start) for start, stop in itertools.pairwise(cuts))
        # by whole multiples of the least: halves of 3 tokens would be 1 and 2, of which 1 is too few
        cuts = sorted([*cuts, start + size // 2 // spec.least * spec.least])
    return dataclasses.replace(spec, cut_at=tuple(cuts[1:-1]))


class FSDPWeights(GatheredWeights):
    """Weights that FSDP2 gathers."""

    name: ClassVar[str] = "fully_shard"

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return uses_fsdp(model)

    def rest(self) -> None:
        reshard(self.root)

    def running_parameters(self) -> set[Tensor]:
        return gathered_parameters(self.root)

    def run(self, call: Callable[[], T]) -> T:
        return Gathering(self.root)(call)

    def run_backward(self, call: Callable[[], T], is_last: bool) -> T:
        set_all_reduce(self.root, is_last)
        return call()

    @contextlib.contextmanager
    def collected(
        self, parameters: Sequence[Tensor], has_work: bool = True
    ) -> Iterator[dict[Tensor, Tensor]]:
        try:
            with collected_gradients(self.root, parameters, has_work) as by_parameter:
                yield by_parameter
            refuse_gradients_left_out(self.root)
        finally:
            set_all_reduce(self.root, True)

    def begin_plain_call(self) -> dict[Tensor, Tensor]:
        # overrides set_requires_gradient_sync(False): unreduced gradients would count for a later call
        for unit in units(self.root) if "_adjoint_run" not in vars(self.root) else ():
            unit.set_requires_gradient_sync(True, recurse=False)
        return {}

    def largest(self, *values: float) -> list[float]:
        mesh = mesh_of(self.model)
        maxima = torch.tensor(values, dtype=torch.float64, device=mesh_device(mesh))
        for dim in range(mesh.ndim):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return maxima.tolist()

    def why_not_shared(self, group: object) -> str | None:
        """Return why the ranks of a group cannot share a sequence of a sharded model; None if they can.

        A layer's weights are gathered by all processes that have a shard of it at the same time, so these
        must run the same chunks: they must be ranks of different groups."""
        members = set(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else set()
        meshes = (set(p.device_mesh.mesh.flatten().tolist()) for p in dtensors(self.model))
        return UNDER_FSDP if any(len(members & mesh) > 1 for mesh in meshes) else None

    def refuse_precision(self, executor: Executor, has_backward: bool) -> None:
        dtypes = {p.dtype for p in self.running_parameters()} | {executor.lowest_precision}
        if has_backward and (torch.float16 in dtypes or executor.autocast == (True, torch.float16)):
            raise UserError(
                "float16 under fully_shard: gradients are computed before a GradScaler has scaled the "
                "loss, so that small ones would be lost; use bfloat16"
            )


class FSDPUnitWeights(Weights):
    """Weights of a model for which alone `fully_shard` was called: they are there for the time of a call."""

    name: ClassVar[str] = "fully_shard"
    can_copy: ClassVar[bool] = False

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return bool(units(model)) and not uses_fsdp(model)


@full_float32()
def _verify_stack(
    weights: GatheredWeights, step_of: Callable[[Batch, EngineSpec], ChunkedStep], device: torch.device
) -> None:
    """Refuse a stack whose gradients of a few tokens by chunks, in any process, are not plain autograd's."""
    stack: Any = weights.model
    parameters = trained_parameters(weights)
    names = [name for name, p in stack.named_parameters() if p.requires_grad]
    layers = {f"layers.{k}": layer for k, layer in enumerate(stack.layers)}
    ids = torch.arange(TOKENS, device=device)[None] % stack.config.vocab_size

    def loss_by_chunks() -> Tensor:
        batch = Batch.from_labels(ids, ids, states=stack.stage_states(stack.initial_state(1)))
        return step_of(batch, EngineSpec(custom_layers.CHUNK_SIZE)).loss().loss

    def loss_by_autograd() -> Tensor:
        return weights.run(lambda: type(stack).forward(stack, ids, labels=ids).loss)

    def results(compute_loss: Callable[[], Tensor]) -> Results:
        with recorded_outputs(layers) as hidden_states:
            loss, grads = weights.loss_and_gradients(parameters, compute_loss)
        by_name = {name: grads.get(p) for name, p in zip(names, parameters, strict=True)}
        return Results(by_name, loss, hidden_states=hidden_states)

    def run_whole(is_rounded: bool) -> Results:
        rounded = embeddings_rounded(stack.embedding) if is_rounded else contextlib.nullcontext()
        with rounded:
            return results(loss_by_autograd)

    limit = tolerance([*precisions(weights)], device)
    trial = Trial(
        f"a stack under {weights.name}",
        custom_layers.CUSTOM_LAYER,
        lambda: results(loss_by_chunks),
        limit,
        each_gradient=limit != COARSE,
        named_parameters=stack.named_parameters,
        run_whole=run_whole if limit == COARSE else None,
        largest_over_ranks=weights.largest,
    )
    verify(trial, results(loss_by_autograd))
